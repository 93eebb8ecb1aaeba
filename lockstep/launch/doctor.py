"""Implements `lockstep doctor`.

It starts ranks as `lockstep train` would, checks each one, and prints the results.

Tests: tests/diagnose/test_doctor.py, tests/diagnose/test_ports.py
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.diagnose import BAD, GOOD, WARN, Finding
from lockstep.errors import EXIT_DONE, EXIT_FAILED
from lockstep.launch.launcher import LaunchJob, launch
from lockstep.launch.options import LaunchOptions, process_count
from lockstep.launch.roles import in_this_process, is_rank, prepare
from lockstep.launch.worker import run_as_worker
from lockstep.machine.environment import rank_facts
from lockstep.machine.scratch import temporary
from lockstep.prepared import warm

# set for the ranks: the launcher's folder, in which `_GOOD` means that no check failed
_FOLDER = "LOCKSTEP_DOCTOR"
_GOOD = "good"


def doctor(
    config: Path | None,
    overrides: Sequence[str],
    options: LaunchOptions,
    *,
    output_dir: Path,
    as_json: bool,
    argv: Sequence[str],
) -> int:
    """Run `lockstep doctor`; return 1 if a check failed.

    Ranks compare the `config`, and test `output_dir`'s disk.
    """
    launchers = os.environ.get(_FOLDER)

    def check() -> int:
        good = _run_checks(config, overrides, output_dir, as_json)
        if launchers is not None:  # it prints no failure of a rank: the findings are printed
            if good and rank_facts().local_rank == 0:
                Path(launchers, _GOOD).touch()
            return EXIT_DONE
        return EXIT_DONE if good else EXIT_FAILED

    if launchers is not None:
        return run_as_worker(check, logs=Path(launchers, "logs"))
    if is_rank(options):
        with temporary("doctor") as folder:
            return run_as_worker(check, logs=folder / "logs")
    fresh = prepare(options, may_be_alone=True)
    with temporary("doctor") as folder:
        logs = folder / "logs"
        processes, reason = process_count(options)
        if not as_json:
            print(f"lockstep: doctor: {processes} rank(s) on this machine ({reason})", flush=True)
        if in_this_process(processes, options):
            return run_as_worker(check, logs=logs, launched=False)
        job = LaunchJob(
            ("-m", "lockstep", "doctor", *argv), logs, {_FOLDER: str(folder)}, fresh=fresh
        )
        code = launch(job, options, processes)
        return code or (EXIT_DONE if (folder / _GOOD).exists() else EXIT_FAILED)


def _run_checks(
    path: Path | None, overrides: Sequence[str], output_dir: Path, as_json: bool
) -> bool:
    """Run the checks of one rank, print them on rank 0, and return whether none failed on any."""
    from lockstep.diagnose.doctor import examine

    config = None
    if path is not None:
        from lockstep.config import load_config

        config = load_config(path, overrides)
    lines: list[Finding] = []

    def show(line: Finding) -> None:
        lines.append(line)
        if not as_json:
            print(line, flush=True)

    prepared = warm.status() if rank_facts().is_main else None
    if prepared is not None:
        show(Finding(GOOD, "warm process", str(prepared)))
    good = examine(output_dir, show, config)
    if rank_facts().is_main:
        bad, warn = (sum(line.status == status for line in lines) for status in (BAD, WARN))
        text = f"✓ all {len(lines)} checks passed, {warn} with warnings"
        if bad:
            text = f"✗ {bad} of {len(lines)} checks failed, {warn} warnings"
        findings = [line.as_dict() for line in lines]
        print(
            json.dumps({"good": good, "lines": findings}, ensure_ascii=False) if as_json else text
        )
    return good
