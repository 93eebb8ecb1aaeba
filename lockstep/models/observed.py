"""Observes what a loss was divided by, in the calls of torch's loss functions.

Means of micro-batches add up to the mean of the whole batch only if each is weighted by its
divisor, in which models differ. Inside a `LossCalls`, the loss functions of `torch.nn.functional`
are therefore replaced by wrappers that record the call. Other threads must not compute losses
meanwhile. Compiled code, and losses written in other operations, are not observed. Graphs of
torch.export call operators instead; `note_losses` makes such a graph record them itself.

Tests: tests/trainer/test_loss_check.py, tests/torch_compat/test_loss_functions.py
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lockstep.torch_compat.compilation import is_traced
from lockstep.torch_compat.loss_functions import NAMES
from lockstep.torch_compat.operators import schema_of


@dataclass(slots=True)
class Mean:
    """A mean that a loss function computed."""

    size: int  # number of elements
    divisor: int | Tensor  # of their sum; an integer if it follows from shapes alone
    of_elements: bool  # whether it is over elements of the outputs, instead of targets


class LossCalls:
    """Records calls of torch's loss functions inside a `with` block.

    A class, because each micro-batch enters one.
    """

    def __init__(self) -> None:
        self.means: list[Mean] = []
        # how many returned a sum, or one loss per element, which the caller reduced itself
        self.others = 0
        # the targets of a binary cross entropy that takes any number, of which one is not in [0, 1]
        self.odd_targets: Tensor | None = None
        self.before: dict[str, Callable[..., Tensor]] = {}  # the original functions

    def __enter__(self) -> "LossCalls":
        global _innermost
        self._found = found = dict(zip(_READERS, _look_up(NAMES), strict=True))
        self._outer = outer = _innermost
        # Inside another one the functions record calls already: nested calls belong to the outer
        # function.
        self.before = (
            found
            if outer is None
            else {
                name: outer.before[name] if each is _NOTING[name] else each
                for name, each in found.items()
            }
        )
        _innermost = self
        NAMES.update(_NOTING)
        return self

    def __exit__(self, *_error: object) -> None:
        global _innermost
        NAMES.update(self._found)
        _innermost = self._outer

    def note(self, name: str, call: Mapping[str, Any], *, is_mean: bool) -> None:
        if is_mean:
            self.means.append(_READERS[name](call))
        else:
            self.others += 1
        if name == _ANY_NUMBER and _has_odd(call["target"]):
            self.odd_targets = call["target"]

    def count(self, batch: Any, samples: Callable[[Any], int]) -> int | Tensor | None:
        """Return the number that a loss of these means is a mean over.

        None if the calls do not show it.

        Elements of outputs are a multiple of the batch's `samples`, and count as these.
        """
        if not self.means or self.others:
            return None
        if len(self.means) == 1 and not self.means[0].of_elements:
            return self.means[0].divisor
        if all(mean.of_elements for mean in self.means):
            return samples(batch)
        if self._of_same_size:  # start and end of an answer
            return _average([mean.divisor for mean in self.means])
        # Several means over different things have a common weight only if none of them leaves
        # anything out.
        return (
            samples(batch) if all(int(mean.divisor) == mean.size for mean in self.means) else None
        )

    @property
    def _of_same_size(self) -> bool:
        """Return whether there are several means, over as many targets before some are left out."""
        return len(self.means) > 1 and len({mean.size for mean in self.means}) == 1

    @property
    def uneven(self) -> tuple[int, ...]:
        """The divisors of means of one size that leave out different targets.

        Empty where the host does not know them.
        """
        divisors = tuple(mean.divisor for mean in self.means if isinstance(mean.divisor, int))
        differ = self._of_same_size and not self.others and len(set(divisors)) > 1
        return divisors if differ and len(divisors) == len(self.means) else ()

    def divisors(self) -> tuple[float, ...]:
        """Return the divisor of each mean; empty if they are not the whole loss."""
        return () if self.others else tuple(float(mean.divisor) for mean in self.means)


def _average(counts: list[int | Tensor]) -> int | Tensor:
    if all(isinstance(count, int) and count == counts[0] for count in counts):
        return counts[0]
    return torch.stack([torch.as_tensor(count, dtype=torch.float32) for count in counts]).mean()


def _noting(name: str) -> Callable[..., Tensor]:
    """Return what stands in place of a loss function of torch, and notes its calls."""
    function = NAMES[name]
    arguments = tuple(inspect.signature(function).parameters)
    inside = False  # torch calls the function again under a mode or for a subclass of Tensor

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Tensor:
        """Call torch's function, and note the call; one that it makes itself is not noted."""
        nonlocal inside
        calls = _innermost
        original = function if calls is None else calls.before[name]
        if calls is None or inside or torch.compiler.is_compiling():
            unnoted: Tensor = original(*args, **kwargs)
            return unnoted
        inside = True
        try:
            result: Tensor = original(*args, **kwargs)
        finally:
            inside = False
        if type(result) is not Tensor and is_traced():
            return result
        call = dict(zip(arguments, args, strict=False)) | kwargs
        takes_mean = "reduction" not in call or call["reduction"] in ("mean", "batchmean")
        calls.note(name, call, is_mean=takes_mean and result.ndim == 0)
        return result

    return noting


