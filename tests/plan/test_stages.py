"""What a stage's passes cost: the two halves of a backward pass are measured, and the time of a
step follows.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.config import config_from
from lockstep.costs.hardware import Cost, cluster_of
from lockstep.layout import Layout
from lockstep.models import get_model
from lockstep.parallel.pipeline.plan import StageTime, pipeline_step
from lockstep.plan.candidates import evaluate_layout
from lockstep.plan.layouts import model_size_of
from lockstep.plan.rehearsal import Rehearsal, Work
from lockstep.plan.stages import rehearse_rank
from lockstep.plan.workload import Workload

IDS = torch.zeros(16, dtype=torch.int64)
SPLIT = {"distributed.strategy": "pipeline", "distributed.pipeline.schedule": "ZBVZeroBubble"}
SPLIT |= {"distributed.pipeline.stages_per_rank": 2, "training.batch_size": 2}
LAYOUT = Layout("pipeline", 2, 1)


def workload(n_layer: int = 8, name: str = "transformer", **more: Any) -> Workload:
    sizes = {"n_layer": n_layer, "n_embd": 32, "n_head": 2, "vocab_size": 64, **more}
    return Workload(lambda: get_model(name)(**sizes), {"input_ids": IDS, "targets": IDS})


def stages_of(work: Workload, settings: dict[str, Any], rank: int = 1) -> dict[int, Work]:
    return rehearse_rank(
        work, config_from(settings), LAYOUT, rank, micro_batches=4, device_type="cpu"
    ).stages


def together(work: Work) -> Cost:
    assert work.halves is not None
    return work.halves[0].plus(work.halves[1])


def test_two_halves_cost_what_the_pass_at_once_does_where_each_weight_is_used_once() -> None:
    for work in stages_of(workload(), SPLIT).values():
        assert work.halves is not None
        assert all(half.flops > 0 and half.moved > 0 for half in work.halves)
        assert work.backward.flops <= together(work).flops <= 1.1 * work.backward.flops
        assert work.backward.moved <= together(work).moved <= 1.1 * work.backward.moved


def test_two_halves_cost_more_than_the_pass_at_once_where_layers_share_weights() -> None:
    """The second half goes all the way from the outputs again, and makes products of the first
    anew.
    """
    for work in stages_of(workload(name="bdh", mlp_multiplier=4), SPLIT).values():
        assert 1.3 < together(work).flops / work.backward.flops < 2.0
        assert 1.3 < together(work).moved / work.backward.moved < 2.0


def test_a_schedule_without_halves_has_none() -> None:
    schedule = {
        **SPLIT,
        "distributed.pipeline.schedule": "1F1B",
        "distributed.pipeline.stages_per_rank": 1,
    }
    assert all(work.halves is None for work in stages_of(workload(), schedule).values())


def test_where_the_halves_run_together_the_first_costs_all() -> None:
    """Recomputed blocks would be recomputed twice: the executor computes all gradients with those
    of inputs.
    """
    for work in stages_of(
        workload(), {**SPLIT, "training.gradient_checkpointing": "full"}
    ).values():
        assert work.halves == (work.backward, Cost())


@pytest.mark.full  # test_memory.py leaves blocks out of a pass at once
def test_blocks_that_are_left_out_of_the_rehearsal_cost_as_much_in_halves() -> None:
    long, longer = (stages_of(workload(n_layer), SPLIT) for n_layer in (24, 40))
    for stage, work in long.items():
        ratio = together(work).moved / work.backward.moved
        assert together(longer[stage]).moved / longer[stage].backward.moved == pytest.approx(
            ratio, rel=0.1
        )
        assert longer[stage].backward.moved > 1.3 * work.backward.moved


def test_a_step_takes_the_time_of_both_halves() -> None:
    config = config_from(SPLIT)
    cluster = cluster_of(2, "A100-80GB")
    plain = [StageTime(1.0, 2.0, 0.0, 0.0) for _ in range(4)]
    as_equal = pipeline_step(plain, config.step, LAYOUT, cluster, 8)
    measured = [StageTime(1.0, 2.0, 0.0, 0.0, (1.5, 1.25)) for _ in range(4)]
    found = pipeline_step(measured, config.step, LAYOUT, cluster, 8)
    # 8 micro-batches on 2 stages of a rank
    assert found.compute == pytest.approx(as_equal.compute + 8 * 2 * 0.75)


def test_a_plan_times_a_step_by_the_halves_that_it_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = workload(name="bdh", mlp_multiplier=4)
    config = config_from({**SPLIT, "training.global_batch_size": 16})
    cluster = cluster_of(2, "A100-80GB")
    size = model_size_of(work, config)
    measured = evaluate_layout(work, config, cluster, {}, size)

    def without_halves(*args: Any, **settings: Any) -> Rehearsal:
        found = rehearse_rank(*args, **settings)
        at_once = {stage: replace(each, halves=None) for stage, each in found.stages.items()}
        return replace(found, stages=at_once)

    monkeypatch.setattr("lockstep.plan.stages.rehearse_rank", without_halves)
    as_equal = evaluate_layout(work, config, cluster, {}, size)
    assert measured.step is not None
    assert as_equal.step is not None
    assert measured.step.compute > 1.05 * as_equal.step.compute
