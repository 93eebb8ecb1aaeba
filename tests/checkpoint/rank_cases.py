"""What ranks do in the tests: each function runs on every rank of one launch, and many cases share a launch."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lockstep import checkpoint
from lockstep.checkpoint import Snapshot
from tests.checkpoint.shared import CONFIG, known, known_model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(mesh: DeviceMesh, placements: dict[str, list[Placement]], *, zeros: bool = False) -> dict[str, Tensor]:
    """The known model laid over a mesh; names without a placement stay plain."""
    model = {}
    for name, tensor in known_model().items():
        tensor = torch.zeros_like(tensor) if zeros else tensor
        model[name] = distribute_tensor(tensor, mesh, placements[name]) if name in placements else tensor
    return model


def assert_known(model: dict[str, Tensor]) -> None:
    for name, tensor in known_model().items():
        assert torch.equal(whole(model[name]), tensor), name


def save_on_one_axis(directory: Path) -> str:
    """Sharded over all ranks, unevenly; one rank holds nothing of the bias; plain tensors on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {name: [Shard(0)] for name in ("blocks.0.weight", "blocks.0.bias", "head.weight", "norm")}
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
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {name: tensor for i, (name, tensor) in enumerate(known_model().items()) if i % size == rank}
    adam = {f"{name}//exp_avg": known(name + "avg", tuple(tensor.shape)) for name, tensor in mine.items()}
    path = checkpoint.save(directory, 3, Snapshot(mine, {"main": adam}), config_yaml=CONFIG)
    return checkpoint.digest(path)


def load_on_all(directory: Path) -> None:
    """Every layout that was saved, into layouts that none of them had."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    layouts: list[dict[str, list[Placement]]] = [
        {},
        {"blocks.0.weight": [Shard(1)], "blocks.1.weight": [Shard(0)], "blocks.0.bias": [Replicate()]},
        {"blocks.0.weight": [Shard(0)], "head.weight": [Shard(1)], "norm": [Shard(0)]},
    ]
    for step in (1, 2, 3):
        for placements in layouts:
            target = Snapshot(spread(mesh, placements, zeros=True))
            checkpoint.load(directory / f"step-{step:08d}", target, only=["model"])
            assert_known(target.model)


def on_four(directory: Path) -> list[str]:
    torch.manual_seed(0)
    digests = [save_on_one_axis(directory), save_on_two_axes(directory), save_by_stages(directory)]
    load_on_all(directory)
    return digests


def on_two(directory: Path) -> None:
    load_on_all(directory)
