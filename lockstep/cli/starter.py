"""Writes what a newcomer starts from.

That is a project, a model with its test, and a script by which a shell completes commands.

Files are made of the templates beside this module, with `@NAME@` for what is filled in. Nothing is
overwritten.
"""

import csv
import io
import json
import keyword
import os
import random
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError, first_line, listed
from lockstep.files.data_files import (
    DAMAGED,
    Kind,
    as_keys,
    conversation_keys,
    files_of,
    first_row,
    kind_of,
    opened_lines,
    preference_keys,
    require_read,
    require_text,
    row_of_line,
)
from lockstep.run_directory.run_files import create_file


def project(folder: Path, *, script: bool, data: Path | None) -> str:
    """Write a config or a script, and data if none are given; return what to do next.

    Raises UsageError: the folder has files already, or there are no data at the path.
    """
    if data is not None and (not data.exists() or (script and data.is_dir())):
        kind = "a CSV file" if script else "a text file or a folder of them"
        raise UsageError(
            f"there is no file {data}", where="--data", fix=f"name {kind}, or leave --data out"
        )
    if data is not None and not script:
        for file in files_of(data, "--data"):
            require_text(file, "--data")
    _require_free(folder, data)
    files: dict[str, str] = {}
    if data is None:
        name, text = ("data.csv", _points()) if script else ("text/python.txt", _documentation())
        files[name] = text
        source = "data.csv" if script else "text"
    else:
        source = os.path.relpath(data, folder)
    main = "train.py" if script else "train.yaml"
    files[main] = _filled(main, DATA=repr(source) if script else source)
    steps = [] if folder.resolve() == Path.cwd() else [f"cd {folder}"]
    if script:
        steps += [
            "python train.py",
            "lockstep launch --nproc-per-node 2 train.py",
            "lockstep verify train.py",
        ]
    else:
        sample = 'lockstep sample runs/train --prompt "The "'
        steps += ["lockstep train train.yaml", "lockstep verify train.yaml", sample]
    return _write(folder, files, [*steps, "lockstep report runs/train"])


def finetuning(folder: Path, *, model: Path, data: Path | None) -> str:
    """Write a config that trains a chat model on conversations; return what to do next.

    Rows of two answers, of which one was preferred, are trained by a loss over pairs. The model
    gets adapters if the package peft is installed.

    Raises UsageError: the model's folder is not a chat model's, or the data are not conversations.
    """
    positions = _positions_of(model)
    if data is None or not data.exists():
        what = "no conversations are given" if data is None else f"there is no file {data}"
        fix = "name a file with a conversation on each line: --data chat.jsonl"
        raise UsageError(what, where="--data", fix=fix)
    keys = _keys_of_conversations(data)
    has_pairs = "chosen_field" in keys
    longest = min(positions, 1024)
    _require_free(folder, data, model)
    with_adapters = find_spec("peft") is not None
    lora = "\n  lora: {r: 16, lora_alpha: 32, target_modules: all-linear}"
    rates = ("1.0e-5", "1.0e-6") if has_pairs else ("2.0e-4", "2.0e-5")
    filled = _filled(
        "preferences.yaml" if has_pairs else "finetune.yaml",
        MODEL=os.path.relpath(model, folder),
        DATA=os.path.relpath(data, folder),
        FIELDS=as_keys(keys),
        LENGTH=str(2 * longest if has_pairs else longest),
        LORA=lora if with_adapters else "",
        RATE=rates[0] if with_adapters else rates[1],
    )
    steps = [] if folder.resolve() == Path.cwd() else [f"cd {folder}"]
    steps += ["lockstep data show train.yaml", "lockstep train train.yaml"]
    return _write(folder, {"train.yaml": filled}, [*steps, "lockstep report runs/train"])


def _positions_of(model: Path) -> int:
    """Return how many positions the model of a folder has; refuse one that can't chat."""
    fix = "name the folder of a chat model in Hugging Face's layout"
    absent = [name for name in ("config.json", "tokenizer.json") if not (model / name).is_file()]
    if absent:
        what = f"{model} is not a chat model: it has no {' and no '.join(absent)}"
        raise UsageError(what, where="--finetune", fix=fix)
    described: dict[str, Any] = {}
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        if (model / "tokenizer_config.json").is_file():
            described = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        positions = int(config.get("max_position_embeddings") or 1024)
        if positions < 2:
            raise ValueError(f"max_position_embeddings is {positions}")
    except (OSError, ValueError, AttributeError, TypeError, ArithmeticError, RecursionError) as e:
        what = f"the config of {model} can't be read"
        raise UsageError(what, where="--finetune", why=first_line(e), fix=fix) from None
    if not (model / "chat_template.jinja").is_file() and "chat_template" not in described:
        what = f"the tokenizer in {model} has no chat template"
        raise UsageError(what, where="--finetune", fix=fix)
    return positions


def _keys_of_conversations(data: Path) -> dict[str, Any]:
    """Return the keys of a source that name fields of its rows, by the first one; or refuse it."""
    if data.is_dir():
        data = files_of(data, "--data")[0]
    kind = kind_of(data)
    require_read(data, "--data")
    if kind in (Kind.TEXT, Kind.TOKENS):
        what = f"{data} holds {kind.value}, and no conversations"
        fix = 'write {"messages": [{"role": "user", "content": "…"}, …]} on each line'
        raise UsageError(what, where="--data", fix=f"{fix} of a file chat.jsonl")
    row = _first_line(data) if kind is Kind.LINES else dict(first_row(data))
    if not row and kind is not Kind.LINES:
        return {"messages_field": "messages"}  # it can't be read: the run says why
    keys = preference_keys(row) or conversation_keys(row)
    if not keys:
        what = f"the first {'line' if kind is Kind.LINES else 'row'} of {data} has no conversation"
        fix = (
            'write {"messages": [{"role": "user", "content": "…"}, …]} on each line, or'
            ' {"prompt": "…", "completion": "…"}, or'
            ' {"prompt": "…", "chosen": "…", "rejected": "…"}'
        )
        raise UsageError(what, where="--data", why=f"it has {listed(list(row))}", fix=fix)
    return keys


