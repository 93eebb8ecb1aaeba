"""Layers cut over the axis `tensor`: one process's losses, and its bits where they count, on every
product of axes.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset, default_collate

from lockstep.config import config_from
from lockstep.errors import RunError, UsageError
from lockstep.layout import Layout
from lockstep.models.transformer import Transformer
from lockstep.parallel.facts import facts_of
from lockstep.parallel.tensor.cuts import apply_tensor
from lockstep.parallel.tensor.layer_cut import LayerCut
from lockstep.parallel.tensor.loss_parallel import cut_token_losses
from lockstep.strategy import resolve
from tests.models.decoders import NOT_PLANNED
from tests.parity.axes import by_turns, check_against_one_process, every, uneven
from tests.parity.same_bits import trainer_for
from tests.parity.test_same_bits import check
from tests.parity.toy import Tokens, language_model, worst
from tests.ranks import run_ranks
from tests.sampled import sampled

TOPOLOGIES = {
    2: ("tensor:2",),
    4: ("tensor:4", "ddp:2*tensor:2", "fsdp:2*tensor:2", "pipeline:2*tensor:2"),
}
# name → (model, settings, model arguments). Two heads of keys and values: on four ranks fewer than
# ranks.
GROUPED = {"n_layer": 2, "n_kv_head": 2, "vocab_size": 64}
TIED = {**GROUPED, "tie_embeddings": True}
WHOLE_SEQUENCES = {"distributed.sequence_parallel": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grouped": ("transformer", {}, GROUPED),
    "tied": (
        "transformer",
        {"training.global_batch_size": 22, "training.gradient_checkpointing": "full"},
        TIED,
    ),
    "whole sequences": ("transformer", WHOLE_SEQUENCES, TIED),
    "products kept": ("transformer", {"training.gradient_checkpointing": "selective"}, GROUPED),
    "bf16": ("transformer", {"precision.mode": "bf16"}, GROUPED),
    "bdh": ("bdh", {}, {"n_layer": 2, "vocab_size": 64}),
    "free": ("free_transformer", {}, GROUPED),
    "llama": (
        "hf:llama",
        {"precision.mode": "bf16"},
        {"vocab_size": 64, "tie_word_embeddings": True},
    ),
    "qwen2": ("hf:qwen2", {}, {"vocab_size": 64}),  # with biases
    "qwen3": ("hf:qwen3", {}, {"vocab_size": 64, "head_dim": 8}),  # with norms of heads
    # queries, keys and values in one weight; tied
    "gpt2": ("hf:gpt2", {}, {"vocab_size": 64, "attn_pdrop": 0.0}),
    "mixtral": ("hf:mixtral", {}, {"vocab_size": 64, "num_local_experts": 4}),
    # a scaled embedding, which is tied
    "gemma": ("hf:gemma", {}, {"vocab_size": 64, "head_dim": 8}),
    "phi3": ("hf:phi3", {}, {"vocab_size": 64, "num_key_value_heads": 4, "pad_token_id": 0}),
    "qwen3_moe": ("hf:qwen3_moe", {}, {"vocab_size": 64, **EXPERTS}),
}
CASES = {name: case for name, case in CASES.items() if name not in NOT_PLANNED}
# The full grid's alone. Sequences that are not cut, and norms of heads, are in test_known_mistakes.
ONLY_FULL = (
    "whole sequences",
    "products kept",
    "bf16",
    "qwen2",
    "qwen3",
    "gemma",
    "phi3",
    "qwen3_moe",
)


def in_turn(ranks: int, steps: int) -> list[tuple[Any, ...]]:
    """One half of the models on two ranks, the other on four, where products of axes take turns."""
    tops = TOPOLOGIES[ranks]
    models = [case for name, case in CASES.items() if name not in ONLY_FULL][ranks == 4 :: 2]
    return [
        (tops[place % len(tops)], model, s, steps, args)
        for place, (model, s, args) in enumerate(models)
    ]


def check_both(ranks: int, cases: list[tuple[Any, ...]]) -> None:
    plain = [
        (t, model, {**s, "distributed.reproducible": False}, *rest) for t, model, s, *rest in cases
    ]
    check_against_one_process(ranks, cases + plain)


@pytest.mark.full  # in the quick run four ranks do, and a mixture on two, with plain sums
def test_the_same_training_on_two_ranks() -> None:
    check_against_one_process(2, by_turns(uneven(in_turn(2, steps=2))))


@sampled("cases", by_turns(uneven(in_turn(4, steps=2))), 3)
def test_the_same_training_on_four_ranks(cases: list[tuple[Any, ...]]) -> None:
    check_against_one_process(4, cases)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model_on_every_product_of_axes(ranks: int) -> None:
    check_both(ranks, every(TOPOLOGIES[ranks], list(CASES.values())))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_families_of_hugging_face() -> None:
    """All whose plan Lockstep follows, and which are not among the cases above."""
    small = {"vocab_size": 64, "pad_token_id": 0}
    further: dict[str, dict[str, Any]] = {
        "ernie4_5": {"head_dim": 8},
        "gemma2": {"head_dim": 8},
        "gemma3_text": {"head_dim": 8},
        "phi": {"num_key_value_heads": 4},
        "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
        **{name: {} for name in ("cohere", "granite", "mistral", "smollm3")},
    }
    check_both(
        2, [("tensor:2", f"hf:{name}", {}, 2, small | args) for name, args in further.items()]
    )


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_three_axes() -> None:
    """2 × 2 × 2 of pipeline, shards or replicas, and tensor."""
    some = [CASES[name] for name in ("grouped", "tied", "bdh", "qwen3") if name in CASES]
    cases = [
        (topology, model, settings, 5, args)
        for topology in (
            "pipeline:2*fsdp:2*tensor:2",
            "pipeline:2*ddp:2*tensor:2",
            "hybrid:2x2*tensor:2",
        )
        for model, settings, args in some
    ]
    check(8, cases, timeout=5400)


COMPILED = {
    2: (
        ("tensor:2", "transformer", GROUPED),
        ("context:2", "transformer", GROUPED),
        ("ddp:2*expert:2", "mixture", GROUPED),
    ),
    4: (("fsdp:2*tensor:2", "transformer", GROUPED), ("fsdp:2*context:2", "transformer", GROUPED)),
}


def compiled(topology: str, model: str, args: dict[str, Any]) -> list[tuple[float, float]]:
    settings = {
        "training.compile": True,
        "distributed.reproducible": False,
        "training.max_steps": 3,
    }
    trainer = trainer_for(topology, model, {**settings, "training.global_batch_size": 8}, **args)
    return [(float(r.loss), float(r.grad_norm)) for r in trainer.steps(Tokens())]


def all_compiled(ranks: int) -> list[list[tuple[float, float]]]:
    return [compiled(*case) for case in COMPILED[ranks]]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_compiled_blocks(ranks: int) -> None:
    for results in run_ranks(all_compiled, ranks, ranks, timeout=1500):
        for (topology, *case), found in zip(COMPILED[ranks], results, strict=True):
            assert worst(found, compiled("single", *case)) < 1e-5, topology


BALANCED = {
    "vocab_size": 64,
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 1.0,
}


def own_balance(topology: str) -> list[tuple[float, float]]:
    """Steps of a mixture of Hugging Face with its own balance term, a large one; micro-batches have
    unequal targets.
    """
    settings = {
        "training.max_steps": 2,
        "distributed.reproducible": False,
        "training.global_batch_size": 8,
    }
    trainer = trainer_for(topology, "hf:mixtral", settings, **BALANCED)
    return [(float(record.loss), float(record.grad_norm)) for record in trainer.steps(Tokens())]


def own_balances() -> list[list[tuple[float, float]]]:
    planned = () if "mixtral" in NOT_PLANNED else ("tensor:2",)
    return [own_balance(topology) for topology in ("ddp:2", "fsdp:2", *planned)]


def test_a_mixture_of_hugging_face_with_its_own_balance_term() -> None:
    """Weighed by valid targets, like the mean loss to which the library adds it: by hand, and on
    every strategy.
    """
    expected = own_balance("single")
    for found in run_ranks(own_balances, 2):
        for steps in found:
            assert worst(steps, expected) < 1e-5


def test_the_balance_term_of_the_library_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    model: Any = language_model("hf:mixtral", **BALANCED)
    library = transformers.MixtralForCausalLM(model.config)
    library.load_state_dict(model.state_dict())
    data = Tokens()
    micro_batches = [default_collate([data[index] for index in pair]) for pair in ((0, 1), (5, 6))]
    counts = []
    means = []
    for batch in micro_batches:
        targets = batch["targets"]
        counts.append(int((targets != -100).sum()))
        means.append(
            float(
                library(
                    input_ids=batch["input_ids"], labels=targets, shift_labels=targets
                ).loss.detach()
            )
        )
    settings = {
        "distributed.reproducible": False,
        "training.global_batch_size": 4,
        "training.max_steps": 1,
    }
    trainer = trainer_for("single", model, settings)
    for batch in micro_batches:
        trainer.training_step(batch)
    assert counts[0] != counts[1]
    expected = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    assert float(trainer.last_record.loss) == pytest.approx(expected, rel=1e-6)


# ---- what a model says, and what can't be ----


def one_rank(model: nn.Module, **distributed: Any) -> None:
    config = config_from({f"distributed.{key}": value for key, value in distributed.items()})
    apply_tensor(facts_of(model), None, config.step)


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
        resolve(
            config_from({"distributed.strategy": "ddp", "distributed.tensor_size": 3}).distributed,
            4,
        )
    assert resolve(config_from({"distributed.strategy": "tensor"}).distributed, 4) == Layout(
        "tensor", tensor=4
    )
    for settings, says in (
        ({"strategy": "diloco"}, "layers can't be cut over 2 ranks under strategy diloco"),
        ({"reproducible": True, "tensor_blocks": 3}, "2 ranks can't share the 3 blocks"),
        (
            {"strategy": "fsdp", "fsdp.cpu_offload": True},
            "cpu_offload is True, and layers are cut over 2 ranks",
        ),
    ):
        with pytest.raises(UsageError, match=says):
            config_from(
                {
                    "distributed.tensor_size": 2,
                    **{f"distributed.{k}": v for k, v in settings.items()},
                }
            )


def refused(topology: str, model: str, args: dict[str, Any], length: int) -> str:
    settings = {"distributed.reproducible": False, "training.max_steps": 1}
    with pytest.raises((UsageError, RunError)) as found:
        list(trainer_for(topology, model, settings, **args).steps(Tokens(length)))
    return str(found.value)


def refusals(cases: list[tuple[Any, ...]]) -> list[str]:
    return [refused(*case) for case in cases]


def test_models_that_ranks_can_not_share() -> None:
    cases = {
        "embed.weight has 61 rows or columns, which 2 ranks can't share": ("transformer", {}, 16),
        "which 2 ranks can't share": ("transformer", {**GROUPED, "n_head": 1, "n_kv_head": 1}, 16),
        "2 ranks along the axis tensor can't share a sequence of 15": ("transformer", GROUPED, 15),
        "does not say how its layers are cut": ("hf:olmo2", {"vocab_size": 64}, 16),
        "qkv_proj.weight has 1 heads, which 2 ranks can't share": (
            "hf:phi3",
            {"vocab_size": 64, "num_key_value_heads": 1, "pad_token_id": 0},
            16,
        ),
        # ids up to 60
        "is not one of the model's 32 classes": ("transformer", {**GROUPED, "vocab_size": 32}, 16),
        "has attention_dropout=0.1": ("hf:llama", {"vocab_size": 64, "attention_dropout": 0.1}, 16),
    }
    found = run_ranks(refusals, 2, [("tensor:2", *case) for case in cases.values()])
    for said in found:
        for expected, text in zip(cases, said, strict=True):
            assert expected in text
        assert "do: write tensor_size: 1, or give the model a multiple of 2" in said[0]


def warned(length: int) -> list[str]:
    """Warnings of a step with sequences of this length, one in a micro-batch."""
    settings = {"training.max_steps": 1, "training.batch_size": 1}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        list(trainer_for("tensor:2", "transformer", settings, vocab_size=64).steps(Tokens(length)))
    return [str(each.message) for each in found if "equal bits" in str(each.message)]


def warned_of(lengths: list[int]) -> list[list[str]]:
    return [warned(length) for length in lengths]


def test_numbers_of_activations_that_a_cpu_may_round_differently_are_said() -> None:
    for none, some in run_ranks(warned_of, 2, [16, 18]):
        assert not none
        assert "no multiple of 64" in some[0]


class WidestOutput(TorchDispatchMode):
    """Records the widest last dim of what operators return."""

    widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim > 1:
            self.widest = max(self.widest, out.shape[-1])
        return out


def sent_and_widest(loss_fn: Any = None) -> tuple[int, int, int]:
    """Bytes that this rank's cut layers send in one step of one micro-batch, those of theory, and
    the widest tensor.
    """
    sent: list[int] = []
    first = LayerCut.__init__

    def counted(self: LayerCut, *args: Any, **kwargs: Any) -> None:
        first(self, *args, **kwargs)
        self.on_send = sent.append

    LayerCut.__init__ = counted  # type: ignore[method-assign]
    settings = {
        "distributed.reproducible": False,
        "training.max_steps": 1,
        "training.global_batch_size": 2,
    }
    args = {"n_layer": 3, "n_kv_head": 4, "vocab_size": 1024}
    with WidestOutput() as seen:
        list(trainer_for("tensor:4", "transformer", settings, loss_fn, **args).steps(Tokens(16)))
    LayerCut.__init__ = first  # type: ignore[method-assign]
    activation = 2 * 16 * 32 * 4
    positions = 2 * 16
    # two numbers of each rank; or whole
    logits = positions * 2 * 4 * 4 if loss_fn is None else positions * 1024 * 4
    # forward and backward: an all-gather and a reduce-scatter each, of both halves
    per_layer = 8 * activation
    ends = 2 * activation + 2 * activation + logits  # embedding; entering the head; the loss
    return sum(sent), (3 * per_layer + ends) * 3 // 4, seen.widest


def sent_and_widest_of_both() -> list[tuple[int, int, int]]:
    return [sent_and_widest(), sent_and_widest(nn.CrossEntropyLoss())]


def test_bytes_of_a_step_are_those_of_theory_and_no_rank_has_whole_logits() -> None:
    """Four all-reduces a layer, as halves; logits are gathered for a loss function that Lockstep
    does not know.
    """
    for (sent, expected, widest), (sent_whole, expected_whole, widest_whole) in run_ranks(
        sent_and_widest_of_both, 4
    ):
        assert (sent, widest) == (expected, 1024 // 4)
        assert (sent_whole, widest_whole) == (expected_whole, 1024)


# ---- losses ----


class WithLogitPenalty(Transformer):
    """A loss of one's own, which reads the logits itself."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        counted = (batch["targets"] != -100).flatten()
        penalty = outputs.float().flatten(0, 1).logsumexp(-1).square() * counted
        return super().loss(outputs, batch) + 1e-3 * penalty.sum()


