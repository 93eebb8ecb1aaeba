"""torch.compile, block by block.

Blocks are compiled inside of the hooks on them: the seed of a block is set before its compiled code runs, and FSDP
gathers it outside. Random numbers of compiled code are not those of eager code; compiled runs equal compiled runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakSet

import torch
from torch import nn

_COMPILED: WeakSet[nn.Module] = WeakSet()


def compile_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Compile the `forward` of each block in place; names stay. torch shares compiled code within a class."""
    for _, block in blocks:
        block.forward = torch.compile(block.forward)
        _COMPILED.add(block)


def compiled_blocks(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules within `parts` that `compile_blocks` has compiled."""
    return (module for part in parts for module in part.modules() if module in _COMPILED)
