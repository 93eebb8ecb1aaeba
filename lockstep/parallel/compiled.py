"""torch.compile, block by block, and how long the first forward and backward pass takes for it.

Blocks are compiled inside of the hooks on them: the seed of a block is set before its compiled code runs, and FSDP
gathers it outside. Random numbers of compiled code are not those of eager code; compiled runs equal compiled runs.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from lockstep.data.batches import MicroBatch
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.parallel_model import MicroStep

_COMPILED: WeakSet[nn.Module] = WeakSet()


def compile_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Replace the `forward` of each; names stay. Blocks of one class share what is compiled, where torch sees it."""
    for _, block in blocks:
        block.forward = torch.compile(block.forward)
        _COMPILED.add(block)


def compiled_blocks(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules within `parts` that `compile_blocks` has compiled."""
    return (module for part in parts for module in part.modules() if module in _COMPILED)


class ColdStart:
    """Measures how much longer a step's first micro-batch takes than its second, which needs nothing compiled.

    Args:
        later_log_lines: receives the line.
    """

    def __init__(self, num_blocks: int, later_log_lines: list[str]) -> None:
        self._num_blocks, self._log_lines = num_blocks, later_log_lines
        self._seconds: list[float] = []

    def over(self, micro_step: MicroStep) -> MicroStep:
        """`micro_step`, timed twice."""

        def timed(micro_batch: MicroBatch, accumulator: LossAccumulator, factor: float, last: bool) -> Any:
            if len(self._seconds) == 2:
                return micro_step(micro_batch, accumulator, factor, last)
            begin = time.perf_counter()
            result = micro_step(micro_batch, accumulator, factor, last)
            self._seconds.append(time.perf_counter() - begin)
            if len(self._seconds) == 2:
                longer = max(0.0, self._seconds[0] - self._seconds[1])
                self._log_lines.append(f"compile: {self._num_blocks} block(s) took {longer:.1f} s at the first pass")
            return result

        return timed
