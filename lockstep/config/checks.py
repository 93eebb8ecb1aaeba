"""Refuse configs that contradict themselves.

Some settings can't be followed by a strategy, or by a number of ranks. Each check yields its
contradictions: the keys, what is wrong, and what to write. They are looked for when a config is
loaded, and again when the layout is known (`step_contradictions` with a layout).

`contradictions` has them in order, those of the sections `model`, `data` and `checkpoint` are here:

    checks_training.py       the optimizer, sizes, the length of a run
    checks_numbers.py        formats, loss scaling, compression, equal bits
    checks_distributed.py    the strategy, axes, devices, options of Accelerate
    checks_pairs.py          pairs of answers
    checks_launch.py         how ranks are started
"""

from collections.abc import Iterator

from lockstep.config.checks_distributed import (
    accelerate_contradictions,
    adapter_contradictions,
    batch_norm_contradictions,
    buffer_contradictions,
    device_contradictions,
    mps_contradictions,
    open_axes_contradictions,
    packed_contradictions,
    ranks_along,
    ring_contradictions,
    strategy_contradictions,
)
from lockstep.config.checks_numbers import number_contradictions, reproducible_contradictions
from lockstep.config.checks_pairs import pair_contradictions
from lockstep.config.checks_training import optimizer_contradictions, size_contradictions
from lockstep.config.schema import Config, StepConfig
from lockstep.errors import Contradiction, UsageError, refuse
from lockstep.files.paths import is_bucket_url, url_as_path
from lockstep.layout import Layout
from lockstep.registry import AXES, BY_SIZE
from lockstep.strategy import AUTO, strategy_named


def check(config: Config) -> None:
    """Refuse a config that contradicts itself.

    Some checks skip `strategy: auto`: check again once it is resolved.

    Raises UsageError: for the first contradiction.
    """
    refuse(contradictions(config))


def require_runnable(config: Config) -> None:
    """Refuse a config without a model or data, which in Python are given as objects.

    Raises UsageError: with the missing key.
    """
    if config.model.name is None:
        fix = (
            "write bdh, transformer, free_transformer, mixture, vae, hf:NAME or"
            " package.module:Class"
        )
        raise UsageError("the config names no model", where="model.name", fix=fix)
    if config.data.name is None:
        fix = "write python-docs, text, tokens, digits, hf:NAME or package.module:Class"
        raise UsageError("the config names no data", where="data.name", fix=fix)


def contradictions(
    config: Config, layout: Layout | None = None, device_type: str | None = None
) -> Iterator[Contradiction]:
    """Yield all contradictions, between sections and in the step.

    Without a layout those seen on loading.
    """
    yield from _paths(config)
    yield from adapter_contradictions(config)
    yield from _model(config)
    yield from packed_contradictions(config)
    yield from pair_contradictions(config)
    yield from size_contradictions(config)
    yield from _data_and_checkpoint(config)
    yield from step_contradictions(config.step, layout, device_type)


def step_contradictions(
    config: StepConfig, layout: Layout | None = None, device_type: str | None = None
) -> Iterator[Contradiction]:
    """Yield the contradictions in the step: general ones, and those of the config's strategy."""
    yield from optimizer_contradictions(config)
    yield from number_contradictions(config)
    yield from reproducible_contradictions(config)
    yield from accelerate_contradictions(config)
    device_type = device_type or config.distributed.device
    yield from device_contradictions(config, device_type)
    yield from ring_contradictions(config)
    for axis in BY_SIZE:
        if ranks_along(config, layout, axis) > 1:
            yield from AXES.load(axis).contradictions(config, layout)
    yield from open_axes_contradictions(config, layout)
    yield from batch_norm_contradictions(config, layout)
    yield from buffer_contradictions(config, layout)
    strategy = config.distributed.strategy if layout is None else layout.strategy
    if device_type == "mps":
        yield from mps_contradictions(config, strategy)
    if strategy != AUTO:
        yield from strategy_contradictions(strategy_named(strategy), config, layout)


def _paths(config: Config) -> Iterator[Contradiction]:
    """Yield the keys that have a URL where a path belongs.

    What a class of the user's own takes is its own affair.
    """
    paths = {
        "checkpoint.resume": config.checkpoint.resume,
        "checkpoint.local_cache": config.checkpoint.local_cache or "",
        "model.name": (config.model.name or "").removeprefix("hf:"),
    }
    if config.monitor.profile is not None:
        paths["monitor.profile.dir"] = config.monitor.profile.dir or ""
    if ":" not in (config.data.name or ""):
        paths |= {
            f"data.args.{name}": value
            for name, value in config.data.args.items()
            if isinstance(value, str)
        }
    if is_bucket_url(config.checkpoint.resume):
        del paths["checkpoint.resume"]
    for key, path in paths.items():
        contradiction = url_as_path(path, key)
        if contradiction is not None:
            yield contradiction


def _model(config: Config) -> Iterator[Contradiction]:
    """Yield keys of the section `model` that are for models of Hugging Face, beside another one."""
    model = config.model
    if model.lora is not None and model.adapter is not None:
        what = f"model.lora describes new adapters, and {model.adapter} has some"
        why = "its adapter_config.json says their r, target_modules and all else"
        fix = "leave model.lora out"
        yield Contradiction(("model.lora", "model.adapter"), what, fix, why)
    if (model.name or "").startswith("hf:"):
        return
    named = "no model is named" if model.name is None else f"the model is {model.name}"
    instead = {
        "auto": "leave it out",
        "lora": "leave it out, and wrap the model in a class of your own: peft.get_peft_model",
        "adapter": "leave it out, and wrap the model in a class of your own: peft.PeftModel",
    }
    for key, fix in instead.items():
        if getattr(model, key) is not None:
            what = f"model.{key} is for models of Hugging Face, hf:…, and {named}"
            yield Contradiction((f"model.{key}", "model.name"), what, fix)


def _data_and_checkpoint(config: Config) -> Iterator[Contradiction]:
    """Yield contradictions within the sections `data` and `checkpoint`."""
    data = config.data
    checkpoint = config.checkpoint
    if data.num_workers == 0 and data.prefetch_factor is not None:
        fix = "write num_workers: 1 or more, or leave prefetch_factor out"
        yield Contradiction(
            ("data.prefetch_factor", "data.num_workers"), "there are no workers to read ahead", fix
        )
    if data.num_workers == 0 and data.persistent_workers:
        fix = "write num_workers: 1 or more, or persistent_workers: false"
        yield Contradiction(
            ("data.persistent_workers", "data.num_workers"), "there are no workers to keep", fix
        )
    if checkpoint.keep_best is not None and checkpoint.save_strategy == "none":
        what = "no checkpoint is saved, so the best can't be kept"
        fix = "write save_strategy: steps, or leave keep_best out"
        yield Contradiction(("checkpoint.keep_best", "checkpoint.save_strategy"), what, fix)
    if checkpoint.load_best and checkpoint.keep_best is None:
        what = "nothing says which checkpoint is the best"
        fix = "write keep_best: eval_loss, or load_best: false"
        yield Contradiction(("checkpoint.load_best", "checkpoint.keep_best"), what, fix)
