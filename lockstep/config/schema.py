"""The whole config: eight sections, typed and strict. Nothing here imports torch.

Below the trainer no component is given a `Config`: each gets its section, and what places a model and runs its step
gets `Config.step`, a `StepConfig`. A `Config()` of defaults alone is valid (for use from Python, where
the model and the data are handed over); the command line also asks for `model.name` and `data.name`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from lockstep.config.schema_distributed import DistributedConfig
from lockstep.config.schema_running import CheckpointConfig, MonitorConfig
from lockstep.config.schema_training import (
    DataConfig,
    ModelConfig,
    ObjectSpec,
    PrecisionConfig,
    Section,
    TrainingConfig,
)
from lockstep.registry import LOSSES


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
    """Everything a run is told."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="What is trained.")
    loss_fn: ObjectSpec | None = Field(
        default=None,
        description="`cross_entropy`, `mse`, `l1`, `bce_with_logits`, `package.module:Name`, or one with `args`; "
        "unset: the model's own loss.",
    )
    data: DataConfig = Field(default_factory=DataConfig, description="What it is trained on.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The step and the optimizer.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="Numbers.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="Ranks.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and resuming.")
    monitor: MonitorConfig = Field(default_factory=MonitorConfig, description="Logging and warnings.")

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        """Spell out the short name of a loss that ships: `loss_fn: mse`, or `{name: mse, args: {…}}`."""
        if isinstance(value, str):
            return LOSSES.shipped.get(value, value)
        if isinstance(value, dict) and "name" in value:
            return {**value, "name": LOSSES.shipped.get(str(value.get("name")), value.get("name"))}
        return value

    @model_validator(mode="after")
    def _accelerate_speaks_for_both(self) -> "Config":
        """`accelerate.mixed_precision` and `.cpu` fill `precision.mode` and `device`: others read only those."""
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
            UsageError: the file can't be read, or says something that is not in the schema.
        """
        from lockstep.config.loading import load_config

        return load_config(path, overrides)

    def replaced(self, changes: Mapping[str, Any]) -> "Config":
        """A copy with some keys changed, `{"distributed.strategy": "fsdp"}`; checked like a file.

        Raises:
            UsageError: a key or a value is not in the schema, or they contradict each other.
        """
        from lockstep.config.loading import config_from

        return config_from(changes, base=self)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, by the names that files use."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """The whole config as YAML; reading it gives this config again."""
        from lockstep.config.writing import to_yaml

        return to_yaml(self)
