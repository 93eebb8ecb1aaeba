"""Shared parts of the language models: batches, the loss, and checks of sizes.

A batch is {"input_ids": int64 [B, T], "targets": int64 [B, T]}. Targets are already shifted: targets[:, t] follows
input_ids[:, t]. A target of −100 is not counted.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.chain import run_segments
from lockstep.models.protocol import IGNORED_TARGET


class LanguageModel(nn.Module):
    """A model that predicts the next token: ids [B, T] → logits [B, T, V], by default with its `segments()`.

    Attributes:
        block_size: the intended context, in tokens. With rotary positions, as in all families but GPT-2, it limits only
            the window of generation.
    """

    block_size: int

    def forward(self, ids: Tensor) -> Any:
        """Run the chain."""
        return run_segments(self, ids)

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor]:
        """Return the arguments of forward: the ids, int64 [B, T]."""
        return (batch["input_ids"],)

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the valid targets, in nats, float32."""
        return token_losses(outputs, batch["targets"]).sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of valid targets as a 0-dim tensor, so that the caller decides when the host reads it."""
        return (batch["targets"] != IGNORED_TARGET).sum()


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each target, in nats: float32 [B·T], 0 where the target does not count."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )


def require_multiple(what: str, value: int, of: str, divisor: int) -> None:
    """Reject sizes that do not divide, with both names and numbers."""
    if divisor < 1 or value % divisor:
        raise UsageError(
            f"{what}={value} is not a multiple of {of}={divisor}", where="model.args", fix=f"change {what} or {of}"
        )


def require_positive(**sizes: int) -> None:
    """Reject sizes below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(
                f"{name}={value}: at least 1 is needed", where="model.args", fix=f"set model.args.{name} to 1 or more"
            )
