"""A process group that the script makes itself is the world: `torch.multiprocessing.spawn` and
`init_process_group`.
"""

import io
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.config import DistributedConfig
from lockstep.errors import UsageError
from lockstep.machine.environment import RankFacts, facts_for_group
from lockstep.process_group import cluster, collectives, rendezvous
from lockstep.process_group.cluster import Cluster
from lockstep.process_group.rendezvous import Place, facts_from_places
from lockstep.torch_compat.group_options import timeout_of
from tests.forked import Forked
from tests.launch.shared import environment, finish
from tests.ranks import free_port, run_ranks

# The two scripts below have the shape of the guides of FRAMEWORM (`train_ddp`) and geometry_os
# (`train`): their own `setup` and `cleanup`, `mp.spawn`, an address in the environment or in the
# call. On a machine without GPUs the backend is gloo and nothing is moved to one; the model stays
# bare, since Lockstep wraps it.
_SCRIPT = """
import json, os, sys, warnings
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import lockstep
from lockstep import Trainer, UsageError

torch.manual_seed(0)
train_dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
val_loader = DataLoader(train_dataset, batch_size=8)


def get_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def setup(rank, world_size):
    dist.init_process_group(backend="gloo", init_method="env://", rank=rank, world_size=world_size)


def error_of(call):
    try:
        call()
    except UsageError as error:
        return str(error)


def trained(batch_size, **settings):
    model = get_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, nn.MSELoss(), **settings)
    sampler = DistributedSampler(train_dataset, shuffle=True) if dist.is_initialized() else None
    loader = DataLoader(train_dataset, batch_size=batch_size, sampler=sampler, shuffle=sampler is None)
    record = trainer.train(loader, val_loader, epochs=2)
    values = [p.detach().flatten() for p in trainer.placed.parameters.values()]
    return {"layout": str(trainer.layout), "loss": record.loss, "values": torch.cat(values).tolist()}


def frameworm(rank, world_size):
    early = Trainer(get_model(), None, nn.MSELoss(), max_steps=1)     # of one rank: the group comes too late
    setup(rank, world_size)
    said = {"too late": error_of(lambda: early.train(val_loader)), "unknown": error_of(lockstep.local_rank)}
    model = DDP(get_model())
    said["wrapped"] = error_of(lambda: Trainer(model, torch.optim.Adam(model.parameters()), nn.MSELoss()))
    here = lockstep.setup()
    facts = here.facts
    said["setup"] = [facts.rank, facts.local_rank, facts.world_size, facts.local_world_size, facts.node_rank]
    said["helpers"] = [lockstep.rank(), lockstep.local_rank(), lockstep.world_size(), lockstep.is_main_process()]
    said["placed"] = str(lockstep.place(get_model(), loss_fn=nn.MSELoss()))
    said["trained"] = trained(8 // world_size)
    dist.destroy_process_group()
    said["left"] = lockstep.setup().facts.world_size
    return said


def geometry_os(rank, world_size, port, sampler):
    dist.init_process_group(
        backend="gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world_size
    )
    trainer = Trainer(get_model(), loss_fn=nn.MSELoss(), batch_size=8, learning_rate=1e-2)
    sampler = lockstep.DistributedSampler(train_dataset) if sampler else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in DataLoader(train_dataset, batch_size=8, sampler=sampler):
            trainer.training_step(batch)
    values = [p.sum().item() for p in trainer.placed.parameters.values()]
    dist.destroy_process_group()
    return {"values": values, "warned": [str(w.message) for w in caught if "same samples" in str(w.message)]}


def worlds_of_two(rank, world_size):
    setup(rank, world_size)
    found = [error_of(lockstep.setup), error_of(lambda: Trainer(get_model(), None, nn.MSELoss(), max_steps=1))]
    dist.barrier()                                                    # the other rank may still be connecting
    dist.destroy_process_group()
    return found


def train(rank, world_size, ports):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=ports[0])
    said = {"frameworm": frameworm(rank, world_size)}
    said["geometry_os"] = geometry_os(rank, world_size, ports[1], True)
    said["no sampler"] = geometry_os(rank, world_size, ports[2], False)
    os.environ.update(WORLD_SIZE="4", RANK="0", MASTER_PORT=ports[3])
    said["two worlds"] = worlds_of_two(rank, world_size)
    json.dump(said, open(f"said-{rank}.json", "w"))


if __name__ == "__main__":
    mp.start_processes(train, args=(2, sys.argv[2:]), nprocs=2, start_method=sys.argv[1])
    json.dump(trained(4, gradient_accumulation_steps=2), open("alone.json", "w"))
"""


