"""docs/known_errors.md, made from the tables: `python -m lockstep.diagnose.page > docs/known_errors.md`."""

from lockstep.diagnose.known_errors import FAMILIES
from lockstep.diagnose.symptoms import SYMPTOMS

_INTRO = """# Known errors

When a rank fails, the launcher prints the first cause, and what the tables below say about it. This page is made from
them by `python -m lockstep.diagnose.page`. `lockstep doctor` finds many of these before a run.

“Seen in tests” means that a test provokes the error with the real library and sees it recognised; the others need what
is named, and are recognised by their text.
"""


def page() -> str:
    """The page in Markdown."""
    parts = [_INTRO]
    for title, errors in FAMILIES.items():
        lines = [f"## {title}", "", "| error | recognised by | cause | what to do | shown |", "|---|---|---|---|---|"]
        for error in errors:
            shown = f"needs {error.needs}" if error.needs else "seen in tests"
            cells = (error.name, f"`{error.pattern}`", error.cause, error.mend, shown)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    lines = [
        "## Symptoms without an error",
        "",
        "| what is seen | where to look | cause | what to do |",
        "|---|---|---|---|",
    ]
    lines += [f"| {s.seen} | {s.look} | {s.cause} | {s.mend} |" for s in SYMPTOMS]
    parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
