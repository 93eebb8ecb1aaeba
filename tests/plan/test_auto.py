from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config import config_from
from lockstep.costs.hardware import cluster_of
from lockstep.errors import UsageError
from lockstep.machine.environment import MEMORY
from lockstep.plan import command
from lockstep.plan.candidates import Candidate, evaluate_layout
from lockstep.plan.command import choose

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "block_size": 16}
# About 2 B parameters: 32 GB of state.
LARGE = {"n_layer": 24, "n_embd": 2560, "n_head": 20, "vocab_size": 32000, "block_size": 512}


def config(args: dict[str, int]):  # type: ignore[no-untyped-def]
    return config_from(
        {
            "model.name": "transformer",
            "model.args": args,
            "training.batch_size": 1,
            "precision.mode": "bf16",
        }
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
    assert (
        choose(config_from({**named, "training.batch_size": 2}), 2, 2).config.distributed.strategy
        == "ddp"
    )


class OwnLoss(nn.Module):
    """Returns its own loss, as torch computes it; with `reads`, a forward pass that looks at its
    batch.
    """

    def __init__(self, vocab_size: int, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, input_ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if self.reads and int(input_ids.max()) < 0:
            raise ValueError
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def test_a_loss_of_the_models_own_is_rehearsed_and_values_it_reads_are_no_end() -> None:
    text = {"data.name": "python-docs", "data.args": {"block_size": 16}, "training.batch_size": 2}
    for reads, said in ((False, "MiB"), (True, "its forward pass reads values of its batch")):
        named = {"model.name": "tests.plan.test_auto:OwnLoss", "model.args": {"reads": reads}}
        choice = choose(config_from({**named, **text}), 2, 2)
        assert choice.config.distributed.strategy == "ddp"
        assert said in choice.reason


def test_a_model_that_does_not_fit_is_sharded_and_why_is_said() -> None:
    choice = choose(config(LARGE), 8, 8, cluster_of(8, "RTX-4090"))
    assert choice.config.distributed.strategy in ("fsdp", "pipeline")
    assert "ddp needs" in choice.reason
    assert choice.config.precision.param_dtype == "fp32"  # another would be another run


def test_numbers_that_contradict_each_other_are_no_reason_for_another_layout() -> None:
    """Two ranks take 2 × 4 × 2 = 16 samples a step, and the config says 8: it took a pipeline, and
    said "ddp needs".
    """
    numbers = {
        "training.batch_size": 2,
        "training.gradient_accumulation_steps": 4,
        "training.global_batch_size": 8,
    }
    with pytest.raises(
        UsageError, match="batch_size 2 × gradient_accumulation_steps 4 × data-parallel size 2 = 16"
    ):
        choose(config(SMALL).replaced(numbers), 2, 2)


def test_a_restart_chooses_what_was_chosen_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the trial; a model of another size, and another number of ranks, are tried."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    first = choose(config(SMALL), 2, 2)
    tried = []

    def trial(*given: Any, **more: Any) -> Candidate:
        tried.append(given)
        return evaluate_layout(*given, **more)

    monkeypatch.setattr(command, "evaluate_layout", trial)
    again = choose(config(SMALL), 2, 2)
    assert (again, tried) == (first, [])
    for count, (args, ranks) in enumerate([({**SMALL, "n_layer": 3}, 2), (SMALL, 4)], start=1):
        choose(config(args), ranks, ranks)
        assert len(tried) == count
