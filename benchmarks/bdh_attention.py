"""BDH's attention in its two forms, forward and backward, in turn; where the chunked one wins.

python -m benchmarks.bdh_attention [--lengths 256,512,1024,2048] [--rounds 5] [--threads 1]
[--device cpu] [--write]
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.models.bdh import CHUNK, chunked, direct

# Of one head at BDH's default sizes.
NEURONS = 8192
WIDTH = 256


def seconds(form: Callable[[Tensor, Tensor], Tensor], q: Tensor, x: Tensor) -> float:
    _wait(q)
    begin = time.perf_counter()
    form(q, x).sum().backward()  # type: ignore[no-untyped-call]
    _wait(q)
    taken = time.perf_counter() - begin
    q.grad = x.grad = None
    return taken


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()


def row(length: int, rounds: int, device: str, dtype: torch.dtype) -> str:
    q = torch.rand(1, length, NEURONS, device=device, dtype=dtype, requires_grad=True)
    x = torch.randn(1, length, WIDTH, device=device, dtype=dtype, requires_grad=True)
    seconds(direct, q, x), seconds(chunked, q, x)
    taken = [(seconds(direct, q, x), seconds(chunked, q, x)) for _ in range(rounds)]
    table, chunks = (median(of) * 1e3 for of in zip(*taken, strict=True))
    ratio = median(t / c for t, c in taken)
    return f"| {length} | {table:.1f} | {chunks:.1f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="256,512,1024,2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    rows = []
    for length in map(int, asked.lengths.split(",")):
        rows.append(row(length, asked.rounds, asked.device, dtype))
        print(rows[-1], flush=True)
    options = (
        f"--lengths {asked.lengths} --rounds {asked.rounds} --threads {asked.threads} --device"
        f" {asked.device}"
    )
    text = page(
        "BDH's attention to the past, two forms",
        f"python -m benchmarks.bdh_attention {options} --write",
        f"torch {torch.__version__}, {str(dtype).removeprefix('torch.')}, {machine()}",
        [
            (
                f"One head of {NEURONS} neurons, values of width {WIDTH}, chunks of {CHUNK}"
                " positions; forward, backward,"
            ),
            (
                f"both in turn; medians of {asked.rounds} rounds; the last column is the median of"
                " the rounds' ratios."
            ),
        ],
        "| T | direct, ms | chunked, ms | direct / chunked |",
        rows,
    )
    tell(text, RESULTS / "bdh_attention.md" if asked.write else None)


if __name__ == "__main__":
    main()
