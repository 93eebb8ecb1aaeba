"""Define the sections `model`, `data`, `training` and `precision` of the config.

The objects that a config names are built here, too.

Descriptions of fields, long ones in a docstring below, are the documentation of the keys. The
defaults are those of a plain loop in PyTorch, in float32, without a schedule and without clipping;
the configs that ship spell out recipes.

Tests: tests/config/test_schema.py, tests/config/test_objects.py
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.errors import UsageError
from lockstep.registry import OPTIMIZERS, SCHEDULES, Registry, load_object, require_arguments


class Named:
    """The type of a key whose value names an object.

    The name is from a registry, a word of `also`, or `package.module:Name`.

    It annotates a `str`: `Annotated[str, Named(STRATEGIES)]`.
    """

    def __init__(self, registry: Registry, *also: str) -> None:
        self.choices = (*also, *registry.shipped)

    def takes(self) -> str:
        """Return the accepted values in words, for messages and tables."""
        return f"one of {', '.join(self.choices)}, or package.module:Name"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [{"enum": list(self.choices)}, {"type": "string", "pattern": r"^[^:]+:[^:]+$"}]
        }

    def _checked(self, name: str) -> str:
        if name not in self.choices and ":" not in name:
            raise PydanticCustomError("unknown_name", "no such name")
        return name


class Section(BaseModel):
    """A part of the config, which refuses unknown keys and values of other types."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, value: Any) -> Any:
        """Replace null by the defaults of a section.

        `training:` with nothing but comments under it is null in YAML.
        """
        if not isinstance(value, dict):
            return value
        containers = {
            f.alias or name for name, f in cls.model_fields.items() if f.default_factory is not None
        }
        return {
            key: inside
            for key, inside in value.items()
            if inside is not None or key not in containers
        }


def key(default: Any, description: str | None = None, **limits: Any) -> Any:
    """Return the field of a key, with pydantic's limits of its value, such as `ge=1`."""
    return Field(default=default, description=description, **limits)


def section(kind: type[Section], description: str | None = None) -> Any:
    """Return the field of a section within another, with all defaults."""
    return Field(default_factory=kind, description=description)


