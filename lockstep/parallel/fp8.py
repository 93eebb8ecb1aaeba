"""Linear layers that multiply in float8 by torchao: operands in e4m3, gradients of outputs in e5m2.

Each tensor has one scale, of a whole weight or of one micro-batch's activations, which does not
depend on where it runs. Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022
(arXiv:2209.05433).
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.machine import accelerator
from lockstep.machine.quiet_imports import without_warnings_of_imports
from lockstep.parallel.facts import Named
from lockstep.torch_compat.module_hooks import has_hooks

_MULTIPLE = 16  # of both dims, which the GPUs' instructions ask for
_CAPABILITY = (8, 9)  # of the first NVIDIA GPUs that multiply in float8


def apply_fp8(model: nn.Module, blocks: Named, kind: str, device: torch.device) -> list[str]:
    """Let the linears inside `blocks` multiply in float8, before anything wraps them.

    Return lines to log at start.

    This converts linears of torch's own class with both dims multiples of 16 and without hooks,
    which would be lost. Modules outside blocks (embedding, head) and a block that is a linear
    itself stay as they are. The kind `emulated` rounds to float8 and multiplies in float32.
    """
    if kind == "none":
        return []
    if kind == "linears":
        _require_hardware(device)
    inside = {module for _, block in blocks for module in block.modules() if module is not block}
    # A subclass computes something else.
    plain = [module for module in inside if type(module) is nn.Linear and not has_hooks(module)]
    fitting = [
        linear
        for linear in plain
        if linear.in_features % _MULTIPLE == linear.out_features % _MULTIPLE == 0
    ]
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    if not fitting:
        what = f"none of the {linears} nn.Linear in {type(model).__name__} can multiply in float8"
        why = (
            f"that takes one inside a repeated block, with both dims multiples of {_MULTIPLE};"
            " products that a model writes out itself are left alone"
        )
        fix = "write fp8: none, or choose sizes that are such multiples"
        raise UsageError(what, where="precision.fp8", why=why, fix=fix)
    convert = _conversion(emulate=kind == "emulated")
    converted = {module: convert(module) for module in fitting}
    # at each place of one that comes twice
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in converted:
            model.set_submodule(path, converted[module])
    return [f"fp8: {len(fitting)} of {linears} linears, {kind}, torchao {version('torchao')}"]


def _require_hardware(device: torch.device) -> None:
    """Refuse a device that does not multiply in float8."""
    cuda = device.type == "cuda"
    if (
        cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= _CAPABILITY
    ):
        return
    device_name = accelerator.name_of(device) if cuda else f"the device {device.type}"
    what = f"fp8: linears needs an NVIDIA GPU that multiplies in float8, and this is {device_name}"
    why = (
        "those of compute capability 8.9 on do: Ada (L4, L40S, RTX 4090), Hopper (H100, H200),"
        " Blackwell (B200)"
    )
    fix = (
        "write fp8: none, or fp8: emulated, which shows anywhere what float8 does to the loss, and"
        " is slow"
    )
    raise UsageError(what, where="precision.fp8", why=why, fix=fix)


def _conversion(*, emulate: bool) -> Callable[[nn.Module], nn.Module]:
    """Return a function that makes a linear layer multiply in float8, by torchao."""
    try:
        with without_warnings_of_imports():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        what = "precision.fp8 needs torchao, which is not installed"
        fix = "pip install torchao, or write fp8: none"
        raise UsageError(what, where="precision.fp8", why=str(error), fix=fix) from None
    # Samples × length of a micro-batch may not be a multiple of 16 either: the sum is filled
    # up with zeros.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)

    def convert(linear: nn.Module) -> nn.Module:
        converted: Any = convert_to_float8_training(linear, config=config)
        return converted.train(linear.training)  # type: ignore[no-any-return]

    return convert
