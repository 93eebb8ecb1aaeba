"""Runs `lockstep compare A B`: two configs, scripts or commands that should be the same training.

Tests: tests/verify/test_pair.py
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import Config, load_config, require_runnable
from lockstep.errors import EXIT_DONE, EXIT_FAILED, UsageError
from lockstep.machine.scratch import temporary
from lockstep.prepared import fork_server
from lockstep.verify import text
from lockstep.verify.command import starter_of
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.config_pair import compare_configs, losses_of_configs
from lockstep.verify.launchers import PlainScript, plain_script, with_ranks
from lockstep.verify.proof import require_startable
from lockstep.verify.script.pairs.losses import PairedLosses
from lockstep.verify.script.pairs.pair import compare_scripts, paired_losses
from lockstep.verify.script.runs import Runs, runs_of

STEPS = 5
PAIRED_STEPS = 30  # where the losses are compared


@dataclass(frozen=True)
class Program:
    """A script, or a command in one word, as a word of `lockstep compare` names it."""

    script: str | PlainScript
    ranks: int | None  # the number that a command names

    @staticmethod
    def of(typed: str, arguments: Sequence[str]) -> "Program":
        """Return what one of the two words names."""
        words = shlex.split(typed)
        if words and words[0].endswith(".py"):
            if not Path(words[0]).is_file():
                raise UsageError(f"there is no script {words[0]}", fix="name a file that trains")
            return Program(PlainScript(words[0], (*words[1:], *arguments)), ranks=None)
        command, ranks = with_ranks([*words, *arguments])
        return Program(plain_script([*words, *arguments]) or command, ranks)

    def runs(self, name: str, steps: int, folder: Path) -> Runs:
        """Return its runs, in a folder of their own."""
        own = folder / name
        own.mkdir()
        return runs_of(self.script, steps, own, _report)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    a: str,
    b: str,
    more: Sequence[str],
    *,
    ranks: int | None,
    steps: int | None,
    paired: bool,
    in_json: bool,
) -> int:
    """Compare A with B; return 0 if they are the same training, or their losses are compared.

    `more` are settings of both configs, or arguments of both scripts.
    """
    configs = [Path(typed).suffix in (".yaml", ".yml") for typed in (a, b)]
    if any(configs) and not all(configs):
        raise UsageError("one of the two is a config, and the other is not", fix="compare like")
    if steps is None:
        steps = PAIRED_STEPS if paired else STEPS
    require_startable(steps)
    if all(configs):
        if ranks is not None:
            raise UsageError(
                "--ranks is for scripts: each config is trained by one process",
                fix="leave it out; lockstep verify CONFIG compares ranks with one process",
            )
        loaded = (load_config(a, more), load_config(b, more))
        fork_server.split_off(compiles=True)
        for config in loaded:
            require_runnable(config)
        return _of_configs((a, b), loaded, steps, paired=paired, in_json=in_json)
    programs = [Program.of(typed, more) for typed in (a, b)]
    fork_server.split_off(compiles=True)
    return _of_scripts((a, b), programs, ranks, steps, paired=paired, in_json=in_json)


def _of_configs(
    names: tuple[str, str],
    loaded: tuple[Config, Config],
    steps: int,
    *,
    paired: bool,
    in_json: bool,
) -> int:
    start = starter_of(loaded)
    with temporary("compare") as folder:
        if paired:
            losses, given = losses_of_configs(*loaded, steps, folder, start, _report)
            return _tell_losses(names, losses, given, in_json=in_json)
        outcome = compare_configs(*loaded, steps, folder, start, _report)
        return _tell(names, outcome, in_json=in_json)


def _of_scripts(
    names: tuple[str, str],
    programs: Sequence[Program],
    ranks: int | None,
    steps: int,
    *,
    paired: bool,
    in_json: bool,
) -> int:
    typed = {program.ranks for program in programs if program.ranks is not None}
    if ranks is None and len(typed) > 1:
        raise UsageError(
            "A and B are for different numbers of ranks",
            fix="--ranks N runs both on N; lockstep verify compares ranks with one process",
        )
    number = ranks or (typed.pop() if typed else 1)
    with temporary("compare") as folder:
        a, b = (
            program.runs(name, steps, folder)
            for program, name in zip(programs, ("a", "b"), strict=True)
        )
        if paired:
            losses, given = paired_losses(a, b, number, folder)
            return _tell_losses(names, losses, given, in_json=in_json)
        return _tell(names, compare_scripts(a, b, number, folder), in_json=in_json)


def _tell(names: tuple[str, str], outcome: Outcome, *, in_json: bool) -> int:
    print(text.pair_json(names, outcome) if in_json else text.pair_text(names, outcome))
    return EXIT_DONE if outcome.passed else EXIT_FAILED


def _tell_losses(
    names: tuple[str, str], losses: PairedLosses, given: Sequence[str], *, in_json: bool
) -> int:
    tell = text.losses_json if in_json else text.losses_text
    print(tell(names, losses, given))
    return EXIT_DONE
