"""The site builds with warnings as errors, and is read without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY

LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"(https?:)?//[^\"]*\"[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a broken link, a missing anchor or a page that is nowhere in the menu is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_to_read_it(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = [tag for tag in LOADED.finditer(page.read_text(encoding="utf-8")) if 'rel="canonical"' not in tag[0]]
        assert not loaded, f"{page.relative_to(site)}: {loaded[0][0]}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(https?:)?//|@import", style.read_text(encoding="utf-8")), style


def test_what_is_made_at_build_time_is_there(site: Path) -> None:
    config = (site / "reference" / "config.html").read_text(encoding="utf-8")
    assert 'id="distributed.fsdp.sharding_strategy"' in config
    command_line = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    assert "--nproc-per-node" in command_line
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert "enable_gradient_checkpointing" in python
    for page in (site / "coming_from").glob("*.html"):
        assert "<!-- names" not in page.read_text(encoding="utf-8")


def test_a_broken_anchor_is_refused(tmp_path: Path) -> None:
    """The setting that makes this an error is on."""
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    assert "anchors: warn" in text
    assert "not_found: warn" in text
