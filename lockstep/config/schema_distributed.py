"""Define the section `distributed`: how micro-batches and parameters are distributed over ranks."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lockstep.config.schema_training import Named, Section
from lockstep.registry import STRATEGIES
from lockstep.strategy import AUTO

DType = Literal["fp32", "bf16", "fp16"]
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class CompressionConfig(Section):
    """Compression of the gradients that DDP sends."""

    kind: Literal["none", "fp16", "bf16", "powersgd", "auto"] = Field(
        default="none",
        description="`fp16`, `bf16`: half the bytes; `powersgd`: low rank; `auto`: the fastest on this link by "
        "measurement, which is often `none`.",
    )
    rank: int = Field(default=1, ge=1, description="Rank of PowerSGD's approximation.")
    start_step: int = Field(
        default=10, ge=0, description="The step from which PowerSGD compresses; at least 2 with error feedback."
    )
    warm_start: bool = Field(default=True, description="PowerSGD starts each step from the last one's factors.")
    error_feedback: bool = Field(default=True, description="PowerSGD adds the compression error to the next gradient.")


class DDPConfig(Section):
    """Options of `strategy: ddp`."""

    bucket_cap_mb: float = Field(
        default=25.0, gt=0, description="Size of the buckets in which gradients are sent, in MiB."
    )
    find_unused_parameters: bool = Field(
        default=False, description="Search each step for parameters that got no gradient. Costs time."
    )
    static_graph: bool = Field(default=False, description="Promise that the graph is the same in every step.")
    gradient_as_bucket_view: bool = Field(
        default=True, description="Keep gradients in the buckets, which saves one copy of them."
    )
    compression: CompressionConfig = Field(
        default_factory=CompressionConfig, description="Compression of the gradients that are sent."
    )


class FSDPConfig(Section):
    """Options of `strategy: fsdp` (FSDP2), and of the shards within a pipeline."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] = Field(
        default="full_shard",
        description="`full_shard`: parameters, gradients and optimizer state are cut; `shard_grad_op`: parameters stay "
        "whole between forward and backward; `no_shard`: replicas; `hybrid_shard`: shards within a node, replicas "
        "across nodes.",
    )
    auto_wrap_policy: str | list[str] = Field(
        default="transformer",
        description="The modules that are gathered as one unit: `transformer`: each block of the model; `size`: any "
        "module of `min_num_params` or more; a list of class names; or `package.module:name`, a function of a module "
        "or one of torch's policies.",
    )
    accumulate: Literal["sharded", "unsharded"] = Field(
        default="sharded",
        description="Gradients between micro-batches: `sharded` reduces each (least memory); `unsharded` reduces once "
        "per step and keeps the whole model's gradients (least traffic).",
    )
    min_num_params: int = Field(default=1_000_000, ge=1, description="The smallest unit under `size`, in parameters.")
    forward_prefetch: bool | None = Field(
        default=None,
        description="Gather the next unit (on CPUs the next two) before this one computes; unset: on CPUs only. On "
        "GPUs streams run ahead anyway.",
    )
    backward_prefetch: Literal["pre", "post", "none"] = Field(
        default="pre",
        description="Gather the next unit before this one's backward (`pre`), after it (`post`), or when needed.",
    )
    cpu_offload: bool = Field(default=False, description="Keep shards in host memory, and update them there.")
    reduce_dtype: DType = Field(default="fp32", description="Gradients are summed over ranks in this type.")
    buffer_dtype: DType = Field(default="fp32", description="Buffers; fp32 keeps rotary phases exact.")


class PipelineConfig(Section):
    """Options of `strategy: pipeline`."""

    split_spec: dict[str, Literal["end", "beginning"]] = Field(
        default_factory=dict,
        description="Where stages are cut: `layers.4: end` leaves layers 0 to 4, five of them, in the first stage. "
        "Empty: stages of equal cost.",
    )
    stages_per_rank: int = Field(default=1, ge=1, description="Stages that each pipeline rank holds.")
    schedule: Schedule = Field(
        default="1F1B",
        description="The order of forwards and backwards. GPipe and 1F1B: one stage per rank; Interleaved1F1B, "
        "LoopedBFS, InterleavedZeroBubble: several; ZBVZeroBubble and DualPipeV: two.",
    )
    n_microbatches: int | None = Field(
        default=None,
        ge=1,
        description="Micro-batches that one run of the schedule takes; unset: all micro-batches of the rank in a step.",
    )


