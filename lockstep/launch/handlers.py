"""torch's rendezvous over a store of Lockstep's own: it listens where it must and nowhere else, and knows who came.

    open_store(options, say)       the store where machines meet, hosted here or joined
    handler(options, store)        what the agent meets through, round after round: each start of ranks is a round

Source: docs.pytorch.org/docs/stable/elastic/rendezvous.html. Loads torch; private names of its rendezvous stay in here.
"""

import datetime
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lockstep.errors import RunError, UsageError
from lockstep.launch.meeting import call_the_roll, endpoint, is_host, meeting_host, run_id, wait_for_name
from lockstep.launch.options import LaunchOptions
from lockstep.network import address_towards, is_address, is_loopback
from lockstep.rendezvous import host_store

_STORE_SECONDS = 60.0  # for which an answer of the store is waited
_GIVING_UP_SECONDS = 3.0  # in which those that wait hear of it: they look once a second


def open_store(options: LaunchOptions, say: Callable[[str], None]) -> TCPStore:
    """The store where the ranks, and the machines, meet; machines that are numbered are all there when this returns.

    Raises:
        UsageError: the port is in use; the name does not resolve; two machines claim one number.
        RunError: nobody hosts the meeting point, or a machine did not come.
    """
    if options.several_nodes:
        wait_for_name(meeting_host(options), options.patience, say)
    store = _host_or_join(options)
    if options.numbered:
        call_the_roll(PrefixStore(f"lockstep/roll/{run_id(options)}", store), options, say)
    store.set_timeout(datetime.timedelta(seconds=options.seconds("read_timeout", _STORE_SECONDS)))
    return store


