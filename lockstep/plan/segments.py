"""Measures each segment of a model on this machine, and divides them into pipeline stages of equal time.

    lockstep plan CONFIG --stages 4

Without a `split_spec` a pipeline is split by parameters, which every rank can count. Time differs: embeddings have many
parameters and compute little, and a head over a large vocabulary takes long. The result is printed as a `split_spec`
for
the config, so that a run does not depend on how fast a machine happened to be.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.models.chain import lent, run_segment, shared_parameters_of
from lockstep.models.protocol import require_segments
from lockstep.parallel.pipeline.plan import KEY, Partition, balanced_cuts, table
from lockstep.plan.workload import Workload, workload_of

ROUNDS = 7


@dataclass(frozen=True)
class Measured:
    """One segment, for one micro-batch.

    Attributes:
        forward, backward: seconds, medians.
        kept: bytes that it keeps from forward for backward, besides parameters.
    """

    name: str
    parameters: int
    forward: float
    backward: float
    kept: int

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def measure(work: Workload, config: Config, device: torch.device, rounds: int = ROUNDS) -> list[Measured]:
    """Run each segment's forward and backward pass on `device`.

    Raises:
        UsageError: the model is not a chain of segments.
    """
    torch.manual_seed(config.training.seed)
    with device:
        model = work.make()
    if init_weights := getattr(model, "init_weights", None):
        init_weights()  # uninitialised memory may hold numbers with slow arithmetic
    segments = require_segments(model)
    objective = work.objective(model)
    batch = work.batch(config.training.batch_size, device)
    borrowed = shared_parameters_of(model)
    inputs = values, keywords = objective.inputs(batch)
    found = []
    for place, (name, segment) in enumerate(segments):
        own = {**keywords, **lent(model, borrowed.get(name, {}))}
        last = place == len(segments) - 1

        def run(values: tuple[Any, ...], segment: nn.Module = segment, own: Any = own, last: bool = last) -> Any:
            outputs = run_segment(segment, values, own, inputs)
            return objective.summed(outputs, batch) if last else outputs

        size = sum(
            p.numel() for p in {*segment.parameters(), *(t for t in own.values() if isinstance(t, nn.Parameter))}
        )
        found.append(Measured(name, size, *_timed(run, values, model, device, rounds)))
        with torch.no_grad():
            outputs = run_segment(segment, values, own, inputs)
        values, keywords = outputs if isinstance(outputs, tuple) else (outputs,), {}
    return found


def _timed(
    run: Callable[[tuple[Any, ...]], Any], values: tuple[Any, ...], model: nn.Module, device: torch.device, rounds: int
) -> tuple[float, float, int]:
    """Return (seconds forward, seconds backward, bytes kept)."""
    forward, backward, kept = [], [], 0
    owned = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    for number in range(rounds + 1):  # the first one warms up
        inputs = tuple(_leaf(value) for value in values)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        begin = _now(device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run(inputs)
        middle = _now(device)
        tensors = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t.requires_grad]
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
        end = _now(device)
        model.zero_grad(set_to_none=True)
        if number:
            forward.append(middle - begin)
            backward.append(end - middle)
        kept = sum(saved.values())
    return median(forward), median(backward), kept


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def stages(measured: Sequence[Measured], count: int) -> tuple[Partition, dict[str, str]]:
    """Return `count` stages of equal time, and their `split_spec`.

    Raises:
        UsageError: there are fewer segments.
    """
    if not 1 < count <= len(measured):
        raise UsageError(
            f"{len(measured)} segments can't make {count} stages", where="--stages", fix=f"2 to {len(measured)}"
        )
    cuts = balanced_cuts([one.seconds for one in measured], count)
    edges = [0, *cuts, len(measured)]
    spans = tuple(range(a, b) for a, b in pairwise(edges))
    return Partition(spans, tuple(range(count))), {measured[cut].name: "beginning" for cut in cuts}


def command(config: Config, count: int) -> str:
    """Measure and divide the segments; return both as text."""
    device = torch.device("cuda" if torch.cuda.is_available() and config.distributed.device != "cpu" else "cpu")
    measured = measure(workload_of(config), config, device)
    parts, spec = stages(measured, count)
    names, width = [one.name for one in measured], max(len(one.name) for one in measured)
    where = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    )
    lines = [f"one micro-batch of {config.training.batch_size} on {where}", ""]
    lines.append(f"{'segment':{width}}  {'parameters':>13}  {'forward ms':>10}  {'backward ms':>11}  {'kept MiB':>8}")
    for one in measured:
        lines.append(
            f"{one.name:{width}}  {one.parameters:13,}  {one.forward * 1e3:10.2f}  {one.backward * 1e3:11.2f}  "
            f"{one.kept / 2**20:8.1f}"
        )
    cuts = "".join(f"\n      {name}: {side}" for name, side in spec.items())
    return "\n".join(
        [
            *lines, "", table(parts, names, [one.seconds * 1e3 for one in measured], "ms"), "",
            f"distributed:\n  {KEY.partition('.')[2]}:\n    split_spec:{cuts}",
        ]
    )  # fmt: skip
