"""Nothing that is asked for is silently not done: each setting acts in a way to train, or is
refused, or warned of.
"""

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import lockstep
from lockstep import Trainer
from lockstep.errors import NoEffectWarning, UsageError
from lockstep.heartbeat import writer
from lockstep.heartbeat.watcher import read_limits
from lockstep.process_group import cluster

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
BATCH = (X[:8], X[:8].sum(1, keepdim=True))


def made(own: bool = False, **settings: Any) -> Trainer:
    model = nn.Linear(4, 1)
    if own:
        settings["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, loss_fn=nn.MSELoss(), **{"max_steps": 2, **settings})


def steps(data: Any = DATA, **settings: Any) -> Any:
    return list(made(**settings).steps(data))


def by_calls(**settings: Any) -> Any:
    return made(**{"batch_size": 8, **settings}).training_step(BATCH)


def placed(**settings: Any) -> Any:
    return lockstep.place(nn.Linear(4, 1), loss_fn=nn.MSELoss(), **settings)


def followed(scheduler_metric: str, **settings: Any) -> Any:
    return made(scheduler_metric=scheduler_metric, **settings)


LOADER = DataLoader(DATA, 8)
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "two rates": (
        r"training\.learning_rate means nothing beside an optimizer of your own",
        lambda: made(own=True, learning_rate=0.001),
    ),
    "two decays": (
        r"training\.weight_decay means nothing",
        lambda: made(own=True, weight_decay=0.1),
    ),
    "rescaled": (
        r"training\.base_batch_size, training\.lr_scaling mean nothing",
        lambda: made(own=True, lr_scaling="linear", base_batch_size=8),
    ),
    "the best of nothing": (
        r"checkpoint\.keep_best, checkpoint\.load_best mean nothing without output_dir",
        lambda: made(keep_best="eval_loss", load_best=True),
    ),
    "back to nothing": (
        r"training\.bad_numbers\.action means nothing without output_dir",
        lambda: made(bad_numbers={"action": "rollback"}),
    ),
    "a sink that is not there": ("no module 'nosuch'", lambda: made(sinks=["nosuch:Sink"])),
    "a metric nobody follows": (
        "scheduler_metric is for a ReduceLROnPlateau",
        lambda: followed("eval_f1"),
    ),
    "epochs of calls": (
        r"num_train_epochs means nothing to Trainer\.training_step",
        lambda: by_calls(max_steps=None, num_train_epochs=2),
    ),
    "recomputed calls": (
        r"recompute means nothing to Trainer\.training_step",
        lambda: by_calls(bad_numbers={"recompute": True}),
    ),
    "two lengths": (
        "the run can't have both 5 epochs and 2",
        lambda: list(made(max_steps=None, num_train_epochs=5).steps(DATA, epochs=2)),
    ),
    "never, and a call": (
        r"checkpoint\.resume is never, and resume\('auto'\) is called",
        lambda: made(resume="never").resume("auto"),
    ),
    "the best without evaluations": (
        "eval_loss is never computed",
        lambda: made(keep_best="eval_loss", output_dir="run").train(DATA),
    ),
    "a scheduler for place": (
        r"scheduler means nothing to lockstep\.place",
        lambda: placed(scheduler=1),
    ),
    "a schedule for place": (
        r"training\.lr_schedule means nothing",
        lambda: placed(lr_schedule="cosine"),
    ),
    "a folder for place": (
        r"output_dir means nothing to lockstep\.place",
        lambda: placed(output_dir="run"),
    ),
}
WARNED: dict[str, tuple[str, Callable[[], Any]]] = {
    "saves without a folder": (
        r"checkpoint\.save_steps means nothing without output_dir",
        lambda: made(save_steps=100),
    ),
    "resumes without a folder": (
        r"checkpoint\.resume means nothing without output_dir",
        lambda: made(resume="auto"),
    ),
    "profile": (r"monitor\.profile means nothing without output_dir", lambda: made(profile={})),
    "sinks": (
        r"monitor\.sinks means nothing without output_dir",
        lambda: made(sinks=["tensorboard"]),
    ),
    "records of a loop that is not recorded": (
        r"monitor\.log_steps means nothing to a loop without output_dir",
        lambda: steps(log_steps=3),
    ),
    "records of calls that are not recorded": (
        r"monitor\.log_steps means nothing to a loop without output_dir",
        lambda: by_calls(log_steps=3),
    ),
    "a slow rank of one": (
        r"monitor\.straggler\.patience means nothing in one process",
        lambda: made(straggler={"patience": 2}),
    ),
    "an address of nobody": (
        r"distributed\.init_method means nothing in one process",
        lambda: made(init_method="tcp://127.0.0.1:29511"),
    ),
    "patience with nobody, placed": (
        r"distributed\.timeout_seconds means nothing in one process",
        lambda: placed(timeout_seconds=7.0),
    ),
    "a hang that nobody looks for": (
        r"hang\.seconds means nothing to a process that no launcher has started",
        lambda: made(hang={"seconds": 3.0}),
    ),
    "axes without equal bits": (
        r"distributed\.open_axes means nothing without reproducible",
        lambda: made(open_axes=["tensor", "context"]),
    ),
    "sequences that are not cut": (
        r"distributed\.sequence_parallel means nothing without tensor_size",
        lambda: made(sequence_parallel=False),
    ),
    "evaluations of steps": (
        r"training\.eval_steps means nothing to Trainer\.steps",
        lambda: steps(eval_steps=3),
    ),
    "evaluations of calls": (
        r"eval_strategy means nothing to Trainer\.train",
        lambda: by_calls(eval_strategy="epoch"),
    ),
    "workers of calls": (
        r"data\.num_workers means nothing to Trainer\.train",
        lambda: by_calls(num_workers=2),
    ),
    "workers of a loader": (
        r"data\.num_workers means nothing beside a DataLoader",
        lambda: steps(LOADER, num_workers=2),
    ),
    "order of a loader": (
        r"data\.shuffle means nothing beside a DataLoader",
        lambda: steps(LOADER, shuffle=True),
    ),
    "a list": (
        r"data\.drop_last means nothing for data that are iterated",
        lambda: steps([BATCH] * 3, drop_last=True),
    ),
    "a floor without a schedule": (
        r"training\.min_lr_ratio means nothing",
        lambda: made(min_lr_ratio=0.5),
    ),
    "a scale without fp16": (
        r"loss_scale\.initial_scale means nothing",
        lambda: made(loss_scale={"initial_scale": 4.0}),
    ),
    "another strategy's": (
        r"diloco\.inner_steps means nothing under",
        lambda: made(diloco={"inner_steps": 3}),
    ),
    "another strategy's, placed": (
        r"ddp\.bucket_cap_mb means nothing under",
        lambda: placed(ddp={"bucket_cap_mb": 1.0}),
    ),
    "metrics of nothing": (
        "metrics= means nothing without validation data",
        lambda: made().train(DATA, metrics={"a": lambda out, y: 0}),
    ),
    "evaluations of nothing": (
        r"eval_batches means nothing without validation",
        lambda: made(eval_batches=1).train(DATA),
    ),
    "times of evaluations of nothing": (
        r"eval_steps means nothing without validation",
        lambda: made(eval_steps=1).train(DATA),
    ),
    "batches of a loader": (
        r"eval_batch_size means nothing beside a DataLoader for validation",
        lambda: made(eval_batch_size=3).train(DATA, LOADER),
    ),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name: str) -> None:
    message, call = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("name", WARNED)
