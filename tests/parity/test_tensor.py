"""Layers cut over the axis `tensor`: one process's losses, and its bits where they count, on every product of axes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.tensor_blocks import Cut
from lockstep.parallel.tensor_cuts import apply_tensor
from lockstep.strategy import resolve
from tests.parity.axes import check_against_one_process
from tests.parity.same_bits import trainer_for
from tests.parity.test_same_bits import check
from tests.parity.toy import Tokens, worst
from tests.ranks import run_ranks

TOPOLOGIES = {
    2: ("tensor:2",),
    4: ("tensor:4", "ddp:2*tensor:2", "fsdp:2*tensor:2", "pipeline:2*tensor:2"),
}
# name → (model, settings, model arguments). Two heads of keys and values: on four ranks fewer than ranks.
GROUPED = {"n_layer": 2, "n_kv_head": 2, "vocab_size": 64}
TIED, WHOLE_SEQUENCES = {**GROUPED, "tie_embeddings": True}, {"distributed.sequence_parallel": False}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grouped": ("transformer", {}, GROUPED),
    "tied": ("transformer", {"training.global_batch_size": 22, "training.gradient_checkpointing": "full"}, TIED),
    "whole sequences": ("transformer", WHOLE_SEQUENCES, TIED),
    "products kept": ("transformer", {"training.gradient_checkpointing": "selective"}, GROUPED),
    "bf16": ("transformer", {"precision.mode": "bf16"}, GROUPED),
    "bdh": ("bdh", {}, {"n_layer": 2, "vocab_size": 64}),
    "free": ("free_transformer", {}, GROUPED),
    "llama": ("hf:llama", {"precision.mode": "bf16"}, {"vocab_size": 64, "tie_word_embeddings": True}),
    "qwen2": ("hf:qwen2", {}, {"vocab_size": 64}),  # with biases
    "qwen3": ("hf:qwen3", {}, {"vocab_size": 64, "head_dim": 8}),  # with norms of heads
}


def in_turn(ranks: int, steps: int) -> list[tuple[Any, ...]]:
    """One half of the models on two ranks, the other on four, where products of axes take turns."""
    tops, models = TOPOLOGIES[ranks], list(CASES.values())[ranks == 4 :: 2]
    return [(tops[place % len(tops)], model, s, steps, args) for place, (model, s, args) in enumerate(models)]


def every(ranks: int, steps: int) -> list[tuple[Any, ...]]:
    return [(t, model, settings, steps, args) for t in TOPOLOGIES[ranks] for model, settings, args in CASES.values()]


def check_both(ranks: int, cases: list[tuple[Any, ...]]) -> None:
    plain = [(t, model, {**s, "distributed.reproducible": False}, *rest) for t, model, s, *rest in cases]
    check_against_one_process(ranks, cases + plain)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_training(ranks: int) -> None:
    check_both(ranks, in_turn(ranks, steps=5))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model_on_every_product_of_axes(ranks: int) -> None:
    check_both(ranks, every(ranks, steps=20))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_three_axes() -> None:
    """2 × 2 × 2 of pipeline, shards or replicas, and tensor."""
    cases = [
        (topology, model, settings, 5, args)
        for topology in ("pipeline:2*fsdp:2*tensor:2", "pipeline:2*ddp:2*tensor:2", "hybrid:2x2*tensor:2")
        for model, settings, args in (CASES["grouped"], CASES["tied"], CASES["bdh"], CASES["qwen3"])
    ]
    check(8, cases, timeout=1800)


def compiled(topology: str) -> list[tuple[float, float]]:
    settings = {"training.compile": True, "distributed.reproducible": False, "training.max_steps": 3}
    trainer = trainer_for(topology, "transformer", settings, **GROUPED)
    return [(float(r.loss), float(r.grad_norm)) for r in trainer.steps(Tokens())]


@pytest.mark.full
def test_compiled_blocks() -> None:
    expected = compiled("single")
    for topology, ranks in (("tensor:2", 2), ("fsdp:2*tensor:2", 4)):
        for found in run_ranks(compiled, ranks, topology):
            assert worst(found, expected) < 1e-5


# ---- what a model says, and what can't be ----


def one_rank(model: nn.Module, **distributed: Any) -> None:
    apply_tensor(model, None, config_from({f"distributed.{key}": value for key, value in distributed.items()}).step)


def test_a_copy_of_a_cut_model_runs_its_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model.tensor_plan = lambda: {"0": "column"}  # type: ignore[assignment]
    one_rank(model, reproducible=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()  # type: ignore[operator, union-attr]
        other[0].bias.zero_()  # type: ignore[operator, union-attr]
    x = torch.ones(1, 2, 4)
    assert other(x).abs().max() == 0
    assert model(x).abs().max() > 0


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def planned(plan: dict[str, str], module: nn.Module) -> nn.Module:
    model = nn.Sequential(module)
    model.tensor_plan = lambda: plan  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(4, 4), "does not say how its layers are cut"),
        (planned({"1": "row"}, nn.Linear(4, 4)), "no module has such a name"),
        (planned({"0": "rows"}, nn.Linear(4, 4)), "there is no such way"),
        (planned({"0": "heads"}, nn.Linear(4, 4)), "has no head_width"),
        (planned({"0": "vocabulary"}, Scaled(4, 4)), "has a forward pass of its own"),
        (planned({"0": "sequence"}, nn.Linear(4, 4)), 'says "sequence" of 0, a Linear'),
    ],
)
def test_a_plan_that_can_not_be_followed(model: nn.Module, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        one_rank(model)


def test_what_does_not_divide_or_does_not_go_together() -> None:
    with pytest.raises(UsageError, match="tensor_size=3 does not divide the number of ranks, 4"):
        resolve(config_from({"distributed.strategy": "ddp", "distributed.tensor_size": 3}).distributed, 4)
    assert resolve(config_from({"distributed.strategy": "tensor"}).distributed, 4) == Layout("tensor", tensor=4)
    for settings, says in (
        ({"strategy": "diloco"}, "layers can't be cut over 2 ranks under strategy diloco"),
        ({"reproducible": True, "tensor_blocks": 3}, "2 ranks can't share the 3 blocks"),
        ({"strategy": "fsdp", "fsdp.cpu_offload": True}, "cpu_offload is True, and layers are cut over 2 ranks"),
    ):
        with pytest.raises(UsageError, match=says):
            config_from({"distributed.tensor_size": 2, **{f"distributed.{k}": v for k, v in settings.items()}})


def refused(topology: str, model: str, args: dict[str, Any], length: int) -> str:
    settings = {"distributed.reproducible": False, "training.max_steps": 1}
    with pytest.raises(UsageError) as found:
        list(trainer_for(topology, model, settings, **args).steps(Tokens(length)))
    return str(found.value)


def refusals(cases: list[tuple[Any, ...]]) -> list[str]:
    return [refused(*case) for case in cases]


def test_models_that_ranks_can_not_share() -> None:
    cases = {
        "embed.weight has 61 rows or columns, which 2 ranks can't share": ("transformer", {}, 16),
        "which 2 ranks can't share": ("transformer", {**GROUPED, "n_head": 1, "n_kv_head": 1}, 16),
        "2 ranks along the axis tensor can't share a sequence of 15": ("transformer", GROUPED, 15),
        "does not say how its layers are cut": ("hf:gemma", {"vocab_size": 64}, 16),
        "has attention_dropout=0.1": ("hf:llama", {"vocab_size": 64, "attention_dropout": 0.1}, 16),
    }
    found = run_ranks(refusals, 2, [("tensor:2", *case) for case in cases.values()])
    for said in found:
        for expected, text in zip(cases, said, strict=True):
            assert expected in text


def bytes_counted() -> tuple[int, int]:
    """Bytes that this rank's cut layers send in one step of one micro-batch, and those of theory."""
    sent: list[int] = []
    first = Cut.__init__

    def counted(self: Cut, *args: Any, **kwargs: Any) -> None:
        first(self, *args, **kwargs)
        self.on_send = sent.append

    Cut.__init__ = counted  # type: ignore[method-assign]
    settings = {"distributed.reproducible": False, "training.max_steps": 1, "training.global_batch_size": 2}
    args = {"n_layer": 3, "n_kv_head": 4, "vocab_size": 64}
    list(trainer_for("tensor:4", "transformer", settings, **args).steps(Tokens(16)))
    activation, logits = 2 * 16 * 32 * 4, 2 * 16 * 64 * 4
    per_layer = 8 * activation  # forward and backward: an all-gather and a reduce-scatter each, of both halves
    ends = 2 * activation + 2 * activation + logits  # embedding; entering the head; gathered logits
    return sum(sent), (3 * per_layer + ends) * 3 // 4


def test_bytes_of_a_step_are_those_of_theory() -> None:
    """Four all-reduces a layer, as halves."""
    for found, expected in run_ranks(bytes_counted, 4):
        assert found == expected
