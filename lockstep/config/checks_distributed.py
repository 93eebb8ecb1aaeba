"""Contradictions between what a config says and the strategy, axes and devices that it names.

Tests: tests/config/test_checks.py, tests/test_errors.py
"""

from collections.abc import Iterable, Iterator

from lockstep.config.checks_training import NEED_WHOLE_PARAMETERS, ON_PARTS, divisors
from lockstep.config.schema import Config, StepConfig
from lockstep.config.schema_distributed import OPEN_BLOCKS
from lockstep.errors import Contradiction
from lockstep.layout import SAME_BATCH, SPREADS, Layout
from lockstep.strategy import AUTO, Strategy, strategy_named

# Data sets whose sequences hold several documents.
_PACKED = ("documents", "stream", "preferences")

# The loss over pairs, where a rank, or a chunk where bits count, has a part of each sequence.
DPO_ON_PARTS = Contradiction(
    ("loss_fn", "distributed.context_size", "distributed.open_axes"),
    "the loss dpo compares answers in full, and sequences are cut",
    "write context_size: 1, and open_axes without context; strategy: fsdp shards the model",
    "no rank has all tokens of an answer then",
)


def ranks_along(config: StepConfig, layout: Layout | None, axis: str) -> int:
    """Return the number of ranks along an axis; without a layout the one that the config has."""
    return int(
        getattr(config.distributed, f"{axis}_size", None) or 1
        if layout is None
        else getattr(layout, axis, 1)
    )


def sequences_are_cut(config: StepConfig) -> bool:
    """Return whether the config cuts each sequence over ranks."""
    return ranks_along(config, None, "context") > 1


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


def strategy_contradictions(
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


def buffer_contradictions(config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
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


def batch_norm_contradictions(config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
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


def device_contradictions(config: StepConfig, device_type: str) -> Iterator[Contradiction]:
    """Yield settings of other devices than those on which the ranks run."""
    distributed = config.distributed
    if distributed.backend in ("nccl", "xccl") and distributed.device == "cpu":
        what = f"{distributed.backend} is for GPUs, and the device is the CPU"
        keys = ("distributed.backend", "distributed.device")
        yield Contradiction(keys, what, "write backend: gloo")
    if distributed.fsdp.cpu_offload and device_type == "cpu":
        what = "cpu_offload: the device is the CPU, where there is nothing to offload"
        keys = ("distributed.fsdp.cpu_offload", "distributed.device")
        yield Contradiction(keys, what, "write cpu_offload: false")


def mps_contradictions(config: StepConfig, strategy: str) -> Iterator[Contradiction]:
    """Yield what the GPUs of Apple do not offer."""
    if strategy != AUTO and not strategy_named(strategy).one_process:
        what = f"device: mps has no process groups, which strategy {strategy} needs"
        fix = "write strategy: single, or device: cpu"
        yield Contradiction(("distributed.device", "distributed.strategy"), what, fix)
    if config.distributed.reproducible:
        what = "device: mps has no float64, with which reproducible computes the norm"
        fix = "write reproducible: false, or device: cpu"
        yield Contradiction(("distributed.device", "distributed.reproducible"), what, fix)


_REFUSED_ACCELERATE_OPTIONS = {
    "split_batches": "leave it out: training.batch_size is a rank's own",
    "dispatch_batches": "leave it out: each rank reads its own samples, with data.num_workers",
    "even_batches": (
        "leave it out: no sample is repeated to fill a batch; data.drop_last drops the rest"
    ),
    "use_seedable_sampler": "leave it out: the order of samples follows from training.seed",
    "gradient_accumulation_plugin": "write training.gradient_accumulation_steps",
}


def accelerate_contradictions(config: StepConfig) -> Iterator[Contradiction]:
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


def ring_contradictions(config: StepConfig) -> Iterator[Contradiction]:
    """Yield the method of cutting sequences whose bits depend on the number of ranks."""
    if config.distributed.reproducible and config.distributed.context_method == "ring":
        what = (
            "ring merges the parts of a softmax in an order that depends on the rank, which"
            " reproducible can't"
        )
        fix = "write context_method: gathered or all_to_all, or reproducible: false"
        yield Contradiction(("distributed.context_method", "distributed.reproducible"), what, fix)


def open_axes_contradictions(config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
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


def _cuts_layers(config: StepConfig) -> bool:
    """Return whether layers are cut over ranks: by their number, or as all that a strategy does."""
    name = config.distributed.strategy
    topologies = (None if name == AUTO else strategy_named(name).topologies) or {}
    return ranks_along(config, None, "tensor") > 1 or ("tensor",) in topologies.values()


def adapter_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield adapters in layers that are cut over ranks."""
    model = config.model
    key = "model.lora" if model.adapter is None else "model.adapter"
    if (model.lora or model.adapter) is not None and _cuts_layers(config.step):
        what = "layers with adapters can't be cut over ranks"
        why = "peft computes a layer and its adapter in one forward pass, whose product is its own"
        fix = "write tensor_size: 1, and strategy: fsdp, which shards them"
        keys = (key, "distributed.tensor_size", "distributed.strategy")
        yield Contradiction(keys, what, fix, why)


def packed_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield what a model of Hugging Face can't do with sequences of several documents."""
    ranks = ranks_along(config.step, None, "context")
    is_of_library = (config.model.name or "").startswith("hf:")
    if is_of_library and ranks > 1 and config.data.name in _PACKED:
        what = (
            f"sequences of {config.data.name} hold several documents, and they are cut over"
            f" {ranks} ranks"
        )
        why = "the attention of models of Hugging Face over ranks takes no mask of documents"
        fix = (
            "write context_size: 1; or use the model transformer; or train on sequences of one"
            " document each: data.name: tokens, or text"
        )
        yield Contradiction(("distributed.context_size", "data.name"), what, fix, why)
