"""`lockstep verify` as people and programs use it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.verify import worker
from lockstep.verify.proof import default_against, spec_of, verify
from lockstep.verify.subject import Case, Spec
from lockstep.verify.trace import Trace
from tests.test_ready_configs import READY, small
from tests.verify import subjects
from tests.verify.test_faults import START

TRANSFORMER = next(path for path in READY if path.stem == "transformer")
FAULTY = """
model: {name: tests.verify.subjects:Faulty}
data: {name: tests.parity.toy:Tokens}
training: {batch_size: 2, global_batch_size: 8, max_steps: 20}
"""


@pytest.mark.full
def test_a_ready_config_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    """In every bit, as JSON; what is being done is reported on stderr."""
    arguments = [str(TRANSFORMER), *small(TRANSFORMER), "distributed.reproducible=true"]
    assert main(["verify", *arguments, "--against", "ddp:2", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["passed"]
    assert found["every_bit"]
    assert found["steps"] == 2
    assert "2 steps: training.max_steps allows no more" in found["notices"]
    assert [(t["topology"], t["same_bits"], t["causes"]) for t in found["topologies"]] == [
        ("single", True, []),
        ("ddp:2", True, []),
    ]
    assert "ddp:2: 2 steps" in printed.err


def test_it_compares_without_float8_and_says_so() -> None:
    spec, notices = spec_of(config_from({"precision.fp8": "emulated"}), None, ["ddp:2"], 2)
    assert spec.config.precision.fp8 == "none"
    assert any("without fp8" in notice for notice in notices)


def test_a_difference_is_explained_and_the_exit_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A topology that can't be run is one line with a reason, and the others are verified all the
    same.
    """
    config = tmp_path / "faulty.yaml"
    config.write_text(FAULTY)
    page = tmp_path / "verdict.html"
    assert (
        main(
            [
                "verify",
                str(config),
                "--against=ddp:2,pipeline:2",
                "--steps",
                "1",
                "--html",
                str(page),
            ]
        )
        == 1
    )
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if "✓" in line or "✗" in line}
    assert rows["single,"] == ["again", "✓", "✓", "✓", "✓", "✓", "✓", "✓", "the", "same", "bits"]
    assert rows["ddp:2"] == ["✓", "✗", "✗", "✗", "✗", "✓", "✗"]
    assert rows["pipeline:2"] == ["-", "-", "-", "-", "-", "-", "✗", "did", "not", "run"]
    text = "\n".join(lines)
    assert "ddp:2: step 1, loss " in text
    drawn = page.read_text()
    assert drawn.count('<div class="differs first">first: ') == 1
    assert "ddp:2: step 1, loss " in drawn
    assert "cause: loss normalisation: " in text
    assert "counts 1 targets instead of " in text
    assert "found by: each module given the reference's inputs and gradients" in text
    assert "segments()" in text.partition("pipeline:2: did not run")[2]


def test_the_loss_that_a_config_names_is_that_of_a_function_too(tmp_path: Path) -> None:
    spec = Spec(config_from({"loss_fn": "torch.nn:MSELoss"}), subjects.without_a_loss, steps=1)
    worker.record(spec, Case(), tmp_path)
    assert Trace(tmp_path / "main").facts(0).loss > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "ddp:2,dpp:4"], "'dpp:4' is not a topology"),
        (["--against", ","], "verify against nothing"),
        (["--against", "pipeline:2*pipeline:2"], "is not a topology"),
        (["--steps", "0"], "--steps 0 compares nothing"),
        (["--againts", "ddp:2"], "write --against"),
        (["training.global_batch_size=7"], "7"),
    ],
)
def test_misuse_is_one_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started."""
    assert main(["verify", str(TRANSFORMER), *small(TRANSFORMER), *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert "Traceback" not in printed.err
    assert "reference" not in printed.err
    assert not printed.out


def test_verify_is_not_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="starts its own ranks"):
        verify(subjects.sound)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({}, "fsdp:2"),
        ({"distributed.strategy": "pipeline"}, "pipeline:2"),
        (
            {"distributed.strategy": "pipeline", "distributed.pipeline.split_spec": {"a": "end"}},
            "pipeline:2",
        ),
        ({"distributed.strategy": "accelerate"}, "accelerate:2"),
        (
            {"distributed.strategy": "fsdp", "distributed.fsdp.sharding_strategy": "hybrid_shard"},
            "hybrid:2x2",
        ),
    ],
)
def test_the_configs_own_strategy_is_verified(settings: dict[str, Any], last: str) -> None:
    against = default_against(config_from(settings))
    assert against[:2] == ["ddp:2", "fsdp:2"]
    assert against[-1] == last


@pytest.mark.full
def test_a_function_of_ones_own_is_verified() -> None:
    """The Python API: a function that makes model and data, in every process."""
    settings = {"training.batch_size": 2, "training.gradient_accumulation_steps": 2}
    verdict = verify(subjects.sound, ["single"], config=config_from(settings), steps=3, start=START)
    assert verdict.passed
    assert (verdict.steps, verdict.micro_batches, verdict.exact) == (3, 2, False)
    assert [outcome.name for outcome in verdict.outcomes] == ["single", "single"]
    assert all(outcome.steps == 3 and not outcome.causes for outcome in verdict.outcomes)
