"""`lockstep.observe` and `lockstep launch --watch-training`, as docs/how_to/watch_training.md has
them.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep
from lockstep.cli import main
from lockstep.verify import watch
from lockstep.verify.loop.findings import LoopFinding
from lockstep.verify.training_checks import TrainingChecks
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]


class Loop:
    """A right loop in one process; a test replaces a part of it."""

    accumulate = 1
    scaler: torch.amp.GradScaler

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = StepLR(self.optimizer, 2)

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x), x[:, :1]) / self.accumulate

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def run(self) -> None:
        loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4)
        for number, (x,) in enumerate(loader, start=1):
            self.backward(self.loss(x))
            if number % self.accumulate == 0:
                self.step()


def loop(**changes: Callable[..., Any] | int) -> type[Loop]:
    return type("Changed", (Loop,), changes)


def left_in_evaluation(self: Loop) -> None:
    Loop.step(self)
    self.model.eval()


def looks_before_each_epoch(self: Loop) -> None:
    epochs_in_one_order(self, sets_epoch=True)


def epochs_in_one_order(self: Loop, sets_epoch: bool = False) -> None:
    data = TensorDataset(torch.randn(16, 4))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        next(iter(loader))
        if sets_epoch:
            sampler.set_epoch(epoch)
        for (x,) in loader:
            self.backward(self.loss(x))
            self.step()


def frozen_part(self: Loop, x: Tensor) -> Tensor:
    with torch.no_grad():
        inside = self.model[1](self.model[0](x))
    return nn.functional.mse_loss(self.model[2](inside), x[:, :1])


def freezing_the_first(self: Loop) -> None:
    Loop.__init__(self)
    self.model[0].requires_grad_(False)


def average_of_the_last(self: Loop) -> None:
    """Let the frozen layer follow another, as a momentum encoder does inside of one model."""
    Loop.step(self)
    with torch.no_grad():
        self.model[0].weight.mul_(0.9).add_(0.1 * self.model[2].weight.mean())


def gradients_of_frozen(self: Loop) -> None:
    for parameter in self.model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    Loop.step(self)


def without_zeroing(self: Loop) -> None:
    self.optimizer.step()


def twice(self: Loop) -> None:
    self.optimizer.step()
    Loop.step(self)


def two_optimizers(self: Loop) -> None:
    if not hasattr(self, "others"):
        self.others = [
            torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model[0], self.model[2])
        ]
    for one in self.others:
        one.step()
    for one in self.others:
        one.zero_grad()


def other_optimizer(self: Loop) -> None:
    Loop.__init__(self)
    self.optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    self.schedule = StepLR(self.optimizer, 2)


def part_of_the_model(self: Loop) -> None:
    Loop.__init__(self)
    self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.1)
    self.schedule = StepLR(self.optimizer, 2)


def evaluating(self: Loop) -> None:
    Loop.__init__(self)
    self.model.eval()


def evaluated_and_left(self: Loop) -> None:
    Loop.step(self)
    self.done = getattr(self, "done", 0) + 1
    if self.done == 5:
        self.model.eval()
        self.model(torch.randn(4, 4))  # its gradients are not switched off


def evaluated_and_put_back(self: Loop) -> None:
    evaluated_and_left(self)
    self.model.train()


class Wrapper(nn.Module):
    """As DistributedDataParallel: in training mode, whatever is in it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def evaluating_in_a_wrapper(self: Loop) -> None:
    evaluating(self)
    self.model = Wrapper(self.model)


