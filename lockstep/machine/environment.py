"""Reads this process's rank from the environment that a launcher sets. Does not import torch.

torchrun, `accelerate launch` and the legacy `torch.distributed.launch` set RANK, LOCAL_RANK,
WORLD_SIZE and LOCAL_WORLD_SIZE; srun sets SLURM_*; Open MPI's mpirun sets OMPI_COMM_WORLD_*,
MPICH's and Intel's PMI_* and MPI_*.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError

# The variables of a world of one process; port 0: the system picks one, and no other rank needs to
# know it.
RANK_0_OF_1 = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}
RANK_0_OF_1 |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


# The folder in shared memory that a launcher keeps for its ranks, which it may start again.
MEMORY = "LOCKSTEP_MEMORY"
# The file by which a launcher tells its ranks who goes on after deaths (lockstep/live/world.py).
WORLD = "LOCKSTEP_WORLD"
# How often ranks have died since all of them were started, in a rank that went on; unset: never.
GENERATION = "LOCKSTEP_GENERATION"
# The number of which each machine has a multiple of the ranks, in a rank that went on: machines may
# have different numbers of them.
PER_MACHINE = "LOCKSTEP_RANKS_PER_MACHINE"


@dataclass(frozen=True)
class RankFacts:
    """One process's place in the job: counts and zero-based indices, with torchrun's names."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "none"

    @property
    def num_nodes(self) -> int:
        """Number of machines, if all of them have as many ranks as this one."""
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0


@dataclass(frozen=True)
class _Source:
    """The variables of one kind of launcher."""

    launcher: str
    rank: str
    local_rank: str
    world_size: str
    local_world_size: str
    node_rank: str  # "": there is none
    also: str | None = None  # distinguishes a rank from other processes of the job

    def describes(self, env: Mapping[str, str]) -> bool:
        return (
            self.rank in env and self.world_size in env and (self.also is None or self.also in env)
        )


