"""Evaluates weights on data, on this rank together with the others: the loss, metrics, texts.

The pass over the data is the trainer's own, so its numbers are those that a run records.

Tests: tests/evaluate/test_evaluate.py
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.config import Config, TrainingConfig
from lockstep.data import Data, build_data
from lockstep.errors import NoEffectWarning, UsageError, listed
from lockstep.evaluate.label_metrics import metrics_of_labels
from lockstep.evaluate.sample import continue_text, in_memory
from lockstep.evaluate.subject import EvaluationSubject
from lockstep.models.loss_modules import PREFIX
from lockstep.process_group import cluster
from lockstep.registry import load_object
from lockstep.run_directory.records import RunDirectory
from lockstep.trainer import Trainer, build
from lockstep.trainer.checkpointer import evaluations
from lockstep.trainer.evaluator import evaluated
from lockstep.trainer.metrics import Metric
from lockstep.trainer.saved_state import load_weights

# Texts that two tokenizers encode alike only if they are the same, as far as numbers show.
_PROBE = "The quick brown fox, 1234567890 times: über naïve 東京 {}[]()\n\t"


@dataclass(frozen=True)
class Prompts:
    """The texts to continue, and how."""

    texts: Sequence[str] = ()
    num_tokens: int = 60
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class MeanLoss:
    """The loss over some data."""

    loss: float
    samples: int | None  # None: the data do not say how many they have
    perplexity: float | None = None  # of a language model


@dataclass(frozen=True)
class Evaluation:
    """All results, the same on every rank."""

    name: str
    step: int | None
    topology: str
    data: str
    all: MeanLoss
    recorded: float | None = None  # what the run recorded of the same data at that step
    metrics: Mapping[str, Any] = field(default_factory=dict)
    by_source: Mapping[str, MeanLoss] = field(default_factory=dict)
    texts: Sequence[str] = ()
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of a harness


@dataclass(frozen=True)
class Opened:
    """Weights that are placed on the ranks, with the data of their own config."""

    subject: EvaluationSubject
    config: Config  # with a strategy for these ranks
    data: Data
    trainer: Trainer  # it evaluates, and trains nothing
    path: checkpoint.CheckpointPath | None  # of the weights, if they are of a checkpoint

    @property
    def block_size(self) -> int:
        """The tokens that the model sees at once."""
        return int(self.data.facts.get("block_size", 512))


def opened(subject: EvaluationSubject, config: Config) -> Opened:
    """Place what is evaluated on the ranks, all of which call this together.

    A UsageError is raised if the weights, the data and the model do not fit each other.
    """
    path = _checkpoint(subject)
    data = build_data(config.data, seed=config.training.seed)
    cluster.setup(config.distributed)
    return Opened(subject, config, data, _placed(subject, config, data, path), path)


def evaluate(
    found: Opened, *, metrics: Sequence[str] = (), prompts: Prompts | None = None
) -> Evaluation:
    """Evaluate on all ranks together, each of which calls this with the same arguments.

    Args:
        found: the weights.
        metrics: names of functions or classes, as `Trainer.evaluate` takes them:
            `package.module:Name`.
        prompts: texts for a language model to continue.

    Raises:
        UsageError: the data are none that the model takes.
    """
    prompts = prompts or Prompts()
    chosen = {name.rpartition(":")[2]: _metric(name) for name in metrics}
    measured_on, source = _data(found)
    if prompts.texts:
        require_text(found, "--prompt")

    state = found.trainer.state
    learned = found.data.facts.get("labels")
    if learned is not None:
        chosen = {**metrics_of_labels(learned), **chosen}
    of_pairs = getattr(state.step.placed.objective.module, "accuracy", None)
    if of_pairs is not None and "pairs" in found.data.facts:
        chosen = {"accuracy": of_pairs, **chosen}
    results = evaluated(state, measured_on, chosen or None)
    # a loss over labels, or over pairs of answers, is not one of tokens
    is_text = found.data.decode is not None and not {"labels", "pairs"} & found.data.facts.keys()
    by_source = {}
    parts = measured_on.by_source() if hasattr(measured_on, "by_source") else {}
    for name, part in parts.items():
        loss = evaluated(state, part)["loss"]
        by_source[name] = _measured(loss, part, found.config.training, is_text=is_text)

    step = None if found.path is None else checkpoint.read_manifest(found.path).step
    texts: Sequence[str] = ()
    if prompts.texts:
        weights = found.trainer.state_dict()
        failure = "the texts could not be continued"
        texts = checkpoint.Ranks().broadcast(
            failure, lambda: _continued(found.config, found.data, weights, prompts)
        )
    return Evaluation(
        found.subject.name,
        step,
        str(state.layout),
        source,
        _measured(results.pop("loss"), measured_on, found.config.training, is_text=is_text),
        _recorded(found.subject, found.path, step),
        results,
        by_source,
        texts,
    )


def _measured(loss: float, data: Any, training: TrainingConfig, *, is_text: bool) -> MeanLoss:
    samples = len(data) if hasattr(data, "__len__") else None
    if samples is not None and training.eval_batches is not None:
        size = training.eval_batch_size or training.batch_size
        samples = min(samples, training.eval_batches * size)
    return MeanLoss(loss, samples, _perplexity(loss) if is_text else None)


def _perplexity(loss: float) -> float:
    """Return e to the power of the loss; a loss too large for that is infinitely perplexed."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _metric(name: str) -> Metric:
    """Return the metric that a name is of; an object of a class."""
    found: Any = load_object(name, "--metrics")
    if not callable(found) and not hasattr(found, "update"):
        fix = "name a function (outputs, targets) -> values, or a class with update and compute"
        raise UsageError(f"{name} is neither called nor updated", where="--metrics", fix=fix)
    made: Metric = found() if isinstance(found, type) else found
    return made


