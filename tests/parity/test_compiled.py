"""torch.compile under every strategy: compiled runs equal compiled runs, and names stay
canonical.
"""

from typing import Any

import pytest
import torch

from lockstep.config import config_from
from lockstep.trainer import Trainer
from tests.parity.matrix import Case, Result, difference, reference, run, run_all
from tests.parity.parts import COMPILED, compiled, outcome
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks

# Ten seconds of a processor for each compiled model on each rank. The quick run compiles blocks in
# one process (`tests/models/test_every_family.py`), and on stages to look at their names.
pytestmark = pytest.mark.full

CASES = compiled(whole=False)
OTHER_MODELS = [
    Case(model, strategy, 3, "none", COMPILED)
    for model, strategy in (
        ("bdh", "full_shard"),
        ("tied", "shard_grad_op"),
        ("vae", "ddp"),
        ("hf", "full_shard"),
    )
]


def problems(cases: list[Case], results: list[list[Result | str]]) -> list[str]:
    """Of what each rank made of the cases."""
    found = (outcome(case, 2, of_ranks) for case, *of_ranks in zip(cases, *results, strict=True))
    return [one.problem for one in found if one.problem]


def in_one_launch() -> dict[str, Any]:
    return {"results": run_all(CASES), "state": state()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(in_one_launch, 2, timeout=900)


def test_compiled_runs_are_the_same_under_every_strategy(ranks: list[dict[str, Any]]) -> None:
    """Dropout is on: a block's seed is set outside of its compiled code, once for forward and
    recomputation.
    """
    assert not problems(CASES, [rank["results"] for rank in ranks])
    eager = run(Case("transformer", "single", 1, "none"), 6)
    assert difference(reference(CASES[0], 6), eager) < 0.05, (
        "other random numbers, the same training"
    )


def test_other_models_compiled() -> None:
    assert not problems(OTHER_MODELS, run_ranks(run_all, 2, OTHER_MODELS, timeout=900))


def state() -> dict[str, Any]:
    """Names of everything that is saved, under compilation, checkpointing and the strategy's
    wrapper.
    """
    settings = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.max_steps": 50,
        "training.compile": True,
        "training.gradient_checkpointing": "full",
        "distributed.strategy": "ddp" if torch.distributed.is_initialized() else "single",
    }
    trainer = Trainer(
        language_model("transformer", tie_embeddings=True), config=config_from(settings)
    )
    next(trainer.steps(Tokens()))
    return {"names": sorted(trainer.placed.parameters)}


def test_trap_27_names_are_canonical_whatever_wraps_a_parameter(
    ranks: list[dict[str, Any]],
) -> None:
    """torch.compile adds `_orig_mod.`, checkpointing `_checkpoint_wrapped_module.`, DDP
    `module.`.
    """
    plain = language_model("transformer", tie_embeddings=True)
    expected = sorted(name for name, _ in plain.named_parameters())
    for found in [state(), *(rank["state"] for rank in ranks)]:
        assert found["names"] == expected
