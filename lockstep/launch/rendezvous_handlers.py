"""Runs torch's rendezvous over Lockstep's own store.

The store listens on one address only, and records who arrived.

Each start of the ranks is one round. Source: docs.pytorch.org/docs/stable/elastic/rendezvous.html.
Loads torch.

Tests: tests/launch/test_machines.py, tests/launch/test_hosts.py
"""

import datetime
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    api,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from lockstep.errors import RunError, UsageError
from lockstep.launch import options as machines
from lockstep.launch.meeting_store import MeetingStore, connect
from lockstep.launch.options import (
    LaunchOptions,
    endpoint,
    hosts_rendezvous,
    rendezvous_host,
    run_id,
)
from lockstep.machine.network import address_towards, is_address, is_loopback
from lockstep.process_group.rendezvous import host_store
from lockstep.store_threads import StoreThread
from lockstep.torch_compat.rendezvous import ExtensibleRendezvous

_STORE_SECONDS = 60.0  # how long to wait for an answer of the store
# how long the host stays after it gave up: waiting machines look once a second
_GIVING_UP_SECONDS = 3.0


def open_store(options: LaunchOptions, log: Callable[[str], None]) -> MeetingStore:
    """Open the store for the rendezvous; with `--node-rank`, return once all machines are there.

    Raises UsageError: the port is in use; the name does not resolve; two machines claim one number.
    RunError: nobody hosts the rendezvous, or a machine did not come.
    """
    if options.several_nodes:
        machines.wait_for_name(rendezvous_host(options), options.patience, log)
    store = MeetingStore(_host_or_join(options), options.seconds("read_timeout", _STORE_SECONDS))
    if options.numbered:
        with store.meeting():
            registry = PrefixStore(f"lockstep/machines/{run_id(options)}", store)
            machines.register_machine(registry, options, log)
    return store


def _host_or_join(options: LaunchOptions) -> TCPStore:
    host = rendezvous_host(options)
    port = int(endpoint(options).rsplit(":", 1)[1])
    if hosts_rendezvous(options):
        try:
            return host_store(host, port, datetime.timedelta(seconds=options.patience))
        except UsageError:
            if not options.several_nodes or options.numbered or options.is_host:
                raise
            # another launcher on this machine hosts it
    return connect(host, port, options.patience)


def job_id(options: LaunchOptions, store: Store) -> str:
    """Return TORCHELASTIC_RUN_ID for the ranks: the user's name for the job, else a unique one."""
    if options.rdzv_id is not None:
        return options.rdzv_id
    agreed: bytes = store.compare_set("lockstep/job", "", uuid.uuid4().hex)
    return agreed.decode()


def handler(options: LaunchOptions, store: MeetingStore) -> RendezvousHandler:
    """Return the rendezvous handler for the agent of this machine."""
    with store.meeting():
        if options.numbered or not options.several_nodes:
            return FixedRendezvous(options, store)
        return ElasticRendezvous.over(options, store)


