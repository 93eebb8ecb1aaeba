"""Runs commands in forks of the process that `lockstep warm` has left on this machine.

A command that loads torch is sent to it with its streams, variables and folder; this process, which
loads no torch, passes signals on and ends as the command does. The prepared process is used only
where it is just what a fresh one would be: same Python, packages, variables, limits and control
group. Where it is not, it says what differs; it is replaced, and the command starts afresh.

    this process ── request, descriptors ──> warm process ── fork ──> the command
       signals   ── number ───────────────>  └ SIGCHLD ── exit code ──> this process

Loads no torch.

Tests: tests/prepared/test_warm.py
"""

import hashlib
import json
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import RunError, UsageError
from lockstep.machine import signals
from lockstep.prepared.process import MESSAGE_BYTES, own_prepared_process
from lockstep.prepared.rank_starts import observes_itself, reason_of_script
from lockstep.run_directory.rank_output import print_error

VERBS = ("train", "launch", "verify", "bench", "plan", "sample", "doctor")
IDLE_MINUTES = 30
_READY_SECONDS = 120.0  # how long to wait for its imports

# Variables of a terminal or a shell, which nothing that is imported reads.
_OF_TERMINALS = {"_", "COLORTERM", "COLUMNS", "DISPLAY", "HISTFILE", "LINES", "LS_COLORS", "OLDPWD"}
_OF_TERMINALS |= {"PROMPT_COMMAND", "PS1", "PWD", "SHLVL", "STY", "TERM", "TMUX", "TMUX_PANE"}
_OF_TERMINALS |= {"VTE_VERSION", "WAYLAND_DISPLAY", "WINDOWID", "XDG_SESSION_ID"}
_TERMINAL_PREFIXES = ("SSH_", "TERM_", "ITERM", "KITTY_", "VSCODE_", "XDG_SESSION_")
# Started here; they live on. A `Popen` that is thrown away while its process runs would warn.
_left: list[subprocess.Popen[str]] = []
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@dataclass(frozen=True)
class Status:
    """Holds the words of a warm process about itself.

    Attributes:
        pid: its process.
        idle_minutes: it ends after so long without a command.
        commands: how many it has run.
        running: how many run now.
        memory_bytes: its resident set.
    """

    pid: int
    idle_minutes: float
    commands: int
    running: int
    memory_bytes: int

    def __str__(self) -> str:
        times = "once" if self.commands == 1 else f"{self.commands} times"
        return (
            f"process {self.pid} starts commands in a fork; used {times}, {self.running} run now;"
            f" {self.memory_bytes / 2**20:.0f} MiB; ends after {self.idle_minutes:g} idle minutes"
        )


def surroundings() -> dict[str, str]:
    """Return all that must be alike where a fork stands for a fresh process, by name."""
    surroundings_by_name = {
        "Python": f"{sys.version} at {sys.executable}, {tuple(sys.flags)}, {sys.warnoptions}",
        "packages": _packages(),
        "control group": _text_of("/proc/self/cgroup"),
        "namespaces": ", ".join(_link_of(f"/proc/self/ns/{name}") for name in _NAMESPACES),
        "processors": str(sorted(os.sched_getaffinity(0))),
        "priority": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "groups": str((os.getuid(), os.geteuid(), os.getgid(), sorted(os.getgroups()))),
    }
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            surroundings_by_name[f"limit {name}"] = str(resource.getrlimit(getattr(resource, name)))
    for name, value in os.environ.items():
        if name not in _OF_TERMINALS and not name.startswith(_TERMINAL_PREFIXES):
            surroundings_by_name[f"variable {name}"] = value
    return surroundings_by_name


def _packages() -> str:
    """Return when the installed packages and Lockstep's files were changed last, as a digest."""
    changed = []
    for folder in sys.path:
        with suppress(OSError):
            if "site-packages" in folder:
                changed.append((folder, os.stat(folder).st_mtime_ns))
    for name in ("torch", "lockstep"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.rglob("*.py") if name == "lockstep" else []):
            changed.append((str(path), path.stat().st_mtime_ns))
        changed.append((spec.origin, os.stat(spec.origin).st_mtime_ns))
    return hashlib.sha256(repr(changed).encode()).hexdigest()


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _link_of(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def address() -> Path:
    """Return the socket of this user's warm process for this Python; its folder is this user's.

    Raises:
        OSError: the folder is not there.
        UsageError: somebody else could put a socket there.
    """
    folder = _folder()
    about = folder.lstat()
    private = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    if not private or about.st_mode & 0o077:
        raise UsageError(
            f"{folder} is not a folder of yours alone",
            why="another user could answer there in place of the prepared process",
            fix=f"remove it, or set XDG_RUNTIME_DIR to a folder of yours: rm -r {folder}",
        )
    return folder / (hashlib.sha256(sys.prefix.encode()).hexdigest()[:16] + ".sock")


def _folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base, f"lockstep-warm-{os.getuid()}")


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield another name of a socket: an address of one has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect() -> socket.socket | None:
    """Return a connection to the warm process; None where there is none.

    Raises UsageError: it could be another user's.
    """
    if sys.platform != "linux":
        return None
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_name(address()) as name:
            channel.connect(name)
    except OSError:  # no folder, no socket, or nobody listens
        channel.close()
        return None
    except UsageError:
        channel.close()
        raise
    if peer_user(channel) != os.getuid():
        channel.close()
        return None
    return channel


