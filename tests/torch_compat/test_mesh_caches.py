"""`lockstep/torch_compat/mesh_caches.py`: a new mesh is not answered with an equal, older one."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.torch_compat.mesh_caches import forget_meshes
from tests.ranks import run_ranks


def _sharded() -> DTensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    return distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)


def coordinates() -> tuple[list[int] | None, list[int] | None]:
    """The coordinates of an operator's output: with all that torch remembers, and with nothing."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1 - rank, world_size=2)
    _sharded().detach()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=2)
    remembered = _sharded().detach().device_mesh.get_coordinate()
    forget_meshes()
    return remembered, _sharded().detach().device_mesh.get_coordinate()


def test_the_mesh_is_the_one_of_today() -> None:
    for rank, (remembered, anew) in enumerate(run_ranks(coordinates, 2)):
        assert list(anew or ()) == [rank]
        assert list(remembered or ()) == [1 - rank], "torch has mended it: this file can go"
