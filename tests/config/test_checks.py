"""What can't be said together is refused, with what to write instead; what can be is not."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import Config, check, config_from, load_config, require_runnable
from lockstep.config.checks_launch import launch_contradictions
from lockstep.errors import UsageError, refuse
from tests.config.shared import refusal

D = "distributed."
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"training.max_steps": 9, "training.num_train_epochs": 2},
        ("9 steps", "2 epochs", "keep one"),
    ),
    (
        {"training.global_batch_size": 30, "training.batch_size": 8},
        ("30 = 3 × 8 + 6", "24 or 32", "5, 6, 10"),
    ),
    (
        {"training.global_batch_size": 4, "training.batch_size": 8},
        ("4 = 0 × 8 + 4", "global_batch_size 8", "1, 2, 4"),
    ),
    (
        {
            "training.global_batch_size": 64,
            "training.batch_size": 8,
            "training.gradient_accumulation_steps": 3,
        },
        (
            "8 × gradient_accumulation_steps 3 ×",
            "64 = 2 × 24 + 16",
            "leave gradient_accumulation_steps out",
        ),
    ),
    ({"training.lr_scaling": "sqrt"}, ("lr_scaling: sqrt", "base_batch_size")),
    ({"data.prefetch_factor": 2}, ("no workers", "num_workers: 1")),
    ({"data.persistent_workers": True}, ("no workers", "num_workers: 1")),
    ({"precision.mode": "fp16", "precision.param_dtype": "bf16"}, ("fp16", "mode: bf16")),
    ({"precision.fp8": "emulated", "precision.mode": "fp16"}, ("under fp16", "mode: bf16")),
    (
        {"precision.fp8": "emulated", D + "strategy": "dp"},
        ("another step under dp", "a scale of its own", "ddp"),
    ),
    (
        {D + "reproducible": True, "precision.fp8": "linears"},
        ("equal bits", "fp8: linears", "reproducible: false"),
    ),
    ({"precision.loss_scale.initial_scale": 0.5}, ("0.5 is not between", "initial_scale")),
    ({D + "strategy": "fsdp", D + "ddp.compression.kind": "fp16"}, ("DDP's", "reduce_dtype: fp16")),
    ({D + "strategy": "fsdp", D + "ddp.compression.kind": "powersgd"}, ("DDP's", "strategy: ddp")),
    (
        {D + "strategy": "dp", D + "ddp.compression.kind": "bf16"},
        ("the strategy is dp", "kind: none"),
    ),
    (
        {D + "strategy": "pipeline", D + "ddp.compression.kind": "bf16"},
        ("the strategy is pipeline", "kind: none"),
    ),
    (
        {D + "strategy": "accelerate", D + "ddp.compression.kind": "powersgd"},
        ("PowerSGD", "strategy: ddp"),
    ),
    (
        {D + "ddp.compression": {"kind": "powersgd", "start_step": 1}},
        ("start at step 1", "start_step: 2"),
    ),
    (
        {D + "reproducible": True, "precision.param_dtype": "bf16"},
        ("bits", "precision.param_dtype: fp32"),
    ),
    (
        {D + "reproducible": True, D + "ddp.compression.kind": "bf16"},
        ("bits", "compression.kind: none"),
    ),
    ({D + "reproducible": True, D + "fsdp.reduce_dtype": "bf16"}, ("bits", "reduce_dtype: fp32")),
    (
        {D + "reproducible": True, D + "ddp.static_graph": True},
        ("up the tree", "static_graph: false"),
    ),
    ({D + "reproducible": True, D + "strategy": "dp"}, ("not for dp", "strategy: ddp")),
    ({D + "backend": "nccl", D + "device": "cpu"}, ("nccl is for GPUs", "backend: gloo")),
    ({D + "backend": "xccl", D + "device": "cpu"}, ("xccl is for GPUs", "backend: gloo")),
    (
        {D + "device": "mps", D + "strategy": "ddp"},
        ("mps has no process groups", "strategy: single"),
    ),
    (
        {D + "device": "mps", D + "reproducible": True},
        ("mps has no float64", "reproducible: false"),
    ),
    (
        {D + "fsdp.cpu_offload": True, D + "device": "cpu"},
        ("nothing to offload", "cpu_offload: false"),
    ),
    ({D + "accelerate.cpu": True, D + "device": "cuda"}, ("disagree", "leave accelerate.cpu out")),
    (
        {D + "accelerate.mixed_precision": "bf16", "precision.mode": "fp32"},
        ("disagree", "leave mixed_precision out"),
    ),
    ({"checkpoint.load_best": True}, ("which checkpoint is the best", "keep_best: eval_loss")),
    (
        {"checkpoint.keep_best": "eval_loss", "checkpoint.save_strategy": "none"},
        ("no checkpoint", "save_strategy: steps"),
    ),
    *(
        (
            {
                D + "strategy": "pipeline",
                D + "pipeline": {"schedule": schedule, "stages_per_rank": 2},
                **more,
            },
            words,
        )
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        for more, words in (
            ({"training.compile": True}, (schedule, "compile: false")),
            ({D + "shard_size": 2}, (schedule, "full_shard", "sharding_strategy: shard_grad_op")),
        )
    ),
    (
        {D + "strategy": "pipeline", D + "pipeline.schedule": "ZBVZeroBubble"},
        ("takes 2 stages", "stages_per_rank: 2"),
    ),
    (
        {D + "strategy": "pipeline", D + "pipeline.stages_per_rank": 2},
        ("1F1B takes 1 stage", "Interleaved1F1B"),
    ),
]


@pytest.mark.parametrize(("settings", "words"), CASES)
def test_contradictions_are_refused_with_what_to_write(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        config_from(settings)
    for word in words:
        assert word in str(caught.value), str(caught.value)


FINE: list[dict[str, Any]] = [
    {"training.max_steps": 2, "training.warmup_steps": 100},  # the first steps of a long run
    {"training.max_steps": 1},
    {"training.warmup_steps": 100, "training.num_train_epochs": 1},
    {
        "training.global_batch_size": 32,
        "training.batch_size": 8,
        "training.gradient_accumulation_steps": 2,
    },
    {"training.lr_scaling": "linear", "training.base_batch_size": 32},
    {"data.num_workers": 2, "data.prefetch_factor": 2, "data.persistent_workers": True},
    {D + "strategy": "ddp", D + "ddp.compression.kind": "powersgd"},
    {
        D + "ddp.compression": {
            "kind": "powersgd",
            "start_step": 0,
            "error_feedback": False,
            "warm_start": False,
        }
    },
    {D + "strategy": "fsdp", D + "ddp.compression.kind": "auto"},
    {D + "strategy": "pipeline", D + "pipeline": {"schedule": "DualPipeV", "stages_per_rank": 2}},
    {
        D + "strategy": "pipeline",
        D + "pipeline": {"schedule": "DualPipeV", "stages_per_rank": 2},
        D + "shard_size": 2,
        D + "fsdp.sharding_strategy": "shard_grad_op",
    },
    {D + "strategy": "pipeline", D + "shard_size": 2, "training.compile": True},
    {D + "reproducible": True, "precision.mode": "bf16"},
    {D + "accelerate.mixed_precision": "fp16"},
    {D + "accelerate.mixed_precision": "no", "precision.mode": "fp32"},
]


@pytest.mark.parametrize("settings", FINE)
def test_what_agrees_is_taken(settings: dict[str, Any]) -> None:
    check(config_from(settings))


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("split_batches", False, "training.batch_size"),
        ("dispatch_batches", True, "data.num_workers"),
        ("even_batches", True, "no sample is repeated"),
        ("use_seedable_sampler", True, "training.seed"),
        ("gradient_accumulation_plugin", {"num_steps": 4}, "training.gradient_accumulation_steps"),
    ],
)
def test_trap_66_and_41_what_accelerate_says_about_data_is_refused(
    name: str, value: Any, instead: str
) -> None:
    """`even_batches` repeats samples to fill the last batch; others let Accelerate share out data
    behind the loader.
    """
    with pytest.raises(UsageError) as caught:
        config_from({f"distributed.accelerate.{name}": value})
    assert f"distributed.accelerate.{name}" in str(caught.value)
    assert instead in str(caught.value)


def test_a_contradiction_names_the_lines(tmp_path: Path) -> None:
    message = refusal(tmp_path, "training:\n  global_batch_size: 9\n", "training.batch_size=2")
    assert "training.global_batch_size (run.yaml:2)" in message
    assert "training.batch_size (the override 'training.batch_size=2')" in message
    message = refusal(tmp_path, "training:\n  lr_scaling: linear\n")
    assert "training.base_batch_size (unset)" in message


def test_several_contradictions_come_in_one_message(tmp_path: Path) -> None:
    message = refusal(tmp_path, "training: {lr_scaling: linear}\ndata: {prefetch_factor: 2}\n")
    assert message.startswith("run.yaml has 2 mistakes")


def test_check_of_a_config_that_was_changed_in_python() -> None:
    config = Config()
    check(config)
    config.training.global_batch_size = 9
    check(config)  # a DataLoader may still bring its own batch size
    config.training.batch_size = 8
    with pytest.raises(UsageError, match="9 = 1 × 8 \\+ 1"):
        check(config)


def test_a_file_that_is_run_names_a_model_and_data() -> None:
    for settings, missing in [({}, "model.name"), ({"model.name": "bdh"}, "data.name")]:
        with pytest.raises(UsageError, match=missing):
            require_runnable(config_from(settings))
    require_runnable(config_from({"model.name": "bdh", "data.name": "digits"}))
    load_config("trainers/fsdp.yaml")


def test_what_happens_when_a_rank_dies_fits_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = Config().replaced({"distributed.on_failure": "stop"})
    copies = Config().replaced({"checkpoint.memory_steps": 1})
    going_on = {"distributed.on_failure": "continue", "training.global_batch_size": 8}
    goes_on = Config().replaced({**going_on, "distributed.strategy": "fsdp"})
    no_size = goes_on.replaced({"training.global_batch_size": None})
    rarely = goes_on.replaced({"distributed.strategy": "diloco"})
    cases: list[tuple[Config, dict[str, Any], tuple[str, ...]]] = [
        (stops, {"max_restarts": 2}, ("--max-restarts 2", "leave --max-restarts out")),
        (goes_on, {"builds_again": False}, ("build their run again", "`lockstep train`")),
        (goes_on, {"device_type": "cuda"}, ("for gloo", "--max-restarts N")),
        (rarely, {}, ("not for strategy diloco", "write strategy: ddp or fsdp or")),
        (Config().replaced(going_on), {}, ("not for strategy auto", "pipeline")),
        (no_size, {}, ("needs training.global_batch_size", "another training")),
    ]
    usual = {"max_restarts": 0, "builds_again": True}
    usual |= {"device_type": "cpu"}
    for config, changes, words in cases:
        found = launch_contradictions(config, **{**usual, **changes})
        with pytest.raises(UsageError) as caught:
            refuse(found)
        for word in words:
            assert word in str(caught.value)
    for config in (stops, copies, Config(), goes_on):
        refuse(launch_contradictions(config, **usual))
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UsageError, match="is for Linux"):
        refuse(launch_contradictions(goes_on, **usual))
