"""Builds optimizers, learning-rate schedules and batch-size scaling of the learning rate.

The schedule depends on the number of optimizer updates, so it stands still in a step that the loss
scale skips. Warm-up is (update + 1) / warmup_steps: the first update never has a learning rate of
0. Factors of the peak rate over eight updates, two of which warm up:

    >>> def factors(kind):
    ...     schedule = Schedule(kind, total=8, warmup=2, min_ratio=0.1)
    ...     return [round(schedule.factor(updates), 2) for updates in range(9)]
    >>> factors("linear")
    [0.5, 1.0, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]
    >>> factors("cosine")
    [0.5, 1.0, 1.0, 0.94, 0.78, 0.55, 0.33, 0.16, 0.1]
    >>> factors("wsd")
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1]

Tests: tests/test_optim.py, tests/trainer/test_scheduler.py,
tests/parallel/test_worked_examples.py
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.config import TrainingConfig
from lockstep.config.checks_training import NEED_WHOLE_PARAMETERS, ON_PARTS
from lockstep.errors import RunError, UsageError, first_line, lost_a_peer
from lockstep.registry import OPTIMIZERS, SCHEDULES, keywords_of, require_arguments, require_call

# In these optimizers the update of each element depends on that element alone, so a shard is
# updated like the whole.
_ELEMENTWISE: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
# so users say of these
_registered: set[type[Optimizer]] = set()

# torch can run the fused kernels of these on shards; for others it raises "no sharding strategy".
_FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
# types of device; a registered one may lack them
_HAS_FUSED_KERNELS = ("cpu", "cuda", "xpu", "mps")


def register_elementwise(optimizer: type[Optimizer]) -> None:
    """Declare that an optimizer's update of an element depends on that element alone.

    It may then be sharded.
    """
    _registered.add(optimizer)


def check_shardable(optimizer: Optimizer) -> None:
    """Reject an optimizer that is not known to be elementwise.

    Its update of a shard may differ from that of the whole parameter.

    Fused kernels that torch cannot run on shards are replaced by plain ones, in place.
    """
    if getattr(optimizer, "shards", False):  # it gathers what it needs of others' shards
        return
    if type(optimizer) not in _registered.union(_ELEMENTWISE):
        what = f"{type(optimizer).__name__} is not known to update each element on its own"
        fix = (
            "use ddp, or call lockstep.optim.register_elementwise(TheOptimizer) if it is"
            " elementwise"
        )
        raise UsageError(
            what,
            why="under sharding it would see pieces of parameters and train another model",
            fix=fix,
        )
    if not isinstance(optimizer, _FUSED_ON_SHARDS):
        unfuse(optimizer)


def check_cut(kind: type[Optimizer]) -> None:
    """Raise a UsageError for a class of optimizer that fails on parts of parameters."""
    for name, why in NEED_WHOLE_PARAMETERS.items():
        known = OPTIMIZERS.load(name)
        if issubclass(kind, known):
            what = f"{kind.__name__} can't update parameters of which each rank holds a part"
            raise UsageError(what, where="the optimizer", why=why, fix=ON_PARTS)


def explain_failed_update(optimizer: Optimizer, error: Exception) -> None:
    """Raise a UsageError if an update failed that is torch's own, or on parameters that are cut.

    It computes something of the whole parameter, or writes into its state in a way that DTensor
    does not know. Return if the reason must be another one.
    """
    cut = updates_parts(optimizer)
    if isinstance(error, torch.OutOfMemoryError) or lost_a_peer(error):
        return
    if not cut or optimizer.defaults.get("capturable") or optimizer.defaults.get("differentiable"):
        # What a device says may come from an operation before.
        refused = isinstance(error, _REFUSALS) and not isinstance(error, torch.AcceleratorError)
        if refused and type(optimizer).__module__.startswith("torch.optim."):
            raise UsageError(
                f"{type(optimizer).__name__} can't update these parameters",
                where="training.optimizer, training.optimizer_args",
                why=first_line(error),
                fix="leave the arguments out that it names, or take another optimizer",
            ) from error
        return
    raise UsageError(
        f"{type(optimizer).__name__} failed on parameters of which each rank holds a part",
        where="the optimizer",
        why=first_line(error),
        fix=ON_PARTS,
    ) from error


def updates_parts(optimizer: Optimizer) -> bool:
    """Return whether it has a parameter of which this rank holds a part."""
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def check_no_closure(optimizer: Optimizer) -> None:
    """Reject an optimizer that evaluates the loss several times in an update.

    LBFGS does so, by a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} evaluates the loss again within an update, by a closure"
        why = "a step here is one forward and backward pass over its micro-batches, and one update"
        raise UsageError(
            what,
            why=why,
            fix="use an optimizer that updates from the gradients alone, such as AdamW",
        )


