"""Starts ranks as forks of a prepared process, or as fresh processes where they can't be forks.

A command that starts several launchers starts these so, too.

Tests: tests/prepared/test_process.py
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.prepared.process import (
    CannotForkError,
    ForkedChild,
    ForkRequest,
    PreparedProcess,
    own_prepared_process,
    start,
)

# variables that `lockstep/verify/injected/sitecustomize.py` answers
_OBSERVED = ("LOCKSTEP_OBSERVED_RUN", "LOCKSTEP_WATCHED_TRAINING")


class RankStarter:
    """Starts the ranks of a launcher, or launchers.

    Args:
        prepared: whose forks they are; None: fresh processes.
        say: prints a line for the person who launched them.
        of_launchers: whether they are launchers: a terminal's signals are for them, too, and they
            make forks.
        restarts: whether they may be started again: forks are kept ready for that.
    """

    def __init__(
        self,
        prepared: PreparedProcess | None,
        say: Callable[[str], None],
        *,
        of_launchers: bool = False,
        restarts: bool = False,
    ) -> None:
        self._prepared = prepared
        self._say = say
        self._of_launchers = of_launchers
        self._restarts = restarts

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: Any, stderr: Any
    ) -> Any:
        """Start `python [-u] -m MODULE …`, a rank in a session of its own, as `Popen` does."""
        python, *words = command
        if self._prepared is not None and python == sys.executable:
            if words[0] == "-u":
                words = words[1:]
                environment = {**environment, "PYTHONUNBUFFERED": "1"}
            try:
                return ForkedChild(self._fork(words, environment, stdout, stderr))
            except CannotForkError as error:
                self._say(f"ranks are started as fresh processes: {error}")
                self._prepared = None
        return subprocess.Popen(
            command,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=not self._of_launchers,
        )

    def _fork(
        self, words: Sequence[str], environment: Mapping[str, str], stdout: Any, stderr: Any
    ) -> int:
        """Start a fork of the prepared process; return its process id."""
        assert self._prepared is not None
        _, module, *arguments = words
        request = ForkRequest(
            module=module,
            arguments=[str(word) for word in arguments],
            environment=dict(environment),
            folder=os.getcwd(),
            parent=os.getpid(),
            makes_forks=self._of_launchers,
            comes_again=self._restarts,
        )
        streams = [0 if stream is None else stream.fileno() for stream in (None, stdout, stderr)]
        for number in (1, 2):
            streams[number] = streams[number] or number
        return self._prepared.fork(request, streams)


@contextmanager
def rank_starter(
    fresh: str | None,
    say: Callable[[str], None],
    *,
    of_launchers: bool = False,
    restarts: bool = False,
) -> Iterator[RankStarter]:
    """Yield what starts the ranks; a prepared process imports meanwhile, and ends with the block.

    Args:
        fresh: why ranks must be fresh processes; None: they may be forks.
        say: prints a line for the person who launched them.
        of_launchers: whether it starts launchers, not ranks.
        restarts: whether ranks may be started again.
    """
    starter = partial(RankStarter, say=say, of_launchers=of_launchers, restarts=restarts)
    if fresh is not None:
        if fresh:
            say(f"ranks are started as fresh processes: {fresh}")
        yield starter(None)
        return
    own = own_prepared_process()
    if own is not None:
        try:
            yield starter(own)
        finally:
            own.end_ready_forks()
        return
    try:
        prepared = start()
    except CannotForkError:  # not on this system, ever: nothing to tell
        yield starter(None)
        return
    try:
        yield starter(prepared)
    finally:
        prepared.close()


def observes_itself() -> bool:
    """Return whether this process and its ranks are observed, each from its import of torch on.

    A fork would go on with what was seen, and asked, of the process that it is a fork of.
    """
    return any(name in os.environ for name in _OBSERVED)


def sets_variables(source: str) -> bool:
    """Return whether a script writes environment variables.

    Libraries may read them while they are imported, which a prepared process has done before.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    names = {"environ"}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="putenv") | ast.Attribute(attr="putenv")):
                return True
            case ast.Call(func=ast.Attribute(attr="update" | "setdefault" | "pop", value=of)):
                if _is_environment(of, names):
                    return True
            case ast.Subscript(value=of, ctx=ast.Store() | ast.Del()) if _is_environment(of, names):
                return True
            case ast.AugAssign(target=target) if _is_environment(target, names):
                return True
    return False


def _is_environment(node: ast.AST, names: set[str]) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in names) or (
        isinstance(node, ast.Name) and node.id in names
    )


def reason_of_script(script: str, kind: str) -> str | None:
    """Return why the ranks of a script must be fresh processes, or None.

    Args:
        script: its file, module or program.
        kind: `file`, `module` or `program`.
    """
    if kind == "program":
        return ""  # each rank is another program's process
    path = Path(script) if kind == "file" else _file_of_module(script)
    if path is None:
        return None
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return f"{path.name} sets environment variables" if sets_variables(source) else None


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module in this folder or on PYTHONPATH, without importing anything."""
    for folder in ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]:
        path = Path(folder, *name.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py"):
            if file.is_file():
                return file
    return None
