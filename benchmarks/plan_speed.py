"""How long `lockstep plan` takes for large models, a table for results/plan_speed.md.

    python -m benchmarks.plan_speed [--write]

The command runs as a user would run it. Seconds of the clock are what a user waits; seconds of a
core (user and system) do not depend on what else the machine does, or depend less.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import RESULTS, machine, page, tell

SEVEN = (
    "n_layer: 32, n_embd: 4096, n_head: 32, mlp_hidden: 11008, vocab_size: 32000, block_size: 4096"
)
SEVENTY = (
    "n_layer: 80, n_embd: 8192, n_head: 64, n_kv_head: 8, mlp_hidden: 28672, vocab_size: 128256,"
    " block_size: 8192"
)
FIRST = 5.0  # seconds to the first answer


class Case(NamedTuple):
    """A model on a cluster, and within how many seconds its plan is wanted."""

    name: str
    args: str
    gpus: int
    mode: str
    goal: float


CASES = [
    Case("7B on 64 × H100, fp32", SEVEN, 64, "fp32", 20.0),
    Case("7B on 64 × H100, bf16", SEVEN, 64, "bf16", 20.0),
    Case("70B on 512 × H100, fp32", SEVENTY, 512, "fp32", 60.0),
    Case("70B on 512 × H100, bf16", SEVENTY, 512, "bf16", 60.0),
]


class Seconds(NamedTuple):
    """Of one plan: of the clock until the first answer and until the end, and of a core."""

    first: float
    whole: float
    computed: float


def timed(case: Case, folder: Path) -> Seconds:
    """Run one plan."""
    config = folder / "config.yaml"
    config.write_text(
        f"model: {{name: transformer, args: {{{case.args}}}}}\n"
        f"training: {{batch_size: 1, global_batch_size: 1024}}\nprecision: {{mode: {case.mode}}}\n"
    )
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "plan",
        str(config),
        "--gpus",
        str(case.gpus),
        "--gpu-type",
        "H100",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    since = time.perf_counter()
    first = float("nan")
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "first answer" in line:
                first = time.perf_counter() - since
    assert process.returncode == 0, command
    whole = time.perf_counter() - since
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(
        first, whole, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    )


def main() -> int:
    rows = []
    within = True
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            took = timed(case, Path(folder))
            load = os.getloadavg()[0]
            within &= took.first <= FIRST and took.whole <= case.goal
            rows.append(
                f"| {case.name} | {took.first:.1f} | {FIRST:.0f} | {took.whole:.1f} |"
                f" {case.goal:.0f} | {took.computed:.1f} | {load:.1f} |"
            )
            print(rows[-1], flush=True)
    text = page(
        "Seconds until a plan is there",
        "python -m benchmarks.plan_speed --write",
        machine(),
        [
            "The first answer, on stderr, is the memory of the likeliest layout. Cores: user and"
            " system time."
        ],
        "| plan | first answer, s | goal | whole plan, s | goal | cores, s | load |",
        rows,
    )
    tell(text, RESULTS / "plan_speed.md" if "--write" in sys.argv else None)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
