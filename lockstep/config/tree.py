"""Parse YAML into a tree in which every value has its file and line.

The types are those of YAML 1.2's core schema (section 10.3 of https://yaml.org/spec/1.2.2): `2e-4`
is a number; `on`, `off`, `yes`, `no` and dates are text; `012` is twelve. Tags are those of the
template language.

Tests: tests/config/test_loading.py, tests/config/test_templates.py
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import yaml

from lockstep.errors import UsageError

Path: TypeAlias = tuple[str | int, ...]
MAX_VALUES = 100_000  # aliases of aliases can stand for billions


@dataclass(frozen=True)
class Origin:
    """The file and the line, from 1 on, where a value is written.

    Line 0 stands for something that has no lines.
    """

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass
class Node:
    """A value of a config, and where it is written.

    It is a text, a number, a bool or None; a list or a mapping of nodes; or a `Calc` to be
    evaluated.
    """

    value: Any
    origin: Origin
    blank: bool = False  # null because nothing is written, as under `training:` with comments only

    def plain(self) -> Any:
        """Return the value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, path: Path) -> "Node":
        """Return the node at `path`, or the deepest existing one on the way there."""
        node = self
        for part in path:
            inside = node.value
            in_list = isinstance(inside, list) and isinstance(part, int) and part < len(inside)
            if not in_list and not (isinstance(inside, dict) and part in inside):
                break
            node = inside[part]
        return node

    def has(self, path: Path) -> bool:
        """Return whether there is a value at `path`."""
        node: Any = self
        for part in path:
            if not isinstance(node.value, dict) or part not in node.value:
                return False
            node = node.value[part]
        return True

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, "Node"]]:
        """Yield this node and all nodes below it, with their paths."""
        yield path, self
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield from child.walk((*path, key))
        elif isinstance(self.value, list):
            for index, child in enumerate(self.value):
                yield from child.walk((*path, index))


@dataclass(frozen=True)
class Calc:
    """An arithmetic expression to be evaluated."""

    expression: str
    # the variables that the template sets (`-- set NAME = VALUE`)
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)


def node_of(value: Any, origin: Origin) -> Node:
    """Return the tree of plain containers, with one origin for all values."""
    if isinstance(value, dict):
        return Node({str(key): node_of(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([node_of(child, origin) for child in value], origin)
    return Node(value, origin)


def merge(base: Node, over: Node) -> Node:
    """Return `base` with the values of `over`.

    Mappings are merged key by key, and anything else is replaced.

    A blank value over a mapping (a section whose lines are all comments) leaves it unchanged;
    `null` replaces it.
    """
    if isinstance(base.value, dict) and over.blank:
        return base
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.origin)


class CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the implicit types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


_TAG = "tag:yaml.org,2002:"
_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    ("float", f"^(?:{_FLOAT})$", list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    CoreLoader.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), _first)


def parse(text: str, origins: Callable[[int], Origin], *, overlay: bool = False) -> Node:
    """Return the tree of one YAML document; `origins` maps a 0-based line of `text` to its origin.

    With `overlay`, two equal keys are merged if they come from different files, as when a template
    calls `super()`.

    Raises UsageError: it is not YAML, or has more than one document, duplicate keys or unknown
    tags.
    """
    try:
        document = yaml.compose(text, Loader=CoreLoader)
        return (
            Node(None, origins(0))
            if document is None
            else _Builder(origins, overlay).build(document)
        )
    except yaml.YAMLError as error:
        raise _not_yaml(error, origins) from None
    except RecursionError:
        fix = "a config is a few levels deep; mend the brackets"
        raise UsageError(
            "the YAML is nested too deeply", where=str(origins(0).file), fix=fix
        ) from None


def _not_yaml(error: yaml.YAMLError, origins: Callable[[int], Origin]) -> UsageError:
    """Return the error that explains why a text is not YAML, with the line and what to do."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    origin = origins(mark.line) if mark is not None else origins(0)
    problem = str(
        getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be parsed"
    )
    if "single document" in problem or "another document" in problem:
        text = "a config is one YAML document, and this is a second one"
        return UsageError(text, where=str(origin), fix="delete the `---` line")
    if "\\t" in problem or "'\t'" in problem:
        return UsageError(
            "not YAML: a tab where spaces should be", where=str(origin), fix="indent with spaces"
        )
    fix = "look for a bracket or a quote that is not closed, and for uneven indentation"
    if "undefined alias" in problem:
        fix = "give a value the anchor first, `&name`, and refer to it by `*name` after that"
    elif "mapping values are not allowed" in problem:
        fix = "look for a missing line break or wrong indentation, or quote text that holds a colon"
    return UsageError(f"not YAML: {problem}", where=str(origin), fix=fix)


@dataclass
class _Builder:
    """Builds the tree of nodes with origins from PyYAML's nodes."""

    origins: Callable[[int], Origin]
    overlay: bool
    count: int = 0
    open: set[int] = field(default_factory=set)

    def build(self, node: yaml.Node) -> Node:
        """Return a parsed node with its values and their lines.

        Raises UsageError: aliases nest or multiply.
        """
        origin = self.origins(node.start_mark.line)
        self.count += 1
        if self.count > MAX_VALUES:
            fix = "write fewer aliases (*name)"
            raise UsageError(
                f"more than {MAX_VALUES:,} values, aliases followed", where=str(origin), fix=fix
            )
        if id(node) in self.open:
            fix = "let the alias (*name) stand outside of the value that it names (&name)"
            raise UsageError(
                "an alias refers to the value that it is part of", where=str(origin), fix=fix
            )
        self.open.add(id(node))
        try:
            content = self._content(node, origin)
            if node.tag is None or node.tag.startswith(_TAG):
                return content
            return build_tagged(node.tag, content, origin)
        finally:
            self.open.discard(id(node))

    def _content(self, node: yaml.Node, origin: Origin) -> Node:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.build(child) for child in node.value], origin)
        tagged = not node.tag.startswith(_TAG)
        value = node.value if tagged else _scalar(node.tag, node.value, origin)
        return Node(value, origin, blank=value is None and not node.value)

    def _mapping(self, node: yaml.MappingNode, origin: Origin) -> Node:
        """Build a mapping, merges (`<<`) included.

        Raises UsageError: a key is not text, or is written twice.
        """
        built: dict[str, Node] = {}
        merged: list[Node] = []
        lines: dict[str, Origin] = {}
        for key_node, value_node in node.value:
            where = self.origins(key_node.start_mark.line)
            if key_node.tag == _TAG + "merge":
                source = self.build(value_node)
                sources = source.value if isinstance(source.value, list) else [source]
                if not all(isinstance(each.value, dict) for each in sources):
                    fix = "write `<<: *name` with an anchor on a mapping"
                    raise UsageError(
                        "`<<` takes a mapping, or a list of them", where=str(where), fix=fix
                    )
                merged += sources
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError(
                    "a key should be text", where=str(where), fix="write the key as a plain word"
                )
            key = str(key_node.value)
            # a value has the origin of its key
            value = replace(self.build(value_node), origin=where)
            if key in built and not (self.overlay and lines[key].file != where.file):
                text = f"the key {key!r} is written twice, first in line {lines[key].line}"
                raise UsageError(text, where=str(where), fix="keep one of the two")
            if key in built:
                value = merge(built[key], value)
            built[key] = value
            lines[key] = where
        for each in merged:
            for key, child in each.value.items():
                built.setdefault(key, child)
        return Node(built, origin)


