"""What is to be planned: a model that can be built again and again without memory, and a sample of its data."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.data import build_data
from lockstep.errors import UsageError
from lockstep.models import build_model
from lockstep.models.protocol import Objective, blocks_of, objective_of
from lockstep.torch_compat.pytree import tree_map
from lockstep.trainer.setup import loss_fn_of

KEPT_BLOCKS = 5  # of a long run of equal blocks: first, second, one to be repeated, last but one, last
REPEATED = 2  # its place


@dataclass(frozen=True)
class Workload:
    """A model and its data, as descriptions.

    Attributes:
        make: builds the model on the active default device.
        sample: one sample of the data, a tree of tensors; only shapes and dtypes are looked at.
        loss_fn: None: the model's own.
    """

    make: Callable[[], nn.Module]
    sample: Any
    loss_fn: Any = None

    def model(self) -> nn.Module:
        """A fresh one on meta."""
        with torch.device("meta"):
            return self.make()

    def objective(self, model: nn.Module) -> Objective:
        return objective_of(model, self.loss_fn)

    def batch(self, size: int, device: torch.device | None = None) -> Any:
        """A micro-batch of `size` samples, of zeros."""

        def stacked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return torch.full((size,), leaf, device=device) if isinstance(leaf, bool | int | float) else leaf
            return torch.zeros((size, *leaf.shape), dtype=leaf.dtype, device=device)

        return tree_map(stacked, self.sample)

    def tokens_per_sample(self) -> int:
        """Positions in a sample of a language model; 1 for anything else."""
        ids = self.sample.get("input_ids") if isinstance(self.sample, Mapping) else None
        return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim == 1 else 1


def workload_of(config: Config, loss_fn: Any = None) -> Workload:
    """What a config trains, with the loss that it names unless one is given. Without `data.name`, a language model is
    fed with windows of its `block_size`.

    Raises:
        UsageError: no model is named, or nothing says what a sample looks like.
    """
    facts: dict[str, Any] = {}
    sample: Any = None
    if config.data.name is not None:
        data = build_data(config.data, seed=config.training.seed)
        facts, sample = data.facts, data.train[0]

    def make() -> nn.Module:
        return build_model(config.model, facts)

    if sample is None:
        with torch.device("meta"):
            length = getattr(make(), "block_size", None)
        if length is None:
            raise UsageError("nothing says what a sample looks like", where="data.name", fix="set data.name")
        ids = torch.zeros(length, dtype=torch.int64)
        sample = {"input_ids": ids, "targets": ids}
    return Workload(make, sample, loss_fn_of(config) if loss_fn is None else loss_fn)


def shortened(model: nn.Module) -> tuple[nn.Module, int]:
    """A copy of a long chain of equal blocks with KEPT_BLOCKS of them, and how many were left out.

    The block REPEATED of the copy stands for those left out. A model whose blocks differ, or that would not run
    without some of them, comes back whole.
    """
    blocks = blocks_of(model)
    if len(blocks) <= KEPT_BLOCKS + 1 or len({looks(block) for _, block in blocks}) > 1:
        return model, 0
    short = copy.deepcopy(model)
    wanted = [name for name, _ in blocks]
    for name, module in short.named_modules():
        inside = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        if isinstance(module, nn.ModuleList) and inside == wanted:
            del module[KEPT_BLOCKS:]
            if len(blocks_of(short)) == KEPT_BLOCKS:
                return short, len(blocks) - KEPT_BLOCKS
    return model, 0


def looks(block: nn.Module) -> str:
    """Equal for blocks that compute the same on the same shapes."""
    plain = [
        (name, sorted((k, v) for k, v in vars(m).items() if isinstance(v, bool | int | float | str)))
        for name, m in block.named_modules()
    ]
    return f"{block!r} {plain} {[(n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()]}"
