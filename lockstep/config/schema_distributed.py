"""Define the section `distributed`: how micro-batches and parameters are distributed over ranks.

Tests: tests/config/test_schema.py, tests/config/test_checks.py
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.config.schema_training import Named, Section, key, section
from lockstep.registry import STRATEGIES
from lockstep.strategy import AUTO

DType = Literal["fp32", "bf16", "fp16"]
Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


class CompressionConfig(Section):
    """Compression of the gradients that DDP sends."""

    kind: Literal["none", "fp16", "bf16", "powersgd", "auto"] = key("none")
    """`fp16`, `bf16`: half the bytes; `powersgd`: low rank; `auto`: the fastest on this link by
    measurement, which is often `none`."""
    rank: int = key(1, "Rank of PowerSGD's approximation.", ge=1)
    start_step: int = key(
        10, "The step from which PowerSGD compresses; at least 2 with error feedback.", ge=0
    )
    warm_start: bool = key(True, "PowerSGD starts each step from the last one's factors.")
    error_feedback: bool = key(True, "PowerSGD adds the compression error to the next gradient.")


class DDPConfig(Section):
    """Options of `strategy: ddp`."""

    bucket_cap_mb: float = key(
        25.0, "Size of the buckets in which gradients are sent, in MiB.", gt=0, le=10**9
    )
    find_unused_parameters: bool = key(
        False, "Search each step for parameters that got no gradient. Costs time."
    )
    static_graph: bool = key(False, "Promise that the graph is the same in every step.")
    gradient_as_bucket_view: bool = key(
        True, "Keep gradients in the buckets, which saves one copy of them."
    )
    compression: CompressionConfig = section(
        CompressionConfig, "Compression of the gradients that are sent."
    )


class FSDPConfig(Section):
    """Options of `strategy: fsdp` (FSDP2), and of the shards within a pipeline."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] = key(
        "full_shard"
    )
    """`full_shard`: parameters, gradients and optimizer state are cut; `shard_grad_op`: parameters
    stay whole between forward and backward; `no_shard`: replicas; `hybrid_shard`: shards within a
    node, replicas across nodes."""
    auto_wrap_policy: str | list[str] = key("transformer")
    """The modules that are gathered as one unit: `transformer`: each block of the model; `size`:
    any module of `min_num_params` or more; a list of class names; or `package.module:name`, a
    function of a module or one of torch's policies."""
    accumulate: Literal["sharded", "unsharded"] = key("sharded")
    """Gradients between micro-batches: `sharded` reduces each (least memory); `unsharded` reduces
    once per step and keeps the whole model's gradients (least traffic)."""
    min_num_params: int = key(1_000_000, "The smallest unit under `size`, in parameters.", ge=1)
    forward_prefetch: bool | None = key(None)
    """Gather the next unit (on CPUs the next two) before this one computes; unset: on CPUs only. On
    GPUs streams run ahead anyway."""
    backward_prefetch: Literal["pre", "post", "none"] = key("pre")
    """Gather the next unit before this one's backward (`pre`), after it (`post`), or when
    needed."""
    cpu_offload: bool = key(False, "Keep shards in host memory, and update them there.")
    reduce_dtype: DType = key("fp32", "Gradients are summed over ranks in this type.")
    buffer_dtype: DType = key("fp32", "Buffers; fp32 keeps rotary phases exact.")


class PipelineConfig(Section):
    """Options of `strategy: pipeline`."""

    split_spec: dict[str, Literal["end", "beginning"]] = Field(default_factory=dict)
    """Where stages are cut: `layers.4: end` leaves layers 0 to 4, five of them, in the first stage.
    Empty: stages of equal cost."""
    stages_per_rank: int = key(1, "Stages that each pipeline rank holds.", ge=1)
    schedule: Schedule = key("1F1B")
    """The order of forwards and backwards. GPipe and 1F1B: one stage per rank; Interleaved1F1B,
    LoopedBFS, InterleavedZeroBubble: several; ZBVZeroBubble and DualPipeV: two."""
    n_microbatches: int | None = key(None, ge=1)
    """Micro-batches that one run of the schedule takes; unset: all micro-batches of the rank in a
    step."""


