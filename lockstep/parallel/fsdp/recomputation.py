"""Units of FSDP2 that the model's own checkpoints gather once more in the backward pass.

`torch.utils.checkpoint` around one unit sends no further message: the unit is there when its
forward pass is repeated. Around several units it gathers all of them again, before the gradients of
the last one are reduced. A rank that left out one of them has nothing to recompute, and would pair
other messages with these.

    checkpoint(unit 1), checkpoint(unit 2)    nothing is gathered again
    checkpoint(units 1 and 2 in a row)        1 and 2 are in one call: both are gathered again

Tests: tests/parallel/fsdp/test_fsdp_order.py, tests/parity/test_own_recomputation.py
"""

from types import FrameType

import torch
import torch.distributed as dist

from lockstep.torch_compat.checkpoint_calls import inputs_need_gradients, open_checkpoints


class GatheredAgain:
    """The record of which units are gathered again.

    It has those of this pass on this rank, and those of any pass, which all ranks know.

    Args:
        units: how many there are; a unit is known by its position among them.
    """

    def __init__(self, units: int, device: torch.device) -> None:
        self._units = units
        self._device = device
        self.known: set[int] = set()
        self._here: set[int] = set()
        self._previous = 0
        # calls in which the previous unit ran; one of them may go on
        self._open: list[FrameType] = []

    def begin(self) -> None:
        """Forget the pass before."""
        self._here.clear()
        self._open.clear()

    def call(self, position: int) -> bool:
        """Note that a unit is called.

        Return whether it is found to be gathered again, which ranks don't know yet.
        """
        # Both units ran within one call of a checkpoint: what that recomputes has both.
        calls = open_checkpoints()
        if any(call is before for call in calls for before in self._open):
            self._here |= {self._previous, position}
        # What runs without gradients leaves nothing to the backward pass, which gathers it for the
        # recomputation alone.
        if not torch.is_grad_enabled() and any(map(inputs_need_gradients, calls)):
            self._here.add(position)
        self._previous = position
        self._open = calls
        return position in self._here and position not in self.known

    def agree(self, group: dist.ProcessGroup | None) -> int | None:
        """Let all ranks know what is gathered again.

        Return a unit that some ranks alone gather, or None.
        """
        self._open.clear()
        # Rows: gathered again here, and not gathered again here. A unit with 1 in both maxima is
        # gathered again by some ranks alone.
        mine = torch.zeros(2, self._units, dtype=torch.int64)
        mine[0, sorted(self._here)] = 1
        mine[1] = 1 - mine[0]
        both = mine.to(self._device)  # host waits for the copy, in the first passes
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        some, others = both.bool().tolist()  # host waits for the device
        self.known |= {position for position, again in enumerate(some) if again}
        return next(
            (position for position in range(self._units) if some[position] and others[position]),
            None,
        )
