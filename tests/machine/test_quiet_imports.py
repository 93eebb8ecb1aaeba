"""Warnings that are logged while a library is imported are dropped, and later ones are not."""

import logging
import subprocess
import sys

import pytest

from lockstep.machine.quiet_imports import without_warnings_of_imports


def test_warnings_are_dropped_in_the_block_alone(caplog: pytest.LogCaptureFixture) -> None:
    with without_warnings_of_imports():
        logging.getLogger("torchao").warning("kernels for another device do not load")
        logging.getLogger("torchao").error("the library is broken")
    logging.getLogger("torchao").warning("said later")

    assert [record.getMessage() for record in caplog.records] == [
        "the library is broken",
        "said later",
    ]


def test_the_block_ends_with_the_level_that_was_there_before() -> None:
    before = logging.root.manager.disable
    with pytest.raises(ImportError), without_warnings_of_imports():
        raise ImportError
    assert logging.root.manager.disable == before


def test_a_trainer_imports_no_library_that_it_does_not_use() -> None:
    """Each rank would wait seconds for it, and show what it says of itself."""
    optional = (
        "accelerate",
        "datasets",
        "huggingface_hub",
        "obstore",
        "peft",
        "ray",
        "transformers",
    )
    program = (
        "import sys, lockstep.trainer, lockstep.launch.worker\n"
        f"print(*[name for name in {optional} if name in sys.modules])"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.split() == []