def _first_line(data: Path) -> dict[str, Any]:
    """Return the object on the first line that is not blank; a UsageError if there is none."""
    try:
        with opened_lines(data) as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            number, line = next(lines, (1, b"{}"))
    except DAMAGED as error:
        raise UsageError(f"{data} can't be read", where="--data", why=str(error)) from None
    return row_of_line(data, number, line, "messages")


def model(name: str) -> str:
    """Write NAME.py, NAME.yaml and test_NAME.py into this folder; return what to do next.

    Raises UsageError: the name is not a name of a module, or a file exists.
    """
    name = name.removesuffix(".py").replace("-", "_")
    class_name = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    if not name.isidentifier() or keyword.iskeyword(name) or not class_name:
        raise UsageError(
            f"{name} is not a name for a Python module", fix="letters, digits and _, as in my_model"
        )
    made = {
        f"{name}.py": "model.py",
        f"{name}.yaml": "model.yaml",
        f"test_{name}.py": "test_model.py",
    }
    present = [file for file in made if Path(file).exists()]
    if present:
        raise UsageError(
            f"{listed(present)} is here already", fix="choose another name, or move the file away"
        )
    files = {
        file: _filled(template, NAME=name, CLASS=class_name) for file, template in made.items()
    }
    return _write(Path("."), files, [f"lockstep train {name}.yaml", f"pytest test_{name}.py"])


def _require_free(folder: Path, *own: Path | None) -> None:
    """Refuse a folder that has files other than hidden ones and what is used."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", fix="name a new folder: lockstep init DIR")
    inside = sorted(folder.iterdir()) if folder.exists() else []
    used = [path.resolve() for path in own if path is not None]
    present = [
        path.name for path in inside if not path.name.startswith(".") and path.resolve() not in used
    ]
    if present:
        fix = "name a new folder: lockstep init DIR"
        why = (
            "a starter project is written into an empty folder, so that nothing of yours is"
            " overwritten"
        )
        raise UsageError(
            f"{folder.resolve()} has files already: {listed(present)}", why=why, fix=fix
        )


def _filled(template: str, **values: str) -> str:
    text = (resources.files("lockstep.cli") / "templates" / f"{template}.tmpl").read_text(
        encoding="utf-8"
    )
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _write(folder: Path, files: Mapping[str, str], steps: list[str]) -> str:
    """Write the files; return their names and the steps to take next."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        create_file(folder / name, text)
    written = ", ".join(str(folder / name) for name in files)
    return "\n".join([f"lockstep: wrote {written}; next:", *(f"  {step}" for step in steps)])


def _documentation() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        text = "this Python comes without its documentation, the text that a project begins with"
        raise UsageError(text, fix="name a text of yours: lockstep init DIR --data FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _points() -> str:
    """Return a table of points in a square, and whether each lies in a circle."""
    draw = random.Random(0)
    points = [(draw.uniform(-1, 1), draw.uniform(-1, 1)) for _ in range(600)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("x", "y", "class"))
    writer.writerows(
        (f"{x:.4f}", f"{y:.4f}", "inside" if x * x + y * y < 0.6 else "outside") for x, y in points
    )
    return text.getvalue()


SHELLS = ("bash", "zsh")

_BASH = (
    "# lockstep: completion for bash; put this line into ~/.bashrc: "
    r"""source <(lockstep completion bash)
declare -A _lockstep_help
_lockstep() {
  local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} found
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "VERBS --help --version" -- "$word"))
    return
  fi
  [ -n "${_lockstep_help[$verb]}" ] || _lockstep_help[$verb]=$(lockstep "$verb" --help 2>/dev/null)
  if [[ $word == -* ]]; then
    found=$(grep -oE -- '--[a-z][a-z-]+' <<<"${_lockstep_help[$verb]}" | sort -u)
  elif [ "$COMP_CWORD" -eq 2 ]; then
    found=$(grep -oE '^  [a-z]+(\|[a-z]+)+' <<<"${_lockstep_help[$verb]}" | head -1 | tr '|' ' ')
  fi
  COMPREPLY=($(compgen -W "$found" -- "$word"))
  if [ "${#COMPREPLY[@]}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _lockstep lockstep
"""
)
_ZSH = (
    "# lockstep: completion for zsh; put this line into ~/.zshrc: "
    """source <(lockstep completion zsh)
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""
)


def completion_script(shell: str, verbs: Iterable[str]) -> str:
    """Return the script that completes commands in a shell.

    It reads the options from `lockstep VERB --help` once per shell, so they are never out of date.

    Raises UsageError: the shell is not supported.
    """
    if shell not in SHELLS:
        raise UsageError(
            f"there is no completion for {shell!r}", fix=f"lockstep completion {'|'.join(SHELLS)}"
        )
    bash = _BASH.replace("VERBS", " ".join(verbs))
    return bash if shell == "bash" else _ZSH + bash.split("\n", 1)[1]
