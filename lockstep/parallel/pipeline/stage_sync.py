"""FSDP2 under a pipeline: a stage's gradients stay here until a step ends, then are reduced once.

Tests: tests/parallel/pipeline/test_pipeline_hybrid.py
"""

from typing import Any

from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.torch_compat.fsdp_state import reduce_gradients, reduces_by_hand


class StageSync(AroundMicroBatch):
    """Lets no backward pass of a stage reduce gradients or free parameters.

    Reduces after the last one.
    """

    def __init__(self, unit: Any) -> None:
        self._unit = unit
        self._holds_back = False

    def before(self, passing: MicroBatchPass) -> None:
        """Hold gradients back, from the first pass of a step on."""
        reduces_by_hand(self._unit)
        if not self._holds_back:
            self._unit.set_is_last_backward(False)
            self._unit.set_reshard_after_backward(False)
            self._unit.set_requires_gradient_sync(False)
            self._holds_back = True

    def after_step(self, micro_batches_per_step: int) -> None:
        """Reduce the gradients of the step."""
        self._holds_back = False
        reduce_gradients(self._unit, begun=True)

    def failed(self, error: BaseException) -> None:
        """Begin anew with the next step."""
        self._holds_back = False
