"""The site builds with warnings as errors, and is read without a network."""

import html
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from mkdocs.utils.yaml import yaml_load

from lockstep.config.names import SOURCES, table
from tests.docs.blocks import REPOSITORY
from tests.report.browser import Page, browser

# Half a minute of a processor: `make docs` builds the same.
pytestmark = pytest.mark.full

LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"(https?:)?//[^\"]*\"[^>]*>"
)


def build(where: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a broken link, a missing anchor or a page that is nowhere in the
    menu is an error.
    """
    folder = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_to_read_it(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = [
            tag
            for tag in LOADED.finditer(page.read_text(encoding="utf-8"))
            if 'rel="canonical"' not in tag[0]
        ]
        assert not loaded, f"{page.relative_to(site)}: {loaded[0][0]}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(https?:)?//|@import", style.read_text(encoding="utf-8")), (
            style
        )


@pytest.mark.skipif(
    browser() is None, reason="NO BROWSER: install chromium, or the search is not tested"
)
def test_the_search_works_in_pages_that_are_opened_from_a_folder(site: Path) -> None:
    with Page() as page:
        address = (site / "how_to" / "fsdp.html").as_uri()
        page.open(
            f"{address}?q=pipeline", "document.querySelectorAll('.md-search-result__item').length"
        )
        assert page.ask(
            "[...document.querySelectorAll('.md-search-result__item a')].map((a) => a.href)"
        ).count((site / "how_to" / "pipeline.html").as_uri())
        assert [asked for asked in page.requests if not asked.startswith(("file:", "data:"))] == []
        assert page.complaints == []


def test_what_is_made_at_build_time_is_there(site: Path) -> None:
    config = (site / "reference" / "config.html").read_text(encoding="utf-8")
    assert 'id="distributed.fsdp.sharding_strategy"' in config
    command_line = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    assert "--nproc-per-node" in command_line
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert "enable_gradient_checkpointing" in python
    for page in (site / "coming_from").glob("*.html"):
        assert "<!-- names" not in page.read_text(encoding="utf-8")


def test_each_source_of_names_has_a_page_with_all_of_them(site: Path) -> None:
    for source in SOURCES:
        page = html.unescape((site / "coming_from" / f"{source}.html").read_text(encoding="utf-8"))
        for row in table():
            assert row.source != source or f"<code>{row.theirs}</code>" in page, row


def test_a_broken_anchor_or_link_is_refused(tmp_path: Path) -> None:
    """The settings of the site make an error of both."""
    settings = yaml_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(
        "# Here\n\n[sound](#here), [broken](#nowhere), [broken](other.md)\n"
    )
    (tmp_path / "mkdocs.yml").write_text(
        yaml.safe_dump({"site_name": "x", "validation": settings["validation"]})
    )
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "'#nowhere', but there is no such anchor" in done.stderr
    assert "'other.md', but the target is not found" in done.stderr


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    browser() is None, reason="NO BROWSER: install chromium, or the menu of versions is not tested"
)
def test_versions_stand_side_by_side(tmp_path: Path) -> None:
    """`make docs-version` adds one to the branch gh-pages; a menu names them."""
    clone = tmp_path / "clone"
    site = tmp_path / "site"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    subprocess.run(["git", "config", "user.name", "a"], cwd=clone, check=True)
    subprocess.run(["git", "config", "user.email", "a@b.c"], cwd=clone, check=True)
    bin = Path(sys.executable).parent
    venv = bin.parent  # as it is: the clone is newer, and would be installed into it
    subprocess.run(
        ["make", "-o", venv / ".ready", "docs-version", f"VENV={venv}"], cwd=clone, check=True
    )
    environment = {
        **os.environ,
        "PATH": f"{bin}:{os.environ['PATH']}",
        "PYTHONPATH": ".",
        "DOCS_VERSIONS": "mike",
    }
    subprocess.run(["mike", "deploy", "9.9"], cwd=clone, env=environment, check=True)
    subprocess.run(["git", "worktree", "add", "--quiet", site, "gh-pages"], cwd=clone, check=True)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Page() as page:
            address = f"http://127.0.0.1:{server.server_port}/9.9/index.html"
            page.open(address, "document.querySelectorAll('.md-version__link').length")
            named = page.ask(
                "[...document.querySelectorAll('.md-version__link')].map((a) => a.innerText)"
            )
        server.shutdown()
    assert named == ["9.9", version("lockstep-train")]
