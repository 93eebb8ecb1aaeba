"""Each known error that a machine with a CPU can have is provoked with the real library, and
recognised.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep import diagnose
from lockstep.config import Config
from lockstep.diagnose import recognise, table
from tests.diagnose.examples import EXAMPLES
from tests.launch.shared import environment
from tests.ranks import REPOSITORY, run_ranks

# Provoked as processes that end by a signal, in test_first_cause.py.
PAGE = Path(diagnose.__file__).with_name("known_errors.md")
BY_SIGNAL = {"killed by the system", "the program crashed"}


def unrecognised(provoked: Iterable[tuple[str, str]]) -> list[str]:
    """What was provoked and not recognised as itself."""
    wrong = []
    for name, text in provoked:
        found = recognise(text)
        if found is None or found.name != name:
            wrong.append(f"{name}: taken for {found and found.name}: {text[:400]}")
    return wrong


@pytest.fixture(scope="module")
def provoked(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Name and real text of every error that one process or two ranks can have."""
    folder = tmp_path_factory.mktemp("provoked")
    alone = _alone(folder)
    from tests.diagnose import provoke_ranks

    two = run_ranks(provoke_ranks.on_two_ranks, 2, str(folder))
    error = b""
    for again in (True, True, False):
        try:
            _, error = alone.communicate(timeout=150)
            break
        except subprocess.TimeoutExpired:
            # seen beside other load, perhaps a thread that was refused memory
            os.killpg(alone.pid, signal.SIGKILL)  # what it has started, too
            alone.communicate()
            assert again, "the program that provokes errors stood still three times"
            alone = _alone(folder)
    assert alone.returncode == 0, error
    return [*map(tuple, json.loads((folder / "alone.json").read_text())), *two[0], *two[1]]


def _alone(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that provokes what one process can have, and writes it down."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.diagnose.provoke", str(folder / "alone.json")],
        cwd=REPOSITORY,
        env=environment(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.skipif(dist.is_nccl_available(), reason="about a CPU build of torch")
def test_real_errors_are_recognised(provoked: list[tuple[str, str]]) -> None:
    assert unrecognised(provoked) == []


def test_every_error_is_provoked_or_says_what_that_needs(provoked: list[tuple[str, str]]) -> None:
    seen = {name for name, _ in provoked} | BY_SIGNAL
    assert {error.name for error in table() if not error.shown.startswith("needs ")} == seen


def test_errors_that_need_more_are_recognised_by_their_text() -> None:
    assert {error.name for error in table() if error.shown.startswith("needs ")} == set(EXAMPLES)
    assert unrecognised(EXAMPLES.items()) == []


def test_the_table_is_large_and_complete() -> None:
    names = [error.name for error in table()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
    for error in table():
        for text in (error.cause, error.fix):
            assert len(text) > 20, error.name
            assert not text.endswith("."), error.name


def test_messages_of_the_five_guides_are_there() -> None:
    """The troubleshooting sections of well-known guides, in their words."""
    words = {
        "Address already in use": "address in use",
        "RuntimeError: CUDA out of memory": "GPU memory is full",
        "NCCL error: invalid usage": "NCCL: invalid usage",
        "NCCL error: unhandled system error": "NCCL: unhandled system error",
        "Mismatch in world size": "world size mismatch",
        "RuntimeError: Expected to have finished reduction": "expected to have finished reduction",
        "RuntimeError: CUDA error: invalid configuration argument": (
            "invalid configuration argument"
        ),
        "Expected all tensors to be on the same device, but found at least two devices": (
            "tensors on different devices"
        ),
        "Watchdog caught collective operation timeout": "NCCL: timeout of a collective",
        "unable to open shared memory object </torch_12> in read-write mode": (
            "shared memory is full"
        ),
    }
    assert unrecognised((name, text) for text, name in words.items()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: the disk is full of errors",
        "step 12/100  loss 1.2",
        "UserWarning: something is deprecated",
    ],
)
def test_other_texts_are_not_taken_for_one(text: str) -> None:
    assert recognise(text) is None


def test_keys_that_the_mends_name_exist() -> None:
    known = set(_keys(Config().model_dump()))
    texts = [error.fix for error in table()] + PAGE.read_text().partition("## Symptoms")[
        2
    ].splitlines()
    pattern = (
        r"\b((?:model|data|training|precision|distributed|checkpoint|monitor)"
        r"\.[a-z_]+(?:\.[a-z_]+)*)"
    )
    named = {key for text in texts for key in re.findall(pattern, text)} - {
        "model.module",
        "model.parameters",
    }
    assert named
    assert named - known == set()


def _keys(tree: dict[str, object], prefix: str = "") -> Iterable[str]:
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def test_the_page_of_the_documentation_is_a_copy() -> None:
    """`cp lockstep/diagnose/known_errors.md docs/` writes it."""
    assert (Path(REPOSITORY) / "docs" / "known_errors.md").read_text() == PAGE.read_text()


def test_recognising_needs_no_torch() -> None:
    code = "import sys, lockstep.diagnose as k; k.recognise('x'); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment()}, check=False
        ).returncode
        == 0
    )


def test_what_an_error_that_is_provoked_holds_does_not_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process group that did waited under Python's lock for a thread that waited for the lock."""
    from tests.diagnose import provoke

    class Group:
        pass

    held: list[weakref.ref[Group]] = []

    def fail() -> None:
        group = Group()
        held.append(weakref.ref(group))
        raise RuntimeError("connection closed")

    monkeypatch.setattr(provoke, "_kept", [])
    with warnings.catch_warnings():
        assert provoke.errors_of((("a case", fail),)) == [
            ("a case", "RuntimeError: connection closed")
        ]
    gc.collect()
    assert held[0]() is not None