def _scalar(tag: str, text: str, origin: Origin) -> Any:
    """Return the value of a scalar under its tag, by YAML 1.2's core schema. Raises UsageError."""
    kind = tag.removeprefix(_TAG)
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2].lower(), 10))
        if kind == "float":
            return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()))
    except (ValueError, KeyError):
        what = f"{text!r} does not have the type of its tag, {kind}"
        raise UsageError(what, where=str(origin), fix="leave the tag out") from None
    if kind in ("str", "merge"):
        return text
    fix = "leave the tag out, or write !singleton, !list or !calc"
    raise UsageError(f"the tag !!{kind} is not known here", where=str(origin), fix=fix)


_SINGLETON = re.compile(r"^!singleton:(?P<name>[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)(?:@[\w.-]*)?$")
_LIST = re.compile(r"^!list:?(?:@[\w.-]*)?$")
_CALC = re.compile(r"^!calc(?::@[\w.-]*)?$")


def build_tagged(tag: str, content: Node, origin: Origin) -> Node:
    """Return the node for a tagged value.

    Raises UsageError: the tag is unknown, or does not take this content.
    """
    singleton = _SINGLETON.match(tag)
    if singleton:
        return _singleton(singleton["name"], content, origin)
    if _LIST.match(tag):
        if content.value in (None, ""):
            return Node([], origin)
        if not isinstance(content.value, list):
            raise UsageError(
                "!list takes a list", where=str(origin), fix="put `- ` before each of its items"
            )
        return Node(content.value, origin)
    if _CALC.match(tag):
        if not isinstance(content.value, str) or not content.value.strip():
            fix = 'write !calc "max(1, 64 // batch_size)"'
            raise UsageError("!calc takes an expression", where=str(origin), fix=fix)
        return Node(Calc(content.value), origin)
    fix = 'the tags are !singleton:module:Name, !list and !calc "expression"'
    raise UsageError(f"the tag {tag} is not known", where=str(origin), fix=fix)


def _singleton(name: str, content: Node, origin: Origin) -> Node:
    """Return the spec of an object.

    `args: […]` are positional arguments; `args: {…}`, `kwargs: {…}` and all other keys are keyword
    arguments.
    """
    keywords: dict[str, Node] = {}
    positional: list[Node] = []
    if isinstance(content.value, list):
        positional = content.value
    elif isinstance(content.value, dict):
        for key, child in content.value.items():
            if key in ("args", "kwargs") and isinstance(child.value, dict):
                keywords.update(child.value)
            elif key == "args" and isinstance(child.value, list):
                positional = child.value
            else:
                keywords[key] = child
    elif content.value not in (None, ""):
        fix = "write them under it, indented: `key: value` lines or `- value` lines"
        text = (
            f"!singleton:{name} takes arguments as a mapping or a list under it, not"
            f" {content.value!r}"
        )
        raise UsageError(text, where=str(origin), fix=fix)
    inside = {"name": Node(name, origin), "args": Node(keywords, origin)}
    if positional:
        inside["positional"] = Node(positional, origin)
    return Node(inside, origin)
