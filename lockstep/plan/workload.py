"""Describes the model and the data of a plan: a model that can be built without memory, and a sample of its data.

A plan needs only a few blocks of a long chain of equal ones: the record of one is repeated for those left out.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.config import Config
from lockstep.data import build_data
from lockstep.errors import UsageError
from lockstep.models import build_model
from lockstep.models.protocol import Objective, blocks_of, objective_of
from lockstep.torch_compat.pytree import tree_map
from lockstep.trainer.setup import loss_fn_of

KEPT_BLOCKS = 5  # of many equal blocks: first, second, the repeated one, last but one, last
REPEATED = 2  # its index


def kept_blocks(device_type: str) -> int:
    """Return the number of blocks that represent any number of them; on CPUs FSDP gathers one more ahead."""
    return KEPT_BLOCKS + (device_type == "cpu")


class SkipInit(TorchFunctionMode):
    """Skips `torch.nn.init`: on meta there is nothing to fill, and it takes most of the time of building a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Workload:
    """A model and its data, as descriptions.

    Attributes:
        make: builds the model on the active default device.
        sample: one sample of the data, a tree of tensors; only shapes and dtypes matter.
        loss_fn: None: the model's own.
    """

    make: Callable[[], nn.Module]
    sample: Any
    loss_fn: Any = None

    def model(self) -> nn.Module:
        """Build a new model on meta, without values."""
        with torch.device("meta"), SkipInit():
            return self.make()

    @cached_property
    def description(self) -> nn.Module:
        """The model on meta, read and not changed."""
        return self.model()

    @cached_property
    def equal_blocks(self) -> list[str]:
        """Names of the model's blocks, if they are all equal and make up one ModuleList; otherwise empty."""
        blocks = blocks_of(self.description)
        if _list_of(self.description, [name for name, _ in blocks]) is None:
            return []
        return [name for name, _ in blocks] if len({block_description(block) for _, block in blocks}) == 1 else []

    def with_blocks(self, kept: Sequence[int]) -> nn.Module | None:
        """Copy the model on meta with only some of its equal blocks.

        Args:
            kept: their indices in `equal_blocks`.

        Returns:
            None if the model does not list its blocks without the others.
        """
        names, model = self.equal_blocks, self.description
        left_out = [place for place in range(len(names)) if place not in set(kept)]
        blocks = [model.get_submodule(names[place]) for place in left_out]
        short = copy.deepcopy(model, {id(block): block for block in blocks})  # those are not copied
        members = _list_of(short, names)
        assert members is not None
        for place in reversed(left_out):
            del members[place]
        return short if len(blocks_of(short)) == len(kept) else None

    def shortened(self, most: int) -> tuple[nn.Module, int]:
        """Copy the model on meta with `most` of its blocks; the block REPEATED stands for those left out.

        Returns:
            the copy, and the number of blocks left out: 0 for a model with few or unequal blocks.
        """
        number = len(self.equal_blocks)
        if number > most + 1 and (short := self.with_blocks(range(most))) is not None:
            return short, number - most
        return self.model(), 0

    def objective(self, model: nn.Module) -> Objective:
        """Return the loss of a model with its inputs."""
        return objective_of(model, self.loss_fn)

    def batch(self, size: int, device: torch.device | None = None) -> Any:
        """Create a micro-batch of `size` samples, all zeros."""

        def stacked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return torch.full((size,), leaf, device=device) if isinstance(leaf, bool | int | float) else leaf
            return torch.zeros((size, *leaf.shape), dtype=leaf.dtype, device=device)

        return tree_map(stacked, self.sample)

    def tokens_per_sample(self) -> int:
        """Return the positions in a language model's sample; 1 for anything else."""
        ids = self.sample.get("input_ids") if isinstance(self.sample, Mapping) else None
        return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim == 1 else 1


def workload_of(config: Config, loss_fn: Any = None) -> Workload:
    """Return a config's model and data, with its loss unless one is given.

    Without `data.name`, a language model gets windows of its `block_size`.

    Raises:
        UsageError: no model is named, or the shape of a sample is unknown.
    """
    facts: dict[str, Any] = {}
    sample: Any = None
    if config.data.name is not None:
        data = build_data(config.data, seed=config.training.seed)
        facts, sample = data.facts, data.train[0]

    def make() -> nn.Module:
        return build_model(config.model, facts)

    work = Workload(make, sample, loss_fn_of(config) if loss_fn is None else loss_fn)
    if sample is None:
        length = getattr(work.description, "block_size", None)
        if length is None:
            raise UsageError("nothing says what a sample looks like", where="data.name", fix="set data.name")
        ids = torch.zeros(length, dtype=torch.int64)
        described, work = work.description, replace(work, sample={"input_ids": ids, "targets": ids})
        vars(work)["description"] = described  # it is the same model: no need to build it twice
    return work


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
        (name, sorted((k, v) for k, v in vars(m).items() if isinstance(v, bool | int | float | str)))
        for name, m in block.named_modules()
    ]
    return f"{block!r} {plain} {[(n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()]}"
