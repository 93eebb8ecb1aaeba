"""What happens inside pipelines, on 2 ranks: what travels, what is held, what is refused. One launch for all of it."""

from typing import Any

import pytest
import torch

from tests.parallel.pipeline_cases import (
    deep,
    look,
    message_of,
    overflow,
    piped,
    running_statistics,
    several,
    train,
    worst,
)
from tests.parity.pipelines import SCHEDULES
from tests.ranks import run_ranks

TOLERANCE = 1e-5

ONE_AT_A_TIME = {"training.batch_size": 1}
CHECKPOINTED = {"training.gradient_checkpointing": "full"}

# name → a training, (model, settings, data …); all are compared with the same training in one process.
TRAININGS: dict[str, tuple[Any, ...]] = {
    "four runs": ("deep", piped("1F1B", pipeline__n_microbatches=2)),
    "runs that are filled up": ("deep", piped("ZBVZeroBubble", pipeline__n_microbatches=5)),
    "fewer micro-batches than stages": ("deep", {**piped("DualPipeV"), "training.global_batch_size": 2}),
    "every length": ("deep", {**piped("1F1B"), **ONE_AT_A_TIME}, "TextsOfAllLengths"),
    "every length, V": ("deep", {**piped("DualPipeV"), **ONE_AT_A_TIME}, "TextsOfAllLengths"),
    "carried, 1F1B": ("Carrying", piped("1F1B")),
    "carried, DualPipeV": ("Carrying", piped("DualPipeV")),
    "carried, InterleavedZeroBubble": ("Carrying", piped("InterleavedZeroBubble")),
    "frozen": ("frozen", piped("1F1B")),
    "frozen, split": ("frozen", piped("ZBVZeroBubble")),
    "spare parameter": ("with_spare", piped("1F1B")),
    "recurring module": ("recurring", piped("1F1B"), "Points"),
    "recurring module, split": ("recurring", piped("InterleavedZeroBubble"), "Points"),
    "clip by value": ("deep", {**piped(), "training.gradient_clip": {"strategy": "value", "value": 1e-3}}),
    "clip hard": ("deep", {**piped(), "training.gradient_clip": {"strategy": "norm", "value": 1e-2}}),
    "split_spec": ("deep", piped("1F1B", pipeline__split_spec={"layers.0": "end"})),
    "selective": ("deep", {**piped(), "training.gradient_checkpointing": "selective"}),
    "every_n": ("deep", {**piped(), "training.gradient_checkpointing": "every_n"}),
    "sequential": ("deep", {**piped("LoopedBFS"), "training.gradient_checkpointing": "sequential"}),
    **{f"checkpointed, {name}": ("deep", {**piped(name), **CHECKPOINTED}) for name in SCHEDULES},
    "checkpointed latent": ("deep", {**piped("DualPipeV"), **CHECKPOINTED}, "Tokens", {"name": "free_transformer"}),
    "bf16": ("deep", {**piped(), "precision.mode": "bf16"}),
    "compiled": ("shallow", {**piped("Interleaved1F1B"), "training.compile": True}),
}

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{name: ("train", training) for name, training in TRAININGS.items()},
    "transformer": ("look", (piped("1F1B"), "transformer")),
    "bdh": ("look", (piped("DualPipeV"), "bdh")),
    "wrapped": ("names", ({**piped("1F1B"), **CHECKPOINTED, "training.compile": True},)),
    "overflow": ("overflow", (piped("1F1B"),)),
    "statistics": ("running_statistics", (piped("1F1B"),)),
    "statistics, V": ("running_statistics", (piped("DualPipeV"),)),
    "statistics, recomputed": ("running_statistics", ({**piped("1F1B"), **CHECKPOINTED},)),
    "too many stages": (
        "message_of",
        ("Carrying", piped("1F1B", pipeline__split_spec={"middle.1": "end", "end": "beginning"})),
    ),
    "drifting": ("message_of", ("Drifting", piped("1F1B"))),  # the last one: its ranks part
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Name → result, of each rank."""
    return [dict(zip(CALLS, results, strict=True)) for results in run_ranks(several, 2, list(CALLS.values()))]


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not key.startswith("distributed")}


def off(ranks: list[dict[str, Any]], name: str) -> float:
    """How far the ranks are from one process."""
    model, settings, *rest = TRAININGS[name]
    reference = train(model, alone(settings), *rest)
    return max(worst(rank[name], reference) for rank in ranks)


def test_trap_05_gradients_are_not_divided_by_the_number_of_micro_batches(ranks: list[dict[str, Any]]) -> None:
    """torch's default, `scale_grads=True`, divides by it, and again for each run of the schedule in a step."""
    assert off(ranks, "four runs") < TOLERANCE
    assert off(ranks, "runs that are filled up") < TOLERANCE


