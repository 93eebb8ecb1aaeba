"""From a YAML file, the files that it extends, and overrides to a checked `Config`.

Order: the parent (`extends`), the file, the overrides; mappings are merged key by key, anything else is replaced.
`max_steps` replaces a `num_train_epochs` said before, and the reverse: each is the length of the run. A
file with lines that begin with `-- `, or with the tags of the template language, is a template and is rendered first.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config import calc
from lockstep.config.checks import contradictions
from lockstep.config.files import ResolvedFile, find, parent_file, read
from lockstep.config.mistakes import Mistake, from_validation, unknown_key, usage_error
from lockstep.config.prepass import is_template
from lockstep.config.schema import Config
from lockstep.config.tree import Node, Origin, merge, node_of, parse, parse_value
from lockstep.config.tree import Path as KeyPath
from lockstep.errors import UsageError

_LENGTHS = ("max_steps", "num_train_epochs")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, check.

    Args:
        path: a YAML file, or the name of one that ships (`trainers/fsdp.yaml`).
        overrides: `section.key=VALUE`, VALUE in YAML; applied last, in order.

    Raises:
        UsageError: one message for all that is wrong, with file, line, key, and what to write instead.
    """
    file = find(path)
    tree = without_rivals(load_tree(file, ()), _overrides_tree(overrides))
    for override in overrides:
        tree = apply_override(tree, override)
    return _config(tree, str(file.shown))


def config_from(settings: Mapping[str, Any], base: Config | None = None) -> Config:
    """A config from dotted keys, `{"training.batch_size": 4}`, over `base` (or over the defaults).

    Raises:
        UsageError: an unknown key, a wrong value, a contradiction.
    """
    # Only what was set: what follows from other keys when unset must still be unset.
    given = base.model_dump(by_alias=True, exclude_unset=True) if base is not None else {}
    tree = without_rivals(node_of(given, Origin("the config")), _settings_tree(settings))
    for key, value in settings.items():
        tree = _put(tree, key_path(key, key), node_of(value, Origin(f"the setting {key}")), f"the setting {key}")
    return _config(tree, "the configuration")


def load_tree(file: ResolvedFile, chain: tuple[Path, ...]) -> Node:
    """The merged tree of a file and what it extends; `chain`: the files that led here."""
    if file.path in chain:
        names = " → ".join(p.name for p in (*chain[chain.index(file.path) :], file.path))
        raise UsageError(
            f"`extends` goes round in a circle: {names}", where=str(file.shown), fix="take one `extends` out"
        )
    tree = _document(file)
    if "extends" not in tree.value:
        return tree
    rest = {key: node for key, node in tree.value.items() if key != "extends"}
    extends = tree.value["extends"]
    if not isinstance(extends.value, str) or not extends.value:
        raise UsageError(
            "`extends` takes the name of one file", where=str(extends.origin), fix="extends: trainers/fsdp.yaml"
        )
    parent = parent_file(extends.value, file, str(extends.origin))
    over = Node(rest, tree.origin)
    return merge(without_rivals(load_tree(parent, (*chain, file.path)), over), over)


def without_rivals(tree: Node, later: Node) -> Node:
    """`tree` without the length of a run that a later layer says in the other way: the later one replaces it."""
    for name, rival in (_LENGTHS, _LENGTHS[::-1]):
        said = later.has(("training", name)) and later.find(("training", name)).value is not None
        if said and not later.has(("training", rival)) and tree.has(("training", rival)):
            training = {key: node for key, node in tree.find(("training",)).value.items() if key != rival}
            tree = Node({**tree.value, "training": Node(training, tree.find(("training",)).origin)}, tree.origin)
    return tree


def _overrides_tree(overrides: Sequence[str]) -> Node:
    tree = Node({}, Origin("the overrides"))
    for override in overrides:
        tree = apply_override(tree, override)
    return tree


def _settings_tree(settings: Mapping[str, Any]) -> Node:
    tree = Node({}, Origin("the settings"))
    for key, value in settings.items():
        tree = _put(tree, key_path(key, key), node_of(value, Origin(f"the setting {key}")), f"the setting {key}")
    return tree


def _document(file: ResolvedFile) -> Node:
    text = read(file)
    name = str(file.shown)
    if is_template(text):
        from lockstep.config.templates import render  # loads Jinja

        tree = render(file)
    else:
        tree = parse(text, lambda line: Origin(name, line + 1))
    if tree.value is None:
        raise UsageError(
            f"{name} is empty", where=name, fix="`lockstep config show trainers/single.yaml` prints all keys"
        )
    if not isinstance(tree.value, dict):
        raise UsageError(
            f"a config is a mapping with sections, and this is {'a list' if isinstance(tree.value, list) else 'text'}",
            where=str(tree.origin),
            fix="write sections: model, data, training …; `lockstep config show` prints them all",
        )
    return tree


def apply_override(tree: Node, override: str) -> Node:
    """`tree` with one `section.key=VALUE` applied."""
    key, equals, text = override.partition("=")
    key = key.strip()
    shown = f"the override {override!r}"
    if not equals or not key or any(not part for part in key.split(".")):
        raise UsageError(
            f"{override!r} is not an override",
            where="the command line",
            fix="write section.key=VALUE, training.max_steps=100",
        )
    try:
        value = parse_value(text, Origin(shown))
    except UsageError as error:
        raise UsageError(f"the value of {shown} is {error.what}", where="the command line", fix=error.fix) from None
    return _put(tree, key_path(key, shown), value, shown)


def key_path(dotted: str, shown: str) -> KeyPath:
    """The path of a dotted key. Under a mapping of text with keys of the user's own, the rest is one key:
    `distributed.pipeline.split_spec.layers.4`.

    Raises:
        UsageError: the schema has no such key.
    """
    from lockstep.config.keys import all_keys

    parts = tuple(dotted.split("."))
    names = all_keys()
    for end in range(1, len(parts) + 1):
        here = ".".join(parts[:end])
        if here not in names:
            # All of it: where a template's block is written as a section, the key in it may be the mistake.
            stub = _put(Node({}, Origin(shown)), parts, Node(None, Origin(shown)), shown)
            raise usage_error(unknown_key(parts[:end], stub), shown)
        facts = names[here]
        if facts.free == "flat" and end < len(parts):
            return (*parts[:end], ".".join(parts[end:]))
        if facts.free == "nested" or not facts.is_section:
            break
    return parts


def _put(tree: Node, path: KeyPath, value: Node, shown: str) -> Node:
    if not path:
        return value
    inside = tree.value if isinstance(tree.value, dict) else {}
    head = str(path[0])
    child = inside.get(head, Node({}, Origin(shown)))
    return Node({**inside, head: _put(child, path[1:], value, shown)}, tree.origin)


def _config(tree: Node, source: str) -> Config:
    tree = calc.resolve(tree)
    try:
        config = Config.model_validate(tree.plain())
    except ValidationError as error:
        raise usage_error(from_validation(error, tree), source) from None
    found = [
        Mistake(
            ", ".join(_placed(tree, key) for key in one.keys),
            one.what + (f" ({one.why})" if one.why else ""),
            one.fix,
        )
        for one in contradictions(config)
    ]
    if found:
        raise usage_error(found, source)
    return config


def _placed(tree: Node, key: str) -> str:
    """A key with the place where it is set."""
    path = tuple(key.split("."))
    return f"{key} ({tree.find(path).origin})" if tree.has(path) else f"{key} (unset)"
