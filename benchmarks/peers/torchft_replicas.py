"""A replica group of torchft, of one rank, that trains the tiny run of `benchmarks.recovery`.

    python -m benchmarks.peers.torchft_replicas LIGHTHOUSE REPLICA SAMPLES SECONDS FILE

It is written as torchft's own example is (`train_ddp.py`): each group reads as many samples a step
as before when another one has died. A line of JSON for each step that is committed goes to FILE:
its moment, its number, and how many groups took part.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.tiny import Net, Points


def train(lighthouse: str, replica: str, samples: int, seconds: float, file: Path) -> None:
    """Train until the process is killed."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(0)
    model = Net()
    model.init_weights()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    timeout = timedelta(seconds=30)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=timeout,
        replica_id=f"group_{replica}",
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    data = Points(seconds=seconds)
    position = int(replica) * samples
    with file.open("w", buffering=1) as log:
        while True:
            read = [data[(position + index) % len(data)] for index in range(samples)]
            position += samples
            x, y = (torch.stack([sample[key] for sample in read]) for key in ("x", "y"))
            before = manager.current_step()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            if manager.current_step() > before:
                row = {"step": before + 1, "groups": manager.num_participants()}
                log.write(json.dumps({"time": time.time(), **row}) + "\n")


if __name__ == "__main__":
    _, given_lighthouse, given_replica, given_samples, given_seconds, given_file = sys.argv
    train(
        given_lighthouse,
        given_replica,
        int(given_samples),
        float(given_seconds),
        Path(given_file),
    )
