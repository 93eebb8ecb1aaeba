"""Who am I, who else is there: the device of this rank, and the process group that joins the ranks.

`setup()` does, in this order: environment variables, the device from the *local* rank, the number of CPU threads, the
rendezvous, the process group. The rendezvous is built here rather than by `init_process_group(init_method=…)`, so that
one machine needs no MASTER_ADDR, a restarted run never reads the keys of the attempt before it, and a port in use is
one clear message.

Source: torch.distributed's `env://` and `tcp://` conventions (docs.pytorch.org/docs/stable/distributed.html).
"""

import atexit
import datetime
import hashlib
import ipaddress
import logging
import os
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload
from urllib.parse import urlparse

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep import groups
from lockstep.config import DistributedConfig
from lockstep.environment import RankFacts, parent_identity, rank_facts
from lockstep.errors import RunError, UsageError

DEFAULT_PORT = 29500  # torchrun's
ReduceOp = Literal["mean", "sum", "max", "min"]

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Cluster:
    """This process's place among the ranks.

    Attributes:
        facts: rank, local rank, world size, node, and who launched it.
        device: where this rank's tensors live.
        backend: `gloo`, `nccl` or `mpi`, or `none` where no process group was needed.
    """

    facts: RankFacts
    device: torch.device
    backend: str


_current: Cluster | None = None
_group_is_ours = False


def setup(distributed: DistributedConfig | None = None) -> Cluster:
    """Choose this rank's device and join the other ranks. A second call returns what the first one made.

    A process that nobody launched is rank 0 of 1 and needs no process group. A process group that exists already is
    used as it is.

    Raises:
        UsageError: the device or the backend isn't there, an address is missing, a port is in use.
        RunError: the other ranks did not come within the timeout.
    """
    global _current
    if _current is not None:
        return _current
    config = distributed if distributed is not None else DistributedConfig()
    os.environ.update(environment(config))
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # read by torch once, at its import
    facts = rank_facts()
    device = _choose_device(config.device, facts)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything else touches a GPU, or every rank makes a context on GPU 0
    _share_out_threads(facts)
    backend = _choose_backend(config.backend, device)
    if facts.launcher == "none" and not dist.is_initialized():
        backend = "none"
    else:
        _warn_of_nccl_timeout(facts)
        _join(config, facts, device, backend)
    _current = Cluster(facts, device, backend)
    return _current


def cleanup() -> None:
    """Leave the process group that `setup` made; harmless where there is none."""
    global _current, _group_is_ours
    groups.forget()  # those that live on into the interpreter's own end take it down with them
    if _group_is_ours and dist.is_initialized():
        dist.destroy_process_group()
    _current, _group_is_ours = None, False


def environment(config: DistributedConfig) -> dict[str, str]:
    """The environment variables that a config asks for on every rank: the debug switches and `distributed.env`."""
    switches: dict[str, dict[str, str]] = {
        "none": {},
        "info": {"TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_DEBUG": "WARN"},
        "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"},
    }
    return switches[config.debug] | {name: str(value) for name, value in config.env.items()}


def rank() -> int:
    """This process's rank, 0 when it runs alone."""
    return dist.get_rank() if dist.is_initialized() else rank_facts().rank


def world_size() -> int:
    """The number of ranks, 1 when this process runs alone."""
    return dist.get_world_size() if dist.is_initialized() else rank_facts().world_size


def local_rank() -> int:
    """This process's index on its machine."""
    return rank_facts().local_rank


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def barrier() -> None:
    """Wait until every rank is here. All ranks must call it."""
    if _joined():
        dist.barrier()


