"""Stages, schedules and their pictures, without processes."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.cli import main
from lockstep.config import config_from
from lockstep.data.batches import MicroBatch
from lockstep.errors import EXIT_DONE, EXIT_USAGE, UsageError
from lockstep.models import get_model
from lockstep.parallel.facts import facts_of
from lockstep.parallel.pipeline.plan import (
    Partition,
    balanced_cuts,
    cuts_of,
    partition,
    plan_of,
    table,
)
from lockstep.parallel.pipeline.runner import cut_into_runs
from lockstep.parallel.pipeline.schedules import SCHEDULES, actions, picture, rank_of, timeline

NAMES = ["embed", *(f"layers.{i}" for i in range(10)), "head"]
ONE_OR_TWO = [(name, facts.stages_per_rank or 2) for name, facts in SCHEDULES.items()]


def cut(
    ranks: int = 2,
    stages_per_rank: int = 1,
    spec: dict[str, str] | None = None,
    costs: list[float] | None = None,
) -> Partition:
    return partition(
        NAMES,
        costs or [1.0] * len(NAMES),
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        split_spec=spec or {},
        v_shaped=False,
    )


# ---- where the chain is cut ----


def test_trap_24_end_leaves_the_named_layer_and_all_before_it_in_the_stage() -> None:
    """`layers.4: end` is read as "four layers" by some: five of them are in the first stage."""
    first = [NAMES[i] for i in cut(spec={"layers.4": "end"}).stages[0]]
    assert [name for name in first if name.startswith("layers")] == [
        f"layers.{i}" for i in range(5)
    ]
    beginning = [NAMES[i] for i in cut(spec={"layers.4": "beginning"}).stages[0]]
    assert [name for name in beginning if name.startswith("layers")] == [
        f"layers.{i}" for i in range(4)
    ]


def test_cuts_may_be_given_in_any_order() -> None:
    spec = {"layers.6": "end", "layers.2": "beginning", "layers.4": "end"}
    assert cuts_of(spec, NAMES) == [3, 6, 8]


def test_trap_23_cuts_stages_and_ranks_that_disagree_are_one_error_with_the_sum() -> None:
    """Otherwise a rank waits for a stage that nobody holds."""
    with pytest.raises(UsageError) as error:
        cut(ranks=2, stages_per_rank=2, spec={"layers.4": "end"})
    assert "1 cut + 1 = 2 stages, but 2 pipeline ranks × 2 stages_per_rank = 4" in str(error.value)
    assert "stages of 6, 6 segments" in str(error.value)
    with pytest.raises(
        UsageError,
        match="8 pipeline ranks × 2 stages_per_rank = 16 stages, but the model is a chain of 12",
    ):
        cut(ranks=8, stages_per_rank=2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"layer.4": "end"}, r"not a segment of the model[\s\S]*did you mean layers.4"),
        ({"head": "end"}, "behind the last"),
        ({"embed": "beginning"}, "in front of the first"),
        ({"layers.4": "end", "layers.5": "beginning"}, "at the same place"),
    ],
)
def test_a_cut_that_makes_no_sense(spec: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut(spec=spec)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_the_most_expensive_stage_is_as_cheap_as_can_be(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))

    def largest(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    found = tuple(balanced_cuts([float(c) for c in costs], stages))
    assert len(found) == stages - 1
    assert largest(found) == min(
        largest(cuts) for cuts in combinations(range(1, len(costs)), stages - 1)
    )


def test_the_partition_as_a_table() -> None:
    parts = cut(costs=[50.0, *[10.0] * 10, 50.0])
    assert table(parts, NAMES, [50.0, *[10.0] * 10, 50.0]).splitlines() == [
        "stage  rank  segments              parameters  share",
        "    0     0  embed … layers.4 (6)         100    50%",
        "    1     1  layers.5 … head (6)          100    50%",
    ]


def test_stages_go_round_and_round_or_back_and_forth() -> None:
    assert [rank_of(stage, 3, v_shaped=False) for stage in range(9)] == [0, 1, 2] * 3
    assert [rank_of(stage, 3, v_shaped=True) for stage in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def tiny(name: str, **args: object) -> nn.Module:
    sizes = {"bdh": {"mlp_multiplier": 4}}.get(name, {})
    with torch.device("meta"):
        return get_model(name)(n_layer=4, n_embd=16, n_head=2, vocab_size=31, **sizes, **args)


def test_weights_that_segments_borrow_count_where_they_are_used() -> None:
    """BDH's layers own nothing: by what they own, all layers would be one stage."""
    config = config_from({"distributed.strategy": "pipeline"})
    plan = plan_of(facts_of(tiny("bdh")), 2, config.step)
    assert [len(span) for span in plan.parts.stages] == [3, 3]
    assert sorted(plan.model.users["encoder"]) == [f"layers.{i}" for i in range(4)]
    assert "embed … layers.1 (3)" in plan.table()


def test_tied_weights_are_found_by_identity() -> None:
    shared = nn.Linear(8, 8)
    other = nn.Linear(8, 8)
    other.weight = shared.weight
    model = nn.Sequential(shared, nn.Tanh(), other)
    plan = plan_of(facts_of(model), 2, config_from({"distributed.strategy": "pipeline"}).step)
    assert plan.model.users["0.weight"] == ["0", "2"]
    assert set(plan.model.parameters) == {"0.weight", "0.bias", "2.bias"}


def test_a_model_that_is_no_chain_is_told_what_to_offer() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    with pytest.raises(UsageError, match=r"segments\(\)"):
        plan_of(
            facts_of(Opaque()),
            2,
            config_from({"distributed.strategy": "pipeline"}).step,
        )


