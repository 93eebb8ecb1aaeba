"""The reference of the command line: what each verb prints for `--help`."""

import contextlib
import io
import os

from lockstep.cli import main
from lockstep.cli.verbs import VERBS

_DEEPER = {"data": ("show",), "submit": ("slurm", "kubernetes")}
_INTRODUCTION = """# Command line

`lockstep VERB --help` prints what stands here; this page is made from it. Options have torchrun's names where torchrun
has them, underscores equal dashes, and an option from elsewhere is answered with ours
([coming from other tools](../coming_from/index.md)). `source <(lockstep completion bash)` lets bash complete all of it;
`zsh` too.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed, or `verify` found a difference |
| 2 | the command or the config is wrong |
| 75 | preempted and saved: start it again, and it goes on |
"""


def page() -> str:
    parts = [_INTRODUCTION]
    for verb in VERBS:
        for words in ((verb,), *((verb, deeper) for deeper in _DEEPER.get(verb, ()))):
            parts.append(f"## lockstep {' '.join(words)}\n\n```text\n{help_of(words)}\n```\n")
    return "\n".join(parts)


def help_of(words: tuple[str, ...]) -> str:
    """What `lockstep WORDS --help` prints, 100 columns wide."""
    before = dict(os.environ)
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue().strip()
