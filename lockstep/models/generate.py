"""Samples from a language model token by token, with its own generator: the global random state is not changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Any],
    ids: Tensor,
    num_tokens: int,
    *,
    block_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue a text.

    Args:
        logits_of: ids [1, T] → logits [1, T, V], or an output that holds them (see `logits_in`). In eval mode.
        ids: the prompt, int64 [1, T], T ≥ 1.
        num_tokens: how many to add.
        block_size: how many of the last tokens the model sees.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw only among the k likeliest tokens.

    Returns:
        int64 [1, T + num_tokens].

    Raises:
        UsageError: the prompt is empty, or a setting is invalid.
    """
    if ids.numel() == 0:
        raise UsageError("nothing to continue: the prompt is empty", fix="give it at least one token")
    generator = torch.Generator(ids.device).manual_seed(seed)
    for _ in range(num_tokens):
        logits = logits_in(logits_of(ids[:, -block_size:]))
        ids = torch.cat((ids, draw_token(logits[:, -1], generator, temperature=temperature, top_k=top_k)), 1)
    return ids


def logits_in(outputs: Any) -> Tensor:
    """Return the logits of a language model's output: the output itself, the first of a tuple, or `.logits`."""
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    assert isinstance(logits, Tensor)
    return logits


def draw_token(logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None) -> Tensor:
    """Draw one token per row: logits [B, V] → int64 [B, 1]."""
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise UsageError(f"temperature={temperature}, top_k={top_k}", fix="temperature ≥ 0 and top_k ≥ 1")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
