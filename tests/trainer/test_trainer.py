"""`Trainer` in Python: anyone's model, optimizer, loss and data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.checkpoint import newest
from lockstep.config import Config
from lockstep.errors import RunError, UsageError
from lockstep.models.transformer import Transformer
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.parallel_model import ParallelModel, gradient_norm
from lockstep.run_directory.records import RunDirectory, StepRecord
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model


def regression(samples: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def test_a_plain_model_an_optimizer_and_a_loss_train_as_by_hand() -> None:
    data = regression()
    model = linear()
    reference = linear()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss(),
        batch_size=10,
        max_steps=5,
        shuffle=False,
    )
    records = list(trainer.steps(data))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for record, (x, y) in zip(records, DataLoader(data, batch_size=10), strict=True):
        loss = nn.functional.mse_loss(reference(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(record.loss) == pytest.approx(loss.item(), rel=1e-6)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_learning_rate_that_the_callers_loop_sets_is_kept() -> None:
    """An optimizer of their own, no schedule asked for: a scheduler that their loop steps works as
    in plain PyTorch.
    """
    model = linear()
    reference = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    trainer = Trainer(model, optimizer, nn.MSELoss(), batch_size=10, max_steps=5, shuffle=False)
    rates = []
    for record in trainer.steps(regression()):
        rates.append(record.lr)
        scheduler.step()
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.025]
    by_hand = torch.optim.SGD(reference.parameters())
    for rate, (x, y) in zip(rates, DataLoader(regression(), batch_size=10), strict=True):
        by_hand.param_groups[0]["lr"] = rate
        by_hand.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        by_hand.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_names_and_arguments_of_other_trainers_say_what_to_write() -> None:
    model = nn.Linear(4, 2)
    loss_fn = nn.CrossEntropyLoss()
    trainer = Trainer(model, None, loss_fn, batch_size=4)
    with pytest.raises(AttributeError, match=r"Trainer has no 'fit': write trainer.train\(data"):
        trainer.fit(...)  # type: ignore[attr-defined]
    assert not hasattr(trainer, "nothing")
    with pytest.raises(UsageError, match="second argument is the optimizer"):
        Trainer(model, loss_fn)
    for data in (TensorDataset(torch.randn(8, 4)), list(range(8))):
        with pytest.raises(
            UsageError, match="no targets for CrossEntropyLoss in a batch of the type"
        ):
            next(iter(trainer.steps(data)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ("input_ids", "labels"),
            "for 'targets', and a batch has input_ids, labels",
        ),
        (("ids", "targets"), "asks the batch for 'input_ids', and a batch has ids, targets"),
        ((), "asks the batch for a key, and a batch is a tuple"),
    ],
)
def test_a_batch_without_what_the_model_asks_for_is_refused(keys: Any, said: str) -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch = dict.fromkeys(keys, ids) if keys else (ids, ids)
    model = Transformer(n_layer=1, n_head=2, n_embd=8, vocab_size=16, block_size=4)
    with pytest.raises(UsageError, match=rf"Transformer\..*can't read the batch[\s\S]*{said}"):
        next(iter(Trainer(model, batch_size=2).steps([batch])))


def test_a_second_loop_over_the_same_epoch_says_that_nothing_is_left() -> None:
    trainer = Trainer(linear(), None, nn.MSELoss(), batch_size=10)
    assert len(list(trainer.steps(regression(), epochs=1))) == 5
    with pytest.warns(UserWarning, match="no step is left to take: 5 are done, and the run has 5"):
        assert list(trainer.steps(regression(), epochs=1)) == []
    assert len(list(trainer.steps(regression(), epochs=2))) == 5


def test_a_dataloader_keeps_its_batch_size_and_the_learning_rate_follows() -> None:
    trainer = Trainer(
        linear(),
        loss_fn=nn.MSELoss(),
        max_steps=1,
        lr_scaling="linear",
        base_batch_size=5,
        learning_rate=0.01,
    )
    (record,) = list(trainer.steps(DataLoader(regression(), batch_size=10, shuffle=True)))
    assert trainer.global_batch_size == 10
    assert record.samples == 10
    assert record.lr == pytest.approx(0.02)


@pytest.mark.parametrize(("own", "asked"), [(4, 12), (6, 12), (2, 6)])
def test_a_dataloaders_batch_size_stands_beside_a_global_batch_size(own: int, asked: int) -> None:
    """Which the default batch size of 8 would not divide."""
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), global_batch_size=asked, max_steps=1)
    (record,) = trainer.steps(DataLoader(regression(), batch_size=own))
    assert (record.samples, trainer.config.training.batch_size) == (asked, own)


def test_a_global_batch_that_a_dataloader_does_not_divide_names_both() -> None:
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), global_batch_size=12)
    with pytest.raises(
        UsageError,
        match=r"DataLoader's batch_size 5: 12 = 2 × 5 \+ 2(.|\n)*or the trainer global_.*=15",
    ):
        list(trainer.steps(DataLoader(regression(), batch_size=5)))
    with pytest.raises(UsageError, match=r"12 = 1 × 8 \+ 4"):
        list(trainer.steps(regression()))  # no batch size but the default one


def test_a_loss_that_the_config_names_counts_unless_another_is_given() -> None:
    config = Config().replaced({"loss_fn": "torch.nn:MSELoss", "training.max_steps": 1})
    data = regression()
    (named,), (given,) = (
        list(Trainer(linear(), None, loss, config=config).steps(data))
        for loss in (None, nn.L1Loss())
    )
    assert float(named.loss) == pytest.approx(
        float(next(Trainer(linear(), None, nn.MSELoss()).steps(data)).loss)
    )
    assert float(given.loss) == pytest.approx(
        float(next(Trainer(linear(), None, nn.L1Loss()).steps(data)).loss)
    )
    config = config.replaced(
        {"loss_fn": {"name": "torch.nn.functional:softmin", "args": {"reduction": "sum"}}}
    )
    with pytest.raises(UsageError, match="softmin is not a class"):
        Trainer(linear(), config=config)


def test_what_becomes_known_in_the_first_steps_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whether a compression paid."""
    trainer = Trainer(
        linear(), loss_fn=nn.MSELoss(), batch_size=5, max_steps=3, output_dir=tmp_path
    )
    trainer.placed.later_log_lines.append("known by now")
    trainer.train(regression())
    assert capsys.readouterr().out.count("lockstep: known by now\n") == 1


