"""A config as YAML that people can read and `load_config` reads back as the same config."""

import re
from typing import Any

import yaml

from lockstep.config.prepass import is_template
from lockstep.config.schema import Config
from lockstep.config.tree import CoreLoader


class _CoreDumper(yaml.SafeDumper):
    """Quotes what YAML 1.2 would take for another type; writes lists of plain values on one line."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _sequence(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = all(not isinstance(item, (dict, list)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


def _mapping(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=not data)


_BANG = "\ue002"  # stands for an exclamation mark until the text is written; PyYAML would leave the mark as it is


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    """Text that holds line breaks, or reads like the template language, goes into double quotes, on one line."""
    if is_template(data):
        return dumper.represent_scalar("tag:yaml.org,2002:str", data.replace("!", _BANG), style='"')
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


def _float(dumper: yaml.SafeDumper, data: float) -> yaml.Node:
    text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(data, ".nan" if data != data else repr(data))
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_CoreDumper.add_representer(str, _text)
_CoreDumper.add_representer(list, _sequence)
_CoreDumper.add_representer(dict, _mapping)
_CoreDumper.add_representer(float, _float)


def to_yaml(config: Config) -> str:
    """Sections in the order of the schema, a blank line between them."""
    text: str = yaml.dump(
        config.to_dict(), Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=float("inf")
    ).replace(_BANG, "\\x21")
    return re.sub(r"\n(?=[a-z_]+:)", "\n\n", text)
