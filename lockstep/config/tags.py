"""The YAML tags of the template language: `!singleton:module:Name@label`, `!list`, `!calc "expression"`.

`@label` names the object for people; to use it twice give it an anchor, `&name`, and refer to it by `*name`.
"""

import re

from lockstep.config.calc import Calc
from lockstep.config.tree import Node, Origin
from lockstep.errors import UsageError

_SINGLETON = re.compile(r"^!singleton:(?P<name>[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)(?:@[\w.-]*)?$")
_LIST = re.compile(r"^!list:?(?:@[\w.-]*)?$")
_CALC = re.compile(r"^!calc(?::@[\w.-]*)?$")


def build_tagged(tag: str, content: Node, origin: Origin) -> Node:
    """The node that a tagged value stands for.

    Raises:
        UsageError: an unknown tag, or content that the tag does not take.
    """
    singleton = _SINGLETON.match(tag)
    if singleton:
        return _singleton(singleton["name"], content, origin)
    if _LIST.match(tag):
        if content.value in (None, ""):
            return Node([], origin)
        if not isinstance(content.value, list):
            raise UsageError("!list takes a list", where=str(origin), fix="put `- ` before each of its items")
        return Node(content.value, origin)
    if _CALC.match(tag):
        if not isinstance(content.value, str) or not content.value.strip():
            raise UsageError(
                "!calc takes an expression", where=str(origin), fix='write !calc "max(1, 64 // batch_size)"'
            )
        return Node(Calc(content.value), origin)
    raise UsageError(
        f"the tag {tag} is not known",
        where=str(origin),
        fix='the tags are !singleton:module:Name, !list and !calc "expression"',
    )


def _singleton(name: str, content: Node, origin: Origin) -> Node:
    """`args: […]` are positional arguments; `args: {…}`, `kwargs: {…}` and all other keys are keywords."""
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
        raise UsageError(
            f"!singleton:{name} takes arguments as a mapping or a list under it, not {content.value!r}",
            where=str(origin),
            fix="write them under it, indented: `key: value` lines or `- value` lines",
        )
    inside = {"name": Node(name, origin), "args": Node(keywords, origin)}
    if positional:
        inside["positional"] = Node(positional, origin)
    return Node(inside, origin)
