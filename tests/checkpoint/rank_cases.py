"""What ranks do in the tests: each function runs on every rank of one launch, and many cases share
a launch.
"""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lockstep import checkpoint
from lockstep.checkpoint import (
    AsyncSaver,
    MemoryWriter,
    Ranks,
    SaveOptions,
    Snapshot,
    commit,
    posix,
    write,
)
from lockstep.checkpoint.memory import MemoryStorage as InMemory
from lockstep.checkpoint.snapshot import Part, Staged, stage
from lockstep.errors import LockstepError, RunError
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.shared import CONFIG, files_of, flip, known, known_model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(
    mesh: DeviceMesh, placements: dict[str, list[Placement]], *, zeros: bool = False
) -> dict[str, Tensor]:
    """The known model laid over a mesh; names without a placement stay plain."""
    model = {}
    for name, tensor in known_model().items():
        tensor = torch.zeros_like(tensor) if zeros else tensor
        model[name] = (
            distribute_tensor(tensor, mesh, placements[name]) if name in placements else tensor
        )
    return model


def assert_known(model: dict[str, Tensor]) -> None:
    for name, tensor in known_model().items():
        assert torch.equal(whole(model[name]), tensor), name


def save_on_one_axis(directory: Path) -> str:
    """Sharded over all ranks, unevenly; one rank holds nothing of the bias; plain tensors on every
    rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {
        name: [Shard(0)] for name in ("blocks.0.weight", "blocks.0.bias", "head.weight", "norm")
    }
    placements["blocks.1.weight"] = [Shard(1)]
    path = checkpoint.save(directory, 1, Snapshot(spread(mesh, placements)), config_yaml=CONFIG)
    assert checkpoint.verify(path) == []
    return checkpoint.digest(path)


def save_on_two_axes(directory: Path) -> str:
    """Hybrid: replicated over the first axis, sharded over the second; one tensor over both."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    placements: dict[str, list[Placement]] = {
        "blocks.0.weight": [Replicate(), Shard(0)],
        "blocks.0.bias": [Replicate(), Shard(0)],
        "blocks.1.weight": [Shard(0), Shard(1)],
        "head.weight": [Shard(0), Shard(0)],
    }
    path = checkpoint.save(directory, 2, Snapshot(spread(mesh, placements)), config_yaml=CONFIG)
    return checkpoint.digest(path)


def save_by_stages(directory: Path) -> str:
    """As in a pipeline: every rank holds names of its own, and state of its own optimizer."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    mine = {
        name: tensor for i, (name, tensor) in enumerate(known_model().items()) if i % size == rank
    }
    adam = {
        f"{name}//exp_avg": known(name + "avg", tuple(tensor.shape))
        for name, tensor in mine.items()
    }
    path = checkpoint.save(directory, 3, Snapshot(mine, {"main": adam}), config_yaml=CONFIG)
    return checkpoint.digest(path)


def load_on_all(directory: Path) -> None:
    """Every layout that was saved, into layouts that none of them had."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    layouts: list[dict[str, list[Placement]]] = [
        {},
        {
            "blocks.0.weight": [Shard(1)],
            "blocks.1.weight": [Shard(0)],
            "blocks.0.bias": [Replicate()],
        },
        {"blocks.0.weight": [Shard(0)], "head.weight": [Shard(1)], "norm": [Shard(0)]},
    ]
    for step in (1, 2, 3):
        for placements in layouts:
            target = Snapshot(spread(mesh, placements, zeros=True))
            checkpoint.load(directory / f"step-{step:08d}", target, only=["model"])
            assert_known(target.model)


