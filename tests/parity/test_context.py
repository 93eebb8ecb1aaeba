"""Sequences cut over the axis `context`: one process's losses, and its bits where they count, on
products of axes.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models.attention import Attend
from lockstep.models.bdh import PastAttention
from lockstep.models.protocol import objective_of
from lockstep.parallel.context.attention import SequenceCut, cut_attention
from lockstep.parallel.context.sequences import apply_context, cut_objective
from lockstep.parallel.facts import facts_of
from lockstep.strategy import parse_topology, resolve
from lockstep.trainer import Trainer
from tests.parity.axes import Model, check_against_one_process, every, uneven
from tests.parity.same_bits import digest, trainer_for
from tests.parity.test_same_bits import check
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks
from tests.sampled import sampled

TOPOLOGIES = {
    2: ("context:2",),
    4: (
        "context:4",
        "ddp:2*context:2",
        "fsdp:2*context:2",
        "pipeline:2*context:2",
        "context:2*tensor:2",
    ),
}
SMALL = {"n_layer": 2, "vocab_size": 64}
GROUPED = {**SMALL, "n_kv_head": 2}
TIED = {**GROUPED, "tie_embeddings": True}
PACKED = {"packed": True}
OPEN = {"distributed.open_axes": ["tensor", "context"]}
EXACT = {"distributed.context_blocks": 4, "distributed.sequence_parallel": False}
PLAIN = {"distributed.reproducible": False}
RECOMPUTED = {"training.gradient_checkpointing": "full"}
EXCHANGED = {"distributed.context_method": "all_to_all"}
WHOLE_HEADS = {**SMALL, "n_kv_head": 4}
RING = {"distributed.context_method": "ring"}
# name → (model, settings, model arguments)
EXACT_CASES: dict[str, Model] = {
    "grouped": ("transformer", EXACT, GROUPED),
    "tied": ("transformer", {**EXACT, "training.global_batch_size": 22, **RECOMPUTED}, TIED),
    "bdh": ("bdh", EXACT, {**SMALL, **PACKED}),
    "latent": ("free_transformer", EXACT, SMALL),
    "mixture": ("mixture", EXACT, {**SMALL, "balance": "step"}),
    "packed": ("transformer", {**EXACT, **RECOMPUTED}, {**GROUPED, **PACKED}),
    "exchanged": ("transformer", {**EXACT, **EXCHANGED}, {**WHOLE_HEADS, **PACKED}),
    "exchanged, bdh": ("bdh", {**EXACT, **EXCHANGED}, SMALL),
    "packed mixture": ("mixture", EXACT, {**SMALL, **PACKED}),
    "packed latent": ("free_transformer", {**EXACT, **RECOMPUTED}, {**SMALL, **PACKED}),
}
for family in ("llama", "qwen3"):  # one that runs as a chain of segments, one that the library runs
    EXACT_CASES[f"hf:{family}"] = (f"hf:{family}", EXACT, {"vocab_size": 64})
PLAIN_CASES: dict[str, Model] = {
    "tied": ("transformer", PLAIN, TIED),
    "recomputed in bf16": (
        "transformer",
        {**PLAIN, **RECOMPUTED, "precision.mode": "bf16"},
        GROUPED,
    ),
    "bdh": ("bdh", PLAIN, SMALL),
    "latent": ("free_transformer", PLAIN, {**SMALL, **PACKED}),
    "mixture": ("mixture", PLAIN, SMALL),
    "exchanged": ("transformer", {**PLAIN, **EXCHANGED}, WHOLE_HEADS),
    "mistral": ("hf:mistral", PLAIN, {"vocab_size": 64, "sliding_window": None}),
    "ring": ("transformer", {**PLAIN, **RING, **RECOMPUTED}, {**GROUPED, **PACKED}),
    "ring, latent": ("free_transformer", {**PLAIN, **RING}, SMALL),
    "packed": ("transformer", {**PLAIN, **EXCHANGED}, {**WHOLE_HEADS, **PACKED}),
}


# In the full grid alone: each model and each way to attend is among the others.
FULL = {
    True: ("tied", "packed mixture", "packed latent", "exchanged, bdh", "hf:qwen3"),
    False: ("recomputed in bf16", "bdh", "latent", "mixture", "ring, latent", "packed"),
}


def in_turn(ranks: int, steps: int) -> list[tuple[Any, ...]]:
    """One half of the cases on two ranks, the other on four, where products of axes take turns."""
    chosen = []
    for exact, cases in ((True, EXACT_CASES), (False, PLAIN_CASES)):
        some = [case for name, case in cases.items() if name not in FULL[exact]]
        for place, (model, settings, args) in enumerate(some[ranks == 4 :: 2], 3 * exact):
            chosen.append(
                (TOPOLOGIES[ranks][place % len(TOPOLOGIES[ranks])], model, settings, steps, args)
            )
    return chosen


@pytest.mark.full  # in the quick run a model of one's own does, with plain and exact sums
def test_the_same_training_on_two_ranks() -> None:
    check_against_one_process(2, uneven(in_turn(2, steps=2)))


# of 4 ranks each has one chunk, not a slice
ON_FOUR = [
    ("context:4", *EXACT_CASES["exchanged"][:2], 2, EXACT_CASES["exchanged"][2]),
    ("context:4", *EXACT_CASES["latent"][:2], 2, SMALL),
]
ON_FOUR += [case for case in in_turn(4, steps=2) if case not in ON_FOUR]


@sampled("cases", ON_FOUR, len(ON_FOUR))
def test_the_same_training_on_four_ranks(cases: list[tuple[Any, ...]]) -> None:
    check_against_one_process(4, uneven(cases))


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model_on_every_product_of_axes(ranks: int) -> None:
    check_against_one_process(
        ranks, every(TOPOLOGIES[ranks], [*EXACT_CASES.values(), *PLAIN_CASES.values()])
    )


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_three_axes() -> None:
    """2 × 2 × 2 of pipeline, shards or replicas, tensor, and context."""
    cases = [
        (topology, model, settings, 5, args)
        for topology in (
            "pipeline:2*fsdp:2*context:2",
            "hybrid:2x2*context:2",
            "fsdp:2*context:2*tensor:2",
        )
        for model, settings, args in EXACT_CASES.values()
    ]
    check(8, cases, timeout=5400)


# ---- chunks ----


def test_chunks_are_dealt_from_both_ends_and_find_their_way_back() -> None:
    context = SequenceCut(None, 8)
    assert context.order(16) == [0, 7, 1, 6, 2, 5, 3, 4]
    x = torch.arange(32).view(2, 16)
    assert not torch.equal(context.part(x), x)
    assert torch.equal(context.gathered(context.part(x)), x)
    assert context.order(6) == [0, 1]  # what the length allows


def test_a_run_of_queries_attends_as_in_the_whole() -> None:
    q = torch.randn(2, 4, 8, 16)
    k = torch.randn(2, 2, 8, 16)
    v = torch.randn(2, 2, 8, 16)
    for causal in (True, False):
        attend = Attend(causal=causal)
        whole = attend(q, k, v)
        seen = 6 if causal else 8
        run = attend.run(q[:, :, 4:6], k[:, :, :seen], v[:, :, :seen], 4)
        torch.testing.assert_close(run, whole[:, :, 4:6])


# ---- what can't be ----


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()
        self.weight = nn.Parameter(torch.ones(2))

    def context_plan(self) -> dict[str, int]:
        return {"x": 1}


def test_a_model_that_can_not_be_cut_is_refused() -> None:
    with pytest.raises(
        UsageError, match="sequences of Linear can't be cut over ranks: it does not say how"
    ):
        facts_of(nn.Linear(2, 2)).required_context_plan()
    model = nn.Linear(2, 2)
    model.context_plan = lambda: {"x": 1}  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"it has no lockstep\.models\.attention\.Attend"):
        facts_of(model).required_context_plan()
    with pytest.raises(
        UsageError, match="the model, a Own, owns parameters, and can't run chunk by chunk"
    ):
        apply_context(facts_of(Own()), SequenceCut(None, 4))


def test_a_ring_merges_softmax_only() -> None:
    with pytest.raises(UsageError, match="context_method: ring can't compute PastAttention"):
        cut_attention(PastAttention(), SequenceCut(None, None, "ring"))


def test_a_mean_is_refused() -> None:
    with pytest.raises(UsageError, match="a loss that is a mean over some positions"):
        cut_objective(
            objective_of(nn.Linear(2, 2), nn.CrossEntropyLoss()), SequenceCut(None, 4), {"x": 1}
        )


def test_what_does_not_divide_or_does_not_go_together() -> None:
    with pytest.raises(UsageError, match="context_size=3 does not divide the number of ranks, 4"):
        resolve(
            config_from({"distributed.strategy": "ddp", "distributed.context_size": 3}).distributed,
            4,
        )
    assert resolve(config_from({"distributed.strategy": "context"}).distributed, 4) == Layout(
        "context", context=4
    )
    for settings, says in (
        ({"strategy": "diloco"}, "sequences can't be cut over 2 ranks under strategy diloco"),
        (
            {"reproducible": True},
            r"reproducible cuts sequences into 1 chunk\(s\), which 2 ranks can't share",
        ),
        (
            {"reproducible": True, "context_blocks": 4, "tensor_size": 2},
            "sequence_parallel cuts across the chunks",
        ),
        (
            {"reproducible": True, "context_blocks": 2, "context_method": "ring"},
            "ring merges the parts of a softmax",
        ),
    ):
        with pytest.raises(UsageError, match=says):
            config_from(
                {
                    "distributed.context_size": 2,
                    **{f"distributed.{k}": v for k, v in settings.items()},
                }
            )


def test_one_key_opens_the_axes_that_a_run_may_enter() -> None:
    """Whatever is missing, the first error names it, and what it says is enough."""
    entered = [
        {"context_size": 2},
        {"context_size": 2, "tensor_size": 2},
        {"context_size": 4, "context_blocks": 6},
    ]
    entered += [{"tensor_size": 2, "open_axes": []}, {"tensor_size": 2, "open_axes": ["context"]}]
    entered += [{"context_size": 2, "tensor_size": 2, "context_blocks": 4}]
    entered += [
        {"context_size": 2, "tensor_size": 2, "context_blocks": 4, "sequence_parallel": True}
    ]
    for settings in entered:
        flat = {
            f"distributed.{key}": value for key, value in {"reproducible": True, **settings}.items()
        }
        with pytest.raises(UsageError, match=r"write open_axes: \[tensor, context\]") as found:
            config_from(flat)
        assert str(found.value).count("open_axes: [") == 1
        left_out = [
            key
            for key in flat
            if f"leave {key.removeprefix('distributed.')} out" in str(found.value)
        ]
        config_from({key: v for key, v in flat.items() if key not in left_out} | OPEN)
    with pytest.raises(UsageError, match="write context_blocks: 32"):
        config_from({"distributed.reproducible": True, "distributed.context_size": 16, **OPEN})
    default = config_from({}).distributed
    both = config_from({"distributed.reproducible": True, **OPEN}).distributed
    assert (
        default.blocks_of_layers,
        default.chunks_of_sequences,
        default.cuts_sequences_between_layers,
    ) == (
        8,
        1,
        True,
    )
    assert (
        both.blocks_of_layers,
        both.chunks_of_sequences,
        both.cuts_sequences_between_layers,
    ) == (8, 8, False)
    assert (
        config_from({"distributed.context_blocks": 4, **OPEN}).distributed.chunks_of_sequences == 4
    )


def test_families_whose_attention_does_more_are_refused() -> None:
    for family, says in (
        (
            "gemma2",
            "sequences of hf:gemma2 can't be cut over ranks: its attention or its loss does more",
        ),
        ("mistral", "it attends within a window"),
    ):
        with pytest.raises(UsageError, match=says):
            facts_of(language_model(f"hf:{family}")).required_context_plan()
    with pytest.raises(UsageError, match="it has attention_dropout"):
        facts_of(language_model("hf:llama", attention_dropout=0.1)).required_context_plan()


def refused(length: int, settings: dict[str, Any], **args: Any) -> str:
    settings = {**PLAIN, "training.max_steps": 1, **settings}
    with pytest.raises(UsageError) as found:
        list(
            trainer_for("context:2", "transformer", settings, **SMALL, **args).steps(Tokens(length))
        )
    return str(found.value)


def sent_in_a_step(settings: dict[str, Any]) -> int:
    """Bytes that a rank sends for activations and the loss in one step of one micro-batch."""
    sent: list[int] = []
    first = SequenceCut.__init__

    def counted(self: SequenceCut, *args: Any, **kwargs: Any) -> None:
        first(self, *args, **kwargs)
        self.on_send = sent.append

    settings = {**PLAIN, "training.max_steps": 1, "training.global_batch_size": 2, **settings}
    SequenceCut.__init__ = counted  # type: ignore[method-assign]
    try:
        trainer = trainer_for("context:2", "transformer", settings, **GROUPED)
        list(trainer.steps(Tokens(16)))
    finally:
        SequenceCut.__init__ = first  # type: ignore[method-assign]
    return sum(sent) - 4 * trainer.placed.num_parameters  # half of their gradients, there and back


def kept_by_attention(method: str) -> int:
    """Bytes that one attention to 64 positions keeps for its backward pass, on a rank that has 32
    of them.
    """
    context = SequenceCut(dist.group.WORLD, None, method)
    attend = Attend()
    kept = {}
    cut_attention(attend, context)

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = (torch.randn(2, 4, 32, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(q, k, v).sum().backward()
    return sum(kept.values())


def measured() -> tuple[list[str], list[int], list[int]]:
    said = [refused(15, {}), refused(16, EXCHANGED, n_kv_head=1)]
    kept = [kept_by_attention(method) for method in ("gathered", "ring")]
    return said, [sent_in_a_step({}), sent_in_a_step(EXCHANGED), sent_in_a_step(RING)], kept


def test_lengths_and_heads_are_refused_and_bytes_are_those_of_theory() -> None:
    # [B, T, width] of one head
    head = 2 * 16 * 8 * 4
    loss = 2 * 4
    # two layers: keys and values of two heads gathered, their gradients summed
    gathered = 2 * 2 * (2 + 2) * head
    # queries, keys, values and results, there and back, of one part
    exchanged = 2 * 2 * (4 + 2 + 2 + 4) * head // 2
    # two layers: half of the keys and values, twice, and their gradients
    around = 2 * (1 + 1 + 2) * 2 * head
    part = 2 * 4 * 32 * 8 * 4  # queries, keys, values or results of four heads
    for (length, heads), found, (gathered_kept, ring_kept) in run_ranks(measured, 2):
        assert "2 ranks along the axis context can't share a sequence of 15" in length
        assert (
            "4 heads of queries and 1 of keys and values can't be exchanged between 2 ranks"
            in heads
        )
        assert found == [(each + loss) // 2 for each in (gathered, exchanged, 2 * around)]
        assert ring_kept == 4 * part + part // 8  # and the logarithm of each query's sum
        assert gathered_kept >= 6 * part


# ---- a model of one's own ----


class LearnedPositions(nn.Module):
    """As `docs/how_to/long_context.md` describes a model of one's own, with a table of
    positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.positions = nn.Embedding(64, 32)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)
        self.attend = Attend()
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(self.attend.positions(ids.shape[1], ids.device))
        q, k, v = (
            each.transpose(1, 2)
            for each in self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).unbind(2)
        )
        logits: Tensor = self.head(
            x + self.dropout(self.attend(q, k, v).transpose(1, 2).flatten(2))
        )
        return logits

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        return (batch["input_ids"],)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten(), reduction="sum")

    def count(self, batch: dict[str, Tensor]) -> int:
        return batch["targets"].numel()

    def context_plan(self) -> dict[str, int]:
        return {"input_ids": 1, "targets": 1}


def own_model(topology: str) -> tuple[list[float], str]:
    """Losses in the plain mode; digest of a reproducible run."""
    values, _ = parse_topology(topology)
    settings = {f"distributed.{key}": value for key, value in values.items()} | {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.max_steps": 3,
        "precision.mode": "fp32",
    }
    exact = {"distributed.reproducible": True, "distributed.context_blocks": 4}
    torch.manual_seed(0)
    losses = [
        float(r.loss)
        for r in Trainer(LearnedPositions(), config=config_from(settings)).steps(Tokens())
    ]
    torch.manual_seed(0)
    trainer = Trainer(LearnedPositions(), config=config_from(settings | exact))
    list(trainer.steps(Tokens()))
    return losses, digest(trainer)


def test_a_model_of_ones_own_with_learned_positions() -> None:
    losses, bits = own_model("single")
    for found, found_bits in run_ranks(own_model, 2, "context:2"):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_bits == bits
