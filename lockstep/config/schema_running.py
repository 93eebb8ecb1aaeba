"""The sections `checkpoint` and `monitor`: what a run keeps and what it shows."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.named import Named
from lockstep.config.schema_training import ObjectSpec, Section
from lockstep.registry import SINKS

SinkName = Annotated[str, Named(SINKS)]


class CheckpointConfig(Section):
    """When the run is saved, what is kept, and where it goes on."""

    save_strategy: Literal["steps", "epoch", "none"] = Field(
        default="steps", description="Save every `save_steps` steps, at the end of each epoch, or never."
    )
    save_steps: int = Field(default=100, ge=1, description="Steps between checkpoints.")
    save_total_limit: int | None = Field(
        default=3, ge=1, description="Keep the newest so many; null: all. One goes only when a newer one is proved."
    )
    keep_best: str | None = Field(
        default=None, min_length=1, description="Also keep the best by this metric (least is best): `eval_loss`."
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
        default=True, alias="async", description="Write while training goes on; the next save waits for the last."
    )
    retries: int = Field(
        default=3, ge=0, description="A save that the storage refuses is tried again so often, after 0.5 s, 1 s, 2 s …"
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue",
        description="After the last try: `continue` trains on, says so and keeps the last good checkpoint; `stop` "
        "ends the run. The save at the end of a run must succeed.",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="`auto`: from the newest whole checkpoint, if there is one; `never`; or a path.",
    )
    allow_changes: bool = Field(
        default=False,
        description="Go on although the model, the data, the seed or the global batch changed since the checkpoint; "
        "else a resume refuses them and names them.",
    )


class ProfileConfig(Section):
    """torch's profiler over a few steps."""

    wait: int = Field(default=1, ge=0, description="Steps passed over first.")
    warmup: int = Field(default=1, ge=0, description="Steps traced and thrown away.")
    active: int = Field(default=3, ge=1, description="Steps traced and kept.")
    record_shapes: bool = Field(default=True, description="Keep the shapes of operators' inputs.")
    profile_memory: bool = Field(default=True, description="Keep allocations.")
    with_stack: bool = Field(default=False, description="Keep source lines. Slows the steps.")
    ranks: list[int] = Field(default_factory=lambda: [0], description="The ranks that are traced.")
    dir: str | None = Field(default=None, description="Where traces go; unset: `profile/` in the run directory.")


class MemoryConfig(Section):
    """Warnings about memory."""

    threshold: float = Field(default=0.9, gt=0, le=1, description="Warn when so much of a device's memory is in use.")
    alert_on_imbalance: bool = Field(default=True, description="Warn when ranks differ much in what they hold.")


class StragglerConfig(Section):
    """When a rank is called slow."""

    threshold: float = Field(
        default=1.3, gt=1, description="Its own time in a step, without waiting, over the median of the other ranks'."
    )
    patience: int = Field(default=3, ge=1, description="So many times in a row; looked at about once a second.")


class PrometheusConfig(Section):
    """A page `/metrics` for Prometheus to read, served by rank 0."""

    port: int = Field(default=9400, ge=0, le=65535, description="0: any free one, which is said.")
    host: str = Field(default="127.0.0.1", min_length=1, description="`0.0.0.0` opens it to the network.")


class MonitorConfig(Section):
    """What the run shows."""

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
