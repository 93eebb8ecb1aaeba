"""Measures saves and loads in a bucket against its bare client, and on a disk against torch.

    python -m benchmarks.storage_rate [--megabytes 96,400] [--rounds 3] [--ranks 1,4] [--write]

The bucket is on a server of S3's protocol in a process of its own (moto's), on the same cores. The
bare client puts and gets as many bytes from as many processes, one object each, by obstore's own
parts. Both are measured in turn, in one run. A save here is the whole of it: copy, CRC-32, objects
put on the condition that there is none, and their lengths compared. A load compares every checksum.

On the disk, a model of 1.2 GB in 48 tensors, and one of 4,000 tensors of 256 numbers, in one
process, beside `torch.save` with `fsync`, and `torch.load` with a copy into the live tensors. A
checkpoint is written past the page cache; before the loads all files are read once, so that both
find their bytes in it.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.page import RESULTS, machine, page, table, tell
from lockstep import checkpoint
from lockstep.checkpoint import ObjectStorage, Snapshot
from tests import bucket
from tests.ranks import run_ranks

TENSORS = 12  # in the bucket
LIMITS = (
    "A load from the bucket takes each byte once, with its checksum. Before the first byte of a"
    " tensor come two",
    "requests in turn (the commit; the manifest and what describes the parts), which rank 0 makes"
    " alone; the ranks",
    "compare names and shapes while bytes arrive. What is left is a processor's: the checksum and"
    " the copy into",
    "the tensors of each rank, on the same cores as the server. Of 96 MB on 4 ranks, in"
    " processor time:",
    "the server has 17 requests, where the bare client makes 4, of 4 ms each (0.10 and 0.05"
    " s); the ranks",
    "take 0.19 and 0.14 s, of which 0.03 are checksums. So these cores allow 0.67 of the"
    " bare rate.",
    "Torch makes one archive for each dtype and shape of small tensors; they are written and"
    " read as it",
    "would.",
)
Seconds = dict[str, list[float]]


def on_rank(url: str, megabytes: int, rounds: int) -> Seconds:
    """Of each round: seconds of a bare put and get, and of a save and a load; on rank 0's clock."""
    obstore = import_module("obstore")
    store = import_module("obstore.store").from_url(url, client_options={"allow_http": True})
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    rows = megabytes * 250_000 // TENSORS // 1000
    live = {
        f"w{number}": distribute_tensor(torch.randn(rows, 1000), mesh, [Shard(0)])
        for number in range(TENSORS)
    }
    payload = os.urandom(megabytes * 1_000_000 // ranks)
    storage = ObjectStorage(url)
    seconds: Seconds = {"put": [], "get": [], "save": [], "load": []}
    for number in range(rounds + 1):
        key = f"bare/{number}-{rank}"
        step = number + 1
        state = Snapshot(live, {}, {"step": step})
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda key=key: obstore.put(store, key, payload),
            "get": lambda key=key: bytes(obstore.get(store, key).bytes()),
            "save": lambda step=step, state=state: checkpoint.save(
                storage, step, state, config_yaml=""
            ),
            "load": lambda step=step, state=state: checkpoint.load(
                storage.path(f"step-{step:08d}"), state
            ),
        }
        for name, call in calls.items():
            taken = timed(call)
            if number:  # the first opens connections
                seconds[name].append(taken)
        obstore.delete(store, [key])
        if rank == 0:
            storage.delete(f"step-{step:08d}")
    return seconds


def timed(call: Callable[[], Any]) -> float:
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    call()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - begin


def bucket_row(ranks: int, megabytes: int, rounds: int) -> str:
    """Measure one number of ranks, on a server of its own."""
    with ExitStack() as stack:
        port = stack.enter_context(bucket.bucket_server())
        os.environ.update(bucket.environment(f"http://127.0.0.1:{port}"))
        measure = import_module("benchmarks.storage_rate").on_rank  # as other processes find it
        url = f"{bucket.SCHEME}://team/rate"
        seconds = run_ranks(measure, ranks, url, megabytes, rounds, timeout=1800)[0]
    put, get, save, load = (median(seconds[name]) for name in ("put", "get", "save", "load"))
    saved, loaded = (
        median(bare / ours for bare, ours in zip(seconds[one], seconds[other], strict=True))
        for one, other in (("put", "save"), ("get", "load"))
    )
    return (
        f"| {ranks} | {megabytes} | {put:.2f} | {save:.2f} | {saved:.2f} |"
        f" {get:.2f} | {load:.2f} | {loaded:.2f} |"
    )


