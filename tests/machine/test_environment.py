"""Who a process is, by what its launcher says."""

import pytest

from lockstep.errors import UsageError
from lockstep.machine.environment import RankFacts, check_numbers, rank_facts


def test_nobody_launched_it() -> None:
    assert rank_facts({}) == RankFacts(0, 0, 1, 1, 0, "none")


def test_torchrun() -> None:
    env = {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
    }
    facts = rank_facts(env)
    assert facts == RankFacts(6, 2, 8, 4, 1, "torchrun")
    assert facts.num_nodes == 2


def test_ranks_that_somebody_numbered_by_hand() -> None:
    assert rank_facts({"RANK": "1", "WORLD_SIZE": "2"}) == RankFacts(1, 1, 2, 2, 0, "torchrun")


def test_open_mpi() -> None:
    """Its NODE_RANK numbers processes on a node (of all jobs there); it tells no node's number."""
    for rank in range(4):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "SIZE": 4,
            "LOCAL_SIZE": 2,
            "NODE_RANK": rank % 2,
        }
        facts = rank_facts({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()})
        assert facts == RankFacts(rank, rank % 2, 4, 2, rank // 2, "mpirun")


def test_mpich() -> None:
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert rank_facts(env) == RankFacts(3, 1, 4, 2, 1, "mpirun")


@pytest.mark.parametrize(("node", "here"), [(0, 4), (1, 4), (2, 3)])
def test_srun_with_unequal_machines(node: int, here: int) -> None:
    env = {
        "SLURM_PROCID": str(4 * node),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "11",
        "SLURM_NODEID": str(node),
    }
    env |= {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    facts = rank_facts(env)
    assert (facts.launcher, facts.local_world_size, facts.node_rank) == ("srun", here, node)


def test_a_batch_script_is_no_rank() -> None:
    """Slurm tells it SLURM_PROCID=0 and the number of tasks; it would wait for tasks that nobody
    has started.
    """
    env = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "5",
    }
    assert rank_facts(env) == RankFacts()


def test_trap_30_a_machine_number_as_rank_is_refused() -> None:
    """RANK used as a machine's number: with one process a machine it goes unnoticed, with more
    there are two worlds.
    """
    with pytest.raises(UsageError, match="RANK=2 is not below WORLD_SIZE=2") as raised:
        rank_facts({"RANK": "2", "WORLD_SIZE": "2"})
    assert "node_rank × processes per node + local_rank" in str(raised.value)


@pytest.mark.parametrize(
    "wrong", [{"RANK": "one"}, {"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "a(x2)"}]
)
def test_what_is_no_number_is_refused_by_name(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        rank_facts({"RANK": "0", "WORLD_SIZE": "2", **wrong})


@pytest.mark.parametrize(("name", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_one_of_rank_and_world_size_alone_is_refused(name: str, missing: str) -> None:
    """Each process would train alone, without a word."""
    with pytest.raises(UsageError, match=f"{name}=1 is set, but {missing} is not"):
        rank_facts({name: "1"})


def test_world_size_beside_a_schedulers_variables_must_agree() -> None:
    """Job scripts export WORLD_SIZE, and srun numbers the tasks."""
    srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    assert rank_facts(srun | {"WORLD_SIZE": "2"}).rank == 1
    with pytest.raises(UsageError, match="the variables of srun say rank 1 of 2"):
        rank_facts(srun | {"WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"WORLD_SIZE": "abc", "RANK": "0"},
        {"SLURM_PROCID": "x", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
        {"WORLD_SIZE": "abc", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
        {"MASTER_PORT": "abc"},
        {"TORCH_FR_BUFFER_SIZE": "abc"},
    ],
)
def test_texts_in_the_place_of_numbers_are_one_error(wrong: dict[str, str]) -> None:
    """torch ended with an error in C++, int() with a traceback."""
    read = rank_facts if len(wrong) > 1 else check_numbers
    with pytest.raises(
        UsageError, match=f"{next(iter(wrong))} should be a whole number, but is '(abc|x)'"
    ):
        read(wrong)


def test_accelerate_that_starts_one_process_for_several_is_told() -> None:
    """On a CPU, without --multi_gpu, it sets the address for several processes, and starts one."""
    alone = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
    assert rank_facts(alone).world_size == 1
    with pytest.raises(UsageError, match="was asked for several processes, and has started one"):
        rank_facts({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    with pytest.raises(UsageError) as machines:
        rank_facts({**alone, "MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29500"})
    assert "each would train a model of its own" in str(machines.value)
    assert "--master-addr 10.99.0.1 on each machine" in str(machines.value)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (
        rank_facts({**alone, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).rank == 1
    )