def test_a_stage_without_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    config = config_from(
        {
            "distributed.strategy": "pipeline",
            "distributed.pipeline.split_spec": {"1": "beginning", "2": "beginning"},
        }
    )
    with pytest.raises(UsageError, match=r"stage 1 \(1\) has no parameters"):
        plan_of(facts_of(model), 3, config.step)


def test_a_segment_that_borrows_what_is_not_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.shared_parameters = lambda: {"1": {"weight": "0.wieght"}}  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"borrows 0\.wieght"):
        plan_of(facts_of(model), 2, config_from({"distributed.strategy": "pipeline"}).step)


# ---- schedules ----


@pytest.mark.parametrize(("name", "stages_per_rank"), ONE_OR_TWO)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_trap_23_every_number_of_micro_batches_is_filled_up_to_one_that_the_schedule_takes(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    """1F1B and DualPipeV need as many micro-batches as stages, interleaved ones a multiple of the
    ranks.
    """
    for wanted in range(1, 14):
        count = SCHEDULES[name].padded(wanted, ranks, ranks * stages_per_rank)
        assert wanted <= count < wanted + ranks * stages_per_rank
        for rank, done in enumerate(actions(name, ranks, stages_per_rank, count)):
            held = {
                s
                for s in range(ranks * stages_per_rank)
                if rank_of(s, ranks, v_shaped=SCHEDULES[name].v_shaped) == rank
            }
            for kinds in ("F", "BI", "BW"):
                computed = [(a.stage, a.micro_batch) for a in done if a.kind in kinds]
                assert sorted(computed) == [(s, i) for s in sorted(held) for i in range(count)]


@pytest.mark.parametrize(
    ("name", "wrong"), [("1F1B", 2), ("GPipe", 2), ("ZBVZeroBubble", 1), ("DualPipeV", 3)]
)
def test_trap_23_stages_per_rank_that_a_schedule_does_not_take(name: str, wrong: int) -> None:
    with pytest.raises(UsageError, match=rf"{name} takes . stages? a rank, not {wrong}"):
        config_from(
            {
                "distributed.strategy": "pipeline",
                "distributed.pipeline.schedule": name,
                "distributed.pipeline.stages_per_rank": wrong,
            }
        )


def test_runs_are_filled_up_with_copies_of_no_weight() -> None:
    micro_batches = [MicroBatch(i, f"batch {i}") for i in range(7)]
    runs = cut_into_runs(micro_batches, 3, lambda count: max(count, 2))
    assert [[s.index for s in run] for run in runs] == [[0, 1, 2], [3, 4, 5], [6, 6]]
    assert [s.real for s in runs[-1]] == [True, False]
    assert runs[-1][1].batch == "batch 6"
    assert [len(run) for run in cut_into_runs(micro_batches, None, lambda count: 8)] == [8]


# ---- time ----


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_trap_45_gpipe_and_1f1b_wait_alike_and_stages_divide_the_wait(
    ranks: int, micro_batches: int
) -> None:
    """GPipe is called bubble-minimal: it is not. (p-1)/(m+p-1) for both, (p-1)/(V·m+p-1) with V
    stages a rank.
    """
    p = ranks
    m = micro_batches
    for name in ("GPipe", "1F1B"):
        assert timeline(name, p, 1, m).bubble == pytest.approx(float(Fraction(p - 1, m + p - 1)))
    for laps in (2, 3):
        for name in ("Interleaved1F1B", "LoopedBFS"):
            assert timeline(name, p, laps, m).bubble == pytest.approx(
                float(Fraction(p - 1, laps * m + p - 1))
            )
    assert max(timeline("GPipe", p, 1, m).kept()) == m
    assert timeline("1F1B", p, 1, m).kept() == [p - rank for rank in range(p)]


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_split_backward_passes_wait_less(name: str) -> None:
    assert timeline(name, 4, 2, 16).bubble < timeline("Interleaved1F1B", 4, 2, 16).bubble


def test_the_picture() -> None:
    assert picture("1F1B", 2, 1, 3).splitlines() == [
        "1F1B, 2 ranks, 3 micro-batches (F forward, B backward, twice as long)",
        "rank 0  F0 F1 ·  ·  B0 B0 F2 B1 B1 ·  B2 B2",
        "rank 1  ·  F0 B0 B0 F1 B1 B1 F2 B2 B2 ·  ·",
        "bubble: ranks wait 25.0% of the time = (p-1)/(m+p-1) = 1/4",
        "kept at most: 2, 1 activations of a micro-batch, by rank",
    ]


@pytest.mark.parametrize(("name", "stages_per_rank"), ONE_OR_TWO)
def test_a_picture_of_every_schedule(name: str, stages_per_rank: int) -> None:
    text = picture(name, 4, stages_per_rank, 6)
    assert text.startswith(f"{name}, 4 ranks")
    assert sum(line.startswith("rank ") for line in text.splitlines()) == 4
    assert "filled up to" in text or name in ("GPipe", "1F1B", "LoopedBFS", "ZBVZeroBubble")
    assert max(len(line) for line in text.splitlines()) < 300


def test_the_command_line_draws_the_schedule_of_a_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [
        "training.global_batch_size=32",
        "training.batch_size=2",
        "distributed.pipeline_size=4",
    ]
    assert (
        main(["config", "show", "trainers/pipeline.yaml", "--schedule", "--ranks", "8", *sizes])
        == EXIT_DONE
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("1F1B, 4 ranks, 8 micro-batches")  # on each of two pipelines
    assert sum(line.startswith("rank ") for line in shown) == 4
    assert main(["config", "show", "trainers/hybrid.yaml", "--schedule"]) == EXIT_USAGE
    assert "strategy fsdp has no schedule" in capsys.readouterr().err