def trained_and_evaluated(topology: str, kind: str, exact: bool) -> list[float]:
    """Losses of two steps, then that of an evaluation, and the most likely tokens' sum outside of
    the step.
    """
    settings = {"training.max_steps": 2, "distributed.reproducible": exact}
    args = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "dropout": 0.1}
    loss_fn = nn.CrossEntropyLoss() if kind == "function" else None
    with torch.device("meta"):
        model = (WithLogitPenalty if kind == "overridden" else Transformer)(**args)
    trainer = trainer_for(topology, model, settings, loss_fn)
    losses = [float(record.loss) for record in trainer.steps(Tokens())]
    losses.append(trainer.evaluate(Subset(Tokens(), range(21))))
    trainer.placed.parts[0].eval()
    logits = trainer.placed.forward(torch.arange(16)[None])
    return [*losses, float(logits.double().sum()), float(logits.shape[-1])]


def train_and_evaluate_all(topology: str) -> list[list[float]]:
    kinds = ("own", "function", "overridden")
    return [
        trained_and_evaluated(topology, kind, exact) for kind in kinds for exact in (True, False)
    ]


@pytest.mark.full
def test_losses_evaluation_and_logits_outside_of_the_step() -> None:
    """A model's own loss takes cut logits; a loss function, or one that a subclass brings, takes
    whole ones.
    """
    expected = train_and_evaluate_all("single")
    for found in run_ranks(train_and_evaluate_all, 2, "tensor:2"):
        assert found[::2] == expected[::2]
        for one, other in zip(found, expected, strict=True):
            assert worst([tuple(one)], [tuple(other)]) < 1e-5


@pytest.mark.parametrize("blocks", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cut_losses_of_one_rank(blocks: int | None, dtype: torch.dtype) -> None:
    targets = torch.randint(0, 64, (2, 8))
    targets[0, :3] = -100
    ours = (torch.randn(2, 8, 64) * 3).to(dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    losses = cut_token_losses(ours, targets, LayerCut(None, blocks, sequence=False))
    expected = F.cross_entropy(theirs.flatten(0, 1).float(), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    expected.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_target_outside_of_the_vocabulary_is_no_silent_zero() -> None:
    cut = LayerCut(None, 2, sequence=False)
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        cut_token_losses(torch.zeros(1, 2, 8), torch.tensor([[3, 8]]), cut)
