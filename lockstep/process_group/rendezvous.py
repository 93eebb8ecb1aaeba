"""Finds the other ranks.

Through a key-value store, over TCP or in a file, or in a process group of the script's.

A script's process group is the world. The environment may add what a group does not know (the local
rank, the machine's number), and must not contradict it; if it has nothing, the ranks exchange their
machines.

Tests: tests/process_group/test_cluster.py, tests/process_group/test_existing_group.py
"""

import datetime
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep.config import DistributedConfig
from lockstep.errors import RunError, UsageError, first_line
from lockstep.heartbeat.files import Call
from lockstep.machine import accelerator, scratch
from lockstep.machine.environment import (
    GENERATION,
    RankFacts,
    facts_for_group,
    machine_id,
    parent_identity,
)
from lockstep.machine.network import (
    DEFAULT_PORT,
    interface_variables,
    listener,
    port_in_use,
    require_loopback,
)
from lockstep.store_threads import answer_within

_LOOK_SECONDS = 0.02
_MARGIN_SECONDS = 30.0  # beyond the timeout, in which a loaded machine answers


def host_store(host: str, port: int, timeout: datetime.timedelta) -> TCPStore:
    """Host a store that listens only at `host`, if that is an address of this machine.

    torch's own store listens on all interfaces; whoever reaches it can run code here, since its
    values are unpickled. A second store of this process at the same port is the first one. Port 0
    is a free one; one in use raises a UsageError. It waits for nobody.
    """
    require_loopback(host)
    try:
        opened = listener(host, port)
    except UsageError:
        opened = None  # possibly by this process
    if opened is None:
        try:
            return TCPStore(host, port, None, True, timeout, False, multi_tenant=port != 0)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                raise port_in_use(host, port) from error
            raise
    port = opened.getsockname()[1]
    return TCPStore(
        host, port, None, True, timeout, False, multi_tenant=True, master_listen_fd=opened.detach()
    )


def rendezvous(config: DistributedConfig, facts: RankFacts, timeout: datetime.timedelta) -> Store:
    """Return the ranks' key-value store, with keys separate from those of an earlier attempt."""
    store: Store
    method = urlparse(config.init_method)
    if method.scheme == "tcp" and method.hostname and method.port:
        store = _tcp_store(method.hostname, method.port, facts, timeout, hosted_elsewhere=False)
    elif method.scheme == "env" and "MASTER_ADDR" in os.environ:
        port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
        # torchrun's own process hosts it
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _tcp_store(os.environ["MASTER_ADDR"], port, facts, timeout, hosted_elsewhere=agent)
    elif method.scheme == "env":
        store = _file_store(facts)
    else:
        what = (
            f"distributed.init_method {config.init_method!r} is neither env:// nor tcp://HOST:PORT"
        )
        raise UsageError(what, fix="leave it out: the launcher knows the address")
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    generation = os.environ.get(GENERATION, "0")
    return PrefixStore(f"lockstep/attempt-{attempt}.{generation}", store)


def choose_interface(config: DistributedConfig, facts: RankFacts) -> None:
    """Make gloo and NCCL use the interface on the route to rank 0's machine.

    It does nothing if there is one machine.
    """
    if facts.num_nodes > 1:
        host = urlparse(config.init_method).hostname or os.environ["MASTER_ADDR"]
        os.environ.update(interface_variables(host))


def _tcp_store(
    host: str, port: int, facts: RankFacts, timeout: datetime.timedelta, *, hosted_elsewhere: bool
) -> Store:
    """Return the store at which the ranks meet, hosted by rank 0 or by the launcher."""

    def connect() -> Store:
        if hosted_elsewhere:
            return TCPStore(host, port, facts.world_size, False, timeout)
        if facts.rank == 0:
            store = host_store(host, port, timeout)
        else:
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        _meet(store, facts, timeout)
        return store

    try:
        # behind a link that is cut meanwhile, a store's own timeouts do not end its calls
        return answer_within(timeout.total_seconds() + _MARGIN_SECONDS, connect)
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
        what = (
            f"rank {facts.rank} did not meet the other ranks at {host}:{port} within"
            f" {timeout.total_seconds():g} s"
        )
        fix = (
            f"check that all {facts.world_size} ranks were started, that {host} is the machine of"
            " rank 0 and that it can be reached from here: on that port for meeting, on any port"
            " for the traffic between ranks"
        )
        raise RunError(what, why=first_line(error), fix=fix) from error


