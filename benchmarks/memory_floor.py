"""What a rank holds at the update, against the least that each strategy needs.

    python -m benchmarks.memory_floor [--ranks 2,4] [--write]

Counted are the bytes of live tensors before the third update. The floor: AdamW keeps 16 bytes a
parameter (values, gradients, two states), whole under ddp; divided by the ranks under fsdp, where
one unit is gathered besides. What is above the floor are the batch, tables of rotary phases and
buckets.
"""

import argparse
from typing import Any

from benchmarks.page import RESULTS, page, tell
from tests.parallel.memory import held_while_training
from tests.ranks import run_ranks

FSDP = "distributed.fsdp.sharding_strategy"
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"distributed.strategy": "ddp"},
    "fsdp full_shard": {"distributed.strategy": "fsdp", FSDP: "full_shard"},
    "fsdp shard_grad_op": {"distributed.strategy": "fsdp", FSDP: "shard_grad_op"},
    "fsdp full_shard, unsharded accumulation": {
        "distributed.strategy": "fsdp",
        FSDP: "full_shard",
        "distributed.fsdp.accumulate": "unsharded",
    },
}


def floor(name: str, held: dict[str, Any], ranks: int) -> float:
    """The least, in bytes: of `parameters` bytes of them."""
    parameters: float = held["parameters"]
    return 4 * parameters if name == "ddp" else 4 * parameters / ranks


def row(name: str, ranks: int) -> str:
    held = max(
        run_ranks(held_while_training, ranks, CASES[name], timeout=900),
        key=lambda of: float(of["at update"]),
    )
    least = floor(name, held, ranks)
    return (
        f"| {name} | {ranks} | {least / 2**20:.2f} | {held['at update'] / 2**20:.2f} |"
        f" {held['at update'] / least:.3f} | {max(held['between']) / 2**20:.2f} |"
        f" {held['unit'] / 2**20:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = []
    for ranks in map(int, asked.ranks.split(",")):
        for name in CASES:
            rows.append(row(name, ranks))
            print(rows[-1], flush=True)
    text = page(
        "What a rank holds, against the least that a strategy needs",
        f"python -m benchmarks.memory_floor --ranks {asked.ranks} --write",
        "",
        [
            (
                "A transformer of 8 layers, width 64, fp32, AdamW, three micro-batches a step; MiB"
                " of live tensors of the"
            ),
            "rank that holds most.",
        ],
        "| strategy | ranks | floor | at the update | of the floor | most between micro-batches |"
        " one unit |",
        rows,
    )
    tell(text, RESULTS / "memory_floor.md" if asked.write else None)


if __name__ == "__main__":
    main()