# `mp.spawn` starts fresh processes; forks find the same, and import nothing anew.
@pytest.fixture(scope="module", params=["fork", pytest.param("spawn", marks=pytest.mark.full)])
def spawned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What two ranks said, then one process alone."""
    folder = tmp_path_factory.mktemp("spawned")
    (folder / "script.py").write_text(_SCRIPT)
    ports = [str(free_port()) for _ in range(4)]
    pipe = subprocess.PIPE
    process = Forked(
        [sys.executable, "-m", "script", request.param, *ports],
        cwd=folder,
        env=environment(),
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    ended = finish(process, folder)
    assert ended.code == 0, ended.err
    return [
        json.loads((folder / name).read_text())
        for name in ("said-0.json", "said-1.json", "alone.json")
    ]


def test_the_group_of_the_script_is_the_world_for_every_part(spawned: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(spawned[:2]):
        frameworm = said["frameworm"]
        assert frameworm["setup"] == [rank, rank, 2, 2, 0]
        assert frameworm["helpers"] == [rank, rank, 2, rank == 0]
        assert frameworm["placed"].startswith("PlacedModel(ddp:2 on cpu")
        assert frameworm["left"] == 1


def test_trap_17_a_script_with_mp_spawn_trains_one_model(spawned: list[dict[str, Any]]) -> None:
    """Without a launcher's variables each process took itself for the only one and trained a model
    of its own.
    """
    first = spawned[0]["frameworm"]["trained"]
    second = spawned[1]["frameworm"]["trained"]
    alone = spawned[2]
    assert first["layout"] == "ddp:2"
    assert first["values"] == second["values"]
    assert first["values"] == pytest.approx(alone["values"], rel=1e-5, abs=1e-6)
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for name in ("geometry_os", "no sampler"):
        assert spawned[0][name]["values"] == spawned[1][name]["values"]


def test_a_trainer_made_before_the_group_is_refused(spawned: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(spawned[:2]):
        assert (
            f"was rank 0 of 1 when the model was placed, and is rank {rank} of 2"
            in said["frameworm"]["too late"]
        )


def test_the_local_rank_of_a_script_is_no_guess(spawned: list[dict[str, Any]]) -> None:
    for said in spawned[:2]:
        assert (
            "call lockstep.setup() on all ranks, after init_process_group"
            in said["frameworm"]["unknown"]
        )


def test_a_model_that_the_script_wrapped_is_refused_with_the_line(
    spawned: list[dict[str, Any]],
) -> None:
    assert (
        "delete the line model = DistributedDataParallel(model, …)"
        in spawned[0]["frameworm"]["wrapped"]
    )


def test_trap_12_equal_samples_on_all_ranks_are_noticed(spawned: list[dict[str, Any]]) -> None:
    assert spawned[0]["geometry_os"]["warned"] == []
    assert len(spawned[0]["no sampler"]["warned"]) == 1
    assert "sampler=lockstep.DistributedSampler(dataset)" in spawned[0]["no sampler"]["warned"][0]


def test_variables_that_say_another_world_are_an_error(spawned: list[dict[str, Any]]) -> None:
    """`WORLD_SIZE=4 RANK=0 python train.py` on each of two machines made two worlds of two."""
    for rank, said in enumerate(spawned[:2]):
        for error in said["two worlds"]:
            assert (
                f"is rank {rank} of 2 in its process group, but the environment says RANK=0 and"
                " WORLD_SIZE=4" in error
            )
            assert "os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))" in error


def beside_a_group() -> dict[str, Any]:
    """What is said of settings beside a group of 120 s that checks no collectives."""
    said: dict[str, Any] = {}
    warned = io.StringIO()
    logging.getLogger("lockstep").addHandler(logging.StreamHandler(warned))
    try:
        lockstep.setup(DistributedConfig(device="cpu", debug="detail"))
    except UsageError as error:
        said["detail"] = str(error)
    for name, settings in {
        "unset": {},
        "same": {"timeout_seconds": 120},
        "other": {"timeout_seconds": 1800},
    }.items():
        lockstep.setup(DistributedConfig.model_validate({"device": "cpu", **settings}))
        group = collectives.new_group([0, 1])
        said[name] = [warned.getvalue(), timeout_of(group, torch.device("cpu"))]
        cluster.cleanup()
    return said


def test_what_a_group_of_the_script_can_not_follow_is_told() -> None:
    first, second = run_ranks(beside_a_group, 2)
    for said in (first, second):
        assert (
            "distributed.debug is detail, and the process group that the script has made checks no"
            in said["detail"]
        )
        assert (
            "set_debug_level(torch.distributed.DebugLevel.DETAIL) before init_process_group"
            in said["detail"]
        )
        assert said["unset"] == said["same"] == ["", 120.0]
        assert said["other"][1] == 1800.0
    warning = (
        "warning: distributed.timeout_seconds is 1800, and collectives of the process group that"
        " the script"
    )
    assert first["other"][0].startswith(warning)
    assert "init_process_group(…, timeout=datetime.timedelta(seconds=1800))" in first["other"][0]
    assert second["other"][0] == ""


# ---- one process ----


def test_what_the_environment_adds_to_a_group() -> None:
    torchrun = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
    }
    assert facts_for_group(5, 8, torchrun) == (RankFacts(5, 1, 8, 4, 1, "torchrun"), 1)
    assert facts_for_group(1, 2, {}) == (None, None)
    assert facts_for_group(1, 2, {"LOCAL_RANK": "1"}) == (None, 1)
    assert facts_for_group(1, 2, {"RANK": "1", "WORLD_SIZE": "2"}) == (None, None)
    one_task_a_machine = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "0",
    }
    assert facts_for_group(5, 8, one_task_a_machine | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}) == (
        None,
        None,
    )
    for wrong in ({"RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "1", "WORLD_SIZE": "4"}):
        with pytest.raises(UsageError, match="is rank 1 of 2 in its process group"):
            facts_for_group(1, 2, wrong)


def test_local_ranks_follow_from_where_the_ranks_are() -> None:
    """Two machines with ranks 0, 1, 3 and 2; no rank says more."""
    places = [Place(machine, None, None) for machine in ("a", "a", "b", "a")]
    found = [facts_from_places(rank, places)[0] for rank in range(4)]
    assert [(f.local_rank, f.local_world_size, f.node_rank) for f in found] == [
        (0, 3, 0),
        (1, 3, 0),
        (0, 1, 1),
        (2, 3, 0),
    ]
    assert {(f.world_size, f.launcher) for f in found} == {(4, "the script")}
    told = [Place("a", 1, None), Place("a", 0, None)]
    assert [facts_from_places(rank, told)[0].local_rank for rank in (0, 1)] == [1, 0]
    inherited = [Place("a", 0, None), Place("a", 0, None)]
    with pytest.raises(
        UsageError, match="ranks 0 and 1 are on one machine, and both have the local rank 0"
    ):
        facts_from_places(1, inherited)


def test_ranks_that_have_only_a_number_find_out_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`RANK=1 WORLD_SIZE=2 python train.py` on the second machine was the local rank 1, which has
    no GPU there.
    """
    store = dist.HashStore()
    for rank, machine in ((1, "b"), (2, "b")):
        store.set(f"lockstep/place/{rank}", json.dumps({"machine": machine, "local_rank": None}))
    monkeypatch.setattr(rendezvous, "machine_id", lambda: "a")
    found = rendezvous.facts_over_store(
        RankFacts(0, 0, 3, 3, 0, "torchrun"), store, {"RANK": "0", "WORLD_SIZE": "3"}
    )
    assert found == RankFacts(0, 0, 3, 1, 0, "torchrun")
    monkeypatch.setattr(rendezvous, "machine_id", lambda: "b")
    found = rendezvous.facts_over_store(
        RankFacts(2, 2, 3, 3, 0, "torchrun"), store, {"RANK": "2", "WORLD_SIZE": "3"}
    )
    assert found == RankFacts(2, 1, 3, 2, 1, "torchrun")
    torchrun = {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
    }
    assert (
        rendezvous.facts_over_store(
            RankFacts(2, 2, 3, 3, 0, "torchrun"), store, torchrun
        ).local_rank
        == 2
    )


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        (("cuda:1", "cuda:0"), ("cuda:1", "cuda:0")),
        (("cuda:0", "cuda:0"), (None, None)),
        ((None, "cuda:0"), (None, None)),
    ],
)
def test_trap_21_the_gpu_that_the_script_chose(
    gpus: tuple[Any, Any], chosen: tuple[Any, Any]
) -> None:
    """Where no rank called `set_device`, all have GPU 0: the local rank decides."""
    places = [Place("a", None, gpu) for gpu in gpus]
    assert tuple(facts_from_places(rank, places)[1] for rank in (0, 1)) == chosen


