"""Define the config: eight typed and strict sections.

The sections `checkpoint` and `monitor` are here; the others have modules of their own.

`Config()` with all defaults is valid for use from Python, where model and data are given as
objects; the command line also needs `model.name` and `data.name`. Nothing here imports torch.
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
    key,
    section,
)
from lockstep.errors import UsageError
from lockstep.registry import LOSSES, SINKS

# The class that keeps checkpoints in a bucket, for which its URL is short.
OBJECT_STORAGE = "lockstep.checkpoint:ObjectStorage"
_HOST_DISKS = "lockstep.checkpoint:HostDisks"
_DISKS = "disks:"
SinkName = Annotated[str, Named(SINKS)]


class CheckpointConfig(Section):
    """Times of saves, checkpoints to keep, and the checkpoint to resume from."""

    save_strategy: Literal["steps", "epoch", "none"] = key("steps")
    """Save every `save_steps` steps, at the end of each epoch, or never."""
    save_steps: int = key(100, "Steps between checkpoints.", ge=1)
    save_total_limit: int | None = key(3, ge=1)
    """The number of newest checkpoints to keep; null: all. One is deleted only when a newer one is
    verified."""
    keep_best: str | None = key(None, min_length=1)
    """Also keep the best by this metric: `eval_loss`, `loss`, `grad_norm`, or one of the
    evaluation, `eval_NAME`; each evaluation that is better than all before is saved."""
    keep_best_mode: Literal["min", "max"] = key(
        "min", "Whether the least or the most `keep_best` is the best."
    )
    load_best: bool = key(
        False, "Load the best checkpoint when the training is done. Needs `keep_best`."
    )
    format: Literal["sharded", "full", "local"] = key("sharded")
    """`sharded`: every rank writes its part, any number of ranks can load it; `full`: one file of
    whole tensors; `local`: every rank's part as it is, for the same topology only."""
    storage: ObjectSpec | None = key(None)
    """The bucket that keeps the checkpoints, `s3://BUCKET/PREFIX`, `gs://…` or `az://…`; or
    `disks:FOLDER`, a folder on each host's own disk, where hosts share none: each file is on two
    hosts; or a `lockstep.checkpoint.Storage` of your own, `package.module:Name`, or with `args`;
    unset: the folder `checkpoints/` of the run directory."""
    local_cache: str | None = key(None, min_length=1)
    """A folder on each machine's own disk that keeps the newest checkpoints of a bucket, too; a
    resume reads a file there if it is whole, else from the bucket. Unset: none."""
    async_: bool = key(
        True, "Write while training goes on; a save waits for the previous one.", alias="async"
    )
    memory_steps: int | None = key(None, ge=1)
    """Steps between copies of the run in the memory of each machine, from which ranks go on that
    are started again (`--max-restarts`) or outlive others; unset: none."""
    retries: int = key(
        3, "Further tries of a save that the storage refuses, after 0.5 s, 1 s, 2 s …", ge=0
    )
    on_failure: Literal["continue", "stop"] = key("continue")
    """After the last try: `continue` logs the failure, trains on and keeps the last good
    checkpoint; `stop` ends the run. The save at the end of a run must succeed."""
    resume: str = key("auto", min_length=1)
    """`auto`: from the newest whole checkpoint, if there is one; `never`; a path; or the URL of a
    run in a bucket, or of one of its checkpoints."""
    allow_changes: bool = key(False)
    """Resume though the model, the data, the seed or the global batch changed since the checkpoint;
    otherwise a resume refuses such changes and lists them."""

    @field_validator("storage", mode="before")
    @classmethod
    def _from_url(cls, value: Any) -> Any:
        """Take the URL of a bucket, alone or as a name with further arguments; or hosts' disks."""
        spec = {"name": value} if isinstance(value, str) else value
        if isinstance(spec, dict) and str(spec.get("name", "")).startswith(_DISKS):
            folder = str(spec["name"]).removeprefix(_DISKS)
            return {**spec, "name": _HOST_DISKS, "args": {"folder": folder}}
        if not isinstance(spec, dict) or "://" not in str(spec.get("name", "")):
            return value
        arguments = spec.get("args") or {}
        return {**spec, "name": OBJECT_STORAGE, "args": {"url": spec["name"], **arguments}}


class ProfileConfig(Section):
    """torch's profiler over a few steps."""

    wait: int = key(1, "Steps skipped at first.", ge=0)
    warmup: int = key(1, "Steps traced and discarded.", ge=0)
    active: int = key(3, "Steps traced and kept.", ge=1)
    record_shapes: bool = key(True, "Keep the shapes of operators' inputs.")
    profile_memory: bool = key(True, "Keep allocations.")
    with_stack: bool = key(False, "Keep source lines. Slows the steps.")
    ranks: list[int] = Field(default_factory=lambda: [0], description="The ranks that are traced.")
    dir: str | None = key(None, "Where traces go; unset: `profile/` in the run directory.")


