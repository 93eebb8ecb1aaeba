"""`lockstep/torch_compat/rendezvous.py`: torch asks for the store in each round, and
announces it.
"""

import datetime
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from lockstep.torch_compat.rendezvous import ExtensibleRendezvous


class Counting(ExtensibleRendezvous):
    """Notes the stores that it was asked for."""

    asked: int = 0

    def open_store(self, address: str, port: int) -> TCPStore:
        self.asked += 1
        return TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)


def machine(port: int) -> Any:
    """One of two machines that meet."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    minute = datetime.timedelta(seconds=60)
    timeout = RendezvousTimeout(minute, datetime.timedelta(seconds=1), minute, minute)
    return Counting.from_backend(
        "run", store, C10dRendezvousBackend(store, "run"), 2, 2, "127.0.0.1", timeout
    )


def test_each_round_announces_its_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    machines = [machine(server.port), machine(server.port)]
    with ThreadPoolExecutor(2) as threads:
        for _round in range(2):
            met = list(threads.map(lambda each: each.next_rendezvous(), machines))
            assert sorted(info.rank for info in met) == [0, 1]
            assert len({info.bootstrap_store_info.master_port for info in met}) == 1
            assert all(info.store.check([RendezvousStoreInfo.MASTER_PORT_KEY]) for info in met)
    assert sum(each.asked for each in machines) == 2
    for each in machines:
        each.shutdown()
