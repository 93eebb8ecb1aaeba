"""`lockstep compare A B`: the same training written otherwise passes, and other training is told by
what undoes it.
"""

import math
from pathlib import Path

import pytest

from benchmarks.silent_bugs.pairs import PAIRS, Pair, is_right, judge
from lockstep.cli import main
from lockstep.config import Config, config_from
from lockstep.errors import RunError
from lockstep.verify.comparison_result import Difference, Outcome
from lockstep.verify.config_pair import compare_configs, losses_of_configs, other_keys
from lockstep.verify.script.pairs.losses import PairedLosses
from lockstep.verify.text import losses_text, pair_text
from tests.verify.test_faults import COMMON, START

QUICK = ("one by one", "rate")

OF_TOKENS = {
    **COMMON,
    "model.name": "transformer",
    "model.args": {"vocab_size": 61, "n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16},
    "data.name": "tests.parity.toy:Tokens",
}


def config_of(**changes: object) -> Config:
    return config_from({**OF_TOKENS, **changes})


@pytest.mark.parametrize(
    "pair",
    [pair if pair.name in QUICK else pytest.param(pair, marks=pytest.mark.full) for pair in PAIRS],
    ids=lambda pair: pair.name,
)
def test_pairs(pair: Pair) -> None:
    outcome = judge(pair)
    assert is_right(pair, outcome), outcome


@pytest.mark.full
def test_two_configs(tmp_path: Path) -> None:
    """Of the keys that differ two change the steps, and without these there is no difference."""
    a = config_of(**{"training.warmup_steps": 0, "training.eval_batches": 3})
    b = config_of(**{"training.learning_rate": 6e-3, "training.seed": 5, "training.max_steps": 9})
    assert set(other_keys(a, b)) > {"training.learning_rate", "training.seed"}
    outcome = compare_configs(a, b, 2, tmp_path, START, lambda _line: None)
    assert not outcome.passed
    assert {cause.kind for cause in outcome.causes} == {"training.learning_rate", "training.seed"}
    rate = next(cause for cause in outcome.causes if cause.kind == "training.learning_rate")
    assert rate.text == "0.003 in A, and 0.006 in B"


def test_settings_that_differ_are_told_as_they_are() -> None:
    other = "the learning rate (lr) 0.004 instead of 0.003"
    first = Difference("optimizer", other, math.inf, ranks=[0])
    told = pair_text(("a.yaml", "b.yaml"), Outcome("B", first=first))
    assert f"step 1: optimizer: {other}" in told


@pytest.mark.full
def test_two_configs_that_are_the_same_training(tmp_path: Path) -> None:
    a = config_of()
    b = config_of(**{"monitor.log_steps": 3, "distributed.strategy": "ddp"})
    assert other_keys(a, b) == {}
    outcome = compare_configs(a, b, 2, tmp_path, START, lambda _line: None)
    assert outcome.passed
    assert outcome.same_bits


@pytest.mark.full
def test_the_losses_of_two_configs_are_paired(tmp_path: Path) -> None:
    b = config_of(**{"training.learning_rate": 6e-3, "training.seed": 5})
    losses, given = losses_of_configs(config_of(), b, 8, tmp_path, START, lambda _line: None)
    assert given == ["training.seed"]
    assert losses.differences[0] == 0.0  # the first loss is that of the first values
    assert losses.difference != 0.0
    assert losses.error < losses.unpaired_error


@pytest.mark.full
def test_a_config_that_can_not_be_trained_is_named(tmp_path: Path) -> None:
    b = config_of(**{"model.args": {"no_such": 1}})
    with pytest.raises(RunError, match="B can't be trained: the model transformer takes no"):
        losses_of_configs(config_of(), b, 2, tmp_path, START, lambda _line: None)


@pytest.mark.full
def test_a_script_that_takes_no_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing')\n")
    assert main(["compare", str(script), str(script)]) == 1
    assert "no call of optimizer.step() was seen in A" in capsys.readouterr().out


def test_the_error_of_a_mean_difference_is_that_of_the_pairs() -> None:
    losses = PairedLosses([1.5, 2.5, 3.0], [1.0, 2.0, 3.0])
    assert losses.difference == pytest.approx(1 / 3)
    assert losses.error == pytest.approx(math.sqrt(1 / 12) / math.sqrt(3))
    assert losses.unpaired_error > 1.5 * losses.error
    said = losses_text(("a.py", "b.py"), losses, ["samples"])
    assert "B − A, paired: +0.333 ± 0.17" in said
    assert "B was given A's samples" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py", __file__], "there is no script nowhere.py"),
        (["run.yaml", __file__], "one of the two is a config, and the other is not"),
        ([__file__, __file__, "--steps", "0"], "--steps 0 compares nothing"),
        (
            ["a.yaml", "b.yaml", "--ranks", "2"],
            "--ranks is for scripts: each config is trained by one process",
        ),
        (
            ["torchrun --nproc-per-node 2 a.py", "torchrun --nproc-per-node 4 a.py"],
            "A and B are for different numbers of ranks",
        ),
    ],
)
def test_misuse_is_one_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    assert says in capsys.readouterr().err