def test_rates_count_tokens_where_there_are_tokens_and_samples_elsewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A regression, and a language model; a classifier of token ids has a target a sample."""
    classes = TensorDataset(torch.randint(5, (8, 6)), torch.randint(3, (8,)))
    classifier = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 3))
    runs: list[tuple[str, nn.Module, Any, Any]] = [
        ("samples", linear(), nn.MSELoss(), regression()),
        ("samples", classifier, nn.CrossEntropyLoss(), classes),
        ("tokens", language_model("transformer"), None, Tokens()),
    ]
    for number, (unit, model, loss_fn, data) in enumerate(runs):
        output = tmp_path / str(number)
        settings = {"batch_size": 2, "max_steps": 2, "log_steps": 1, "eval_steps": None}
        Trainer(model, loss_fn=loss_fn, output_dir=output, save_strategy="none", **settings).train(
            data
        )
        row = RunDirectory(output).read_metrics()[-1]
        assert row["samples_per_second"] > 0
        assert ("tokens_per_second" in row) == (unit == "tokens")
        said = capsys.readouterr().out
        assert f" {unit}/s" in said
        assert ("tokens/s" in said) == (unit == "tokens")


def test_rates_count_what_is_read_and_targets_apart(tmp_path: Path) -> None:
    """Prompts that are masked, as in fine-tuning: two of six ids are targets."""
    labels = torch.randint(5, (8, 6))
    labels[:, :4] = -100
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), Transposed())
    settings = {"batch_size": 2, "max_steps": 3, "log_steps": 1, "eval_steps": None}
    trainer = Trainer(
        model, loss_fn=nn.CrossEntropyLoss(), output_dir=tmp_path, save_strategy="none", **settings
    )
    trainer.train(TensorDataset(torch.randint(5, (8, 6)), labels))
    row = RunDirectory(tmp_path).read_metrics()[-1]
    assert (row["samples"], row["tokens"], row["tokens_read"]) == (2, 4, 12)
    assert row["tokens_per_second"] == pytest.approx(3 * row["targets_per_second"])


class Transposed(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.transpose(1, 2)


def test_frozen_parameters_are_said_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    Trainer(model, loss_fn=nn.MSELoss(), max_steps=1).train(regression())
    assert ", 5 of 25 parameters train\n" in capsys.readouterr().out


def test_a_warm_up_that_is_longer_than_the_run_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two steps of a long run's config: they are its first two."""
    trainer = Trainer(
        linear(),
        loss_fn=nn.MSELoss(),
        max_steps=2,
        warmup_steps=100,
        output_dir=tmp_path,
        log_steps=1,
    )
    trainer.train(regression())
    assert "warning: the run ends after 2 steps, in the warm-up of 100" in capsys.readouterr().out
    assert [
        row["lr"] for row in RunDirectory(tmp_path).read_metrics() if "lr" in row
    ] == pytest.approx([1e-5, 2e-5])