@pytest.mark.parametrize("name", ["clip hard", "clip by value"])
def test_trap_07_the_norm_is_that_of_all_stages_and_the_same_on_all_ranks(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """A stage that clips by its own norm goes another way than the others."""
    assert ranks[0][name] == ranks[1][name]
    assert off(ranks, name) < TOLERANCE


def test_trap_08_all_stages_skip_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    """fp16: an overflow that only the stage sees in which it happens makes the stages part for ever."""
    steps = ranks[0]["overflow"]
    assert steps == ranks[1]["overflow"]
    skipped = [skip for skip, _, _ in steps]
    assert any(skipped)
    assert not all(skipped)
    expected = overflow({})
    assert [step[:2] for step in steps] == [step[:2] for step in expected]
    assert all(abs(a[2] - b[2]) < 1e-3 * b[2] for a, b in zip(steps, expected, strict=True))


def test_trap_23_a_schedule_gets_the_number_of_micro_batches_that_it_needs(ranks: list[dict[str, Any]]) -> None:
    """DualPipeV dies on fewer micro-batches than stages: copies of no weight fill them up."""
    assert off(ranks, "fewer micro-batches than stages") < TOLERANCE


def test_trap_23_cuts_that_do_not_fit_stop_every_rank_before_the_start(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            "UsageError: 2 cuts + 1 = 3 stages, but 2 pipeline ranks × 1 stages_per_rank = 2" in rank["too many stages"]
        )


@pytest.mark.parametrize("name", ["carried, 1F1B", "carried, DualPipeV", "carried, InterleavedZeroBubble"])
def test_trap_26_an_auxiliary_loss_of_an_early_stage_travels_and_its_gradient_comes_back(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """V-shaped schedules take tuples only, and the gradient of a sum, which is not contiguous, makes gloo's peer wait
    for ever. Integers that are carried have no gradient at all."""
    assert off(ranks, name) < TOLERANCE


def test_trap_27_names_are_those_of_the_unsplit_model_whatever_wraps_it(ranks: list[dict[str, Any]]) -> None:
    """`_orig_mod.`, `_checkpoint_wrapped_module.` or a stage's own prefixes would make checkpoints unreadable."""
    names = [set(rank["wrapped"]) for rank in ranks]
    assert names[0] | names[1] == {name for name, _ in model("transformer").named_parameters()}
    assert not names[0] & names[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trap_28_recomputation_draws_what_the_forward_pass_drew(ranks: list[dict[str, Any]], schedule: str) -> None:
    """By the time a block is recomputed another micro-batch is current: with its random numbers gradients are 50 to
    160 % wrong."""
    assert off(ranks, f"checkpointed, {schedule}") < TOLERANCE


@pytest.mark.parametrize("name", ["selective", "every_n", "sequential", "checkpointed latent"])
def test_other_kinds_of_recomputation(ranks: list[dict[str, Any]], name: str) -> None:
    assert off(ranks, name) < TOLERANCE


@pytest.mark.parametrize("name", ["transformer", "bdh"])
def test_trap_47_first_values_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    """Each stage is filled on its own; no value depends on where the model is cut."""
    alone_ = look({}, name)
    for rank in ranks:
        assert all(torch.equal(value, alone_["first"][key]) for key, value in rank[name]["first"].items())
    assert {key for rank in ranks for key in rank[name]["first"]} == set(alone_["first"])


@pytest.mark.parametrize("name", ["recurring module", "recurring module, split"])
def test_trap_49_weights_that_stages_share_get_the_gradients_of_all_their_uses(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """torch's tracer accepts them, and leaves each stage with the gradient of its own use."""
    assert off(ranks, name) < TOLERANCE


def test_what_is_shared_stays_equal_is_counted_once_and_is_optimised_where_it_is_held(
    ranks: list[dict[str, Any]],
) -> None:
    """BDH: every stage uses the three large weights."""
    first, second = (rank["bdh"] for rank in ranks)
    both = set(first["then"]) & set(second["then"])
    assert both == {"encoder", "encoder_v", "decoder"}
    assert all(torch.equal(first["then"][name], second["then"][name]) for name in both)
    assert not first["counted"] & second["counted"]
    assert first["counted"] | second["counted"] == {name for name, _ in model("bdh").named_parameters()}
    assert first["num_parameters"] == sum(p.numel() for p in model("bdh").parameters())
    assert [rank["optimizer"] for rank in (first, second)] == [5, 3]


@pytest.mark.parametrize("name", ["transformer", "bdh"])
def test_a_sample_from_the_model_on_every_rank(ranks: list[dict[str, Any]], name: str) -> None:
    expected = look({}, name)["sample"]
    for rank in ranks:
        torch.testing.assert_close(rank[name]["sample"], expected, rtol=1e-5, atol=1e-6)


def test_batches_reach_only_the_ranks_that_need_them(ranks: list[dict[str, Any]]) -> None:
    """V-shaped on 2 ranks: the first and the last stage are both on rank 0."""
    assert [rank["transformer"]["wants_data"] for rank in ranks] == [True, True]
    assert [rank["bdh"]["wants_data"] for rank in ranks] == [True, False]


@pytest.mark.parametrize("name", ["statistics", "statistics, V", "statistics, recomputed"])
def test_running_statistics_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    expected = running_statistics({})
    found = {key: value for rank in ranks for key, value in rank[name].items()}
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["every length", "every length, V", "frozen", "frozen, split", "spare parameter", "split_spec", "compiled"]
)
def test_odd_models_and_data(ranks: list[dict[str, Any]], name: str) -> None:
    assert off(ranks, name) < TOLERANCE


def test_bf16_autocast(ranks: list[dict[str, Any]]) -> None:
    """The same casts in the same places: what differs is where weights' casts are cached."""
    assert off(ranks, "bf16") < 1e-4


def test_shapes_that_depend_on_values_are_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    assert "RunError: stage 0 put out" in ranks[0]["drifting"]
    assert "[2, 15, 16]" in ranks[0]["drifting"]


def test_the_partition_is_said(ranks: list[dict[str, Any]]) -> None:
    said = "\n".join(ranks[0]["bdh"]["notices"])
    assert "DualPipeV, 4 stages on 2 ranks" in said
    assert "layers.1 … layers.2 (2)" in said


def model(name: str) -> torch.nn.Module:
    return deep(name)


def test_a_schedule_that_splits_the_backward_pass_refuses_compiled_blocks() -> None:
    message = message_of("deep", {**piped("ZBVZeroBubble"), "training.compile": True})
    assert "UsageError" in message
    assert "ZBVZeroBubble" in message
