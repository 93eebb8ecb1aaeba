"""Takes a step without one of its properties.

The property is the other ranks, or the cut of sequences; random numbers and 16 bits are in
`operation_modes.py`.

Tests: tests/verify/test_complete_sequences.py, tests/verify/test_experiments.py,
tests/verify/test_experiments_leave_no_trace.py, tests/verify/test_updates.py
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.machine.environment import RANK_0_OF_1
from lockstep.models.attention import Attend
from lockstep.monitor.figures import gather_objects
from lockstep.parallel.context.attention import SequenceCut
from lockstep.parallel.tensor.layer_cut import SEQUENCE
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

_FAR = 2e-2  # relative difference of an output that is more than rounding, also in bfloat16


@contextmanager
def alone() -> Iterator[None]:
    """Let code in the block believe that there are no other ranks; its collectives do nothing."""

    def gathered(outputs: Any, tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        for output in outputs if isinstance(outputs, list) else outputs.view(-1, *tensor.shape):
            output.copy_(tensor)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    replaced: dict[str, Any] = {
        "is_initialized": lambda: False,
        "get_world_size": lambda *_: 1,
        "get_rank": lambda *_: 0,
        "all_gather": gathered,
        "all_gather_into_tensor": gathered,
        "all_reduce": nothing,
        "broadcast": nothing,
        "barrier": nothing,
    }
    variables = {name: value for name, value in RANK_0_OF_1.items() if name in os.environ}
    with patch.multiple(dist, **replaced), patch.dict(os.environ, variables):
        yield


class CompleteSequences:
    """Lets a model that runs on parts of sequences run on whole ones.

    Finds where positions meet outside of attention.

    Under context parallel a convolution, say, or a mean over the sequence sees a part of each
    sequence only: no error, another gradient. On whole sequences, of which each rank keeps its
    part, it computes what it does in one process.
    """

    def __init__(self, trainer: "Trainer", names: Mapping[int, str]) -> None:
        context = trainer.placed.context
        assert context is not None
        (model,) = trainer.placed.parts
        # name of the first whose outputs are others than on whole sequences on any rank, if one is
        # found
        self.module = ""
        # whether it is an `Attend` that numbers the positions of a part otherwise
        self.numbers = False
        self._names = names
        self._context = context
        self._model = model
        self._plain = model.forward
        self._compared = False
        self._random = trainer.placed.random_state
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on entire sequences, and return this rank's part of the outputs."""
        leaves, structure = tree_flatten((args, kwargs))
        lengths = [
            leaf.shape[SEQUENCE]
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() > SEQUENCE
        ]
        length = min(lengths)
        context = self._context
        gathered = [context.gathered(leaf) if _has(leaf, length) else leaf for leaf in leaves]
        complete_args, complete_kwargs = tree_unflatten(gathered, structure)
        if not self._compared:
            self._compared = True
            self._compare_positions(
                length, next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
            )
            if not self.module:
                self._compare((args, kwargs), (complete_args, complete_kwargs))
        context.stay_outside()  # for what the backward pass computes again, too
        outputs, structure = tree_flatten(self._plain(*complete_args, **complete_kwargs))
        return tree_unflatten(
            [_part(each, length * context.ranks, context) for each in outputs], structure
        )

    def _compare_positions(self, length: int, device: torch.device) -> None:
        for attend in (module for module in self._model.modules() if isinstance(module, Attend)):
            with self._context.outside():
                every = attend.positions(length * self._context.ranks, device)
            right = self._context.part(every, 0)
            wrong = not torch.equal(attend.positions(length, device), right)
            if any(gather_objects(wrong)):  # the first rank's part may begin at 0 in any case
                self.module = self._names.get(id(attend), "")
                self.numbers = True
                return

    @torch.no_grad()
    def _compare(self, part: tuple[Any, Any], complete: tuple[Any, Any]) -> None:
        """Find the first module whose outputs are others on a part of the sequences.

        Ranks see other parts: one whose part begins a sequence computes some modules rightly that
        others do not. The earliest call of all ranks counts.
        """
        deviating = gather_objects(self._first_deviating(part, complete))
        _, self.module = min((call for call in deviating if call is not None), default=(0, ""))

    def _first_deviating(
        self, part: tuple[Any, Any], complete: tuple[Any, Any]
    ) -> tuple[int, str] | None:
        """Return the number of this rank's first call that deviates, and its module's name."""
        calls = dict(self._random.calls)
        outputs = self._outputs_of(part)
        self._random.restore_calls(calls)  # each pass draws the same numbers
        with self._context.outside():
            complete_outputs = self._outputs_of(complete)
        self._random.restore_calls(calls)
        pairs = zip(outputs, complete_outputs, strict=False)
        for call, ((name, mine), (_, of_all)) in enumerate(pairs):
            for dim in range(1, mine.dim()):
                if of_all.shape[dim] == mine.shape[dim] * self._context.ranks:
                    right = self._context.part(of_all, dim).double()
                    if (mine.double() - right).norm() > _FAR * right.norm():
                        return call, name
        return None

    def _outputs_of(self, inputs: tuple[Any, Any]) -> list[tuple[str, Tensor]]:
        """Run the model, and return each call's module and first output, in order."""
        args, kwargs = inputs
        outputs: list[tuple[str, Tensor]] = []
        handles = []
        for module in self._model.modules():
            if module is not self._model:
                name = self._names.get(id(module), "")
                handles.append(module.register_forward_hook(partial(_note, name, outputs)))
        with torch.random.fork_rng():
            self._plain(*args, **kwargs)
        for handle in handles:
            handle.remove()
        return outputs


def _has(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > SEQUENCE and value.shape[SEQUENCE] == length


def _part(value: Any, length: int, context: SequenceCut) -> Any:
    if not isinstance(value, Tensor):
        return value
    if _has(value, length):
        return context.part(value)
    # all ranks compute it: its gradient counts once
    return value if context.rank == 0 else value.detach() + 0 * value


def _note(
    name: str, noted: list[tuple[str, Tensor]], _module: nn.Module, _args: Any, outputs: Any
) -> None:
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    if isinstance(first, Tensor) and first.dim() > SEQUENCE:
        noted.append((name, first))
