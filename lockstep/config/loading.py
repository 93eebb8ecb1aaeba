"""Load a checked `Config` from a YAML file, the files that it extends, and overrides.

And write one as YAML.

Mappings are merged key by key, anything else is replaced. A template is rendered first.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lockstep.config import calc
from lockstep.config.checks import check, contradictions
from lockstep.config.files import ResolvedFile, find, parent_file, read
from lockstep.config.keys import Mistake, from_validation, unknown_key, usage_error
from lockstep.config.prepass import is_template
from lockstep.config.schema import Config
from lockstep.config.tree import CoreLoader, Node, Origin, merge, node_of, parse
from lockstep.config.tree import Path as KeyPath
from lockstep.errors import UsageError

_LENGTHS = ("max_steps", "num_train_epochs")  # two keys for the length of a run


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a file, or of one that ships (`trainers/fsdp.yaml`).

    Overrides have the form `section.key=VALUE`.

    Raises UsageError: with all mistakes: file, line, key, and what to write instead.
    """
    file = find(path)
    later = with_overrides(Node({}, Origin("the overrides")), overrides)
    tree = without_replaced_length(load_tree(file, ()), later)
    return _config(with_overrides(tree, overrides), file.shown)


def with_settings(config: Config | None, settings: Mapping[str, Any]) -> Config:
    """Return a config, or the defaults, with the values of some dotted keys replaced.

    Raises UsageError: see `config_from`.
    """
    if settings:
        return config_from(settings, config)
    config = config or Config()
    check(config)
    return config


