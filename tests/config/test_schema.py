"""The schema holds every documented key, with its type, its bounds and its words."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep.config import Config, config_from, load_config
from lockstep.config.keys import all_keys
from lockstep.errors import UsageError
from tests.config.shared import loaded, written

DOCUMENTED = {
    "model": "name args",
    "data": (
        "name args num_workers prefetch_factor pin_memory persistent_workers shuffle order"
        " drop_last"
    ),
    "training": (
        "max_steps num_train_epochs batch_size eval_batch_size gradient_accumulation_steps"
        " global_batch_size optimizer optimizer_args learning_rate lr_schedule lr_scaling"
        " base_batch_size warmup_steps min_lr_ratio wsd_decay_ratio weight_decay gradient_clip"
        " gradient_checkpointing gradient_checkpointing_every compile seed eval_steps eval_batches"
        " bad_numbers"
    ),
    "training.bad_numbers": "action spike_factor window patience",
    "training.gradient_clip": "strategy value",
    "precision": "mode param_dtype tf32 loss_scale",
    "precision.loss_scale": (
        "dynamic initial_scale growth_factor backoff_factor growth_interval min_scale max_scale "
        "history_size"
    ),
    "distributed": (
        "strategy device backend init_method timeout_seconds hang debug env reproducible"
        " replicate_size shard_size pipeline_size ddp fsdp pipeline accelerate"
    ),
    "distributed.hang": "factor seconds",
    "distributed.ddp": (
        "bucket_cap_mb find_unused_parameters static_graph gradient_as_bucket_view compression"
    ),
    "distributed.ddp.compression": "kind rank start_step warm_start error_feedback",
    "distributed.fsdp": (
        "sharding_strategy auto_wrap_policy accumulate min_num_params forward_prefetch "
        "backward_prefetch cpu_offload reduce_dtype buffer_dtype"
    ),
    "distributed.pipeline": "split_spec stages_per_rank schedule n_microbatches",
    "distributed.accelerate": (
        "device_placement cpu mixed_precision split_batches dispatch_batches even_batches "
        "use_seedable_sampler gradient_accumulation_plugin"
    ),
    "checkpoint": (
        "save_strategy save_steps save_total_limit keep_best format async retries on_failure resume"
    ),
    "monitor": "log_steps sinks callbacks profile memory",
    "monitor.profile": "wait warmup active record_shapes profile_memory with_stack ranks dir",
    "monitor.memory": "threshold alert_on_imbalance",
}


def test_every_documented_key_is_there() -> None:
    """Names that people have in their files stay; more may be added."""
    documented = {"loss_fn", *(section for section in DOCUMENTED if "." not in section)}
    documented |= {
        f"{section}.{name}" for section, names in DOCUMENTED.items() for name in names.split()
    }
    assert documented <= set(all_keys())


def test_every_key_says_what_it_is_and_what_it_takes() -> None:
    for facts in all_keys().values():
        assert len(facts.description) > 4, facts.key
        assert facts.takes, facts.key


def test_defaults() -> None:
    config = Config()
    assert config.model.name is None
    assert config.training.batch_size == 8
    assert config.training.learning_rate == 1e-3
    assert config.training.seed == 1337
    assert config.training.gradient_clip.model_dump() == {"strategy": "none", "value": 1.0}
    assert (
        config.training.lr_schedule,
        config.training.warmup_steps,
        config.training.weight_decay,
    ) == (
        "constant",
        0,
        None,
    )
    assert config.precision.mode == "fp32"
    assert config.distributed.strategy == "auto"
    assert config.distributed.timeout_seconds == 1800
    assert config.distributed.fsdp.accumulate == "sharded"
    assert config.distributed.fsdp.min_num_params == 1_000_000
    assert config.distributed.pipeline.schedule == "1F1B"
    assert config.checkpoint.async_ is True
    assert config.checkpoint.save_steps == 100
    assert config.checkpoint.save_total_limit == 3
    assert config.monitor.sinks == ["console", "jsonl", "tensorboard"]
    assert config.monitor.profile is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.batch_size", 0),
        ("training.batch_size", True),
        ("training.batch_size", 2.0),
        ("training.learning_rate", -1e-3),
        ("training.learning_rate", float("nan")),
        ("training.min_lr_ratio", 1.5),
        ("training.gradient_clip", -1),
        ("training.seed", -1),
        ("training.compile", 1),
        ("precision.mode", "fp8"),
        ("precision.loss_scale.growth_factor", 1.0),
        ("precision.loss_scale.backoff_factor", 1.0),
        ("distributed.init_method", "file:///tmp/x"),
        ("distributed.env", {"A": True}),
        ("distributed.pipeline.split_spec", {"layers.1": "middle"}),
        ("distributed.replicate_size", 0),
        ("loss_fn", "CrossEntropyLoss"),
        ("monitor.memory.threshold", 1.1),
        ("monitor.sinks", ["stdout"]),
        ("monitor.callbacks", ["no_colon"]),
        ("checkpoint.async", "yes"),
    ],
)
def test_values_out_of_bounds_or_of_another_type_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key.replace(".", r"\.")):
        config_from({key: value})


def test_short_forms_mean_the_long_ones(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """
        loss_fn: torch.nn:CrossEntropyLoss
        training: {gradient_clip: 0.5, optimizer: {name: adamw, args: {betas: [0.9, 0.95]}}}
        monitor: {callbacks: [mine.logs:Logger, {name: mine.logs:Other, args: {every: 2}}], profile: {}}
        distributed: {env: {NCCL_IB_DISABLE: 1}, fsdp: {auto_wrap_policy: [DecoderBlock]}}
        """,
    )
    assert config.loss_fn is not None
    assert config.loss_fn.name == "torch.nn:CrossEntropyLoss"
    assert config.training.gradient_clip.model_dump() == {"strategy": "norm", "value": 0.5}
    assert (config.training.optimizer, config.training.optimizer_args) == (
        "adamw",
        {"betas": [0.9, 0.95]},
    )
    assert [(spec.name, spec.args) for spec in config.monitor.callbacks] == [
        ("mine.logs:Logger", {}),
        ("mine.logs:Other", {"every": 2}),
    ]
    assert config.monitor.profile is not None
    assert config.distributed.env == {"NCCL_IB_DISABLE": "1"}
    assert config.distributed.fsdp.auto_wrap_policy == ["DecoderBlock"]
    assert config_from({"training.gradient_clip": 0}).training.gradient_clip.strategy == "none"
    assert (
        config_from({"training.gradient_clip.value": 0.5}).training.gradient_clip.strategy == "norm"
    )


def test_null_switches_off_what_a_recipe_asks_for() -> None:
    recipe = load_config("trainers/ddp.yaml")
    assert (recipe.training.lr_schedule, recipe.training.gradient_clip.strategy) == (
        "cosine",
        "norm",
    )
    keys = ("lr_schedule", "warmup_steps", "weight_decay", "gradient_clip")
    assert recipe.replaced({f"training.{key}": None for key in keys}).training == Config().training


def test_a_section_whose_lines_are_all_comments_has_its_defaults(tmp_path: Path) -> None:
    assert (
        loaded(tmp_path, "training:\n  # batch_size: 3\ndistributed:\n  fsdp:\n  env:\n")
        == Config()
    )


def test_accelerate_speaks_for_precision_and_device() -> None:
    config = config_from(
        {"distributed.accelerate.mixed_precision": "no", "distributed.accelerate.cpu": True}
    )
    assert config.precision.mode == "fp32"
    assert config.distributed.device == "cpu"


def test_replaced_leaves_the_first_as_it_was() -> None:
    config = config_from({"model.args": {"n_layer": 2}, "training.seed": 4})
    other = config.replaced(
        {"model.args": {"n_head": 2}, "distributed": {"fsdp": {"cpu_offload": True}}}
    )
    assert other.model.args == {"n_head": 2}
    assert other.training.seed == 4
    assert other.distributed.fsdp.cpu_offload
    assert other.distributed.fsdp.min_num_params == config.distributed.fsdp.min_num_params
    assert config.model.args == {"n_layer": 2}


def test_loading_the_schema_loads_neither_torch_nor_jinja() -> None:
    code = (
        "import sys; import lockstep.config.flags, lockstep.config.names;"
        " lockstep.config.names.advice_for('x');assert 'pydantic' not in sys.modules and 'yaml' not"
        " in sys.modules;from lockstep.config import Config, load_config; Config().to_yaml();assert"
        " 'torch' not in sys.modules and 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_text_that_reads_like_a_template_is_written_as_text(tmp_path: Path) -> None:
    args = {
        "a": "as !calc '{{ x }}'",
        "-- block b": "{{ y }}",
        "c": "x\n\n-- extends 'z'\n",
        "!list": float("inf"),
    }
    config = config_from({"model.args": args})
    assert load_config(written(tmp_path, config.to_yaml())).model.args == args


# ---- a config that is written and read is the same config ----

awkward = st.sampled_from(
    [
        "yes",
        "on",
        "null",
        "~",
        "2e-4",
        "1_000",
        "0x1f",
        "012",
        "1.0",
        ".5",
        "a: b",
        "- a",
        "# no",
        "2020-01-01",
        "<<",
        "!x",
        "&a",
        "*a",
        "-- block x",
        "== super()",
        "{{ x }}",
        "a !calc '{{ x }}'",
        "a\nb",
        " a ",
        "",
        "true",
        "é\t√",
        "=",
        "|",
        "'",
        '"',
    ]
)
texts = awkward | st.text(st.characters(blacklist_categories=["Cs", "Cc", "Co"]), max_size=20)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(texts, trees, max_size=3)
FREE: dict[str, st.SearchStrategy[Any]] = {
    "model.name": texts.filter(bool),
    "model.args": arguments,
    "data.args": arguments,
    "training.optimizer_args": arguments,
    "training.learning_rate": st.floats(0, 1e300),
    "training.seed": st.integers(0, 2**63 - 1),
    "training.gradient_clip": st.floats(1e-300, 1e300) | st.just(0),
    "distributed.env": st.dictionaries(texts, texts, max_size=3),
    "distributed.pipeline.split_spec": st.dictionaries(
        texts, st.sampled_from(["end", "beginning"]), max_size=3
    ),
    "distributed.fsdp.auto_wrap_policy": texts | st.lists(texts, max_size=3),
    "loss_fn": st.fixed_dictionaries(
        {"name": st.just("a.b:C"), "args": arguments, "positional": st.lists(trees)}
    ),
    "monitor.callbacks": st.lists(
        st.fixed_dictionaries({"name": st.just("a:B"), "args": arguments}), max_size=2
    ),
    "checkpoint.resume": texts.filter(bool),
}
CONTRADICTED = (
    "model.lora",
    "checkpoint.load_best",
    *("training.lr_scaling", "precision.param_dtype", "precision.fp8", "data.persistent_workers"),
    *(
        "distributed.reproducible",
        "distributed.pipeline.schedule",
        "distributed.strategy",
        "distributed.device",
    ),
    "distributed.accelerate",
)
drawn = {key: facts for key, facts in all_keys().items() if not key.startswith(CONTRADICTED)}
chosen = {key: st.sampled_from(facts.choices) for key, facts in drawn.items() if facts.choices}
for several in ("monitor.sinks", "distributed.open_axes"):
    chosen[several] = st.lists(chosen[several], max_size=3)
switches = {key: st.booleans() for key, facts in drawn.items() if facts.takes == "true or false"}


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.fixed_dictionaries({}, optional={**chosen, **switches, **FREE}))
def test_yaml_gives_the_same_config_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    config = config_from(values)
    path = written(tmp_path_factory.getbasetemp(), config.to_yaml(), "round-trip.yaml")
    assert load_config(path) == config
