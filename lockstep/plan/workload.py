"""Describes the model and the data of a plan, and measures the model's segments on this machine.

The model can be built without memory, and the data is one sample. A plan needs only a few blocks of
a long chain of equal ones: the record of one is repeated for those left out.

`lockstep plan CONFIG --stages 4` divides segments into pipeline stages of equal time. Without a
`split_spec` a pipeline is split by parameters, but embeddings compute little, and a head over a
large vocabulary takes long. The result is printed for the config, so that a run does not depend on
how fast a machine happened to be.

Tests: tests/plan/test_segments.py, tests/plan/test_auto.py
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.config import Config
from lockstep.data import build_data
from lockstep.errors import UsageError
from lockstep.machine import accelerator
from lockstep.models import build_model
from lockstep.models.chain import lent, run_segment
from lockstep.models.language import set_token_losses
from lockstep.models.protocol import blocks_of
from lockstep.parallel.facts import ModelFacts, facts_of
from lockstep.parallel.pipeline.plan import KEY, Partition, balanced_cuts, table
from lockstep.torch_compat.pytree import tree_map

KEPT_BLOCKS = 3  # of many equal blocks: first, the repeated one, last
REPEATED = 1  # its index


def kept_blocks(device_type: str) -> int:
    """Return the number of blocks that represent any number of them.

    It is larger on CPUs, where FSDP gathers ahead in the forward pass too.
    """
    return KEPT_BLOCKS + 2 * (device_type == "cpu")


class SkipInit(TorchFunctionMode):
    """Skips `torch.nn.init`, which takes most of the time of building a model.

    On meta there is nothing to fill.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Workload:
    """A model and its data, as descriptions."""

    make: Callable[[], nn.Module]  # builds the model on the active default device
    sample: Any  # one sample of the data, a tree of tensors; only shapes and dtypes matter
    loss_fn: Any = None  # None: the model's own

    def model(self) -> nn.Module:
        """Build a new model on meta, without values."""
        with torch.device("meta"), SkipInit():
            return self.make()

    @cached_property
    def description(self) -> nn.Module:
        """The model on meta, read and not changed."""
        return self.model()

    @cached_property
    def facts(self) -> ModelFacts:
        """The description's offers, read once."""
        return self.facts_of(self.description)

    @cached_property
    def equal_blocks(self) -> list[str]:
        """Names of the model's blocks, if they are all equal and make up one ModuleList.

        Otherwise empty.
        """
        blocks = self.facts.blocks
        names = [name for name, _ in blocks]
        equal = len({block_description(block) for _, block in blocks}) == 1
        return names if equal and _list_of(self.description, names) is not None else []

    def with_blocks(self, kept: Sequence[int]) -> nn.Module | None:
        """Copy the model on meta with only these of `equal_blocks`.

        Return None if it does not list them alone.
        """
        names = self.equal_blocks
        model = self.description
        left_out = [position for position in range(len(names)) if position not in set(kept)]
        blocks = [model.get_submodule(names[position]) for position in left_out]
        short = copy.deepcopy(model, {id(block): block for block in blocks})  # those are not copied
        members = _list_of(short, names)
        assert members is not None
        for position in reversed(left_out):
            del members[position]
        return short if len(blocks_of(short)) == len(kept) else None

    def shortened(self, most: int) -> tuple[nn.Module, int]:
        """Return a copy on meta with `most` of its equal blocks, and how many were left out.

        The block REPEATED stands for the blocks that were left out.
        """
        number = len(self.equal_blocks)
        short = self.with_blocks(range(most)) if number > most + 1 else None
        if short is not None:
            return short, number - most
        return self.model(), 0

    def facts_of(self, model: nn.Module) -> ModelFacts:
        """Return what a model offers that this makes, with a copy of the loss function."""
        return facts_of(model, copy.deepcopy(self.loss_fn))

    def batch(self, size: int, device: torch.device | None = None) -> Any:
        """Create a micro-batch of `size` samples, all zeros."""

        def stacked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return (
                    torch.full((size,), leaf, device=device)
                    if isinstance(leaf, bool | int | float)
                    else leaf
                )
            return torch.zeros((size, *leaf.shape), dtype=leaf.dtype, device=device)

        return tree_map(stacked, self.sample)

    def tokens_per_sample(self) -> int:
        """Return the positions in a language model's sample; 1 for anything else."""
        ids = self.sample.get("input_ids") if isinstance(self.sample, Mapping) else None
        return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim == 1 else 1


def workload_of(config: Config) -> Workload:
    """Return a config's model, data and loss.

    Without `data.name`, a language model gets windows of its `block_size`; others raise UsageError.
    """
    facts: dict[str, Any] = {}
    sample: Any = None
    if config.data.name is not None:
        data = build_data(config.data, seed=config.training.seed)
        facts = data.facts
        sample = data.train[0]

    loss_fn: Any = None
    if config.loss_fn is not None:
        # loads the trainer, which a plan does not need
        from lockstep.trainer.named_loss import loss_fn_of

        loss_fn = loss_fn_of(config)
    work = Workload(partial(_built, config, facts, loss_fn is not None), sample, loss_fn)
    if sample is None:
        length = getattr(work.description, "block_size", None)
        if length is None:
            raise UsageError(
                "nothing says what a sample looks like", where="data.name", fix="set data.name"
            )
        ids = torch.zeros(length, dtype=torch.int64)
        described = work.description
        work = replace(work, sample={"input_ids": ids, "targets": ids})
        vars(work)["description"] = described  # it is the same model: no need to build it twice
    return work


