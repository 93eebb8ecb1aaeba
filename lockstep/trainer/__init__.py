"""Trains models: `Trainer` for Python, `run` for a config, on each rank of `lockstep train`."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.checkpoint.storage import check_storage
from lockstep.config import Config
from lockstep.config.keys import Mistake, usage_error
from lockstep.config.schema_training import ModelConfig
from lockstep.data import Data, build_data, check_data
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, NoEffectWarning, UsageError
from lockstep.machine import signals
from lockstep.machine.environment import rank_facts
from lockstep.machine.output import say
from lockstep.models import build_model, check_model
from lockstep.models.preferences import check_arguments
from lockstep.monitor.callbacks import check_callback
from lockstep.monitor.sinks import sink_named
from lockstep.optim import Schedule, check_optimizer, check_schedule
from lockstep.process_group import cluster
from lockstep.randomness import derive_key, seeded
from lockstep.registry import LOSSES, load_object
from lockstep.trainer.named_loss import check_named_loss
from lockstep.trainer.trainer import Trainer

__all__ = ["Trainer", "run"]


def run(config: Config, *, output_dir: str | Path, resume: str) -> int:
    """Train a config; return the exit code: 0, or 75 if the run was asked to stop and has saved."""
    if config.model.name is None or config.data.name is None:
        missing = "model.name" if config.model.name is None else "data.name"
        raise UsageError(f"the config does not say {missing}", fix=f"set {missing}")
    cluster.setup(config.distributed)
    data = build_data(config.data, seed=config.training.seed)
    if rank_facts().is_main:
        say(*data.notices)
    with plain_warnings():
        trainer = _OfConfig(build(config, data), config=config, output_dir=output_dir)
        stop_on_signals(trainer)
        trainer.go_on_from(resume)
        trainer.train(data.train, data.validation)
    cluster.cleanup()
    return EXIT_PREEMPTED if trainer.step.stopping else EXIT_DONE


class _OfConfig(Trainer):
    """The trainer of `lockstep train`, whose data a config names."""

    advice_on_validation: ClassVar[str] = (
        "let data.name make a pair (training, validation), or leave the key out"
    )


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings about settings without effect as lines of the run.

    No line of the user's code has led to these warnings.
    """
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, NoEffectWarning):
                say(*str(message).splitlines(), prefix="lockstep: warning: ")
            else:
                show(message, category, *where, **more)

        warnings.showwarning = shown
        yield


def build(config: Config, data: Data) -> nn.Module:
    """Build the model, on meta if its values can be created by name later.

    Else whole, the same on every rank.
    """
    key = derive_key(config.training.seed, "model")
    # A model of Hugging Face chooses its device itself, and then all of it is there.
    at_once = (config.model.name or "").startswith("hf:")
    with seeded(key), torch.device("meta"):
        try:
            model = build_model(config.model, data.facts)
        except NotImplementedError:  # it computes with values while it is built
            model = None
    if model is not None and (at_once or hasattr(model, "init_weights")):
        return model
    with seeded(key):
        return build_model(config.model, data.facts)


def stop_on_signals(trainer: Trainer) -> None:
    """Stop on SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: the ranks agree on the step, save there and end.

    A second Ctrl-C comes from a person who does not want to wait.
    """
    interrupted = False

    def ask(number: int) -> None:
        """Ask all ranks to stop; end this one at once at a second Ctrl-C."""
        nonlocal interrupted
        trainer.step.ask_to_stop()
        if number != signal.SIGINT:
            return
        if interrupted:
            for child in multiprocessing.active_children():
                child.kill()
            signals.end_now(EXIT_FAILED, "interrupted twice: ended without saving")
        interrupted = True
        os.write(
            2,
            b"lockstep: interrupted: saves and stops; a second Ctrl-C ends it at once, without"
            b" saving\n",
        )

    signals.listen(ask)


def check_named(config: Config, source: str) -> None:
    """Reject names in a config that a run could not import, or not call with these arguments.

    All in one error.
    """
    mistakes = []
    for look in _lookups(config):
        try:
            look()
        except UsageError as error:
            what = error.what + (f" ({error.why})" if error.why else "")
            mistakes.append(Mistake(error.where or source, what, error.fix))
    if mistakes:
        raise usage_error(mistakes, source)


def _check_dpo(config: Config) -> None:
    """Refuse arguments that the loss dpo can't follow; nothing is built."""
    loss = config.loss_fn
    if loss is None or loss.name != LOSSES.shipped["dpo"]:
        return
    check_named_loss(loss)
    check_arguments(**loss.args)
    reference = loss.args.get("reference")
    if reference is not None:
        try:
            check_model(ModelConfig(name=reference))
        except UsageError as error:
            where = "loss_fn.args.reference"
            raise UsageError(error.what, where=where, why=error.why, fix=error.fix) from None


def _lookups(config: Config) -> Iterator[Callable[[], object]]:
    """Yield a call for each name in the config, which raises a UsageError if a run can't use it."""
    training = config.training
    yield partial(check_model, config.model)
    yield partial(check_data, config.data)
    if config.loss_fn is not None:
        yield partial(check_named_loss, config.loss_fn)
    yield partial(_check_dpo, config)
    yield partial(check_optimizer, training.optimizer, training.optimizer_args)
    yield partial(
        check_schedule,
        Schedule(training.lr_schedule, training.max_steps or 0, training.warmup_steps),
    )
    for name in config.monitor.sinks:
        yield partial(sink_named, name)
    if config.checkpoint.storage is not None:
        yield partial(check_storage, config.checkpoint.storage)
    for number, spec in enumerate(config.monitor.callbacks):
        yield partial(check_callback, spec, f"monitor.callbacks[{number}]")
    policy = config.distributed.fsdp.auto_wrap_policy
    if isinstance(policy, str) and ":" in policy:
        yield partial(load_object, policy, "distributed.fsdp.auto_wrap_policy")
