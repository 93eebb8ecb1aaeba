"""The same training on a GPU: bits under `reproducible`, and losses under each strategy that one
GPU can run.

    python -m benchmarks.gpu.parity [--steps 20]
    python -m benchmarks.gpu.parity --device cpu --tiny --steps 4

Each row is a run of its own process or processes, beside one process without a process group.
`nccl` is a group of one rank. Two ranks on one GPU can't join over NCCL, so they reduce over gloo,
which takes no other collective of GPU tensors: `ddp` alone runs there. On a CPU all of it is gloo.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.common import TINY, WORKLOADS, RandomTokens, parser, require, where
from benchmarks.page import RESULTS, page, tell
from lockstep.config import config_from
from lockstep.trainer import Trainer

NEAR = 1e-4  # of the losses of one process, relative
MICRO_BATCHES = 2


class Row(NamedTuple):
    """A run that is compared with one process.

    Attributes:
        same_bits: whether it has to end in the same bits.
    """

    title: str
    strategy: str
    ranks: int = 0  # 0: without a process group
    backend: str = "auto"
    reproducible: bool = False
    settings: dict[str, Any] = {}
    same_bits: bool = False


ROWS = (
    Row("again, equal bits", "single", reproducible=True, same_bits=True),
    Row(
        "recomputed, equal bits",
        "single",
        reproducible=True,
        same_bits=True,
        settings={"training.gradient_checkpointing": "full"},
    ),
    Row("nccl, ddp", "ddp", 1),
    Row("nccl, ddp, equal bits", "ddp", 1, reproducible=True, same_bits=True),
    Row("nccl, fsdp", "fsdp", 1),
    Row("nccl, fsdp, equal bits", "fsdp", 1, reproducible=True, same_bits=True),
    Row("gloo, ddp, 2 ranks on the GPU", "ddp", 2, "gloo"),
    Row("compiled", "single", settings={"training.compile": True}),
)


def train(asked: argparse.Namespace) -> dict[str, Any]:
    """One rank's run: losses of the steps, and a digest of the parameters."""
    row = Row(**json.loads(asked.row))
    work = (TINY if asked.tiny else WORKLOADS)["transformer-124m"]
    with torch.device("meta"):
        model = work.model()
    settings = {
        "training.batch_size": work.batch,
        "training.gradient_accumulation_steps": MICRO_BATCHES // max(1, row.ranks),
        "training.max_steps": asked.steps,
        "training.learning_rate": 3e-4,
        "precision.mode": "fp32",
        "distributed.device": asked.device,
        "distributed.strategy": row.strategy,
        "distributed.backend": row.backend,
        "distributed.reproducible": row.reproducible,
        **row.settings,
    }
    trainer = Trainer(model, config=config_from(settings))
    losses = [
        float(record.loss)
        for record in trainer.steps(RandomTokens(work.length, work.args["vocab_size"]))
    ]
    digest = hashlib.sha256()
    for _, value in sorted(trainer.placed.parameters.items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return {"losses": losses, "digest": digest.hexdigest()[:16]}


def run(row: Row, asked: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a row, each as if it were alone on its machine, and return what rank 0
    found.
    """
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        processes = []
        for rank in range(max(1, row.ranks)):
            alone = {
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
            }
            joins = {
                **alone,
                "WORLD_SIZE": str(row.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu.parity",
                "--row",
                json.dumps(row._asdict()),
            ]
            command += [
                "--device",
                asked.device,
                "--steps",
                str(asked.steps),
                *["--tiny"] * asked.tiny,
            ]
            out = Path(folder, f"{rank}.json")
            environment = os.environ | (joins if row.ranks else {})
            processes.append(subprocess.Popen([*command, "--out", str(out)], env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            return {"error": f"ended with {codes}"}
        found: dict[str, Any] = json.loads(Path(folder, "0.json").read_text())
        return found


def line(
    row: Row, found: dict[str, Any], plain: dict[str, Any], exact: dict[str, Any]
) -> tuple[str, bool]:
    if "error" in found:
        return f"| {row.title} | {found['error']} | | NO |", False
    beside = exact if row.reproducible else plain
    apart = max(abs(a / b - 1) for a, b in zip(found["losses"], beside["losses"], strict=True))
    equal = found["digest"] == beside["digest"]
    good = equal if row.same_bits else apart <= NEAR
    return (
        (
            f"| {row.title} | {apart:.1e} | {'the same' if equal else 'others'} |"
            f" {'yes' if good else 'NO'} |"
        ),
        good,
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--row", help=argparse.SUPPRESS)
    arguments.add_argument("--out", help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    device = require(asked.device)
    if asked.row:
        Path(asked.out).write_text(json.dumps(train(asked)))
        return 0
    plain = run(Row("plain", "single"), asked)
    exact = run(Row("equal bits", "single", reproducible=True), asked)
    if "error" in plain or "error" in exact:
        print("FAILED: one process does not train here", file=sys.stderr)
        return 1
    lines = [line(row, run(row, asked), plain, exact) for row in ROWS]
    text = page(
        "The same training on a GPU",
        "python -m benchmarks.gpu.parity " + " ".join(sys.argv[1:]),
        where(device),
        [
            f"{asked.steps} steps in fp32, beside one process; rows of equal bits beside one with"
            " `reproducible`."
        ],
        "| run | losses apart, relative | bits of the parameters | as it has to be |",
        [text for text, _ in lines],
    )
    tell(text, RESULTS / "gpu_parity.md" if asked.write else None)
    return 0 if all(good for _, good in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
