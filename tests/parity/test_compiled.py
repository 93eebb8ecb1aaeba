"""torch.compile under every strategy: compiled runs equal compiled runs, and names stay
canonical.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lockstep.config import config_from
from lockstep.trainer import Trainer
from tests.parity import matrix
from tests.parity.matrix import Case, Result, difference, reference, run, run_all
from tests.parity.parts import COMPILED, compiled, outcome
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks

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


def in_one_launch(backend: str) -> dict[str, Any]:
    with compiled_by(backend):
        return {"results": run_all(CASES), "state": state()}


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Have torch.compile use a backend; "aot_eager" makes the same graphs, and no C++ of them."""
    matrix._alone.cache_clear()  # of references by the other backend
    with patch("torch.compile", partial(torch.compile, backend=backend)):
        yield


@pytest.fixture(
    scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(backend: str) -> list[dict[str, Any]]:
    return run_ranks(in_one_launch, 2, backend, timeout=900)


def test_compiled_runs_are_the_same_under_every_strategy(
    backend: str, ranks: list[dict[str, Any]]
) -> None:
    """Dropout is on: a block's seed is set outside of its compiled code, once for forward and
    recomputation.
    """
    with compiled_by(backend):
        assert not problems(CASES, [rank["results"] for rank in ranks])
        alone = reference(CASES[0], 6)
    eager = run(Case("transformer", "single", 1, "none"), 6)
    assert difference(alone, eager) < 0.05, "other random numbers, the same training"


@pytest.mark.full
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
    backend: str, ranks: list[dict[str, Any]]
) -> None:
    """torch.compile adds `_orig_mod.`, checkpointing `_checkpoint_wrapped_module.`, DDP
    `module.`.
    """
    plain = language_model("transformer", tie_embeddings=True)
    expected = sorted(name for name, _ in plain.named_parameters())
    with compiled_by(backend):
        alone = state()
    for found in [alone, *(rank["state"] for rank in ranks)]:
        assert found["names"] == expected
