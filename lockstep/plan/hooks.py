"""What a rehearsal says to its tracker while a step runs: where passes and blocks begin, which tensors are gradients.

Hooks on modules and tensors do it. DDP's reducer, in C++, refuses fake tensors: `Reducer` allocates what it does.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.parallel.micro_step import AroundMicroBatch, MicroBatchPass
from lockstep.plan.tracker import Tracker


def mark_blocks(tracker: Tracker, blocks: list[tuple[str, nn.Module]]) -> None:
    """Mark where the forward (F0, F1, …) and backward passes (B…) of blocks begin.

    A region reaches to the next block's: what FSDP2 gathers for it before its hooks run is then in the same place of
    every region.
    """
    for index, (_, block) in enumerate(blocks):

        def before(_module: nn.Module, _inputs: Any, index: int = index) -> None:
            tracker.mark(f"F{index}")

        def after(_module: nn.Module, _inputs: Any, outputs: Any, index: int = index) -> None:
            if index == len(blocks) - 1:
                tracker.mark("after the blocks")
            first = outputs if isinstance(outputs, Tensor) else next(t for t in outputs if isinstance(t, Tensor))
            if first.requires_grad:
                on_backward(first, lambda: tracker.mark(f"B{index}"))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


def tag_gradients(tracker: Tracker, parameters: Iterable[nn.Parameter]) -> None:
    """Have gradients counted as such from the moment they are there."""
    for parameter in parameters:
        if parameter.requires_grad:
            on_gradient(parameter, lambda p: tracker.tag([p.grad], "gradients"))


def on_backward(tensor: Tensor, call: Callable[[], None]) -> None:
    """Call when the backward pass reaches a tensor."""
    tensor.register_hook(lambda _gradient: call())  # type: ignore[no-untyped-call]


def on_gradient(parameter: nn.Parameter, call: Callable[[nn.Parameter], None]) -> None:
    """Call with the parameter whenever its gradient has been accumulated."""
    parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


class Reducer(AroundMicroBatch):
    """Allocates what DDP's reducer does: buckets for all gradients, which become views of them when it reduces."""

    def __init__(self, tracker: Tracker, model: nn.Module, config: Config) -> None:
        self._last = True
        options = config.distributed.ddp
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = [torch.empty_like(p) for p in self._parameters]
        tracker.tag(self._buckets, "buckets")
        if options.compression.kind == "powersgd" and options.compression.error_feedback:
            self._errors = [torch.empty_like(p) for p in self._parameters]
            tracker.tag(self._errors, "buckets")
        for parameter, bucket in zip(self._parameters, self._buckets, strict=True):
            on_gradient(parameter, partial(self._ready, tracker, bucket, options.gradient_as_bucket_view))

    def before(self, run: MicroBatchPass) -> None:
        self._last = run.last

    def _ready(self, tracker: Tracker, bucket: Tensor, as_view: bool, parameter: nn.Parameter) -> None:
        if self._last and as_view:
            parameter.grad = bucket
        else:
            tracker.tag([parameter.grad], "gradients")
