"""A loop of plain PyTorch whose ranks wait for each other: its argument says how."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.task import ScriptTask


def write_late() -> None:
    """Let this rank write what is recorded of it some seconds after the other one."""
    write = ScriptTask.write_record

    def late(task: ScriptTask, rank: int, record: ScriptRecord) -> None:
        time.sleep(5)
        write(task, rank, record)

    ScriptTask.write_record = late  # type: ignore[method-assign]


def main(how: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if how == "collective" and rank == 0:
        write_late()
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    sampler = DistributedSampler(data)
    if how == "uneven" and world > 1:
        sampler = list(range(rank, 16 if rank == 0 else 8, 2))  # type: ignore[assignment]
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "collective" and rank == 0:
            dist.barrier()
        if how == "crash" and rank == 1:
            raise IndexError("sample 3 is not there")


if __name__ == "__main__":
    main(sys.argv[1])