def test_the_scaling_rule_is_said_at_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trainer = Trainer(
        linear(),
        loss_fn=nn.MSELoss(),
        max_steps=1,
        lr_scaling="sqrt",
        base_batch_size=5,
        learning_rate=0.01,
        batch_size=5,
        gradient_accumulation_steps=4,
        output_dir=tmp_path,
    )
    trainer.train(regression())
    said = capsys.readouterr().out
    assert "global batch 20 = 4 micro-batches × 5, over 1 data-parallel rank" in said
    assert "learning rate 0.02 = 0.01 × √(20/5) (sqrt)" in said


def test_trap_02_a_window_of_training_step_is_one_update() -> None:
    model = linear()
    trainer = Trainer(model, loss_fn=nn.MSELoss(), gradient_accumulation_steps=3, batch_size=2)
    batch = regression()[:2]
    before = model.weight.detach().clone()
    for call in range(1, 7):
        loss = trainer.training_step(batch)
        assert loss.ndim == 0
        assert not loss.requires_grad
        assert trainer.step.progress.updates == call // 3
        if call == 2:
            assert torch.equal(before, model.weight)


def test_a_global_batch_size_says_how_many_calls_of_training_step_make_a_step() -> None:
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), global_batch_size=12)
    for call in range(1, 7):
        trainer.training_step(regression()[:4])
        assert trainer.step.progress.updates == call // 3
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), global_batch_size=12)
    with pytest.raises(
        UsageError,
        match="12 samples is not a whole number of micro-batches of 5 on each of 1 rank\n",
    ):
        trainer.training_step(regression()[:5])


def test_accumulation_that_contradicts_the_global_batch_is_an_error_with_the_equation() -> None:
    def trainer(**settings: int) -> Trainer:
        return Trainer(
            linear(), loss_fn=nn.MSELoss(), global_batch_size=20, max_steps=1, **settings
        )

    agreed = trainer(batch_size=5, gradient_accumulation_steps=4)
    assert len(list(agreed.steps(regression()))) == 1
    equation = (
        r"batch_size 5 × gradient_accumulation_steps 2 × data-parallel size 1 = 10, and"
        r" global_batch_size is 20"
    )
    with pytest.raises(UsageError, match=equation) as caught:
        list(trainer(batch_size=5, gradient_accumulation_steps=2).steps(regression()))
    assert "(here: 4); or, to keep it, write training.global_batch_size=10" in str(caught.value)
    with pytest.raises(UsageError, match="batch_size 10 × gradient_accumulation_steps 4 × "):
        list(trainer(gradient_accumulation_steps=4).steps(DataLoader(regression(), batch_size=10)))
    with pytest.raises(UsageError, match=equation):
        trainer(gradient_accumulation_steps=2).training_step(regression()[:5])


def test_trap_06_evaluation_is_weighted_by_valid_targets() -> None:
    """Not divided by the accumulation steps, not the mean over batches of means."""
    trainer = Trainer(language_model("transformer"), gradient_accumulation_steps=4, batch_size=4)
    loss = trainer.evaluate(Tokens())
    model = trainer.placed.parts[0].eval()
    total = 0.0
    count = 0
    with torch.no_grad():
        for sample in Tokens():
            logits = model(sample["input_ids"][None])
            total += nn.functional.cross_entropy(
                logits[0], sample["targets"], reduction="sum"
            ).item()
            count += int((sample["targets"] != -100).sum())
            if count >= sum(16 - i % 7 for i in range(83)):
                break
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_trap_18_a_model_that_is_wrapped_already_is_refused_with_the_line_to_delete() -> None:
    with pytest.raises(UsageError, match=r"delete the line model = DataParallel\(model, …\)"):
        Trainer(nn.DataParallel(linear()), loss_fn=nn.MSELoss())