_WORLD = "lockstep/world-size"
_DIFFERS = "lockstep/world-size-differs"
_HERE = "lockstep/here/"


def _meet(store: TCPStore, facts: RankFacts, timeout: datetime.timedelta) -> None:
    """Wait for all ranks.

    Raises UsageError: they count themselves differently; DistStoreError: some did not come.
    """
    if facts.rank == 0:
        store.set(_WORLD, str(facts.world_size))
    theirs = int(store.get(_WORLD))
    if theirs != facts.world_size:
        store.set(_DIFFERS, f"{facts.rank} {facts.world_size}")
        raise _another_world(facts.rank, facts.world_size, theirs)
    store.set(f"{_HERE}{facts.rank}", "")
    wanted = [f"{_HERE}{rank}" for rank in range(facts.world_size)]
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(wanted):
        if store.check([_DIFFERS]):
            rank, size = map(int, store.get(_DIFFERS).split())
            raise _another_world(rank, size, theirs)
        if time.monotonic() > deadline:
            missing = [
                str(rank) for rank in range(facts.world_size) if not store.check([f"{_HERE}{rank}"])
            ]
            raise dist.DistStoreError(f"no sign of rank {', '.join(missing)}")
        time.sleep(_LOOK_SECONDS)


def _another_world(rank: int, size: int, of_main: int) -> UsageError:
    what = f"WORLD_SIZE is {size} on rank {rank}, and {of_main} on rank 0"
    fix = (
        "set WORLD_SIZE to the number of all ranks on all machines, the same on each; RANK counts"
        " them from 0"
    )
    return UsageError(what, where="the environment: WORLD_SIZE", fix=fix)


def _file_store(facts: RankFacts) -> Store:
    """Return a store in a file, for ranks of one machine without an address.

    Each can derive its name.
    """
    if facts.num_nodes > 1:
        what = f"{facts.world_size} ranks on {facts.num_nodes} machines need an address to meet at"
        fix = (
            "set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there; under"
            " Slurm:"
            ' export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            " MASTER_PORT=29500"
        )
        raise UsageError(what, where="the environment: MASTER_ADDR is not set", fix=fix)
    path = Path(tempfile.gettempdir(), f"lockstep-rendezvous-{os.getuid()}-{_job_name(facts)}")
    if facts.rank == 0:
        scratch.sweep()
        scratch.own(path)
    return FileStore(str(path), facts.world_size)


def _job_name(facts: RankFacts) -> str:
    """Return a name that only the ranks of this job share.

    It comes from the scheduler's job, or from the common parent process.
    """
    names = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "TORCHELASTIC_RUN_ID",
    )
    known = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return hashlib.sha256(
        f"{known or parent_identity()} {attempt} {facts.world_size}".encode()
    ).hexdigest()[:16]


