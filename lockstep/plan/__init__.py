"""Predicts a run's memory and time, and which layout is best.

Estimates memory without a config from a model's size.

rehearsal, stages    one rank's step on fake tensors → live bytes by kind, and costs of operations
tracker              counts them, and marks the passes and blocks of a step
candidates           all layouts of a config on a cluster, ranked
command              `lockstep plan`, and `strategy: auto`
workload             the model and its data; its segments, measured, as equal stages of a pipeline

`calculate_resources` needs no config: weights, gradients and Adam's state take 16 bytes per
parameter in mixed precision (fp32 master, two moments, gradient), each divided by the ranks that
shard it. Activations of a layer take s·b·h·(34 + 5·a·s/h) bytes in bf16; fused attention needs no
quadratic term, and full recomputation keeps 2·s·b·h, the layer's input. Source: Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models"; Rajbhandari et al. 2020,
"ZeRO".
"""

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.costs.hardware import GIB
from lockstep.errors import UsageError

Sharding = Literal["none", "gradients", "full"]


@dataclass(frozen=True)
class Shape:
    """A decoder: layers, width, heads, vocabulary."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 32_000


@dataclass(frozen=True)
class Resources:
    """Bytes on each GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    # gathered parameters of one layer, and the largest temporary: logits and their gradient
    working: float
    headroom: float
    shape: Shape  # the assumed one

    @property
    def total(self) -> float:
        """Bytes with headroom."""
        needed = self.parameters + self.gradients + self.optimizer + self.activations + self.working
        return needed * (1 + self.headroom)

    @property
    def gib(self) -> float:
        """GiB with headroom."""
        return self.total / GIB

    def fits(self, memory_gib: float) -> bool:
        """Return whether a GPU's memory suffices."""
        return self.gib <= memory_gib


def typical_shape(params: float, vocabulary: int = 32_000) -> Shape:
    """Return the usual depth and width at this size.

    It is 128 wide per layer and per head, and has 12·layers·width² parameters.
    """
    layers = 1
    while 12 * layers * (128 * layers) ** 2 + 2 * vocabulary * 128 * layers < params:
        layers += 1
    # The depth is fixed; the width takes the remaining parameters.
    a = 12 * layers
    b = 2 * vocabulary
    width = (-b + math.sqrt(b * b + 4 * a * params)) / (2 * a)
    width = max(64, round(width / 64) * 64)
    return Shape(layers, width, max(1, width // 128), vocabulary)


def calculate_resources(
    model_params: float,
    sequence_length: int,
    batch_size: int,
    *,
    gpus: int = 1,
    sharding: Sharding = "full",
    checkpointing: bool = False,
    fused_attention: bool = True,
    optimizer_bytes: float = 8.0,
    headroom: float = 0.0,
    shape: Shape | None = None,
) -> Resources:
    """Estimate each GPU's memory for mixed-precision training of a transformer.

    Args:
        batch_size: sequences per micro-batch, on each GPU.
        gpus: number over which parameters, gradients and optimizer state are sharded, according to
            `sharding`.
        sharding: none (ddp), gradients (shard_grad_op: parameters stay whole during a step), full.
        checkpointing: whether each layer is recomputed.
        optimizer_bytes: optimizer state per parameter; Adam has 8.
        headroom: added to the sum, as a fraction of it.
        shape: unset: the usual one at this size.

    Raises:
        UsageError: a size is below 1.
    """
    s = sequence_length
    b = batch_size
    sizes = {
        "model_params": model_params,
        "sequence_length": float(s),
        "batch_size": float(b),
        "gpus": float(gpus),
    }
    for name, value in sizes.items():
        if value < 1:
            what = f"{name}={value:g}: at least 1 is needed"
            raise UsageError(what, fix="count parameters, tokens, samples and GPUs from 1")
    shape = shape or typical_shape(model_params)
    h = shape.width
    n = gpus if sharding != "none" else 1
    attention = 0.0 if fused_attention else 5 * shape.heads * s / h
    layer = s * b * h * (34 + attention)
    kept = shape.layers * (2 * s * b * h) + layer if checkpointing else shape.layers * layer
    logits = s * b * shape.vocabulary * (4 + 4)  # in fp32, and their gradient
    unit = (model_params - 2 * shape.vocabulary * h) / shape.layers
    gathered = 0.0
    if n > 1:
        # Two layers at a time: parameters in two copies, and one layer's gradients in flight.
        gathered = 4.0 * model_params if sharding == "gradients" else 4 * unit * 3
        gathered += 4 * unit * 2
    # fp32 weights: autocast keeps bf16 copies of used weights until the end of the forward pass.
    casts = 2.0 * model_params if n == 1 or sharding == "gradients" else 2.0 * unit
    held = 4.0 * model_params / n
    working = gathered + casts + logits
    return Resources(held, held, optimizer_bytes * model_params / n, kept, working, headroom, shape)
