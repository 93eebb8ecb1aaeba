"""Implements `lockstep doctor`: starts ranks as `lockstep train` would, checks each one, and prints the results.

A rank is `python -m lockstep.launch.doctor FOLDER REQUEST`; only this machine's launcher uses FOLDER.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.diagnose import BAD, WARN, Finding
from lockstep.errors import EXIT_DONE, EXIT_FAILED
from lockstep.launch.options import LaunchOptions, process_count
from lockstep.launch.train import LaunchJob, in_this_process, is_rank, launch
from lockstep.launch.worker import run_as_worker
from lockstep.scratch import temporary

_VERDICT = "verdict.json"


@dataclass(frozen=True)
class DoctorRequest:
    """The scope of `lockstep doctor`.

    Attributes:
        output_dir: the run directory whose disk is tested.
        config: a config file, to be compared between ranks; or None.
        overrides: the config's overrides.
        as_json: print one JSON object instead of lines.
    """

    output_dir: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    as_json: bool = False


def doctor(request: DoctorRequest, options: LaunchOptions) -> int:
    """Run `lockstep doctor`.

    Returns:
        the exit code: 0, or 1 if a check failed.
    """
    with temporary("doctor") as path:
        folder = str(path)
        logs = Path(folder, "logs")
        if is_rank(options):
            code = run_as_worker(lambda: _run_checks(request, Path(folder)), logs=logs)
        else:
            processes, reason = process_count(options)
            if not request.as_json:
                print(f"lockstep: doctor: {processes} rank(s) on this machine ({reason})", flush=True)
            if in_this_process(processes, options):
                code = run_as_worker(lambda: _run_checks(request, Path(folder)), logs=logs, launched=False)
            else:
                arguments = ("-m", "lockstep.launch.doctor", folder, json.dumps(asdict(request)))
                code = launch(LaunchJob(arguments, logs), options, processes)
        if code:
            return code
        good = json.loads(Path(folder, _VERDICT).read_text())
        return EXIT_DONE if good else EXIT_FAILED


def _run_checks(request: DoctorRequest, folder: Path) -> None:
    from lockstep.diagnose.doctor import examine
    from lockstep.environment import rank_facts

    config = None
    if request.config is not None:
        from lockstep.config import load_config

        config = load_config(Path(request.config), request.overrides)
    device, backend = (config.distributed.device, config.distributed.backend) if config else ("auto", "auto")
    lines: list[Finding] = []

    def show(line: Finding) -> None:
        lines.append(line)
        if not request.as_json:
            print(line, flush=True)

    good = examine(Path(request.output_dir), show, config=config, device=device, backend=backend)
    if rank_facts().is_main:
        print(_as_json(lines, good) if request.as_json else _summary(lines), flush=True)
    if rank_facts().local_rank == 0:
        (folder / _VERDICT).write_text(json.dumps(good))


def _as_json(lines: Sequence[Finding], good: bool) -> str:
    return json.dumps({"good": good, "lines": [line.as_dict() for line in lines]}, ensure_ascii=False)


def _summary(lines: Sequence[Finding]) -> str:
    bad, warn = (sum(line.status == status for line in lines) for status in (BAD, WARN))
    if bad:
        return f"✗ {bad} of {len(lines)} checks failed, {warn} warnings"
    return f"✓ all {len(lines)} checks passed, {warn} with warnings"


def main() -> int:
    """Run the checks of one rank, and return the exit code."""
    folder, request = Path(sys.argv[1]), DoctorRequest(**json.loads(sys.argv[2]))
    return run_as_worker(lambda: _run_checks(request, folder), logs=folder / "logs")


if __name__ == "__main__":
    sys.exit(main())
