"""Translate the line syntax of the template language to Jinja's, line for line.

Jinja is not imported.

`-- statement` becomes `{% statement %}`, and `== expression` `{{ expression }}`, with its text
indented like the `==`. The text of a block takes the indentation of the block in the template that
defines it: its lines are moved to column 0 here, and the definition indents them again. Every line
ends in a mark with the numbers of file and line, for messages.

Tests: tests/config/test_templates.py
"""

import difflib
import re
from dataclasses import dataclass, field

from lockstep.errors import UsageError

STATEMENTS = (
    *(
        "extends",
        "block",
        "endblock",
        "set",
        "endset",
        "if",
        "elif",
        "else",
        "endif",
        "for",
        "endfor",
        "include",
    ),
    *(
        "import",
        "from",
        "macro",
        "endmacro",
        "filter",
        "endfilter",
        "with",
        "endwith",
        "raw",
        "endraw",
    ),
)
_STATEMENT = re.compile(r"^( *)-- +(\w+)\b *(.*?) *$")
_EXPRESSION = re.compile(r"^( *)== +(.+?) *$")
_LINES = re.compile(r"^[ \t]*(?:--|==) +\S", re.MULTILINE)
_TAGS = re.compile(r"(?:^|[\s:,\[{-])!(?:singleton:|list\b|calc\b)", re.MULTILINE)
_DELIMITER = re.compile(r"\{\{|\{%|\{#|\}\}|%\}|#\}")
_CLOSES = {"{{": "}}", "{%": "%}", "{#": "#}"}
_MARK = re.compile("\ue000(\\d+):(\\d+)\ue001")


def is_template(text: str) -> bool:
    """Return whether a config file is in the template language."""
    return bool(_LINES.search(text) or _TAGS.search(text))


@dataclass
class TemplateBlock:
    """A block of one file, with 0-based lines and the indentation of its text."""

    name: str
    start: int
    parent: "TemplateBlock | None"
    end: int = -1
    indent: int = 0
    expands: bool = False  # whether it fills a block of the parent file rather than defining one


@dataclass
class PreparedTemplate:
    """A file in Jinja's syntax."""

    source: str
    blocks: list[TemplateBlock] = field(default_factory=list)
    outside: str = ""  # the same lines with those of `extends` and of blocks left empty


def prepare(text: str, index: int, shown: str) -> PreparedTemplate:
    """Translate one file, with `index` as the number of the file in its marks.

    Raises UsageError: a statement is unknown, or blocks do not pair.
    """
    lines = text.split("\n")
    blocks = _blocks(lines, shown)
    extends = any(match[2] == "extends" for match in map(_STATEMENT.match, lines) if match)
    for block in blocks:
        block.expands = extends and block.parent is None
        inside = [
            line
            for line in lines[block.start + 1 : block.end]
            if line.strip() and not _STATEMENT.match(line)
        ]
        block.indent = min(map(_spaces, inside), default=_spaces(lines[block.start]))
    rewritten = _rewrite(lines, blocks, index)
    tops = [block for block in blocks if block.parent is None]
    outside: list[str] = []
    for number, (line, new) in enumerate(zip(lines, rewritten, strict=True)):
        statement = _STATEMENT.match(line)
        drop = (statement is not None and statement[2] == "extends") or line.rstrip() == "---"
        drop = drop or any(block.start <= number <= block.end for block in tops)
        outside.append("" if drop else new)
    return PreparedTemplate("\n".join(rewritten), blocks, "\n".join(outside) if extends else "")