@overload
def all_reduce(value: torch.Tensor, op: ReduceOp = ...) -> torch.Tensor: ...
@overload
def all_reduce(value: float, op: ReduceOp = ...) -> float: ...
def all_reduce(value: torch.Tensor | float, op: ReduceOp = "mean") -> torch.Tensor | float:
    """`value` reduced over all ranks; every rank gets the result. All ranks must call it.

    Args:
        value: a number, or a tensor of the same shape and dtype on every rank (left as it is).
        op: "mean", "sum", "max" or "min".

    Returns:
        a float for "mean" of numbers, a number of the same kind for the others; for a tensor a new tensor of its
        shape, on its device.

    Raises:
        UsageError: `op` is none of these, or the mean of an integer tensor is asked for.
    """
    operations = {
        "mean": dist.ReduceOp.SUM,
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }
    if op not in operations:
        raise UsageError(f"all_reduce can't do {op!r}", fix=f"choose one of {', '.join(operations)}")
    if not isinstance(value, torch.Tensor):
        whole = isinstance(value, int) and op != "mean"
        number = torch.tensor(value, dtype=torch.int64 if whole else torch.float64)
        return all_reduce(number, op).item()
    if op == "mean" and not (value.is_floating_point() or value.is_complex()):
        raise UsageError(
            f"the mean of a tensor of {value.dtype} isn't of that dtype", where="all_reduce", fix="pass value.float()"
        )
    result = value.detach().clone(memory_format=torch.contiguous_format)
    if _joined():
        dist.all_reduce(result, operations[op])
        if op == "mean":
            result /= dist.get_world_size()
    return result


def _joined() -> bool:
    if dist.is_initialized():
        return True
    if rank_facts().world_size > 1:
        raise UsageError("this rank has not joined the others yet", fix="call lockstep.setup() first")
    return False


# ---- device, threads, backend ----


def _choose_device(wanted: str, facts: RankFacts) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "distributed.device is cuda, but torch sees no GPU here",
            why="CUDA_VISIBLE_DEVICES is empty, the driver is missing, or this torch is a CPU build"
            f" (torch {torch.__version__})",
            fix="set distributed.device: cpu, or run where a GPU is",
        )
    count = torch.cuda.device_count()
    if facts.launcher == "srun" and count == 1:
        return torch.device("cuda", 0)  # srun --gpus-per-task gives each rank a GPU that it sees as number 0
    if facts.local_rank >= count:
        raise UsageError(
            f"local rank {facts.local_rank} has no GPU of its own: {facts.local_world_size} ranks on this machine, "
            f"{count} GPU{'s' * (count != 1)} visible",
            fix=f"--nproc-per-node {count}, or distributed.device: cpu",
        )
    return torch.device("cuda", facts.local_rank)


def _share_out_threads(facts: RankFacts) -> None:
    """Give each rank its share of the cores: ranks with a thread for every core each slow one another down."""
    if "OMP_NUM_THREADS" not in os.environ and facts.local_world_size > 1:
        torch.set_num_threads(threads_per_rank(facts.local_world_size))


def threads_per_rank(local_world_size: int) -> int:
    """Cores that this process may use, over the ranks on this machine; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, local_world_size))


def _choose_backend(wanted: str, device: torch.device) -> str:
    if wanted == "mpi" and not dist.is_mpi_available():
        raise UsageError(
            "distributed.backend is mpi, but this torch was built without MPI",
            why="the wheels of torch never have it; it needs a torch compiled where MPI is installed",
            fix="distributed.backend: auto (nccl on GPUs, gloo on CPUs); mpirun works as a launcher with these",
        )
    if wanted == "nccl" and device.type == "cpu":
        raise UsageError("distributed.backend is nccl, but the device is cpu", fix="distributed.backend: auto")
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def _warn_of_nccl_timeout(facts: RankFacts) -> None:
    names = sorted(name for name in os.environ if name.startswith("NCCL_TIMEOUT"))
    if names and facts.is_main:
        _log.warning(
            "warning: %s does nothing in torch; the timeout is distributed.timeout_seconds in the config",
            ", ".join(names),
        )


# ---- addresses ----


def address_towards(host: str) -> str | None:
    """This machine's address on the way to `host`; None where the name doesn't resolve or there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def gloo_interface(host: str) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME, where gloo has to be told.

    gloo offers its peers the address that the host's own name resolves to. Where that is the loopback, as on Debian and
    in containers, other machines can't reach it; the interface towards `host`, the machine of rank 0, is the right one.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own, towards = address_towards(socket.gethostname()), address_towards(host)
    if towards is None or _is_loopback(towards) or (own is not None and not _is_loopback(own)):
        return {}
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address.partition("%")[0] == towards for address in addresses)
    ]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