class FixedRendezvous(StaticTCPRendezvous):
    """Rendezvous of machines whose number and count are known beforehand.

    A single machine is number 0 of 1.
    """

    def __init__(self, options: LaunchOptions, store: MeetingStore) -> None:
        rank = (options.node_rank or 0) if options.several_nodes else 0
        host = rendezvous_host(options)
        job = job_id(options, store)
        super().__init__(host, store.port, rank, options.nodes[1], job, int(_STORE_SECONDS))
        self._rounds = PrefixStore(run_id(options), store)
        self._round = 0
        self._of_round: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Start a round.

        Later rounds get a store of their own, because the old one holds addresses of dead ranks.
        """
        self._round += 1
        store = PrefixStore(str(self._round), self._rounds)
        port = self.master_port
        if self._round > 1:
            if self.rank == 0:
                self._of_round = host_store(self.master_addr, 0, self.timeout)
                store.set("lockstep/port", str(self._of_round.port))
            port = int(store.get("lockstep/port"))
        return RendezvousInfo(
            store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, port)
        )


class ElasticRendezvous(ExtensibleRendezvous):
    """Rendezvous of machines that join and leave; only those that are present are known."""

    _registry: "MachineRegistry"
    _job_id: str

    @classmethod
    def over(cls, options: LaunchOptions, store: MeetingStore) -> "ElasticRendezvous":
        """Return a rendezvous of a variable number of machines over a store."""

        def seconds(name: str, default: float) -> datetime.timedelta:
            return datetime.timedelta(seconds=options.seconds(name, default))

        fewest, most = options.nodes
        # Once enough machines have arrived, the last call waits for the others, in addition to
        # `timeout`.
        last_call = min(30.0, options.patience)
        own = options.local_addr or own_address(options)
        registry = MachineRegistry(store, options, f"{socket.gethostname()} ({own or os.getpid()})")
        made: ElasticRendezvous = cls.from_backend(
            run_id(options),
            store,
            _Backend(store, run_id(options), registry),
            fewest,
            most,
            own,
            RendezvousTimeout(
                seconds("join_timeout", options.patience + last_call),
                seconds("last_call_timeout", last_call),
                seconds("close_timeout", 30),
                seconds("heartbeat_timeout", 5),
            ),
            keep_alive_interval=int(options.seconds("keep_alive_interval", 5)),
            keep_alive_max_attempt=int(options.seconds("keep_alive_max_attempt", 3)),
        )
        made._registry = registry
        made._job_id = job_id(options, store)
        return made

    def next_rendezvous(self) -> RendezvousInfo:
        """Start a round with the others.

        Raises RunError: too few machines came, or the host of the store is gone.
        """
        self._registry.wait()
        try:
            rendezvous = super().next_rendezvous()
        except api.RendezvousTimeoutError as error:
            raise self._registry.timed_out() from error
        except api.RendezvousClosedError as error:
            # Another machine that gives up closes the rendezvous.
            if not self._registry.names_in("left", self._registry.options.patience):
                raise
            raise self._registry.timed_out() from error
        except api.RendezvousConnectionError as error:
            text = (
                f"the machine that hosts {endpoint(self._registry.options)}, where the machines"
                f" meet, has gone while {self._registry.name} waited for the others"
            )
            fix = "see its last output for the reason; start the command again on all machines"
            raise RunError(
                text, why="its launcher ended, or the link to it is cut", fix=fix
            ) from error
        self._registry.met()
        return rendezvous

    def get_run_id(self) -> str:
        return self._job_id

    def open_store(self, address: str, port: int) -> TCPStore:
        return host_store(address, port, datetime.timedelta(seconds=_STORE_SECONDS))


class _Backend(C10dRendezvousBackend):
    """Raises on a waiting machine when the machine that hosts the store gave up."""

    def __init__(self, store: Store, name: str, registry: "MachineRegistry") -> None:
        super().__init__(store, name)
        self._registry = registry

    def get_state(self) -> tuple[bytes, Any] | None:
        self._registry.check()
        return super().get_state()


class MachineRegistry:
    """Records in the store which machines wait for the others; `name` is this one's."""

    def __init__(self, store: Store, options: LaunchOptions, name: str) -> None:
        self._store = PrefixStore(f"lockstep/arrivals/{run_id(options)}", store)
        self.options = options
        self.name = name
        self._number = self._store.add("count", 1)
        self._waits = False
        self._since = time.monotonic()

    def wait(self) -> None:
        self._waits = True
        self._since = time.monotonic()
        self._record("waits")

    def met(self) -> None:
        self._waits = False
        self._record("met")

    def _record(self, state: str) -> None:
        self._store.set(str(self._number), f"{state} {time.time():.0f} {self.name}")

    def names_in(self, state: str, seconds: float) -> list[str]:
        """Return the names of the machines that entered `state` within the last `seconds`."""
        entries = [
            self._store.get(str(number)).decode()
            for number in range(1, self._store.add("count", 0) + 1)
        ]
        rows = [entry.split(" ", 2) for entry in entries]
        return [
            name
            for state_of_machine, when, name in rows
            if state_of_machine == state and time.time() - float(when) <= seconds
        ]

    def timed_out(self) -> RunError:
        """Return the error for a timeout.

        If this machine hosts the store, the waiting machines raise it too.
        """
        machines = sorted(
            {*self.names_in("waits", math.inf), *self.names_in("left", self.options.patience)}
        )
        self._waits = False
        self._record("left")
        if hosts_rendezvous(self.options):
            self._store.set("given up", "\n".join(machines))
            time.sleep(_GIVING_UP_SECONDS)
        return self._error(machines)

    def check(self) -> None:
        """Raise RunError if too few machines have arrived in time.

        The host of the store may also have given up.
        """
        if self._waits and self._store.check(["given up"]):
            self._waits = False  # torch reads the state again on leaving
            raise self._error(self._store.get("given up").decode().split("\n"))
        if not self._waits or "join_timeout" in self.options.rdzv_conf:
            return
        if time.monotonic() - self._since > self.options.patience:
            if len(self.names_in("waits", math.inf)) < self.options.nodes[0]:
                raise self.timed_out()
            self._since = math.inf  # enough machines: the last call decides

    def _error(self, here: list[str]) -> RunError:
        text = (
            f"{len(here)} of {self.options.nnodes} machines came to {endpoint(self.options)} within"
            f" {self.options.patience:g} s"
        )
        fix = (
            "start the same command on the others; see that the address and the port are the same"
            " on all machines, and can be reached: `lockstep doctor` on all of them"
        )
        return RunError(text, where=f"there were {', '.join(here)}", fix=fix)


def own_address(options: LaunchOptions) -> str | None:
    """Return the address at which the other machines reach this one.

    It is needed if this machine hosts the ranks' store.
    """
    host = rendezvous_host(options)
    own = address_towards(host)
    if own is not None and is_loopback(own) and not is_address(host) and host != "localhost":
        # a name that resolves to the loopback on this machine only: the other machines know it too
        return host
    return own


class Membership:
    """Counts the machines that wait to join; asks in the background once a second.

    If the link to the rendezvous is broken, its store never answers: torch's loop that watches the
    ranks would block.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self.begin()

    def begin(self) -> None:
        self._answers: list[int | Exception] = [0]
        self._thread: StoreThread | None = None
        self._asked_at = time.monotonic()

    def __call__(self) -> int:
        """Return the newest answer, and ask again if it is older than a second."""
        newest = self._answers[-1]
        if isinstance(newest, Exception):
            raise newest
        if not self._is_asking() and time.monotonic() - self._asked_at > 1.0:
            self._asked_at = time.monotonic()
            answers = self._answers
            self._thread = StoreThread(lambda _thread: self._run(answers), "membership")
        return newest

    def check(self, seconds: float = 30.0) -> None:
        """Wait for the running query before the next rendezvous.

        Raises RunError: it has no answer for so long.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, self._asked_at + seconds - time.monotonic()))
        if self._is_asking():
            text = (
                "the rendezvous of the machines has not answered for"
                f" {time.monotonic() - self._asked_at:.0f} s"
            )
            fix = (
                "start the command again on all machines; the run goes on from its newest"
                " checkpoint"
            )
            raise RunError(
                text, why="the link to it is cut, or the machine that hosts it is gone", fix=fix
            )

    def _is_asking(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, answers: list[int | Exception]) -> None:
        try:
            answers.append(self._ask())
        except Exception as error:  # raised by the loop that watches the ranks
            answers.append(error)
