"""Refuse configs that contradict themselves.

Some settings can't be followed by a strategy, or by a number of ranks. Each check yields its
contradictions: the keys, what is wrong, and what to write. They are looked for when a config is
loaded, and again when the layout is known (`step_contradictions` with a layout).
"""

import sys
from collections.abc import Iterable, Iterator

from lockstep.config.schema import Config, StepConfig
from lockstep.config.schema_distributed import OPEN_BLOCKS
from lockstep.config.schema_training import TrainingConfig
from lockstep.errors import Contradiction, UsageError, refuse
from lockstep.files.paths import is_bucket_url, url_as_path
from lockstep.layout import SAME_BATCH, SPREADS, Layout
from lockstep.registry import AXES, BY_SIZE, STRATEGIES
from lockstep.strategy import AUTO, Strategy, strategy_named

# Optimizers of torch that fail on parameters of which each rank holds a part, and why.
NEED_WHOLE_PARAMETERS = {
    "torch.optim:Rprop": "it writes into a parameter by a mask, which torch can't do on a part",
    "torch.optim:Adafactor": "its norms are those of whole parameters",
}
ON_PARTS = (
    "take AdamW, or another optimizer that updates each element on its own; or strategy: ddp,"
    " where each rank holds whole parameters"
)


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
    yield from _model(config)
    yield from _sizes(config)
    yield from _data_and_checkpoint(config)
    yield from step_contradictions(config.step, layout, device_type)


def step_contradictions(
    config: StepConfig, layout: Layout | None = None, device_type: str | None = None
) -> Iterator[Contradiction]:
    """Yield the contradictions in the step: general ones, and those of the config's strategy."""
    for part in (_optimizer, _numbers, _reproducible, _accelerate):
        yield from part(config)
    distributed = config.distributed
    if distributed.backend in ("nccl", "xccl") and distributed.device == "cpu":
        what = f"{distributed.backend} is for GPUs, and the device is the CPU"
        yield Contradiction(
            ("distributed.backend", "distributed.device"), what, "write backend: gloo"
        )
    device_type = device_type or distributed.device
    if distributed.fsdp.cpu_offload and device_type == "cpu":
        what = "cpu_offload: the device is the CPU, where there is nothing to offload"
        yield Contradiction(
            ("distributed.fsdp.cpu_offload", "distributed.device"), what, "write cpu_offload: false"
        )
    name = distributed.strategy if layout is None else layout.strategy
    yield from _context(config, layout)
    for axis in BY_SIZE:
        if ranks_along(config, layout, axis) > 1:
            yield from AXES.load(axis).contradictions(config, layout)
    yield from _open_axes(config, layout)
    yield from _batch_norm(config, layout)
    yield from _buffers(config, layout)
    if device_type == "mps":
        yield from _mps(config, name)
    if name != AUTO:
        yield from _of_strategy(strategy_named(name), config, layout)


def launch_contradictions(
    config: Config,
    *,
    max_restarts: int,
    builds_again: bool,
    device_type: str,
) -> Iterator[Contradiction]:
    """Yield what can't be combined with the way in which the ranks are started.

    Args:
        max_restarts: how often all ranks are started again.
        builds_again: whether a rank builds its run again by itself, as those of `lockstep train`.
        device_type: the type of the ranks' devices.
    """
    if config.distributed.on_failure == "continue":
        yield from _continue(config, builds_again, device_type)
    if config.distributed.on_failure == "stop" and max_restarts:
        what = (
            f"on_failure: stop ends the run when a rank dies, and --max-restarts {max_restarts}"
            " starts the ranks again"
        )
        fix = "leave --max-restarts out, or write on_failure: restart"
        yield Contradiction(("distributed.on_failure", "--max-restarts"), what, fix)


def _goes_on(name: str) -> bool:
    """Return whether a run of this strategy stays the same training on fewer ranks."""
    if name == AUTO:
        return False
    strategy = strategy_named(name)
    return strategy.same_training and strategy.equal_bits and not strategy.one_process


