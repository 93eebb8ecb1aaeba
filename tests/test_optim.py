"""Schedules, scaling rules, optimizers."""

import itertools
import math
from typing import Any, Literal

import pytest
import torch

from lockstep.config import TrainingConfig, check, config_from
from lockstep.config.checks_training import NEED_WHOLE_PARAMETERS
from lockstep.errors import UsageError
from lockstep.optim import (
    Schedule,
    build_optimizer,
    check_optimizer,
    check_schedule,
    check_shardable,
    explain_failed_update,
    rebind,
    register_elementwise,
    scaled_learning_rate,
)


def test_trap_10_the_scaling_rule_is_applied_once_and_warmup_never_gives_zero() -> None:
    def scaled(rule: Literal["none", "linear", "sqrt"], base: int | None = 64) -> tuple[float, str]:
        config = TrainingConfig(learning_rate=1e-3, lr_scaling=rule, base_batch_size=base)
        return scaled_learning_rate(config, 256)

    rate, line = scaled("sqrt")
    assert rate == pytest.approx(2e-3)
    assert "256/64" in line
    assert scaled("linear")[0] == pytest.approx(4e-3)
    assert scaled("none")[0] == 1e-3
    assert Schedule("cosine", 100, warmup=10).factor(0) == pytest.approx(0.1)
    with pytest.raises(UsageError, match="base_batch_size"):
        scaled("linear", None)


def test_trap_11_the_cosine_falls_once_from_the_end_of_warmup_to_the_end() -> None:
    schedule = Schedule("cosine", 100, warmup=20, min_ratio=0.1)
    factors = [schedule.factor(u) for u in range(101)]
    assert factors[19] == factors[20] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(factors[20:])), "it must not oscillate"
    assert factors[60] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kind", "at_90", "at_100"), [("constant", 1.0, 1.0), ("linear", 0.2, 0.1), ("wsd", 0.55, 0.1)]
)
def test_the_other_schedules(kind: str, at_90: float, at_100: float) -> None:
    schedule = Schedule(kind, 100, warmup=10, min_ratio=0.1, decay_ratio=0.2)
    assert schedule.factor(90) == pytest.approx(at_90)
    assert schedule.factor(100) == pytest.approx(at_100)
    assert math.isclose(schedule.factor(50), 0.6 if kind == "linear" else 1.0)


