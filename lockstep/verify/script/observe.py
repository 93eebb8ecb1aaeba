"""Runs a training script unchanged, and records what flows through its steps.

It observes by hooks of modules and optimizers, and by the functions in `lockstep.torch_compat.script_patches`. It
calls no collective of its own, so it neither hangs a script nor repairs one. Loaders read samples in the same process.
"""

import gc
import hashlib
import os
import pickle
import random
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.environment import rank_facts
from lockstep.launch.failures import read_all
from lockstep.launch.script import run_script
from lockstep.torch_compat import script_patches
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES
from lockstep.verify.differences import shard_like
from lockstep.verify.experiments import FullPrecision, MeanDraws, with_other_last_bits
from lockstep.verify.script.record import (
    ACCELERATE,
    DEEPSPEED,
    FABRIC,
    LIGHTNING,
    LOCKSTEP,
    TORCH,
    TRANSFORMERS,
    Pieces,
    RandomDraw,
    RecordedStep,
    ScriptRecord,
    TensorPiece,
    Tensors,
    batch_file,
    record_file,
)

_WAIT = 30.0  # seconds to wait for the other ranks to finish their last step
_WRAPPERS = {*WRAPPER_NAMES, "module", "_forward_module"}
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Whose code calls the optimizer, by the names of modules; the first that calls it, if several do.
_FRAMEWORKS = {
    "transformers.trainer": TRANSFORMERS, "lightning.pytorch": LIGHTNING, "pytorch_lightning": LIGHTNING,
    "lightning.fabric": FABRIC, "lightning_fabric": FABRIC, "deepspeed": DEEPSPEED, "accelerate.optimizer": ACCELERATE,
    "lockstep.trainer": LOCKSTEP,
}  # fmt: skip


