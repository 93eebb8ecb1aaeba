"""Records what a trainer's steps compute, and stores the reference's steps on disk.

    FOLDER/CASE/start.safetensors              first values of parameters and buffers
    FOLDER/CASE/step-00000003.json             samples, loss, norm of its fourth step
    FOLDER/CASE/step-00000003.safetensors      gradients before the update, values after it, buffers
    FOLDER/CASE/states/step-00000004/          a checkpoint from which every topology takes its next step

In plain mode, gradients have bounds: by how much a sum of the same micro-batches in another order may differ. Two sums
of M terms differ by at most 2·(M−1)·u·Σ|term|, element by element, with u the unit roundoff of the sum's dtype (Higham
2002, section 4.2). A fraction of the largest element is added, for weights that are used several times.
"""

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.parallel.divergence import fingerprint
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.parallel_model import local
from lockstep.records import StepRecord, plain
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.trainer import Trainer
from lockstep.verify.updates import UpdateFacts, UpdateObserver

GRADIENT, BOUND, VALUE, BUFFER = "gradient", "bound", "value", "buffer"


@dataclass
class StepFacts:
    """One step, without its tensors."""

    samples: dict[int, str] = field(default_factory=dict)  # micro-batch → hash of its contents
    loss: float = 0.0  # loss, norm: as in the record
    norm: float = 0.0
    learning_rate: float = 0.0  # largest of the optimizer's groups
    scale: float = 1.0  # factor by which the sum of the micro-batches' gradients was multiplied
    skipped: bool = False  # whether the update was left out
    norms: dict[str, float] = field(default_factory=dict)  # parameter → 2-norm of its gradient
    bound: float = 0.0  # bound, elements: 2-norm of the bounds of all gradients, and their number of elements
    elements: int = 0
    # (module, fingerprint of its output) in the order in which forward passes ended, if they are recorded
    outputs: list[tuple[str, int]] = field(default_factory=list)
    update: UpdateFacts = field(default_factory=UpdateFacts)  # what was seen of the update


class Trace:
    """Folder of one case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def states(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "states"

    def state(self, step: int) -> Path:
        """Return the path of the checkpoint before step `step`."""
        return self.states / f"step-{step:08d}"

    def write_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the first values."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _save(tensors, self.folder / "start.safetensors")

    def write(self, step: int, facts: StepFacts, tensors: Mapping[str, Tensor]) -> None:
        """Write a step."""
        _save(tensors, self._path(step, "safetensors"))
        self._path(step, "json").write_text(json.dumps(asdict(facts)))

    def facts(self, step: int) -> StepFacts:
        """Read a step without its tensors."""
        found: dict[str, Any] = json.loads(self._path(step, "json").read_text())
        found["samples"] = {int(index): text for index, text in found["samples"].items()}
        found["update"] = UpdateFacts(**found["update"])
        found["outputs"] = [(name, value) for name, value in found["outputs"]]
        return StepFacts(**found)

    @contextmanager
    def tensors(self, step: int | None) -> Iterator["Stored"]:
        """Open the tensors of a step, or of the start; each is read when it is used."""
        path = self.folder / "start.safetensors" if step is None else self._path(step, "safetensors")
        with safe_open(path, framework="pt") as file:
            yield Stored(file)

    def _path(self, step: int, suffix: str) -> Path:
        return self.folder / f"step-{step:08d}.{suffix}"


class Stored:
    """Tensors in one file, by kind and name."""

    def __init__(self, file: Any) -> None:
        self._file, self._keys = file, set(file.keys())

    def get(self, kind: str, name: str) -> Tensor | None:
        """Read a tensor; None if there is none."""
        key = f"{kind}/{name}"
        return self._file.get_tensor(key) if key in self._keys else None


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    # The format rejects tied or viewed storage.
    save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, path)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance between 1 and the next larger number."""
    return float(torch.finfo(dtype).eps) / 2