def _data(found: Opened) -> tuple[Any, str]:
    """Return the data to evaluate on, and how to call them."""
    subject = found.subject
    own = found.data
    if subject.data is None:
        if own.validation is None:
            what = f"the data of {subject.name} have no validation part"
            fix = "name others: --data PATH; or hold some out: data.args.validation_fraction=0.1"
            raise UsageError(what, where="data.name", fix=fix)
        return own.validation, "its validation data"
    data = build_data(subject.data.data, seed=found.config.training.seed)
    if not _encode_alike(own, data):
        what = "the data are cut into other tokens than those of the model"
        fix = "name the model's tokenizer: data.args.tokenizer=FOLDER/tokenizer.json"
        raise UsageError(what, where="--data", fix=fix)
    source = str(data.facts.get("source", subject.data.data.name))
    if subject.takes_all:
        return data.train, source
    if data.validation is None:
        what = "the data of that config have no validation part"
        raise UsageError(what, where="--data", fix="set data.args.validation_fraction there")
    return data.validation, f"the validation data of {source}"


def _encode_alike(one: Data, other: Data) -> bool:
    """Return whether two data cut a text into the same tokens; data without texts agree."""
    if one.encode is None or other.encode is None:
        return True
    return one.encode(_PROBE) == other.encode(_PROBE)


def require_text(found: Opened, where: str) -> None:
    """Raise a UsageError for data whose samples are not tokens of a text."""
    if found.data.encode is None or found.data.decode is None:
        what = f"the data {found.config.data.name} are not text"
        fix = "leave it out: only models of texts continue one"
        raise UsageError(what, where=where, fix=fix)


def _checkpoint(subject: EvaluationSubject) -> checkpoint.CheckpointPath | None:
    """Return the checkpoint with the weights; None: they are elsewhere."""
    if subject.checkpoint is not None:
        return subject.checkpoint
    if subject.run is None:
        return None
    storage = subject.config.checkpoint.storage
    folder: checkpoint.Directory = subject.run.checkpoints
    if storage is not None:
        folder = checkpoint.build_storage(storage)
    if subject.step is None:
        found = checkpoint.newest(folder)
        if found is None:
            fix = "train it first; a run saves every checkpoint.save_steps and at its end"
            raise UsageError(f"there is no checkpoint in {folder}", fix=fix)
        return found
    by_step = {checkpoint.step_of(path.name): path for path in checkpoint.list_checkpoints(folder)}
    if subject.step not in by_step:
        kept = listed([str(step) for step in by_step]) or "none"
        what = f"{subject.name} keeps no checkpoint of step {subject.step}"
        raise UsageError(what, where="--step", fix=f"choose among those that it has: {kept}")
    return by_step[subject.step]


def _placed(
    subject: EvaluationSubject, config: Config, data: Data, path: checkpoint.CheckpointPath | None
) -> Trainer:
    """Return a trainer that has the weights, and trains nothing."""
    with warnings.catch_warnings():
        if path is not None or subject.weights is not None:
            # What the model's folder lacks is in these weights.
            warnings.filterwarnings("ignore", "the weights in .* drawn at random")
        model = build(config, data)
    if subject.weights is not None:
        model = in_memory(model)
        _fill(model, subject.weights)
    with warnings.catch_warnings():
        # Of settings for training, few have an effect here.
        warnings.simplefilter("ignore", NoEffectWarning)
        trainer = Trainer(model, config=config)
    if path is not None:
        load_weights(trainer.state, path)
    return trainer


def _fill(model: nn.Module, file: Path) -> None:
    """Give a model the weights in a file, or raise a UsageError if they are another model's."""
    weights, ties = checkpoint.read_weights(file)
    weights |= {alias: weights[name] for alias, name in ties.items() if name in weights}
    try:
        left = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # sizes that differ
        why = str(error).splitlines()[-1].strip()
        fix = "name the config that trained them: --config run.yaml"
        what = f"{file} has another model's weights"
        raise UsageError(what, where="RUN", why=why, fix=fix) from None
    named = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(named[name]) for name in weights if name in named}
    missing = [name for name in left.missing_keys if id(named.get(name)) not in filled]
    strange = missing or left.unexpected_keys
    if strange:
        what = (
            f"{file} lacks {listed(strange)}" if missing else f"the model has no {listed(strange)}"
        )
        fix = "name the config that trained them; names with a prefix: `lockstep checkpoint import`"
        raise UsageError(what, where="--config", fix=fix)


def _recorded(
    subject: EvaluationSubject, path: checkpoint.CheckpointPath | None, step: int | None
) -> float | None:
    """Return the loss that the run recorded of its validation data at a step, if it did."""
    run = subject.run
    if run is None and isinstance(path, Path):
        run = RunDirectory(path.absolute().parent.parent)
    if run is None or step is None or subject.data is not None:
        return None
    recorded = evaluations(run, "eval_loss")
    return recorded.get(step)


def _continued(
    config: Config, data: Data, weights: Mapping[str, Tensor], prompts: Prompts
) -> list[str]:
    """Return each prompt with what the model adds to it; rank 0 computes it, on the CPU."""
    model = in_memory(build(config, data))
    of_model = {name: value for name, value in weights.items() if not name.startswith(PREFIX)}
    model.load_state_dict(of_model)
    return [
        continue_text(
            model.eval(),
            data,
            prompt,
            num_tokens=prompts.num_tokens,
            temperature=prompts.temperature,
            seed=prompts.seed,
        )
        for prompt in prompts.texts
    ]
