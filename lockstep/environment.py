"""Who am I among the ranks? Read from the environment that a launcher sets; nothing here imports torch.

torchrun, `accelerate launch` and the legacy `torch.distributed.launch` set RANK, LOCAL_RANK, WORLD_SIZE and
LOCAL_WORLD_SIZE; srun sets SLURM_*; Open MPI's mpirun sets OMPI_COMM_WORLD_*.
"""

import os
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
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def is_main(self) -> bool:
        return self.rank == 0


_SOURCES: tuple[tuple[str, str, str, str, str, str], ...] = (
    # launcher, rank, local rank, world size, local world size, node rank
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK"),
    ("srun", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID"),
)  # fmt: skip


def rank_facts(environ: Mapping[str, str] | None = None) -> RankFacts:
    """The facts of this process; a process that nobody launched is rank 0 of 1.

    Raises:
        UsageError: the variables contradict each other (RANK not below WORLD_SIZE), or are not numbers.
    """
    env = os.environ if environ is None else environ
    for launcher, rank, local_rank, world, local_world, node in _SOURCES:
        if rank in env and world in env:
            facts = RankFacts(
                rank=_number(env, rank),
                local_rank=_number(env, local_rank, default=_number(env, rank) if local_world not in env else 0),
                world_size=_number(env, world),
                local_world_size=_number(env, local_world, default=_number(env, world)),
                node_rank=_number(env, node, default=0),
                launcher=launcher,
            )
            if not 0 <= facts.rank < facts.world_size:
                raise UsageError(
                    f"{rank}={facts.rank} is not below {world}={facts.world_size}",
                    where="the environment",
                    why=f"{rank} numbers processes over all machines, not machines",
                    fix="let the launcher set it: rank = node_rank × processes per node + local_rank",
                )
            return facts
    return RankFacts()


def is_worker(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process as one of several ranks (or as the only one)."""
    return rank_facts(environ).launcher != "none"


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        assert default is not None
        return default
    try:
        return int(text.split("(")[0])  # SLURM_NTASKS_PER_NODE may read "4(x2)"
    except ValueError:
        raise UsageError(f"{name} should be a whole number, but is {text!r}", where="the environment") from None


def parent_identity() -> str:
    """Names the process that started this one: its children share it, and no earlier or later process has it (Linux)."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return f"{parent}-{started}"