# ---- rendezvous ----


def _join(config: DistributedConfig, facts: RankFacts, device: torch.device, backend: str) -> None:
    global _group_is_ours
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=config.timeout_seconds)
    store = rendezvous(config, facts, timeout)
    # gloo beside nccl serves tensors that live in the host's memory (checkpoints, pickled objects).
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" and config.backend == "auto" else backend
    dist.init_process_group(
        both,
        store=store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and "nccl" in both else None,
    )
    _group_is_ours = True
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    with suppress(Exception):  # the interpreter is going down and peers may be gone: nobody can be told any more
        cleanup()


def rendezvous(config: DistributedConfig, facts: RankFacts, timeout: datetime.timedelta) -> Store:
    """The key-value store where the ranks find each other, its keys apart from those of an earlier attempt."""
    store: Store
    method = urlparse(config.init_method)
    if method.scheme == "tcp" and method.hostname and method.port:
        store = _tcp_store(method.hostname, method.port, facts, timeout, hosted_elsewhere=False)
    elif method.scheme == "env" and "MASTER_ADDR" in os.environ:
        port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process hosts it
        store = _tcp_store(os.environ["MASTER_ADDR"], port, facts, timeout, hosted_elsewhere=agent)
    elif method.scheme == "env":
        store = _file_store(facts)
    else:
        raise UsageError(
            f"distributed.init_method {config.init_method!r} is neither env:// nor tcp://HOST:PORT",
            fix="leave it out: the launcher knows the address",
        )
    if facts.num_nodes > 1:
        os.environ.update(gloo_interface(method.hostname or os.environ["MASTER_ADDR"]))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"lockstep/attempt-{attempt}", store)


def _tcp_store(host: str, port: int, facts: RankFacts, timeout: datetime.timedelta, *, hosted_elsewhere: bool) -> Store:
    hosting = facts.rank == 0 and not hosted_elsewhere
    try:
        return TCPStore(host, port, facts.world_size, is_master=hosting, timeout=timeout, multi_tenant=True)
    except dist.DistNetworkError as error:
        if hosting and "EADDRINUSE" in str(error):
            raise UsageError(
                f"port {port} is in use on this machine",
                where=f"rank 0, which hosts the meeting point of the {facts.world_size} ranks at {host}:{port}",
                why="another run is there, or an earlier one has not gone yet",
                fix="choose another --master-port (MASTER_PORT); on one machine `lockstep train` finds a free one",
            ) from error
        raise _nobody_there(host, port, facts, timeout, error) from error
    except dist.DistStoreError as error:
        raise _nobody_there(host, port, facts, timeout, error) from error


def _nobody_there(host: str, port: int, facts: RankFacts, timeout: datetime.timedelta, error: Exception) -> RunError:
    return RunError(
        f"rank {facts.rank} did not meet the other ranks at {host}:{port} within {timeout.total_seconds():g} s",
        why=str(error).splitlines()[0],
        fix=f"check that all {facts.world_size} ranks were started, that {host} is the machine of rank 0 and that it"
        " can be reached from here: on that port for meeting, on any port for the traffic between ranks",
    )


def _file_store(facts: RankFacts) -> Store:
    """No address was given: ranks of one machine meet in a file whose name all of them can work out."""
    if facts.num_nodes > 1:
        raise UsageError(
            f"{facts.world_size} ranks on {facts.num_nodes} machines need an address to meet at",
            where="the environment: MASTER_ADDR is not set",
            fix="set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there; under Slurm:"
            ' export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500',
        )
    name = f"lockstep-{os.getuid()}-{_job_name(facts)}"
    path = Path(tempfile.gettempdir(), name)
    if facts.rank == 0:
        atexit.register(path.unlink, missing_ok=True)
    return FileStore(str(path), facts.world_size)


def _job_name(facts: RankFacts) -> str:
    """Something that the ranks of this job share and no other job has: the scheduler's job, or the common parent."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "TORCHELASTIC_RUN_ID")
    known = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return hashlib.sha256(f"{known or parent_identity()} {attempt} {facts.world_size}".encode()).hexdigest()[:16]
