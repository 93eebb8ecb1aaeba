"""The way to other machines: addresses, interfaces, and where a port is opened."""

import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.errors import UsageError
from lockstep.machine import network
from lockstep.process_group.rendezvous import host_store
from tests.hosts import INTERFACE, Host, _run, hosts, require_root
from tests.ranks import REPOSITORY, free_port

_SECONDS = datetime.timedelta(seconds=5)


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.promise("On one machine the stores where ranks meet listen on 127.0.0.1 alone.")
@pytest.mark.promise("and at no other of that machine")
def test_trap_57_the_store_where_ranks_meet_answers_at_its_own_address_alone() -> None:
    """torch's listens on all interfaces, asks for no password, and unpickles what lies in it: reach
    it, run code.
    """
    store = host_store("127.0.0.1", 0, _SECONDS)
    listening = psutil.Process().net_connections(kind="tcp")
    places = {
        c.laddr.ip
        for c in listening
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert places == {"127.0.0.1"}
    assert answers("127.0.0.1", store.port)
    assert not answers("127.0.0.2", store.port), "another address of the same machine"
    again = host_store("127.0.0.1", store.port, _SECONDS)
    again.set("key", "value")
    assert store.get("key") == b"value", "asked for twice by one process it is one store"


@pytest.mark.promise(
    "where a name was given, which may mean different addresses here and there, on all interfaces."
)
def test_a_name_is_no_place_to_listen_at() -> None:
    """It may mean the loopback here and something else elsewhere: then all interfaces must do."""
    assert network.listener(socket.gethostname(), 0) is None
    assert network.listener("192.0.2.7", 0) is None, (
        "an address that others know this machine by, as behind NAT"
    )
    port = free_port()
    opened = network.listener("localhost", port)
    assert opened is not None
    with opened, pytest.raises(UsageError, match=f"port {port} is in use"):
        network.listener("127.0.0.1", port)


def test_what_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network, "interface_towards", {"first": "eth7"}.get)
    assert network.interface_variables("first") == {
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "=eth7",
    }
    assert network.interface_variables("nowhere") == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert network.interface_variables("first") == {"GLOO_SOCKET_IFNAME": "eth7"}


# ---- on hosts of their own ----


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host with two networks: 10.99.0.1 on eth0, which has the default route, and 10.98.0.1 on
    eth1.
    """
    require_root()
    with hosts(1) as (made,):
        _run(
            "ip", "-n", made.name, "link", "add", "eth1", "type", "veth", "peer", "name", "its-peer"
        )
        _run("ip", "-n", made.name, "addr", "add", "10.98.0.1/24", "dev", "eth1")
        _run("ip", "-n", made.name, "link", "set", "eth1", "up")
        _run("ip", "-n", made.name, "route", "add", "default", "via", "10.99.0.254")
        yield made


_ASK = """
import json, sys
from lockstep.machine.network import interface_variables
print(json.dumps([interface_variables(host) for host in sys.argv[1:]]))
"""


@pytest.mark.root
@pytest.mark.promise("on the interface towards the machine of rank 0")
def test_the_interface_is_the_one_on_the_route(host: Host, tmp_path: Path) -> None:
    """The first one that is up leads elsewhere; and this host's own name means its loopback, as on
    Debian.
    """
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n127.0.1.1 myself\n10.98.0.7 other\n")
    asked = (
        "10.99.0.2",
        "10.98.0.2",
        "other",
        "10.98.0.1",
        "8.8.8.8",
        "myself",
        "localhost",
        "127.0.0.1",
    )
    inside = [
        "sh",
        "-c",
        'mount --bind "$0" /etc/hosts && exec "$@"',
        str(names),
        sys.executable,
        "-c",
        _ASK,
        *asked,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")
    }
    said = subprocess.run(
        [*host.command, "unshare", "--mount", *inside],
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )

    def on(interface: str) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}

    first = on(INTERFACE)
    second = on("eth1")
    assert json.loads(said.stdout) == [first, second, second, second, first, first, {}, {}]
