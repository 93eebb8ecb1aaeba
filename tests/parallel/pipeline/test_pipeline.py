"""What happens inside pipelines on 2 ranks: what travels, what is held, what is refused."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.parallel.pipeline.pipeline_cases import (
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
from tests.parallel.pipeline.pipeline_launch import (
    CHECKPOINTED,
    ON_TWO,
    ONLY_FULL,
    RECOMPUTED,
    RECOMPUTED_IN_TURN,
    TRAININGS,
    launched,
)
from tests.parity.pipelines import SCHEDULES
from tests.ranks import run_ranks

TOLERANCE = 1e-5


def on_ranks(name: str) -> list[Any]:
    return [rank[name] for rank in launched(2)]


@cache
def off(name: str, ranks: int = 2) -> float:
    """How far a training on ranks is from the same in one process."""
    model, settings, *rest = TRAININGS[name]
    alone = {key: value for key, value in settings.items() if not key.startswith("distributed")}
    reference = train(model, alone, *rest)
    return max(worst(rank[name], reference) for rank in launched(ranks))


def test_trap_05_gradients_are_not_divided_by_the_number_of_micro_batches() -> None:
    """torch's default, `scale_grads=True`, divides by it, and again for each run of the schedule in
    a step.
    """
    assert off("several runs") < TOLERANCE


def test_trap_07_the_norm_is_that_of_all_stages_and_the_same_on_all_ranks() -> None:
    """A stage that clips by its own norm goes another way than the others."""
    first, second = on_ranks("clip hard")
    assert first == second
    assert off("clip hard") < TOLERANCE


def test_trap_08_all_stages_skip_the_same_steps() -> None:
    """fp16: an overflow that only the stage sees in which it happens makes the stages part for
    ever.
    """
    steps, others = on_ranks("overflow")
    assert steps == others
    skipped = [skip for skip, _, _ in steps]
    assert any(skipped)
    assert not all(skipped)
    expected = overflow({})
    assert [step[:2] for step in steps] == [step[:2] for step in expected]
    assert all(abs(a[2] - b[2]) < 1e-3 * b[2] for a, b in zip(steps, expected, strict=True))


def test_trap_23_a_schedule_gets_the_number_of_micro_batches_that_it_needs() -> None:
    """DualPipeV dies on fewer micro-batches than stages: copies of no weight fill them up."""
    assert off("fewer micro-batches than stages") < TOLERANCE


def test_trap_23_cuts_that_do_not_fit_stop_every_rank_before_the_start() -> None:
    for message in on_ranks("too many stages"):
        assert (
            "UsageError: 2 cuts + 1 = 3 stages, but 2 pipeline ranks × 1 stages_per_rank = 2"
            in message
        )


def test_trap_26_an_auxiliary_loss_of_an_early_stage_travels_and_its_gradient_comes_back() -> None:
    """V-shaped schedules take only tuples, and carried integers have no gradient at all.

    The gradient of a sum, which is not contiguous, makes gloo's peer wait for ever.
    """
    assert off("carried, DualPipeV") < TOLERANCE


def test_the_first_half_of_a_backward_pass_asks_only_for_gradients_that_there_are() -> None:
    """torch 2.11 fails at an input that is not used.

    It computes an operation wrong of which several outputs have gradients.
    """
    assert off("twofold, split") < TOLERANCE


def test_trap_27_names_are_those_of_the_unsplit_model_whatever_wraps_it() -> None:
    """`_orig_mod.`, `_checkpoint_wrapped_module.` or a stage's own prefixes would make checkpoints
    unreadable.
    """
    first, second = map(set, on_ranks("wrapped"))
    assert first | second == {name for name, _ in deep().named_parameters()}
    assert not first & second


@pytest.mark.parametrize("schedule", RECOMPUTED_IN_TURN)
def test_trap_28_recomputation_draws_what_the_forward_pass_drew(schedule: str) -> None:
    """By the time a block is recomputed, another micro-batch is current.

    With the random numbers of that one, gradients are 50 to 160 % wrong.
    """
    assert off(f"checkpointed, {schedule}") < TOLERANCE


@pytest.mark.full
def test_every_schedule_recomputes_rightly() -> None:
    """The schedules that the test above leaves out."""
    rest = [name for name in SCHEDULES if name not in RECOMPUTED_IN_TURN]
    results = run_ranks(several, 2, [("train", RECOMPUTED[name]) for name in rest], timeout=900)
    reference = train("deep", CHECKPOINTED)
    for place, name in enumerate(rest):
        assert max(worst(of_rank[place], reference) for of_rank in results) < TOLERANCE, name


@pytest.mark.parametrize("name", ["transformer", "bdh"])
def test_trap_47_first_values_are_those_of_one_process(name: str) -> None:
    """Each stage is filled on its own; no value depends on where the model is cut."""
    expected = look({}, name)["first"]
    found = [rank["first"] for rank in on_ranks(name)]
    assert all(
        torch.equal(value, expected[key]) for values in found for key, value in values.items()
    )
    assert {key for values in found for key in values} == set(expected)


def test_trap_49_weights_that_stages_share_get_the_gradients_of_all_their_uses() -> None:
    """torch's tracer accepts them, and leaves each stage with the gradient of its own use."""
    assert off("recurring module") < TOLERANCE