def peer_user(channel: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def run(arguments: Sequence[str]) -> int | None:
    """Run `lockstep ARGUMENTS` in a fork of the warm process, and return its exit code.

    None: there is no warm process, or it is not like a fresh one.
    """
    if not arguments or arguments[0] not in VERBS or "RANK" in os.environ:
        return None
    if own_prepared_process() is not None or _wants_fresh_processes(arguments):
        return None
    try:
        channel = connect()
    except UsageError:  # there is none that can be trusted
        return None
    if channel is None:
        return None
    mine = signals.inherited()
    with channel:
        request = {
            "ask": "run",
            "surroundings": surroundings(),
            "arguments": list(arguments),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": _umask(),
            "signals": [sorted(mine.blocked), sorted(mine.ignored)],
        }
        try:
            socket.send_fds(channel, [json.dumps(request).encode()], [0, 1, 2])
            answer = _answer(channel)
        except OSError:  # it ends just now, or the variables are too long for a message
            return None
        if "differs" in answer:
            print(
                "lockstep: the process that `lockstep warm` prepared is not used, since this"
                f" command has another {answer['differs']}; a new one is prepared in its place",
                file=sys.stderr,
                flush=True,
            )
            _replace(answer["idle_minutes"])
            return None
        try:
            return _relay(channel)
        except RunError as error:
            print_error(error)
            return error.exit_code


def _wants_fresh_processes(arguments: Sequence[str]) -> bool:
    """Return whether a command, or the script that it launches, is not a fork in any case.

    A script of one process would run in the fork itself, which has imported torch before it.
    """
    if observes_itself() or {"--fresh-processes", "--no-python"} & set(arguments):
        return True
    if arguments[0] != "launch":
        return False
    watched = any(word.startswith("--watch-training") for word in arguments)
    module = {"-m", "--module"} & set(arguments)
    return watched or any(
        reason_of_script(word, "module" if module else "file") is not None
        for word in arguments[1:]
        if not word.startswith("-")
    )


def _relay(channel: socket.socket) -> int:
    """Pass signals on until the command has ended; return its exit code."""

    def send(number: int) -> None:
        with suppress(OSError):
            channel.send(json.dumps({"signal": number}).encode())

    with signals.answered(send):
        answer = _answer(channel)
    code: int | None = answer.get("code")
    if code is None:
        raise RunError(
            "the prepared process has ended, and with it this command",
            why="it was killed, or the machine's memory was full",
            fix="start the command again; it starts without a prepared process",
        )
    return code if code >= 0 else 128 - code


def _answer(channel: socket.socket) -> dict[str, Any]:
    message = channel.recv(MESSAGE_BYTES)
    answer: dict[str, Any] = json.loads(message) if message else {}
    return answer


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def start(idle_minutes: float, *, wait: bool = True) -> None:
    """Start the warm process of this user and this Python.

    Args:
        idle_minutes: it ends after so long without a command.
        wait: until it has imported all.

    Raises:
        RunError: it does not come up.
    """
    with suppress(FileExistsError):
        _folder().mkdir(mode=0o700)
    path = address()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.prepared.warm_server", str(path), str(idle_minutes)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if wait else subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=_environment(),
        text=True,
    )
    deadline = time.monotonic() + _READY_SECONDS
    while wait and status() is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            _, said = process.communicate()
            raise RunError("the prepared process does not come up", why=said.strip())
        time.sleep(0.02)
    _left.append(process)


def _environment() -> Mapping[str, str]:
    """Return this process's variables; a relative folder of modules would be another one there."""
    folders = os.environ.get("PYTHONPATH")
    if folders is None:
        return os.environ
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in folders.split(os.pathsep)),
    }


def _replace(idle_minutes: float) -> None:
    stop()
    start(idle_minutes, wait=False)


def status() -> Status | None:
    """Return what the warm process says of itself; None where there is none."""
    answer = _ask("status")
    return None if answer is None else Status(**answer)


def stop() -> bool:
    """End the warm process as soon as its commands have ended; return whether there was one."""
    return _ask("stop") is not None


def _ask(what: str) -> dict[str, Any] | None:
    channel = connect()
    if channel is None:
        return None
    with channel:
        try:
            channel.send(json.dumps({"ask": what}).encode())
            return _answer(channel) or None
        except OSError:
            return None


def as_answer(status: Status) -> bytes:
    """Return the message that `status` reads."""
    return json.dumps(asdict(status)).encode()