def full_format_is_one_file_of_whole_tensors(directory: Path) -> None:
    """Rank 0 writes it; nothing of the scattered one stays; on a refusal by the disk nothing at
    all.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    snapshot = Snapshot(
        spread(mesh, {"blocks.0.weight": [Shard(0)], "norm": [Shard(0)]}), state={"step": 1}
    )
    path = checkpoint.save(directory, 1, snapshot, config_yaml=CONFIG, options=SaveOptions("full"))
    saver = AsyncSaver()
    saver.save(directory, 2, snapshot, config_yaml=CONFIG, options=SaveOptions("full"))
    saver.wait()
    assert [entry.name for entry in sorted(directory.iterdir())] == [
        "step-00000001",
        "step-00000002",
    ]
    for entry in checkpoint.list_checkpoints(directory):
        assert [file.name for file in files_of(entry / "model")] == [".metadata", "__0_0.distcp"]
        assert checkpoint.verify(entry) == []
    target = Snapshot(spread(mesh, {"blocks.0.weight": [Shard(1)]}, zeros=True))
    assert checkpoint.load(path, target)["step"] == 1
    assert_known(target.model)
    again = raised(
        lambda: checkpoint.save(
            directory, 1, snapshot, config_yaml=CONFIG, options=SaveOptions("full")
        )
    )
    assert "never overwritten" in assert_same_everywhere(again)
    dist.barrier()
    assert len(list(directory.iterdir())) == 2


def local_format_is_for_the_ranks_that_wrote_it(directory: Path) -> None:
    """Every rank writes what it holds, replicas too; other blocks are refused, naming the command
    that converts.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2))
    placements: dict[str, list[Placement]] = {
        "blocks.0.weight": [Replicate(), Shard(0)],
        "blocks.0.bias": [Shard(0), Shard(0)],
        "blocks.1.weight": [Shard(0), Shard(1)],
    }
    adam = {"main": {"head.weight//exp_avg": known("exp_avg", (5, 7))}}
    laid = spread(mesh, placements)
    saver = AsyncSaver()
    saver.save(
        directory,
        1,
        Snapshot(laid, adam, {"step": 1}),
        config_yaml=CONFIG,
        options=SaveOptions("local"),
    )
    saver.wait()
    path = directory / "step-00000001"
    assert checkpoint.verify(path) == []
    assert [file.name for file in files_of(path / "model")] == [
        f"rank-{rank:05}.raw" for rank in range(size)
    ]
    assert checkpoint.digest(path) == checkpoint.digest_tensors(sorted(known_model().items()))
    target = Snapshot(
        spread(mesh, placements, zeros=True), {"main": {"head.weight//exp_avg": torch.zeros(5, 7)}}
    )
    assert checkpoint.load(path, target)["step"] == 1
    assert_known(target.model)
    assert torch.equal(target.optimizers["main"]["head.weight//exp_avg"], known("exp_avg", (5, 7)))
    other = Snapshot(
        spread(mesh, placements | {"blocks.0.weight": [Shard(0), Replicate()]}, zeros=True), adam
    )
    said = assert_same_everywhere(raised(lambda: checkpoint.load(path, other)))
    assert "laid blocks.0.weight over its ranks otherwise" in said
    assert f"lockstep checkpoint convert {path} --to full" in said


def copies_in_memory_hold_each_block_once(directory: Path) -> None:
    """They load in any layout; what fails on one rank fails on all, and leaves the last copy."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2))
    placements: dict[str, list[Placement]] = {
        "blocks.0.weight": [Replicate(), Shard(0)],
        "blocks.0.bias": [Shard(0), Shard(0)],
        "blocks.1.weight": [Shard(0), Shard(1)],
    }
    storage = InMemory(directory / "memory")
    writer = MemoryWriter(storage)
    rank = dist.get_rank()

    def state(step: int) -> Snapshot:
        """Groups as in a pipeline: each rank has a parameter of its own, and one rate for all."""
        group = {"params": [f"p{rank}"], "options": {"lr": 0.5**step}}
        groups = {"main": {"groups": [group], "values": {}}}
        own = {f"p{rank}//exp_avg": torch.full((3,), float(rank + step))}
        return Snapshot(spread(mesh, placements), {"main": own}, {"step": step}, groups=groups)

    for step in range(1, 5):
        snapshot = state(step)
        writer.write(step, snapshot, config_yaml=CONFIG)
        writer.commit(step)
    dist.barrier()  # rank 0 commits
    path = storage.path("step-00000004")
    stored = checkpoint.read_manifest(path)
    values = sum(tensor.nbytes for tensor in known_model().values()) + 12 * size
    headers = 2048 * 2 * size
    assert stored.num_bytes < values + headers, "each block is there once"
    for layout in ({}, {"blocks.0.weight": [Shard(1), Replicate()]}, placements):
        target = Snapshot(spread(mesh, layout, zeros=True))
        loaded = checkpoint.load(path, target, only=["model"])
        assert_known(target.model)
        (group,) = loaded["optimizer_groups"]["main"]["groups"]
        assert group["params"] == [f"p{other}" for other in range(size)]
        assert group["options"] == {"lr": 0.5**4}, "those of now"
        assert loaded["step"] == 4
    wrong = state(5)
    if rank == size - 1:
        wrong.state["step"] = object()
    assert "JSON" in assert_same_everywhere(
        raised(lambda: writer.write(5, wrong, config_yaml=CONFIG))
    )
    assert storage.steps == [4]


class Objects(MutableMapping[str, bytes]):
    """The objects of a bucket, each a file of a folder: what several processes share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, key: str) -> bytes:
        try:
            return (self._folder / key.replace("/", "|")).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: bytes) -> None:
        (self._folder / key.replace("/", "|")).write_bytes(value)

    def __delitem__(self, key: str) -> None:
        (self._folder / key.replace("/", "|")).unlink()

    def __iter__(self) -> Iterator[str]:
        return iter([file.name.replace("|", "/") for file in self._folder.iterdir()])

    def __len__(self) -> int:
        return len(list(self._folder.iterdir()))