def disk_row(model: str, live: dict[str, Tensor], rounds: int, where: Path | None) -> str:
    """Measure one model, in this process."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-rate-", dir=where))
    seconds: Seconds = {"save": [], "torch save": [], "load": [], "torch load": []}
    try:
        for number in range(rounds + 1):
            step = number + 1
            file = folder / "torch.pt"
            path = folder / f"step-{step:08d}"
            state = Snapshot(live, {}, {"step": step})
            calls: dict[str, Callable[[], Any]] = {
                "save": lambda step=step, state=state: checkpoint.save(
                    folder, step, state, config_yaml=""
                ),
                "torch save": lambda file=file: torch_save(live, file),
                "load": lambda path=path, state=state: checkpoint.load(path, state),
                "torch load": lambda file=file: torch_load(live, file),
            }
            for name, call in calls.items():
                if name == "load":
                    read_all(folder)
                taken = timed(call)
                if number:
                    seconds[name].append(taken)
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    save, plain_save, load, plain_load = map(median, seconds.values())
    return (
        f"| {model} | {save:.2f} | {plain_save:.2f} | {load:.2f} | {plain_load:.2f} |"
        f" {load / plain_load:.2f} |"
    )


def read_all(folder: Path) -> None:
    """Bring all files into the page cache, which a checkpoint is written past."""
    buffer = bytearray(4 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                while stream.readinto(buffer):
                    pass


def torch_save(live: dict[str, Tensor], file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(live, stream)
        stream.flush()
        os.fsync(stream.fileno())


def torch_load(live: dict[str, Tensor], file: Path) -> None:
    for name, tensor in torch.load(file, weights_only=True).items():
        live[name].copy_(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", default="96,400", help="of checkpoints in the bucket")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="1,4")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    disk = [
        disk_row(
            "1.2 GB in 48 tensors",
            {f"w{number}": torch.randn(6250, 1000) for number in range(48)},
            asked.rounds,
            asked.folder,
        ),
        disk_row(
            "4,000 tensors of 256 numbers",
            {f"w{number}": torch.randn(256) for number in range(4000)},
            asked.rounds,
            asked.folder,
        ),
    ]
    print(*disk, sep="\n", flush=True)
    rows = []
    for megabytes in map(int, asked.megabytes.split(",")):
        for ranks in map(int, asked.ranks.split(",")):
            rows.append(bucket_row(ranks, megabytes, asked.rounds))
            print(rows[-1], flush=True)
    command = f"--megabytes {asked.megabytes} --rounds {asked.rounds} --ranks {asked.ranks}"
    header = "| model | save, s | torch's, s | load, s | torch's, s | of torch's load |"
    text = page(
        "Saves and loads in a bucket and on a disk",
        f"python -m benchmarks.storage_rate {command} --write",
        machine(),
        [
            f"Medians of {asked.rounds} rounds, ours and the other in turn. The bucket: shards of"
            " one model, saved by all ranks",
            "together, beside a bare client with as many processes, on a server of S3's protocol on"
            " the same cores.",
            "Goal: 0.9 of the bare client's rate.",
        ],
        "| ranks | MB | bare put, s | save, s | rate of the bare put | bare get, s | load, s |"
        " rate of the bare get |",
        rows,
        [
            "The disk: one process. Goals: a load in at most 1.2 times torch's; 4,000 small tensors"
            " saved in 1.0 s and",
            "loaded in 3 s. Every byte is compared with its checksum in a load here.",
            "",
            *table(header, disk),
            "",
            *LIMITS,
        ],
    )
    tell(text, RESULTS / "storage_rate.md" if asked.write else None)


if __name__ == "__main__":
    main()