def strip_marks(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text without marks, and where each line comes from.

    For each line there is the index of its file and its number, from 1 on.
    """
    plain: list[str] = []
    origins: list[tuple[int, int]] = []
    last = (0, 1)
    for line in rendered.split("\n"):
        marks = _MARK.findall(line)
        if marks:
            last = (int(marks[-1][0]), int(marks[-1][1]))
        origins.append(last)
        plain.append(_MARK.sub("", line))
    return "\n".join(plain), origins


def reindent(text: object, spaces: int) -> str:
    """Return `text` with spaces added before each line that is not empty."""
    pad = " " * spaces
    return "\n".join(pad + line if line.strip() else line for line in str(text).split("\n"))


def _blocks(lines: list[str], shown: str) -> list[TemplateBlock]:
    """Find the blocks of a template, nested ones included.

    Raises UsageError: a statement is wrong.
    """
    blocks: list[TemplateBlock] = []
    open_blocks: list[TemplateBlock] = []
    for number, line in enumerate(lines):
        match = _STATEMENT.match(line)
        if match is None:
            continue
        _, word, rest = match.groups()
        where = f"{shown}:{number + 1}"
        if word not in STATEMENTS:
            near = difflib.get_close_matches(word, STATEMENTS, n=1)
            fix = f"write -- {near[0]}" if near else f"the statements are {', '.join(STATEMENTS)}"
            raise UsageError(
                f"`-- {word}` is not a statement of the template language", where=where, fix=fix
            )
        if word == "block":
            if not rest:
                raise UsageError(
                    "`-- block` needs a name", where=where, fix="write -- block trainer_args"
                )
            block = TemplateBlock(rest.split()[0], number, open_blocks[-1] if open_blocks else None)
            blocks.append(block)
            open_blocks.append(block)
        elif word == "endblock":
            if not open_blocks:
                text = f"`-- endblock {rest}` ends a block that was not begun".replace(" `", "`")
                raise UsageError(
                    text, where=where, fix="begin it with `-- block NAME`, or take the line out"
                )
            block = open_blocks.pop()
            if rest and rest != block.name:
                text = f"`-- endblock {rest}` ends the block {block.name} of line {block.start + 1}"
                raise UsageError(text, where=where, fix=f"write -- endblock {block.name}")
            block.end = number
    if open_blocks:
        block = open_blocks[-1]
        fix = f"add -- endblock {block.name}"
        raise UsageError(
            f"the block {block.name} has no end", where=f"{shown}:{block.start + 1}", fix=fix
        )
    return blocks


def _spaces(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _rewrite(lines: list[str], blocks: list[TemplateBlock], index: int) -> list[str]:
    """Write the lines in Jinja's syntax, each with a mark of its file and number."""
    starts = {block.start: block for block in blocks}
    ends = {block.end: block for block in blocks}
    rewritten: list[str] = []
    open_blocks: list[TemplateBlock] = []
    pending = ""  # the delimiter that closes a Jinja construct of several lines
    for number, line in enumerate(lines):
        mark = f"\ue000{index}:{number + 1}\ue001"
        outer = open_blocks[-1].indent if open_blocks else 0
        statement = _STATEMENT.match(line)
        expression = _EXPRESSION.match(line)
        if pending:
            pending = _pending(line, pending)
            rewritten.append(line if pending else line + mark)
        elif number in starts:
            block = starts[number]
            open_blocks.append(block)
            head = (
                "" if block.expands else f"{{% filter reindent({max(0, block.indent - outer)}) %}}"
            )
            assert statement is not None
            rewritten.append(f"{head}{{% block {statement[3]} %}}")
        elif number in ends:
            block = open_blocks.pop()
            rewritten.append(
                f"{{% endblock {block.name} %}}" + ("" if block.expands else "{% endfilter %}")
            )
        elif statement:
            rewritten.append(f"{{% {statement[2]} {statement[3]} %}}")
        elif expression:
            indent = max(0, len(expression[1]) - outer)
            rewritten.append(f"{{{{ ({expression[2]}) | reindent({indent}) }}}}{mark}")
        elif line.lstrip().startswith("#") and _DELIMITER.search(line):
            # a comment about templates is not a template
            rewritten.append(f"{{% raw %}}{line}{{% endraw %}}{mark}")
        else:
            pending = _pending(line, "")
            kept = line[min(outer, _spaces(line)) :]
            rewritten.append(kept if pending else kept + mark)
    return rewritten


def _pending(line: str, pending: str) -> str:
    for delimiter in _DELIMITER.findall(line):
        if pending:
            pending = "" if delimiter == pending else pending
        elif delimiter in _CLOSES:
            pending = _CLOSES[delimiter]
    return pending