def each_host_has_a_whole_copy(directory: Path) -> None:
    """Two hosts of two ranks each: by the folders in which their copies lie."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("hosts", "ranks"))
    # over all ranks; replicas of hosts, which send nothing; shards of hosts
    placements: dict[str, list[Placement]] = {
        "blocks.0.weight": [Shard(0), Shard(0)],
        "blocks.0.bias": [Replicate(), Shard(0)],
        "blocks.1.weight": [Shard(1), Replicate()],
    }
    storage = InMemory(directory / f"host-{rank // 2}")
    other = InMemory(directory / f"host-{1 - rank // 2}")
    writer = MemoryWriter(storage)
    ranks = checkpoint.Ranks()

    def copy(step: int, *, commits: bool = True) -> None:
        state = {"step": step, "of": "rank 0" if rank == 0 else "another"}
        writer.write(step, Snapshot(spread(mesh, placements), state=state), config_yaml=CONFIG)
        if commits:
            writer.commit(step)

    for step in range(1, 5):
        copy(step)
    dist.barrier()
    assert storage.steps == ([4] if rank < 2 else [3]), "the other host does not know of a record"
    assert checkpoint.agree_on_copy(storage, ranks, lambda: 0) == 4
    assert storage.steps == ([4] if rank < 2 else [3, 4])
    path = storage.path("step-00000004")
    files = checkpoint.read_manifest(path).files
    for file in files:
        both = [(each.root / path.name / file).read_bytes() for each in (storage, other)]
        assert both[0] == both[1], file
    for layout in ({}, {"blocks.0.weight": [Shard(1), Replicate()]}, placements):
        target = Snapshot(spread(mesh, layout, zeros=True))
        assert checkpoint.load(path, target, only=["model"])["of"] == "rank 0"
        assert_known(target.model)
    dist.barrier()

    writer = MemoryWriter(storage)
    for step in (5, 6):
        copy(step)
    copy(7, commits=False)  # complete, and not recorded
    dist.barrier()
    if rank == 2:  # the first rank of a host dies before it has noted that all have written
        (draft,) = (name for name in storage.names() if ".tmp-" in name)
        (storage.root / draft / "manifest.json").rename(storage.root / draft / "manifest.unread")
    dist.barrier()
    assert checkpoint.agree_on_copy(storage, ranks, lambda: 6) == 6
    assert checkpoint.agree_on_copy(storage, ranks, lambda: 7) == 7
    assert 7 in storage.steps
    dist.barrier()
    if rank == 0:  # as on a host that has just come
        shutil.rmtree(storage.root)
    dist.barrier()
    assert checkpoint.agree_on_copy(storage, ranks, lambda: 7) is None


def an_object_store_holds_every_format(directory: Path) -> None:
    """No folders and no rename; a rank that is refused leaves nothing that a run would take for a
    checkpoint.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: dict[str, list[Placement]] = {"blocks.0.weight": [Shard(0)], "norm": [Shard(0)]}
    store = MemoryStorage(Objects(directory))
    assert checkpoint.is_shared(store)
    for step, format in enumerate(("sharded", "full", "local")):
        options = SaveOptions(format)  # type: ignore[arg-type]
        path = checkpoint.save(
            store, step, Snapshot(spread(mesh, placements)), config_yaml=CONFIG, options=options
        )
        assert checkpoint.verify(path) == []
        target = Snapshot(spread(mesh, placements, zeros=True))
        checkpoint.load(path, target)
        assert_known(target.model)
    saver = AsyncSaver()
    saver.save(store, 3, Snapshot(spread(mesh, placements)), config_yaml=CONFIG)
    assert str(saver.wait()) == "memory/step-00000003"
    saver.save(
        store,
        4,
        Snapshot(spread(mesh, placements)),
        config_yaml=CONFIG,
        options=SaveOptions("full"),
    )
    saver.wait()
    dist.barrier()
    if dist.get_rank() == 2:
        store.write = None  # type: ignore[assignment,method-assign]
    error = raised(
        lambda: checkpoint.save(store, 5, Snapshot(spread(mesh, placements)), config_yaml=CONFIG)
    )
    assert "the checkpoint of step 5 was not written" in assert_same_everywhere(error)
    dist.barrier()
    assert checkpoint.resume_point(store).name == "step-00000004"  # type: ignore[union-attr]
    assert not [key for key in store.bucket if key.startswith("step-00000005")]