_OF_TORCH = ("RANK", "WORLD_SIZE")
_SOURCES = (
    _Source("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    _Source(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        # its NODE_RANK numbers processes on a node, not nodes
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    # MPICH, Intel MPI
    _Source("mpirun", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS", ""),
    # A batch script has SLURM_PROCID and SLURM_NTASKS even outside of srun, but is not a rank.
    _Source(
        "srun",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        also="SLURM_STEP_ID",
    ),
)


_given_facts: RankFacts | None = None  # facts of a process group that a script created
_are_valid: Callable[[], bool] | None = None  # returns whether that group still exists


def set_rank_facts(facts: RankFacts | None, valid: Callable[[], bool] | None = None) -> None:
    """Make `rank_facts` return these facts, while they are `valid`, and not the environment's.

    None: those again.
    """
    global _given_facts, _are_valid
    _given_facts = facts
    _are_valid = valid


# accelerate sets the last two for several processes; torchrun's, which it starts, have RANK as
# well.
_OF_ACCELERATE = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}


def rank_facts(environ: Mapping[str, str] | None = None) -> RankFacts:
    """Return the facts of this process; a process without a launcher is rank 0 of 1.

    If a launcher does not give the number of ranks on this machine, it is the number of all ranks.

    Raises UsageError: the variables contradict each other, or are not numbers.
    """
    if environ is None and _given_facts is not None and (_are_valid is None or _are_valid()):
        return _given_facts
    env = os.environ if environ is None else environ
    facts = next((_facts(env, source) for source in _SOURCES if source.describes(env)), None)
    alone = [name for name in _OF_TORCH if name in env]
    # by a scheduler's variables
    same = {} if facts is None else {"RANK": facts.rank, "WORLD_SIZE": facts.world_size}
    if len(alone) == 1 and (facts is None or _number(env, alone[0]) != same[alone[0]]):
        (name,) = alone
        (missing,) = {*_OF_TORCH} - {*alone}
        others = (
            f"the variables of {facts.launcher} say rank {facts.rank} of {facts.world_size}"
            if facts
            else None
        )
        why = others or "a rank needs both, or it would train alone"
        what = f"{name}={env[name]} is set, but {missing} is not"
        fix = (
            f"unset {name}, and start the ranks by `lockstep launch`, torchrun or lockstep.spawn;"
            f" or set {missing} too"
        )
        raise UsageError(what, where="the environment", why=why, fix=fix)
    if facts is None and env.keys() >= _OF_ACCELERATE:
        what = "accelerate launch was asked for several processes, and has started one"
        why = (
            "without --multi_gpu, or with --cpu, it starts a single process on a CPU, whatever"
            " --num_processes says"
        )
        fix = (
            "accelerate launch --multi_gpu --num_processes N, which starts ranks on CPUs, too; or"
            " `lockstep launch --nproc-per-node N SCRIPT`"
        )
        if env["MASTER_ADDR"] not in ("127.0.0.1", "localhost"):
            why += "; of several machines, each would train a model of its own"
            fix += (
                f" with --nnodes N --node-rank R --master-addr {env['MASTER_ADDR']} on each machine"
            )
        raise UsageError(what, where="the command", why=why, fix=fix)
    return facts or RankFacts()


def ranks_per_machine(facts: RankFacts) -> int:
    """Return the number of ranks of a machine by which layouts are made, the same on all ranks."""
    return int(os.environ.get(PER_MACHINE, facts.local_world_size))


def facts_for_group(
    rank: int, world_size: int, env: Mapping[str, str]
) -> tuple[RankFacts | None, int | None]:
    """Return the facts of rank `rank` of `world_size`, and LOCAL_RANK if it is set.

    The facts are None unless the environment has all of them.

    Schedulers number tasks, each of which may start several ranks: their numbers are ignored if
    they differ from the group's. Raises UsageError: RANK or WORLD_SIZE differs from the group's.
    """
    numbers = dict(zip(_OF_TORCH, (rank, world_size), strict=True))
    if any(name in env and _number(env, name) != number for name, number in numbers.items()):
        variables = " and ".join(f"{name}={env[name]}" for name in _OF_TORCH if name in env)
        raise UsageError(
            f"this process is rank {rank} of {world_size} in its process group, but the environment"
            f" says {variables}",
            where="init_process_group(…), and the environment",
            why=(
                "RANK numbers processes over all machines and WORLD_SIZE counts them; processes"
                " that a script starts inherit both"
            ),
            fix=(
                "call init_process_group with the numbers of the whole job, and before it, in each"
                " rank: os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size)); or unset"
                " RANK and WORLD_SIZE and start the ranks by lockstep.spawn(fn, nprocs=…, nnodes=…,"
                " node_rank=…, master_addr=…)"
            ),
        )
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None
    for source in _SOURCES:
        if source.describes(env) and {source.local_rank, source.local_world_size} <= env.keys():
            facts = _facts(env, source)
            if (facts.rank, facts.world_size) == (rank, world_size):
                return facts, local_rank
    return None, local_rank


def _facts(env: Mapping[str, str], source: _Source) -> RankFacts:
    """Return a rank's place from the variables that one launcher sets."""
    rank = _number(env, source.rank)
    world = _number(env, source.world_size)
    if not 0 <= rank < world:
        what = f"{source.rank}={rank} is not below {source.world_size}={world}"
        why = f"{source.rank} numbers processes over all machines, not machines"
        fix = "let the launcher set it: rank = node_rank × processes per node + local_rank"
        raise UsageError(what, where="the environment", why=why, fix=fix)
    node = _number(env, source.node_rank, default=0)
    local_world = world
    if source.local_world_size in env:
        counts = _per_node(env, source.local_world_size)
        local_world = counts[min(node, len(counts) - 1)]
    local_rank = _number(env, source.local_rank, default=rank % local_world)
    node_rank = _number(env, source.node_rank, default=rank // local_world)
    return RankFacts(rank, local_rank, world, local_world, node_rank, source.launcher)


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
    """Return the counts per node from `4`, or from Slurm's form, `4(x2),3`."""
    counts: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or int(found[1]) == 0:
            raise _no_number(name, env[name])
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _no_number(name: str, text: str) -> UsageError:
    fix = "the launcher sets it; unset it, or start the ranks by one launcher"
    return UsageError(
        f"{name} should be a whole number, but is {text!r}", where="the environment", fix=fix
    )


def check_numbers(env: Mapping[str, str]) -> None:
    """Reject variables that torch would read as numbers, and that are none.

    torch would end the process with a C++ error.
    """
    for name in ("MASTER_PORT", "TORCH_FR_BUFFER_SIZE"):
        if name in env and not env[name].strip().isdecimal():
            what = f"{name} should be a whole number, but is {env[name]!r}"
            raise UsageError(what, where="the environment", fix=f"unset {name}: it is chosen then")


def machine_id() -> str:
    """Return an identity of this machine (and network namespace).

    Host names may be equal on several machines.
    """
    try:
        space = os.readlink("/proc/self/ns/net")
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {space}"
    except OSError:
        return socket.gethostname()


def parent_identity() -> str:
    """Return an identity of the parent process, which no earlier or later process has (Linux)."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return f"{parent}-{started}"