def _continue(config: Config, builds_again: bool, device_type: str) -> Iterator[Contradiction]:
    """Yield what keeps ranks from going on when others have died."""
    key = "distributed.on_failure"
    restart = "write on_failure: restart, and start with --max-restarts N"
    strategy = config.distributed.strategy
    if not builds_again:
        what = "on_failure: continue is for ranks that build their run again by themselves"
        fix = f"run the config by `lockstep train`, or {restart}"
        yield Contradiction((key,), what, fix, "here a script builds it, or another launcher runs")
    elif sys.platform != "linux":
        what = "on_failure: continue is for Linux"
        why = "the connections to a dead rank are found in /proc"
        yield Contradiction((key,), what, restart, why)
    elif device_type != "cpu" or config.distributed.backend not in ("auto", "gloo"):
        what = "on_failure: continue is for gloo, on CPUs"
        why = "a wait in another backend's collective can't be ended from outside"
        yield Contradiction((key, "distributed.device"), what, restart, why)
    elif not _goes_on(strategy):
        what = f"on_failure: continue is not for strategy {strategy}"
        fix = f"write strategy: {' or '.join(filter(_goes_on, STRATEGIES.shipped))}; or {restart}"
        yield Contradiction((key, "distributed.strategy"), what, fix)
    elif config.training.global_batch_size is None:
        what = "on_failure: continue needs training.global_batch_size"
        why = "else a step would have fewer samples on fewer ranks: another training"
        fix = "write the number of samples in a step, over all ranks"
        yield Contradiction((key, "training.global_batch_size"), what, fix, why)


def ranks_along(config: StepConfig, layout: Layout | None, axis: str) -> int:
    """Return the number of ranks along an axis; without a layout the one that the config has."""
    return int(
        getattr(config.distributed, f"{axis}_size", None) or 1
        if layout is None
        else getattr(layout, axis, 1)
    )


def _mps(config: StepConfig, strategy: str) -> Iterator[Contradiction]:
    if strategy != AUTO and not strategy_named(strategy).one_process:
        what = f"device: mps has no process groups, which strategy {strategy} needs"
        fix = "write strategy: single, or device: cpu"
        yield Contradiction(("distributed.device", "distributed.strategy"), what, fix)
    if config.distributed.reproducible:
        what = "device: mps has no float64, with which reproducible computes the norm"
        fix = "write reproducible: false, or device: cpu"
        yield Contradiction(("distributed.device", "distributed.reproducible"), what, fix)