def clipping_each(self: Loop, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def cut_off(self: Loop, x: Tensor) -> Tensor:
    return self.model(x).detach().requires_grad_().square().mean()


def by_hand(self: Loop, loss: Tensor) -> None:
    parameters = list(self.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def scaled(self: Loop, loss: Tensor) -> None:
    self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    self.scaler.scale(loss).backward()


def without_clipping(self: Loop) -> None:
    self.optimizer.step()
    self.schedule.step()
    self.optimizer.zero_grad()


def unscaling_first(self: Loop) -> None:
    self.scaler.unscale_(self.optimizer)
    clipping_first(self)


def clipping_first(self: Loop) -> None:
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.scaler.step(self.optimizer)
    self.scaler.update()
    self.schedule.step()
    self.optimizer.zero_grad()


def undivided(self: Loop, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(self.model(x), x[:, :1])


def undivided_mean_of_its_own(self: Loop, x: Tensor) -> Tensor:
    return 1.0 * (self.model(x) - x[:, :1]).square().sum() / len(x)


def schedule_each(self: Loop, loss: Tensor) -> None:
    loss.backward()
    self.schedule.step()


def bias_before_a_normalisation(self: Loop) -> None:
    """The gradient of the first bias is nothing but rounding, and no update of SGD shows it."""
    Loop.__init__(self)
    self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.ones_(self.model[0].bias)
    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
    self.schedule = StepLR(self.optimizer, 2)


def infinite(self: Loop, x: Tensor) -> Tensor:
    return Loop.loss(self, x) * torch.inf


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (Loop, None),
        (loop(accumulate=2), None),
        (loop(step=two_optimizers), None),
        (loop(__init__=freezing_the_first, step=average_of_the_last), None),
        (loop(__init__=freezing_the_first, step=gradients_of_frozen), "frozen parameters"),
        (loop(__init__=bias_before_a_normalisation), None),
        (loop(step=without_zeroing), "gradients not zeroed"),
        (loop(step=twice), "update without a gradient"),
        (loop(__init__=other_optimizer), "stale optimizer"),
        (loop(__init__=part_of_the_model), "parameters without an optimizer"),
        (loop(__init__=evaluating), "evaluation mode"),
        (loop(__init__=evaluating_in_a_wrapper), "evaluation mode"),
        (loop(step=evaluated_and_left), "evaluation mode"),
        (loop(step=evaluated_and_put_back), None),
        (loop(step=left_in_evaluation), "evaluation mode"),
        (loop(run=looks_before_each_epoch), None),
        (loop(run=epochs_in_one_order), "order of samples"),
        (loop(loss=frozen_part), "parameters without gradients"),
        (loop(accumulate=2, backward=clipping_each), "clipping"),
        (loop(backward=by_hand), None),
        (loop(loss=cut_off, step=without_clipping), "parameters without gradients"),
        (loop(backward=scaled, step=clipping_first), "clipping"),
        (loop(backward=scaled, step=unscaling_first), None),
        (loop(accumulate=2, loss=undivided), "gradient accumulation"),
        (loop(accumulate=2, loss=undivided_mean_of_its_own), "gradient accumulation"),
        (loop(accumulate=3, backward=schedule_each), "learning rate schedule"),
        (loop(loss=infinite), "not finite"),
    ],
)
def test_loops_in_one_process(changed: type[Loop], kind: str | None) -> None:
    found: list[LoopFinding] = []
    with lockstep.observe(report=found.append) as seen:
        changed().run()
    assert (kind in seen.findings) == (kind is not None), found
    assert len(seen.findings) == (kind is not None) or kind == "not finite", found
    assert seen.steps
    before = seen.steps
    Loop().run()
    assert seen.steps == before  # it has stopped


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/how_to/watch_training.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(code, {})
    printed = capsys.readouterr().out
    assert (
        "watch-training: ✗ rank 0: gradients not zeroed: step 2 adds to the gradients of the step"
        " before" in printed
    )


@pytest.mark.parametrize(
    ("case", "found"),
    [
        pytest.param(
            "LinkThatReturnsOtherSums", "gradient synchronisation", marks=pytest.mark.full
        ),
        pytest.param("ReplicaThatIsChanged", "replicas", marks=pytest.mark.full),
        pytest.param("sound", "", marks=pytest.mark.full),
    ],
)
def test_ranks_are_compared(case: str, found: str, tmp_path: Path) -> None:
    program = str(ROOT / "benchmarks/silent_bugs/program.py")
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--nproc-per-node",
        "2",
        "--output-dir",
        str(tmp_path),
    ]
    arguments = ["LinkThatReturnsOtherSums", "sound"] if case == "sound" else [case]
    ended = subprocess.run(
        [*command, "--watch-training", "1", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    said = re.findall(r"watch-training: ✗ rank 0: (.*?):", ended.stdout + ended.stderr)
    assert said == [found] * bool(found), ended.stdout + ended.stderr
    assert f"{'1' if found else 'nothing'} found" in ended.stdout + ended.stderr


def two_networks(wrapped: bool) -> dict[str, str]:
    """Return what is found where the second of two networks is in no wrapper."""
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    first = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    second = nn.parallel.DistributedDataParallel(inner) if wrapped else inner
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    torch.manual_seed(torch.distributed.get_rank())
    with lockstep.observe(every=1000, report=lambda _finding: None) as seen:
        for _ in range(3):
            first(second(torch.randn(8, 4))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {kind: finding.text for kind, finding in seen.findings.items()}


def test_a_network_in_no_wrapper_is_found_beside_one_that_is_in_one() -> None:
    found, _ = run_ranks(two_networks, 2, False)
    assert list(found) == ["gradient synchronisation"]
    assert "each rank updates them with gradients of its own" in found["gradient synchronisation"]


@pytest.mark.full
def test_two_networks_in_wrappers_are_right() -> None:
    assert run_ranks(two_networks, 2, True) == [{}, {}]


TWO_MISTAKES_IN_ONE_STAGE = """
import lockstep
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)).eval()
trained = [parameter for name, parameter in model.named_parameters() if name != "4.bias"]
optimizer = torch.optim.SGD(trained, lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
trainer = lockstep.Trainer(
    model, optimizer, loss_fn=nn.MSELoss(), strategy="pipeline",
    batch_size=4, gradient_accumulation_steps=2, max_steps=4,
)
trainer.train(data)
"""


@pytest.mark.full
def test_what_another_rank_finds_is_told_and_counted_by_the_name_that_the_model_has(
    tmp_path: Path,
) -> None:
    """The last stage of a pipeline: the console shows rank 0 alone, and a stage has names of its
    own.
    """
    (tmp_path / "train.py").write_text(TWO_MISTAKES_IN_ONE_STAGE)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--nproc-per-node",
        "2",
        "--watch-training",
        "train.py",
    ]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    told = ended.stdout + ended.stderr
    assert (
        "watch-training: ✗ rank 1: parameters without an optimizer: 4.bias require gradients"
        in told
    ), told
    assert "watch-training: ✗ rank 1: evaluation mode" in told, told
    assert "watch-training: 4 steps, 2 found" in told, told


def without_store(monkeypatch: pytest.MonkeyPatch, checks: TrainingChecks) -> watch._Ranks:
    """Rank 0 of two that reach no store."""
    monkeypatch.setattr(watch, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return watch._Ranks(checks)


def test_a_gradient_that_rank_0_alone_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where rank 0 skips a part of the model: what rank 1 has is compared, too."""
    checks = TrainingChecks()
    ranks = without_store(monkeypatch, checks)
    weight = {"weight|wrapped0|head.weight": 7}
    with_gradient = {**weight, "gradient|wrapped0|head.weight": 9}
    said = [{"prints": prints, "rates": []} for prints in (weight, with_gradient)]
    ranks._compare(1, said)
    assert list(checks.findings) == ["gradient synchronisation"]


def test_ranks_that_reach_no_store_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = without_store(monkeypatch, TrainingChecks())
    ranks.send(0, {})
    ranks.flush(60.0)
    ranks.send(1, {})
    begin = time.monotonic()
    ranks.flush(500.0)
    assert time.monotonic() - begin < 200, "nobody compares, and it is waited for"


def test_watching_every_0_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--watch-training", "0", "train.py"]) == 2
    assert "--watch-training 0 is not a number from 1 on" in capsys.readouterr().err
