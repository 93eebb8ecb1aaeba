"""Runs `lockstep verify CONFIG …` and `lockstep verify SCRIPT.py …`: parses, proves, prints.

Tests: tests/verify/test_command.py, tests/verify/test_script.py
"""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.config import Config, load_config, require_runnable
from lockstep.errors import EXIT_DONE, EXIT_FAILED, UsageError
from lockstep.launch.spawn import spawn_again
from lockstep.machine.scratch import temporary
from lockstep.prepared import fork_server
from lockstep.report.page import require_replaceable
from lockstep.verify import text
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.configs import Start
from lockstep.verify.launchers import PlainScript
from lockstep.verify.page import write_page
from lockstep.verify.proof import DEFAULT_STEPS, require_startable, verify
from lockstep.verify.script.judge import judge_script
from lockstep.verify.script.runs import libraries_of, runs_of

_DEFAULT_STEPS_OF_SCRIPT = 3


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    path: str | Path,
    overrides: Sequence[str],
    *,
    against: str | None,
    steps: int | None,
    in_json: bool,
    page: Path | None = None,
) -> int:
    """Verify what a config trains; return 0 if all topologies take the same steps, else 1."""
    if page is not None:
        require_replaceable(page)  # before minutes of work
    config = load_config(path, overrides)
    fork_server.split_off(compiles=True)
    require_runnable(config)
    topologies = (
        None if against is None else [part.strip() for part in against.split(",") if part.strip()]
    )
    start = starter_of([config])
    verdict = verify(
        config,
        topologies,
        steps=DEFAULT_STEPS if steps is None else steps,
        start=start,
        report=_report,
    )
    print(text.config_json(verdict) if in_json else text.config_text(verdict))
    if page is not None:
        rows = text.rows(verdict.outcomes, of_script=False)
        write_page(
            page,
            f"verify {path}",
            text.HEADINGS,
            rows,
            text.drawn(verdict.outcomes, of_script=False),
        )
    return EXIT_DONE if verdict.passed else EXIT_FAILED


def starter_of(configs: Sequence[Config]) -> Start:
    """Return what starts ranks of configs, with what they import loaded once.

    Only in a command: a script that calls `verify` may read its rank's variables when it is
    imported, which a fork inherits.
    """
    needed = ["torch.distributed.pipelining", "lockstep.verify.worker"]
    if any((config.model.name or "").startswith("hf:") for config in configs):
        needed.append("lockstep.models.hf")
    return partial(spawn_again, preload=needed)


# ---- scripts ----


def run_script(
    script: str | PlainScript,
    arguments: Sequence[str],
    *,
    ranks: str | None,
    steps: int | None,
    in_json: bool,
    page: Path | None = None,
) -> int:
    """Verify a training script; return 0 if the ranks train what one process trains, else 1.

    `script` is its file, a command that starts it, or what it is without its launcher. `arguments`
    are those of a file, in which `{n}` stands for the number of ranks; `ranks` is
    written as `2,4`.
    """
    if page is not None:
        require_replaceable(page)
    words = [word.strip() for word in (ranks or "2").split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        fix = (
            "write --nproc-per-node 1,2,4; topologies such as ddp:2 are for configs, a script"
            " chooses its own"
        )
        raise UsageError(f"{ranks!r} is not a list of numbers of ranks", fix=fix)
    numbers = sorted({int(word) for word in words} - {1})
    if not numbers:
        raise UsageError(
            "one process is what others are compared with", fix="write --nproc-per-node 1,2"
        )
    file = script.file if isinstance(script, PlainScript) else script
    fork_server.split_off(compiles=True, also=libraries_of(file))
    outcomes = verify_script(
        script, arguments, numbers, steps=_DEFAULT_STEPS_OF_SCRIPT if steps is None else steps
    )
    shown = script.shown if isinstance(script, PlainScript) else script
    print(text.script_json(shown, outcomes) if in_json else text.script_text(shown, outcomes))
    if page is not None:
        rows = text.rows(outcomes, of_script=True)
        write_page(
            page,
            f"verify {text.as_run(shown, outcomes)}",
            text.SCRIPT_HEADINGS,
            rows,
            text.drawn(outcomes, of_script=True),
        )
    return EXIT_DONE if all(outcome.passed for outcome in outcomes) else EXIT_FAILED


def verify_script(
    script: str | PlainScript, arguments: Sequence[str], ranks: Sequence[int], *, steps: int
) -> list[Outcome]:
    """Compare a script, or a command, on several ranks with one process.

    In a command, `{n}` stands for the number of ranks.
    """
    if isinstance(script, str):
        is_command = len(script.split()) > 1
        _require_verifiable(script, is_command=is_command)
        if not is_command:
            script = PlainScript(script, tuple(arguments))
    require_startable(steps)
    outcomes = []
    for number in ranks:
        with temporary("verify-script") as folder:
            outcomes.append(judge_script(runs_of(script, steps, folder, _report), number))
    return outcomes


def _require_verifiable(script: str, *, is_command: bool) -> None:
    """Raise UsageError if a command has no place for a number of ranks, or there is no script."""
    if is_command and not re.search(r"\{(\d+/)?n\}", script):
        raise UsageError(
            f"the command {script!r} has no {{n}}, which stands for the number of ranks",
            fix=(
                'write it, as in lockstep verify "torchrun --nproc-per-node {n} train.py"'
                " --ranks 1,2"
            ),
        )
    if not is_command and not Path(script).is_file():
        raise UsageError(f"there is no script {script}", fix="name a Python file that trains")
