"""The same training on a GPU: bits under `reproducible`, and losses, in each precision and under
each strategy that one GPU can run.

    python -m benchmarks.gpu.parity [--steps 20] [--at-once 6]
    python -m benchmarks.gpu.parity --device cpu --tiny --steps 4

Each row is a run of its own process or processes, beside one process without a process group that
trains in the same precision. `nccl` is a group of one rank. Two ranks on one GPU can't join over
NCCL: they exchange over gloo, through the host's memory. On a CPU all of it is gloo.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.common import TINY, RandomTokens, Workload, parser, require, where
from benchmarks.page import RESULTS, page, tell
from lockstep import checkpoint
from lockstep.config import config_from
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer

# Losses of a run that need not have the same bits may be so far apart, relative. A compiled model
# draws other numbers for its dropout and rounds at other places, and AdamW makes a whole step of
# what is left of a gradient near zero.
NEAR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
NEAR_COMPILED = 1e-2
MICRO_BATCHES = 2
PATIENCE_SECONDS = 240.0
WORK = Workload(
    "transformer",
    {"n_layer": 8, "n_embd": 512, "n_head": 8, "vocab_size": 16384, "dropout": 0.1},
    512,
    4,
)


class Row(NamedTuple):
    """A run that is compared with one process.

    Attributes:
        same_bits: whether it has to end in the same bits.
        resumed_at: it ends after so many steps, and another run goes on from its checkpoint.
    """

    title: str
    topology: str = "single"  # that one without a process group
    backend: str = "auto"
    mode: str = "fp32"
    reproducible: bool = False
    settings: dict[str, Any] = {}
    same_bits: bool = False
    near: float = 0.0  # 0: as the precision has it
    resumed_at: int = 0

    @property
    def whole_title(self) -> str:
        way = "reproducible" if self.reproducible else "plain"
        return f"{self.topology} | {self.title} | {self.mode} | {way}"


def exact(title: str, topology: str = "single", **more: Any) -> Row:
    """Return a row that has to end in the same bits."""
    return Row(title, topology, reproducible=True, same_bits=True, **more)


ON_HOST = "distributed.fsdp.cpu_offload"  # a GPU's alone
ROWS = (
    *(
        row
        for mode in ("fp32", "bf16", "fp16")
        for row in (
            exact("again", mode=mode),
            exact("recomputed", mode=mode, settings={"training.gradient_checkpointing": "full"}),
            Row("nccl", "ddp:1", mode=mode),
            exact("nccl", "ddp:1", mode=mode),
            Row("nccl", "fsdp:1", mode=mode),
            exact("nccl", "fsdp:1", mode=mode),
        )
    ),
    exact("saved in the background, resumed", resumed_at=2),
    exact("nccl, saved, resumed", "fsdp:1", resumed_at=2),
    exact("nccl, shards on the host", "fsdp:1", settings={ON_HOST: True}),
    Row("gloo, 2 ranks on the GPU", "ddp:2", "gloo"),
    exact("gloo, 2 ranks on the GPU", "ddp:2", backend="gloo"),
    Row("gloo, 2 ranks on the GPU", "fsdp:2", "gloo"),
    exact("gloo, 2 ranks on the GPU", "fsdp:2", backend="gloo"),
    exact("gloo, 2 ranks on the GPU", "tensor:2", backend="gloo"),
    Row("gloo, 2 ranks on the GPU", "context:2", "gloo"),
    Row("gloo, 2 ranks on the GPU", "pipeline:2", "gloo"),
    exact("gloo, 2 ranks on the GPU", "pipeline:2", backend="gloo"),
    exact("gloo, 2 ranks on the GPU", "pipeline:2", backend="gloo", mode="bf16"),
    Row("compiled", settings={"training.compile": True}, near=NEAR_COMPILED),
    Row("compiled", mode="bf16", settings={"training.compile": True}),
)


def train(asked: argparse.Namespace) -> dict[str, Any]:
    """One rank's run: losses of the steps, and a digest of the parameters."""
    row = Row(**json.loads(asked.row))
    work = TINY["transformer-124m"] if asked.tiny else WORK
    with torch.device("meta"):
        model = work.model()
    placement, _ = parse_topology(row.topology)
    cuts_samples = row.topology in ("ddp:2", "fsdp:2")
    settings = {
        "training.batch_size": work.batch,
        "training.gradient_accumulation_steps": MICRO_BATCHES // (1 + cuts_samples),
        "training.max_steps": asked.steps,
        "training.learning_rate": 3e-4,
        "precision.mode": row.mode,
        "distributed.device": asked.device,
        **{f"distributed.{key}": value for key, value in placement.items()},
        "distributed.backend": row.backend,
        "distributed.reproducible": row.reproducible,
        **row.settings,
    }
    if row.resumed_at:
        settings |= {"checkpoint.save_steps": row.resumed_at, "checkpoint.resume": "auto"}
    folder = asked.folder if row.resumed_at else None
    trainer = Trainer(model, config=config_from(settings), output_dir=folder)
    losses = {}
    for record in trainer.steps(RandomTokens(work.length, work.args["vocab_size"])):
        losses[record.step] = float(record.loss)
        if record.step == row.resumed_at + 1 and asked.stop:
            while checkpoint.newest(Path(asked.folder, "checkpoints")) is None:
                time.sleep(0.01)
            os._exit(0)  # after a step that no checkpoint holds, without a word
    digest = hashlib.sha256()
    for _, value in sorted(trainer.state_dict().items()):
        digest.update(value.detach().cpu().contiguous().float().numpy().tobytes())
    return {"losses": losses, "digest": digest.hexdigest()[:16]}