@dataclass(frozen=True)
class ScriptTask:
    """A run of a script in one world.

    Attributes:
        folder: receives the records.
        feed: (loader, batch) → the recorded batches (rank, index) whose samples it gets together.
        samples: the folder of the records that `feed` names.
        sizes: loader → batch size with which it is made.
        first: parameters with which the script starts.
        settings: of each step, of each parameter group, with which the optimizer steps.
        mean_draws: random numbers in forward and backward passes are the mean of their distribution.
        fixed_statistics: batch normalisation uses its running statistics.
        full_precision: nothing is converted to 16 bits.
        nudged: the last bits of the first parameters are changed.
    """

    script: str
    arguments: tuple[str, ...]
    steps: int
    folder: Path
    feed: Mapping[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    samples: Path | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    first: Tensors = field(default_factory=dict)
    settings: tuple[list[dict[str, Any]], ...] = ()
    mean_draws: bool = False
    fixed_statistics: bool = False
    full_precision: bool = False
    nudged: bool = False


def observe(task: ScriptTask, *, alone: bool) -> None:
    """Run a task's script in this process until it has taken the steps, and end the process.

    Args:
        alone: the process is a world of one, though the launcher has numbered it.
    """
    if alone:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "lockstep-verify")  # by which Fabric knows torchrun
    facts = rank_facts()
    log = os.open(task.folder / f"output-{facts.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    observer = ScriptObserver(task, facts.rank, facts.world_size)
    observer.start()
    run_script(task.script, [_for_ranks(argument, facts.world_size) for argument in task.arguments])
    observer.finish()


def _for_ranks(argument: str, ranks: int) -> str:
    """Replace `{n}` by the number of ranks, and `{16/n}` by a rank's share of 16."""
    return re.sub(r"\{(?:(\d+)/)?n\}", lambda found: str(int(found[1]) // ranks if found[1] else ranks), argument)


class ScriptObserver:
    """Records the steps of this process."""

    def __init__(self, task: ScriptTask, rank: int, world: int) -> None:
        self.task, self.rank, self.world = task, rank, world
        self.record = ScriptRecord()
        self._step = RecordedStep()
        self._names: dict[int, str] = {}
        self._flat: set[int] = set()  # parameters in modules that FSDP1 cuts
        self._models: list[nn.Module] = []
        self._depth = 0  # of modules that call each other
        self._in_backward = False
        self._modes = ExitStack()  # from the forward pass to the end of the backward pass
        self._states: dict[str, Any] | None = None  # of the generators, when the micro-batch began
        self._loaders = 0
        self._own: list[list[dict[str, Any]]] = []  # settings of the parameter groups to put back after the step

    def start(self) -> None:
        """Begin to observe."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        script_patches.patch_backward(self._around_backward)
        script_patches.patch_clipping(self._around_clipping)
        script_patches.patch_loaders(self._before_loader, self._after_loader)

    def finish(self) -> None:
        """Write the record, wait for the other ranks, and end this process: what else the script does is not run."""
        sys.stdout.flush()
        path = record_file(self.task.folder, self.rank)
        torch.save(self.record, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        deadline = time.monotonic() + _WAIT
        while time.monotonic() < deadline:
            if all(record_file(self.task.folder, rank).exists() for rank in range(self.world)):
                break
            if read_all(self.task.folder):  # the failures of others
                break
            time.sleep(0.01)
        os._exit(0)

    # ---- samples ----

    def _before_loader(self, arguments: dict[str, Any]) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            arguments.pop(name, None)
        collate = arguments.get("collate_fn")
        loader = collate.loader if isinstance(collate, _Collate) else self._loaders
        size = arguments.get("batch_size", 1)
        if size is not None and arguments.get("batch_sampler") is None:
            self.record.asked.setdefault(loader, size)
            if loader in self.task.sizes:
                arguments["batch_size"] = self.task.sizes[loader]

    def _after_loader(self, loader: Any) -> None:
        if isinstance(loader.collate_fn, _Collate):
            return
        loader.collate_fn = _Collate(loader.collate_fn, self, self._loaders)
        self._loaders += 1

    def samples_of(self, loader: int, index: int, own: Any) -> Any:
        """Return the samples of a batch: the script's own, which are stored, or those that the task feeds."""
        samples = own
        if self.task.feed:
            wanted = self.task.feed.get((loader, index))
            if wanted is not None:
                assert self.task.samples is not None
                parts = [pickle.loads(batch_file(self.task.samples, r, loader, i).read_bytes()) for r, i in wanted]
                samples = [sample for part in parts for sample in part]
        else:
            with suppress(Exception):  # samples that can't be pickled: the reference can't be given them
                stored = pickle.dumps(_copied(own))
                batch_file(self.task.folder, self.rank, loader, index).write_bytes(stored)
        read = self.record.batches.setdefault(loader, [])
        read.append([fingerprint(sample) for sample in samples] if isinstance(samples, list) else [])
        return samples

    # ---- forward ----

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        device = next(module.parameters(), torch.empty(0)).device.type
        if torch.is_autocast_enabled(device):
            self._step.dtypes.add(f"autocast to {torch.get_autocast_dtype(device)}")
        if self._depth > 1 or not (module.training and torch.is_grad_enabled()) or self._in_backward:
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return  # a module for the loss
        if not any(module is known for known in self._models):
            self._begin_with(module)
        self._step.inputs.append(rows(args))
        if self.task.fixed_statistics:
            for inner in module.modules():
                if isinstance(inner, _STATISTICS):
                    inner.eval()
        if self._states is None:
            self._states = _generator_states()
            if self.task.mean_draws:
                random.seed(0)
                np.random.seed(0)
                self._modes.enter_context(MeanDraws())  # type: ignore[no-untyped-call]
            if self.task.full_precision:
                self._modes.enter_context(FullPrecision())  # type: ignore[no-untyped-call]

    def _after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth -= 1

    def _begin_with(self, model: nn.Module) -> None:
        """Name the parameters of a model, and record or replace their first values."""
        number = f"{len(self._models)}:" if self._models else ""
        self._models.append(model)
        kinds = {type(inner).__name__ for inner in (model, *model.modules())}
        kinds |= {kind.__name__ for inner in model.modules() for kind in type(inner).__mro__}
        self.record.wrappers |= kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
        self.record.normalises |= any(isinstance(inner, _STATISTICS) for inner in model.modules())
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            plain = number + ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            if "FullyShardedDataParallel" in kinds:
                self._flat.add(id(parameter))
            self._names[id(parameter)] = plain
            self.record.first[plain] = self._piece(parameter)
            with torch.no_grad():
                if plain in self.task.first:
                    _give(parameter, self.task.first[plain])
                if self.task.nudged and parameter.is_floating_point() and not isinstance(parameter, DTensor):
                    parameter.copy_(with_other_last_bits(parameter, generator))

    # ---- backward ----

    def _around_backward(self, call: Any, first: Any) -> Any:
        if self._in_backward:  # recomputation starts backward passes of its own
            return call()
        losses = [first] if isinstance(first, Tensor) else list(first)
        self._step.losses.append(sum(float(_local(loss).detach().double().sum()) for loss in losses))
        if self._states is not None:
            after = _generator_states()
            before = {name: fingerprint(state) for name, state in self._states.items()}
            now = {name: fingerprint(state) for name, state in after.items()}
            self._step.draws.append(RandomDraw(before, now))
        self._in_backward = True
        try:
            return call()
        finally:
            self._in_backward = False
            self._modes.close()
            if self.task.mean_draws and self._states is not None:
                random.setstate(self._states["python"])
                np.random.set_state(self._states["numpy"])
            self._states = None

    def _around_clipping(self, call: Any, parameters: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._step.unclipped |= self._gradients(tensors)
        return call()

    # ---- the optimizer ----

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for position, parameter in enumerate(parameters):
            self._names.setdefault(id(parameter), f"parameter {position}")
        if not self.record.steps:
            self.record.framework = _framework()
        self._step.gradients = self._gradients(parameters)
        self._step.dtypes |= {str(parameter.dtype) for parameter in parameters}
        self._step.before = {self._names[id(p)]: fingerprint(_local(p)) for p in parameters}
        self._step.settings = [_settings(group) for group in optimizer.param_groups]
        # There is no list of schedules; they hold the optimizer, and not the other way round.
        found = (item for item in gc.get_objects() if isinstance(item, LRScheduler))
        self._step.schedules = [schedule.last_epoch for schedule in found]
        number = len(self.record.steps)
        self._own.append([])
        if number < len(self.task.settings):
            for group, given in zip(optimizer.param_groups, self.task.settings[number], strict=False):
                self._own[-1].append({key: group[key] for key in given if key in group})
                group.update({key: value for key, value in given.items() if key in group})

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for group, own in zip(optimizer.param_groups, self._own.pop() if self._own else [], strict=False):
            group.update(own)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._step.values = {self._names[id(p)]: self._piece(p) for p in parameters if id(p) in self._names}
        self.record.steps.append(self._step)
        self._step = RecordedStep()
        if len(self.record.steps) == self.task.steps:
            self.finish()

    def _gradients(self, parameters: list[Tensor]) -> Pieces:
        found = [(parameter, parameter.grad) for parameter in parameters]
        return {
            self._names.get(id(p), f"parameter {i}"): self._piece(grad, of=p)
            for i, (p, grad) in enumerate(found)
            if grad is not None
        }

    def _piece(self, tensor: Tensor, of: Tensor | None = None) -> TensorPiece:
        flat = id(tensor if of is None else of) in self._flat and self.world > 1
        local = _local(tensor).detach().cpu().clone()
        if local.is_floating_point() and local.dtype != torch.float64:
            local = local.float()
        cuts: list[tuple[int, int, int]] = []
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            assert coordinate is not None
            for axis, placement in enumerate(tensor.placements):
                if isinstance(placement, Shard) and tensor.device_mesh.size(axis) > 1:
                    cuts.append((placement.dim, tensor.device_mesh.size(axis), coordinate[axis]))
        return TensorPiece(local, tuple(tensor.shape), tuple(cuts), flat)


class _Collate:
    """Puts samples together as the script's own function does, after it has recorded or exchanged them."""

    def __init__(self, function: Any, observer: ScriptObserver, loader: int) -> None:
        self.function, self.observer, self.loader, self.index = function, observer, loader, 0

    def __call__(self, samples: Any) -> Any:
        index = self.index
        self.index += 1
        return self.function(self.observer.samples_of(self.loader, index, samples))


# ---- values ----


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _give(parameter: Tensor, value: Tensor) -> None:
    """Write a whole value into a parameter, which may be cut or flattened."""
    mine = _local(parameter.detach())
    part = shard_like(value, parameter) if isinstance(parameter, DTensor) else value
    if part.shape != mine.shape:  # FSDP1 on one process; its padding is at the end
        part = part.flatten()[: mine.numel()].view(mine.shape)
    mine.copy_(part)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if key == "lr" and isinstance(value, Tensor):
            value = float(value)
        simple = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "params" and (simple or (isinstance(value, tuple) and all(isinstance(v, float) for v in value))):
            found[key] = value
    return found


def _framework() -> str:
    """Return whose code calls the optimizer."""
    frame, found = sys._getframe(), set()
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        found |= {name for start, name in _FRAMEWORKS.items() if module == start or module.startswith(start + ".")}
    return next((name for name in _FRAMEWORKS.values() if name in found), TORCH)


def _generator_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["CUDA"] = torch.cuda.get_rng_state()
    return states


def _copied(tree: Any) -> Any:
    """Copy the tensors in a sample: a view would be stored with all that it is a view of."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_copied, tree))
    return tree


# ---- fingerprints ----


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def fingerprint(tree: Any) -> str:
    """Return what tells a sample from others, the same in every process."""
    return _digest(_bytes(tree))


def _bytes(tree: Any) -> bytes:
    if isinstance(tree, Tensor):
        plain = tree.detach().cpu().contiguous()
        return f"{plain.dtype}{tuple(plain.shape)}".encode() + plain.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return f"{tree.dtype}{tree.shape}".encode() + np.ascontiguousarray(tree).tobytes()
    if isinstance(tree, Mapping):
        return b"{" + b",".join(_bytes(key) + b":" + _bytes(value) for key, value in tree.items()) + b"}"
    if isinstance(tree, list | tuple):
        return b"[" + b",".join(map(_bytes, tree)) + b"]"
    if isinstance(tree, str | bytes | int | float | bool | type(None)):
        return repr(tree).encode()
    with suppress(Exception):
        return pickle.dumps(tree)
    return repr(type(tree)).encode()


def rows(tree: Any) -> list[str]:
    """Return the fingerprints of the rows of a model's inputs: of all tensors with as many rows as the first."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim and leaf.numel()]
    if not tensors:
        return []
    count = len(tensors[0])
    return [_digest(b"".join(_bytes(t[row]) for t in tensors if len(t) == count)) for row in range(count)]