class DiLoCoConfig(Section):
    """Options of `strategy: diloco`.

    Its workers train alone and exchange parameters every `inner_steps` steps.
    """

    workers: int | None = key(None, ge=1)
    """The number of models that train alone; a multiple of the ranks. Unset: one per rank, and then
    the run depends on the number of ranks."""
    inner_steps: int = key(100, ge=1)
    """Steps between two exchanges of the same parameter; in each, every worker makes an update
    alone."""
    outer_learning_rate: float = key(0.7, gt=0)
    """Learning rate of the outer step, along the mean of the workers' changes."""
    outer_momentum: float = key(0.9, "Momentum of the outer step.", ge=0, lt=1)
    nesterov: bool = key(True, "Nesterov's momentum in the outer step.")
    fragments: int = key(1, ge=1)
    """The number of parts in which parameters are exchanged, spread over `inner_steps` to lower the
    peak traffic."""
    send_as: Literal["fp32", "fp16", "bf16", "int8", "int4"] = key("fp32")
    """Type of the changes on the link; int8 and int4 (half a byte) have a scale for each 256 of
    them."""
    error_feedback: bool = key(
        True, "Add the rounding error of int8 and int4 in a worker's change to its next change."
    )


class AccelerateConfig(Section):
    """Options of `strategy: accelerate`.

    Those about data or accumulation are refused in favour of Lockstep's keys.
    """

    device_placement: bool = key(True, "Let Accelerate place the model on the device.")
    cpu: bool = key(False, "Stay on the CPU; as `distributed.device: cpu`.")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = key(None)
    """As `precision.mode` (`no` is fp32); unset: follows it."""
    split_batches: bool | None = key(None, "Refused: `training.batch_size` is per rank.")
    dispatch_batches: bool | None = key(None, "Refused: each rank reads its own samples.")
    even_batches: bool | None = key(None, "Refused: no sample is repeated to fill a batch.")
    use_seedable_sampler: bool | None = key(
        None, "Refused: the order of samples follows from `training.seed`."
    )
    gradient_accumulation_plugin: dict[str, Any] | None = key(None)
    """Refused: write `training.gradient_accumulation_steps`."""


class HangConfig(Section):
    """Detection of ranks that hang; their stacks are written, and they are started again."""

    factor: float | None = key(20.0, gt=1)
    """A step, save or evaluation hangs if for this many times the median of earlier ones, whole
    ones, nothing in it goes forward; null: never."""
    seconds: float = key(60.0, gt=0)
    """The shortest time without a sign of progress (bytes or files written, samples read,
    micro-batches run) that counts as hanging; for the first call of its kind, `timeout_seconds`. A
    rank or data worker that a signal stopped, and a collective that only some ranks enter, are
    found after this time."""


BufferWay = Literal["mean", "gather", "rank0"]
OpenAxis = Literal["tensor", "context"]
OPEN_BLOCKS = 8  # in which an open axis is computed: as many ranks as a node has can share them