def test_trap_48_an_optimizer_made_before_placement_is_rebound_by_name() -> None:
    """An optimizer over parameters that sharding replaced trains nothing, without an error."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {id(p): n for n, p in model.named_parameters()}
    placed = {n: torch.nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    rebind(optimizer, names, placed)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in placed.values()}
    for parameter in placed.values():
        parameter.grad = torch.ones_like(parameter)
    before = placed["weight"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, placed["weight"])
    with pytest.raises(UsageError, match="already has state"):
        rebind(optimizer, {id(p): n for n, p in placed.items()}, dict(model.named_parameters()))


def test_state_that_an_optimizer_has_from_its_construction_on_is_made_again() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    names = {id(p): n for n, p in model.named_parameters()}
    placed = {n: torch.nn.Parameter(p.detach()[:1].clone()) for n, p in model.named_parameters()}
    rebind(optimizer, names, placed)
    assert optimizer.state.keys() == set(placed.values())
    assert optimizer.state[placed["weight"]]["sum"].tolist() == [[0.5] * 3]

    for parameter in placed.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(UsageError, match="already has state"):
        rebind(optimizer, {id(p): n for n, p in placed.items()}, dict(model.named_parameters()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    other = torch.nn.Linear(3, 2)
    with pytest.raises(UsageError, match="are not the model's"):
        rebind(
            torch.optim.SGD(other.parameters()),
            {id(p): n for n, p in model.named_parameters()},
            dict(model.named_parameters()),
        )


def test_only_elementwise_optimizers_are_sharded() -> None:
    class Odd(torch.optim.SGD):
        pass

    odd = Odd([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UsageError, match="Odd is not known to update each element on its own"):
        check_shardable(odd)
    register_elementwise(Odd)
    check_shardable(odd)


def test_optimizer_arguments_are_checked() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.zeros(2))}
    common = {
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "device": torch.device("cpu"),
        "reproducible": False,
    }
    assert (
        build_optimizer("adamw", parameters, args={"betas": (0.8, 0.9)}, **common).defaults["fused"]
        is True
    )
    reproducible = build_optimizer("adamw", parameters, args={}, **{**common, "reproducible": True})
    assert reproducible.defaults["foreach"] is False  # on a CPU the plain loop is faster
    assert not reproducible.defaults["fused"]
    with pytest.raises(UsageError, match="does not accept"):
        build_optimizer("adamw", parameters, args={"bettas": 1}, **common)
    with pytest.raises(UsageError, match=r"torch\.optim has no Nope"):
        build_optimizer("torch.optim:Nope", parameters, args={}, **common)
    with pytest.raises(UsageError, match="returned NoneType, which is not an optimizer"):
        build_optimizer(f"{__name__}:_makes_none", parameters, args={}, **common)


def _makes_none(parameters: Any, lr: float) -> None:
    """Forget to return the optimizer."""


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("adamw", {"betas": [1.5, 0.9]}),
        ("adamw", {"betas": [0.9]}),
        ("adamw", {"betas": "text"}),
        ("adamw", {"eps": -1}),
        ("adamw", {"fused": True, "foreach": True}),
        ("sgd", {"nesterov": True}),
        ("torch.optim:RMSprop", {"alpha": -1}),
    ],
)
def test_values_that_an_optimizer_refuses_are_one_error_before_and_in_a_run(
    name: str, args: dict[str, Any]
) -> None:
    says = r"the optimizer \S+ does not accept these arguments"
    with pytest.raises(UsageError, match=says):
        check_optimizer(name, args)
    with pytest.raises(UsageError, match=says):
        build_optimizer(
            name,
            {"weight": torch.nn.Parameter(torch.zeros(2))},
            learning_rate=0.1,
            weight_decay=None,
            args=args,
            device=torch.device("cpu"),
            reproducible=False,
        )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"training.optimizer_args": {"lr": 0.1}}, "lr"),
        (
            {"training.optimizer_args": {"weight_decay": 0.1}, "training.weight_decay": 0.2},
            "weight_decay",
        ),
    ],
)
def test_an_argument_that_a_setting_is_for_is_refused(settings: dict[str, Any], key: str) -> None:
    """It would win over the setting without a word."""
    with pytest.raises(UsageError, match="is set twice, and the argument would win") as caught:
        check(config_from(settings))
    assert caught.value.where is not None
    assert f"training.optimizer_args.{key}" in caught.value.where
    check(config_from({"training.optimizer_args": {"weight_decay": 0.1}}))


@pytest.mark.parametrize("name", NEED_WHOLE_PARAMETERS)
def test_an_optimizer_that_needs_whole_parameters_is_refused_before_a_run(name: str) -> None:
    cut = {"distributed.strategy": "fsdp", "training.optimizer": name}
    with pytest.raises(UsageError, match="can't update parameters of which each rank holds a part"):
        check(config_from(cut))
    check(config_from({**cut, "distributed.strategy": "ddp"}))


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_an_option_with_which_an_update_fails_is_one_error(option: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], **{option: True})
    with pytest.raises(Exception, match=r".") as caught:
        optimizer.step()
    with pytest.raises(UsageError, match="AdamW can't update these parameters"):
        explain_failed_update(optimizer, caught.value)


def _fails(updates: int, schedule: Schedule) -> float:
    return 1 / updates


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("torch.optim.lr_scheduler:StepLR", "StepLR is a class, and a schedule of a config is a"),
        (f"{__name__}:_fails", "_fails failed after 0 updates"),
    ],
)
def test_a_schedule_that_is_no_function_or_fails_is_one_error(kind: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_schedule(Schedule(kind, 8))
