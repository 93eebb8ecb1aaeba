"""What a model offers is read once, before it is changed, and each method of the model is called
once.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import UsageError
from lockstep.models.transformer import Transformer
from lockstep.parallel.facts import facts_of
from tests.ranks import run_ranks

_CALLS = ("blocks", "segments", "shared_parameters", "tensor_plan", "context_plan")


class Counted(Transformer):
    """A transformer that counts how often it is asked for what it offers, outside of its own
    methods.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] | None = None
        super().__init__(
            n_layer=2, n_head=2, n_embd=16, vocab_size=8, block_size=8, tie_embeddings=True
        )
        self.calls = Counter()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        calls = self.calls
        self.calls = None
        outputs = super().forward(*inputs, **keywords)
        self.calls = calls
        return outputs


def _counting(name: str) -> Any:
    plain = getattr(Counted, name)

    def counted(self: Any) -> Any:
        calls = self.calls
        self.calls = None  # what the methods ask each other does not count
        if calls is not None:
            calls[name] += 1
        found = plain(self)
        self.calls = calls
        return found

    return counted


for _name in _CALLS:
    setattr(Counted, _name, _counting(_name))


def test_facts_are_those_of_the_model_as_it_was() -> None:
    model = Counted()
    facts = facts_of(model)
    assert set(facts.names.values()) == {name for name, _ in model.named_parameters()}
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.lent == {"embed.weight"}
    assert [name for name, _ in facts.blocks] == [name for name, _ in model.blocks()]
    assert facts.chain == facts.segments


def test_facts_keep_no_parameter_alive() -> None:
    """FSDP2 puts shards in their place, and a rank has no memory for both."""
    facts = facts_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not any(isinstance(value, torch.Tensor) for value in vars(facts).values())
    held = [value for value in vars(facts).values() if isinstance(value, dict)]
    assert not any(isinstance(value, torch.Tensor) for each in held for value in each.values())


def test_a_chain_is_asked_for_where_the_model_is_split() -> None:
    with pytest.raises(UsageError, match="can't be cut into stages"):
        facts_of(nn.Linear(2, 2)).required_chain()


def calls_while_placed(strategies: list[dict[str, Any]]) -> list[dict[str, int]]:
    found = []
    for settings in strategies:
        model = Counted()
        lockstep.Trainer(model, batch_size=2, global_batch_size=8, distributed=settings)
        assert model.calls is not None
        found.append(dict(model.calls))
    return found


def test_a_model_is_asked_once_for_what_it_offers_by_every_strategy() -> None:
    exact = {"reproducible": True, "open_axes": ["tensor", "context"]}
    strategies: list[dict[str, Any]] = [
        {"strategy": "ddp"},
        {"strategy": "fsdp", **exact},
        {"strategy": "pipeline", **exact},
        {"strategy": "tensor"},
        {"strategy": "context"},
    ]
    for settings, calls in zip(
        strategies, run_ranks(calls_while_placed, 2, strategies)[0], strict=True
    ):
        assert set(calls.values()) == {1}, (settings, calls)
