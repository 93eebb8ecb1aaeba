"""Pages that are made while the site is built: from the config schema, the command line and the
table of names.

mkdocs calls `on_files` and `on_page_markdown`. A line `<!-- names: SOURCE -->` of a page becomes
the tables of what is called otherwise there, `<!-- keywords -->` the list of `Trainer`'s keyword
arguments.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import command_line
import config_keys
import foreign_names
import measured
from mkdocs.structure.files import File, Files

PAGES = {
    "reference/config.md": config_keys.page,
    "reference/command_line.md": command_line.page,
    "reference/configs.md": config_keys.shipped_page,
    "reference/measured.md": measured.page,
    "coming_from/all.md": foreign_names.page_of_all,
}
NAMES = re.compile(r"^<!-- names: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    # the page shows them as the results do, which they lie beside
    for picture in measured.pictures():
        files.append(
            File.generated(
                config, f"reference/{picture.name}", content=picture.read_text(encoding="utf-8")
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    markdown = markdown.replace("<!-- keywords -->", config_keys.keywords())
    return NAMES.sub(lambda found: foreign_names.tables_of(found[1]), markdown)