def test_trap_46_records_hold_no_graph() -> None:
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), batch_size=10, max_steps=3)
    for record in trainer.steps(regression()):
        assert type(record.loss) is type(record.grad_norm) is type(record.tokens) is float


@pytest.mark.parametrize("clip", [0.5, 1000.0])
def test_a_step_is_the_same_where_its_numbers_stay_on_the_device(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: 0-dim tensors that nothing reads; they hold no graph."""

    def losses() -> list[StepRecord]:
        trainer = Trainer(
            linear(),
            "sgd",
            nn.MSELoss(),
            batch_size=10,
            max_steps=4,
            grad_clip=clip,
            learning_rate=0.05,
            seed=3,
        )
        return list(trainer.steps(regression()))

    on_host = losses()
    monkeypatch.setattr(
        ParallelModel,
        "loss_accumulator",
        lambda _, micro_batches_per_step: LossAccumulator(
            micro_batches_per_step, torch.device("cpu"), shared=False
        ),
    )
    monkeypatch.setattr(
        ParallelModel,
        "norm",
        lambda _, gradients: gradient_norm(gradients, [], torch.device("cpu")),
    )
    for plain, record in zip(on_host, losses(), strict=True):
        assert isinstance(record.loss, torch.Tensor)
        assert isinstance(record.grad_norm, torch.Tensor)
        assert not record.loss.requires_grad
        assert not record.grad_norm.requires_grad
        for name in ("loss", "grad_norm", "tokens", "clipped"):
            assert float(getattr(record, name)) == pytest.approx(
                float(getattr(plain, name)), rel=1e-6
            )


def test_trap_61_a_gradient_that_is_no_number_stops_the_run_before_the_parameters_are() -> None:
    data = regression()
    data.tensors[0][25] = torch.nan
    model = linear()
    trainer = Trainer(model, loss_fn=nn.MSELoss(), batch_size=10, max_steps=5, shuffle=False)
    with pytest.raises(RunError, match="the loss of step 3 is nan"):
        list(trainer.steps(data))
    assert all(p.isfinite().all() for p in model.parameters())
    assert trainer.step.progress.updates == 2


def test_a_checkpoint_carries_the_callers_metadata_and_the_optimizer(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        return Trainer(linear(), loss_fn=nn.MSELoss(), batch_size=10, max_steps=4)

    first = trainer()
    whole = trainer()
    list(whole.steps(regression()))
    for _, record in zip(range(2), first.steps(regression()), strict=False):
        assert record
    first.save_checkpoint(tmp_path, metadata={"note": "half way"})
    second = trainer()
    assert second.load_checkpoint(tmp_path) == (2, {"note": "half way"})
    assert [r.step for r in second.steps(regression())] == [3, 4]
    for mine, theirs in zip(
        second.placed.parameters.values(), whole.placed.parameters.values(), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_siz": 3}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"global_batch_size": 10, "batch_size": 4}, "10 = 2 × 4 \\+ 2"),
        ({"strategy": "magic"}, "strategy"),
        ({"optimizer": "adamm"}, "should be one of adamw, adam, sgd"),
    ],
)
def test_a_setting_that_is_wrong_is_one_clear_message(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Trainer(linear(), loss_fn=nn.MSELoss(), **settings)


def test_an_iterable_without_a_length_needs_max_steps_for_a_schedule() -> None:
    batches = ((torch.ones(2, 4), torch.ones(2, 1)) for _ in range(3))
    with pytest.raises(UsageError, match="max_steps"):
        list(Trainer(linear(), loss_fn=nn.MSELoss(), lr_schedule="cosine").steps(batches))
    batches = ((torch.ones(2, 4), torch.ones(2, 1)) for _ in range(3))
    trainer = Trainer(linear(), loss_fn=nn.MSELoss())
    assert [r.samples for r in trainer.steps(batches)] == [2, 2, 2]


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Three, and nobody knows it beforehand."""
    return iter([(torch.full((2, 4), float(place)), torch.ones(2, 1)) for place in range(3)])


@pytest.mark.parametrize("save_steps", [2, 3])
def test_data_that_end_unannounced_are_evaluated_and_saved_at_their_end(
    save_steps: int, tmp_path: Path
) -> None:
    """No step knew that it was the last one."""
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), save_steps=save_steps, output_dir=tmp_path)
    trainer.train(batches(), regression())
    assert newest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-00000003"
    directory = RunDirectory(tmp_path)
    assert [row["step"] for row in directory.read_metrics() if "eval_loss" in row] == [3]
    assert [event["step"] for event in directory.read_events() if event["kind"] == "save"][-1] == 3


