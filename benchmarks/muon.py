"""What a step of Muon sends and computes, beside AdamW's and beside gathering on every rank.

    python -m benchmarks.muon --write

Needs root, for a network of its own. Four optimizers train the same transformer on each topology:
AdamW; Muon, whose matrices are each computed by one rank; Muon on replicas that compute all of
them; and Muon that gathers each matrix on each rank in float32, as `DTensor.full_tensor` of the
momentum does. Bytes are those of the loopback interface of a network namespace that nothing else
uses; computation is counted in operations, so that neither depends on what else the machine does.
The Muons of a topology have to end with the same parameters, to the bit.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.page import RESULTS, machine, page, tell
from lockstep import muon
from lockstep.checkpoint import digest_tensors
from lockstep.config import config_from
from lockstep.models.transformer import Transformer
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

SIZE = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 64}
BATCH = 4
LENGTH = 64
STEPS = 3
COUNTERS = Path("/proc/self/net/dev")  # of the network namespace that a process is in
TOPOLOGIES = ("ddp:2", "ddp:4", "fsdp:2", "fsdp:4", "tensor:2", "hybrid:2x2")


class GatheringMuon(muon.Muon):
    """Muon that gathers each matrix on each rank in float32, and computes it there."""

    def share_among(self, replicas: Any) -> None:
        """Have each replica compute all matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        one_owner = muon.orthogonal_parts
        muon.orthogonal_parts = gathered  # type: ignore[assignment]
        try:
            return super().step(closure)
        finally:
            muon.orthogonal_parts = one_owner


def gathered(matrices: Sequence[Any], whole: muon.Whole) -> list[Tensor]:
    """Return this rank's part of each matrix's orthogonal direction."""
    found = []
    for matrix in matrices:
        parameter = matrix.parameter
        if not isinstance(parameter, DTensor):
            found.append(whole(matrix.direction))
            continue
        mesh = parameter.device_mesh
        places = parameter.placements
        spread = DTensor.from_local(
            matrix.direction, mesh, places, shape=parameter.shape, stride=parameter.stride()
        )
        made = whole(spread.full_tensor())
        found.append(distribute_tensor(made, mesh, places, src_data_rank=None).to_local())
    return found


WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {"training.optimizer": "adamw"},
    "Muon": {"training.optimizer": "muon"},
    "Muon, each replica by itself": {
        "training.optimizer": "muon",
        "training.optimizer_args.spread": False,
    },
    "Muon, gathered everywhere": {"training.optimizer": "benchmarks.muon:GatheringMuon"},
}


@dataclass
class Found:
    """What a rank has counted, a step.

    Attributes:
        sent: bytes that all ranks have put on the interface.
        matrices: that this rank has computed.
        operations: floating-point operations in them.
        digest: of the parameters.
    """

    sent: float
    matrices: float
    operations: float
    digest: str


