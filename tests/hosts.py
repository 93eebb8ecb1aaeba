"""Hosts on one machine: network namespaces joined by links whose rate is set (needs root, iproute2
and `tc`).

    with hosts(2, rate="100mbit") as (a, b):
        values = run_ranks(function, 2, on=[a, b])

Each host has one interface, `eth0`, on a switch. Its bytes are counted in
/sys/class/net/eth0/statistics, which a process on the host reads by `sent_bytes()`. The namespaces
are gone in the end; what a killed process left goes when the next one begins.
"""

import ctypes
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
INTERFACE = "eth0"
SEGMENT = 1514  # bytes of a full frame, headers included
# Of linux/sched.h.
_NEW_NETWORK = 0x4000_0000
_NEW_MOUNTS = 0x0002_0000
_NEW_NAME = 0x0400_0000
# Of linux/mount.h.
_SLAVE_BELOW = 0x0008_4000
_DETACH = 2
_numbers = itertools.count()  # of the calls in this process: a namespace may take its time to go


@dataclass(frozen=True)
class Host:
    """A host by the name of its namespace."""

    name: str
    address: str

    @property
    def command(self) -> list[str]:
        """What goes before a command to run it here."""
        return ["ip", "netns", "exec", self.name]

    @property
    def environment(self) -> dict[str, str]:
        """Lets gloo find the link."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    def enter(self, name: str | None = None) -> None:
        """Bring this process, which must have one thread alone, to the host, as `ip netns exec`
        does, with shared memory of its own for it and its children.

        Args:
            name: what the host calls itself; unset: as the machine.
        """
        with open(f"/run/netns/{self.name}") as namespace:
            _system_call("setns", namespace.fileno(), _NEW_NETWORK)
        _system_call("unshare", _NEW_MOUNTS | (0 if name is None else _NEW_NAME))
        if name is not None:
            socket.sethostname(name)
        _system_call("mount", b"none", b"/", b"none", _SLAVE_BELOW, None)
        _system_call("umount2", b"/sys", _DETACH)
        # its interfaces are those of the host
        _system_call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
        # neither is its shared memory that of another host
        _system_call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)

    def sent(self) -> int:
        """Bytes that this host has put on its link."""
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_run(*self.command, "cat", path))

    def cut(self) -> None:
        """Pull the plug."""
        _run("ip", "-n", self.name, "link", "set", INTERFACE, "down")


def sent_bytes() -> int:
    """Bytes that the host on which this process runs has put on its link, less what TCP sent twice.

    TCP repeats segments whose receiver had no core for a while: 4 % more bytes were seen, of which
    no program knows.
    """
    sent = int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())
    names, values = (
        line.split()
        for line in Path("/proc/self/net/snmp").read_text().splitlines()
        if "Tcp:" in line
    )
    return sent - SEGMENT * int(values[names.index("RetransSegs")])


def require_root() -> None:
    """Skip the test, and say why, where namespaces can't be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs root, for network namespaces")
    if missing:
        pytest.skip(f"NOT TESTED: needs iproute2 ({', '.join(missing)} not found)")


def can_make_hosts() -> bool:
    """Whether `require_root` would go on."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextmanager
def hosts(count: int = 2, rate: str | None = None) -> Iterator[list[Host]]:
    """Hosts 10.99.0.1 … on one switch; each sends and receives at `rate` (as `tc` writes it:
    100mbit), or unlimited.
    """
    _remove_what_the_killed_left()
    tag = f"lk{os.getpid()}-{next(_numbers)}"
    switch = f"{tag}-sw"
    with ExitStack() as undo:
        _namespace(switch, undo)
        _run("ip", "-n", switch, "link", "add", "sw0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "sw0", "up")
        made = []
        for i in range(count):
            host = Host(f"{tag}-{i}", f"10.99.0.{i + 1}")
            _namespace(host.name, undo)
            port = f"port{i}"
            _run(
                "ip",
                "link",
                "add",
                INTERFACE,
                "netns",
                host.name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "sw0", "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run("ip", "-n", host.name, "link", "set", device, "up")
            if rate is not None:
                for namespace, device in ((host.name, INTERFACE), (switch, port)):
                    _run(
                        "ip",
                        "netns",
                        "exec",
                        namespace,
                        "tc",
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        "tbf",
                        "rate",
                        rate,
                        "burst",
                        "256kb",
                        "latency",
                        "400ms",
                    )
            made.append(host)
        yield made


def _remove_what_the_killed_left() -> None:
    for name in re.findall(r"^(lk(\d+)-\S+)", _run("ip", "netns", "list"), flags=re.MULTILINE):
        if not Path(f"/proc/{name[1]}").exists():
            subprocess.run(["ip", "netns", "del", name[0]], check=False)


def _namespace(name: str, undo: ExitStack) -> None:
    _run("ip", "netns", "add", name)
    undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False)


def _system_call(name: str, *args: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
