"""Generates text from a language model's newest whole checkpoint, in one process.

Any strategy may have trained it.

Tests: tests/test_examples.py
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import checkpoint
from lockstep.config import Config, load_config
from lockstep.data import Data, build_data
from lockstep.errors import UsageError
from lockstep.models.language import generate
from lockstep.parallel.initial import to_empty
from lockstep.run_directory.records import RunDirectory
from lockstep.torch_compat.module_state import persistent_buffers
from lockstep.trainer import build


def sample(
    run: Path,
    *,
    prompt: str = "The ",
    num_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return the prompt, continued by the model of a run directory.

    A temperature of 0 takes the likeliest token; `top_k` likeliest ones are drawn from, or all.
    """
    directory = RunDirectory(run)
    if not directory.config.is_file():
        raise UsageError(f"{run} is not a run directory", why="there is no config.yaml in it")
    config = load_config(directory.config)
    storage = config.checkpoint.storage
    folder = directory.checkpoints if storage is None else checkpoint.build_storage(storage)
    found = checkpoint.newest(folder)
    if found is None:
        fix = "train it first; a run saves every checkpoint.save_steps and at its end"
        raise UsageError(f"there is no checkpoint in {folder}", fix=fix)
    data = build_data(config.data, seed=config.training.seed)
    if data.encode is None or data.decode is None:
        fix = "only language models write: data whose samples are tokens of a text"
        raise UsageError(
            f"the data {config.data.name} are not text", where=str(directory.config), fix=fix
        )
    model = load_model(config, data, found)
    return continue_text(
        model,
        data,
        prompt,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )


def continue_text(
    model: nn.Module,
    data: Data,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return a prompt, continued by a model in evaluation mode; the data encode and decode it."""
    assert data.encode is not None, "the caller looks at that"
    assert data.decode is not None, "the caller looks at that"
    ids = torch.tensor([data.encode(prompt)], dtype=torch.int64)
    tokens = generate(
        model,
        ids,
        num_tokens,
        block_size=int(data.facts.get("block_size", 512)),
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return data.decode(tokens[0].tolist())


def load_model(config: Config, data: Data, path: checkpoint.Checkpoint) -> Any:
    """Return the model of a checkpoint, whole, on the CPU, in evaluation mode."""
    model = in_memory(build(config, data))
    persistent = persistent_buffers(model)
    tensors = dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n in persistent
    }
    with torch.no_grad():
        checkpoint.load(path, checkpoint.Snapshot(model=tensors), only=["model"])
    return model.eval()


def in_memory(model: Any) -> Any:
    """Return a model that was built on meta with first values on the CPU; any other as it is."""
    if any(parameter.is_meta for parameter in model.parameters()):
        to_empty(model, torch.device("cpu"))
        model.init_weights()  # buffers that no checkpoint holds, too
    return model