def test_the_group_and_the_config_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(UsageError, match="backend nccl, which does not serve the device cpu"):
        cluster._existing_backend(DistributedConfig(), torch.device("cpu"))
    with pytest.raises(
        UsageError, match="backend is gloo, but the process group that exists has nccl"
    ):
        cluster._existing_backend(DistributedConfig(backend="gloo"), torch.device("cuda"))


def test_a_group_that_comes_after_setup_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert lockstep.setup().backend == "none"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    try:
        assert lockstep.setup().backend == "gloo"
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert collectives.local_rank() == 0
        with pytest.raises(UsageError, match="was rank 0 of 1 when the model was placed"):
            Cluster(RankFacts(), torch.device("cpu"), "gloo").check()
        monkeypatch.undo()
    finally:
        dist.destroy_process_group()
        cluster.cleanup()
    assert "RANK" not in os.environ


def end_group_before_reducer() -> bool:
    """End the group of a model that DDP has wrapped while a collective ends; then let it go."""
    collectives.create_once("something that ranks share", lambda: True)
    sys.setswitchinterval(10.0)  # this thread keeps Python's lock as long as it can
    model = DistributedDataParallel(nn.Linear(9, 9))
    model(torch.ones(2, 9)).sum().backward()
    dist.all_reduce(torch.ones(1000), async_op=True)  # whose thread alone has the tensor now
    dist.destroy_process_group()
    del model
    return True


def test_a_group_that_ends_before_its_model_is_not_waited_for() -> None:
    """The thread of a collective lets go of its tensor slightly later, for which it needs Python's
    lock. Where DDP's reducer is the last to hold a group, it ends it under the lock, and waits for
    that thread without end (torch 2.13). Here Python holds the world until this rank leaves it.
    """
    assert run_ranks(end_group_before_reducer, 1, timeout=60) == [True]
