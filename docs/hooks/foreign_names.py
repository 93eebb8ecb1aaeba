"""The Coming-from pages: tables of names, from the one table that the errors "write X" use too."""

from config_keys import cell

from lockstep.config.keys import all_keys
from lockstep.config.names import SOURCES, ForeignName, table

_TITLES = {
    "key": "Config keys",
    "flag": "Options",
    "value": "Values",
    "python": "Python",
    "command": "Commands",
    "env": "Environment variables",
}


def tables_of(source: str) -> str:
    """One table for each kind of name of a source."""
    parts = []
    for kind, title in _TITLES.items():
        rows = [row for row in table() if row.source == source and row.kind == kind]
        if rows:
            parts.append("\n".join([f"### {title}\n", *_table(rows)]))
    return "\n\n".join(parts)


def page_of_all() -> str:
    """All names of all sources, in order of the alphabet."""
    rows = sorted(table(), key=lambda row: row.theirs.lower().lstrip("-_"))
    lines = [
        f"# All {len(rows)} names",
        "",
        (
            "Every name from elsewhere that Lockstep knows. The same table answers an unknown key"
            " or option on the command line."
        ),
        "",
        *_table(rows, with_source=True),
    ]
    return "\n".join(lines)


def _table(rows: list[ForeignName], *, with_source: bool = False) -> list[str]:
    of, line = (" of |", "---|") if with_source else ("", "")
    lines = [f"| there |{of} here | |", f"|---|{line}---|---|"]
    for row in rows:
        source = f" {SOURCES[row.source]} |" if with_source else ""
        lines.append(f"| {_theirs(row)} |{source} {_ours(row)} | {cell(row.note)} |")
    return [*lines, ""]


def _theirs(row: ForeignName) -> str:
    if row.kind == "value":
        return f"`{cell(row.theirs)}` for [`{row.ours}`]({_link(row.ours)})"
    return f"`{cell(row.theirs)}`"


def _ours(row: ForeignName) -> str:
    if row.kind == "value":
        return f"`{cell(row.value)}`"
    if not row.ours:
        return "–"
    if row.is_key:
        written = f"`{row.ours}: {cell(row.value)}`" if row.value else f"`{row.ours}`"
        return f"[{written}]({_link(row.ours)})"
    return f"`{cell(row.ours)} {cell(row.value)}`" if row.value else f"`{cell(row.ours)}`"


def _link(key: str) -> str:
    """To the key in the reference; to the free mapping that it is in."""
    known = all_keys()
    while key not in known:
        key = key.rpartition(".")[0]
    return f"../reference/config.md#{key}"