class ObjectSpec(Section):
    """An object of the user's own code: the class or function to import, and its arguments."""

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """`package.module:Name`: a class, or a function that returns the object."""
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments.")
    positional: list[Any] = Field(
        default_factory=list, description="Positional arguments, before the keywords."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class LoraConfig(Section):
    """Low-rank adapters of the package peft, by its own names, in the layers of an `hf:` model.

    The model's own parameters are frozen: they have no gradients and no state in the optimizer.
    """

    r: int = key(8, "The rank of the adapters.", ge=1)
    lora_alpha: int | float = key(
        8, "Adapters are scaled by `lora_alpha / r` (`use_rslora`: by its square root).", gt=0
    )
    lora_dropout: float = key(0.0, "Dropout of what adapters read.", ge=0, lt=1)
    target_modules: str | list[str] | None = key(None)
    """The layers that get adapters: ends of their names, a regular expression, or `all-linear`;
    unset: those that peft takes for the model's type."""
    exclude_modules: str | list[str] | None = key(None, "Layers that get none.")
    modules_to_save: list[str] | None = key(None)
    """Modules that are trained in full and saved with the adapters; unset: the new head of a
    classifier of texts or of tokens."""
    bias: Literal["none", "all", "lora_only"] = key("none", "The biases that are trained.")
    use_rslora: bool = key(False, "Scale by `lora_alpha / sqrt(r)` (arXiv:2312.03732).")
    use_dora: bool = key(False, "Train lengths and directions apart (arXiv:2402.09353).")
    init_lora_weights: bool | Literal["gaussian"] = key(True)
    """`true`: the change of the model is zero at first; `gaussian`: that, from another
    distribution; `false`: it is random."""
    layers_to_transform: int | list[int] | None = key(
        None, "Numbers of the layers that get adapters; unset: all."
    )
    layers_pattern: str | list[str] | None = key(
        None, "The name of the list of layers, where `layers_to_transform` does not find it."
    )
    rank_pattern: dict[str, int] = Field(
        default_factory=dict, description="Ranks of single layers, by name or expression."
    )
    alpha_pattern: dict[str, int | float] = Field(
        default_factory=dict, description="Values of `lora_alpha` of single layers."
    )


class ModelConfig(Section):
    """The model."""

    name: str | None = key(None, min_length=1)
    """`bdh`, `transformer`, `free_transformer`, `vae`, `hf:NAME-OR-FOLDER`, or
    `package.module:Class`. Unset only where the model is handed over in Python."""
    args: dict[str, Any] = Field(
        default_factory=dict, description="Constructor arguments of the model."
    )
    auto: str | None = key(None, pattern=r"^AutoModelFor\w+$")
    """The Auto class of transformers that makes an `hf:` model, such as
    `AutoModelForSequenceClassification`; unset: the one of the folder's `architectures`, or
    `AutoModelForCausalLM`."""
    lora: LoraConfig | None = key(
        None, "Train low-rank adapters of an `hf:` model; unset: the model; `{}`: defaults."
    )
    adapter: str | None = key(None, min_length=1)
    """A folder with low-rank adapters of the package peft, which are trained further, in the `hf:`
    model that is their base; in place of `lora`."""


class DataConfig(Section):
    """The training data, and how samples are read."""

    name: str | None = key(None, min_length=1)
    """`python-docs`, `text`, `tokens`, `digits`, `hf:NAME`, or `package.module:Class`. Unset only
    where the data are handed over in Python."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the dataset, for example `block_size` for text."""
    num_workers: int = key(0, "Processes that read samples, per rank; 0: the rank itself.", ge=0)
    prefetch_factor: int | None = key(None, ge=1)
    """Micro-batches each worker reads ahead; unset: 2. Needs `num_workers`."""
    pin_memory: bool = key(False, "Read into page-locked memory, for faster copies to a GPU.")
    persistent_workers: bool = key(
        False, "Keep the workers from one epoch to the next. Needs `num_workers`."
    )
    shuffle: bool = key(
        True, "A new order each epoch, a function of (seed, epoch); false: the order of the data."
    )
    order: Literal["auto", "randperm", "keyed"] = key("auto")
    """How `shuffle` orders samples. `randperm`: by torch's list of all of them, 8 bytes each;
    `keyed`: by a permutation that is computed position by position, without memory; `auto`: the
    list for up to 65,536 samples, and the order with which a resumed run began."""
    drop_last: bool = key(False)
    """Drop the samples at the end of an epoch that do not fill a global batch, and log their
    number; false: train on them, weighted by their count."""


class GradientClipConfig(Section):
    """Clipping of the global gradient, over all shards and stages.

    A number alone is a norm, and 0 is off.
    """

    strategy: Literal["norm", "value", "adaptive", "none"] = key("norm")
    """`norm`: scale to the global 2-norm `value`; `value`: cut each element; `adaptive`: AGC, per
    unit, against the norm of the weights; `none`: off."""
    value: float = key(1.0, "The norm, the largest element, or AGC's ratio (about 0.01).", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"strategy": "none"} if value == 0 else {"strategy": "norm", "value": value}
        return value


class BadNumbersConfig(Section):
    """The reaction to a loss or a gradient norm that is not finite, and to a spike of the loss."""

    action: Literal["stop", "skip", "rollback"] = key("stop")
    """`stop` ends the run; `skip` makes no update from that step, on any rank (the host waits for
    the loss of each step); `rollback` goes back to the newest checkpoint and passes over that
    step's data."""
    recompute: bool = key(False)
    """A bad step is computed once more, from the same weights and random numbers, before `action`.
    If its numbers are good then, a processor has computed wrongly: the run names the host, and goes
    on with them. The host waits for the loss of each step. Not in loops that call `backward`
    themselves."""
    spike_factor: float | None = key(None, gt=1)
    """A loss above this many times the running median counts as bad, too; unset: off."""
    window: int = key(50, "Steps in the running median; spikes are detected once it is full.", ge=3)
    patience: int = key(
        5,
        "The run stops after this many bad steps, or rollbacks to one checkpoint, in a row.",
        ge=1,
    )


class EarlyStoppingConfig(Section):
    """The end of a run whose evaluations do not get better."""

    metric: str = key(
        "eval_loss", "`eval_loss`, or a metric of the evaluation: `eval_NAME`.", min_length=1
    )
    mode: Literal["min", "max"] = key("min", "Whether the least or the most is the best.")
    patience: int = key(3, "Evaluations without a better value before the run stops.", ge=1)
    min_delta: float = key(0.0, "A value is better if it differs by more than this.", ge=0)


class TrainingConfig(Section):
    """The steps of a run: their number, batch sizes, optimizer and schedule."""

    max_steps: int | None = key(None, ge=1)
    """Optimizer updates in the whole run. Unset, and no `num_train_epochs`: one epoch."""
    num_train_epochs: int | None = key(None, "Passes over the data, instead of `max_steps`.", ge=1)
    batch_size: int = key(
        8, "Samples in a micro-batch: forward and backward once, per data-parallel rank.", ge=1
    )
    eval_batch_size: int | None = key(
        None, "Samples in a micro-batch of evaluation; unset: `batch_size`.", ge=1
    )
    batch_norm_samples: int | None = key(None, ge=1)
    """Samples over which batch normalisation takes its statistics, a multiple of `batch_size`: with
    four times as many, those of four ranks together, as one process with that `batch_size` has
    them. Unset: a micro-batch."""
    eval_batches: int | None = key(None, ge=1)
    """Micro-batches of an evaluation, over all ranks; unset: all of the data."""
    gradient_accumulation_steps: int | None = key(None, ge=1)
    """Micro-batches per data-parallel rank and step; unset: follows from `global_batch_size`, else
    1. Together with a `global_batch_size`, it must agree with it."""
    global_batch_size: int | None = key(None, ge=1)
    """Samples in a step over all ranks = batch_size × gradient_accumulation_steps × data-parallel
    size. If it is set, accumulation follows from it, and the run is the same on any number of
    ranks."""
    optimizer: Annotated[str, Named(OPTIMIZERS)] = key(
        "adamw", "`adamw`, `adam`, `sgd`, `muon`, or `package.module:Name`."
    )
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer, for example `betas` or `momentum`."""
    learning_rate: float = key(1e-3, "The peak, before `lr_scaling`.", ge=0)
    lr_schedule: Annotated[str, Named(SCHEDULES)] = key("constant")
    """After the warm-up: constant (or null); linear or one half-cosine to `min_lr_ratio`; `wsd`
    (warm-up, stable, decay): constant, then linear over the last `wsd_decay_ratio` of the steps."""
    lr_scaling: Literal["none", "linear", "sqrt"] = key("none")
    """Multiply the learning rate by global batch / `base_batch_size`, or by its square root
    (advised for Adam). Applied once, and printed at the start."""
    base_batch_size: int | None = key(None, ge=1)
    """The global batch that `learning_rate` was chosen for. Needed by `lr_scaling`."""
    warmup_steps: int = key(
        0, "Steps of linear warm-up: step s (from 0) has the factor (s+1)/warmup_steps.", ge=0
    )
    min_lr_ratio: float = key(0.1, "The last learning rate over the peak.", ge=0, le=1)
    wsd_decay_ratio: float = key(
        0.2, "Under `wsd`, the share of the steps that decays.", gt=0, le=1
    )
    weight_decay: float | None = key(None, ge=0)
    """Decoupled weight decay (L2 for `adam` and `sgd`); unset: the default of the optimizer's class
    (`adamw`: 0.01, `adam` and `sgd`: 0)."""
    label_smoothing: float = key(0.0, ge=0, lt=1)
    """Of a language model's loss in training, not in evaluation: the target has this probability
    less, which all tokens share."""
    z_loss: float = key(0.0, ge=0)
    """The weight of log(Z)² in a language model's loss in training, not in evaluation; 1e-4 keeps
    logits from drifting."""
    loss_chunks: int = key(1, ge=1)
    """Compute a language model's loss in so many chunks of a micro-batch's positions, one after the
    other, each with its logits, forward and backward: the logits of the batch are never there."""
    gradient_clip: GradientClipConfig = Field(
        default_factory=lambda: GradientClipConfig(strategy="none")
    )
    """Clipping of the global gradient; unset, null or 0: off."""
    bad_numbers: BadNumbersConfig = section(
        BadNumbersConfig, "The reaction to NaN, infinity and spikes."
    )
    gradient_checkpointing: Literal["none", "full", "selective", "every_n", "sequential"] = key(
        "none"
    )
    """Recompute activations in the backward pass: of every block (`full`), of all but the matrix
    products (`selective`), of every n-th block (`every_n`), or of runs of blocks (`sequential`)."""
    gradient_checkpointing_every: int = key(2, ge=1)
    """The n of `every_n`, and the number of blocks in a run of `sequential`."""
    compile: bool = key(False)
    """Compile the blocks with torch.compile. From torch 2.14 on, compiled blocks that are
    recomputed draw other random numbers than those that are not, so that `gradient_checkpointing`
    changes the dropout of a compiled run there."""
    seed: int = key(1337, ge=0, lt=2**63)
    """Sample order, random numbers of the steps, and first values of a model that a config names,
    or that is on meta: one that is handed over has its own (`torch.manual_seed` before it is
    made)."""
    eval_steps: int | None = key(100, ge=1)
    """Steps between evaluations, in addition to the one at the end; null: only at the end."""
    eval_strategy: Literal["steps", "epoch"] = key("steps")
    """Evaluate every `eval_steps` steps, or at the end of each epoch."""
    early_stopping: EarlyStoppingConfig | None = key(None)
    """Stop when evaluations do not get better; unset: never; `{}`: defaults."""

    @field_validator("lr_schedule", "warmup_steps", mode="before")
    @classmethod
    def _null_is_off(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return cls.model_fields[info.field_name].default if value is None else value

    @property
    def accumulation(self) -> int:
        """Micro-batches per data-parallel rank and step, unless `global_batch_size` decides."""
        return self.gradient_accumulation_steps or 1

    @model_validator(mode="before")
    @classmethod
    def _optimizer_with_args(cls, value: Any) -> Any:
        """Split `optimizer: {name: adamw, args: {…}}` into `optimizer` and `optimizer_args`."""
        if isinstance(value, dict) and isinstance(value.get("optimizer"), dict):
            spec = value["optimizer"]
            if set(spec) <= {"name", "args"} and "name" in spec and not value.get("optimizer_args"):
                return {
                    **value,
                    "optimizer": spec["name"],
                    "optimizer_args": spec.get("args") or {},
                }
        return value


class LossScaleConfig(Section):
    """Scaling of the loss under fp16; after an overflow on any rank, all ranks skip the step."""

    dynamic: bool = key(True, "Adapt the scale; false: `initial_scale` throughout.")
    initial_scale: float = key(65536.0, "The first scale.", gt=0)
    growth_factor: float = key(2.0, "Factor after `growth_interval` steps in a row.", gt=1)
    backoff_factor: float = key(0.5, "Factor after an overflow.", gt=0, lt=1)
    growth_interval: int = key(2000, "Steps without overflow before the scale grows.", ge=1)
    min_scale: float = key(1.0, "The scale never falls below this.", gt=0)
    max_scale: float = key(float(2**24), "The scale never grows above this.", gt=0)
    history_size: int = key(100, "Recent steps whose scale and overflow are remembered.", ge=1)


class PrecisionConfig(Section):
    """The number formats of computation and parameters."""

    mode: Literal["auto", "fp32", "bf16", "fp16"] = key("fp32")
    """Autocast over fp32 parameters, the same under every strategy. `auto`: bf16 on a GPU that has
    it, else fp32."""
    param_dtype: Literal["fp32", "bf16"] = key("fp32")
    """The type of parameters. `bf16` gives other results, and is refused under
    `distributed.reproducible`."""
    fp8: Literal["none", "linears", "emulated"] = key("none")
    """`linears`: linear layers inside blocks multiply in float8, on NVIDIA GPUs with compute
    capability 8.9 or higher. `emulated`: the same rounding on any device, slowly. Needs torchao."""
    tf32: bool = key(False, "Allow TF32 in fp32 matrix products on GPUs that have it.")
    loss_scale: LossScaleConfig = section(LossScaleConfig, "Loss scaling, for `fp16` only.")

    def follow(self, mode: Literal["fp32", "bf16", "fp16"]) -> None:
        """Take the mode that another section names; one that is set here stays."""
        if self.mode == "auto" or "mode" not in self.model_fields_set:
            self.mode = mode


def build_object(spec: ObjectSpec, where: str, **further: Any) -> Any:
    """Import the class or function of a spec, and return the result of a call with its arguments.

    Arguments that are `{name: package.module:Name, …}` themselves are built first; `further`
    replaces the spec's. `where` is the config key, for messages.

    Raises UsageError: it can't be imported, or does not take these arguments.
    """
    target = check_object(spec, where, **further)
    positional = [
        _each_spec(value, lambda inner: build_object(inner, where)) for value in spec.positional
    ]
    keywords = {
        key: _each_spec(value, lambda inner: build_object(inner, where))
        for key, value in spec.args.items()
    }
    return target(*positional, **keywords | further)


def check_object(spec: ObjectSpec, where: str, **further: Any) -> Any:
    """Return the class or function of a spec, which is not called, if it takes the arguments.

    Raises UsageError: as from `build_object`.
    """
    target = load_object(spec.name, where)
    if not callable(target):
        fix = "name a class or a function, as package.module:Name"
        raise UsageError(f"{spec.name} can't be called", where=where, fix=fix)
    for value in (*spec.positional, *spec.args.values()):
        _each_spec(value, lambda inner: check_object(inner, where))
    require_arguments(target, spec.args | further, spec.name, f"{where}.args", *spec.positional)
    return target


def _each_spec(value: Any, work: Callable[[ObjectSpec], Any]) -> Any:
    """Return `value` with every object that it names replaced by the result of `work`.

    An object is named `{name: package.module:Name, …}`.
    """
    if isinstance(value, dict):
        if set(value) <= {"name", "args", "positional"} and ":" in str(value.get("name", "")):
            return work(ObjectSpec.model_validate(value))
        return {key: _each_spec(inside, work) for key, inside in value.items()}
    if isinstance(value, list):
        return [_each_spec(inside, work) for inside in value]
    return value
