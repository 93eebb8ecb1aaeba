"""Finds where positions of a cut sequence meet outside of attention, and undoes it.

Under context parallel (`lockstep.parallel.context`) a rank has a part of each sequence, and only modules that know of
this let its positions meet others'. Any other, such as attention that the model computes by itself, a convolution or a
mean over the sequence, sees the positions here only: no error, another gradient. Where the forward pass runs on whole
sequences, of which each rank keeps its part, such a module computes what it computes in one process.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.attention import Attend
from lockstep.monitor.figures import gather_objects
from lockstep.parallel.context_chunks import Context
from lockstep.parallel.tensor_blocks import SEQUENCE
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten
from lockstep.trainer import Trainer

_FAR = 2e-2  # relative difference of an output that is more than rounding, also in bfloat16


class WholeSequences:
    """Lets a model that runs on parts of sequences run on whole ones.

    Attributes:
        module: name of the first module whose outputs are others than on whole sequences; "": none was found.
        numbers: whether it is an `Attend` that numbers the positions of a part otherwise than those of the whole.
    """

    def __init__(self, trainer: Trainer, names: Mapping[int, str]) -> None:
        context = trainer.placed.context
        assert context is not None
        (model,) = trainer.placed.parts
        self.module, self._names, self._context, self._model = "", names, context, model
        self.numbers = False
        self._plain, self._compared, self._random = model.forward, False, trainer.placed.random_state
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        lengths = [leaf.shape[SEQUENCE] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > SEQUENCE]
        length, context = min(lengths), self._context
        gathered = [context.gathered(leaf) if _has(leaf, length) else leaf for leaf in leaves]
        whole_args, whole_kwargs = tree_unflatten(gathered, structure)
        if not self._compared:
            self._compared = True
            self._compare_positions(length, next(leaf.device for leaf in leaves if isinstance(leaf, Tensor)))
            if not self.module:
                self._compare((args, kwargs), (whole_args, whole_kwargs))
        context.whole = True  # and stays so, for what the backward pass computes again
        outputs, structure = tree_flatten(self._plain(*whole_args, **whole_kwargs))
        return tree_unflatten([_part(each, length * context.ranks, context) for each in outputs], structure)

    def _compare_positions(self, length: int, device: torch.device) -> None:
        for attend in (module for module in self._model.modules() if isinstance(module, Attend)):
            self._context.whole = True
            right = self._context.part(attend.positions(length * self._context.ranks, device), 0)
            self._context.whole = False
            wrong = not torch.equal(attend.positions(length, device), right)
            if any(gather_objects(wrong)):  # the first rank's part may begin at 0 in any case
                self.module, self.numbers = self._names.get(id(attend), ""), True
                return

    @torch.no_grad()
    def _compare(self, part: tuple[Any, Any], whole: tuple[Any, Any]) -> None:
        found, calls = [], dict(self._random.calls)
        for self._context.whole, (args, kwargs) in ((False, part), (True, whole)):
            seen: list[tuple[str, Tensor]] = []
            handles = [
                module.register_forward_hook(_noted(self._names.get(id(module), ""), seen))
                for module in self._model.modules()
                if module is not self._model
            ]
            with torch.random.fork_rng():
                self._plain(*args, **kwargs)
            self._random.calls = dict(calls)  # each pass draws the same numbers
            for handle in handles:
                handle.remove()
            found.append(seen)
        for (name, mine), (_, theirs) in zip(*found, strict=False):
            for dim in range(1, mine.dim()):
                if theirs.shape[dim] == mine.shape[dim] * self._context.ranks:
                    right = self._context.part(theirs, dim).double()
                    if (mine.double() - right).norm() > _FAR * right.norm():
                        self.module = name
                        return


def _has(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > SEQUENCE and value.shape[SEQUENCE] == length


def _part(value: Any, length: int, context: Context) -> Any:
    if not isinstance(value, Tensor):
        return value
    if _has(value, length):
        return context.part(value)
    return value if context.rank == 0 else value.detach() + 0 * value  # all ranks compute it: its gradient counts once


def _noted(name: str, seen: list[tuple[str, Tensor]]) -> Any:
    def note(_module: nn.Module, _args: Any, outputs: Any) -> None:
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if isinstance(first, Tensor) and first.dim() > SEQUENCE:
            seen.append((name, first))

    return note