def test_what_has_no_effect_is_warned_of_once_at_the_callers_line(name: str) -> None:
    message, call = WARNED[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    [warned] = [one for one in seen if one.category is NoEffectWarning]
    assert warned.filename == __file__
    with pytest.warns(NoEffectWarning, match=message):
        warnings.warn_explicit(warned.message, None, warned.filename, warned.lineno)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env", {"MINE": "7"}),
        ("debug", "info"),
        ("timeout_seconds", 7.0),
        ("backend", "nccl"),
        ("device", "xpu"),
    ],
)
def test_what_the_process_has_settled_is_not_ignored_in_a_second_trainer(
    key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single process has no group, whose backend and timeout could differ."""
    made()
    has_group = key not in ("backend", "timeout_seconds")
    if not has_group:
        monkeypatch.setattr(cluster, "_current", replace(cluster.setup(), backend="gloo"))
    with pytest.raises(
        UsageError, match=f"distributed.{key} is .*, and this process runs otherwise"
    ):
        cluster.setup(lockstep.Config().replaced({f"distributed.{key}": value}).distributed)


def test_limits_of_a_hang_are_told_to_the_launcher_by_place_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_mine", writer.Heartbeat(tmp_path, 0))
    placed(hang={"seconds": 3.0}, timeout_seconds=cluster._timeout or 1800.0)
    limits = read_limits(tmp_path)
    assert limits is not None
    assert limits[1] == 3.0


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 8, shuffle=True, generator=torch.Generator().manual_seed(7)),
        DataLoader(
            DATA, 8, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(7))
        ),
        DataLoader(DATA, 8, sampler=lockstep.DistributedSampler(DATA, 1, 0, seed=7)),
    ],
    ids=["generator", "generator of the sampler", "sampler"],
)
def test_a_loaders_own_seed_is_told_to_do_nothing(
    loader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    steps(loader)
    assert "means nothing: the order follows from training.seed" in capsys.readouterr().out


def test_an_order_that_is_used_is_not_told_to_do_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shuffled = RandomSampler(
        DATA, replacement=True, num_samples=16, generator=torch.Generator().manual_seed(7)
    )
    steps(DataLoader(DATA, 8, sampler=shuffled))
    steps(DataLoader(DATA, batch_sampler=BatchSampler(shuffled, 8, drop_last=True)))
    assert "means nothing" not in capsys.readouterr().out


def test_what_is_written_as_it_is_anyway_is_not_warned_of(tmp_path: Path) -> None:
    """Nor are the defaults of a config that a file has written out, and what is switched off."""
    whole = lockstep.Config.from_file(written(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        made(config=whole)
        made(
            early_stopping=None,
            keep_best=None,
            load_best=False,
            resume="never",
            save_strategy="none",
        )
        steps(LOADER, num_workers=0, shuffle=False)


def written(folder: Path) -> Path:
    path = folder / "whole.yaml"
    path.write_text(lockstep.Config().to_yaml())
    return path


def test_short_epochs_end_with_an_evaluation_where_something_follows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = made(early_stopping={"patience": 1, "min_delta": 100.0}, max_steps=None, batch_size=8)
    trainer.train(DATA, DATA, epochs=9)
    assert trainer.step.progress.epoch == 1, (
        "stopped at the second evaluation, after the second epoch"
    )
    made(early_stopping={"patience": 3}, max_steps=None, batch_size=8).train(DATA, DATA)
    assert (
        "early_stopping can't stop this run: it waits for 3 evaluations" in capsys.readouterr().out
    )


FOLLOWING: dict[str, dict[str, Any]] = {
    "training.early_stopping": {"early_stopping": {"patience": 1}},
    "checkpoint.keep_best": {
        "keep_best": "eval_loss",
        "output_dir": "run",
        "sinks": [],
        "resume": "never",
    },
    "the ReduceLROnPlateau": {
        "optimizer": torch.optim.SGD,
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau,
    },
}


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("way", ["steps", "training_step"])
def test_what_follows_evaluations_is_warned_of_where_a_loop_makes_none(
    name: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    for evaluates in (False, True):
        trainer = made(batch_size=8, **FOLLOWING[name])
        for _ in trainer.steps(DATA) if way == "steps" else map(trainer.training_step, [BATCH] * 2):
            trainer.evaluate(DATA, counts=evaluates)
        trainer._open.close()
        said = caplog.text
        caplog.clear()
        assert (f"{name} did nothing: the loop made no evaluation that counts" in said) == (
            not evaluates
        ), said


def test_micro_batches_that_the_end_of_a_loop_drops_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for flushes in (False, True):
        trainer = made(batch_size=8, gradient_accumulation_steps=3)
        for _ in range(4):
            trainer.training_step(BATCH)
        if flushes:
            trainer.flush()
        del trainer  # as at the end of a function that trains
        gc.collect()
        said = caplog.text
        caplog.clear()
        assert ("1 of 3 micro-batches of a step wait for their update" in said) == (not flushes), (
            said
        )


def test_values_that_a_loop_logs_are_printed_where_nothing_records_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = made(batch_size=8)
    for record in trainer.steps(DATA):
        trainer.log({"mine": float(record.step)})
    trainer._open.close()
    assert capsys.readouterr().out.splitlines() == ["step 1  mine 1.0000", "step 2  mine 2.0000"]


@pytest.mark.parametrize(
    "settings", [{"wait": 100}, {"wait": 0, "warmup": 0, "active": 1, "ranks": [5]}], ids=str
)
def test_a_profile_that_writes_nothing_says_why(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made(profile=settings, output_dir="run", batch_size=8, save_strategy="none").train(DATA)
    assert not list(Path("run/profile").glob("*"))
    why = (
        "names [5], and the run has ranks 0 to 0"
        if "ranks" in settings
        else "are 104 steps, the run had 2"
    )
    assert why in caplog.text


def test_replicas_that_cannot_be_compared_are_told_in_each_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps(divergence_check_steps=2)
    by_calls(divergence_check_steps=2)
    assert (
        capsys.readouterr().out.count("divergence_check_steps: one replica, nothing to compare")
        == 2
    )
    with pytest.warns(UserWarning, match="one replica, nothing to compare"):
        placed(divergence_check_steps=2)


def test_a_backend_that_a_second_trainer_cannot_have_is_refused() -> None:
    made()
    with pytest.raises(UsageError, match=r"distributed\.backend is nccl, but the device is cpu"):
        made(backend="nccl")