class DiLoCoConfig(Section):
    """Options of `strategy: diloco`, whose workers train alone and exchange parameters every `inner_steps` steps."""

    workers: int | None = Field(
        default=None,
        ge=1,
        description="The number of models that train alone; a multiple of the ranks. Unset: one per rank, and then "
        "the run depends on the number of ranks.",
    )
    inner_steps: int = Field(
        default=100,
        ge=1,
        description="Steps between two exchanges of the same parameter; in each, every worker makes an update alone.",
    )
    outer_learning_rate: float = Field(
        default=0.7, gt=0, description="Learning rate of the outer step, along the mean of the workers' changes."
    )
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum of the outer step.")
    nesterov: bool = Field(default=True, description="Nesterov's momentum in the outer step.")
    fragments: int = Field(
        default=1,
        ge=1,
        description="The number of parts in which parameters are exchanged, spread over `inner_steps` to lower the "
        "peak traffic.",
    )
    send_as: Literal["fp32", "fp16", "bf16", "int8", "int4"] = Field(
        default="fp32",
        description="Type of the changes on the link; int8 and int4 (half a byte) have a scale for each 256 of them.",
    )
    error_feedback: bool = Field(
        default=True, description="Add the rounding error of int8 and int4 in a worker's change to its next change."
    )


class AccelerateConfig(Section):
    """Options of `strategy: accelerate`; those about data or accumulation are refused in favour of Lockstep's keys."""

    device_placement: bool = Field(default=True, description="Let Accelerate place the model on the device.")
    cpu: bool = Field(default=False, description="Stay on the CPU; as `distributed.device: cpu`.")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = Field(
        default=None, description="As `precision.mode` (`no` is fp32); unset: follows it."
    )
    split_batches: bool | None = Field(default=None, description="Refused: `training.batch_size` is per rank.")
    dispatch_batches: bool | None = Field(default=None, description="Refused: each rank reads its own samples.")
    even_batches: bool | None = Field(default=None, description="Refused: no sample is repeated to fill a batch.")
    use_seedable_sampler: bool | None = Field(
        default=None, description="Refused: the order of samples follows from `training.seed`."
    )
    gradient_accumulation_plugin: dict[str, Any] | None = Field(
        default=None, description="Refused: write `training.gradient_accumulation_steps`."
    )


class HangConfig(Section):
    """Detection of ranks that hang; their stacks are written, and they are started again."""

    factor: float | None = Field(
        default=20.0,
        gt=1,
        description="A step, save or evaluation hangs if it takes this many times the median of earlier ones; null: "
        "never.",
    )
    seconds: float = Field(
        default=60.0,
        gt=0,
        description="The shortest time that counts as hanging; for the first call of its kind, `timeout_seconds`. A "
        "rank or data worker that a signal stopped, and a collective that only some ranks enter, are found after this "
        "time.",
    )


