"""Loops of the caller's own, `steps` and `training_step`: what `train` records, saves, resumes and
follows, they do.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Trainer, WeightAverage, checkpoint
from lockstep.bad_numbers import BadNumbersError
from lockstep.checkpoint import digest
from lockstep.errors import UsageError
from lockstep.run_directory.records import RunDirectory
from tests.ranks import run_ranks

STEPS = 12


def points(samples: int = 48, sign: float = 1.0) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, sign * x.sum(1, keepdim=True))


def made(folder: Path | None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    usual = {
        "loss_fn": nn.MSELoss(),
        "batch_size": 4,
        "max_steps": STEPS,
        "save_steps": 4,
        "log_steps": 1,
    }
    if folder is None:
        del usual["save_steps"]
    return Trainer(
        nn.Linear(4, 1), output_dir=folder, **{"learning_rate": 0.01, **usual, **settings}
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(RunDirectory(folder).read_metrics())


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def saved(folder: Path) -> list[int]:
    return [
        checkpoint.step_of(path.name) or 0
        for path in checkpoint.list_checkpoints(folder / "checkpoints")
    ]


def kinds(folder: Path) -> list[str]:
    return [
        event["kind"]
        for event in RunDirectory(folder).read_events()
        if event["kind"] != "save_stall"
    ]


def by_calls(trainer: Trainer) -> None:
    """Train by `training_step` on the samples of each step, in the order of `train`."""
    source, _ = trainer._start.open_data(points(), None)
    for batches in source:
        for micro_batch in batches.mine:
            trainer.training_step(micro_batch.batch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    made(folder, eval_steps=None).train(points())
    return folder


@pytest.mark.parametrize("way", ["steps", "training_step"])
def test_a_loop_of_ones_own_records_and_saves_what_train_does(
    trained: Path, tmp_path: Path, way: str
) -> None:
    trainer = made(tmp_path)
    if way == "steps":
        assert [record.step for record in trainer.steps(points())] == list(range(1, STEPS + 1))
    else:
        by_calls(trainer)
    assert trainer.done
    trainer._open.close()
    assert losses(tmp_path) == losses(trained)
    assert saved(tmp_path) == saved(trained) == [4, 8, 12]
    assert digest(tmp_path / "checkpoints/step-00000012") == digest(
        trained / "checkpoints/step-00000012"
    )
    assert kinds(tmp_path) == kinds(trained)
    assert (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("way", ["steps", "training_step"])
def test_a_loop_of_ones_own_resumes_by_itself(trained: Path, tmp_path: Path, way: str) -> None:
    for record in made(tmp_path).steps(points()):
        if record.step == 7:
            break
    assert saved(tmp_path)[-1] == 7, "a loop that is left is saved"
    again = made(tmp_path)
    if way == "steps":
        assert [record.step for record in again.steps(points())] == list(range(8, STEPS + 1))
    else:  # where his data go on is the caller's to say
        for x, y in DataLoader(points(), batch_size=4):
            if not again.done:
                again.training_step((x, y))
        assert list(losses(tmp_path))[:8] == list(range(1, 9))
    again._open.close()
    assert "resume" in kinds(tmp_path)
    if way == "steps":
        assert losses(tmp_path) == losses(trained)
        assert digest(tmp_path / "checkpoints/step-00000012") == digest(
            trained / "checkpoints/step-00000012"
        )


def test_what_was_left_by_an_error_of_the_callers_code_is_saved(tmp_path: Path) -> None:
    def fails() -> None:
        for record in made(tmp_path).steps(points()):
            if record.step == 6:
                raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fails()
    assert saved(tmp_path)[-1] == 6


def to_the_end(trainer: Trainer, way: str, data: TensorDataset) -> None:
    if way == "train":
        trainer.train(data)
    elif way == "steps":
        list(trainer.steps(data))
    else:
        for batch in DataLoader(data, batch_size=4):
            trainer.training_step(batch)


@pytest.mark.parametrize("way", ["train", "steps", "training_step"])
def test_a_run_that_bad_numbers_end_is_not_saved_with_them(tmp_path: Path, way: str) -> None:
    x = torch.randn(48, 4)
    x[20:] = float("nan")
    data = TensorDataset(x, x[:, :1])
    trainer = made(tmp_path, shuffle=False) if way != "training_step" else made(tmp_path)
    with pytest.raises(BadNumbersError, match="step 6"):
        to_the_end(trainer, way, data)
    trainer._open.close()
    assert saved(tmp_path) == [4]
    assert "bad_numbers" in kinds(tmp_path)


def test_loops_after_each_other_are_one_run(trained: Path, tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=None)
    for epoch in range(3):
        list(trainer.steps(points(16), epochs=epoch + 1))
        trainer.evaluate(points())
    trainer._open.close()
    assert [event for event in kinds(tmp_path) if event in ("start", "stop")] == ["start", "stop"]
    assert sorted(losses(tmp_path)) == list(range(1, 13))
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row] == [4, 8, 12]
    assert saved(tmp_path) == [4, 8, 12]


def test_evaluations_in_a_loop_stop_it_and_choose_the_best(tmp_path: Path) -> None:
    trainer = made(
        tmp_path,
        keep_best="eval_loss",
        load_best=True,
        early_stopping={"patience": 2},
        max_steps=40,
    )
    seen = []
    for record in trainer.steps(points(), epochs=4):
        worse = points(sign=3.0) if record.step > 3 else points()
        seen.append(trainer.evaluate(worse))
        trainer.evaluate(points(), counts=False)
    assert len(seen) == 5, "two evaluations after the best of step 3"
    assert trainer.step.progress.step == 3, "the best is loaded"
    assert "step-00000003" in str(trainer.best_checkpoint)
    assert [row["eval_loss"] for row in rows(tmp_path) if "eval_loss" in row] == pytest.approx(seen)
    assert "early_stop" in kinds(tmp_path)
    again = made(tmp_path, early_stopping={"patience": 2}, max_steps=40)
    with pytest.warns(
        UserWarning, match="no step is left to take: stopped early: eval_loss has not"
    ):
        assert list(again.steps(points(), epochs=4)) == []


@pytest.mark.parametrize("way", ["steps", "training_step"])
def test_a_scheduler_follows_evaluations_in_a_loop(way: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    trainer = Trainer(model, optimizer, nn.MSELoss(), scheduler=plateau, batch_size=4, max_steps=4)
    rates = []
    steps = (
        trainer.steps(points())
        if way == "steps"
        else (trainer.training_step(b) for b in [points()[:4]] * 4)
    )
    for number, _ in enumerate(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        trainer.evaluate(points(sign=1.0 + 9.0 * number))
    assert rates == [0.1, 0.1, 0.05, 0.025]


def test_the_schedule_of_training_step_follows_max_steps() -> None:
    expected = [
        record.lr for record in made(None, lr_schedule="cosine", warmup_steps=2).steps(points())
    ]
    trainer = made(None, lr_schedule="cosine", warmup_steps=2)
    rates = []
    for batch in DataLoader(points(), batch_size=4):
        trainer.training_step(batch)
        assert trainer.last_record is not None
        rates.append(trainer.last_record.lr)
    assert rates == expected
    with pytest.warns(
        UserWarning, match=r"max_steps 12 are done, and the loop of training_step goes on"
    ):
        trainer.training_step(points()[:4])
    with pytest.raises(UsageError, match="lr_schedule cosine needs the number of steps"):
        made(None, lr_schedule="cosine", max_steps=None).training_step(points()[:4])


@pytest.mark.parametrize("recorded", [False, True])
def test_a_loop_in_a_loop_is_an_error_at_once(tmp_path: Path, recorded: bool) -> None:
    trainer = made(tmp_path if recorded else None)
    steps = []
    for record in trainer.steps(points()):
        steps.append(record.step)
        if record.step == 3:
            with pytest.raises(
                UsageError, match=r"Trainer\.steps .*is called while a loop over the steps"
            ):
                next(trainer.steps(points()))
        if record.step == 5:
            with pytest.raises(
                UsageError, match=r"Trainer\.train .*is called while a loop over the steps"
            ):
                trainer.train(points())
        if record.step == 7:
            break
    steps += [record.step for record in trainer.steps(points())]
    assert steps == list(range(1, STEPS + 1)), "what was refused took no step, and ended none"


@pytest.mark.parametrize("way", ["train", "steps", "training_step"])
def test_a_path_to_resume_from_needs_no_run_directory(
    trained: Path, tmp_path: Path, way: str
) -> None:
    def first(trainer: Trainer) -> int:
        if way == "train":
            record = trainer.train(points())
            assert record is not None
            return trainer.step.progress.updates
        if way == "steps":
            return next(trainer.steps(points())).step
        trainer.training_step(points()[:4])
        return trainer.step.progress.step

    assert first(made(None, resume=str(trained / "checkpoints/step-00000008"))) == (
        12 if way == "train" else 9
    )
    with pytest.raises(UsageError, match="is not a checkpoint"):
        first(made(None, resume=str(tmp_path / "nowhere")))


def test_a_checkpoint_that_is_loaded_is_compared_as_in_resume(trained: Path, capsys: Any) -> None:
    path = trained / "checkpoints/step-00000008"
    with pytest.raises(UsageError, match=r"training\.seed 1337 → 7"):
        made(None, seed=7).load_checkpoint(path)
    changed = made(None, learning_rate=0.02)
    assert changed.load_checkpoint(path)[0] == 8
    assert next(changed.steps(points())).lr == 0.02
    assert "training.learning_rate 0.01 → 0.02" in capsys.readouterr().out


def test_the_callers_saves_follow_the_settings(tmp_path: Path) -> None:
    trainer = made(tmp_path, format="full", save_steps=100, save_total_limit=2)
    for record in trainer.steps(points()):
        if record.step < 6:
            trainer.save_checkpoint()
    assert saved(tmp_path) == [5, 12]
    elsewhere = tmp_path / "elsewhere"
    # a script that is started a second time does not end with an error when it is done
    for _ in range(2):
        path = trainer.save_checkpoint(elsewhere, metadata={"note": "mine"})
    assert json.loads((Path(str(path)) / "state.json").read_text())["metadata"] == {"note": "mine"}
    assert [name.name for name in (Path(str(path)) / "model").iterdir()] == [
        "model.safetensors"
    ] or len(list((Path(str(path)) / "model").iterdir())) == len(
        list((tmp_path / "checkpoints/step-00000012/model").iterdir())
    )
    assert len(list(elsewhere.iterdir())) == 2, "the older one is kept under another name"


def test_micro_batches_that_wait_for_an_update_are_told(tmp_path: Path) -> None:
    trainer = made(None, gradient_accumulation_steps=2, max_steps=None)
    for _ in range(3):
        trainer.training_step(points()[:4])
    with pytest.warns(UserWarning, match="1 of 2 micro-batches of a step wait for their update"):
        trainer.save_checkpoint(tmp_path)


def test_batches_of_another_size_than_the_settings_say_are_refused() -> None:
    ready = list(DataLoader(points(), batch_size=16))
    with pytest.raises(
        UsageError, match=r"the first batch has 16 samples, and training\.batch_size is 4"
    ):
        made(None).training_step(ready[0])
    with pytest.raises(
        UsageError, match=r"the first batch has 16 samples, and training\.batch_size is 4"
    ):
        next(made(None).steps(ready))
    scaled = Trainer(
        nn.Linear(4, 1),
        loss_fn=nn.MSELoss(),
        learning_rate=0.1,
        lr_scaling="linear",
        base_batch_size=8,
        max_steps=1,
    )
    assert next(scaled.steps(ready)).lr == pytest.approx(0.2)


def on_two_ranks(name: str) -> dict[str, Any]:
    """Loops that all ranks leave, and one that one rank alone leaves by an error of its own."""
    folder = Path(name)
    said = {}
    trainer = made(folder / "left", strategy="ddp")
    for record in trainer.steps(points(), epochs=4):
        if record.step == 7:
            break
    trainer.evaluate(points())
    trainer._open.close()
    dist.barrier()
    said["left"] = saved(folder / "left")
    again = made(folder / "left", strategy="ddp")
    said["again"] = [record.step for record in again.steps(points(), epochs=4)]
    stopped = made(folder / "stopped", strategy="ddp", early_stopping={"patience": 1})
    said["stopped"] = []
    for record in stopped.steps(points(), epochs=4):
        said["stopped"].append(record.step)
        stopped.evaluate(points(sign=-1.0))
    asked = made(folder / "asked", strategy="ddp")
    for record in asked.steps(points(), epochs=4):
        asked.step.stop_asked = record.step == 3 and dist.get_rank() == 1
        said["asked"] = record.step
    dist.barrier()
    said["asked saved"] = saved(folder / "asked")
    return said


def test_loops_on_several_ranks_are_saved_where_all_of_them_are(tmp_path: Path) -> None:
    for said in run_ranks(on_two_ranks, 2, str(tmp_path)):
        assert said["left"] == [4, 7], "in the next call that all ranks make"
        assert said["again"] == [8, 9, 10, 11, 12]
        assert said["stopped"] == [1, 2]
        assert (said["asked"], said["asked saved"]) == (4, [4]), "saved at the next step, and ended"


def test_the_weights_that_are_evaluated_are_those_that_are_taken_out(tmp_path: Path) -> None:
    average = WeightAverage(0.5, evaluate=True)
    trainer = made(
        tmp_path, after_update=average, keep_best="eval_loss", load_best=True, eval_steps=4
    )
    trainer.train(points(), points())
    best = trainer.best_checkpoint
    assert best is not None
    evaluated = trainer.evaluate(points(), counts=False)
    raw = trainer.placed.parameters["weight"].detach().clone()
    for state in (trainer.state_dict(), checkpoint.weights(best)):
        model = nn.Linear(4, 1)
        model.load_state_dict(state)
        assert not torch.equal(model.weight, raw)
        assert nn.MSELoss()(
            model(points().tensors[0]), points().tensors[1]
        ).item() == pytest.approx(evaluated)
    newest = checkpoint.weights(tmp_path)
    assert torch.equal(
        newest["weight"], checkpoint.weights(tmp_path / "checkpoints/step-00000012")["weight"]
    )


def test_a_rate_that_the_loop_sets_stays() -> None:
    trainer = made(None, lr_schedule="linear", min_lr_ratio=0.0)
    rates = []
    for record in trainer.steps(points()):
        rates.append(record.lr)
        if record.step == 6:
            trainer.optimizer.param_groups[0]["lr"] *= 10
    plain = [
        record.lr for record in made(None, lr_schedule="linear", min_lr_ratio=0.0).steps(points())
    ]
    assert rates[:6] == plain[:6]
    assert rates[6:] == pytest.approx([10 * rate for rate in plain[6:]])