def _built(config: Config, facts: dict[str, Any], has_loss_fn: bool) -> nn.Module:
    """Build a config's model, whose losses are computed as in training."""
    model = build_model(config.model, facts)
    training = config.training
    set_token_losses(
        model,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
        chunks=training.loss_chunks,
        has_loss_fn=has_loss_fn,
    )
    return model


def _list_of(model: nn.Module, names: Sequence[str]) -> nn.ModuleList | None:
    """Return the ModuleList whose members have these names."""
    for name, module in model.named_modules():
        inside = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        if isinstance(module, nn.ModuleList) and inside and inside == list(names):
            return module
    return None


def block_description(block: nn.Module) -> str:
    """Return a string that is equal for blocks with the same computation on the same shapes."""
    plain = [
        (
            name,
            sorted((k, v) for k, v in vars(m).items() if isinstance(v, bool | int | float | str)),
        )
        for name, m in block.named_modules()
    ]
    return (
        f"{block!r} {plain} {[(n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()]}"
    )


@dataclass(frozen=True)
class Measured:
    """One segment, for one micro-batch."""

    name: str
    parameters: int
    forward: float  # forward, backward: seconds, medians
    backward: float
    kept: int  # bytes that it keeps from forward for backward, besides parameters

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def measure_segments(
    work: Workload, config: Config, device: torch.device, rounds: int = 7
) -> list[Measured]:
    """Run each segment's passes on `device`.

    Raises UsageError: the model is not a chain of segments.
    """
    torch.manual_seed(config.training.seed)
    with device:
        model = work.make()
    if init_weights := getattr(model, "init_weights", None):
        init_weights()  # uninitialised memory may hold numbers with slow arithmetic
    facts = work.facts_of(model)
    segments = facts.required_chain()
    objective = facts.objective
    batch = work.batch(config.training.batch_size, device)
    inputs = values, keywords = objective.inputs(batch)
    measured = []
    for position, (name, segment) in enumerate(segments):
        own = {**keywords, **lent(model, facts.borrowed.get(name, {}))}
        last = position == len(segments) - 1

        def run(
            values: tuple[Any, ...], segment: nn.Module = segment, own: Any = own, last: bool = last
        ) -> Any:
            outputs = run_segment(segment, values, own, inputs)
            return objective.summed(outputs, batch) if last else outputs

        parameters = {
            *segment.parameters(),
            *(t for t in own.values() if isinstance(t, nn.Parameter)),
        }
        size = sum(p.numel() for p in parameters)
        measured.append(Measured(name, size, *_timed(run, values, model, device, rounds)))
        with torch.no_grad():
            outputs = run_segment(segment, values, own, inputs)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        keywords = {}
    return measured


def _timed(
    run: Callable[[tuple[Any, ...]], Any],
    values: tuple[Any, ...],
    model: nn.Module,
    device: torch.device,
    rounds: int,
) -> tuple[float, float, int]:
    """Return (seconds forward, seconds backward, bytes kept)."""
    forward = []
    backward = []
    kept = 0
    owned = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    for number in range(rounds + 1):  # the first one warms up
        inputs = tuple(
            (
                value.detach().requires_grad_()
                if isinstance(value, Tensor) and value.is_floating_point()
                else value
            )
            for value in values
        )
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
        tensors = [
            t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t.requires_grad
        ]
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
        end = _now(device)
        model.zero_grad(set_to_none=True)
        if number:
            forward.append(middle - begin)
            backward.append(end - middle)
        kept = sum(saved.values())
    return median(forward), median(backward), kept


def _now(device: torch.device) -> float:
    accelerator.synchronize(device)
    return time.perf_counter()


def equal_stages(measured: Sequence[Measured], count: int) -> tuple[Partition, dict[str, str]]:
    """Return `count` stages of equal time, and their `split_spec`.

    Raises UsageError: there are fewer segments.
    """
    if not 1 < count <= len(measured):
        what = f"{len(measured)} segments can't make {count} stages"
        raise UsageError(what, where="--stages", fix=f"2 to {len(measured)}")
    cuts = balanced_cuts([segment.seconds for segment in measured], count)
    spans = tuple(range(a, b) for a, b in pairwise([0, *cuts, len(measured)]))
    return Partition(spans, tuple(range(count))), {measured[cut].name: "beginning" for cut in cuts}


def plan_stages(config: Config, count: int) -> str:
    """Measure and divide the segments; return both as text."""
    device = torch.device((config.distributed.device != "cpu" and accelerator.found()) or "cpu")
    measured = measure_segments(workload_of(config), config, device)
    parts, spec = equal_stages(measured, count)
    names = [segment.name for segment in measured]
    width = max(len(segment.name) for segment in measured)
    where = (
        accelerator.name_of(device)
        if device.type != "cpu"
        else f"the CPU, {torch.get_num_threads()} threads"
    )
    lines = [f"one micro-batch of {config.training.batch_size} on {where}", ""]
    lines.append(
        f"{'segment':{width}}  {'parameters':>13}  {'forward ms':>10}  {'backward ms':>11} "
        f" {'kept MiB':>8}"
    )
    for segment in measured:
        lines.append(
            f"{segment.name:{width}}  {segment.parameters:13,}  {segment.forward * 1e3:10.2f} "
            f" {segment.backward * 1e3:11.2f}  {segment.kept / 2**20:8.1f}"
        )
    lines += ["", table(parts, names, [segment.seconds * 1e3 for segment in measured], "ms"), ""]
    lines += ["distributed:", f"  {KEY.partition('.')[2]}:", "    split_spec:"]
    return "\n".join([*lines, *(f"      {name}: {side}" for name, side in spec.items())])
