"""What the same bits cost between two hosts: bytes and step time against the plain mode. Needs
root.

    python -m benchmarks.same_bits_link [--write] [--rate 100mbit]

Two hosts as network namespaces on a shaped link, one rank each; plain and reproducible trainers
step in turn in the same processes. Goals: bytes within 3 %, time within 10 %.
"""

import argparse
import platform
import sys

import torch

from benchmarks.page import RESULTS, machine, page, tell
from tests.hosts import hosts
from tests.parity.link import LENGTH, SIZE, all_of
from tests.ranks import run_ranks

TOPOLOGIES = ["ddp:2", "fsdp:2", "pipeline:2"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with hosts(2, rate=asked.rate) as two:
        ranks = run_ranks(all_of, 2, TOPOLOGIES, asked.rounds, 2, on=two, timeout=1200)
    rows = []
    good = True
    for topology, *found in zip(TOPOLOGIES, *ranks, strict=True):
        plain, exact = (sum(rank["bytes"][side] for rank in found) for side in (0, 1))
        seconds = [max(rank["seconds"][side] for rank in found) for side in (0, 1)]
        ratio = max(rank["time ratio"] for rank in found)
        good &= exact / plain - 1 <= 0.03 and ratio <= 1.10
        rows.append(
            f"| {topology} | {plain / 1e6:.3f} | {exact / 1e6:.3f} | {exact / plain - 1:+.2%} "
            f"| {seconds[0]:.3f} | {seconds[1]:.3f} | {ratio - 1:+.1%} |"
        )
        print(rows[-1], flush=True)
    text = page(
        "The same bits on a link: bytes and time against the plain mode",
        f"python -m benchmarks.same_bits_link --write --rate {asked.rate} --rounds {asked.rounds}",
        f"torch {torch.__version__}, {platform.machine()}, {machine()}",
        [
            f"Two hosts, one rank each, {asked.rate} each way.",
            (
                f"Transformer of {SIZE['n_layer']} layers, width {SIZE['n_embd']}, four"
                " micro-batches of two samples of"
            ),
            (
                f"{LENGTH} tokens a step. Megabytes that both hosts send per step, seconds per"
                " step; medians of"
            ),
            (
                f"{asked.rounds} rounds of two steps, both modes in turn; the last column is the"
                " median of the rounds'"
            ),
            (
                "ratios. Plain shards send more: gloo's reduce-scatter is an all-reduce of which a"
                " part is kept."
            ),
        ],
        "| topology | MB, plain | MB, reproducible | difference | s, plain | s, reproducible |"
        " difference |",
        rows,
    )
    tell(text, RESULTS / "same_bits_link.md" if asked.write else None)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
