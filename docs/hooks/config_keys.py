"""The reference of the config: every key of the schema, and the configs that ship."""

import inspect
import typing
from typing import Any

import yaml

from lockstep.config.files import SHIPPED, shipped_names
from lockstep.config.keys import KeyInfo, all_keys
from lockstep.trainer.settings import PlacementSettings, TrainerSettings

_INTRODUCTION = """# Config

A config is YAML with eight sections. Every key is typed, an unknown one is refused with the nearest that exists, and
the resolved config is saved with the run. `lockstep config check FILE` reads it as a run would; `lockstep config show
FILE` prints it as it resolves. Editors complete and check with
`lockstep config schema > lockstep.schema.json` and `# yaml-language-server: $schema=lockstep.schema.json` as the first
line of a config.

Files are composed with `extends: PARENT` (deep merge); `KEY=VALUE` on the command line comes last. Numbers are YAML
1.2's: `2e-4` is one. This page is made from the schema.
"""


def page() -> str:
    info = list(all_keys().values())
    parts = [_INTRODUCTION]
    for section in (one for one in info if one.is_section):
        parts.append(
            f"{'##' if '.' not in section.key else '###'} {section.key} {{ #{section.key} }}\n"
        )
        parts.append(section.description + "\n")
        parts.append(_table([one for one in info if _is_in(one, section.key)]))
    parts.insert(1, _table([one for one in info if "." not in one.key]))
    return "\n".join(parts)


def _is_in(info: KeyInfo, section: str) -> bool:
    return info.key.rpartition(".")[0] == section


def _table(rows: list[KeyInfo]) -> str:
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for info in rows:
        takes = "a section" if info.is_section else cell(info.takes)
        name = (
            f"[`{info.name}`](#{info.key})"
            if info.is_section
            else f"`{info.name}`{{ #{info.key} }}"
        )
        default = "" if info.is_section else f"`{_written(info.default)}`"
        lines.append(f"| {name} | {takes} | {default} | {cell(info.description)} |")
    return "\n".join([*lines, ""])


def _written(value: Any) -> str:
    if value is None or value == {} or value == []:
        return {"None": "null", "{}": "{}", "[]": "[]"}[str(value)]
    return (
        yaml.safe_dump(_plain(value), default_flow_style=True, width=1000)
        .removesuffix("...\n")
        .strip()
    )


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else value


def cell(text: str) -> str:
    """Text that is safe between the bars of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def keywords() -> str:
    """The keyword arguments of `Trainer` with their types, each a link to its key."""
    lines = ["```python"]
    hints = inspect.get_annotations(PlacementSettings) | inspect.get_annotations(TrainerSettings)
    lines += [f"{name}: {_hint(hint)}" for name, hint in hints.items()]
    return "\n".join([*lines, "```"])


def _hint(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return text.replace("typing.", "").replace("collections.abc.", "")


def shipped_page() -> str:
    """Each config that ships, as it is."""
    lines = [
        "# Configs that ship\n",
        (
            "Give a name in place of a file (`lockstep train ready/bdh.yaml`), or write `extends:"
            " NAME`. This page is made from the files.\n"
        ),
    ]
    for name in shipped_names():
        lines += [
            f"## {name}\n",
            f"```yaml\n{(SHIPPED / name).read_text(encoding='utf-8').rstrip()}\n```\n",
        ]
    return "\n".join(lines)
