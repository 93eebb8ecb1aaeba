"""A reproducible run may change its topology at any checkpoint, and ends in the bits of the run
that never changed.
"""

from pathlib import Path

import pytest

from tests.parity.same_bits import bits, relay
from tests.ranks import run_ranks

SMALL_STEPS = {"training.global_batch_size": 8, "training.lr_schedule": "cosine"}


@pytest.mark.parametrize(
    ("model", "precision", "each"),
    [("transformer", "fp32", 1), pytest.param("bdh", "bf16", 2, marks=pytest.mark.full)],
)
def test_single_ddp_hybrid_pipeline_and_back(
    tmp_path: Path, model: str, precision: str, each: int
) -> None:
    settings = {**SMALL_STEPS, "training.max_steps": 6 * each, "precision.mode": precision}
    reference, records = bits("single", model, settings)
    _, first = relay(str(tmp_path), model, settings, ["single"], each)
    four = ["ddp:4", "hybrid:2x2", "pipeline:2*ddp:2"]
    second = run_ranks(relay, 4, str(tmp_path), model, settings, four, each)[0][1]
    third = run_ranks(relay, 2, str(tmp_path), model, settings, ["fsdp:2"], each)[0][1]
    digest, last = relay(str(tmp_path), model, settings, ["single"], each)
    assert first + second + third + last == records
    assert digest == reference


@pytest.mark.full  # a part of it is in the next one
def test_a_run_that_is_cut_over_the_axis_tensor_for_a_while(tmp_path: Path) -> None:
    settings = {**SMALL_STEPS, "training.max_steps": 6}
    reference, records = bits("single", "transformer", settings, vocab_size=64)
    four = ["ddp:2*tensor:2", "fsdp:2*tensor:2", "pipeline:2*tensor:2", "tensor:4"]
    first = run_ranks(relay, 4, str(tmp_path), "transformer", settings, four, 1, 64)[0][1]
    second = run_ranks(relay, 2, str(tmp_path), "transformer", settings, ["tensor:2"], 1, 64)[0][1]
    digest, last = relay(str(tmp_path), "transformer", settings, ["single"], 1, 64)
    assert first + second + last == records
    assert digest == reference


@pytest.mark.full  # test_mixture.py changes between other axes
@pytest.mark.parametrize(
    ("four", "two"),
    [
        ([], ["context:2", "tensor:2"]),
        (
            ["fsdp:2*context:2", "context:4", "context:2*tensor:2", "pipeline:2*context:2"],
            ["context:2", "tensor:2"],
        ),
    ],
    ids=["two ranks", "all"],
)
def test_a_run_whose_sequences_are_cut_over_the_axis_context_for_a_while(
    tmp_path: Path, four: list[str], two: list[str]
) -> None:
    """One key, `open_axes`, keeps both axes open."""
    settings = {
        **SMALL_STEPS,
        "training.max_steps": len(four) + len(two) + 1,
        "distributed.open_axes": ["tensor", "context"],
    }
    reference, records = bits("single", "transformer", settings, vocab_size=64)
    taken = []
    for ranks, topologies in ((4, four), (2, two)):
        if topologies:
            of_ranks = run_ranks(
                relay, ranks, str(tmp_path), "transformer", settings, topologies, 1, 64
            )
            taken += of_ranks[0][1]
    digest, last = relay(str(tmp_path), "transformer", settings, ["single"], 1, 64)
    assert taken + last == records
    assert digest == reference