def test_a_run_ends_where_its_first_bound_says(tmp_path: Path) -> None:
    """Epochs of the call against `max_steps` of the config: the schedule, the last save and the
    evaluation know it.
    """
    trainer = Trainer(
        linear(), loss_fn=nn.MSELoss(), batch_size=10, max_steps=100, output_dir=tmp_path
    )
    record = trainer.train(regression(), regression(), epochs=2)
    assert record is not None
    assert (record.step, trainer.step.total) == (10, 10)
    assert newest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-00000010"
    assert "eval_loss" in trainer.metrics


def test_a_checkpoint_of_before_the_first_step_leaves_the_nominal_count_to_be_learned(
    tmp_path: Path,
) -> None:
    """Backward divides by it: taken for 1, gradients are larger by the count, which fp16 does not
    hold.
    """

    def trainer() -> Trainer:
        return Trainer(linear(), loss_fn=nn.MSELoss(), batch_size=10, max_steps=2)

    first = trainer()
    second = trainer()
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    list(first.steps(regression()))
    list(second.steps(regression()))
    assert first.step.nominal == second.step.nominal == 8.0


def test_an_error_of_the_users_keeps_its_cause() -> None:
    class Broken(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("this model is broken") from ValueError("by that value")

    trainer = Trainer(Broken(4, 1), loss_fn=nn.MSELoss(), batch_size=10, max_steps=2)
    with pytest.raises(RuntimeError, match="this model is broken") as raised:
        trainer.train(regression())
    assert isinstance(raised.value.__cause__, ValueError)


def test_evaluation_and_samples_leave_the_modes_of_modules_as_they_were() -> None:
    """A model left in evaluation mode would train on without dropout; a part that is frozen in it
    stays so.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[1].eval()
    trainer = Trainer(model, loss_fn=nn.MSELoss(), batch_size=10, max_steps=4)
    trainer.evaluate(regression())
    trainer.forward(torch.ones(2, 4))
    assert [module.training for module in model.modules()] == [True, True, False, True, True]


def test_evaluation_takes_every_sample_whatever_a_dataloader_drops() -> None:
    """Its windows of 16 micro-batches would drop nearly all of a small data set, or refuse it."""
    trainer = Trainer(linear(), loss_fn=nn.MSELoss(), batch_size=10)
    whole = trainer.evaluate(regression())
    assert trainer.evaluate(
        DataLoader(regression(), batch_size=12, drop_last=True)
    ) == pytest.approx(whole, rel=1e-6)


def test_what_is_said_at_start_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also where the run goes on in a second call."""
    trainer = Trainer(
        linear(), loss_fn=nn.MSELoss(), batch_size=10, drop_last=True, output_dir=tmp_path
    )
    trainer.train(TensorDataset(*regression()[:45]), epochs=1)
    trainer.train(TensorDataset(*regression()[:45]), epochs=2)
    assert capsys.readouterr().out.count("drop_last leaves out 5 of 45 samples") == 2, (
        "in each of the two calls"
    )


def test_activation_checkpointing_is_switched_on_changed_and_off_again() -> None:
    calls = []

    class Counted(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            calls.append(1)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Counted(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    trainer = Trainer(model, loss_fn=nn.MSELoss(), batch_size=8, max_steps=40, strategy="single")
    batch = torch.ones(8, 4), torch.zeros(8, 4)
    for _ in range(3):  # the first steps compare losses, too
        trainer.training_step(batch)

    def forward_passes() -> int:
        calls.clear()
        trainer.training_step(batch)
        return len(calls)

    assert forward_passes() == 3
    trainer.enable_gradient_checkpointing()
    assert forward_passes() == 6
    assert trainer.config.training.gradient_checkpointing == "full"
    trainer.enable_gradient_checkpointing("every_n")
    assert forward_passes() == 5
    trainer.enable_gradient_checkpointing("none")
    assert forward_passes() == 3
    assert trainer.config.training.gradient_checkpointing == "none"
    with pytest.raises(UsageError, match="there is no activation checkpointing 'ful'"):
        trainer.enable_gradient_checkpointing("ful")