class StepObserver:
    """Records each step of a trainer without changing it.

    Args:
        bounds: add up the absolute values of micro-batches' gradients; the process holds all parameters.
        outputs: record the output of each module.
    """

    def __init__(self, trainer: Trainer, *, bounds: bool = False, outputs: bool = False) -> None:
        self._trainer = trainer
        self._samples: dict[int, str] = {}
        self._sizes: dict[str, Tensor] = {}
        self._outputs: list[tuple[str, int]] = []
        self._micro_batches_per_step, self._factor = 1, 1.0
        self._opened = ExitStack()
        self._run = trainer.placed.forward_backward
        trainer.placed.forward_backward = self._observed
        self._opened.callback(setattr, trainer.placed, "forward_backward", self._run)
        self._update = UpdateObserver(trainer)
        self._opened.callback(self._update.close)
        if outputs:
            self._opened.enter_context(outputs_of(trainer.placed.parts, self._outputs))
        for name, parameter in trainer.placed.parameters.items() if bounds else ():
            if parameter.requires_grad:
                self._opened.callback(parameter.register_hook(self._sizes_of(name)).remove)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop recording."""
        self._opened.close()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, as the optimizer got them."""
        return self._update.gradients

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprints of the gradients on this rank."""
        return {name: int(fingerprint(local(gradient))) for name, gradient in self.gradients.items()}

    def facts(self, done: StepRecord) -> StepFacts:
        """Return the facts of the step just made."""
        rate = max((float(group["lr"]) for group in self._trainer.optimizer.param_groups), default=0.0)
        return StepFacts(
            dict(self._samples), float(plain(done.loss)), float(plain(done.grad_norm)), rate, self._scale(done),
            bool(done.skipped), outputs=list(self._outputs), update=self._update.end(),
        )  # fmt: skip

    def bounds(self, done: StepRecord) -> dict[str, Tensor]:
        """Return how far a gradient's elements may differ when its micro-batches are summed in another order."""
        roundoff = unit_roundoff(torch.float32)
        additions = 2 * max(1, self._micro_batches_per_step - 1) * roundoff * self._scale(done)
        bounds = {}
        for name, gradient in self.gradients.items():
            # For scaling to the mean, clipping, and the gradients' own rounding.
            bounds[name] = 32 * roundoff * gradient.abs()
            if name in self._sizes:
                # A pipeline also sums the uses of a shared weight in another order, and kernels round differently when
                # parameters lie elsewhere in memory (FSDP). The sizes of these terms are unknown: the largest element
                # stands for them.
                largest = self._sizes[name].max() if gradient.numel() else 0.0
                bounds[name] += additions * self._sizes[name] + 64 * roundoff * self._scale(done) * largest
        return bounds

    def _scale(self, done: StepRecord) -> float:
        scale = 1.0 / (self._factor * max(1.0, float(plain(done.tokens))))
        clip = self._trainer.config.training.gradient_clip
        if clip.strategy == "norm":
            scale *= min(1.0, clip.value / (float(plain(done.grad_norm)) + 1e-6))
        return scale

    def _observed(self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float) -> None:
        self._samples = {
            micro_batch.index: hashlib.blake2b(bytes_of(micro_batch.batch), digest_size=12).hexdigest()
            for micro_batch in micro_batches
            if micro_batch.real and micro_batch.batch is not None
        }
        self._micro_batches_per_step, self._factor = accumulator.micro_batches_per_step, factor
        self._update.begin()
        self._outputs.clear()
        self._sizes.clear()
        self._run(micro_batches, accumulator, factor)

    def _sizes_of(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            size = gradient.detach().abs().float()
            self._sizes[name] = self._sizes[name] + size if name in self._sizes else size

        return hook


def bytes_of(tree: Any) -> bytes:
    """Return bytes that tell a nested sample from others, the same in every process."""
    if isinstance(tree, Tensor):
        plain = tree.detach().cpu().contiguous()
        return f"{plain.dtype}{tuple(plain.shape)}".encode() + plain.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return f"{tree.dtype}{tree.shape}".encode() + np.ascontiguousarray(tree).tobytes()
    if isinstance(tree, Mapping):
        return b"{" + b",".join(bytes_of(key) + b":" + bytes_of(value) for key, value in tree.items()) + b"}"
    if isinstance(tree, list | tuple):
        return b"[" + b",".join(map(bytes_of, tree)) + b"]"
    if isinstance(tree, str | bytes | int | float | bool | type(None)):
        return repr(tree).encode()
    with suppress(Exception):
        return pickle.dumps(tree)
    return repr(type(tree)).encode()


@contextmanager
def outputs_of(parts: list[nn.Module], into: list[tuple[str, int]]) -> Iterator[None]:
    """Record a fingerprint of each module's output in forward passes inside the block, innermost modules first."""

    def hook_of(name: str) -> Any:
        def after(_module: nn.Module, _args: object, output: object) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            into.extend((name, int(fingerprint(tensor.detach()))) for tensor in tensors)

        return after

    handles = [m.register_forward_hook(hook_of(name)) for part in parts for name, m in part.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