def _open_axes(config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
    """Yield what keeps a reproducible run from an axis.

    There is at most one, because one key mends all of it.
    """
    distributed = config.distributed
    context = ranks_along(config, layout, "context")
    tensor = ranks_along(config, layout, "tensor")
    chunks = distributed.chunks_of_sequences
    blocks = distributed.blocks_of_layers
    cuts_twice = tensor > 1 and chunks > 1 and distributed.cuts_sequences_between_layers
    closed = {
        "context_blocks": chunks % context,
        "tensor_blocks": blocks % tensor,
        "sequence_parallel": cuts_twice,
    }
    first = next((key for key, is_closed in closed.items() if is_closed), None)
    if not distributed.reproducible or first is None:
        return
    what = {
        "context_blocks": (
            f"reproducible cuts sequences into {chunks} chunk(s), which {context} ranks can't share"
        ),
        "tensor_blocks": (
            f"{tensor} ranks can't share the {blocks} blocks in which reproducible computes a layer"
        ),
        "sequence_parallel": (
            "sequence_parallel cuts across the chunks in which reproducible computes a sequence"
        ),
    }[first]
    written = [
        key
        for key, is_closed in closed.items()
        if is_closed and getattr(distributed, key) is not None
    ]
    fix = f"leave {' and '.join(written)} out, and " if written else ""
    fix += "write open_axes: [tensor, context]"
    if OPEN_BLOCKS % context or OPEN_BLOCKS % tensor:
        own = {"context_blocks": 2 * context, "tensor_blocks": 2 * tensor}
        fix = "write " + " and ".join(f"{key}: {own[key]}" for key in own if closed[key])
    fix += ", here and in all runs that are to have the same bits, from their start"
    axis = "context" if first == "context_blocks" else "tensor"
    yield Contradiction((f"distributed.{axis}_size", "distributed.open_axes"), what, fix)


def _context(config: StepConfig, _layout: Layout | None) -> Iterator[Contradiction]:
    if config.distributed.reproducible and config.distributed.context_method == "ring":
        what = (
            "ring merges the parts of a softmax in an order that depends on the rank, which"
            " reproducible can't"
        )
        fix = "write context_method: gathered or all_to_all, or reproducible: false"
        yield Contradiction(("distributed.context_method", "distributed.reproducible"), what, fix)


def excluded(
    axis: str, divided: str, settings: Iterable[tuple[str, object, object, str]]
) -> Iterator[Contradiction]:
    """Yield the settings that a cut does not go with: key, value, what it has to be, why."""
    for key, value, off, why in settings:
        if value not in (off, "auto"):
            fix = f"write {key.rpartition('.')[2]}: {str(off).lower()}, or {axis}_size: 1"
            yield Contradiction(
                (f"distributed.{axis}_size", key), f"{key} is {value}, and {divided}: {why}", fix
            )


def _batch_norm(config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
    """Yield what can't be combined with batch normalisation over several micro-batches."""
    samples = config.training.batch_norm_samples
    size = config.training.batch_size
    if samples is None or samples == size:
        return
    where = "training.batch_norm_samples"
    alone = f"or batch_size: {samples}, or leave batch_norm_samples out"
    in_row, rest = divmod(samples, size)
    name = config.distributed.strategy if layout is None else layout.strategy
    ranks = None if layout is None else layout.data_parallel_size
    if rest:
        nearest = ", ".join(map(str, divisors(samples, size)))
        what = f"micro-batches of {size} don't make the {samples} samples of batch_norm_samples"
        fix = f"write a batch_size that divides {samples}: {nearest}"
        yield Contradiction((where, "training.batch_size"), what, fix)
    elif name != AUTO and not strategy_named(name).goes_with("batch_norm"):
        yield Contradiction(
            (where, "distributed.strategy"),
            f"batch normalisation over {samples} samples takes {in_row} ranks that run"
            f" micro-batches of {size} at the same time, which strategy {name} does not offer",
            f"write strategy: ddp or fsdp, {alone}",
        )
    elif ranks is not None and ranks % in_row:
        fitting = f"batch_size: {samples // ranks}, or " if samples % ranks == 0 else ""
        what = (
            f"batch normalisation over {samples} samples takes rows of {in_row} ranks, and there"
            f" are {ranks}"
        )
        fix = f"write {fitting}a number of ranks that is a multiple of {in_row}, {alone}"
        yield Contradiction((where, "training.batch_size"), what, fix)
    for key, value in (
        ("training.compile", config.training.compile),
        ("distributed.reproducible", config.distributed.reproducible),
        *((f"distributed.{axis}_size", ranks_along(config, None, axis) > 1) for axis in SPREADS),
    ):
        if value:
            what = f"batch normalisation over ranks is not offered with {key.rpartition('.')[2]}"
            fix = (
                f"write {key.rpartition('.')[2]}: {'1' if key.endswith('size') else 'false'},"
                f" {alone}"
            )
            yield Contradiction((where, key), what, fix)


def _buffers(config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
    """Yield the axes along which several ranks run one micro-batch.

    Each of these ranks sees only a part of what a buffer is computed from.
    """
    for axis, divided in SPREADS.items():
        if config.distributed.buffers and ranks_along(config, layout, axis) > 1:
            what = (
                f"what forward passes write to buffers can't be combined where {divided} are spread"
                " over ranks"
            )
            fix = f"leave buffers out, or write {axis}_size: 1"
            why = "a rank computes it from its part of a micro-batch"
            yield Contradiction(("distributed.buffers", f"distributed.{axis}_size"), what, fix, why)


def _of_strategy(
    strategy: Strategy, config: StepConfig, layout: Layout | None
) -> Iterator[Contradiction]:
    """Yield the settings that a strategy can't follow, its own checks included."""
    compression = config.distributed.ddp.compression.kind
    dtype = config.precision.param_dtype
    instead = (
        None if compression in ("none", "auto") else strategy.instead_of_compression(compression)
    )
    if instead is not None:
        keys = ("distributed.ddp.compression.kind", "distributed.strategy")
        yield Contradiction(
            keys,
            f"compression ({compression}) is DDP's, and the strategy is {strategy.name}",
            instead,
        )
    if config.distributed.reproducible and not strategy.equal_bits:
        what = f"equal bits are offered for single, ddp, fsdp and pipeline, not for {strategy.name}"
        fix = "write strategy: ddp, or reproducible: false"
        yield Contradiction(("distributed.reproducible", "distributed.strategy"), what, fix)
    for axis in SAME_BATCH:
        ranks = ranks_along(config, layout, axis)
        if ranks > 1 and not strategy.goes_with(axis):
            fix = f"write strategy: {axis}, ddp, fsdp or pipeline, or {axis}_size: 1"
            keys = (f"distributed.{axis}_size", "distributed.strategy")
            yield Contradiction(
                keys,
                f"{SPREADS[axis]} can't be cut over {ranks} ranks under strategy {strategy.name}",
                fix,
            )
    if layout is not None and dtype != "fp32" and not strategy.casts_parameters(layout):
        what = (
            f"precision.param_dtype: {dtype} needs strategy fsdp on two ranks or more, and this is"
            f" {layout}"
        )
        fix = f"write precision.mode: {dtype}, which computes in it under every strategy"
        why = (
            "FSDP keeps fp32 shards and casts parameters as it gathers them; elsewhere nothing is"
            " gathered"
        )
        yield Contradiction(("precision.param_dtype",), what, fix, why)
    optimizer = config.training.optimizer
    if strategy.holds_parts and optimizer in NEED_WHOLE_PARAMETERS:
        keys = ("training.optimizer", "distributed.strategy")
        name = optimizer.rpartition(":")[2]
        what = f"{name} can't update parameters of which each rank holds a part"
        yield Contradiction(keys, what, ON_PARTS, NEED_WHOLE_PARAMETERS[optimizer])
    for kind in strategy.kinds:
        yield from kind.contradictions(config, layout)
    yield from strategy.contradictions(config, layout)


def _optimizer(config: StepConfig) -> Iterator[Contradiction]:
    """Yield arguments of the optimizer that a setting is for: they would win over it unseen."""
    training = config.training
    set_by = {"lr": "learning_rate"}
    if training.weight_decay is not None:
        set_by["weight_decay"] = "weight_decay"
    for argument, setting in set_by.items():
        if argument in training.optimizer_args:
            keys = (f"training.optimizer_args.{argument}", f"training.{setting}")
            value = training.optimizer_args[argument]
            fix = f"leave the argument out, and write training.{setting}: {value}"
            what = f"the optimizer's {argument} is set twice, and the argument would win"
            yield Contradiction(keys, what, fix)


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


def _cuts_layers(config: StepConfig) -> bool:
    """Return whether layers are cut over ranks: by their number, or as all that a strategy does."""
    name = config.distributed.strategy
    topologies = (None if name == AUTO else strategy_named(name).topologies) or {}
    return ranks_along(config, None, "tensor") > 1 or ("tensor",) in topologies.values()


def _model(config: Config) -> Iterator[Contradiction]:
    """Yield keys of the section `model` that are for models of Hugging Face, beside another one."""
    model = config.model
    key = "model.lora" if model.adapter is None else "model.adapter"
    if (model.lora or model.adapter) is not None and _cuts_layers(config.step):
        what = "layers with adapters can't be cut over ranks"
        why = "peft computes a layer and its adapter in one forward pass, whose product is its own"
        fix = "write tensor_size: 1, and strategy: fsdp, which shards them"
        keys = (key, "distributed.tensor_size", "distributed.strategy")
        yield Contradiction(keys, what, fix, why)
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


def _sizes(config: Config) -> Iterator[Contradiction]:
    """Yield contradictions between the sizes and the lengths of a run."""
    training = config.training
    if training.max_steps is not None and training.num_train_epochs is not None:
        yield Contradiction(
            ("training.max_steps", "training.num_train_epochs"),
            f"the run can't end both after {training.max_steps} steps and after"
            f" {training.num_train_epochs} epochs",
            "keep one of the two and write null for the other",
        )
    # In Python the batch size may still come from a DataLoader; `lockstep.data.adopt` then makes
    # this comparison.
    from_loader = config.model.name is None and "batch_size" not in training.model_fields_set
    if training.global_batch_size is not None and not from_loader:
        yield from _global_batch(training, training.global_batch_size)
    if training.lr_scaling != "none" and training.base_batch_size is None:
        yield Contradiction(
            ("training.lr_scaling", "training.base_batch_size"),
            f"lr_scaling: {training.lr_scaling} needs the global batch that learning_rate was"
            " chosen for",
            "write base_batch_size, or lr_scaling: none",
        )


def _global_batch(training: TrainingConfig, global_batch: int) -> Iterator[Contradiction]:
    """Yield what does not divide a step's samples: batch_size, or with it the accumulation."""
    size = training.batch_size
    accumulation = training.accumulation
    if global_batch % size:
        quotient, rest = divmod(global_batch, size)
        below = f"{quotient * size} or " if quotient else ""
        fitting_sizes = ", ".join(map(str, divisors(global_batch, size)))
        yield Contradiction(
            ("training.global_batch_size", "training.batch_size"),
            f"global_batch_size is not a multiple of batch_size: {global_batch} = {quotient} ×"
            f" {size} + {rest}",
            f"write global_batch_size {below}{(quotient + 1) * size}, or a batch_size that divides"
            f" {global_batch}: {fitting_sizes}",
        )
    elif global_batch % (size * accumulation):
        quotient, rest = divmod(global_batch, size * accumulation)
        yield Contradiction(
            ("training.gradient_accumulation_steps", "training.global_batch_size"),
            f"no number of ranks makes batch_size {size} × gradient_accumulation_steps"
            f" {accumulation} × data-parallel size = global_batch_size {global_batch}:"
            f" {global_batch} = {quotient} × {size * accumulation} + {rest}",
            "leave gradient_accumulation_steps out, since it follows from global_batch_size; or, to"
            " keep it, write training.global_batch_size=null",
        )


def require_equation(training: TrainingConfig, ranks: int, batch_size: int | None = None) -> None:
    """Refuse a `gradient_accumulation_steps` that contradicts `global_batch_size`.

    `batch_size` is that of the data, if they decide it. Raises UsageError: with the equation.
    """
    size = batch_size or training.batch_size
    accumulation = training.accumulation
    global_batch = training.global_batch_size
    product = size * accumulation * ranks
    if (
        global_batch is None
        or training.gradient_accumulation_steps is None
        or product == global_batch
    ):
        return
    follows, rest = divmod(global_batch, size * ranks)
    here = f" (here: {follows})" if not rest else ""
    raise UsageError(
        f"batch_size {size} × gradient_accumulation_steps {accumulation} × data-parallel size"
        f" {ranks} = {product}, and global_batch_size is {global_batch}",
        where="training.gradient_accumulation_steps, training.global_batch_size",
        fix=(
            f"leave gradient_accumulation_steps out, since it follows from global_batch_size{here};"
            f" or, to keep it, write training.global_batch_size={product}"
        ),
    )


def divisors(number: int, near: int) -> list[int]:
    """Return up to three divisors of a number, those nearest to `near`, ascending."""
    all_of_them = (d for d in range(1, min(number, 2 * near) + 1) if number % d == 0)
    return sorted(sorted(all_of_them, key=lambda d: abs(d - near))[:3])


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


def _numbers(config: StepConfig) -> Iterator[Contradiction]:
    """Yield contradictions between number formats, loss scaling and compression."""
    precision = config.precision
    scale = config.precision.loss_scale
    compression = config.distributed.ddp.compression
    if precision.mode == "fp16" and precision.param_dtype == "bf16":
        what = "fp16 autocast over bf16 parameters has the range of neither"
        yield Contradiction(
            ("precision.mode", "precision.param_dtype"),
            what,
            "write mode: bf16, or param_dtype: fp32",
        )
    if precision.fp8 != "none" and precision.mode == "fp16":
        what = f"fp8: {precision.fp8} is not offered under fp16"
        why = (
            "what the loss scale lifts into fp16's range, float8 scales again; nothing has compared"
            " the two"
        )
        yield Contradiction(
            ("precision.fp8", "precision.mode"), what, "write mode: bf16, or fp8: none", why
        )
    if not scale.min_scale <= scale.initial_scale <= scale.max_scale:
        keys = tuple(
            f"precision.loss_scale.{name}" for name in ("min_scale", "initial_scale", "max_scale")
        )
        bounds = f"min_scale {scale.min_scale:g} and max_scale {scale.max_scale:g}"
        what = f"initial_scale {scale.initial_scale:g} is not between {bounds}"
        yield Contradiction(keys, what, "write an initial_scale between them")
    feedback = compression.error_feedback or compression.warm_start
    if compression.kind == "powersgd" and feedback and compression.start_step < 2:
        what = (
            "PowerSGD with error feedback or a warm start can't start at step"
            f" {compression.start_step}"
        )
        why = "DDP rebuilds its buckets after the first step"
        yield Contradiction(
            ("distributed.ddp.compression.start_step",), what, "write start_step: 2 or more", why
        )


def _reproducible(config: StepConfig) -> Iterator[Contradiction]:
    """Yield the settings under which the bits would depend on the number of ranks."""
    distributed = config.distributed
    if not distributed.reproducible:
        return
    rounding = (
        ("precision.param_dtype", config.precision.param_dtype, "fp32"),
        ("distributed.ddp.compression.kind", distributed.ddp.compression.kind, "none"),
        ("distributed.fsdp.reduce_dtype", distributed.fsdp.reduce_dtype, "fp32"),
    )
    for key, value, needed in rounding:
        if value != needed:
            what = (
                f"{key}: {value} rounds differently on another number of ranks, so the bits can't"
                " be equal"
            )
            fix = f"write {key}: {needed}, or reproducible: false"
            yield Contradiction(("distributed.reproducible", key), what, fix)
    if config.precision.fp8 != "none":
        what = f"equal bits are not shown for precision.fp8: {config.precision.fp8}"
        fix = "write precision.fp8: none, or reproducible: false"
        yield Contradiction(("distributed.reproducible", "precision.fp8"), what, fix)
    if distributed.ddp.static_graph:
        what = (
            "with a static graph DDP reduces the first micro-batch by itself, not up the tree that"
            " gives equal bits"
        )
        fix = "write static_graph: false, or reproducible: false"
        yield Contradiction(("distributed.reproducible", "distributed.ddp.static_graph"), what, fix)


_REFUSED_ACCELERATE_OPTIONS = {
    "split_batches": "leave it out: training.batch_size is a rank's own",
    "dispatch_batches": "leave it out: each rank reads its own samples, with data.num_workers",
    "even_batches": (
        "leave it out: no sample is repeated to fill a batch; data.drop_last drops the rest"
    ),
    "use_seedable_sampler": "leave it out: the order of samples follows from training.seed",
    "gradient_accumulation_plugin": "write training.gradient_accumulation_steps",
}


def _accelerate(config: StepConfig) -> Iterator[Contradiction]:
    """Yield the options of Accelerate that contradict the config.

    Options that other keys of the config replace are among them.
    """
    accelerate = config.distributed.accelerate
    for name, fix in _REFUSED_ACCELERATE_OPTIONS.items():
        if getattr(accelerate, name) is not None:
            key = f"distributed.accelerate.{name}"
            yield Contradiction(
                (key,), f"{key} is about data or accumulation, which Lockstep's own keys say", fix
            )
    mode = {"no": "fp32", None: config.precision.mode}.get(
        accelerate.mixed_precision, accelerate.mixed_precision
    )
    if mode != config.precision.mode:
        what = (
            f"mixed_precision: {accelerate.mixed_precision} and precision.mode:"
            f" {config.precision.mode} disagree"
        )
        keys = ("distributed.accelerate.mixed_precision", "precision.mode")
        yield Contradiction(keys, what, "leave mixed_precision out")
    if accelerate.cpu and config.distributed.device not in ("auto", "cpu"):
        what = f"accelerate.cpu: true and device: {config.distributed.device} disagree"
        yield Contradiction(
            ("distributed.accelerate.cpu", "distributed.device"), what, "leave accelerate.cpu out"
        )