class StoredDepartures:
    """Tells the ranks of other machines that this one has left.

    It does so through the store of their process group.

    Args:
        store: of the process group; keys that are set stay when a rank has ended.
        number: of this world among those that the ranks have made through the store, from 1.
    """

    def __init__(self, store: Store, rank: int, world_size: int, number: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = f"lockstep/left-{number}"
        self._any = f"{self._prefix}/any"

    def announce(self, last: Call | None) -> None:
        """Announce that this rank makes no more calls.

        Neither key waits for an answer: the store may have ended, too.
        """
        with suppress(RuntimeError):
            self._store.set(
                f"{self._prefix}/{self._rank}", json.dumps(None if last is None else asdict(last))
            )
            self._store.set(self._any, "")

    def announced(self) -> dict[int, Call | None]:
        """Return the ranks that have announced it, with their last calls.

        None if the store can't be asked any more.
        """
        found = {}
        with suppress(RuntimeError):
            # one question where nobody has left, however many ranks ask
            if not self._store.check([self._any]):
                return {}
            for rank in range(self._world_size):
                key = f"{self._prefix}/{rank}"
                if rank != self._rank and self._store.check([key]):
                    last = json.loads(self._store.get(key))
                    found[rank] = None if last is None else Call(**last)
        return found


@dataclass(frozen=True)
class Place:
    """The place of a rank, as it tells the others."""

    machine: str  # from `machine_id`
    local_rank: int | None  # the rank's LOCAL_RANK; None if it is not set
    gpu: str | None  # type and index of the GPU that the script chose; None if it has used none


def facts_of_existing_group(
    environ: Mapping[str, str] | None = None,
) -> tuple[RankFacts, str | None]:
    """Return this process's place in the script's group, and the GPU that the script chose.

    None: the local rank's.

    All ranks must call it: if the environment does not have the local rank, they exchange their
    places.

    Raises UsageError: the environment contradicts the group, or two ranks of one machine have the
    same LOCAL_RANK.
    """
    env = os.environ if environ is None else environ
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    complete, local_rank = facts_for_group(rank, world_size, env)
    if complete is not None:
        return complete, None
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    kind = accelerator.in_use()
    chosen = None if kind is None else f"{kind}:{accelerator.current_index(kind)}"
    own = Place(
        machine_id(),
        local_rank,
        str(bound) if bound is not None and bound.type != "cpu" else chosen,
    )
    places: list[Place] = [own] * world_size
    if world_size > 1:
        dist.all_gather_object(places, own)
    return facts_from_places(rank, places)


def facts_over_store(
    facts: RankFacts, store: Store, environ: Mapping[str, str] | None = None
) -> RankFacts:
    """Return the facts of a rank that knows only its rank and the world size.

    The rest comes from the other ranks' places.

    If the environment has the local rank and the number of ranks on the machine, they are used and
    nothing is exchanged. Otherwise all ranks call it before they create the process group: the
    device depends on the local rank.
    """
    complete, local_rank = facts_for_group(
        facts.rank, facts.world_size, os.environ if environ is None else environ
    )
    if complete is not None or facts.world_size == 1:
        return facts
    own = {"machine": machine_id(), "local_rank": local_rank}
    store.set(f"lockstep/place/{facts.rank}", json.dumps(own))
    received = [json.loads(store.get(f"lockstep/place/{rank}")) for rank in range(facts.world_size)]
    found, _ = facts_from_places(facts.rank, [Place(**one, gpu=None) for one in received])
    return replace(found, launcher=facts.launcher)


def facts_from_places(rank: int, places: Sequence[Place]) -> tuple[RankFacts, str | None]:
    """Return a rank's facts, and the GPU that its script chose, from all ranks' places.

    GPUs count as chosen if each rank of the machine uses another one; else all of them have the
    default, GPU 0.

    Raises UsageError: two ranks of the machine have the same LOCAL_RANK.
    """
    machines = list(dict.fromkeys(place.machine for place in places))
    here = [other for other, place in enumerate(places) if place.machine == places[rank].machine]
    given = [places[other].local_rank for other in here]
    local_ranks = [index if one is None else one for index, one in enumerate(given)]
    local_rank = local_ranks[here.index(rank)]
    same = [
        str(other) for other, theirs in zip(here, local_ranks, strict=True) if theirs == local_rank
    ]
    if len(same) > 1:
        what = (
            f"ranks {' and '.join(same)} are on one machine, and both have the local rank"
            f" {local_rank}"
        )
        why = "the processes that a script starts inherit its variables"
        fix = "in each rank, before init_process_group: os.environ['LOCAL_RANK'] = str(local_rank)"
        raise UsageError(what, where="the environment: LOCAL_RANK", why=why, fix=fix)
    gpus = [places[other].gpu for other in here]
    chosen = places[rank].gpu if None not in gpus and len(set(gpus)) == len(gpus) else None
    node = machines.index(places[rank].machine)
    return RankFacts(rank, local_rank, len(places), len(here), node, "the script"), chosen
