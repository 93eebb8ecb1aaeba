"""The keyword arguments of `Trainer` and `lockstep.place`, as types for editors and mypy.

They are keys of the config.

Tests: tests/trainer/test_settings.py, tests/trainer/test_every_setting.py
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict


class PlacementSettings(TypedDict, total=False):
    """Keyword arguments of `lockstep.place`, for editors and mypy.

    They are keys of the config about the model and the ranks.

    A test compares names and types; `precision` is `precision.mode`, and a section is a mapping of
    its keys.
    """

    gradient_checkpointing: Literal["none", "full", "selective", "every_n", "sequential"]
    gradient_checkpointing_every: int
    compile: bool
    seed: int
    precision: Literal["auto", "fp32", "bf16", "fp16"] | Mapping[str, Any]
    param_dtype: Literal["fp32", "bf16"]
    fp8: Literal["none", "linears", "emulated"]
    tf32: bool
    loss_scale: Mapping[str, Any]
    device: str
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"]
    init_method: str
    timeout_seconds: float
    hang: Mapping[str, Any]
    debug: Literal["none", "info", "detail"]
    env: Mapping[str, Any]
    reproducible: bool
    buffers: Mapping[str, Any]
    divergence_check_steps: int | None
    divergence_action: Literal["stop", "repair"]
    replicate_size: int | None
    shard_size: int | None
    pipeline_size: int | None
    context_size: int | None
    open_axes: list[Literal["tensor", "context"]]
    context_blocks: int | None
    context_method: Literal["gathered", "all_to_all", "ring"]
    tensor_size: int | None
    expert_size: int | None
    sequence_parallel: bool | None
    tensor_blocks: int | None
    ddp: Mapping[str, Any]
    fsdp: Mapping[str, Any]
    pipeline: Mapping[str, Any]
    accelerate: Mapping[str, Any]
    diloco: Mapping[str, Any]
    distributed: Mapping[str, Any]


class TrainerSettings(PlacementSettings, total=False):
    """All keys of a `Trainer`."""

    strategy: str
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    shuffle: bool
    order: Literal["auto", "randperm", "keyed"]
    drop_last: bool
    max_steps: int | None
    num_train_epochs: int | None
    batch_size: int
    batch_norm_samples: int | None
    eval_batch_size: int | None
    eval_batches: int | None
    gradient_accumulation_steps: int | None
    global_batch_size: int | None
    optimizer_args: Mapping[str, Any]
    learning_rate: float
    lr_schedule: str | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: int | None
    warmup_steps: int | None
    min_lr_ratio: float
    wsd_decay_ratio: float
    weight_decay: float | None
    label_smoothing: float
    z_loss: float
    loss_chunks: int
    gradient_clip: float | Mapping[str, Any] | None
    bad_numbers: Mapping[str, Any]
    eval_steps: int | None
    eval_strategy: Literal["steps", "epoch"]
    early_stopping: Mapping[str, Any] | None
    save_strategy: Literal["steps", "epoch", "none"]
    save_steps: int
    save_total_limit: int | None
    keep_best: str | None
    keep_best_mode: Literal["min", "max"]
    load_best: bool
    format: Literal["sharded", "full", "local"]
    storage: str | Mapping[str, Any] | None
    local_cache: str | None
    memory_steps: int | None
    retries: int
    resume: str
    allow_changes: bool
    log_steps: int
    sinks: Sequence[str]
    # in Python also functions and objects
    callbacks: Sequence[str | Mapping[str, Any] | Callable[..., Any] | Any]
    profile: Mapping[str, Any] | None
    memory: Mapping[str, Any]
    straggler: Mapping[str, Any]
    prometheus: Mapping[str, Any] | None
    gradient_norms: bool
    experiment: str | None
    training: Mapping[str, Any]
    data: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    monitor: Mapping[str, Any]
