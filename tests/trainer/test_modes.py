"""Models that arrive in evaluation mode, optimizers that have modes, and parameter groups that are
added later.

The optimizer is AdamW without a schedule (Defazio et al. 2024), as `schedulefree` has it, in its
shortest form.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Trainer, optim
from lockstep.errors import UsageError
from tests.ranks import run_ranks

SETTINGS: Any = {"batch_size": 8, "global_batch_size": 8, "shuffle": False}
LOSS = nn.MSELoss()


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Keeps z, where SGD is, and x, their mean; gradients are taken at y between them, in place in
    training.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call optimizer.train() first"
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


optim.register_elementwise(ScheduleFreeSGD)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def plain(steps: int) -> tuple[list[float], dict[str, Tensor], float]:
    """Return the losses of steps, the weights to hand out, and their loss over all data."""
    model = built()
    x, y = data().tensors
    losses = []
    optimizer = ScheduleFreeSGD(model.parameters())
    optimizer.train()
    for step in range(steps):
        rows = slice(8 * (step % 8), 8 * (step % 8) + 8)
        loss = LOSS(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.eval()
    return (
        losses,
        {k: v.detach().clone() for k, v in model.state_dict().items()},
        LOSS(model(x), y).item(),
    )


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())


def modes_switched(strategy: str, folder: str) -> bool:
    """Compare everything that shows weights with plain PyTorch; return whether this rank has
    looked.
    """
    losses, weights, mean = plain(6)
    trainer = Trainer(built(), ScheduleFreeSGD, LOSS, strategy=strategy, **SETTINGS)
    found = []
    for record in trainer.steps(data(), epochs=1):
        found.append(float(record.loss))
        if record.step == 3:
            # in between: training goes on from the weights that are trained
            trainer.evaluate(data())
            trainer.save_checkpoint(folder)
        if record.step == 6:
            break
    assert found == pytest.approx(losses, abs=1e-5)
    assert trainer.evaluate(data()) == pytest.approx(mean, abs=1e-5)
    outputs = trainer.predict(data())
    state = trainer.state_dict()
    assert LOSS(outputs, data().tensors[1]).item() == pytest.approx(mean, abs=1e-5)
    assert not trainer.is_main_process or close(state, weights)
    _, at_three, mean_at_three = plain(3)
    resumed = Trainer(built(), ScheduleFreeSGD, LOSS, strategy=strategy, **SETTINGS)
    resumed.load_checkpoint(folder)
    assert resumed.evaluate(data()) == pytest.approx(mean_at_three, abs=1e-5)
    assert close(lockstep.checkpoint.weights(Path(folder) / "step-00000003"), at_three)
    steps = resumed.steps(data(), epochs=1)
    assert [float(next(steps).loss) for _ in range(3)] == pytest.approx(losses[3:], abs=1e-5)
    return trainer.is_main_process


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_with_modes_is_switched(ranks: int, tmp_path: Path) -> None:
    if ranks == 1:
        assert modes_switched("single", str(tmp_path))
    else:
        assert run_ranks(modes_switched, 2, "fsdp", str(tmp_path)) == [True, False]


def test_a_run_ends_with_the_weights_that_are_evaluated(tmp_path: Path) -> None:
    model = built()
    trainer = Trainer(
        model,
        ScheduleFreeSGD(model.parameters()),
        LOSS,
        output_dir=tmp_path,
        max_steps=6,
        **SETTINGS,
    )
    trainer.train(data())
    assert close(model.state_dict(), plain(6)[1])
    with pytest.raises(UsageError, match="ScheduleFreeSGD has modes, and diloco"):
        Trainer(
            built(), ScheduleFreeSGD, LOSS, strategy="diloco", diloco={"workers": 1}, **SETTINGS
        )


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.stem(x))
        return head


def texts_of(model: nn.Module, way: str) -> list[str]:
    """Return the warnings about modes in the first steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "place":
            placed = lockstep.place(model, strategy="single", loss_fn=LOSS)
            placed.backward(data()[:8])
            placed.zero_grad()
            placed.backward(data()[:8])
        else:
            trainer = Trainer(model, "sgd", LOSS, max_steps=2, **SETTINGS)
            if way == "steps":
                list(trainer.steps(data()))
            elif way == "train":
                trainer.train(data())
            else:
                trainer.training_step(data()[:8])
                trainer.training_step(data()[:8])
    return [str(w.message) for w in caught if "evaluation mode" in str(w.message)]


@pytest.mark.parametrize("way", ["steps", "train", "training_step", "place"])
def test_a_model_that_arrives_in_evaluation_mode_is_told_once(way: str) -> None:
    (text,) = texts_of(Dropping().eval(), way)
    assert "the model is in evaluation mode" in text
    assert "do: model.train() before training" in text
    assert not texts_of(Dropping(), way)


def test_parts_in_evaluation_mode() -> None:
    left = Dropping()
    left.stem.eval()
    assert "its part stem is in evaluation mode" in texts_of(left, "steps")[0]
    frozen = Dropping()
    frozen.stem.eval().requires_grad_(False)
    assert not texts_of(frozen, "steps")


