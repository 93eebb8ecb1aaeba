"""Define the whole config, eight typed and strict sections, and its sections `checkpoint` and `monitor`.

Below the trainer no component gets a `Config`: each gets its section, and the components that place a model and run its
step get `Config.step`, a `StepConfig`. `Config()` with all defaults is valid for use from Python, where model and data
are given as objects; the command line also needs `model.name` and `data.name`. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.config.schema_distributed import DistributedConfig
from lockstep.config.schema_training import (
    DataConfig,
    ModelConfig,
    Named,
    ObjectSpec,
    PrecisionConfig,
    Section,
    TrainingConfig,
)
from lockstep.registry import LOSSES, SINKS

SinkName = Annotated[str, Named(SINKS)]


class CheckpointConfig(Section):
    """Times of saves, checkpoints to keep, and the checkpoint to resume from."""

    save_strategy: Literal["steps", "epoch", "none"] = Field(
        default="steps", description="Save every `save_steps` steps, at the end of each epoch, or never."
    )
    save_steps: int = Field(default=100, ge=1, description="Steps between checkpoints.")
    save_total_limit: int | None = Field(
        default=3,
        ge=1,
        description="The number of newest checkpoints to keep; null: all. One is deleted only when a newer one is "
        "verified.",
    )
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="Also keep the best by this metric: `eval_loss`, `loss`, `grad_norm`, or one of the evaluation, "
        "`eval_NAME`; each evaluation that is better than all before is saved.",
    )
    keep_best_mode: Literal["min", "max"] = Field(
        default="min", description="Whether the least or the most `keep_best` is the best."
    )
    load_best: bool = Field(
        default=False, description="Load the best checkpoint when the training is done. Needs `keep_best`."
    )
    format: Literal["sharded", "full", "local"] = Field(
        default="sharded",
        description="`sharded`: every rank writes its part, any number of ranks can load it; `full`: one file of whole "
        "tensors; `local`: every rank's part as it is, for the same topology only.",
    )
    storage: ObjectSpec | None = Field(
        default=None,
        description="`package.module:Name`, or with `args`: a `lockstep.checkpoint.Storage` of your own; unset: the "
        "folder `checkpoints/` of the run directory.",
    )
    async_: bool = Field(
        default=True, alias="async", description="Write while training goes on; a save waits for the previous one."
    )
    retries: int = Field(
        default=3, ge=0, description="Further tries of a save that the storage refuses, after 0.5 s, 1 s, 2 s …"
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue",
        description="After the last try: `continue` logs the failure, trains on and keeps the last good checkpoint; "
        "`stop` ends the run. The save at the end of a run must succeed.",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="`auto`: from the newest whole checkpoint, if there is one; `never`; or a path.",
    )
    allow_changes: bool = Field(
        default=False,
        description="Resume though the model, the data, the seed or the global batch changed since the checkpoint; "
        "otherwise a resume refuses such changes and lists them.",
    )


class ProfileConfig(Section):
    """torch's profiler over a few steps."""

    wait: int = Field(default=1, ge=0, description="Steps skipped at first.")
    warmup: int = Field(default=1, ge=0, description="Steps traced and discarded.")
    active: int = Field(default=3, ge=1, description="Steps traced and kept.")
    record_shapes: bool = Field(default=True, description="Keep the shapes of operators' inputs.")
    profile_memory: bool = Field(default=True, description="Keep allocations.")
    with_stack: bool = Field(default=False, description="Keep source lines. Slows the steps.")
    ranks: list[int] = Field(default_factory=lambda: [0], description="The ranks that are traced.")
    dir: str | None = Field(default=None, description="Where traces go; unset: `profile/` in the run directory.")


class MemoryConfig(Section):
    """Warnings about memory."""

    threshold: float = Field(
        default=0.9, gt=0, le=1, description="Warn when this share of a device's memory is in use."
    )
    alert_on_imbalance: bool = Field(
        default=True, description="Warn when the memory in use differs much between ranks."
    )


class StragglerConfig(Section):
    """Warnings about slow ranks."""

    threshold: float = Field(
        default=1.3,
        gt=1,
        description="A rank's own time in a step, without waiting, as a multiple of the median of the other ranks.",
    )
    patience: int = Field(
        default=3, ge=1, description="The number of times in a row before a warning; checked about once a second."
    )


