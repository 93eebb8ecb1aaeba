"""torch.compile, block by block, and the time that it adds to the first forward and backward pass.

Blocks are compiled inside of the hooks on them: the seed of a block is set before its compiled code runs, and FSDP
gathers it outside. Random numbers of compiled code are not those of eager code; compiled runs equal compiled runs.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakSet

import torch
from torch import nn

from lockstep.parallel.micro_step import AroundMicroBatch, MicroBatchPass

_COMPILED: WeakSet[nn.Module] = WeakSet()


def compile_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Compile the `forward` of each block in place; names stay. torch shares compiled code within a class."""
    for _, block in blocks:
        block.forward = torch.compile(block.forward)
        _COMPILED.add(block)


def compiled_blocks(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules within `parts` that `compile_blocks` has compiled."""
    return (module for part in parts for module in part.modules() if module in _COMPILED)


class ColdStart(AroundMicroBatch):
    """Logs how much longer a step's first micro-batch takes than its second, which needs nothing compiled."""

    def __init__(self, num_blocks: int, log_lines: list[str]) -> None:
        self._num_blocks, self._log_lines = num_blocks, log_lines
        self._seconds: list[float] = []
        self._begin = 0.0

    def before(self, run: MicroBatchPass) -> None:
        if len(self._seconds) < 2:
            self._begin = time.perf_counter()

    def after(self, run: MicroBatchPass) -> None:
        if len(self._seconds) == 2:
            return
        self._seconds.append(time.perf_counter() - self._begin)
        if len(self._seconds) == 2:
            longer = max(0.0, self._seconds[0] - self._seconds[1])
            self._log_lines.append(f"compile: {self._num_blocks} block(s) took {longer:.1f} s at the first pass")
