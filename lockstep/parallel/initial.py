"""First values: each parameter is a function of (seed, its canonical name), whatever the strategy.

`init_weights()` of a model on meta runs on a copy in which one parameter is real and all others are
meta, where random functions draw nothing. So no rank ever holds more than one whole parameter
beside its own share. Nor does it where the values lie in files (`lockstep.models.stored`), of which
a rank reads its piece. Any other module is built whole on every rank under one seed, compared, and
cut.

Tests: tests/parallel/forward_effects/test_buffers.py,
tests/parallel/forward_effects/test_attributes.py, tests/seams/test_mistakes.py,
tests/parity/test_data_parallel.py
"""

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.errors import RunError, UsageError, first_line
from lockstep.models.stored import StoredWeights, read
from lockstep.parallel.facts import canonical_names
from lockstep.randomness import derive_key, seeded
from lockstep.tensors import local, shard_like


def to_empty(model: nn.Module, device: torch.device) -> None:
    """Give a model on meta storage without values.

    A parameter with several names stays one, unlike in torch's own.
    """
    names, aliases = canonical_names(model)
    model.to_empty(device=device)
    for name in names.values():
        for alias in aliases.get(name, ()):
            module, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(name))


class FirstValues:
    """The source of first values, by name, of parameters and buffers of a model on meta.

    It copies the model.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = copy.deepcopy(model)
        self._seed = seed
        self._pieces: Sequence[Callable[[str, Tensor], Tensor]] = ()
        # Where its values lie in files, they are read piece by piece.
        self._stored: StoredWeights | None = getattr(model, "stored_weights", None)
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        self._meta: dict[str, nn.Parameter] = {}
        names, _ = canonical_names(self._model)
        for module in self._model.modules():
            for attribute, parameter in module.named_parameters(
                recurse=False, remove_duplicate=False
            ):
                self._owners.setdefault(names[id(parameter)], []).append((module, attribute))
                self._meta[names[id(parameter)]] = parameter

    def keep(self, pieces: Sequence[Callable[[str, Tensor], Tensor]]) -> None:
        """Let this rank keep a piece of each parameter.

        `pieces`: (name, value) → the piece; each takes its own of what the one before it returns.
        """
        self._pieces = pieces

    def parameter(self, name: str) -> Tensor:
        """Return the first value of a parameter, on the CPU: the piece that this rank keeps."""
        value: Tensor = read(self.piece(name))
        return value

    def piece(self, name: str) -> Any:
        """Return the same; one that lies in a file, and can be cut further, is not read yet."""
        if self._stored is not None and name in self._stored:
            value: Any = self._stored.tensor(name, self._meta[name].dtype)
        else:
            value = self._made(name)
        for piece in self._pieces:
            value = piece(name, value)
        return value

    def _made(self, name: str) -> Tensor:
        """Return the value that the model's own `init_weights` gives to a parameter."""
        meta = self._meta[name]
        real = nn.Parameter(
            torch.full(meta.shape, torch.nan, dtype=meta.dtype, device="cpu"), meta.requires_grad
        )
        self._put(name, real)
        try:
            with seeded(derive_key(self._seed, "init", name)), torch.no_grad(), _SkipMeta():
                self._model.init_weights()  # type: ignore[operator]
        except (RuntimeError, NotImplementedError) as error:
            what = f"init_weights() of {type(self._model).__name__} failed while making {name}"
            fix = "init_weights() must fill each parameter on its own, without reading another"
            raise RunError(what, why=first_line(error), fix=fix) from error
        finally:
            self._put(name, meta)
        if real.numel() and torch.isnan(real).all():
            what = f"init_weights() of {type(self._model).__name__} does not fill {name}"
            raise RunError(what, fix="fill every parameter in place there, e.g. with nn.init")
        return real.detach().contiguous()  # init_weights may have set its data

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for module, attribute in self._owners[name]:
            setattr(module, attribute, parameter)

    def buffers(self) -> dict[str, Tensor]:
        """Return the values of buffers: of the model's own code, or of files that have them."""
        if not any(True for _ in self._model.buffers()):
            return {}
        for module in self._model.modules():
            for attribute, buffer in list(
                module.named_buffers(recurse=False, remove_duplicate=False)
            ):
                setattr(module, attribute, torch.zeros_like(buffer, device="cpu"))
        with seeded(derive_key(self._seed, "init", "buffers")), torch.no_grad():
            self._model.init_weights()  # type: ignore[operator]
        made = dict(self._model.named_buffers())
        if self._stored is not None:
            stored = {name: b.dtype for name, b in made.items() if name in self._stored}
            made |= {
                name: self._stored.tensor(name, dtype).read() for name, dtype in stored.items()
            }
        return made


class _SkipMeta(TorchFunctionMode):
    """A mode that skips writes to tensors on meta.

    torch would take 2 ms for each write, for each parameter that is made.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # of functions of nn.init, by keyword
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
        if in_place and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)


@torch.no_grad()
def materialise(model: nn.Module, first: FirstValues) -> None:
    """Fill a placed model, whose storage exists but holds nothing yet."""
    for name, parameter in model.named_parameters():
        value = shard_like(first.piece(name), parameter)
        local(parameter).copy_(read(value))  # host waits for the copy
    values = first.buffers()
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def _require_equal_strides(tensors: Sequence[Tensor]) -> None:
    """Refuse a model that ranks hold in different memory formats.

    Messages take memory as it lies.
    """
    strides = zlib.crc32(str([tensor.stride() for tensor in tensors]).encode())
    ends = torch.tensor([strides, -strides], device=tensors[0].device if tensors else None)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        what = (
            "the model's parameters have other shapes or memory formats on one rank than on another"
        )
        fix = "build the model, and call model.to(memory_format=…), alike on every rank"
        raise UsageError(what, where="the model", fix=fix)


def broadcast_values(model: nn.Module) -> bool:
    """Give every rank the values of rank 0, if fingerprints differ.

    Return whether all had them already.
    """
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    _require_equal_strides(tensors)
    numbers = [(torch.view_as_real(t) if t.is_complex() else t).double() for t in tensors]
    prints = [(t.sum(), t.abs().sum()) for t in numbers]
    mine = (
        torch.stack([x for pair in prints for x in pair])
        if prints
        else torch.zeros(1, dtype=torch.float64)
    )
    mine = torch.nan_to_num(mine)
    low = mine.clone()
    high = mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if torch.equal(low, high):
        return True
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
    return False
