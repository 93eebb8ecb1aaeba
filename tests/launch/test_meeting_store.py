"""A link that is cut while machines meet: each wait for an answer of the store ends in an error."""

import datetime
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from lockstep.errors import RunError
from lockstep.launch.meeting_store import MeetingStore, connect
from lockstep.machine.environment import RankFacts
from lockstep.process_group import rendezvous
from tests.launch.shared import finish, says, script, start, wait_for
from tests.ranks import free_port

MINUTE = datetime.timedelta(seconds=60)


class Link:
    """Carries bytes to a port of this machine, until it is cut: then nothing arrives any more, and
    no connection is reset.
    """

    def __init__(self, port: int) -> None:
        self._towards = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._is_cut = threading.Event()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._towards))
                self._sockets += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                if not self._is_cut.is_set():
                    target.sendall(chunk)
            if not self._is_cut.is_set():
                target.shutdown(socket.SHUT_WR)


@pytest.fixture
def link() -> Iterator[Link]:
    """A link to a store."""
    store = TCPStore("127.0.0.1", 0, None, True, MINUTE, False)
    made = Link(store.port)
    yield made
    made.close()
    del store  # nothing listens at its port any more


def test_no_call_waits_for_ever_while_machines_meet(link: Link) -> None:
    """A call that was under way when the meeting began gives up, too: one waits for its thread."""
    store = MeetingStore(connect("127.0.0.1", link.port, 60), seconds=0.2, margin=0.3)
    behind_it = PrefixStore("round", store)
    behind_it.set("key", "value")
    assert behind_it.get("key") == b"value"
    assert behind_it.multi_get(["key"]) == [b"value"]
    assert store.check(["round/key"])

    link.cut()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            store.get("round/key")
        except TimeoutError as error:
            errors.append(error)

    under_way = threading.Thread(target=ask)
    under_way.start()
    time.sleep(1.0)  # longer than an answer may take in a meeting; there is none yet
    assert under_way.is_alive()
    with store.meeting():
        with pytest.raises(TimeoutError, match=r"not answered for 0\.5 s: the link"):
            behind_it.get("key")
        under_way.join(60)
    assert len(errors) == 1


def test_ranks_do_not_wait_for_ever_either(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes the connection, and never says a word."""
    link.cut()
    monkeypatch.setattr(rendezvous, "_MARGIN_SECONDS", 0.5)
    facts = RankFacts(rank=1, world_size=2, local_rank=1, local_world_size=2)
    config = rendezvous.DistributedConfig(init_method=f"tcp://127.0.0.1:{link.port}")
    with pytest.raises(RunError, match="rank 1 did not meet the other ranks at") as told:
        rendezvous.rendezvous(config, facts, datetime.timedelta(seconds=1))
    assert "can be reached from here" in str(told.value)


@pytest.mark.full
@pytest.mark.fault(
    "network: the link between two hosts is cut while they meet",
    "no packet arrives any more, and no connection is reset",
    "the launcher that lost the store says so and ends with exit code 1, at the latest two minutes"
    " later",
)
@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "c10d"])
def test_a_launcher_whose_link_is_cut_while_it_waits_ends(tmp_path: Path, numbered: bool) -> None:
    script(tmp_path, "")
    port = free_port()
    link = Link(port)

    def launcher(number: int, at: int) -> list[str]:
        where = ["--rdzv-endpoint", f"127.0.0.1:{at}", "--rdzv-conf", f"is_host={1 - number}"]
        if numbered:
            where = ["--master-addr", "127.0.0.1", "--master-port", str(at)]
            where += ["--node-rank", str(number)]
        waits = ["--nnodes", "3", "--nproc-per-node", "1", "--rdzv-conf"]
        more = f",is_host={1 - number}" * (not numbered)
        return ["launch", *where, *waits, f"read_timeout=5{more}", "script.py"]

    host = start(tmp_path, *launcher(0, port))
    try:
        says(host, "waiting for")
        other = start(tmp_path, *launcher(1, link.port))
        wait_for(lambda: len(link._sockets) >= 2)
        says(other, "waiting for machine 2 of 3" if numbered else "waiting for 3 machines")
        time.sleep(2)  # it looks at the store once a second
        link.cut()
        ended = finish(other, tmp_path, timeout=280)
        assert ended.code == 1, ended
        assert "Traceback" not in ended.err, ended
        assert f"127.0.0.1:{link.port}" in ended.err, ended
        assert "the link to it is cut" in ended.err, ended
    finally:
        host.kill()
        host.communicate()
        link.close()