EARLIER = 2
LATER = 4


def trained(model: nn.Module, way: str, after: Callable[[int], None]) -> list[Any]:
    """Make four steps, with `after(step)` between them; return the warnings about modes."""
    batch = data()[:8]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "steps":
            trainer = Trainer(model, "sgd", LOSS, max_steps=LATER, **SETTINGS)
            for record in trainer.steps(data()):
                after(record.step)
        elif way == "training_step":
            trainer = Trainer(model, "sgd", LOSS, batch_size=8, max_steps=LATER)
            for step in range(1, LATER + 1):
                trainer.training_step(batch)
                after(step)
        else:
            placed = lockstep.place(model, strategy="single", loss_fn=LOSS)
            for step in range(1, LATER + 1):
                placed.backward(batch)
                placed.zero_grad()
                after(step)
    return [w for w in caught if "evaluation mode" in str(w.message)]


WAYS = ["steps", "training_step", "place"]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_left_in_evaluation_mode_is_told_once(way: str) -> None:
    model = Dropping()

    def left(step: int) -> None:
        if step >= EARLIER:
            model.eval()

    (found,) = trained(model, way, left)
    assert "the model is in evaluation mode since before step 3" in str(found.message)
    assert "do: model.train() after the evaluation" in str(found.message)
    assert found.filename == __file__
    assert not trained(Dropping(), way, lambda step: None)


def test_a_part_that_is_left_in_evaluation_mode_is_told_and_one_that_is_put_back_is_not() -> None:
    model = Dropping()
    (found,) = trained(model, "steps", lambda step: model.stem.eval() and None)
    assert "its part stem is in evaluation mode since before step 2" in str(found.message)
    whole = Dropping()
    assert not trained(whole, "steps", lambda step: whole.eval().train() and None)


GRADIENTS = "gradients are switched off in step 3"
FROZEN = "no parameter requires gradients any more in step 3"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("how", "message"), [("no_grad", GRADIENTS), ("inference_mode", GRADIENTS), ("frozen", FROZEN)]
)
def test_a_step_without_gradients_is_refused(way: str, how: str, message: str) -> None:
    model = Dropping()
    with ExitStack() as left_on:

        def disable(step: int) -> None:
            if step == EARLIER and how == "frozen":
                model.requires_grad_(False)
            elif step == EARLIER:
                left_on.enter_context(getattr(torch, how)())

        with pytest.raises(UsageError, match=message) as refused:
            trained(model, way, disable)
    assert how == "frozen" or f"with torch.{how}():" in str(refused.value)


def evaluated_in_a_pipeline() -> list[str]:
    return texts_of_pipeline(built().eval())


def texts_of_pipeline(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(
            Trainer(model, "sgd", LOSS, strategy="pipeline", **{**SETTINGS, "batch_size": 4}).steps(
                data()
            )
        )
    return [str(w.message) for w in caught if "evaluation mode" in str(w.message)]


def test_a_pipeline_tells_too() -> None:
    first, second = run_ranks(evaluated_in_a_pipeline, 2)
    assert (len(first), len(second)) == (1, 0)


def group_added(folder: str | None, steps: range, strategy: str = "single") -> dict[str, Tensor]:
    """Unfreeze the first layer after two steps, in a group of its own; save after four."""
    model = built()
    if strategy == "single":
        model[0].requires_grad_(False)
    make = lambda parameters: torch.optim.SGD(parameters[2:], lr=0.1, momentum=0.9)  # noqa: E731
    trainer = Trainer(
        model, make, LOSS, max_steps=8, strategy=strategy, lr_schedule="linear", **SETTINGS
    )
    if steps.start and folder:
        trainer.load_checkpoint(folder)
        assert len(trainer.optimizer.param_groups) == 2
    for record in trainer.steps(data(), epochs=1):
        if record.step == 2:
            model[0].requires_grad_(True)
            trainer.optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        if record.step == 4 and folder and not steps.start:
            trainer.save_checkpoint(folder)
        if record.step == steps.stop:
            break
    return trainer.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_that_was_added_later_resumes(ranks: int, tmp_path: Path) -> None:
    def run(folder: str | None, steps: range) -> dict[str, Tensor]:
        if ranks == 1:
            return group_added(folder, steps)
        return run_ranks(group_added, 2, folder, steps, "fsdp")[0]

    whole = run(None, range(7))
    run(str(tmp_path), range(4))
    resumed = run(str(tmp_path), range(4, 7))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_group_of_parameters_that_placement_has_replaced_is_refused() -> None:
    model = built()
    trainer = Trainer(model, lambda ps: torch.optim.SGD(ps[2:], lr=0.1), LOSS, **SETTINGS)
    steps = trainer.steps(data())
    next(steps)
    trainer.optimizer.add_param_group({"params": built()[0].parameters()})
    with pytest.raises(
        UsageError, match=r"added to the optimizer has 2 parameter\(s\) that are not trained"
    ):
        next(steps)
