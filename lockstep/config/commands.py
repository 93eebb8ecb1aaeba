"""Run `lockstep config show|check|schema|list [CONFIG]`, and return the text to print."""

import difflib
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from lockstep.config.checks import require_runnable
from lockstep.config.files import SHIPPED, shipped_names
from lockstep.config.loading import config_from, load_config, with_overrides
from lockstep.config.schema import Config
from lockstep.config.tree import Node, Origin
from lockstep.errors import UsageError

VERBS = ("show", "check", "schema", "list")


def run(verb: str, config: str | Path | None, overrides: Sequence[str] = ()) -> str:
    """Run one verb and return the text to print; without a config, `show` shows the defaults.

    Raises UsageError: there is no such verb, or the config is missing or wrong.
    """
    if verb == "show":
        if config is not None:
            return load_config(config, overrides).to_yaml().rstrip("\n")
        settings = with_overrides(Node({}, Origin("the defaults")), overrides).plain()
        return config_from(settings).to_yaml().rstrip("\n")
    if verb == "check":
        if config is None:
            raise UsageError(
                "which config?", where="lockstep config check", fix="lockstep config check CONFIG"
            )
        loaded = load_config(config, overrides)
        require_runnable(loaded)
        return f"ok: {summary(loaded)}"
    if verb == "schema":
        return json.dumps(_schema(), indent=2).replace("\\n", " ")  # descriptions have line breaks
    if verb == "list":
        return _list()
    near = difflib.get_close_matches(verb, VERBS, n=1)
    fix = f"write {near[0]}" if near else None
    raise UsageError(f"{verb!r} is not one of {', '.join(VERBS)}", where="lockstep config", fix=fix)


def _schema() -> dict[str, Any]:
    """Return the JSON schema of a config file.

    It has `extends` and the short forms that loading expands.
    """
    schema = Config.model_json_schema(by_alias=True)
    text = "A config that this one begins from: a file, by its path from here, or one that ships."
    schema["properties"] = {
        "extends": {"type": "string", "description": text},
        **schema["properties"],
    }
    sections = schema["$defs"]
    for name, short in (("ObjectSpec", "string"), ("GradientClipConfig", "number")):
        sections[name] = {"anyOf": [{"type": short}, sections[name]]}
    with_args = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": {"type": "string"}, "args": {"type": "object"}},
    }
    keys = sections["TrainingConfig"]["properties"]
    keys["optimizer"] = {"anyOf": [keys["optimizer"], with_args]}
    env = sections["DistributedConfig"]["properties"]["env"]
    env["additionalProperties"] = {"type": ["string", "number"]}
    return schema


def summary(config: Config) -> str:
    """Return one line with model, data, strategy, batch, length and precision."""
    t = config.training
    batch = f"micro-batch {t.batch_size}"
    if t.global_batch_size is not None:
        batch += f", global batch {t.global_batch_size}"
    elif t.accumulation > 1:
        batch += f" × accumulation {t.accumulation} a rank"
    epochs = t.num_train_epochs or 1
    length = (
        f"{t.max_steps} steps" if t.max_steps is not None else f"{epochs} epoch{'s' * (epochs > 1)}"
    )
    parts = [
        f"{config.model.name} on {config.data.name}",
        f"strategy {config.distributed.strategy}",
        batch,
        length,
    ]
    return ", ".join([*parts, f"precision {config.precision.mode}"])


def _list() -> str:
    names = shipped_names()
    width = max(len(name) for name in names)
    lines = ["Write `extends: NAME`, or give the name in place of a file.", ""]
    for name in names:
        text = (SHIPPED / name).read_text(encoding="utf-8").splitlines()
        comment = " ".join(
            line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), text)
        )
        lines.append(f"{name:{width}}  {comment.partition('. ')[0].rstrip('.')}")
    return "\n".join(lines)