class PrometheusConfig(Section):
    """A page `/metrics` for Prometheus to read, served by rank 0."""

    port: int = Field(default=9400, ge=0, le=65535, description="0: any free one, which is logged.")
    host: str = Field(default="127.0.0.1", min_length=1, description="`0.0.0.0` opens it to the network.")


class MonitorConfig(Section):
    """Logging, profiles and warnings."""

    log_steps: int = Field(default=10, ge=1, description="Steps between records.")
    sinks: list[SinkName] = Field(
        default_factory=lambda: ["console", "jsonl", "tensorboard"],
        description="Where records go; `package.module:Name`: a sink of your own.",
    )
    callbacks: list[ObjectSpec] = Field(
        default_factory=list, description="Objects of your own, `package.module:Name`, called with every record."
    )
    profile: ProfileConfig | None = Field(default=None, description="Trace a few steps; unset: off; `{}`: defaults.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="Warnings about memory.")
    straggler: StragglerConfig = Field(default_factory=StragglerConfig, description="Warnings about a slow rank.")
    prometheus: PrometheusConfig | None = Field(
        default=None, description="Serve `/metrics` on rank 0; unset: off; `{}`: defaults."
    )
    gradient_norms: bool = Field(
        default=False, description="Record the norm of each layer's gradient on logged steps. Waits for other ranks."
    )
    experiment: str | None = Field(
        default=None, min_length=1, description="The project (W&B) or experiment (MLflow); unset: `lockstep`."
    )


@dataclass(frozen=True)
class StepConfig:
    """The sections of a config on which a step and the placement of its model depend.

    Attributes:
        training: the step and the optimizer.
        precision: numbers.
        distributed: ranks.
    """

    training: TrainingConfig
    precision: PrecisionConfig
    distributed: DistributedConfig


class Config(Section):
    """The config of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    loss_fn: ObjectSpec | None = Field(
        default=None,
        description="`cross_entropy`, `mse`, `l1`, `bce_with_logits`, `package.module:Name`, or one with `args`; "
        "unset: the model's own loss.",
    )
    data: DataConfig = Field(default_factory=DataConfig, description="The data.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The step and the optimizer.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="Numbers.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="Ranks.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and resuming.")
    monitor: MonitorConfig = Field(default_factory=MonitorConfig, description="Logging and warnings.")

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        """Replace the short name of a loss that ships, in `loss_fn: mse` or `{name: mse, args: {…}}`."""
        if isinstance(value, str):
            return LOSSES.shipped.get(value, value)
        if isinstance(value, dict) and "name" in value:
            return {**value, "name": LOSSES.shipped.get(str(value.get("name")), value.get("name"))}
        return value

    @model_validator(mode="after")
    def _keys_from_accelerate(self) -> "Config":
        """Set `precision.mode` and `device` from `accelerate.mixed_precision` and `.cpu`, unless they are set."""
        accelerate = self.distributed.accelerate
        is_open = self.precision.mode == "auto" or "mode" not in self.precision.model_fields_set
        if accelerate.mixed_precision is not None and is_open:
            self.precision.mode = "fp32" if accelerate.mixed_precision == "no" else accelerate.mixed_precision
        if accelerate.cpu and self.distributed.device == "auto":
            self.distributed.device = "cpu"
        return self

    @property
    def step(self) -> StepConfig:
        """The sections on which a step and the placement of its model depend."""
        return StepConfig(self.training, self.precision, self.distributed)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Config":
        """Read a YAML file; `overrides` are `section.key=VALUE`, applied last.

        Raises:
            UsageError: the file can't be read, or has a mistake.
        """
        from lockstep.config.loading import load_config

        return load_config(path, overrides)

    def replaced(self, changes: Mapping[str, Any]) -> "Config":
        """Return a copy with some keys changed, `{"distributed.strategy": "fsdp"}`, checked like a file.

        Raises:
            UsageError: a key or a value is wrong, or they contradict each other.
        """
        from lockstep.config.loading import config_from

        return config_from(changes, base=self)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain containers, with the keys of files."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """Return the whole config as YAML, which reads back as the same config."""
        from lockstep.config.loading import to_yaml

        return to_yaml(self)