def test_what_is_shared_stays_equal_is_counted_once_and_is_optimised_where_it_is_held() -> None:
    """BDH: every stage uses the three large weights."""
    first, second = on_ranks("bdh")
    both = set(first["then"]) & set(second["then"])
    assert both == {"encoder", "encoder_v", "decoder"}
    assert all(torch.equal(first["then"][name], second["then"][name]) for name in both)
    assert not first["counted"] & second["counted"]
    assert first["counted"] | second["counted"] == {
        name for name, _ in deep("bdh").named_parameters()
    }
    assert first["num_parameters"] == sum(p.numel() for p in deep("bdh").parameters())
    assert [rank["optimizer"] for rank in (first, second)] == [5, 3]


@pytest.mark.parametrize("name", ["transformer", "bdh"])
def test_a_sample_from_the_model_on_every_rank(name: str) -> None:
    expected = look({}, name)["sample"]
    for rank in on_ranks(name):
        torch.testing.assert_close(rank["sample"], expected, rtol=1e-5, atol=1e-6)


def test_batches_reach_only_the_ranks_that_need_them() -> None:
    """V-shaped on 2 ranks: the first and the last stage are both on rank 0."""
    assert [rank["wants_data"] for rank in on_ranks("transformer")] == [True, True]
    assert [rank["wants_data"] for rank in on_ranks("bdh")] == [True, False]


@pytest.mark.parametrize("name", ["statistics", "statistics, V", "statistics, recomputed"])
def test_running_statistics_are_those_of_one_process(name: str) -> None:
    expected = running_statistics({})
    found = {key: value for values in on_ranks(name) for key, value in values.items()}
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_other_trainings() -> None:
    """What tests above train, with other schedules and settings; compiled blocks."""
    cases = [ON_TWO[name] for name in ONLY_FULL]
    results = run_ranks(several, 2, [("train", case) for case in cases], timeout=900)
    for place, (model, settings, *rest) in enumerate(cases):
        alone = {key: value for key, value in settings.items() if not key.startswith("distributed")}
        reference = train(model, alone, *rest)
        assert max(worst(of_rank[place], reference) for of_rank in results) < TOLERANCE, ONLY_FULL[
            place
        ]


def test_bf16_autocast() -> None:
    """The same casts in the same places: what differs is where weights' casts are cached."""
    assert off("bf16") < 1e-4


def test_shapes_that_depend_on_values_are_refused_by_name() -> None:
    message = on_ranks("drifting")[0]
    assert "RunError: stage 0 put out" in message
    assert "[2, 15, 16]" in message


def test_the_partition_is_said() -> None:
    said = "\n".join(on_ranks("bdh")[0]["log_lines"])
    assert "DualPipeV, 4 stages on 2 ranks" in said
    assert "layers.3 … head (2)" in said


def test_a_schedule_that_splits_the_backward_pass_refuses_compiled_blocks() -> None:
    message = message_of("deep", {**piped("ZBVZeroBubble"), "training.compile": True})
    assert "UsageError" in message
    assert "ZBVZeroBubble" in message
