"""What tensors a process holds, and how much memory the kernel lets it have; functions here run on
ranks.
"""

import ctypes
import gc
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config import config_from
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model, unchecked

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
UNIT = {"n_embd": 64, "mlp_hidden": 256, "n_layer": 4}
LARGE = {"n_embd": 512, "mlp_hidden": 1536, "n_layer": 8}
# above what a process has before it builds the model; 48 of it are stacks of gloo's threads
HEADROOM = 230 * 2**20


def held_bytes() -> int:
    """Bytes of all storages behind live tensors, each counted once."""
    gc.collect()  # what an earlier trainer held, in cycles of references, is live no more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated objects of torch warn when they are looked at
        tensors = [t for t in gc.get_objects() if isinstance(t, Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages: dict[int, int] = {}
    for tensor in tensors:
        whole = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if whole.device.type == "cpu":
            storage = whole.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def trainer_with(settings: dict[str, Any], model: dict[str, Any]) -> Trainer:
    common = {"training.batch_size": 1, "training.max_steps": 50, "precision.mode": "fp32"}
    return unchecked(
        Trainer(language_model("transformer", **model), config=config_from({**common, **settings}))
    )


def batch() -> dict[str, Tensor]:
    return {key: value.unsqueeze(0) for key, value in Tokens()[0].items()}


def held_while_training(settings: dict[str, Any]) -> dict[str, Any]:
    """What is held at the loss and after each of three micro-batches, and before the update, in a
    run's third step.
    """
    gc.collect()
    # a look at each of the million objects that imports have made takes longer than the steps
    gc.freeze()
    before = held_bytes()
    trainer = trainer_with({**settings, "training.gradient_accumulation_steps": 3}, UNIT)
    one = batch()
    for _ in range(3):
        trainer.training_step(one)
    at_update: list[int] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: at_update.append(held_bytes() - before))
    at_loss: list[int] = []
    trainer.placed.parts[0].get_submodule("head").register_forward_hook(
        lambda *_: at_loss.append(held_bytes() - before)
    )
    held = []
    for _ in range(6):
        trainer.training_step(one)
        held.append(held_bytes() - before)
    sizes = {name: p.numel() * 4 for name, p in trainer.placed.parameters.items()}
    blocks = range(UNIT["n_layer"])
    unit = max(
        sum(size for name, size in sizes.items() if name.startswith(f"layers.{i}.")) for i in blocks
    )
    return {
        # the least of two steps: an exchange may still be under way on a busy machine
        "between": [min(pair) for pair in zip(held[:2], held[3:5], strict=True)],
        "at loss": at_loss[-3],
        "at update": at_update[-1],
        "parameters": sum(sizes.values()),
        "unit": unit,
    }


def held_in_each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [held_while_training(case) for case in cases]


def _kib(field: str) -> int:
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    ]
    return int(line.split()[1])


def train_within_a_limit(settings: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a model of 100 MB of parameters, with `HEADROOM` of memory for it.

    Returns:
        the losses, or the error; and the bytes of data that the process came to have.
    """
    # else glibc keeps freed memory, which the kernel counts as used
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 131072)
    warm_up = trainer_with({"distributed.strategy": settings["distributed.strategy"]}, {})
    warm_up.training_step(batch())  # starts threads, fills caches
    gc.collect()
    before = _kib("VmData") * 1024
    resident = _kib("VmRSS") * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (before + HEADROOM, resource.RLIM_INFINITY))
    found: dict[str, Any] = {}
    try:
        trainer = trainer_with(settings, LARGE)
        found["parameters"] = trainer.placed.num_parameters
        found["losses"] = [float(trainer.training_step(batch())) for _ in range(2)]
        shown = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        shown[dist.get_rank()] = _kib("VmHWM") * 1024 - resident
        dist.all_reduce(shown)
        found["resident"] = shown.tolist()
    except (RuntimeError, MemoryError) as error:
        found["error"] = str(error)
    found["data"] = _kib("VmData") * 1024 - before
    return found
