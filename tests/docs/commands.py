"""Command lines of the documentation, read by the real parsers without being carried out."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Cheap, and true to run at once.
RUN = ("config", "completion", "init", "new-model")


def commands_in(script: str) -> Iterator[list[str]]:
    """The words of each `lockstep …` in a shell script, also behind a launcher (`torchrun … -m
    lockstep …`).

    A loop's variable stands for its first value, any other variable for 1.
    """
    text = re.sub(r"(^|\s)#.*$", "", script.replace("\\\n", " "), flags=re.MULTILINE)
    for name, first in re.findall(r"for (\w+) in (\S+?)[ ;]", text):
        text = re.sub(rf"\$\{{?{name}\b\}}?", first, text)
    text = re.sub(r"\$\(\([^)]*\)\)|\$\{?\w+\}?", "1", text)
    for words in _simple_commands(text):
        while words and re.match(r"(do|then|[A-Z_]+=.*)$", words[0]):
            words = words[1:]
        if words[:1] == ["lockstep"]:
            yield words[1:]
        for place in range(len(words) - 1):
            if words[place : place + 2] == ["-m", "lockstep"]:
                yield words[place + 2 :]


def _simple_commands(text: str) -> Iterator[list[str]]:
    """The commands between newlines and operators, without redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t"
    lexer.commenters = ""
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for token in lexer:
        if token in ("<", ">", ">>", "<<"):
            redirected = True
        elif set(token) <= set("();|&\n"):
            yield words
            words = []
            redirected = False
        elif not redirected:
            words.append(token)
    yield words


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the arguments, and the config that they name; run it where that is cheap.

    Raises:
        LockstepError: as the command would.
    """
    from lockstep.cli.verbs import VERBS

    if "--help" in words or words[:1] == ["--version"]:
        return
    verb = words[0]
    rest = words[1:]
    assert verb in VERBS, f"there is no verb {verb}"
    with monkeypatch.context() as patch:
        if verb not in RUN and not (verb == "submit" and "--dry-run" in rest):
            _stop_after_parsing(
                "data show" if [verb, *rest[:1]] == ["data", "show"] else verb, patch
            )
        code = VERBS[verb][0](rest)
    assert code == 0, f"lockstep {' '.join(words)}: exit code {code}"


def _stop_after_parsing(verb: str, patch: pytest.MonkeyPatch) -> None:
    """The function that a verb hands over to only looks at what it was given."""
    handed_to = {
        "train": ("lockstep.launch.train.train", _train),
        "launch": ("lockstep.launch.train.launch_script", _launch),
        "verify": ("lockstep.verify.command.run", _config_given),
        "compare": ("lockstep.verify.compare_command.run", _nothing),
        "plan": ("lockstep.plan.command.plan", _nothing),
        "submit": ("lockstep.submit.run", _submit),
        "jobs": ("lockstep.submit.jobs.run", _nothing),
        "checkpoint": ("lockstep.checkpoint.commands.run", _checkpoint),
        "report": ("lockstep.report.index.run", _nothing),
        "bench": ("lockstep.report.scaling.bench", _nothing),
        "top": ("lockstep.report.top.run", _nothing),
        "evaluate": ("lockstep.launch.evaluate.evaluate", _nothing),
        "sample": ("lockstep.evaluate.sample.sample", _nothing),
        "doctor": ("lockstep.launch.doctor.doctor", _nothing),
        "warm": ("lockstep.prepared.warm.start", _nothing),
        "data": ("lockstep.data.prepare.prepare", _prepared),
        "data show": ("lockstep.data.show.show", _nothing),
    }
    target, stand_in = handed_to[verb]
    patch.setattr(target, stand_in)


def _nothing(*_args: Any, **_options: Any) -> int:
    return 0


def _train(path: Path, overrides: list[str], options: Any, **_rest: Any) -> int:
    from lockstep.config import load_config, require_equation
    from lockstep.config.checks import require_runnable
    from lockstep.strategy import AUTO, REPLICAS, SINGLE, resolve

    config = load_config(path, overrides)
    require_runnable(config)
    ranks = str(getattr(options, "nproc_per_node", None) or "1")
    if (
        ranks.isdecimal()
        and getattr(options, "nnodes", "") == "1"
        and config.distributed.device == "auto"
    ):
        named = config
        if config.distributed.strategy == AUTO:
            named = config.replaced(
                {"distributed.strategy": REPLICAS if int(ranks) > 1 else SINGLE}
            )
        layout = resolve(named.distributed, int(ranks), int(ranks))
        require_equation(named.training, layout.batch_shares)
    return 0


def _config_given(path: Path, overrides: list[str], *, against: str | None, **_rest: Any) -> int:
    from lockstep.strategy import parse_topology

    for topology in (against or "ddp:2").split(","):
        parse_topology(topology)
    return _train(path, overrides, None)


def _launch(script: str, *_args: Any, kind: str, **_rest: Any) -> int:
    assert kind != "file" or Path(script).is_file(), f"there is no file {script}"
    return 0


def _submit(_scheduler: str, given: Any, path: Path, overrides: list[str], _options: Any) -> int:
    return _train(path, overrides, None)


def _checkpoint(verb: str, _path: Path, **options: Any) -> str:
    from lockstep.checkpoint.commands import _ACTIONS

    _, taken = _ACTIONS[verb]
    assert {name for name, value in options.items() if value is not None} <= set(taken)
    return ""


def _prepared(*_args: Any, **_options: Any) -> tuple[int, int]:
    return 1, 256
