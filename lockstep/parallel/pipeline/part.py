"""One stage's module: a run of the model's segments, and the parameters that they borrow.

`StageModule.forward` folds tensors through its segments, as the whole model's forward pass does. The first stage takes
its inputs from the micro-batch that the rank works on, the last one turns outputs into what the pass is for (a loss, or
the outputs themselves), as `CurrentMicroBatch` says. So nothing but tensors travels between stages, and the batch stays
where it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.models.chain import run_segment
from lockstep.models.observed import LossCalls
from lockstep.precision import Precision
from lockstep.randomness import RandomState
from lockstep.torch_compat.tensor_versions import base_of


@dataclass(frozen=True)
class Spot:
    """Where a parameter or a buffer is registered. Looked up at each use: FSDP2 exchanges what lies there."""

    module: nn.Module
    attribute: str

    def tensor(self) -> Any:
        """What is registered there now."""
        return getattr(self.module, self.attribute)


@dataclass
class CurrentMicroBatch:
    """What the stages of a rank work on now, set by whoever runs them.

    Attributes:
        inputs: the arguments of the model's forward pass.
        finish: the model's outputs → what the last stage returns.
        observes: calls of torch's loss functions in the last stage are noted.
        calls: those of its newest forward pass.
    """

    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] = lambda: ((), {})
    finish: Callable[[Any], Any] = lambda outputs: outputs
    observes: bool = False
    calls: LossCalls | None = None


@dataclass(frozen=True)
class StageSegment:
    """A segment within its stage: its name, and the parameters that it borrows at each call, by keyword."""

    name: str
    borrowed: Mapping[str, Spot] = field(default_factory=dict)


class StageModule(nn.Module):
    """Stage `index` of `count`.

    Args:
        segments: (name, module) in order.
        borrowed: segment name → {keyword: where the parameter is}.
        blocks: the model's repeated blocks among the segments.
        earlier: segment name → how often a module that draws under this name ran in earlier stages.
        owns: registers parameters that only segments of this stage borrow.
    """

    def __init__(
        self, index: int, count: int, segments: Sequence[tuple[str, nn.Module]], *,
        borrowed: Mapping[str, Mapping[str, Spot]], blocks: Sequence[tuple[str, nn.Module]],
        earlier: Mapping[str, int], work: CurrentMicroBatch, precision: Precision, owns: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.index = index
        self.is_first, self.is_last = index == 0, index == count - 1
        self.segments_here = nn.ModuleList(module for _, module in segments)
        self.owns = owns
        self._links = [StageSegment(name, borrowed.get(name, {})) for name, _ in segments]
        self._blocks = list(blocks)
        self._earlier = dict(earlier)
        self._work, self._precision = work, precision

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return list(self._blocks)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Also those that are borrowed: a schedule that splits the backward pass asks here what to differentiate."""
        own = list(super().parameters(recurse))
        yield from own
        seen = {id(parameter) for parameter in own}
        for spot in self.borrowed_spots():
            if id(spot.tensor()) not in seen:
                seen.add(id(spot.tensor()))
                yield spot.tensor()

    def borrowed_spots(self) -> Iterator[Spot]:
        """Of all parameters that segments of this stage borrow."""
        for link in self._links:
            yield from link.borrowed.values()

    def enter(self, random_state: RandomState, micro_batch: int) -> None:
        """A forward pass of this stage begins: random numbers go on where the earlier stages left them."""
        random_state.at(micro_batch)
        random_state.calls.update(self._earlier)

    def forward(self, *values: Any) -> Any:
        keywords: Mapping[str, Any] = {}
        work = self._work
        # Stages in the middle have no batch.
        inputs = work.inputs() if self.is_first or self.is_last else ((), {})
        given = {id(value) for value in values}
        observing = LossCalls() if self.is_last and work.observes else nullcontext()
        with self._precision.autocast(), observing as work.calls:
            if self.is_first:
                values, keywords = inputs
            outputs: Any = values
            for link, segment in zip(self._links, self.segments_here, strict=True):
                lent = {keyword: spot.tensor() for keyword, spot in link.borrowed.items()}
                outputs = run_segment(segment, values, {**keywords, **lent}, inputs)
                values, keywords = outputs if isinstance(outputs, tuple) else (outputs,), {}
        if self.is_last:
            with self._precision.autocast():
                return work.finish(outputs)
        return tuple(_own(value, given) for value in values)


def _own(value: Tensor, given: set[int]) -> Tensor:
    """Something to send that is nobody else's: torch's runtime detaches what it has sent, in place."""
    if base_of(value) is not None or id(value) in given:
        return value.clone().contiguous()
    return value.contiguous()
