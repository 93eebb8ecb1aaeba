"""Puts the number of ranks to verify into a command as people type it.

    torchrun --nproc-per-node 8 train.py → torchrun --nproc-per-node {n} train.py
    accelerate launch train.py --lr 1    → accelerate launch --num_processes {n} train.py --lr 1
    python -m package.train              → python -m torch.distributed.run --standalone
                                           --nproc-per-node {n} -m package.train

Loads without torch.

Tests: tests/verify/test_launchers.py
"""

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
# What starts a script without anything of its own, in the order in which they are looked for.
_OF_SCRIPTS = ("torchrun", "python -m torch.distributed.run", "python")
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


def plain_script(words: Sequence[str]) -> list[str] | None:
    """Return the script of a command, and its arguments, if torch's launcher alone starts it here.

    Ranks of a script are started from processes that have torch loaded already, within a second;
    a launcher and its ranks load it once each. None if the command asks for anything else than a
    number of ranks, runs a module, or is of another environment.
    """
    known = next((known for known in _OF_SCRIPTS if _begins_with(words, known.split())), None)
    if known is None or any("{" in word for word in words) or not _is_here(words[0]):
        return None
    at = len(known.split())
    while at < len(words) and not words[at].endswith(".py"):
        name, equals, _ = words[at].partition("=")
        if known == "python" or name not in (*_OF_TORCH, "--standalone"):
            return None
        at += 1 if equals or name == "--standalone" else 2
    script = [*words[at:]]
    return script if script and Path(script[0]).is_file() else None


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
        if command[at].endswith(".py") or command[at] in ("-m", "--module"):
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
