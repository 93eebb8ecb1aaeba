"""What the language models share: batches, the loss, and sizes that must divide.

A batch is {"input_ids": int64 [B, T], "targets": int64 [B, T]}. Targets are shifted already: targets[:, t] follows
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
    """Predicts the next token: ids [B, T] → logits [B, T, V], by default a fold over its `segments()`.

    Attributes:
        block_size: the context it is meant for, in tokens. Where positions are rotary, as in all families but GPT-2, it
            bounds nothing but the window of generation.
    """

    block_size: int

    def forward(self, ids: Tensor) -> Any:
        return run_segments(self, ids)

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor]:
        """The arguments of forward: the ids, int64 [B, T]."""
        return (batch["input_ids"],)

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of the cross entropy over the valid targets, in nats, float32."""
        return token_losses(outputs, batch["targets"]).sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """How many targets are valid, a 0-dim tensor: reading it on the host is left to the caller."""
        return (batch["targets"] != IGNORED_TARGET).sum()


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each target, in nats: float32 [B·T], 0 where the target is not counted."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )


def require_multiple(what: str, value: int, of: str, divisor: int) -> None:
    """Refuse sizes that do not divide, with both names and numbers."""
    if divisor < 1 or value % divisor:
        raise UsageError(
            f"{what}={value} is not a multiple of {of}={divisor}", where="model.args", fix=f"change {what} or {of}"
        )


def require_positive(**sizes: int) -> None:
    """Refuse sizes below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(
                f"{name}={value}: at least 1 is needed", where="model.args", fix=f"set model.args.{name} to 1 or more"
            )