def run(row: Row, asked: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a row, each as if it were alone on its machine, and return what rank 0
    found.
    """
    with tempfile.TemporaryDirectory() as folder:
        if row.resumed_at:
            launch(row, asked, folder, "--stop")
        if error := launch(row, asked, folder):
            return {"error": error}
        found: dict[str, Any] = json.loads(Path(folder, "0.json").read_text())
        return found


def launch(row: Row, asked: argparse.Namespace, folder: str, *more: str) -> str:
    """Run the ranks of a row to their end; return what went wrong."""
    _, ranks = parse_topology(row.topology)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.gpu.parity", "--row", json.dumps(row._asdict())]
    command += ["--device", asked.device, "--steps", str(asked.steps), *["--tiny"] * asked.tiny]
    command += ["--folder", folder, *more]
    processes = []
    for rank in range(ranks):
        joins = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = os.environ | (joins if row.topology != "single" else {})
        log = Path(folder, f"{rank}.log")
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(PATIENCE_SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    if not any(codes):
        return ""
    said = Path(folder, "0.log").read_text().strip().splitlines()
    print(f"{row.whole_title}: {codes}", *said[-25:], sep="\n    ", file=sys.stderr, flush=True)
    return f"ended with {codes}: {said[-1][:160] if said else ''}"


def line(row: Row, found: dict[str, Any], beside: dict[str, Any]) -> tuple[str, bool]:
    """Return a row of the page, and whether it is as it has to be."""
    if "error" in found:
        return f"| {row.whole_title} | {found['error']} | | NO |", False
    steps = found["losses"]  # of a resumed run: those after its checkpoint
    apart = max(abs(steps[step] / beside["losses"][step] - 1) for step in steps)
    equal = found["digest"] == beside["digest"]
    good = equal if row.same_bits else apart <= (row.near or NEAR[row.mode])
    good = good and len(steps) == len(beside["losses"]) - row.resumed_at
    return (
        (
            f"| {row.whole_title} | {apart:.1e} | {'the same' if equal else 'others'} |"
            f" {'yes' if good else 'NO'} |"
        ),
        good,
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--at-once", type=int, default=6, help="rows that run side by side")
    for hidden in ("--row", "--folder"):
        arguments.add_argument(hidden, help=argparse.SUPPRESS)
    arguments.add_argument("--stop", action="store_true", help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    device = require(asked.device)
    if asked.row:
        Path(asked.folder, f"{os.environ.get('RANK', '0')}.json").write_text(
            json.dumps(train(asked))
        )
        return 0
    rows = [row for row in ROWS if asked.device != "cpu" or ON_HOST not in row.settings]
    references = {
        (row.mode, row.reproducible): Row("reference", mode=row.mode, reproducible=row.reproducible)
        for row in rows
    }
    with ThreadPoolExecutor(asked.at_once) as workers:
        references_found = list(workers.map(lambda row: run(row, asked), references.values()))
        found = list(workers.map(lambda row: run(row, asked), rows))
    beside = dict(zip(references, references_found, strict=True))
    if any("error" in reference for reference in references_found):
        print("FAILED: one process does not train here", file=sys.stderr)
        return 1
    lines = [
        line(row, of, beside[row.mode, row.reproducible])
        for row, of in zip(rows, found, strict=True)
    ]
    text = page(
        "The same training on a GPU",
        "python -m benchmarks.gpu.parity " + " ".join(sys.argv[1:]),
        where(device),
        [
            f"{asked.steps} steps of a transformer with dropout, in {MICRO_BATCHES} micro-batches,"
            " beside one process in the same precision."
        ],
        "| topology | run | precision | mode | losses apart, relative | bits of the parameters"
        " | as it has to be |",
        [text for text, _ in lines],
    )
    tell(text, RESULTS / "gpu_parity.md" if asked.write else None)
    return 0 if all(good for _, good in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