def _host_or_join(options: LaunchOptions) -> TCPStore:
    host, port = meeting_host(options), int(endpoint(options).rsplit(":", 1)[1])
    patience = datetime.timedelta(seconds=options.patience)
    if is_host(options):
        try:
            return host_store(host, port, patience)
        except UsageError:
            if not options.several_nodes or options.numbered or options.is_host:
                raise
            # another launcher on this machine hosts it
    try:
        return TCPStore(host, port, None, False, patience, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunError(
            f"the machines did not meet at {endpoint(options)}: nothing answered there within {options.patience:g} s",
            where=f"{socket.gethostname()}, which waited for the machine that hosts the meeting point",
            why=str(error).splitlines()[0],
            fix=f"start the same command on {host}, and see that the port is the same on all machines and open; in a"
            " container or a network namespace pass --rdzv-conf is_host=1 on the one that hosts it",
        ) from error


def job_id(options: LaunchOptions, store: Store) -> str:
    """Return what ranks find in TORCHELASTIC_RUN_ID: the user's name for the job, else one that no other job has."""
    if options.rdzv_id is not None:
        return options.rdzv_id
    agreed: bytes = store.compare_set("lockstep/job", "", uuid.uuid4().hex)
    return agreed.decode()


def handler(options: LaunchOptions, store: TCPStore) -> RendezvousHandler:
    """What the agent of this machine meets the others through."""
    if options.numbered or not options.several_nodes:
        return Numbered(options, store)
    return Elastic.over(options, store)


class Numbered(RendezvousHandler):
    """Machines whose number and count are known beforehand; one alone is number 0 of 1."""

    def __init__(self, options: LaunchOptions, store: TCPStore) -> None:
        self._options, self._store = options, store
        self._rank = (options.node_rank or 0) if options.several_nodes else 0
        self._round, self._job_id = 0, job_id(options, store)
        self._of_round: Any = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Ranks that are started anew meet in a store of their own: in the old one are the addresses of dead ones."""
        self._round += 1
        store = PrefixStore(f"{run_id(self._options)}/{self._round}", self._store)
        host, port = meeting_host(self._options), self._store.port
        if self._round > 1:
            if self._rank == 0:
                self._of_round = host_store(host, 0, datetime.timedelta(seconds=_STORE_SECONDS))
                store.set("lockstep/port", str(self._of_round.port))
            port = int(store.get("lockstep/port"))
        return RendezvousInfo(store, self._rank, self._options.nodes[1], RendezvousStoreInfo(host, port))

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._job_id

    def shutdown(self) -> bool:
        return True


class Elastic(DynamicRendezvousHandler):
    """Machines that come and go, numbered as they come. Whom one waits for in vain can only be told by who came."""

    _came: "Arrivals"
    _job_id: str

    @classmethod
    def over(cls, options: LaunchOptions, store: TCPStore) -> "Elastic":
        def seconds(name: str, default: float) -> datetime.timedelta:
            return datetime.timedelta(seconds=options.seconds(name, default))

        fewest, most = options.nodes
        # Once enough machines have come, the last call is for the others: it is no part of the patience for the first.
        last_call = min(30.0, options.patience)
        own = options.local_addr or own_address(options)
        came = Arrivals(store, options, f"{socket.gethostname()} ({own or os.getpid()})")
        made: Elastic = cls.from_backend(
            run_id(options), store, _Backend(store, run_id(options), came), fewest, most, own,
            RendezvousTimeout(
                seconds("join_timeout", options.patience + last_call), seconds("last_call_timeout", last_call),
                seconds("close_timeout", 30), seconds("heartbeat_timeout", 5),
            ),
            keep_alive_interval=int(options.seconds("keep_alive_interval", 5)),
            keep_alive_max_attempt=int(options.seconds("keep_alive_max_attempt", 3)),
        )  # fmt: skip
        made._came, made._job_id = came, job_id(options, store)
        return made

    def next_rendezvous(self) -> RendezvousInfo:
        self._bootstrap_store_info = None  # said only once, it would leave a machine that comes later waiting in vain
        self._came.wait()
        try:
            found = super().next_rendezvous()
        except RendezvousTimeoutError as error:
            raise self._came.missing() from error
        except RendezvousClosedError as error:
            if not self._came.someone_left():
                raise
            raise self._came.missing() from error
        except RendezvousConnectionError as error:
            raise self._came.alone() from error
        self._came.met()
        return found

    def get_run_id(self) -> str:
        return self._job_id

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return host_store(master_addr, master_port, datetime.timedelta(seconds=_STORE_SECONDS))


class _Backend(C10dRendezvousBackend):
    """Tells a machine that waits when the one that hosts the store has given up."""

    def __init__(self, store: Store, name: str, came: "Arrivals") -> None:
        super().__init__(store, name)
        self._came = came

    def get_state(self) -> tuple[bytes, Any] | None:
        self._came.raise_if_given_up()
        self._came.raise_if_too_few()
        return super().get_state()


class Arrivals:
    """Who waits for the others, written where all can read it.

    Args:
        name: of this machine.
    """

    def __init__(self, store: Store, options: LaunchOptions, name: str) -> None:
        self._store = PrefixStore(f"lockstep/arrivals/{run_id(options)}", store)
        self._options, self._name = options, name
        self._number = self._store.add("count", 1)
        self._waits, self._since = False, time.monotonic()

    def wait(self) -> None:
        self._waits, self._since = True, time.monotonic()
        self._say("waits")

    def met(self) -> None:
        self._waits = False
        self._say("met")

    def _say(self, state: str) -> None:
        self._store.set(str(self._number), f"{state} {time.time():.0f} {self._name}")

    def _said(self, state: str, seconds: float) -> list[str]:
        """Who said so last, in the last so many seconds."""
        said = [self._store.get(str(number)).decode() for number in range(1, self._store.add("count", 0) + 1)]
        rows = [one.split(" ", 2) for one in said]
        return [name for found, when, name in rows if found == state and time.time() - float(when) <= seconds]

    def someone_left(self) -> bool:
        """Whether the time of another machine was up just now: it closes the meeting behind it."""
        return bool(self._said("left", self._options.patience))

    def missing(self) -> RunError:
        """When the time is up. The machine that hosts the store takes all with it that wait."""
        here = sorted({*self._said("waits", math.inf), *self._said("left", self._options.patience)})
        self._waits = False
        self._say("left")
        if is_host(self._options):
            self._store.set("given up", "\n".join(here))
            time.sleep(_GIVING_UP_SECONDS)
        return self._error(here)

    def raise_if_too_few(self) -> None:
        """
        Raises:
            RunError: so long after this machine began to wait, fewer have come than are needed.
        """
        if not self._waits or "join_timeout" in self._options.rdzv_conf:
            return
        if time.monotonic() - self._since > self._options.patience:
            if len(self._said("waits", math.inf)) < self._options.nodes[0]:
                raise self.missing()
            self._since = math.inf  # enough are there: the last call decides

    def raise_if_given_up(self) -> None:
        """
        Raises:
            RunError: the machine that hosts the store waits no longer.
        """
        if self._waits and self._store.check(["given up"]):
            self._waits = False  # the library asks again on leaving
            raise self._error(self._store.get("given up").decode().split("\n"))

    def _error(self, here: list[str]) -> RunError:
        return RunError(
            f"{len(here)} of {self._options.nnodes} machines came to {endpoint(self._options)} within "
            f"{self._options.patience:g} s",
            where=f"there were {', '.join(here)}",
            fix="start the same command on the others; see that the address and the port are the same on all machines,"
            " and can be reached: `lockstep doctor` on all of them",
        )

    def alone(self) -> RunError:
        """When the one that hosts the store has gone."""
        return RunError(
            f"the machine that hosts {endpoint(self._options)}, where the machines meet, has gone while {self._name} "
            "waited for the others",
            why="its launcher ended, or the link to it is cut",
            fix="what it said last tells why; start the command again on all machines",
        )


def own_address(options: LaunchOptions) -> str | None:
    """How the other machines reach this one, should it host the ranks' store."""
    host = meeting_host(options)
    own = address_towards(host)
    if own is not None and is_loopback(own) and not is_address(host) and host != "localhost":
        return host  # a name of this machine's own that means the loopback only here: the others know it too
    return own