def batch_of(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, SIZE["vocab_size"], (BATCH, LENGTH + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}


def sent_bytes() -> int:
    """Return the bytes that all processes have put on the loopback interface, once all waited."""
    dist.barrier()
    time.sleep(0.2)
    dist.barrier()
    lines = COUNTERS.read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def counted(topology: str, settings: dict[str, Any]) -> Found:
    """Make a few steps on this rank, and count what they send and compute."""
    torch.set_num_threads(1)
    values, _ = parse_topology(topology)
    common = {
        "training.batch_size": BATCH,
        "training.learning_rate": 3e-3,
        "training.max_steps": 10**6,
        "precision.mode": "fp32",
        "distributed.reproducible": False,
        "distributed.divergence_check_steps": None,
        **{f"distributed.{key}": value for key, value in values.items()},
    }
    torch.manual_seed(0)
    trainer = Trainer(Transformer(**SIZE), config=config_from({**common, **settings}))
    matrices = operations = 0
    make = muon.orthogonal

    def counts(matrix: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        nonlocal matrices, operations
        short, long = sorted(matrix.shape)
        matrices += 1
        operations += 2 * steps * short * short * (2 * long + short)
        return make(matrix, coefficients, steps, eps)

    # ranks that cut layers have the same samples
    mine = 0 if topology.startswith("tensor") else dist.get_rank()
    trainer.training_step(batch_of(mine))  # connections are made
    muon.orthogonal = counts  # type: ignore[assignment]
    before = sent_bytes()
    for index in range(STEPS):
        trainer.training_step(batch_of(8 * (1 + index) + mine))
    sent = sent_bytes() - before
    muon.orthogonal = make
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in trainer.placed.kept().items()
    }
    digest = digest_tensors(full.items())
    return Found(sent / STEPS, matrices / STEPS, operations / STEPS, digest)


def all_ways(topology: str) -> dict[str, Found]:
    return {name: counted(topology, WAYS[name]) for name in ways_on(topology)}


def ways_on(topology: str) -> list[str]:
    """Return the ways that differ on a topology: replicas have nothing to gather."""
    left_out = {"ddp": "Muon, gathered everywhere", "hybrid": ""}
    kind = topology.partition(":")[0]
    same = left_out.get(kind, "Muon, each replica by itself")
    return [name for name in WAYS if name != same]


def rows_of(topology: str, elements: int) -> list[str]:
    ranks = 4 if topology in ("ddp:4", "fsdp:4", "hybrid:2x2") else 2
    here = import_module("benchmarks.muon")  # as other processes find it: this one is __main__
    by_rank: list[dict[str, Found]] = run_ranks(here.all_ways, ranks, topology, timeout=900)
    adamw = by_rank[0]["AdamW"].sent / ranks
    names = ways_on(topology)
    digests = {found[name].digest for found in by_rank for name in names if name != "AdamW"}
    assert len(digests) == 1, f"{topology}: the Muons ended with other parameters"
    rows = []
    for name in names:
        sent = by_rank[0][name].sent / ranks
        more = round((sent - adamw) / elements, 2) + 0.0  # without a minus before a zero
        most = max(found[name].operations for found in by_rank)
        matrices = sum(found[name].matrices for found in by_rank)
        rows.append(
            f"| {topology} | {name} | {sent / 1e6:.3f} | {sent / adamw:.3f} | {more:.2f} |"
            f" {matrices:.0f} | {most / 1e9:.3f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.inside:
        again = [sys.executable, "-m", "benchmarks.muon", *sys.argv[1:], "--inside"]
        inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        sys.exit(subprocess.run([*inside, *again]).returncode)

    model = Transformer(**SIZE)
    inside_blocks = [p for name, p in model.named_parameters() if name.startswith("layers.")]
    hidden = [p for p in inside_blocks if p.ndim == 2]
    elements = sum(p.numel() for p in hidden)
    rows = []
    for topology in asked.topologies.split(","):
        rows += rows_of(topology, elements)
        print(topology, "is done", flush=True)
    words = [
        f"A transformer of {SIZE['n_layer']} layers of width {SIZE['n_embd']}, whose blocks hold"
        f" {len(hidden)} matrices of {elements:,} elements;",
        f"{BATCH} × {LENGTH} tokens a rank and step, fp32, gloo, {STEPS} steps after the first."
        " Megabytes are those that a rank",
        "puts on the link in a step, on average over ranks, headers and all of the step's other"
        " messages included; then their",
        "ratio to AdamW's, and the bytes beyond AdamW's for each element of the matrices. Matrices"
        " are computed on all ranks",
        "together; Gflop are Newton and Schulz's on the rank with the most of them. The Muons"
        " of a topology ended with",
        "the same parameters, to the bit, or this page would not be here.",
    ]
    after = [
        "In theory a rank of R sends 4 · (1 − 1/R) / R bytes an element of its matrices more than"
        " AdamW where it has shards, 2 · (1 − 1/R)",
        "where it has replicas, and 4 · (1 − 1/R) where float32 shards are gathered everywhere: 1,"
        " 1 and 2 with two ranks, 0.75, 1.5",
        "and 3 with four. On replicas AdamW's step already sends 8 · (1 − 1/R) for the gradient of"
        " each parameter: sharing the matrices",
        "out adds a quarter of that, and each rank computes 1/R of them. It pays where that part of"
        " the link's time is shorter than",
        "what it saves of 30 · d operations an element (a matrix of d rows and columns, five"
        " steps): at d = 1024 on 2 ranks, 15 · 1024",
        "operations for one byte. `optimizer_args: {spread: false}` has each replica compute all.",
    ]
    header = "| topology | optimizer | MB | of AdamW's | bytes an element | matrices | Gflop |"
    text = page(
        "What a step of Muon sends",
        "python -m benchmarks.muon --write",
        machine(),
        words,
        header,
        rows,
        after,
    )
    tell(text, RESULTS / "muon.md" if asked.write else None)


if __name__ == "__main__":
    main()