class MemoryConfig(Section):
    """Warnings about memory."""

    threshold: float = key(0.9, "Warn when this share of a device's memory is in use.", gt=0, le=1)
    alert_on_imbalance: bool = key(True, "Warn when the memory in use differs much between ranks.")


class StragglerConfig(Section):
    """Warnings about slow ranks."""

    threshold: float = key(1.3, gt=1)
    """A rank's own time in a step, without waiting, as a multiple of the median of the other
    ranks."""
    patience: int = key(
        3, "The number of times in a row before a warning; checked about once a second.", ge=1
    )


class PrometheusConfig(Section):
    """A page `/metrics` for Prometheus to read, served by rank 0."""

    port: int = key(9400, "0: any free one, which is logged.", ge=0, le=65535)
    host: str = key("127.0.0.1", "`0.0.0.0` opens it to the network.", min_length=1)


class MonitorConfig(Section):
    """Logging, profiles and warnings."""

    log_steps: int = key(10, "Steps between records.", ge=1)
    sinks: list[SinkName] = Field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Where records go; `package.module:Name`: a sink of your own."""
    callbacks: list[ObjectSpec] = Field(default_factory=list)
    """Objects of your own, `package.module:Name`, called with every record."""
    profile: ProfileConfig | None = key(None, "Trace a few steps; unset: off; `{}`: defaults.")
    memory: MemoryConfig = section(MemoryConfig, "Warnings about memory.")
    straggler: StragglerConfig = section(StragglerConfig, "Warnings about a slow rank.")
    prometheus: PrometheusConfig | None = key(
        None, "Serve `/metrics` on rank 0; unset: off; `{}`: defaults."
    )
    gradient_norms: bool = key(False)
    """Record the norm of each layer's gradient on logged steps. Waits for other ranks."""
    experiment: str | None = key(
        None, "The project (W&B) or experiment (MLflow); unset: `lockstep`.", min_length=1
    )


@dataclass(frozen=True)
class StepConfig:
    """The sections of a config on which a step and the placement of its model depend."""

    training: TrainingConfig  # the step and the optimizer
    precision: PrecisionConfig  # numbers
    distributed: DistributedConfig  # ranks


class Config(Section):
    """The config of a run."""

    model: ModelConfig = section(ModelConfig, "The model.")
    loss_fn: ObjectSpec | None = key(None)
    """`cross_entropy`, `mse`, `l1`, `bce_with_logits`, `package.module:Name`, or one with `args`;
    unset: the model's own loss."""
    data: DataConfig = section(DataConfig, "The data.")
    training: TrainingConfig = section(TrainingConfig, "The step and the optimizer.")
    precision: PrecisionConfig = section(PrecisionConfig, "Numbers.")
    distributed: DistributedConfig = section(DistributedConfig, "Ranks.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Saving and resuming.")
    monitor: MonitorConfig = section(MonitorConfig, "Logging and warnings.")

    @property
    def bucket(self) -> dict[str, Any] | None:
        """The arguments of the storage of checkpoints, its `url` among them, if it is a bucket."""
        storage = self.checkpoint.storage
        return storage.args if storage is not None and storage.name == OBJECT_STORAGE else None

    def kept_in(self, url: str) -> "Config":
        """Return the config of a run whose directory is a bucket: its checkpoints are there, too.

        Raises UsageError: `checkpoint.storage` is another place.
        """
        named = self.checkpoint.storage
        if named is None:
            return self.replaced({"checkpoint.storage": url})
        if self.bucket is None or str(self.bucket["url"]).rstrip("/") != url:
            raise UsageError(
                f"the run is kept in {url}, and its checkpoints elsewhere",
                where="checkpoint.storage",
                why="who resumes it from another machine looks for both in one place",
                fix=f"leave checkpoint.storage out, or write {url} there, too",
            )
        return self

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        """Replace the short name of a loss that ships.

        It is written `loss_fn: mse` or `{name: mse, args: {…}}`.
        """
        if isinstance(value, str):
            return LOSSES.shipped.get(value, value)
        if isinstance(value, dict) and "name" in value:
            return {**value, "name": LOSSES.shipped.get(str(value.get("name")), value.get("name"))}
        return value

    @model_validator(mode="after")
    def _keys_from_accelerate(self) -> "Config":
        """Set `precision.mode` from the section `accelerate`, unless it is set itself."""
        mixed_precision = self.distributed.accelerate.mixed_precision
        if mixed_precision is not None:
            self.precision.follow("fp32" if mixed_precision == "no" else mixed_precision)
        return self

    @property
    def step(self) -> StepConfig:
        """The sections on which a step and the placement of its model depend."""
        return StepConfig(self.training, self.precision, self.distributed)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Config":
        """Read a YAML file; `overrides` are `section.key=VALUE`, applied last.

        Raises UsageError: the file can't be read, or has a mistake.
        """
        from lockstep.config.loading import load_config

        return load_config(path, overrides)

    def replaced(self, changes: Mapping[str, Any]) -> "Config":
        """Return a copy with some keys changed.

        `{"distributed.strategy": "fsdp"}` is checked like a file.

        Raises UsageError: a key or a value is wrong, or they contradict each other.
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
