"""A chain of segments that computes something else than the model's forward pass is refused, and
leaves no trace.
"""

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.parallel.facts import facts_of
from lockstep.parallel.pipeline.chain_check import check_chain
from tests.ranks import run_ranks

VOCAB = 23
WIDTH = 12


class Tower(nn.Module):
    """Tokens to scores, with learned places that `forgets` leaves out of the chain."""

    def __init__(self, *, forgets: bool = False, last_only: bool = False) -> None:
        super().__init__()
        self.forgets = forgets
        self.last_only = last_only
        self.calls = 0
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = Places()
        self.rungs = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(3)
        )
        self.scores = nn.Linear(WIDTH, VOCAB)
        self.rungs[1].eval()  # frozen by its owner

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.places(self.tokens(ids))
        for rung in self.rungs:
            x = rung(x)
        return self.scores(x[:, -1:] if self.last_only else x)

    def segments(self) -> list[tuple[str, nn.Module]]:
        rungs = [(f"rungs.{index}", rung) for index, rung in enumerate(self.rungs)]
        places = [] if self.forgets else [("places", self.places)]
        return [("tokens", self.tokens), *places, *rungs, ("scores", self.scores)]


class Places(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(32, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.vectors[: x.shape[1]]


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Loop(nn.Sequential):
    """A forward pass of its own, which is the members in turn."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class Noisy(Tower):
    """Draws in evaluation mode, in another order than the chain."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + torch.rand(())


class Sounds(nn.Module):
    """Begins with a layer that does not show what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 1)
        self.second = nn.Conv1d(4, 2, 1)

    def forward(self, waves: Tensor) -> Tensor:
        return self.second(self.first(waves))

    def segments(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("second", self.second)]


class Pictures(nn.Module):
    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets
        self.filters = nn.Conv2d(3, 4, 3, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.LazyLinear(5)
        self(torch.randn(2, 3, 32, 32))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.filters(pixels))).flatten(1))

    def segments(self) -> list[tuple[str, nn.Module]]:
        between = [] if self.forgets else [("relu", nn.ReLU())]
        return [
            ("filters", self.filters),
            ("norm", self.norm),
            *between,
            ("flat", nn.Flatten()),
            ("head", self.head),
        ]


def test_a_chain_that_forgets_a_part_is_refused_with_the_first_segment_that_differs() -> None:
    with pytest.raises(
        UsageError,
        match=r"segments of Tower .*computes something else[\s\S]*from the segment rungs.0 on",
    ):
        check_chain(facts_of(Tower(forgets=True)))
    with pytest.raises(
        UsageError, match=r"from the segment head on[\s\S]*let segments\(\) list all"
    ):
        check_chain(facts_of(Pictures(forgets=True)))


def test_a_sequential_with_a_forward_pass_of_its_own_is_compared() -> None:
    with pytest.raises(UsageError, match="segments of Scaled computes something else"):
        check_chain(facts_of(Scaled(nn.Linear(3, 4), nn.Linear(4, 2))))
    with pytest.raises(
        UsageError, match=r"Scaled is an nn.Sequential with a forward pass of its own"
    ):
        check_chain(facts_of(Scaled(nn.Bilinear(3, 3, 2))))
    check_chain(facts_of(Loop(nn.Linear(3, 4), nn.Linear(4, 2))))
    check_chain(facts_of(nn.Sequential(nn.Linear(3, 4))))


NOT_COMPARED = "the chain of segments was not compared with the model"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Tower(), None),
        (Pictures(forgets=False), None),
        (Tower(last_only=True), "its outputs have another shape"),
        (Noisy(), "it draws random numbers in evaluation mode"),
    ],
)
def test_what_is_equal_or_can_not_be_compared_is_not_refused(
    model: nn.Module, reason: str | None
) -> None:
    """What can't be compared is told."""
    lines = check_chain(facts_of(model))
    assert lines == [] if reason is None else f"{NOT_COMPARED} ({reason}" in lines[0]


def _said_in_each_way() -> dict[str, str]:
    """What rank 0 prints and warns of."""
    found = {}
    for way in ("train", "steps", "place"):
        settings: Any = {"strategy": "pipeline", "loss_fn": nn.MSELoss()}
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            warnings.catch_warnings(record=True) as seen,
        ):
            warnings.simplefilter("always")
            if way == "place":
                lockstep.place(Sounds(), **settings)
            else:
                trainer = lockstep.Trainer(Sounds(), batch_size=4, **settings)
                data = TensorDataset(torch.randn(8, 3, 5), torch.randn(8, 2, 5))
                for epochs in (1, 2):  # a second loop does not say it again
                    (
                        trainer.train(data, epochs=2)
                        if way == "train"
                        else list(trainer.steps(data, epochs=epochs))
                    )
        found[way] = out.getvalue() + "".join(str(one.message) for one in seen)
    return found


def test_a_chain_that_was_not_compared_is_told_in_each_way_to_train() -> None:
    found = run_ranks(_said_in_each_way, 2)
    assert [found[0][way].count(NOT_COMPARED) for way in ("steps", "place")] == [1, 1]
    assert found[0]["train"].count(NOT_COMPARED) == 2, "each call begins with its lines"
    assert not any(NOT_COMPARED in said for said in found[1].values())


def test_the_comparison_leaves_no_trace() -> None:
    model = Tower()
    modes = [module.training for module in model.modules()]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before: Any = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    check_chain(facts_of(model))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert model.calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_decoder_of_transformers_that_its_owner_has_changed_is_compared() -> None:
    """A subclass adds what the adapter knows nothing of: the embeddings, once more, after the last
    norm.
    """
    transformers = pytest.importorskip("transformers")

    class Model(transformers.LlamaModel):  # type: ignore[misc, name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.last_hidden_state = 3 * found.last_hidden_state
            return found

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=VOCAB, **sizes)
    model = transformers.LlamaForCausalLM(config)
    assert check_chain(facts_of(model)) == []
    model.model = Model(config)
    with pytest.raises(
        UsageError, match=r"LlamaForCausalLM computes something else[\s\S]*strategy: ddp or fsdp"
    ):
        check_chain(facts_of(model))
