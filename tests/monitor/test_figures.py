"""Phases, stragglers, memory and FLOPs on one rank, with clocks and figures that the test makes."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lockstep.config import MonitorConfig, StragglerConfig, config_from
from lockstep.costs.hardware import GPUS
from lockstep.monitor import Figures, Monitor, PhaseClock, ResourceMonitor
from lockstep.monitor import figures as figures_module
from lockstep.monitor.figures import StragglerWatch, first_step_counted, peak_flops, spread
from lockstep.monitor.meters import STEP_PHASES, Memory, waits_counted
from lockstep.monitor.profiling import length, union, within
from lockstep.run_directory.records import RunDirectory, StepRecord
from lockstep.trainer import Trainer, run_monitor
from tests.parity.toy import Tokens, language_model


def test_phases_add_up_to_the_time_there_was() -> None:
    now = [0.0]
    clock = PhaseClock(clock=lambda: now[0])
    for phase, seconds in (
        ("data", 1.0),
        ("forward_backward", 4.0),
        ("optimizer", 2.0),
        ("data", 0.5),
    ):
        clock.enter(phase)
        now[0] += seconds
    with clock.during("evaluation"):
        now[0] += 10.0
    found = clock.read()
    assert found["data"] == 1.5
    assert found["forward_backward"] == 4.0
    assert sum(found.values()) == 17.5
    assert clock.take_pauses() == 10.0
    assert clock.take_pauses() == 0.0
    assert sum(clock.read().values()) == 0.0


def test_waiting_for_other_ranks_is_told_apart_within_a_step_only() -> None:
    now = [0.0]
    clock = PhaseClock(clock=lambda: now[0])

    class Work(torch.distributed.Work):
        def wait(self, *_: Any) -> bool:  # a subclass of Python keeps its own method
            return True

    original = torch.distributed.Work.wait
    with waits_counted(clock):
        assert torch.distributed.Work.wait is not original
        clock.enter("evaluation")
        assert not clock.waits_here()
        clock.enter("forward_backward")
        assert clock.waits_here()
    assert torch.distributed.Work.wait is original


def test_of_two_loops_that_are_open_either_may_end_first() -> None:
    """As generators of two trainers do, one of which is dropped later."""
    original = torch.distributed.Work.wait
    first = waits_counted(PhaseClock())
    second = waits_counted(PhaseClock())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.distributed.Work.wait is not original
    second.__exit__(None, None, None)
    assert torch.distributed.Work.wait is original


def test_figures_are_gathered_about_once_a_second() -> None:
    now = [0.0]
    clock = PhaseClock(clock=lambda: now[0])
    figures = Figures(clock, memory=lambda: Memory(1, 2, 3, 4, 5))
    gathered = []
    clock.enter("forward_backward")
    for step in range(1, 1001):
        now[0] += 0.01
        figures.count()
        if figures.due(step, last=step == 1000):
            row = figures.row(figures.collect(step))
            gathered.append(step)
            assert row["phases"]["forward_backward"][1] == pytest.approx(0.01)
            assert row["memory"]["peak"] == [3.0, 3.0, 3.0, 0]
    assert len(gathered) == pytest.approx(11, abs=2), "10 s"
    assert gathered[0] == 1
    assert gathered[-1] == 1000


def test_phases_of_a_row_add_up_to_its_step_wherever_the_rank_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine any time can pass between two lines: here it does at each look."""
    monkeypatch.setattr(figures_module, "SECONDS_BETWEEN", 0.0)
    looks = Random(1)
    now = [0.0]

    def interrupted() -> float:
        now[0] += looks.expovariate(1.0)
        return now[0]

    clock = PhaseClock(clock=interrupted)
    run = RunDirectory(tmp_path)
    run.create()
    monitor = Monitor(
        MonitorConfig(log_steps=2, sinks=["jsonl"]),
        run,
        is_main=True,
        figures=Figures(clock, memory=lambda: Memory(1, 2, 3, 4, 5)),
    )
    for step in range(1, 21):
        for phase in ("data", "forward_backward", "optimizer", "other"):
            clock.enter(phase)
        monitor.on_step(StepRecord(step=step, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1))
        if step % 3 == 0:
            with clock.during("evaluation"):
                now[0] += 100.0
    monitor.close()
    rows = run.read_metrics()
    assert len(rows) == 11
    for row in rows:
        seconds = [row["phases"][name][1] for name in STEP_PHASES if name in row["phases"]]
        assert sum(seconds) == pytest.approx(row["step_seconds"], rel=1e-5)


