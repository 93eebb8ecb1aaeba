"""Knows which modules never draw random numbers, so that nothing has to be seeded before them.

A module is drawless if its class is one of torch's that never draw, whatever its settings are, and
if nothing else runs in its forward pass: no hook, no method of the instance's own, no tensor of a
class of its own. A subclass may do anything. `nn.Dropout` is not drawless even with p = 0, since p
can be changed.

Tests: tests/test_drawless.py
"""

from collections.abc import Callable, Sized
from itertools import chain

import torch
from torch import nn

from lockstep.torch_compat.module_hooks import global_hooks, hooks_on

DRAWLESS: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.Sequential, nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU),
        *(nn.Mish, nn.GLU, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish),
        *(nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample),
        *(nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ReflectionPad1d),
        *(nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d),
    }
)
_PLAIN = (torch.Tensor, nn.Parameter)


def never_draws(module: nn.Module) -> bool:
    """Return whether a module and all modules inside of it are drawless."""
    return not any(global_hooks()) and all(map(_is_drawless, module.modules()))


def is_run_by_torch(model: nn.Module) -> bool:
    """Return whether nothing runs in a chain's forward pass besides its members, one by one."""
    inherited = ("__call__", "__iter__", "forward")
    return (
        isinstance(model, nn.Sequential)
        and all(getattr(type(model), name) is getattr(nn.Sequential, name) for name in inherited)
        and "forward" not in vars(model)
    )


def _is_drawless(module: nn.Module) -> bool:
    tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return (
        type(module) in DRAWLESS
        and not any(hooks_on(module))
        and not any(map(callable, vars(module).values()))
        and all(type(tensor) in _PLAIN for tensor in tensors)
    )


class DrawlessModules:
    """Drawless modules, and what is to be done once one of them may draw.

    That is when it has got a hook, another class, or another attribute (such as a `forward` of its
    own). All are looked at in C: some 3 µs for fifty modules.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._classes: list[type] = []
        self._without: list[Sized] = list(global_hooks())  # hooks: there are none
        self._members: list[Sized] = []  # attributes, and hooks where there are some
        self._sizes: list[int] = []  # of the members
        self._when_changed: list[Callable[[], None]] = []

    def add(self, module: nn.Module, when_changed: Callable[[], None]) -> None:
        """Watch a drawless module and those inside of it, as they are now."""
        for each in module.modules():
            self._modules.append(each)
            self._classes.append(type(each))
            of_module: list[Sized] = [*hooks_on(each), vars(each)]
            for members in of_module:
                if members:
                    self._members.append(members)
                    self._sizes.append(len(members))
                else:
                    self._without.append(members)
        self._when_changed.append(when_changed)

    def check(self) -> None:
        """Do for each module what was asked for, once, if one of them may draw now."""
        if not self._modules or not (
            any(self._without)
            or list(map(len, self._members)) != self._sizes
            or list(map(type, self._modules)) != self._classes
        ):
            return
        self._modules = []
        for act in self._when_changed:
            act()
