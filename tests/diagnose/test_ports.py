"""Ports both ways, as the doctor tries them."""

import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.diagnose import BAD, GOOD, doctor


def test_trap_36_an_ephemeral_port_that_is_closed_one_way_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meeting port is open, and the others are not: NCCL and gloo would wait for the whole
    timeout.
    """
    facts = [
        {"rank": rank, "host": f"host{rank}", "machine": f"m{rank}", "local_rank": 0}
        for rank in (0, 1)
    ]
    found: dict[int, list[Any]] = {}
    store = dist.HashStore()
    closed = threading.local()
    real = socket.create_connection

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        if closed.to_others:
            raise TimeoutError("a firewall drops it")
        return real(place, timeout)

    monkeypatch.setattr(doctor.socket, "create_connection", connect)

    def rank(number: int, *, behind_firewall: bool) -> None:
        closed.to_others = behind_firewall
        found[number] = doctor.ports(doctor.RankExchange(store, number, 2), "127.0.0.1", facts)

    for firewall in (False, True):
        threads = [
            threading.Thread(
                target=rank, args=(i,), kwargs={"behind_firewall": firewall and i == 1}
            )
            for i in (0, 1)
        ]
        store = dist.HashStore()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        assert found[0] == found[1]
        (line,) = found[0]
        assert line.status == (BAD if firewall else GOOD)
        assert (
            not firewall
            or "host1 127.0.0.1 does not reach host0 127.0.0.1 on an ephemeral port" in line.found
        )


def test_a_machine_without_an_address_is_named() -> None:
    facts = [
        {"rank": rank, "host": f"host{rank}", "machine": f"m{rank}", "local_rank": 0}
        for rank in (0, 1)
    ]
    store = dist.HashStore()
    found = dict[int, list[Any]]()

    def rank(number: int, address: str | None) -> None:
        found[number] = doctor.ports(doctor.RankExchange(store, number, 2), address, facts)

    threads = [threading.Thread(target=rank, args=case) for case in ((0, "127.0.0.1"), (1, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert [line.status for line in found[0]] == [BAD]
    assert "host0 127.0.0.1 does not reach host1 without an address" in found[0][0].found
