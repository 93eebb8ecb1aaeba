"""Sees what a trainer's steps see: samples, gradients as the optimizer gets them, outputs of modules."""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batches import MicroBatch
from lockstep.parallel.divergence import fingerprint
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.parallel_model import local
from lockstep.records import StepRecord, plain
from lockstep.trainer import Trainer
from lockstep.verify import switches
from lockstep.verify.trace import Facts, unit_roundoff


class Watch:
    """Looks at each step of a trainer, without changing it.

    Args:
        bounds: of a process that holds everything: add up the sizes of micro-batches' gradients.
        outputs: write down what each module returns.

    Attributes:
        gradients: of the last step, as the optimizer got them.
        prints: their fingerprints on this rank.
    """

    def __init__(self, trainer: Trainer, *, bounds: bool = False, outputs: bool = False) -> None:
        self._trainer = trainer
        self.gradients: dict[str, Tensor] = {}
        self.prints: dict[str, int] = {}
        self._samples: dict[int, str] = {}
        self._sizes: dict[str, Tensor] = {}
        self._outputs: list[tuple[str, int]] = []
        self._micro_batches_per_step, self._factor = 1, 1.0
        self._opened = ExitStack()
        self._run = trainer.placed.forward_backward
        trainer.placed.forward_backward = self._watched
        self._opened.callback(setattr, trainer.placed, "forward_backward", self._run)
        self._opened.callback(trainer.optimizer.register_step_pre_hook(self._before_update).remove)
        if outputs:
            self._opened.enter_context(switches.outputs_of(trainer.placed.parts, self._outputs))
        for name, parameter in trainer.placed.parameters.items() if bounds else ():
            if parameter.requires_grad:
                self._opened.callback(parameter.register_hook(self._sizes_of(name)).remove)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """No longer look."""
        self._opened.close()

    def facts(self, done: StepRecord) -> Facts:
        """Of the step that was just made."""
        rate = max((float(group["lr"]) for group in self._trainer.optimizer.param_groups), default=0.0)
        return Facts(
            dict(self._samples), float(plain(done.loss)), float(plain(done.grad_norm)), rate, self._scale(done),
            bool(done.skipped), outputs=list(self._outputs),
        )  # fmt: skip

    def bounds(self, done: StepRecord) -> dict[str, Tensor]:
        """How far elements of gradients may be off when the same micro-batches are added up in another order."""
        roundoff = unit_roundoff(torch.float32)
        additions = 2 * max(1, self._micro_batches_per_step - 1) * roundoff * self._scale(done)
        bounds = {}
        for name, gradient in self.gradients.items():
            bounds[name] = 32 * roundoff * gradient.abs()  # the scaling to the mean, clipping, and their own rounding
            if name in self._sizes:
                # A pipeline adds up the uses of a shared weight in another order, too; and kernels round otherwise
                # where parameters lie otherwise in memory (FSDP). These sizes are not seen: the largest element
                # stands for them.
                largest = self._sizes[name].max() if gradient.numel() else 0.0
                bounds[name] += additions * self._sizes[name] + 64 * roundoff * self._scale(done) * largest
        return bounds

    def _scale(self, done: StepRecord) -> float:
        scale = 1.0 / (self._factor * max(1.0, float(plain(done.tokens))))
        clip = self._trainer.config.training.gradient_clip
        if clip.strategy == "norm":
            scale *= min(1.0, clip.value / (float(plain(done.grad_norm)) + 1e-6))
        return scale

    def _watched(self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float) -> None:
        self._samples = {
            micro_batch.index: _hash(micro_batch.batch)
            for micro_batch in micro_batches
            if micro_batch.real and micro_batch.batch is not None
        }
        self._micro_batches_per_step, self._factor = accumulator.micro_batches_per_step, factor
        self.gradients, self.prints = {}, {}
        self._outputs.clear()
        self._sizes.clear()
        self._run(micro_batches, accumulator, factor)

    def _before_update(self, *_: object) -> None:
        for name, parameter in self._trainer.placed.parameters.items():
            if parameter.grad is not None:
                self.gradients[name] = parameter.grad.detach().clone()
                self.prints[name] = int(fingerprint(local(parameter.grad)))

    def _sizes_of(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            size = gradient.detach().abs().float()
            self._sizes[name] = self._sizes[name] + size if name in self._sizes else size

        return hook


def _hash(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=12)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, member in value.items():
                found.update(repr(key).encode())
                add(member)
        elif isinstance(value, tuple | list):
            for member in value:
                add(member)
        else:
            found.update(repr(value).encode())

    add(batch)
    return found.hexdigest()
