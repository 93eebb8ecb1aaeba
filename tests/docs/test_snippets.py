"""Every code block of README.md and docs/ is checked, and in the full run every one that can run
here runs.

By default python blocks run, configs are checked as `lockstep config check` does, and command lines
are read by the real parsers (with `bash -n`); the full run carries out each page's blocks in order,
as a reader would.
"""

import ast
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config import load_config
from lockstep.config.checks import require_runnable
from lockstep.config.keys import children
from tests.docs.blocks import MARKS, NOT_RUN, REPOSITORY, Block, Page, pages
from tests.docs.commands import commands_in, parse

PAGES = pages()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_right(page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.prepare(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    before = set(sys.modules)
    for block in page.blocks:
        assert block.mark in ("", *MARKS), f"{block}: {block.mark}"
        if block.mark == "file":
            (folder / block.text).write_text(block.body)
        try:
            _check(block, folder, names, monkeypatch)
        except BaseException as error:
            error.add_note(f"in the block {block}")
            raise
    # the page's own files; another page may have files of the same names
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(folder)):
            del sys.modules[module]
    _tell_what_did_not_run(page)


def _tell_what_did_not_run(page: Page) -> None:
    """Skip, with what is missing, after all other blocks have run."""
    missing = [f"{block} (pip install {block.lacks})" for block in page.blocks if block.lacks]
    if missing:
        pytest.skip(f"NOT RUN: {', '.join(missing)}; all other blocks ran")


def _check(
    block: Block, folder: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if block.mark == "run by":
        test = (REPOSITORY / block.text).read_text()
        assert Path(block.page).name in test, f"{block.text} does not name {block.page}"
    elif block.language == "diff":
        raise AssertionError("a diff says which test runs it")
    elif block.language == "python":
        ast.parse(block.body)
        if block.mark == "" or (block.mark == "needs" and not block.lacks):
            exec(compile(block.body, str(block), "exec"), names)
    elif block.language == "yaml":
        _check_config(block, folder)
    else:
        subprocess.run(["bash", "-n"], input=block.body, text=True, check=True)
        for words in commands_in(block.body):
            parse(words, monkeypatch)


def _check_config(block: Block, folder: Path) -> None:
    """A config, whole or a part; anything else only has to be YAML."""
    template = block.body.startswith("-- ")
    if block.mark == NOT_RUN or not (
        template or set(yaml.safe_load(block.body)) <= {*children(""), "extends"}
    ):
        return
    path = folder / (block.text if block.mark == "file" else f"line-{block.line}.yaml")
    path.write_text(block.body)
    config = load_config(path)
    if config.model.name is not None and config.data.name is not None:
        (folder / "text.txt").write_text("Any text file will do.")
        with chdir(folder):
            require_runnable(config)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page: Page, folder: Path) -> None:
    page.prepare(folder)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{folder}",
        "OMP_NUM_THREADS": "1",
    }
    beside: list[tuple[Block, subprocess.Popen[bytes]]] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in page.blocks:
        if block.mark == "file":
            (folder / block.text).write_text(block.body)
        elif block.language == "python" and block.mark in ("", "needs") and not block.lacks:
            exec(compile(block.body, str(block), "exec"), names)
        elif block.language == "bash" and block.mark in ("", "beside"):
            command = ["bash", "-euo", "pipefail", "-c", block.body]
            started = subprocess.Popen(command, cwd=folder, env=environment)
            if block.mark == "beside":
                beside.append((block, started))
                continue
            for what, process in ((block, started), *beside):
                assert process.wait(timeout=1700) == 0, what
            beside.clear()
    assert not beside
    shutil.rmtree(folder / "runs", ignore_errors=True)
