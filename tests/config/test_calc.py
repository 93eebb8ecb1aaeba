"""Arithmetic in values: only arithmetic, over what the config says."""

import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.config.calc import evaluate
from tests.config.shared import loaded, refusal

numbers = st.integers(-1000, 1000) | st.floats(-1e3, 1e3)


def nothing(name: str) -> int:
    raise ValueError(f"no key is named {name!r}")


@example(4, 2.2250738585072014e-308, 0, "/", "+")
@given(
    numbers,
    numbers,
    numbers,
    st.sampled_from(["+", "-", "*", "/", "//", "%"]),
    st.sampled_from(["+", "-", "*"]),
)
def test_it_counts_as_python_does(a: float, b: float, c: float, one: str, two: str) -> None:
    expression = f"max(-({a!r}) {one} ({b!r}), min({c!r}, 3)) {two} +{c!r} ** 2"
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="zero"):
            evaluate(expression, nothing)
    else:
        if math.isinf(eval(f"({a!r}) {one} ({b!r})")):  # Python goes on with infinity
            with pytest.raises(ValueError, match="too large"):
                evaluate(expression, nothing)
        else:
            assert evaluate(expression, nothing) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "'a' * 3",
        "[1]",
        "(1, 2)",
        "a.b()",
        "lambda: 1",
        "1 if 2 else 3",
        "1 < 2",
        "not 1",
        "True",
        "9 ** 9 ** 9",
        "999999999 ** 1024",
        "1e308 ** 2",
        "1e308 * 10",
        "10 ** 2000",
        "(-1) ** 0.5",
        "max()",
        "max(1, key=2)",
        "min(*[1])",
        "1 +",
        "",
        "x := 1",
        "f'{1}'",
        "1j",
        "~1",
        "1 << 9",
        "max",
        "1" + "+1" * 600,
    ],
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression, nothing)


def test_names_are_keys_of_the_final_config(tmp_path: Path) -> None:
    text = """
        model: {args: {n_layer: 4, total: !calc "n_layer * training.batch_size"}}
        training:
          batch_size: 4
          gradient_accumulation_steps: !calc "max(1, 64 // batch_size)"
          max_steps: !calc "warmup * 2"
          warmup_steps: !calc "2 * save_steps // 100"
        data: {args: {warmup: !calc "eval_steps + 1", seed: !calc "training.seed"}}
        """
    config = loaded(tmp_path, text, "training.batch_size=8")
    assert config.training.gradient_accumulation_steps == 8
    assert config.model.args["total"] == 32
    assert config.data.args == {"warmup": 101, "seed": 1337}
    assert (config.training.max_steps, config.training.warmup_steps) == (202, 2)


def test_a_keys_own_name_is_its_default(tmp_path: Path) -> None:
    assert (
        loaded(tmp_path, 'training: {batch_size: !calc "batch_size * 2"}\n').training.batch_size
        == 16
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'training:\n  seed: !calc "batchsize"\n',
            ("run.yaml:2", "no key is named 'batchsize'", "training.batch_size"),
        ),
        ('training:\n  seed: !calc "max_steps"\n', ("run.yaml:2", "max_steps is not set")),
        (
            'training:\n  seed: !calc "1 / 2"\n',
            ("run.yaml:2", "training.seed should be a whole number", "0.5"),
        ),
        ('model:\n  args: {a: !calc "b", b: !calc "a"}\n', ("run.yaml:2", "refers to itself")),
        (
            'model: {args: {a: 1}}\ndata: {args: {a: 2, b: {c: !calc "a"}}}\n',
            ("run.yaml:2", "model.args.a or data.args.a"),
        ),
        ("training:\n  seed: !calc [1]\n", ("run.yaml:2", "!calc takes an expression")),
    ],
)
def test_expressions_that_mean_nothing_are_refused(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message, message
