"""Runs all programs that need a GPU, in one command of under half an hour.

It runs each program below, and writes a page of how they ended.

    make gpu
    make gpu ARGS="--device cpu --tiny"    the same programs, tiny and on a CPU; nothing is written

Each program has its time and is ended when that is over; its page is then missing, and the page of
all says so.
"""

import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.gpu.common import parser, require, where
from benchmarks.page import RESULTS, page, tell


class Program(NamedTuple):
    """A program, and the page that it writes.

    Attributes:
        command: what follows `python -m`.
        seconds: it is ended after so many. All programs together stay under half an hour.
        tiny: what replaces the command's arguments on a CPU.
    """

    shows: str
    command: list[str]
    page: str
    seconds: float
    tiny: list[str]


THROUGHPUT = ["benchmarks.gpu.throughput", "--rounds", "5", "--steps", "10"]
SHORT = ["--models", "transformer-124m", "--rounds", "1", "--steps", "2", "--no-compile"]
PROGRAMS = (
    Program("tests that need CUDA", ["pytest", "-m", "gpu", "tests/torch_compat"], "", 120, []),
    Program(
        "the same training, NCCL", ["benchmarks.gpu.parity"], "gpu_parity.md", 360, ["--steps", "3"]
    ),
    Program(
        "mixed precision", ["benchmarks.gpu.precision"], "gpu_precision.md", 240, ["--steps", "4"]
    ),
    Program("memory beside the plan", ["benchmarks.gpu.memory"], "gpu_memory.md", 180, []),
    Program("speed, MFU, compiled", THROUGHPUT, "gpu_throughput.md", 540, SHORT),
    Program(
        "float8",
        [*THROUGHPUT, "--fp8", "linears", "--models", "transformer-774m"],
        "gpu_throughput_fp8.md",
        300,
        ["--fp8", "emulated", *SHORT],
    ),
)
NOT_SHOWN = (
    (
        "Not shown on one GPU: NCCL between GPUs and nodes (its algorithms, NVLink, InfiniBand),"
        " fsdp and pipelines over it, and the figures of `lockstep plan` for several GPUs."
    ),
    "Not compared: torchtitan, which trains its own models from its own configs.",
)


def end_of(program: Program, device: str, *, tiny: bool) -> tuple[str, float]:
    """Run a program; return how it ended, and its seconds."""
    if tiny and not program.page:
        return "not run", 0.0
    command = [sys.executable, "-m", *program.command]
    if program.page:
        on_cpu = [sys.executable, "-m", program.command[0], *program.tiny, "--tiny"]
        command = [*(on_cpu if tiny else [*command, "--write"]), "--device", device]
    began = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(program.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its data workers and ranks
        process.wait()
        return f"ENDED after {program.seconds:.0f} s", program.seconds
    if not program.page and code == 5:
        return "none ran", time.monotonic() - began
    return "well" if code == 0 else f"FAILED with {code}", time.monotonic() - began


def main() -> int:
    asked = parser(__doc__).parse_args()
    device = require(asked.device)
    if not asked.tiny and device.type == "cpu":
        raise SystemExit("NOT MEASURED: on a CPU only `--tiny` ends in time")
    assert sum(program.seconds for program in PROGRAMS) < 1800
    rows = []
    good = True
    for program in PROGRAMS:
        print(f"== {program.shows}", flush=True)
        end, seconds = end_of(program, asked.device, tiny=asked.tiny)
        good = good and end in ("well", "none ran", "not run")
        written = (
            f"[{program.page}]({program.page})"
            if program.page and end == "well" and not asked.tiny
            else ""
        )
        rows.append(f"| {program.shows} | {end} | {seconds:.0f} | {written} |")
    text = page(
        "All that one GPU shows",
        "python -m benchmarks.gpu.all " + " ".join(sys.argv[1:]),
        where(device),
        [],
        "| program | ended | seconds | page |",
        rows,
        NOT_SHOWN,
    )
    tell(text, None if asked.tiny else RESULTS / "gpu.md")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
