"""What is predicted is what tensors take: a part of benchmarks/plan_memory.py, on two ranks."""

import pytest
import torch
from torch import nn

from lockstep.config import config_from
from lockstep.layout import Layout
from lockstep.models import get_model
from lockstep.plan import workload
from lockstep.plan.rehearsal import rehearse
from lockstep.plan.stages import rehearse_rank
from lockstep.plan.workload import Workload
from tests.plan.measured import Case, errors_of, measure, predict
from tests.ranks import run_ranks

PART = [
    Case("transformer", "tensor:2", "none"),
]
REST = [
    Case("bdh", "GPipe", "none", 4),
    Case("mixture", "fsdp:2*expert:2", "full"),
    Case("transformer", "full_shard", "full"),
    Case("vae", "no_shard", "none"),
    Case("transformer", "ddp", "none"),
    Case("bdh", "shard_grad_op", "none"),
    Case("free_transformer", "1F1B", "full", 4),
    Case("transformer", "context:2", "full"),
    Case("mixture", "ddp:2*expert:2", "none"),
]


@pytest.mark.parametrize(
    "cases", [PART, pytest.param(REST, marks=pytest.mark.full)], ids=["some", "the others"]
)
def test_predicted_peaks_are_within_5_percent_of_tracked_ones(cases: list[Case]) -> None:
    found = run_ranks(measure, 2, cases)
    for index, case in enumerate(cases):
        measured = [rank[index] for rank in found]
        assert all(isinstance(peak, int) for peak in measured), measured
        predicted = predict(case, 2)
        assert all(abs(error) < 0.05 for error in errors_of(case, predicted, measured)), (
            case,
            predicted,
            measured,
        )


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre += x.detach().mean(0)
        return x - self.centre


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Centred(), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "layout", [Layout("ddp", 1, 2), Layout("fsdp", 1, 1, 2), Layout("fsdp", 1, 2, 2)]
)
def test_a_model_with_running_statistics_is_rehearsed_on_several_ranks(layout: Layout) -> None:
    """Ranks gather a record of each micro-batch: there must be room for those of all ranks."""
    work = Workload(
        normalised, (torch.zeros(8), torch.zeros((), dtype=torch.int64)), nn.CrossEntropyLoss()
    )
    named = {"distributed.buffers": {"*.centre": "mean"}, "distributed.reproducible": True}
    for settings in ({}, named):
        config = config_from({"training.batch_size": 4, **settings})
        assert rehearse(work, config, layout, micro_batches=2, device_type="cpu").peak.total > 0


@pytest.mark.parametrize("device_type", ["cuda", pytest.param("cpu", marks=pytest.mark.full)])
def test_a_long_chain_of_equal_blocks_is_planned_from_a_few_of_them(
    monkeypatch, device_type: str
) -> None:  # type: ignore[no-untyped-def]
    ids = torch.zeros(16, dtype=torch.int64)
    work = Workload(
        lambda: get_model("transformer")(n_layer=8, n_embd=32, n_head=2, vocab_size=64),
        {"input_ids": ids, "targets": ids},
    )
    config = config_from({"precision.mode": "fp32", "training.batch_size": 2})
    layout = Layout("fsdp", 1, 1, 2)
    short = rehearse(work, config, layout, micro_batches=2, device_type=device_type)
    monkeypatch.setattr(workload, "KEPT_BLOCKS", 100)
    whole = rehearse(work, config, layout, micro_batches=2, device_type=device_type)
    assert short.peak.total == whole.peak.total
    assert short.persistent == whole.persistent
    assert (short.work.forward, short.work.backward) == (whole.work.forward, whole.work.backward)
    assert short.work.update.moved == pytest.approx(whole.work.update.moved, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_long_stage_is_planned_from_some_of_its_blocks(monkeypatch, checkpointing: str) -> None:  # type: ignore[no-untyped-def]
    ids = torch.zeros(16, dtype=torch.int64)
    work = Workload(
        lambda: get_model("transformer")(n_layer=20, n_embd=32, n_head=2, vocab_size=64),
        {"input_ids": ids, "targets": ids},
    )
    settings = {
        "distributed.strategy": "pipeline",
        "distributed.fsdp.sharding_strategy": "shard_grad_op",
    }
    config = config_from(
        {
            **settings,
            "precision.mode": "fp32",
            "training.batch_size": 2,
            "training.gradient_checkpointing": checkpointing,
        }
    )
    layout = Layout("pipeline", 2, 1, 2)
    short = [rehearse_rank(work, config, layout, rank, micro_batches=4) for rank in (0, 1)]
    monkeypatch.setattr(workload, "KEPT_BLOCKS", 100)
    whole = [rehearse_rank(work, config, layout, rank, micro_batches=4) for rank in (0, 1)]
    for few, all_of_them in zip(short, whole, strict=True):
        assert few.peak == all_of_them.peak
        assert few.persistent == all_of_them.persistent
        assert (few.stages, few.sent) == (all_of_them.stages, all_of_them.sent)
        assert few.work.update.moved == pytest.approx(all_of_them.work.update.moved, rel=0.05)