class DistributedConfig(Section):
    """The distribution of micro-batches and parameters over ranks; sizes of the mesh are in ranks."""

    strategy: Annotated[str, Named(STRATEGIES, AUTO)] = Field(
        default=AUTO,
        description="`single`: one process; `dp`: one process, several GPUs; `ddp`: replicas; `fsdp`: shards; "
        "`pipeline`: stages; `accelerate`: through Hugging Face Accelerate; `diloco`: workers that train alone and "
        "exchange parameters rarely, for slow links; `auto`: chosen and logged at the start (never diloco, which "
        "changes the training); `package.module:Name`: a `lockstep.strategy.Strategy` of your own.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^[a-z][a-z0-9_]*$",
        description="`cuda` (GPUs of NVIDIA, and of AMD under ROCm), `xpu` (Intel), `mps` (Apple, one process), `cpu`, "
        "or a name that an installed package registers with torch; `auto`: the accelerator that torch finds, except "
        "mps, else the CPU.",
    )
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] = Field(
        default="auto",
        description="`auto`: nccl for CUDA, xccl for XPU, gloo for the CPU, for others the one that is registered for "
        "them. Wheels of torch lack mpi.",
    )
    init_method: str = Field(
        default="env://",
        pattern=r"^(env://|tcp://[^/\s]+:\d{1,5})$",
        description="Where ranks find each other: `env://` (set by the launcher) or `tcp://HOST:PORT`.",
    )
    timeout_seconds: float = Field(default=1800.0, gt=0, description="A collective that takes longer is a failure.")
    hang: HangConfig = Field(default_factory=HangConfig, description="When a step counts as hanging.")
    debug: Literal["none", "info", "detail"] = Field(
        default="none", description="Set torch's and NCCL's debug switches on every rank."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables for every rank.")
    reproducible: bool = Field(
        default=False,
        description="Equal in every bit under single, ddp, fsdp, hybrid shard and pipeline, on any number of ranks.",
    )
    divergence_check_steps: int | None = Field(
        default=100,
        ge=1,
        description="Steps between comparisons of the replicas' parameters; the run stops if they differ. Null: never.",
    )
    divergence_action: Literal["stop", "repair"] = Field(
        default="stop",
        description="Where a bit has flipped in one replica and others outvote it: stop, or go on from their values.",
    )
    replicate_size: int | None = Field(
        default=None, ge=1, description="Ranks along the axis of replicas; unset: follows from the world size."
    )
    shard_size: int | None = Field(
        default=None, ge=1, description="Ranks over which parameters are cut; unset: follows from the world size."
    )
    pipeline_size: int | None = Field(
        default=None, ge=1, description="Ranks along the pipeline; unset: follows from the world size."
    )
    context_size: int | None = Field(
        default=None,
        ge=1,
        description="Ranks over which each sequence is cut (context parallel), and which work on the same "
        "micro-batches. Unset: 1.",
    )
    context_method: Literal["gathered", "all_to_all", "ring"] = Field(
        default="gathered",
        description="How the parts of a sequence meet in attention: keys and values are `gathered`, or heads are "
        "exchanged by `all_to_all` (Ulysses; `context_size` divides the numbers of heads), or keys and values travel "
        "in a `ring` (slower, for the longest sequences; not with `reproducible`).",
    )
    context_blocks: int = Field(
        default=1,
        ge=1,
        description="Under `reproducible`, the chunks in which sequences are computed on any number of ranks; "
        "`context_size` divides it.",
    )
    tensor_size: int | None = Field(
        default=None,
        ge=1,
        description="Ranks over which each layer is cut (tensor parallel), and which work on the same micro-batches. "
        "Unset: 1.",
    )
    expert_size: int | None = Field(
        default=None,
        ge=1,
        description="Ranks over which the experts of each layer are spread (expert parallel); it divides those that "
        "share out micro-batches. Unset: 1.",
    )
    sequence_parallel: bool = Field(
        default=True,
        description="Between the layers that are cut over `tensor_size` ranks, each rank has a part of every sequence, "
        "if the model says how; else all of it.",
    )
    tensor_blocks: int = Field(
        default=8,
        ge=1,
        description="Under `reproducible`, the blocks in which layers that can be cut are computed on any number of "
        "ranks; `tensor_size` divides it.",
    )
    ddp: DDPConfig = Field(default_factory=DDPConfig, description="Options of `strategy: ddp`.")
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig, description="Options of `strategy: fsdp`.")
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="Options of `strategy: pipeline`.")
    accelerate: AccelerateConfig = Field(
        default_factory=AccelerateConfig, description="Options of `strategy: accelerate`."
    )
    diloco: DiLoCoConfig = Field(default_factory=DiLoCoConfig, description="Options of `strategy: diloco`.")

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        """Turn numbers into text, so that `NCCL_IB_DISABLE: 1` needs no quotes."""
        if not isinstance(value, dict):
            return value
        return {
            key: str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v for key, v in value.items()
        }