def table(**columns: list[float]) -> dict[str, list[float]]:
    ranks = len(next(iter(columns.values())))
    full = {name: columns.get(name, [0.0] * ranks) for name in STEP_PHASES}
    own = [
        sum(full[name][rank] for name in STEP_PHASES if name != "communication")
        for rank in range(ranks)
    ]
    return full | {"own": own}


def test_a_slow_rank_is_named_once_it_stays_slow() -> None:
    watch = StragglerWatch(StragglerConfig(threshold=1.3, patience=3))
    slow = table(
        forward_backward=[0.1, 0.1, 0.2, 0.1], communication=[0.1, 0.1, 0.0, 0.1], data=[0.01] * 4
    )
    even = table(forward_backward=[0.1, 0.11, 0.12, 0.1])
    assert [len(watch.look(t)) for t in (slow, slow, even, slow, slow)] == [0] * 5, (
        "not persistently"
    )
    (named,) = watch.look(slow)
    assert (named.rank, named.phase) == (2, "forward_backward")
    assert named.ratio == pytest.approx(0.21 / 0.11)
    assert watch.look(slow) == [], "once"
    assert "rank 2 on node7 is slow" in named.sentence("node7")
    tiny = table(data=[1e-5, 9e-5])
    assert [watch.look(tiny) for _ in range(5)] == [[]] * 5, "clocks differ by as much"
    assert StragglerWatch(StragglerConfig(patience=1)).look(table(data=[1.0])) == [], (
        "one rank has nobody to wait for"
    )


def test_memory_that_is_nearly_full_or_uneven_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[str] = []
    monitor = ResourceMonitor(0.9, True, lambda kind, **_: events.append(kind))

    def look(peaks: list[float]) -> None:
        memory = {
            "peak": spread(peaks),
            "total": spread([100.0] * len(peaks)),
            "reserved": spread(peaks),
        }
        monitor(
            StepRecord(step=1, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1, memory=memory)
        )

    with caplog.at_level(logging.WARNING, "lockstep"):
        look([50.0, 52.0])
        assert events == []
        look([50.0, 95.0])
        look([50.0, 95.0])
        assert events == ["memory_high", "memory_imbalance"]
        look([50.0, 52.0])
        look([92.0, 95.0])
    assert events == ["memory_high", "memory_imbalance", "memory_high"]
    assert "rank 1 has held" in caplog.text
    ResourceMonitor()(StepRecord(step=1, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1))


def test_flops_are_those_of_the_products_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = Figures(PhaseClock())
    first = first_step_counted(figures)
    a = torch.ones(8, 16, requires_grad=True)
    b = torch.ones(16, 4)
    with first():
        (a @ b).sum().backward()
    assert figures.flops == 2 * 8 * 16 * 4 * 2, "forward, and the gradient of one factor"
    with first():
        a @ b
    assert figures.flops == 2 * 8 * 16 * 4 * 2, "of the first step only"

    of_runs: list[Figures] = []

    def counted_into(figures: Figures) -> Callable[[], AbstractContextManager[None]]:
        of_runs.append(figures)
        return first_step_counted(figures)

    def losses(output_dir: Path | None) -> list[float]:
        settings = {
            "training.batch_size": 2,
            "training.global_batch_size": 8,
            "training.max_steps": 3,
            "precision.mode": "fp32",
        }
        trainer = Trainer(
            language_model("transformer"), config=config_from(settings), output_dir=output_dir
        )
        return [float(record.loss) for record in trainer.steps(Tokens())]

    monkeypatch.setattr(run_monitor, "first_step_counted", counted_into)
    plain = losses(None)  # nothing is recorded, so that nothing is counted
    assert not of_runs
    assert losses(tmp_path) == plain
    assert of_runs[0].flops > 1e6


def test_peaks_are_known_or_measured() -> None:
    rate, source = peak_flops(torch.device("cpu"), "fp32")
    assert rate > 1e8
    assert "measured" in source
    for gpu in GPUS.values():
        assert gpu.half >= gpu.tf32 >= 0.99 * gpu.single > 0


def test_stretches_of_time() -> None:
    one = union([(0, 2), (1, 3), (5, 6)])
    assert one == [(0, 3), (5, 6)]
    assert length(one) == 4
    assert within(one, (1, 5.5)) == [(1, 3), (5, 5.5)]
