"""Puts the number of ranks to verify into a command as people type it.

    torchrun --nproc-per-node 8 train.py → torchrun --nproc-per-node {n} train.py
    accelerate launch train.py --lr 1    → accelerate launch --num_processes {n} train.py --lr 1
    python -m package.train              → python -m torch.distributed.run --standalone
                                           --nproc-per-node {n} -m package.train

Loads without torch.

Tests: tests/verify/test_launchers.py
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lockstep.errors import UsageError


@dataclass(frozen=True)
class _Launcher:
    """A program that starts ranks: the words it begins with, and its options for their number."""

    words: str
    options: tuple[str, ...]  # the first is written where none is given


_OF_TORCH = ("--nproc-per-node", "--nproc_per_node")
_OF_ACCELERATE = ("--num_processes", "--num-processes")
_OF_MPI = ("-np", "-n", "--np", "--n")
_LAUNCHERS = (
    _Launcher("torchrun", _OF_TORCH),
    _Launcher("python -m torch.distributed.run", _OF_TORCH),
    _Launcher("python -m torch.distributed.launch", _OF_TORCH),
    _Launcher("lockstep launch", _OF_TORCH),
    _Launcher("python -m lockstep launch", _OF_TORCH),
    _Launcher("accelerate launch", _OF_ACCELERATE),
    _Launcher("accelerate-launch", _OF_ACCELERATE),
    _Launcher("python -m accelerate.commands.launch", _OF_ACCELERATE),
    _Launcher("fabric run", ("--devices",)),
    _Launcher("deepspeed", ("--num_gpus",)),
    _Launcher("mpirun", _OF_MPI),
    _Launcher("mpiexec", _OF_MPI),
)
# What starts a script with nothing of its own but variables, in the order in which it is looked
# for, and the options that need no launcher: name → number of values.
_PLAIN_OF_TORCH = {**dict.fromkeys(_OF_TORCH, 1), "--standalone": 0}
_PLAIN_OF_ACCELERATE = {
    **dict.fromkeys(_OF_ACCELERATE, 1),
    "--cpu": 0,
    "--multi_gpu": 0,
    "--multi-gpu": 0,
    "--mixed_precision": 1,
    "--mixed-precision": 1,
    "--main_process_port": 1,
    "--main-process-port": 1,
}
_PLAIN: dict[str, dict[str, int]] = {
    "torchrun": _PLAIN_OF_TORCH,
    "python -m torch.distributed.run": _PLAIN_OF_TORCH,
    "accelerate launch": _PLAIN_OF_ACCELERATE,
    "accelerate-launch": _PLAIN_OF_ACCELERATE,
    "python -m accelerate.commands.launch": _PLAIN_OF_ACCELERATE,
    "python": {},
}
_MODULE = ("-m", "--module")
_HOSTS = ("--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--num-nodes")
_OF_PYTHON = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{n}"]


def with_ranks(words: Sequence[str]) -> tuple[str, int | None]:
    """Return a command with `{n}` for its number of ranks, and the number that it had.

    A command that starts a single process of Python is started by torch's launcher. One that holds
    `{n}` already stays as it is.

    Raises UsageError: nothing tells how it is given a number of ranks, or it is for several hosts.
    """
    variables = 0
    while variables < len(words) and re.match(r"[A-Za-z_]\w*=", words[variables]):
        variables += 1
    before = ["env", *words[:variables]] if variables else []
    command = list(words[variables:])
    if any(re.search(r"\{(\d+/)?n\}", word) for word in command):
        return shlex.join([*before, *command]), None
    launcher = next(
        (known for known in _LAUNCHERS if _begins_with(command, known.words.split())), None
    )
    if launcher is None:
        if not command or not _is_python(command[0]):
            raise UsageError(
                "nothing tells how many ranks the command starts",
                where=shlex.join(words),
                fix="write {n} where the number of ranks stands, as in"
                " lockstep verify --ranks 1,2 -- ./train.sh {n}",
            )
        return shlex.join([*before, command[0], *_OF_PYTHON, *command[1:]]), None
    begin = len(launcher.words.split())
    end = _end_of_options(command, begin)
    _refuse_hosts(command[begin:end], words)
    for at in range(begin, end):
        name, equals, value = command[at].partition("=")
        if name not in launcher.options:
            continue
        if equals:
            command[at] = f"{name}={{n}}"
        else:
            value = "".join(command[at + 1 : at + 2])
            command[at + 1 : at + 2] = ["{n}"]
        return shlex.join([*before, *command]), int(value) if value.isdecimal() else None
    command[begin:begin] = [launcher.options[0], "{n}"]
    return shlex.join([*before, *command]), None


@dataclass(frozen=True)
class PlainScript:
    """A script that starts without its launcher, with what this would give it.

    Ranks of a script are started from processes that have torch loaded already, within a second; a
    launcher and its ranks load it once each.

    Attributes:
        file: of the script.
        arguments: of the script.
        module: its name, where it is run as `python -m` runs it; else empty.
        accelerate: the options of `accelerate launch` but those for the number of ranks; None: it
            is not started so.
    """

    file: str
    arguments: tuple[str, ...] = ()
    module: str = ""
    accelerate: tuple[str, ...] | None = None

    @property
    def shown(self) -> str:
        """The script as it is called in a verdict."""
        return f"python -m {self.module}" if self.module else self.file


def plain_script(words: Sequence[str]) -> PlainScript | None:
    """Return the script of a command that needs no launcher here.

    None if the command asks for anything else than a number of ranks and what `accelerate launch`
    writes into variables, or is of another environment.
    """
    known = next((known for known in _PLAIN if _begins_with(words, known.split())), None)
    if known is None or any("{" in word for word in words) or not _is_here(words[0]):
        return None
    is_launched = any(_begins_with(words, launcher.words.split()) for launcher in _LAUNCHERS)
    if known == "python" and is_launched:
        return None
    options: list[str] = []
    at = len(known.split())
    while at < len(words) and not words[at].endswith(".py") and words[at] not in _MODULE:
        name, equals, _ = words[at].partition("=")
        if name not in _PLAIN[known]:
            return None
        end = at + 1 + (0 if equals else _PLAIN[known][name])
        if name not in (*_OF_ACCELERATE, "--multi_gpu", "--multi-gpu"):
            options += words[at:end]
        at = end
    is_module = at < len(words) and words[at] in _MODULE
    script, *arguments = [*words[at + is_module :]] or [""]
    file = _file_of_module(script) if is_module else Path(script)
    if file is None or not file.is_file():
        return None
    of_accelerate = _PLAIN[known] is _PLAIN_OF_ACCELERATE
    if of_accelerate and _has_config_of_accelerate():
        return None
    return PlainScript(
        str(file),
        tuple(arguments),
        script if is_module else "",
        tuple(options) if of_accelerate else None,
    )


def _file_of_module(name: str) -> Path | None:
    """Return the file that `python -m` runs for a module; None if it is in none.

    Packages above it are not imported, which may load torch.
    """
    for folder in (Path(), *map(Path, sys.path)):
        module = folder.joinpath(*name.split("."))
        for file in (module / "__main__.py", module.with_suffix(".py")):
            if name and file.is_file():
                return file
    return None


def _has_config_of_accelerate() -> bool:
    """Return whether `accelerate config` has written what its launcher is to do."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    return any(Path(home).expanduser().glob("accelerate/default_config.*"))


def _is_here(program: str) -> bool:
    """Return whether a program is one of the environment that runs this."""
    found = shutil.which(program)
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", PurePath(word).name) is not None


def _begins_with(command: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a command begins with these words, wherever its programs are."""
    if len(command) < len(words):
        return False
    first = "python" if _is_python(command[0]) else PurePath(command[0]).name
    return [first, *command[1 : len(words)]] == list(words)


def _end_of_options(command: Sequence[str], begin: int) -> int:
    """Return where the script stands, whose own options are not the launcher's.

    It is the first word that ends in `.py`, or the `-m` of a module.
    """
    for at in range(begin, len(command)):
        if command[at].endswith(".py") or command[at] in _MODULE:
            return at
    return len(command)


def _refuse_hosts(options: Sequence[str], words: Sequence[str]) -> None:
    """Raise UsageError if a launcher is told to start ranks on several hosts."""
    for at, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name in _HOSTS:
            number = value if equals else " ".join(options[at + 1 : at + 2])
            if number not in ("1", "1:1"):
                raise UsageError(
                    f"{name} {number} is for several hosts, and verify runs the command on this"
                    " one",
                    where=shlex.join(words),
                    fix=f"leave {name} out",
                )