def unfuse(optimizer: Optimizer) -> bool:
    """Make an optimizer use its plain kernels, in place; return whether it used fused ones.

    The fused CPU kernels compute as many elements at a time as a register holds, and round the tail
    of a tensor, what remains, in another way. A weight of 24 numbers has no tail in steps of eight;
    its shards of 12 have one of four each. On a CPU the foreach kernels take a third longer than a
    loop over tensors.
    """
    fused = [group for group in optimizer.param_groups if group.get("fused")]
    for group in fused:
        group.update(
            fused=False,
            foreach=any(parameter.device.type != "cpu" for parameter in group["params"]),
        )
    return bool(fused)


def build_optimizer(
    name: str,
    parameters: Mapping[str, nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float | None,
    args: Mapping[str, Any],
    device: torch.device,
    reproducible: bool,
    blocks: Sequence[str] = (),
    splits: Mapping[str, tuple[int, Sequence[int]]] | None = None,
) -> Optimizer:
    """Build the config's optimizer, over parameters by their names.

    Or raise a UsageError if there is none, or it does not accept these arguments.

    Kernels are fused if the optimizer has them; with `reproducible` they are plain (see `unfuse`).
    An optimizer with a method `groups_of` divides the parameters by their names, those of the
    model's `blocks`, and the `splits` of weights that hold several matrices.
    """
    if reproducible and args.get("fused"):
        what = (
            "fused optimizer kernels round shards differently, so the bits can't be equal on any"
            " number of ranks"
        )
        where = "training.optimizer_args.fused, distributed.reproducible"
        raise UsageError(what, where=where, fix="leave fused out, or set reproducible: false")
    kind: Callable[..., Optimizer] = OPTIMIZERS.load(name)
    accepted = inspect.signature(kind).parameters
    over = list(parameters.values())
    divided = getattr(kind, "groups_of", None)
    groups: Any = over if divided is None else divided(parameters, blocks, splits or {})
    fuses = (
        "fused" in accepted
        and device.type in _HAS_FUSED_KERNELS
        and not any(p.is_complex() for p in over)
    )
    settings: dict[str, Any] = {"lr": learning_rate}
    if weight_decay is not None and "weight_decay" in accepted:
        settings["weight_decay"] = weight_decay
    if reproducible and "foreach" in accepted:
        settings["foreach"] = device.type != "cpu"
    elif fuses and (
        kind in _FUSED_ON_SHARDS or not any(isinstance(parameter, DTensor) for parameter in over)
    ):
        settings["fused"] = True
    try:
        made = kind(groups, **{**settings, **args})
    except _REFUSALS as error:
        raise _not_accepted(name, kind, error) from error
    if not isinstance(made, Optimizer):
        what = f"{name} returned {type(made).__name__}, which is not an optimizer"
        fix = "let it return an object of a subclass of torch.optim.Optimizer"
        raise UsageError(what, where=OPTIMIZERS.where, fix=fix)
    return made


# What optimizers raise about arguments: of other names, out of range, or that exclude each other.
_REFUSALS = (TypeError, ValueError, IndexError, RuntimeError, AssertionError)


def _not_accepted(name: str, kind: Callable[..., Any], error: Exception) -> UsageError:
    accepted = [each for each in inspect.signature(kind).parameters if each != "params"]
    what = f"the optimizer {name} does not accept these arguments: {first_line(error)}"
    fix = f"it accepts {', '.join(accepted)}"
    return UsageError(what, where="training.optimizer_args", fix=fix)


def check_optimizer(name: str, args: Mapping[str, Any], weight_decay: float | None = None) -> None:
    """Raise the UsageError that `build_optimizer` would for a config's optimizer.

    Of torch's own optimizers one of a single parameter is made, which refuses bad values.
    """
    kind = OPTIMIZERS.load_callable(name)
    if isinstance(kind, type) and not issubclass(kind, Optimizer):
        fix = (
            "name a class that is one, or a function (params, lr, …) that returns an object of one"
        )
        raise UsageError(
            f"{name} is not a subclass of torch.optim.Optimizer", where=OPTIMIZERS.where, fix=fix
        )
    accepted = keywords_of(kind)
    if accepted is not None and "lr" not in accepted:
        why = "it is made with lr=training.learning_rate, and the schedule sets lr of its groups"
        what = f"the optimizer {name} takes no argument 'lr'"
        raise UsageError(
            what, where=OPTIMIZERS.where, why=why, fix="let __init__ take (params, lr, …)"
        )
    require_arguments(
        kind, {"lr": 0.0, **args}, f"the optimizer {name}", "training.optimizer_args", []
    )
    if kind.__module__.startswith("torch.optim."):
        try:
            kind([nn.Parameter(torch.zeros(1, 1))], **{"lr": 0.0, **args})
        except _REFUSALS as error:
            raise _not_accepted(name, kind, error) from error


def rebind(
    optimizer: Optimizer, names: Mapping[int, str], placed: Mapping[str, nn.Parameter]
) -> None:
    """Replace the parameters of an optimizer by the `placed` ones that train.

    It was created before placement. `names` has the canonical name by the id of each unplaced
    parameter.
    """
    there = {id(parameter) for parameter in placed.values()}
    if all(id(p) in there for group in optimizer.param_groups for p in group["params"]):
        return
    made_state = _state_as_made(optimizer)
    if optimizer.state and made_state is None:
        what = "the optimizer already has state from before the model was placed"
        fix = (
            "pass a fresh optimizer, or a function `parameters -> optimizer`; to go on, load a"
            " checkpoint"
        )
        raise UsageError(
            what, why="its state belongs to parameters that placement replaces", fix=fix
        )
    for group in optimizer.param_groups:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            what = f"the optimizer holds {len(unknown)} parameter(s) that are not the model's"
            why = (
                "it was made for another model, or after this one was wrapped: nothing would"
                " train; or a loss function that is not an nn.Module holds them"
            )
            fix = (
                "make it from model.parameters() of the model that you pass, or pass `parameters"
                " -> optimizer`; write a loss function with weights as an nn.Module, and pass its"
                " object as loss_fn"
            )
            raise UsageError(what, where="the optimizer", why=why, fix=fix)
        group["params"] = [placed[names[id(p)]] for p in group["params"] if names[id(p)] in placed]
    if made_state is not None:
        optimizer.state = made_state(optimizer.param_groups)


MakeState = Callable[[list[dict[str, Any]]], Any]


def _state_as_made(optimizer: Optimizer) -> MakeState | None:
    """Return what makes the state of an optimizer that has it from its construction on: Adagrad's.

    None: it has none, or it has been trained with since, so that nothing makes it again.
    """
    if not optimizer.state:
        return None
    accepted = keywords_of(type(optimizer))
    options = {
        key: value
        for key, value in optimizer.defaults.items()
        if accepted is None or key in accepted
    }

    def make(groups: list[dict[str, Any]]) -> Any:
        return type(optimizer)([dict(group) for group in groups], **options).state

    try:
        again = make(optimizer.param_groups)
    except (TypeError, ValueError):  # it takes more than the options of its groups
        return None
    same = again.keys() == optimizer.state.keys() and all(
        _is_same(again[parameter], state) for parameter, state in optimizer.state.items()
    )
    return make if same else None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two states of a parameter hold the same values."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def made_by(
    make: Callable[[Any], Optimizer],
    placed: Mapping[str, nn.Parameter],
    names: Mapping[int, str],
    of_loss: Sequence[nn.Parameter],
) -> Optimizer:
    """Return the optimizer that a user's function makes of the `placed` parameters.

    It may add the weights of a loss function, `of_loss`, by itself: `[*parameters,
    *loss_fn.parameters()]`, or in a group of their own. Then it is given the model's alone.
    """
    if not of_loss:
        return make(list(placed.values()))
    own = {id(parameter) for parameter in of_loss}
    of_model = [
        parameter for name, parameter in placed.items() if name not in {names[each] for each in own}
    ]
    optimizer = make(of_model)
    groups = optimizer.param_groups
    if not any(id(p) in own for group in groups for p in group["params"]):
        return make(list(placed.values()))
    for group in groups:
        group["params"] = [placed[names[id(p)]] if id(p) in own else p for p in group["params"]]
    return optimizer


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the number of updates.

    `kind` is a name of `lockstep.registry.SCHEDULES`, or package.module:name of a function such as
    `linear`, which returns the factor of the peak learning rate after the warm-up.
    """

    kind: str
    total: int  # updates in the whole run
    warmup: int = 0  # updates over which the rate rises to its peak
    min_ratio: float = 0.1  # final rate over peak rate
    # for wsd, the fraction of `total` at the end in which the rate falls linearly
    decay_ratio: float = 0.2

    def factor(self, updates: int) -> float:
        """Return the factor of the peak learning rate after `updates` updates."""
        if updates < self.warmup:
            return (updates + 1) / self.warmup
        found = SCHEDULES.load(self.kind)(updates, self)
        try:
            factor = float(found)
        except (TypeError, ValueError):
            factor = math.nan
        if not math.isfinite(factor):
            what = f"the schedule {self.kind} returned {found!r} after {updates} updates"
            where = SCHEDULES.where
            raise RunError(
                what,
                where=where,
                fix="let it return a number, the factor of the peak learning rate",
            )
        return factor

    def rates(self, groups: Sequence[dict[str, Any]], updates: int) -> list[float]:
        """Return the learning rate of each parameter group."""
        factor = self.factor(updates)
        return [group["initial_lr"] * factor for group in groups]


def check_schedule(schedule: Schedule) -> None:
    """Check that a config's schedule exists and takes (updates, schedule).

    If `total` is known, it must return a number.
    """
    found = SCHEDULES.load_callable(schedule.kind)
    if isinstance(found, type):
        what = f"{schedule.kind} is a class, and a schedule of a config is a function"
        why = "it takes (updates, schedule), and returns the factor of the peak learning rate"
        fix = "write such a function, or constant, linear, cosine or wsd"
        raise UsageError(what, where=SCHEDULES.where, why=why, fix=fix)
    require_call(found, ("updates", "schedule"), schedule.kind, SCHEDULES.where)
    if schedule.total:
        try:
            schedule.factor(schedule.warmup)
        except RunError as error:
            raise UsageError(error.what, where=error.where, fix=error.fix) from None
        except Exception as error:  # of the user's function
            what = f"the schedule {schedule.kind} failed after {schedule.warmup} updates"
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(what, where=SCHEDULES.where, why=why) from error


def constant(updates: int, schedule: Schedule) -> float:
    """Return 1: the rate stays at its peak."""
    return 1.0


def linear(updates: int, schedule: Schedule) -> float:
    """Return a factor that falls in a straight line from the end of the warm-up."""
    return _above_minimum(1 - _progress(updates, schedule.warmup, schedule.total), schedule)


def cosine(updates: int, schedule: Schedule) -> float:
    """Return a factor that falls in one half-cosine from the end of the warm-up."""
    return _above_minimum(
        0.5 * (1 + math.cos(math.pi * _progress(updates, schedule.warmup, schedule.total))),
        schedule,
    )


def warmup_stable_decay(updates: int, schedule: Schedule) -> float:
    """Return 1, and in the last updates a factor that falls in a straight line."""
    start = max(schedule.warmup, schedule.total - round(schedule.total * schedule.decay_ratio))
    return _above_minimum(1 - _progress(updates, start, schedule.total), schedule)


def _progress(updates: int, start: int, total: int) -> float:
    return min(1.0, max(0.0, (updates - start) / max(1, total - start)))


def _above_minimum(shape: float, schedule: Schedule) -> float:
    """Return the factor for a shape that falls from 1 to 0: it falls to `min_ratio`."""
    return schedule.min_ratio + (1 - schedule.min_ratio) * shape


class PlateauSchedule:
    """A torch scheduler whose `step` takes a metric.

    It changes the optimizer's rate after an evaluation, and steps leave the rate as it is.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str) -> None:
        self._scheduler = scheduler
        self.metric = metric

    def follow(self, value: float) -> None:
        """Take a new value of the metric."""
        self._scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._scheduler.load_state_dict(dict(state))


