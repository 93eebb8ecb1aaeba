"""Who am I among the ranks? Read from the environment that a launcher sets; nothing here imports torch.

torchrun, `accelerate launch` and the legacy `torch.distributed.launch` set RANK, LOCAL_RANK, WORLD_SIZE and
LOCAL_WORLD_SIZE; srun sets SLURM_*; Open MPI's mpirun sets OMPI_COMM_WORLD_*, MPICH's and Intel's PMI_* and MPI_*.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError


@dataclass(frozen=True)
class RankFacts:
    """One process's place in the job. All are counts or zero-based indices, as torchrun names them."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "none"

    @property
    def num_nodes(self) -> int:
        """Machines, if all of them have as many ranks as this one."""
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


@dataclass(frozen=True)
class _Source:
    """The variables of one kind of launcher."""

    launcher: str
    rank: str
    local_rank: str
    world_size: str
    local_world_size: str
    node_rank: str  # "": it does not say
    also: str | None = None  # which tells a rank from a process that merely runs where ranks could


_SOURCES = (
    _Source("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    _Source("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_SIZE", ""),  # its NODE_RANK numbers processes on a node, not nodes
    _Source("mpirun", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS", ""),  # MPICH, Intel MPI
    # In a batch script, outside of srun, SLURM_PROCID and SLURM_NTASKS are set too: that process is no rank.
    _Source("srun", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
            also="SLURM_STEP_ID"),
)  # fmt: skip


def rank_facts(environ: Mapping[str, str] | None = None) -> RankFacts:
    """The facts of this process; a process that nobody launched is rank 0 of 1.

    Where a launcher doesn't say how many ranks are on this machine, all of them are.

    Raises:
        UsageError: the variables contradict each other (RANK not below WORLD_SIZE), or are not numbers.
    """
    env = os.environ if environ is None else environ
    for source in _SOURCES:
        if source.rank in env and source.world_size in env and (source.also is None or source.also in env):
            return _facts(env, source)
    return RankFacts()


def _facts(env: Mapping[str, str], source: _Source) -> RankFacts:
    rank, world = _number(env, source.rank), _number(env, source.world_size)
    if not 0 <= rank < world:
        raise UsageError(
            f"{source.rank}={rank} is not below {source.world_size}={world}",
            where="the environment",
            why=f"{source.rank} numbers processes over all machines, not machines",
            fix="let the launcher set it: rank = node_rank × processes per node + local_rank",
        )
    node = _number(env, source.node_rank, default=0)
    local_world = world
    if source.local_world_size in env:
        counts = _per_node(env, source.local_world_size)
        local_world = counts[min(node, len(counts) - 1)]
    return RankFacts(
        rank=rank,
        local_rank=_number(env, source.local_rank, default=rank % local_world),
        world_size=world,
        local_world_size=local_world,
        node_rank=_number(env, source.node_rank, default=rank // local_world),
        launcher=source.launcher,
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        assert default is not None
        return default
    try:
        return int(text)
    except ValueError:
        raise _no_number(name, text) from None


def _per_node(env: Mapping[str, str], name: str) -> list[int]:
    """Counts by node: `4`, or as Slurm writes them, `4(x2),3`."""
    counts: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or int(found[1]) == 0:
            raise _no_number(name, env[name])
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _no_number(name: str, text: str) -> UsageError:
    return UsageError(
        f"{name} should be a whole number, but is {text!r}",
        where="the environment",
        fix="the launcher sets it; unset it, or start the ranks by one launcher",
    )


def parent_identity() -> str:
    """Names the process that started this one: its children share it, no earlier or later process has it (Linux)."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return f"{parent}-{started}"
