"""A placed model lists every method that placement has replaced on a module, and who did it."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.models.mixture import Mixture
from lockstep.models.transformer import Transformer
from tests.ranks import run_ranks

_SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 8, "block_size": 8}
_EXACT = {"reproducible": True, "open_axes": ["tensor", "context"]}
_STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp", **_EXACT},
    {"strategy": "pipeline"},
    {"strategy": "tensor", **_EXACT},
    {"strategy": "context", **_EXACT},
    {"strategy": "ddp", "expert_size": 2},
]


def unlisted(settings: dict[str, Any], **more: Any) -> tuple[list[str], set[str]]:
    """Return the modules with a forward of their own that `changes` leaves out, and who changed
    any.
    """
    model = (Mixture if "expert_size" in settings else Transformer)(**_SIZES, dropout=0.1)
    trainer = lockstep.Trainer(
        model, batch_size=2, global_batch_size=8, distributed=settings, **more
    )
    changes = trainer.placed.changes()
    listed = {(change.module, change.what) for change in changes}
    own = [
        name
        for part in trainer.placed.modules
        for name, module in part.named_modules()
        if "forward" in vars(module) and (name, "forward") not in listed
    ]
    return own, {by for change in changes if change.what != "hook" for by in change.by}


def over_strategies(strategies: list[dict[str, Any]]) -> list[tuple[list[str], set[str]]]:
    return [unlisted(settings) for settings in strategies]


def test_every_forward_that_was_replaced_is_listed_under_each_strategy() -> None:
    found = run_ranks(over_strategies, 2, _STRATEGIES)[1]
    assert [own for own, _ in found] == [[]] * len(_STRATEGIES)
    assert [by for _, by in found] == [
        set(),
        {"tensor", "context"},  # where bits count, layers run in blocks on any topology
        set(),
        {"tensor", "context"},
        {"tensor", "context"},
        {"expert"},
    ]


def test_one_process_lists_checkpointed_blocks_and_hooks() -> None:
    own, by = unlisted({}, gradient_checkpointing="full")
    assert own == []
    assert by == {"gradient_checkpointing"}
    model = Transformer(**_SIZES)
    placed = lockstep.Trainer(model, batch_size=2, global_batch_size=2).placed
    hooks = {change.by[0] for change in placed.changes() if change.what == "hook"}
    assert "randomness" in hooks
    assert str(placed.changes()[0]).startswith(("the model.", "embed."))


def test_nobody_assigns_to_a_placed_model() -> None:
    model = nn.Linear(2, 2)
    placed = lockstep.Trainer(model, loss_fn=nn.MSELoss(), batch_size=2, global_batch_size=2).placed
    with pytest.raises(dataclasses.FrozenInstanceError):
        placed.run_micro_batch = None  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        placed.parameters = {"weight": nn.Parameter(torch.zeros(1))}  # type: ignore[misc]
