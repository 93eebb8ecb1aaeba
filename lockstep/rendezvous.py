"""Where the ranks of a process group find each other: a key-value store, over TCP or in a file.

Source: torch.distributed's `env://` and `tcp://` conventions (docs.pytorch.org/docs/stable/distributed.html).
"""

import datetime
import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep import scratch
from lockstep.config import DistributedConfig
from lockstep.environment import RankFacts, parent_identity
from lockstep.errors import RunError, UsageError
from lockstep.network import DEFAULT_PORT, interface_variables, listener, port_in_use


def host_store(host: str, port: int, timeout: datetime.timedelta, *, wait_for: int | None = None) -> TCPStore:
    """Host a store, which listens at `host` alone where that is an address of this machine.

    torch's own listens on all interfaces; whoever reaches it can run code here, since what lies in it is unpickled.
    A second store of this process at the same port is the first one.

    Args:
        port: 0: a free one.
        wait_for: wait for so many ranks, this one among them; None: for nobody.

    Raises:
        UsageError: the port is in use.
    """
    try:
        opened = listener(host, port)
    except UsageError:
        opened = None  # perhaps by this process
    if opened is None:
        try:
            return TCPStore(host, port, wait_for, True, timeout, wait_for is not None, multi_tenant=port != 0)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                raise port_in_use(host, port) from error
            raise
    port = opened.getsockname()[1]
    return TCPStore(
        host, port, wait_for, True, timeout, wait_for is not None, multi_tenant=True, master_listen_fd=opened.detach()
    )


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
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"lockstep/attempt-{attempt}", store)


def choose_interface(config: DistributedConfig, facts: RankFacts) -> None:
    """Have gloo and NCCL use the interface that leads to rank 0's machine, where there are several machines."""
    if facts.num_nodes > 1:
        host = urlparse(config.init_method).hostname or os.environ["MASTER_ADDR"]
        os.environ.update(interface_variables(host))


def _tcp_store(host: str, port: int, facts: RankFacts, timeout: datetime.timedelta, *, hosted_elsewhere: bool) -> Store:
    try:
        if facts.rank == 0 and not hosted_elsewhere:
            return host_store(host, port, timeout, wait_for=facts.world_size)
        return TCPStore(host, port, facts.world_size, False, timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
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
    path = Path(tempfile.gettempdir(), f"lockstep-meeting-{os.getuid()}-{_job_name(facts)}")
    if facts.rank == 0:
        scratch.sweep()
        scratch.own(path)
    return FileStore(str(path), facts.world_size)


def _job_name(facts: RankFacts) -> str:
    """Something that the ranks of this job share and no other job has: the scheduler's job, or the common parent."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "TORCHELASTIC_RUN_ID")
    known = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return hashlib.sha256(f"{known or parent_identity()} {attempt} {facts.world_size}".encode()).hexdigest()[:16]
