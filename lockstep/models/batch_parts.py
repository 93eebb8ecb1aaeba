"""Finds the parts of a batch and of a model's outputs: samples, targets, logits.

Tests: tests/models/test_builders.py, tests/models/test_documents.py
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.errors import UsageError

IGNORED_TARGET = -100  # torch's default `ignore_index`
DOCUMENTS = "document_ids"  # the part of a batch that numbers the documents of a sequence
_TARGET_KEYS = ("targets", "target", "labels", "label", "y")


def num_samples(batch: Any) -> int:
    """Return the size of the first dim of the first tensor in `batch`, at any depth.

    UsageError if there is none.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        what = f"a batch of type {type(batch).__name__} holds no tensor to count samples in"
        raise UsageError(
            what, fix="give the model a method count(batch) -> number of valid targets"
        )
    return tensor.shape[0] if tensor.ndim else 1


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if not isinstance(batch, tuple | list):
        batch = batch.values() if isinstance(batch, Mapping) else ()
    for member in batch:
        tensor = member if isinstance(member, Tensor) else _first_tensor(member)
        if tensor is not None:
            return tensor
    return None


_REQUIRED: Any = object()


def targets_of(batch: Any, default: Any = _REQUIRED) -> Any:
    """Return the targets in a batch: a pair's last, or one named targets, labels ….

    Else `default`, or a UsageError.
    """
    if isinstance(batch, Mapping):
        for key in _TARGET_KEYS:
            if key in batch:
                return batch[key]
        if default is not _REQUIRED:
            return default
        what = (
            "no targets for the loss function in a batch with the keys"
            f" {', '.join(map(str, batch))}"
        )
        fix = (
            f"name them one of {', '.join(_TARGET_KEYS)}, or give the model loss(outputs, batch)"
            " and count(batch)"
        )
        raise UsageError(what, fix=fix)
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[-1]
    return batch  # an autoencoder's target is its input


def logits_of(outputs: Any) -> Any:
    """Return the member `logits` of a model's outputs; the outputs themselves if they have none."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)