def config_from(
    settings: Mapping[str, Any], base: Config | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Return the config of dotted keys, `{"training.batch_size": 4}`, over `base` or the defaults.

    Overrides of the form `section.key=VALUE` come last.

    Raises UsageError: a key is unknown, a value is wrong, or they contradict each other.
    """
    # Without defaults: a key that follows from others while it is unset must stay unset.
    given = base.model_dump(by_alias=True, exclude_unset=True) if base is not None else {}
    later = _with_settings(Node({}, Origin("the settings")), settings)
    tree = without_replaced_length(node_of(given, Origin("the config")), later)
    return _config(with_overrides(_with_settings(tree, settings), overrides), "the configuration")


def load_tree(file: ResolvedFile, chain: tuple[Path, ...]) -> Node:
    """Return the merged tree of a file and its parents; `chain` has the files that led here."""
    if file.path in chain:
        names = " → ".join(p.name for p in (*chain[chain.index(file.path) :], file.path))
        what = f"`extends` goes round in a circle: {names}"
        fix = "take one `extends` out"
        raise UsageError(what, where=file.shown, fix=fix)
    text = read(file)
    name = file.shown
    if is_template(text):
        from lockstep.config.templates import render  # loads Jinja

        tree = render(file)
    else:
        tree = parse(text, lambda line: Origin(name, line + 1))
    if tree.value is None:
        fix = "`lockstep config show trainers/single.yaml` prints all keys"
        raise UsageError(f"{name} is empty", where=name, fix=fix)
    if not isinstance(tree.value, dict):
        kind = "a list" if isinstance(tree.value, list) else "text"
        fix = "write sections: model, data, training …; `lockstep config show` prints them all"
        raise UsageError(
            f"a config is a mapping with sections, and this is {kind}",
            where=str(tree.origin),
            fix=fix,
        )
    if "extends" not in tree.value:
        return tree
    rest = {key: node for key, node in tree.value.items() if key != "extends"}
    extends = tree.value["extends"]
    if not isinstance(extends.value, str) or not extends.value:
        fix = "extends: trainers/fsdp.yaml"
        raise UsageError("`extends` takes the name of one file", where=str(extends.origin), fix=fix)
    parent = parent_file(extends.value, file, str(extends.origin))
    over = Node(rest, tree.origin)
    return merge(without_replaced_length(load_tree(parent, (*chain, file.path)), over), over)


def without_replaced_length(tree: Node, later: Node) -> Node:
    """Return `tree` without `max_steps` if `later` sets `num_train_epochs`, and the reverse."""
    for name, other in (_LENGTHS, _LENGTHS[::-1]):
        is_set = later.has(("training", name)) and later.find(("training", name)).value is not None
        if is_set and not later.has(("training", other)) and tree.has(("training", other)):
            training = {
                key: node for key, node in tree.find(("training",)).value.items() if key != other
            }
            tree = Node(
                {**tree.value, "training": Node(training, tree.find(("training",)).origin)},
                tree.origin,
            )
    return tree


def _with_settings(tree: Node, settings: Mapping[str, Any]) -> Node:
    for key, value in settings.items():
        tree = _put(
            tree,
            key_path(key, key),
            node_of(value, Origin(f"the setting {key}")),
            f"the setting {key}",
        )
    return tree


def with_overrides(tree: Node, overrides: Sequence[str]) -> Node:
    """Return `tree` with each `section.key=VALUE` applied, in order."""
    for override in overrides:
        tree = _with_override(tree, override)
    return tree


def _with_override(tree: Node, override: str) -> Node:
    """Return the tree with one `section.key=VALUE` of the command line. Raises UsageError."""
    key, equals, text = override.partition("=")
    key = key.strip()
    shown = f"the override {override!r}"
    where = "the command line"
    if not equals or not all(key.split(".")):
        fix = "write section.key=VALUE, training.max_steps=100"
        raise UsageError(f"{override!r} is not an override", where=where, fix=fix)
    try:
        value = parse(text, lambda _line: Origin(shown))
    except UsageError as error:
        raise UsageError(
            f"the value of {shown} is {error.what}", where=where, fix=error.fix
        ) from None
    return _put(tree, key_path(key, shown), value, shown)


def key_path(dotted: str, shown: str) -> KeyPath:
    """Return the path of a dotted key. Raises UsageError: the schema has no such key.

    Under a mapping of text with the user's own keys, the rest is one key:
    `distributed.pipeline.split_spec.layers.4`.
    """
    from lockstep.config.keys import all_keys

    parts = tuple(dotted.split("."))
    names = all_keys()
    for end in range(1, len(parts) + 1):
        key = ".".join(parts[:end])
        if key not in names:
            # The whole path, because if a template's block is written as a section, the key in it
            # may be the mistake.
            stub = _put(Node({}, Origin(shown)), parts, Node(None, Origin(shown)), shown)
            raise usage_error(unknown_key(parts[:end], stub), shown)
        info = names[key]
        if info.free == "flat" and end < len(parts):
            return (*parts[:end], ".".join(parts[end:]))
        if info.free == "nested" or not info.is_section:
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
    """Validate a tree, and check that its settings can be combined.

    Raises UsageError with all mistakes.
    """
    tree = calc.resolve(tree)
    try:
        config = Config.model_validate(tree.plain())
    except ValidationError as error:
        raise usage_error(from_validation(error, tree), source) from None
    all_contradictions = list(contradictions(config))
    paths = {key: tuple(key.split(".")) for each in all_contradictions for key in each.keys}
    origins = {
        key: tree.find(path).origin if tree.has(path) else "unset" for key, path in paths.items()
    }
    mistakes = []
    for each in all_contradictions:
        where = ", ".join(f"{key} ({origins[key]})" for key in each.keys)
        mistakes.append(
            Mistake(where, each.what + (f" ({each.why})" if each.why else ""), each.fix)
        )
    if mistakes:
        raise usage_error(mistakes, source)
    return config


# libyaml, where PyYAML was built with it, writes in a seventh of the time
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_NO_LINE_BREAKS = 2**31 - 1  # the longest line that libyaml can be told


class _CoreDumper(_Dumper):  # type: ignore[misc]
    """Writes YAML 1.2, with quotes around text that looks like another type."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


# stands for an exclamation mark while PyYAML writes, which does not escape it
_EXCLAMATION_MARK = "\ue002"


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    """Write a text of several lines in double quotes on one line.

    So is a text that looks like the template language.
    """
    if is_template(data):
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", data.replace("!", _EXCLAMATION_MARK), style='"'
        )
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", data, style='"' if "\n" in data else None
    )


def _sequence(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = all(not isinstance(item, (dict, list)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


def _float(dumper: yaml.SafeDumper, data: float) -> yaml.Node:
    text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(
        data, ".nan" if data != data else repr(data)
    )
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_CoreDumper.add_representer(str, _text)
_CoreDumper.add_representer(list, _sequence)
_CoreDumper.add_representer(
    dict,
    lambda dumper, data: dumper.represent_mapping(
        "tag:yaml.org,2002:map", data.items(), flow_style=not data
    ),
)
_CoreDumper.add_representer(float, _float)


def to_yaml(config: Config) -> str:
    """Return a config as YAML with a blank line between sections.

    `load_config` reads it back as the same config.
    """
    text: str = yaml.dump(
        config.to_dict(),
        Dumper=_CoreDumper,
        sort_keys=False,
        allow_unicode=True,
        width=_NO_LINE_BREAKS,
    ).replace(_EXCLAMATION_MARK, "\\x21")
    return re.sub(r"\n(?=[a-z_]+:)", "\n\n", text)
