"""torch's rendezvous of machines that come and go.

A subclass makes the store for the ranks.

Public torch: where the store is says the first round alone: a machine that comes in a later one
waits for it in vain. Seen to work: torch 2.11.0 to 2.15.0. When gone: importing this file raises
AttributeError for the method. Without the attribute a machine that comes later is not heard, and
the launch ends when its patience does.
"""

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

getattr(DynamicRendezvousHandler, "_create_tcp_store_server")  # noqa: B009 — overridden below


class ExtensibleRendezvous(DynamicRendezvousHandler):
    """A rendezvous whose store for the ranks is made by `open_store`.

    It is announced in each round.
    """

    def open_store(self, address: str, port: int) -> TCPStore:
        """Host the store through which the ranks of a round meet; port 0: any that is free."""
        raise NotImplementedError

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the machines, and announce a new store."""
        self._bootstrap_store_info = None  # which is announced only where there is none yet
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return self.open_store(master_addr, master_port)
