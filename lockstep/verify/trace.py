"""What the reference did, step by step, on disk.

    FOLDER/CASE/start.safetensors              first values of parameters and buffers
    FOLDER/CASE/step-00000003.json             samples, loss, norm of its fourth step
    FOLDER/CASE/step-00000003.safetensors      gradients as the optimizer got them, values after the update, buffers
    FOLDER/CASE/states/step-00000004/          a checkpoint: from it every topology takes its next step

In plain mode, gradients have bounds: what a sum of the same micro-batches in another order may differ by. Two sums of M
terms differ by 2·(M−1)·u·Σ|term| at most, element by element, with u the unit roundoff of the sum's dtype (Higham 2002,
section 4.2). To that is added a little of the largest element, for weights that are used several times.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GRADIENT, BOUND, VALUE, BUFFER = "gradient", "bound", "value", "buffer"


@dataclass
class Facts:
    """Of one step, what is no tensor.

    Attributes:
        samples: micro-batch → a hash of what it holds.
        loss, norm: as the record has them.
        learning_rate: largest of the optimizer's groups.
        scale: what the sum of the micro-batches' gradients was multiplied by.
        skipped: the update was left out.
        norms: parameter → 2-norm of its gradient.
        bound, elements: 2-norm of the bounds of all gradients, and how many numbers these are.
        outputs: (module, fingerprint of its output) in the order in which forward passes ended, where asked for.
    """

    samples: dict[int, str] = field(default_factory=dict)
    loss: float = 0.0
    norm: float = 0.0
    learning_rate: float = 0.0
    scale: float = 1.0
    skipped: bool = False
    norms: dict[str, float] = field(default_factory=dict)
    bound: float = 0.0
    elements: int = 0
    outputs: list[tuple[str, int]] = field(default_factory=list)


class Trace:
    """One case's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def states(self) -> Path:
        return self.folder / "states"

    def state(self, step: int) -> Path:
        """The checkpoint of the state before step `step`."""
        return self.states / f"step-{step:08d}"

    def write_start(self, tensors: Mapping[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _save(tensors, self.folder / "start.safetensors")

    def write(self, step: int, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        _save(tensors, self._path(step, "safetensors"))
        self._path(step, "json").write_text(json.dumps(asdict(facts)))

    def facts(self, step: int) -> Facts:
        found: dict[str, Any] = json.loads(self._path(step, "json").read_text())
        found["samples"] = {int(index): text for index, text in found["samples"].items()}
        found["outputs"] = [(name, value) for name, value in found["outputs"]]
        return Facts(**found)

    @contextmanager
    def tensors(self, step: int | None) -> Iterator["Stored"]:
        """Those of a step, or of the start; read one by one."""
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
        key = f"{kind}/{name}"
        return self._file.get_tensor(key) if key in self._keys else None

    def names(self, kind: str) -> list[str]:
        return sorted(key.removeprefix(f"{kind}/") for key in self._keys if key.startswith(f"{kind}/"))


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    # Tied or viewed storage is refused by the format.
    save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, path)


def unit_roundoff(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) / 2
