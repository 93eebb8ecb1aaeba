import torch
from torch.utils.data import TensorDataset

from lockstep.config import config_from
from lockstep.costs.hardware import cluster_of
from lockstep.plan.command import choose

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "block_size": 16}
# About 2 B parameters: 32 GB of state.
LARGE = {"n_layer": 24, "n_embd": 2560, "n_head": 20, "vocab_size": 32000, "block_size": 512}


def config(args: dict[str, int]):  # type: ignore[no-untyped-def]
    return config_from(
        {"model.name": "transformer", "model.args": args, "training.batch_size": 1, "precision.mode": "bf16"}
    )


def test_one_rank_is_single() -> None:
    assert choose(config(SMALL), 1, 1).config.distributed.strategy == "single"


def test_a_model_that_fits_is_replicated() -> None:
    choice = choose(config(SMALL), 2, 2)
    assert choice.config.distributed.strategy == "ddp"
    assert "GiB" in choice.reason


def pairs() -> TensorDataset:
    return TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)


def test_a_loss_that_the_config_names_is_rehearsed() -> None:
    """Without it both members of a pair would be the model's arguments."""
    named = {"model.name": "torch.nn:Linear", "model.args": {"in_features": 2, "out_features": 2}}
    named |= {"data.name": "tests.plan.test_auto:pairs", "loss_fn": "torch.nn:CrossEntropyLoss"}
    assert choose(config_from({**named, "training.batch_size": 2}), 2, 2).config.distributed.strategy == "ddp"


def test_a_model_that_does_not_fit_is_sharded_and_why_is_said() -> None:
    choice = choose(config(LARGE), 8, 8, cluster_of(8, "RTX-4090"))
    assert choice.config.distributed.strategy in ("fsdp", "pipeline")
    assert "ddp needs" in choice.reason
    assert choice.config.precision.param_dtype == "fp32"  # another would be another run
