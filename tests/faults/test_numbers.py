"""Losses that are not numbers, and spikes: skipped, gone back from, or the end."""

import math
import pickle
from pathlib import Path

import pytest
import torch

from lockstep.bad_numbers import Anomaly, AnomalyDetector, BadNumbersError
from lockstep.checkpoint import digest
from lockstep.config import BadNumbersConfig
from tests.faults.tiny import Points, events, samples_of, steps, trainer

BAD = samples_of(7)


def skipping(**more: object) -> dict[str, object]:
    return {
        "max_steps": 12,
        "batch_size": 4,
        "global_batch_size": 8,
        "eval_steps": None,
        "bad_numbers": more,
    }


@pytest.mark.fault(
    "numbers: a loss of NaN, `action: stop`",
    "a sample holds NaN; so does the loss of its step",
    "the run stops before the update with exit code 1, names the step, and lists the samples of the"
    " global batch in events.jsonl; the checkpoints before are good",
)
def test_nan_stops(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    with pytest.raises(BadNumbersError, match="the loss of step 7 is nan"):
        run.train(Points(nan=(BAD[0][1],)))
    (event,) = events(tmp_path, "bad_numbers")
    assert event["samples"] == BAD
    assert event["step"] == 7
    assert all(torch.isfinite(p).all() for p in run.placed.parameters.values())
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        f"step-{s:08}" for s in (2, 4, 6)
    ]


@pytest.mark.fault(
    "numbers: a loss of NaN, `action: skip`",
    "a sample holds NaN",
    "no rank makes an update from that step, running statistics are put back, the step is in the"
    " list of skipped ones, its samples in events.jsonl; the schedule does not move",
)
def test_nan_is_skipped(tmp_path: Path) -> None:
    run = trainer(tmp_path, training=skipping(action="skip"))
    run.train(Points(nan=(BAD[1][2],)))
    assert run.step.progress.skipped == [6]
    assert (run.step.progress.step, run.step.progress.updates) == (12, 11)
    assert steps(tmp_path) == list(range(1, 13))
    assert events(tmp_path, "bad_numbers")[0]["samples"] == BAD
    assert all(
        torch.isfinite(t).all()
        for t in [*run.placed.parameters.values(), *run.placed.buffers.values()]
    )


@pytest.mark.fault(
    "numbers: a loss of NaN, `action: rollback`",
    "a sample holds NaN",
    "the run goes back to the newest checkpoint, later metrics and checkpoints are set aside, that"
    " step's data are passed over; the result is that of `skip`",
)
def test_nan_rolls_back(tmp_path: Path) -> None:
    back = trainer(tmp_path / "back", training=skipping(action="rollback"))
    back.train(Points(nan=(BAD[0][0],)))
    assert back.step.progress.skipped == [6]
    (event,) = events(tmp_path / "back", "rollback")
    assert (event["step"], event["passed_over"]) == (6, 7)
    assert steps(tmp_path / "back") == [*range(1, 7), *range(8, 13)]
    trainer(tmp_path / "skip", training=skipping(action="skip")).train(Points(nan=(BAD[0][0],)))
    last = "checkpoints/step-00000012"
    assert digest(tmp_path / "back" / last) == digest(tmp_path / "skip" / last)


@pytest.mark.fault(
    "numbers: a rollback before there is a checkpoint",
    "the loss of an early step is NaN, `action: rollback`",
    "the run stops with exit code 1",
)
def test_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(BadNumbersError, match="step 1 is nan"):
        trainer(tmp_path, training=skipping(action="rollback")).train(
            Points(nan=(samples_of(1)[0][0],))
        )


@pytest.mark.fault(
    "numbers: a spike of the loss",
    "one batch's targets are ten thousand times too large; the loss is finite",
    "with `spike_factor` set, it is handled like NaN: more than so many times the running median of"
    " the losses",
)
def test_a_spike_is_skipped(tmp_path: Path) -> None:
    settings = skipping(action="skip", spike_factor=100.0, window=4)
    run = trainer(tmp_path, training=settings)
    run.train(Points(huge=(BAD[0][3],)))
    assert run.step.progress.skipped == [6]
    assert "times the median" in events(tmp_path, "bad_numbers")[0]["what"]


def test_what_decides_about_spikes_is_part_of_the_state(tmp_path: Path) -> None:
    """Killed between the median's losses and the spike, a run would otherwise train on it."""
    settings = skipping(action="skip", spike_factor=100.0, window=4) | {"max_steps": 6}
    trainer(tmp_path, training=settings).train(Points())
    resumed = trainer(tmp_path, training=settings | {"max_steps": 8})
    resumed.resume("auto")
    resumed.train(Points(huge=(BAD[0][3],)))
    assert resumed.step.progress.skipped == [6]


@pytest.mark.fault(
    "numbers: every loss is NaN",
    "the training has diverged: skipping one batch does not help",
    "after `patience` bad steps in order the run stops with exit code 1",
)
def test_patience_ends(tmp_path: Path) -> None:
    with pytest.raises(BadNumbersError, match="the last of 3 bad steps in order"):
        trainer(tmp_path, training=skipping(action="skip", patience=3)).train(
            Points(nan=tuple(range(96)))
        )


def test_a_bad_step_can_be_told_between_processes() -> None:
    """It travels as a pickle."""
    error = BadNumbersError(
        Anomaly(7, "the loss of step 7 is nan", math.nan, 1.0), rolls_back=True, consecutive=3
    )
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, BadNumbersError)
    assert (str(again), again.rolls_back, again.consecutive) == (str(error), True, 3)


def test_trap_61_numbers_are_read_without_waiting_for_the_device() -> None:
    """A check that reads the loss each step stops a GPU's queue; only `action: skip`, whose update
    depends on it, may.

    On a device that is no CPU, `look` hands back what was known of the step before.
    """

    class Late:
        """Stands for a CUDA event."""

        waited = 0

        def record(self) -> None: ...

        def synchronize(self) -> None:
            Late.waited += 1

    detector = AnomalyDetector(BadNumbersConfig())
    detector._pending = (6, torch.tensor([float("nan"), 1.0, 0.0, 0.0]), Late())
    assert Late.waited == 0
    numbers = detector.flush()
    assert numbers.anomaly is not None
    assert numbers.anomaly.step == 6
    assert not detector.skips
    assert detector.flush().anomaly is None


@pytest.mark.fault(
    "numbers: NaN just before a save",
    "the loss of the very step that is to be saved is NaN, and on a GPU not read yet",
    "it is read before the snapshot is taken: no committed checkpoint holds NaN",
)
def test_no_checkpoint_holds_nan(tmp_path: Path) -> None:
    with pytest.raises(BadNumbersError, match="step 8"):
        trainer(tmp_path).train(Points(nan=(samples_of(8)[0][0],)))
    assert not (tmp_path / "checkpoints/step-00000008").exists()
