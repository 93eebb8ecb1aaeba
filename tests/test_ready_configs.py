"""Every config that ships is valid, and trains: at its full size nobody waits for it, so the model
is made small.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep.config
from lockstep.config import load_config
from lockstep.plan.command import choose
from tests.launch.shared import environment
from tests.ranks import REPOSITORY, run_ranks
from tests.sampled import sampled

READY = sorted(Path(lockstep.config.__file__).parent.glob("ready/*.yaml"))
# Each model and each strategy once; a test that is marked `full` trains all of them.
IN_TURN = (
    "bdh",
    "bdh_hybrid",
    "free_transformer_pipeline",
    "hf_gpt2_fsdp",
    "mixture_expert",
    "transformer_accelerate",
    "transformer_context",
    "transformer_tensor",
    "vae_ddp",
)
SMALL: dict[str, dict[str, Any]] = {
    "bdh": {"n_layer": 4, "n_embd": 32, "n_head": 4, "mlp_multiplier": 4},
    "transformer": {"n_layer": 4, "n_embd": 32, "n_head": 4},
    "free_transformer": {"n_layer": 4, "n_embd": 32, "n_head": 4, "latent_bits": 4},
    "mixture": {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_expert": 4, "expert_hidden": 24},
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
    overrides += [
        "training.num_train_epochs=null",
        "training.max_steps=2",
        "training.warmup_steps=1",
    ]
    return [
        *overrides,
        "training.batch_size=2",
        "training.global_batch_size=8",
        "training.eval_steps=null",
    ]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_each_config_is_valid(path: Path) -> None:
    config = load_config(path, small(path))
    assert config.training.max_steps == 2
    assert path.read_text().startswith("#"), "its first line says what it is"


def test_each_model_and_each_strategy_has_its_turn() -> None:
    chosen = [path for path in READY if path.stem in IN_TURN]
    kinds = [
        {(config.model.name, config.distributed.strategy) for config in map(load_config, paths)}
        for paths in (chosen, READY)
    ]
    assert [*map(set, zip(*kinds[0], strict=True))] == [*map(set, zip(*kinds[1], strict=True))]


@sampled("names", IN_TURN, 5)
def test_configs_train_on_two_ranks(names: list[str], tmp_path: Path) -> None:
    """As `lockstep train` does on a rank; a test that is marked `full` starts the command itself
    for each.
    """
    chosen = [path for path in READY if path.stem in names]
    done, _ = run_ranks(
        train_all, 2, [(str(path), overrides_of(path)) for path in chosen], str(tmp_path)
    )
    assert done == sorted(names)


def overrides_of(path: Path) -> list[str]:
    """Small, and with what `strategy: auto` chooses for two ranks, which it does before
    they join.
    """
    config = load_config(path, small(path))
    chosen = choose(config, 2, 2).config if config.distributed.strategy == "auto" else config
    return [
        *small(path),
        "monitor.sinks=[jsonl]",
        f"distributed.strategy={chosen.distributed.strategy}",
    ]


@pytest.mark.full
@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_lockstep_train_with_each_config(tmp_path: Path, path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", f"ready/{path.name}", *small(path)]
    options = ["--nproc-per-node", "2", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *options], env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "checkpoints/step-00000002/manifest.json").exists()


def test_the_free_transformers_make_targets_start_as_many_ranks_as_there_are_gpus(
    tmp_path: Path,
) -> None:
    """A driver that lists three GPUs, and none at all, where two ranks share the CPU."""
    driver = tmp_path / "nvidia-smi"
    for script, ranks in (("printf 'GPU 0\\nGPU 1\\nGPU 2\\n'", 3), ("exit 9", 2)):
        driver.write_text(f"#!/bin/sh\n{script}\n")
        driver.chmod(0o755)
        for target, name in (("free", "free_transformer_fsdp"), ("baseline", "transformer_fsdp")):
            command = ["make", "--dry-run", f"train-{target}-fsdp", "ARGS=training.max_steps=2"]
            searched = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
            said = subprocess.run(
                command, cwd=REPOSITORY, env=searched, capture_output=True, text=True, check=True
            )
            assert (
                f"train ready/{name}.yaml --nproc-per-node {ranks} training.max_steps=2"
                in said.stdout
            )
            assert name in [path.stem for path in READY]


def train_all(cases: list[tuple[str, list[str]]], folder: str) -> list[str]:
    """Runs on each rank: train each config, one after the other."""
    from lockstep.trainer import run

    done = []
    for path, overrides in cases:
        name = Path(path).stem
        assert run(load_config(path, overrides), output_dir=Path(folder, name), resume="never") == 0
        assert Path(folder, name, "checkpoints/step-00000002/manifest.json").exists()
        done.append(name)
    return done
