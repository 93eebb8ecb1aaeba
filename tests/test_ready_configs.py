"""Every config that ships is valid, and trains: at its full size nobody waits for it, so the model is made small."""

from pathlib import Path
from typing import Any

import pytest

import lockstep.config
from lockstep.config import load_config
from tests.ranks import run_ranks

READY = sorted(Path(lockstep.config.__file__).parent.glob("ready/*.yaml"))
SMALL: dict[str, dict[str, Any]] = {
    "bdh": {"n_layer": 4, "n_embd": 32, "n_head": 4, "mlp_multiplier": 4},
    "transformer": {"n_layer": 4, "n_embd": 32, "n_head": 4},
    "free_transformer": {"n_layer": 4, "n_embd": 32, "n_head": 4, "latent_bits": 4},
    "vae": {"latent_dim": 4},
    "hf:gpt2": {"n_layer": 4, "n_embd": 32, "n_head": 4},
}


def small(path: Path) -> list[str]:
    """Overrides that make a config quick."""
    config = load_config(path)
    assert config.model.name is not None
    overrides = [f"model.args.{key}={value}" for key, value in SMALL[config.model.name].items()]
    if config.data.name == "python-docs":
        overrides += ["data.args.block_size=32", "data.args.validation_fraction=0.001"]
    overrides += ["training.num_train_epochs=null", "training.max_steps=2", "training.warmup_steps=1"]
    return [*overrides, "training.batch_size=2", "training.global_batch_size=8", "training.eval_steps=null"]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_each_config_is_valid(path: Path) -> None:
    config = load_config(path, small(path))
    assert config.training.max_steps == 2
    assert path.read_text().startswith("#"), "its first line says what it is"


def test_each_config_trains_on_two_ranks(tmp_path: Path) -> None:
    names = [path.stem for path in READY if load_config(path).distributed.strategy != "auto"]
    (done, _) = run_ranks(train_all, 2, [str(p) for p in READY], str(tmp_path))
    assert done == names


def train_all(paths: list[str], folder: str) -> list[str]:
    """Runs on each rank: train each config, one after the other."""
    from lockstep.trainer import run

    done = []
    for path in map(Path, paths):
        if load_config(path).distributed.strategy == "auto":
            continue
        config = load_config(path, [*small(path), "monitor.sinks=[jsonl]"])
        assert run(config, output_dir=Path(folder, path.stem), resume="never") == 0
        assert Path(folder, path.stem, "checkpoints/step-00000002/manifest.json").exists()
        done.append(path.stem)
    return done