def full_format_is_refused_on_all(directory: Path) -> None:
    """Rank 0 is refused, or another fails to send, while tensors are gathered: one error on all,
    and it goes on.
    """
    rank = dist.get_rank()
    snapshot = Snapshot(
        {f"w{i}": known(f"w{i}", (50, 50)) for i in range(4) if i % dist.get_world_size() == rank}
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in (0, 1):
        if rank == failing == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        bad = {"w1": snapshot.model["w1"].to("meta")} if rank == failing == 1 else {}
        blocks = stage(snapshot).parts["model"].blocks
        parts = {
            "model": Part(
                {
                    name: block.with_tensor(bad.get(name, block.tensor))
                    for name, block in blocks.items()
                }
            )
        }
        target = posix.locate(directory / "step-00000001")
        options = SaveOptions("full", retries=1)
        error = raised(
            lambda parts=parts, target=target, options=options: commit.write_staged(  # type: ignore[misc]
                target, 1, Staged(parts, {}, {}), CONFIG, options, Ranks()
            )
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        text = assert_same_everywhere(error)
        assert f"rank {failing}" in text
        dist.barrier()
        assert list(directory.iterdir()) == []
    dist.barrier()
    path = checkpoint.save(directory, 1, snapshot, config_yaml=CONFIG, options=SaveOptions("full"))
    assert checkpoint.verify(path) == []


class Network(nn.Module):
    """Two blocks and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return cast(Tensor, self.head(x))


def network(mesh: DeviceMesh | None) -> tuple[Network, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Network()
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Every rank sees the same batch, so that the mean over ranks is the gradient of
    one process.
    """
    for step in steps:
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def save_network(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    tensors, groups = checkpoint.optimizer_state(optimizer, names_of(model))
    tied = {"embedding.weight": ["head.weight"]}
    snapshot = Snapshot(
        dict(model.named_parameters()), {"main": tensors}, groups={"main": groups}, aliases=tied
    )
    return checkpoint.save(directory, step, snapshot, config_yaml=CONFIG)


def load_network(path: Path, mesh: DeviceMesh | None) -> tuple[Network, torch.optim.Optimizer]:
    """Into fresh objects, whose weights and state are others."""
    model, optimizer = network(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parameters = dict(model.named_parameters())
    target = Snapshot(
        dict(parameters), {"main": checkpoint.optimizer_targets(path, "main", parameters)}
    )
    state = checkpoint.load(path, target)
    groups = state["optimizer_groups"]["main"]
    checkpoint.restore_optimizer(optimizer, names_of(model), target.optimizers["main"], groups)
    return model, optimizer


def assert_networks_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(theirs)), name


def fsdp_goes_on_in_the_same_bits(directory: Path) -> None:
    """FSDP2 on one axis and two: save, load into fresh objects, train on: as if never stopped."""
    size = dist.get_world_size()
    for step, shape in ((1, (size,)), (2, (2, size // 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model, optimizer = network(mesh)
        train(model, optimizer, range(2))
        path = save_network(directory, step, model, optimizer)
        again, its_optimizer = load_network(path, mesh)
        train(model, optimizer, range(2, 4))
        train(again, its_optimizer, range(2, 4))
        assert_networks_equal(model, again)
        listed = checkpoint.read_manifest(path).parameters
        assert listed["embedding.weight"].aliases == ("head.weight",)


def raised(work: Callable[[], object]) -> LockstepError:
    try:
        work()
    except LockstepError as error:
        return error
    raise AssertionError("nothing was raised")


def assert_same_everywhere(error: LockstepError) -> str:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(error))
    assert len(set(texts)) == 1, texts
    return texts[0]


def one_rank_fails(directory: Path) -> None:
    """The disk refuses one rank, in the middle: one error on all, nothing left behind, and the
    group still works.
    """
    rank = dist.get_rank()
    snapshot = Snapshot({f"w{i}": known(f"w{i}", (50, 50)) for i in range(4)})
    old = checkpoint.save(directory, 1, snapshot, config_yaml=CONFIG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in (2, 0):
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        error = raised(lambda: checkpoint.save(directory, 2, snapshot, config_yaml=CONFIG))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        text = assert_same_everywhere(error)
        assert isinstance(error, RunError)
        assert f"rank {failing}" in text
        assert "File too large" in text
        dist.barrier()
        assert [path.name for path in directory.iterdir()] == [old.name]
    dist.barrier()
    assert checkpoint.verify(checkpoint.save(directory, 2, snapshot, config_yaml=CONFIG)) == []


def mistakes_are_the_same_everywhere(directory: Path) -> None:
    """What is wrong on one rank, in its snapshot or its target, is told by all."""
    rank = dist.get_rank()
    bad = Snapshot({"w": torch.zeros(3 if rank == 1 else 2)})
    text = assert_same_everywhere(
        raised(lambda: checkpoint.save(directory, 1, bad, config_yaml=CONFIG))
    )
    assert "ranks disagree about w: float32[2] on one, float32[3] on another" in text
    bad = Snapshot({}, state={"x": torch.zeros(1)} if rank == 3 else {})
    assert "JSON" in assert_same_everywhere(
        raised(lambda: checkpoint.save(directory, 1, bad, config_yaml=CONFIG))
    )

    path = checkpoint.save(
        directory, 1, Snapshot({"w": torch.ones(2), "v": torch.ones(1)}), config_yaml=CONFIG
    )
    target = Snapshot({"w": torch.zeros(3 if rank == 2 else 2), "v": torch.zeros(1)})
    text = assert_same_everywhere(raised(lambda: checkpoint.load(path, target)))
    assert "w (stored [2], wanted [3])" in text
    assert not target.model["v"].any()
    target = Snapshot({"w": torch.zeros(2)} | ({"x": torch.zeros(1)} if rank == 1 else {}))
    text = assert_same_everywhere(raised(lambda: checkpoint.load(path, target)))
    assert "missing in the checkpoint: x" in text
    assert "only in the checkpoint: v" in text
    target = Snapshot({"w": torch.zeros(2)} | ({"v": torch.zeros(1)} if rank == 1 else {}))
    checkpoint.load(path, target)  # each rank a part, together all of it
    assert target.model["w"].all()


def damage_is_found_by_all(directory: Path) -> None:
    """The ranks share the reading; whichever finds the damage, all pass over the checkpoint."""
    for step in (1, 2):
        checkpoint.save(directory, step, Snapshot(known_model()), config_yaml=CONFIG)
    newest = directory / "step-00000002"
    for file in files_of(newest):
        dist.barrier()
        if dist.get_rank() == 0:
            flip(file, 20)
        dist.barrier()
        text = assert_same_everywhere(
            raised(lambda: checkpoint.load(newest, Snapshot(known_model())))
        )
        assert "damaged" in text
        with patch("lockstep.checkpoint.keep._warn") as warn:
            found = checkpoint.resume_point(directory)
        assert found == directory / "step-00000001"
        assert [call.args[0] for call in warn.call_args_list] == (
            [newest] if dist.get_rank() == 0 else []
        )
        dist.barrier()
        if dist.get_rank() == 0:
            flip(file, 20)
    dist.barrier()
    assert checkpoint.resume_point(directory) == newest


def stages_with_groups_of_their_own(directory: Path) -> None:
    """Trap 25: each stage has its own part of the optimizer; rank 0's alone is not the
    optimizer.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    parameters = {
        f"layers.{rank}.{kind}": nn.Parameter(known(f"{rank}{kind}", (4,))) for kind in ("w", "b")
    }
    weights, biases = list(parameters.values())
    groups = [{"params": [weights], "weight_decay": 0.1}, {"params": [biases], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    weights.square().sum().backward()
    biases.square().sum().backward()
    optimizer.step()
    names = {id(p): name for name, p in parameters.items()}
    tensors, stored = checkpoint.optimizer_state(optimizer, names)
    snapshot = Snapshot(dict(parameters), {"main": tensors}, groups={"main": stored})
    path = checkpoint.save(directory, 1, snapshot, config_yaml=CONFIG)
    merged = checkpoint.read_state(path)["optimizer_groups"]["main"]["groups"]
    assert [group["params"] for group in merged] == [
        [f"layers.{r}.{k}" for r in range(size)] for k in ("w", "b")
    ]

    moved = (rank + 1) % size  # another cut: this rank now holds what its neighbour held
    target = {f"layers.{moved}.{kind}": nn.Parameter(torch.zeros(4)) for kind in ("w", "b")}
    state = checkpoint.optimizer_targets(path, "main", target)
    loaded = checkpoint.load(path, Snapshot(dict(target), {"main": state}))
    groups = [{"params": [p], "weight_decay": 0.5} for p in target.values()]
    fresh = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    names = {id(p): name for name, p in target.items()}
    checkpoint.restore_optimizer(fresh, names, state, loaded["optimizer_groups"]["main"])
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.1, 0.0]
    for kind, decay, parameter in zip(("w", "b"), (0.1, 0.0), target.values(), strict=True):
        gradient = (2 + decay) * known(f"{moved}{kind}", (4,))
        assert torch.allclose(fresh.state[parameter]["momentum_buffer"], gradient)


def a_parameter_on_two_stages(directory: Path) -> None:
    """Tied weights on the first and the last rank are stored once, and come back to both."""
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    mine = {0: "embedding", last: "head"}.get(rank)
    tied = {"embedding": ["head"]}
    snapshot = Snapshot({mine: known("tied", (6, 3))} if mine else {}, aliases=tied)
    path = checkpoint.save(directory, 1, snapshot, config_yaml=CONFIG)
    manifest = checkpoint.read_manifest(path)
    assert list(manifest.parameters) == ["embedding"]
    assert manifest.parameters["embedding"].aliases == ("head",)
    target = Snapshot({mine: torch.zeros(6, 3)} if mine else {}, aliases=tied)
    checkpoint.load(path, target)
    assert all(torch.equal(tensor, known("tied", (6, 3))) for tensor in target.model.values())
    both = Snapshot({"embedding": torch.zeros(6, 3), "head": torch.zeros(6, 3)}, aliases=tied)
    checkpoint.load(path, both)
    assert torch.equal(both.model["head"], both.model["embedding"])
    untold = Snapshot(
        {mine: known("tied", (6, 3))} if mine else {}, aliases=tied if rank == 0 else {}
    )
    error = raised(lambda: checkpoint.save(directory, 2, untold, config_yaml=CONFIG))
    assert "one parameter on one rank and two on another" in assert_same_everywhere(error)


def names_that_only_the_last_rank_knows_as_tied(directory: Path) -> None:
    """A file of others has both names, with equal values; another one with two values
    is refused.
    """
    on_last = dist.get_rank() == dist.get_world_size() - 1
    for step, value in ((1, "deep"), (2, "other")):
        apart = {"deep": known("deep", (6, 3)), "too": known(value, (6, 3))}
        path = checkpoint.save(directory, step, Snapshot(apart), config_yaml=CONFIG)
        mine = {"deep": torch.zeros(6, 3)} if on_last else {}
        target = Snapshot(mine, aliases={"deep": ["too"]} if on_last else {})
        if value == "deep":
            checkpoint.load(path, target)
            assert all(torch.equal(tensor, apart["deep"]) for tensor in mine.values())
        else:
            error = raised(lambda to=target, path=path: checkpoint.load(path, to))
            assert "only in the checkpoint: too" in assert_same_everywhere(error)


def saving_beside_training(directory: Path) -> None:
    """The background's collectives and training's don't meet; errors come to all ranks in the same
    call.
    """
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: dict[str, list[Placement]] = {
        "blocks.0.weight": [Shard(0)],
        "blocks.0.bias": [Shard(0)],
    }
    live = spread(mesh, placements)
    rotated: list[Path] = []
    saver = AsyncSaver(then=rotated.append)
    for step in (1, 2, 3):
        saver.save(directory, step, Snapshot(live, state={"step": step}), config_yaml=CONFIG)
        for tensor in live.values():  # training changes everything at once
            tensor.mul_(2)
        polls = 0
        while saver._save is not None and polls < 1000:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size()
            found = saver.poll()
            polls += 1
        assert found == directory / f"step-{step:08d}"
    assert rotated == (checkpoint.list_checkpoints(directory) if rank == 0 else [])
    for step in (1, 2, 3):
        target = spread(mesh, placements, zeros=True)
        checkpoint.load(directory / f"step-{step:08d}", Snapshot(target))
        for name, tensor in known_model().items():
            assert torch.equal(whole(target[name]), tensor * 2 ** (step - 1)), name

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    saver.save(directory, 4, Snapshot({f"own{rank}": torch.ones(4)}), config_yaml=CONFIG)
    calls = 0
    error = None
    while error is None:
        calls += 1
        try:
            saver.poll()
        except RunError as caught:
            error = caught
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    seen: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(seen, calls)
    assert len(set(seen)) == 1, f"the ranks saw the error in different calls: {seen}"
    assert "rank 3" in assert_same_everywhere(error)
    bad = Snapshot({}, state={"x": {1}} if rank == 2 else {})
    assert "is a set" in assert_same_everywhere(
        raised(lambda: saver.save(directory, 5, bad, config_yaml=""))
    )
    saver.save(directory, 5, Snapshot(live), config_yaml=CONFIG)
    assert saver.wait() == directory / "step-00000005"


CASES = (
    full_format_is_one_file_of_whole_tensors,
    local_format_is_for_the_ranks_that_wrote_it,
    copies_in_memory_hold_each_block_once,
    each_host_has_a_whole_copy,
    an_object_store_holds_every_format,
    full_format_is_refused_on_all,
    fsdp_goes_on_in_the_same_bits,
    one_rank_fails,
    mistakes_are_the_same_everywhere,
    damage_is_found_by_all,
    stages_with_groups_of_their_own,
    a_parameter_on_two_stages,
    names_that_only_the_last_rank_knows_as_tied,
    saving_beside_training,
)


def on_four(directory: Path) -> dict[str, str]:
    """Every case in a folder of its own: its name → what went wrong, or its digest, or nothing."""
    said: dict[str, str] = {}
    for save in (save_on_one_axis, save_on_two_axes, save_by_stages):
        said[save.__name__] = save(directory / "layouts")
    load_on_all(directory / "layouts")
    for case in CASES:
        folder = directory / case.__name__
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        case(folder)
        said[case.__name__] = "passed"
    return said


def killed_in_pairs(directory: Path) -> None:
    """Two pairs of ranks save; in one the writer of blocks is killed, in the other the one that
    commits.
    """
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    folder = directory / f"pair-{rank // 2}"
    group = pairs[rank // 2]
    snapshot = Snapshot({f"w{i}": known(f"w{i}", (50, 50)) for i in range(4)})
    checkpoint.save(folder, 1, snapshot, config_yaml=CONFIG, group=group)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        write.ShardedWriter.write = die  # type: ignore[assignment,method-assign]
    if rank == 2:
        posix.PosixStorage.commit = die  # type: ignore[assignment,method-assign]
    try:
        checkpoint.save(folder, 2, snapshot, config_yaml=CONFIG, group=group)
    except RuntimeError as error:
        (directory / f"survivor-{rank}").write_text(str(error))


def on_two(directory: Path) -> None:
    """What four ranks saved, on two."""
    load_on_all(directory / "layouts")
    raw = directory / "local_format_is_for_the_ranks_that_wrote_it" / "step-00000001"
    target = Snapshot(known_model(), {"main": {"head.weight//exp_avg": torch.zeros(5, 7)}})
    said = assert_same_everywhere(raised(lambda: checkpoint.load(raw, target)))
    assert "holds the raw shards of 4 ranks (checkpoint.format: local); this run has 2" in said
    single, its_optimizer = network(None)
    train(single, its_optimizer, range(2))
    for step in (1, 2):
        path = directory / "fsdp_goes_on_in_the_same_bits" / f"step-{step:08d}"
        model, optimizer = load_network(path, init_device_mesh("cpu", (2,)))
        assert all(
            torch.allclose(whole(a), b)
            for a, b in zip(model.parameters(), single.parameters(), strict=True)
        )
        train(model, optimizer, range(2, 3))
