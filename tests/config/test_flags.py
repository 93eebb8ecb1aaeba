"""Short names of the command line and of Python's Trainer."""

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import FLAGS, apply_flags, as_overrides, config_from
from lockstep.config.flags import BY_NAME
from lockstep.config.keys import all_keys
from lockstep.errors import UsageError
from tests.config.shared import loaded


def test_the_flags_that_are_promised() -> None:
    assert [flag.option for flag in FLAGS] == [
        *(
            "--strategy",
            "--batch-size",
            "--gradient-accumulation-steps",
            "--grad-clip",
            "--precision",
            "--compile",
        ),
        *("--max-steps", "--learning-rate", "--allow-changes", "--seed"),
    ]
    assert all(flag.key in all_keys() for flag in FLAGS)
    assert [flag.option for flag in FLAGS if flag.switch] == ["--compile", "--allow-changes"]


def test_from_the_command_line(tmp_path: Path) -> None:
    typed = {
        "strategy": "fsdp",
        "batch-size": "4",
        "gradient_accumulation_steps": "2",
        "grad-clip": "0",
        "precision": "bf16",
        "compile": True,
        "max-steps": "10",
        "learning-rate": "2e-4",
        "seed": "3",
    }
    config = loaded(
        tmp_path,
        "training: {gradient_clip: {strategy: adaptive, value: 0.1}}\n",
        *as_overrides(apply_flags(typed)),
    )
    assert config.distributed.strategy == "fsdp"
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (4, 2)
    assert config.training.gradient_clip.strategy == "none"
    assert config.precision.mode == "bf16"
    assert config.training.compile
    assert (config.training.max_steps, config.training.learning_rate, config.training.seed) == (
        10,
        2e-4,
        3,
    )


def test_a_grad_clip_is_a_norm(tmp_path: Path) -> None:
    clip = loaded(
        tmp_path, "{}", *as_overrides(apply_flags({"grad_clip": "0.5"}))
    ).training.gradient_clip
    assert (clip.strategy, clip.value) == ("norm", 0.5)


def test_from_python() -> None:
    config = config_from(
        apply_flags(
            {
                "strategy": "ddp",
                "grad_clip": 0,
                "warmup_steps": 5,
                "device": "cpu",
                "distributed.fsdp.forward_prefetch": True,
                "checkpoint": {"save_steps": 7, "async": False},
            }
        )
    )
    assert config.distributed.strategy == "ddp"
    assert config.training.gradient_clip.strategy == "none"
    assert config.training.warmup_steps == 5
    assert config.distributed.device == "cpu"
    assert config.distributed.fsdp.forward_prefetch
    assert (config.checkpoint.save_steps, config.checkpoint.async_) == (7, False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("precison", ("unknown setting precison", "write precision")),
        ("accumulation_steps", ("write gradient_accumulation_steps=…",)),
        ("max_grad_norm", ("write gradient_clip=…",)),
        ("devices", ("lockstep launch --nproc-per-node N",)),
        ("warmup_step", ("write warmup_steps",)),
        ("qqq", ("the short names are strategy",)),
        ("name", ("model.name or data.name", "dotted")),
        ("metricx", ("write metric, which is training.early_stopping.metric",)),
        ("nmae", ("write model.name or data.name",)),
        ("save", ("the short names are strategy",)),
    ],
)
def test_other_names_are_refused(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        apply_flags({name: 1})
    for word in words:
        assert word in str(caught.value)


def test_the_name_that_is_offered_is_taken() -> None:
    """A last letter too many: the advice names one setting, which exists."""
    asked = 0
    for name in {info.name for info in all_keys().values()} | BY_NAME.keys():
        try:
            apply_flags({f"{name}x": 1})
        except UsageError as error:
            written = re.findall(r"write ([a-z_.]+)(?=$|,| or )| or ([a-z_.]+)", error.fix or "")
            asked += len(written)
            for first, other in written:
                apply_flags({first or other: 1})
    assert asked > 100


def test_a_switch_in_place_of_the_word_none() -> None:
    for value in (False, None):
        with pytest.raises(UsageError, match="write none"):
            config_from(apply_flags({"debug": value}))


def test_dotted_keys_and_sections_are_checked_by_the_schema() -> None:
    with pytest.raises(UsageError, match="write training"):
        config_from(apply_flags({"trainig.seed": 1}))
    with pytest.raises(UsageError, match=r"write training\.seed"):
        config_from(apply_flags({"training": {"sed": 1}}))


@pytest.mark.parametrize(
    "settings", [{"world_size": 2}, {"rank": 1}, {"device": 0}, {"device": "cuda:1"}]
)
def test_what_the_launcher_knows_is_left_out(settings: dict[str, Any]) -> None:
    """`Trainer(model, optimizer, device=rank)`; not `shard_size`, nor the rank of a compression."""
    with pytest.raises(UsageError) as caught:
        config_from(apply_flags(settings))
    assert "leave it out" in str(caught.value)
    assert "shard_size" not in str(caught.value)