def _targets(call: Mapping[str, Any]) -> Mean:
    """Count the class indices that are not ignored, or add up the weights of their classes.

    Where targets are probabilities, each position counts.
    """
    scores = call["input"]
    target = call["target"]
    weight = call["weight"] if "weight" in call else None  # noqa: SIM401  # without a call, as this runs in each step
    if target.is_floating_point():
        positions = target.numel() // max(1, scores.shape[1 if scores.ndim > 1 else 0])
        return Mean(positions, positions, of_elements=False)
    valid: Tensor = target != (call["ignore_index"] if "ignore_index" in call else -100)  # noqa: SIM401
    if weight is not None:
        each = weight.detach().to(target.device)[torch.where(valid, target, 0)]
        return Mean(target.numel(), torch.where(valid, each, 0.0).sum(), of_elements=False)
    count = valid.sum()
    known = count.device.type == "cpu" and type(count) is Tensor  # not a fake tensor of a plan
    return Mean(target.numel(), int(count) if known else count, of_elements=False)


_ANY_NUMBER = "binary_cross_entropy_with_logits"


def _has_odd(targets: Tensor) -> bool:
    """Return whether targets that the host can read are not all from 0 to 1."""
    if targets.device.type != "cpu" or type(targets) is not Tensor or not targets.numel():
        return False
    least, most = torch.aminmax(targets)
    return not (least >= 0 and most <= 1)


def _elements(call: Mapping[str, Any]) -> Mean:
    size = max(call["input"].numel(), call["target"].numel())
    return Mean(size, size, of_elements=True)


def _samples(call: Mapping[str, Any]) -> Mean:
    """Count texts: their losses are divided by their own lengths, and then by their number."""
    size = len(call["input_lengths"])
    return Mean(size, size, of_elements=True)


_ELEMENTWISE = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "kl_div",
    "poisson_nll_loss",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
)
_READERS: dict[str, Callable[[Mapping[str, Any]], Mean]] = {
    "cross_entropy": _targets,
    "nll_loss": _targets,
    "ctc_loss": _samples,
    **dict.fromkeys(_ELEMENTWISE, _elements),
}

_look_up = operator.itemgetter(*_READERS)
_NOTING = {name: _noting(name) for name in _READERS}
_innermost: LossCalls | None = None  # the active one

_NAMES = {  # operator → the equivalent function
    **{getattr(torch.ops.aten, name): name for name in (*_ELEMENTWISE, "ctc_loss")},
    torch.ops.aten.cross_entropy_loss: "cross_entropy",
    torch.ops.aten.nll_loss_nd: "nll_loss",
}
_MEAN = 1  # value of an operator's `reduction`


def note_losses(module: fx.GraphModule) -> None:
    """Make a captured graph, and those that it calls, record the loss functions in them."""
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            if getattr(node.target, "overloadpacket", None) in _NAMES:
                node.args = (node.target, *node.args)
                node.target = noted
        inner.recompile()


def noted(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call an operator that computes a loss, and record it.

    Graphs find this function by its name.
    """
    result: Tensor = operator(*args, **kwargs)
    calls = _innermost
    if calls is not None and not torch.compiler.is_compiling():
        names = schema_of(operator).arguments
        call = {each.name: each.default_value for each in names} | kwargs
        call |= {each.name: value for each, value in zip(names, args, strict=False)}
        call.setdefault("input", call.get("self"))
        calls.note(_NAMES[operator.overloadpacket], call, is_mean=call["reduction"] == _MEAN)
    return result