class TorchSchedule:
    """A new torch scheduler that is stepped up to the number of updates.

    A checkpoint needs nothing from it.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._made = 0
        self._first = copy.deepcopy(scheduler.state_dict())
        self._first_groups = self._options()
        self._groups = self._options()

    def rates(self, groups: Sequence[dict[str, Any]], updates: int) -> list[float]:
        """Return the learning rate of each parameter group.

        The momenta that the scheduler changes are set.
        """
        if updates < self._made:
            self._scheduler.load_state_dict(copy.deepcopy(self._first))
            self._made = 0
            self._groups = self._first_groups
        for group, options in zip(groups, self._groups, strict=True):
            group.update(options)  # as the scheduler left them; a loaded checkpoint has its own
        with warnings.catch_warnings():
            # no update between them is needed
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            while self._made < updates:
                self._scheduler.step()
                self._made += 1
        self._groups = self._options()
        return [group["lr"] for group in groups]

    def _options(self) -> list[dict[str, Any]]:
        moved = ("lr", "initial_lr", "momentum", "betas")
        return [
            {key: group[key] for key in moved if key in group}
            for group in self._scheduler.optimizer.param_groups
        ]


def scaled_learning_rate(training: TrainingConfig, global_batch: int) -> tuple[float, str]:
    """Return the peak learning rate for a global batch, and one line that explains it."""
    rate = training.learning_rate
    rule = training.lr_scaling
    base_batch = training.base_batch_size
    if rule == "none":
        return rate, f"learning rate {rate:g} at a global batch of {global_batch}"
    if base_batch is None:
        what = f"lr_scaling: {rule} needs the batch at which learning_rate was chosen"
        raise UsageError(what, where="training.base_batch_size", fix="set training.base_batch_size")
    ratio = global_batch / base_batch
    scaled = rate * (ratio if rule == "linear" else math.sqrt(ratio))
    return (
        scaled,
        (
            f"learning rate {scaled:g} = {rate:g} ×"
            f" {'' if rule == 'linear' else '√'}({global_batch}/{base_batch}) ({rule})"
        ),
    )