class DistributedConfig(Section):
    """The distribution of micro-batches and parameters over ranks.

    Sizes of the mesh are in ranks.
    """

    strategy: Annotated[str, Named(STRATEGIES, AUTO)] = key(AUTO)
    """`single`: one process; `dp`: one process, several GPUs; `ddp`: replicas; `fsdp`: shards;
    `pipeline`: stages; `accelerate`: through Hugging Face Accelerate; `diloco`: workers that train
    alone and exchange parameters rarely, for slow links; `auto`: chosen and logged at the start
    (never diloco, which changes the training); `package.module:Name`: a
    `lockstep.strategy.Strategy` of your own."""
    device: str = key("auto", pattern=r"^[a-z][a-z0-9_]*$")
    """`cuda` (GPUs of NVIDIA, and of AMD under ROCm), `xpu` (Intel), `mps` (Apple, one process),
    `cpu`, or a name that an installed package registers with torch; `auto`: the accelerator that
    torch finds, except mps, else the CPU."""
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] = key("auto")
    """`auto`: nccl for CUDA, xccl for XPU, gloo for the CPU, for others the one that is registered
    for them. Wheels of torch lack mpi."""
    init_method: str = key("env://", pattern=r"^(env://|tcp://[^/\s]+:\d{1,5})$")
    """Where ranks find each other: `env://` (set by the launcher) or `tcp://HOST:PORT`."""
    timeout_seconds: float = key(
        1800.0, "A collective that takes longer is a failure.", gt=0, le=10**9
    )
    hang: HangConfig = section(HangConfig, "When a step counts as hanging.")
    on_failure: Literal["restart", "continue", "stop"] = key("restart")
    """When a rank dies: `restart` all of them, as often as `--max-restarts` says; `continue` on
    those that are left, in the same processes (`lockstep train`, gloo); or `stop` the run.
    `checkpoint.on_failure` is about a save that fails."""
    debug: Literal["none", "info", "detail"] = key(
        "none", "Set torch's and NCCL's debug switches on every rank."
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for every rank."
    )
    reproducible: bool = key(False)
    """Equal in every bit under single, ddp, fsdp, hybrid shard and pipeline, on any number of
    ranks."""
    buffers: dict[str, BufferWay] = Field(default_factory=dict)
    """How buffers that the forward pass writes combine over a step's micro-batches, on any number
    of ranks: name, or pattern with `*`, → `mean` of all results (averages, observers, codebooks),
    `gather` the rows that each has written, in the order of the samples (queues with a pointer,
    memory banks), or `rank0`, the first micro-batch's result. Each micro-batch starts from the
    buffers that the step began with. Not for batch normalisation, which needs none."""
    divergence_check_steps: int | None = key(100, ge=1)
    """Steps between comparisons of the replicas' parameters; the run stops if they differ. Null:
    never."""
    divergence_action: Literal["stop", "repair"] = key("stop")
    """Where a bit has flipped in one replica and others outvote it: stop, or go on from their
    values."""
    replicate_size: int | None = key(None, ge=1)
    """Ranks along the axis of replicas; unset: follows from the world size."""
    shard_size: int | None = key(
        None, "Ranks over which parameters are cut; unset: follows from the world size.", ge=1
    )
    pipeline_size: int | None = key(
        None, "Ranks along the pipeline; unset: follows from the world size.", ge=1
    )
    context_size: int | None = key(None, ge=1)
    """Ranks over which each sequence is cut (context parallel), and which work on the same
    micro-batches. Unset: 1."""
    context_method: Literal["gathered", "all_to_all", "ring"] = key("gathered")
    """How the parts of a sequence meet in attention: keys and values are `gathered`, or heads are
    exchanged by `all_to_all` (Ulysses; `context_size` divides the numbers of heads), or keys and
    values travel in a `ring` (slower, for the longest sequences; not with `reproducible`)."""
    open_axes: list[OpenAxis] = key(["tensor"])
    """Under `reproducible`, the axes that the run may enter later and keep its bits: write the same
    in all runs that are to end in one digest. Each costs time on any number of ranks: layers, or
    sequences, are computed in 8 blocks."""
    context_blocks: int | None = key(None, ge=1)
    """Under `reproducible`, the chunks in which sequences are computed on any number of ranks;
    `context_size` divides it. Unset: 8 if `open_axes` names context, else 1."""
    tensor_size: int | None = key(None, ge=1)
    """Ranks over which each layer is cut (tensor parallel), and which work on the same
    micro-batches. Unset: 1."""
    expert_size: int | None = key(None, ge=1)
    """Ranks over which the experts of each layer are spread (expert parallel); it divides those
    that share out micro-batches. Unset: 1."""
    sequence_parallel: bool | None = key(None)
    """Between the layers that are cut over `tensor_size` ranks, each rank has a part of every
    sequence, if the model says how; else all of it. Unset: true, but false under `reproducible`
    where `open_axes` names tensor and context."""
    tensor_blocks: int | None = key(None, ge=1)
    """Under `reproducible`, the blocks in which layers that can be cut are computed on any number
    of ranks; `tensor_size` divides it. Unset: 8 if `open_axes` names tensor, else 1."""
    ddp: DDPConfig = section(DDPConfig, "Options of `strategy: ddp`.")
    fsdp: FSDPConfig = section(FSDPConfig, "Options of `strategy: fsdp`.")
    pipeline: PipelineConfig = section(PipelineConfig, "Options of `strategy: pipeline`.")
    accelerate: AccelerateConfig = section(AccelerateConfig, "Options of `strategy: accelerate`.")
    diloco: DiLoCoConfig = section(DiLoCoConfig, "Options of `strategy: diloco`.")

    @model_validator(mode="after")
    def _stay_on_cpu(self) -> "DistributedConfig":
        """Use the CPU if `accelerate.cpu` says so, unless another device is set."""
        if self.accelerate.cpu and self.device == "auto":
            self.device = "cpu"
        return self

    def on_device(self) -> "DistributedConfig":
        """Return these settings without parameters that are offloaded to the CPU."""
        changed = self.model_copy()
        changed.fsdp = self.fsdp.model_copy(update={"cpu_offload": False})
        return changed

    @property
    def chunks_of_sequences(self) -> int:
        """Number of chunks in which `reproducible` computes a sequence."""
        return self.context_blocks or (OPEN_BLOCKS if "context" in self.open_axes else 1)

    @property
    def blocks_of_layers(self) -> int:
        """Number of blocks in which `reproducible` computes a layer that can be cut."""
        return self.tensor_blocks or (OPEN_BLOCKS if "tensor" in self.open_axes else 1)

    @property
    def cuts_sequences_between_layers(self) -> bool:
        """Return whether ranks along `tensor` share out sequences between sharded layers."""
        if self.sequence_parallel is not None:
            return self.sequence_parallel
        return not (self.reproducible and {"tensor", "context"} <= set(self.open_axes))

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        """Turn numbers into text, so that `NCCL_IB_DISABLE: 1` needs no quotes."""
        if not isinstance(value, dict):
            return value
        return {
            key: str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v
            for key, v in value.items()
        }
