"""Finds what `lockstep evaluate` is given: a config, and where the weights are.

    runs/run                             a run directory: its config, its newest whole checkpoint
    runs/run/checkpoints/step-00000100   a checkpoint, which has a config, too
    FOLDER                               of Hugging Face: config.json and *.safetensors
    model.safetensors, model.pt          weights alone, of the model of a config

Loads no torch: what can be told before ranks start is told here.

Tests: tests/evaluate/test_evaluate.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import Config, load_config
from lockstep.config.checks import contradictions
from lockstep.config.loading import config_from
from lockstep.errors import UsageError
from lockstep.files.data_files import check_named_files, pairs_like, source_like
from lockstep.files.paths import local_path
from lockstep.layout import SIZED, SPREADS
from lockstep.registry import DATA_SETS, keywords_of
from lockstep.run_directory.records import RunDirectory
from lockstep.strategy import AUTO, REPLICAS, SINGLE, resolve, strategy_named

_CONFIGS = (".yaml", ".yml")
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_MANIFEST = "manifest.json"
_FIX = "name a run directory, a checkpoint, a file of weights, or a folder of Hugging Face"


@dataclass(frozen=True)
class EvaluationSubject:
    """Names what an evaluation computes on: weights and data."""

    name: str  # as it was typed
    config: Config
    run: RunDirectory | None = None  # a run, of which `step` names a checkpoint
    step: int | None = None  # None: the newest
    checkpoint: Path | None = None
    weights: Path | None = None  # a file; without run, checkpoint and file the model has its own
    # Other data than the run's own, and whether their training part is meant: all of them.
    data: Config | None = None
    takes_all: bool = False


@dataclass(frozen=True)
class Asked:
    """The arguments that say what is evaluated, and on which data."""

    target: Path
    config: Path | None = None
    overrides: Sequence[str] = ()
    data: Path | None = None
    step: int | None = None


def find_subject(asked: Asked) -> EvaluationSubject:
    """Return what the arguments name, or raise a UsageError."""
    target = local_path(asked.target, "RUN")
    if not target.exists():
        raise UsageError(f"there is no file or folder {asked.target}", where="RUN", fix=_FIX)
    name = str(asked.target)
    overrides = [*_WITHOUT_UPDATES, *asked.overrides]
    run = RunDirectory(target)
    if run.config.is_file() and not (target / _MANIFEST).is_file():
        _refuse_config(asked, "a run")
        found = EvaluationSubject(
            name, load_config(run.config, overrides), run=run, step=asked.step
        )
        return _with_data(found, asked)
    if asked.step is not None:
        what = f"--step {asked.step} chooses a checkpoint of a run, and {name} is none"
        raise UsageError(what, where="--step", fix="leave it out, or name the run directory")
    if (target / _MANIFEST).is_file():
        _refuse_config(asked, "a checkpoint")
        config = load_config(target / "config.yaml", overrides)
        return _with_data(EvaluationSubject(name, config, checkpoint=target), asked)
    if target.is_file() and target.suffix in _WEIGHTS:
        if asked.config is None:
            what = f"{name} has weights, and does not say of which model"
            fix = "name the config that trained it: --config run.yaml"
            raise UsageError(what, where="--config", fix=fix)
        config = load_config(asked.config, overrides)
        return _with_data(EvaluationSubject(name, config, weights=target), asked)
    if (target / "config.json").is_file():
        return _with_data(EvaluationSubject(name, _of_hugging_face(target, asked)), asked)
    what = f"{name} is neither a run nor weights"
    why = f"no config.yaml, {_MANIFEST} or config.json is in it"
    if target.is_file():
        why = f"the name of a file of weights ends with {', '.join(_WEIGHTS)}"
    raise UsageError(what, where="RUN", why=why, fix=_FIX)


# An evaluation makes no update: a run's own optimizer may need whole parameters, or a package that
# is not here.
_WITHOUT_UPDATES = ("training.optimizer=sgd", "training.optimizer_args={}")


def _refuse_config(asked: Asked, kind: str) -> None:
    if asked.config is not None:
        what = f"{asked.target} is {kind}, which has a config of its own"
        fix = "leave it out; KEY=VALUE overrides keys of that config"
        raise UsageError(what, where=f"--config {asked.config}", fix=fix)


def _of_hugging_face(folder: Path, asked: Asked) -> Config:
    """Return the config of a folder of Hugging Face: the one that is named, or of documents."""
    if asked.config is not None:
        base = load_config(asked.config, asked.overrides)
        return base.replaced({"model.name": f"hf:{folder}", "model.args": {}})
    if asked.data is None:
        what = f"{asked.target} has no data of its own"
        raise UsageError(what, where="--data", fix="name a text, JSON lines, a folder, or a config")
    source: str | dict[str, Any] = str(asked.data)
    if asked.data.exists() and asked.data.suffix not in _CONFIGS:
        source = source_like(local_path(asked.data, "--data"), [])
    settings = {
        "model.name": f"hf:{folder}",
        "data.name": "documents",
        "data.args.sources": [source],
    }
    if (folder / "tokenizer.json").is_file():
        settings["data.args.tokenizer"] = str(folder)  # with its chat template, if it has one
    return config_from(settings, overrides=asked.overrides)


def _with_data(subject: EvaluationSubject, asked: Asked) -> EvaluationSubject:
    """Return the subject with the data that `--data` names."""
    config = subject.config
    if config.model.name is None or config.data.name is None:
        missing = "model.name" if config.model.name is None else "data.name"
        what = f"the config of {subject.name} does not say {missing}"
        why = "the run was made in Python, which has the model and the data"
        fix = "call Trainer.evaluate there"
        raise UsageError(what, where=missing, why=why, fix=fix)
    if asked.data is None:
        return subject
    path = local_path(asked.data, "--data")
    if not path.exists():
        fix = "name texts, tokens or documents as the run's data set reads them, or a config"
        raise UsageError(f"there is no file or folder {asked.data}", where="--data", fix=fix)
    if path.suffix in _CONFIGS:
        return replace(subject, data=load_config(path))
    return replace(subject, data=_on(config, path), takes_all=True)


def _on(config: Config, path: Path) -> Config:
    """Return the config with a path in the place of its data's, none of which is held out."""
    name = config.data.name
    assert name is not None
    keywords: list[str] = []
    if not name.startswith("hf:"):
        keywords = keywords_of(DATA_SETS.load_callable(name)) or []
    key = next((key for key in ("sources", "path") if key in keywords), None)
    if key is None:
        what = f"the data set {name} takes no path that --data could name"
        fix = "name a config, whose data.name and data.args are used: --data other.yaml"
        raise UsageError(what, where=f"--data {path}", fix=fix)
    args = {key: value for key, value in config.data.args.items() if key != "validation"}
    args[key] = str(path)
    if key == "sources":
        given = config.data.args.get("sources", [])
        trained_on = [given] if isinstance(given, str | Mapping) else given
        like = source_like
        if name == "preferences":
            like = pairs_like
        args[key] = [like(path, trained_on)]
    if "validation_fraction" in keywords:
        args["validation_fraction"] = 0
    if "labels_of" in keywords:  # what is learned follows from the data that were trained on
        given = config.data.args
        paths = [given[key] for key in ("path", "validation") if given.get(key) is not None]
        args.setdefault("labels_of", paths)
    try:
        check_named_files(name, args)
    except UsageError as error:
        fix = f"{error.fix}, in a config, and name it: --data other.yaml"
        raise UsageError(error.what, where=f"--data {path}", why=error.why, fix=fix) from None
    return config.replaced({"data.args": args})


def for_ranks(
    config: Config, overrides: Sequence[str], world_size: int, per_node: int
) -> tuple[Config, str]:
    """Return the config for these ranks, and a line to print where it has another strategy.

    A run keeps its strategy where the ranks allow it; else each rank has the whole model. One that
    an override asks for is not replaced.
    """
    name = config.distributed.strategy
    if any(override.startswith("distributed.strategy=") for override in overrides):
        return config, ""
    if name != AUTO and strategy_named(name).same_training:
        try:
            layout = resolve(config.distributed, world_size, per_node)
            if not any(contradictions(config, layout)):
                return config, ""
        except UsageError:
            pass  # its sizes are those of another number of ranks
    chosen = SINGLE if world_size == 1 else REPLICAS
    sizes = dict.fromkeys(f"distributed.{axis}_size" for axis in (*SIZED, *SPREADS))
    if name == AUTO:
        return config.replaced({**sizes, "distributed.strategy": chosen}), ""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    line = f"evaluates on {ranks} as {chosen} what was trained as {name}: each has the whole model"
    return config.replaced({**sizes, "distributed.strategy": chosen}), line
