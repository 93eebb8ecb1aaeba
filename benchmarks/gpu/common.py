"""What the programs for a GPU share: which device there is, models by name, random tokens, and
FLOPs counted.
"""

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.page import machine
from lockstep.models import get_model


class Workload(NamedTuple):
    """A model's name and sizes, and what a step takes in."""

    name: str
    args: dict[str, Any]
    length: int
    batch: int

    def model(self) -> nn.Module:
        made: nn.Module = get_model(self.name)(**self.args)
        return made


# GPT-2's sizes in the Llama form; BDH as it is by default. Three contestants hold one each.
WORKLOADS = {
    "transformer-124m": Workload(
        "transformer",
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50304, "dropout": 0.0},
        1024,
        16,
    ),
    "transformer-774m": Workload(
        "transformer",
        {"n_layer": 36, "n_embd": 1280, "n_head": 20, "vocab_size": 50304, "dropout": 0.0},
        1024,
        8,
    ),
    "bdh": Workload("bdh", {"dropout": 0.1}, 1024, 8),
}
TINY = {
    "transformer-124m": Workload(
        "transformer",
        {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "dropout": 0.0},
        32,
        2,
    ),
    "transformer-774m": Workload(
        "transformer",
        {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "dropout": 0.0},
        32,
        2,
    ),
    "bdh": Workload(
        "bdh",
        {"n_layer": 2, "n_embd": 16, "n_head": 2, "mlp_multiplier": 8, "vocab_size": 64},
        32,
        2,
    ),
}


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Samples of `length` tokens: a view of one table, so that reading them costs nothing."""

    deterministic = True

    def __init__(self, length: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._length = length
        self._tokens = torch.randint(0, vocab_size, (4096 + length + 1,), generator=generator)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._tokens[index % 4096 : index % 4096 + self._length + 1]
        return {"input_ids": window[:-1], "targets": window[1:]}


def parser(description: str) -> argparse.ArgumentParser:
    """With the arguments that all of the programs take."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument(
        "--tiny",
        action="store_true",
        help="sizes for a CPU: shows that the program is whole, no more",
    )
    made.add_argument(
        "--write", action="store_true", help="write the result into benchmarks/results"
    )
    return made


def require(device: str) -> torch.device:
    """The device; without the GPU that is asked for the program ends, and says so."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "NOT MEASURED: there is no GPU here; `--device cpu --tiny` runs the same program, tiny"
        )
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops_of_a_step(work: Workload, device: torch.device) -> float:
    """Matrix products and attention of one forward and backward pass of a batch, counted by torch
    as it runs.
    """
    model = work.model().to(device)
    one = torch.zeros(1, work.length, dtype=torch.int64, device=device)
    batch = {"input_ids": one, "targets": one}
    own: Any = model
    with (
        FlopCounterMode(display=False) as counter,
        torch.autocast(device.type, dtype=torch.bfloat16),
    ):
        own.loss(model(*own.inputs(batch)), batch).backward()
    return float(counter.get_total_flops()) * work.batch


def where(device: torch.device) -> str:
    """On what it ran, and when."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "CPU (a trial: no figure of a GPU)"
    )
    return f"{name}, torch {torch.__version__}, {machine()}"
