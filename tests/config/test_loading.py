"""Files, what they extend, and overrides; and what is said about every bad input."""

import os
from pathlib import Path

import pytest

from lockstep.config import Config, load_config
from lockstep.config.files import SHIPPED, shipped_names
from lockstep.errors import UsageError
from tests.config.shared import loaded, refusal, written
from tests.sampled import quick_and_full


def test_numbers_and_words_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    args = loaded(
        tmp_path,
        "model: {args: {a: 2e-4, b: 1.e+3, c: on, d: no, e: 012, f: 0x1F, g: 0o17, h: 2020-01-01,"
        ' i: .5, j: -.inf, k: "3", l: ~, m: TRUE, n: 1_000, o: 1:30, p: 0b1, q: +7, r: -0.0,'
        " 1: y}}",
    ).model.args
    numbers = {
        "a": 2e-4,
        "b": 1000.0,
        "e": 12,
        "f": 31,
        "g": 15,
        "i": 0.5,
        "j": float("-inf"),
        "q": 7,
        "r": 0.0,
    }
    words = {
        "c": "on",
        "d": "no",
        "h": "2020-01-01",
        "k": "3",
        "n": "1_000",
        "o": "1:30",
        "p": "0b1",
        "1": "y",
    }
    assert args == {**numbers, **words, "l": None, "m": True}
    assert isinstance(args["e"], int)


def test_anchors_aliases_and_merge_keys(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        "model: {args: &s {n_layer: 2, n_head: 4}}\ndata:\n  args:\n    <<: *s\n    n_head: 8\n   "
        " as_is: *s\n",
    )
    assert config.data.args == {"n_layer": 2, "n_head": 8, "as_is": {"n_layer": 2, "n_head": 4}}


def test_extends_merges_deeply_relative_to_the_file(tmp_path: Path) -> None:
    written(
        tmp_path,
        "training: {batch_size: 2, seed: 5}\nmodel: {name: bdh, args: {n_layer: 2}}\n",
        "deep/base.yaml",
    )
    written(
        tmp_path,
        "extends: base.yaml\ntraining: {seed: 6}\nmodel: {args: {n_head: 4}}\n",
        "deep/middle.yaml",
    )
    config = loaded(
        tmp_path, "extends: deep/middle.yaml\ntraining: {max_steps: 7}\n", "training.max_steps=8"
    )
    assert (config.training.batch_size, config.training.seed, config.training.max_steps) == (
        2,
        6,
        8,
    )
    assert (config.model.name, config.model.args) == ("bdh", {"n_layer": 2, "n_head": 4})


def test_a_section_of_comments_keeps_what_the_parent_says_and_null_does_not(tmp_path: Path) -> None:
    written(tmp_path, "training: {seed: 5}\nloss_fn: {name: a.b:C, args: {d: 1}}\n", "base.yaml")
    config = loaded(tmp_path, "extends: base.yaml\ntraining:\n  # seed: 6\nloss_fn: null\n")
    assert config.training.seed == 5
    assert config.loss_fn is None


EVERY = [*shipped_names(), "trainers/accel_trainer.yaml", "trainers/pipeline_trainer.yaml"]
# tests/test_ready_configs.py loads each of those that are ready
READY = [name for name in EVERY if name.startswith("ready/")]


@pytest.mark.parametrize("name", quick_and_full(EVERY, sorted({*EVERY} - {*READY}) + READY[::6]))
def test_every_config_that_ships_can_be_loaded_and_extended(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert loaded(tmp_path, f"extends: {name}\n") == config
    assert loaded(tmp_path, f"-- extends '{name}'\n") == config


def test_the_trainers_that_ship_are_their_strategies() -> None:
    strategies = {
        name: load_config(f"trainers/{name}.yaml").distributed.strategy
        for name in ("single", "dp", "ddp", "fsdp", "pipeline", "hybrid", "accelerate", "diloco")
    }
    assert strategies == {**{name: name for name in strategies}, "hybrid": "fsdp"}
    assert load_config("trainers/hybrid.yaml").distributed.fsdp.sharding_strategy == "hybrid_shard"
    assert load_config("trainers/accel_trainer.yaml").distributed.strategy == "accelerate"
    assert load_config("trainers/pipeline_trainer.yaml").distributed.strategy == "pipeline"
    assert all((SHIPPED / name).read_text().startswith("#") for name in shipped_names())


def test_overrides_are_typed_and_applied_in_order(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        "training: {batch_size: 4}\ndistributed: {pipeline: {split_spec: {layers.1: end}}}\n",
        "training.batch_size=8",
        "training.batch_size=16",
        "training.learning_rate=2e-4",
        "training.compile=true",
        "monitor.sinks=[jsonl]",
        "distributed.pipeline.split_spec.layers.4=end",
        "distributed.env.NCCL_DEBUG=INFO",
        "distributed.fsdp={cpu_offload: true}",
        "model.args.rope.theta=10",
        "checkpoint.resume=/runs/a=b",
        "checkpoint.save_total_limit=",
        "loss_fn=torch.nn:CrossEntropyLoss",
    )
    assert config.training.batch_size == 16
    assert config.training.learning_rate == 2e-4
    assert config.training.compile is True
    assert config.monitor.sinks == ["jsonl"]
    assert config.distributed.pipeline.split_spec == {"layers.1": "end", "layers.4": "end"}
    assert config.distributed.env == {"NCCL_DEBUG": "INFO"}
    assert config.distributed.fsdp.cpu_offload
    assert config.distributed.fsdp.sharding_strategy == "full_shard"
    assert config.model.args == {"rope": {"theta": 10}}
    assert config.checkpoint.resume == "/runs/a=b"
    assert config.checkpoint.save_total_limit is None


def test_from_file(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff---\ntraining: {seed: 3}\n")
    assert Config.from_file(path, ["training.batch_size=2"]).training.batch_size == 2
    assert Config.from_file(str(path)).training.seed == 3


# ---- what is refused, and in which words ----


@pytest.mark.fault(
    "configuration: an unknown key",
    "training.lerning_rate",
    "refused with file, line and the nearest key; exit code 2",
)
@pytest.mark.parametrize(
    ("text", "line", "key", "instead"),
    [
        ("training:\n  batchsize: 3\n", 2, "training.batchsize", "training.batch_size"),
        ("model: {name: bdh}\ndistribted:\n  strategy: fsdp\n", 2, "distribted", "distributed"),
        (
            "distributed:\n\n  fsdp:\n    shard_strategy: x\n",
            4,
            "distributed.fsdp.shard_strategy",
            "sharding_strategy",
        ),
        (
            "precision:\n  loss_scale: {init_scale: 4}\n",
            2,
            "precision.loss_scale.init_scale",
            "initial_scale",
        ),
        ("save_steps: 3\n", 1, "save_steps", "checkpoint.save_steps"),
        ("checkpoint:\n  max_steps: 3\n", 2, "checkpoint.max_steps", "training.max_steps"),
        (
            "monitor:\n  callbacks:\n    - name: a:B\n      arg: 1\n",
            4,
            "monitor.callbacks[0].arg",
            "args",
        ),
        (
            "training:\n  per_device_train_batch_size: 4\n",
            2,
            "training.per_device_train_batch_size",
            "batch_size",
        ),
        (
            "distributed:\n  fsdp: {shrding: x}\n",
            2,
            "distributed.fsdp.shrding",
            "distributed.fsdp.sharding_strategy",
        ),
        ("training:\n  zzz: 4\n", 2, "training.zzz", "max_steps"),
        ("training:\n  async_: 4\n", 2, "training.async_", "async"),
        (
            "monitor:\n  metrics: {f1: a:b}\n",
            2,
            "monitor.metrics",
            "the keys of monitor are log_steps, ",
        ),
        (
            "monitor:\n  metrics: f1\n",
            2,
            "monitor.metrics",
            "experiment; a similar name is training.early_stopping.metr",
        ),
    ],
)
def test_trap_39_unknown_keys_are_refused_with_file_line_and_the_nearest(
    tmp_path: Path, text: str, line: int, key: str, instead: str
) -> None:
    """A key that is not known was ignored, a whole `distributed:` section once."""
    message = refusal(tmp_path, text)
    assert f"run.yaml:{line}" in message
    assert f"unknown key {key}\n" in message
    assert instead in message.partition("do: ")[2]
    assert "pydantic" not in message


def test_trap_39_in_overrides_and_in_files_that_are_extended(tmp_path: Path) -> None:
    """An override of a key that is not known is refused like a line of a file, and names itself."""
    assert (
        "training.batch_size"
        in refusal(tmp_path, "{}", "training.batchsize=3").partition("do: ")[2]
    )
    assert "override 'training.batchsize=3'" in refusal(tmp_path, "{}", "training.batchsize=3")
    assert "write distributed" in refusal(tmp_path, "{}", "distribted.strategy=ddp")
    written(tmp_path, "training:\n  sed: 3\n", "base.yaml")
    message = refusal(tmp_path, "extends: base.yaml\n")
    assert "base.yaml:2" in message
    assert "training.seed" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "training:\n  batch_size: many\n",
            ("run.yaml:2", "training.batch_size", "a whole number ≥ 1", "'many'"),
        ),
        (
            "training:\n  batch_size: '8'\n",
            ("run.yaml:2", "a whole number", "write 8 without quotes"),
        ),
        ("training:\n  max_steps: 1_000\n", ("run.yaml:2", "'1_000'", "write 1000")),
        ("training:\n  compile: 'no'\n", ("run.yaml:2", "true or false", "'no'")),
        ("training: 3\n", ("run.yaml:1", "training should be a mapping, but is 3")),
        ("precision: bf16\n", ("run.yaml:1", "precision should be a mapping", "its keys are mode")),
        (
            "training:\n  precision: bf16\n",
            ("run.yaml:2", "precision stands beside training, not in it; its keys are mode"),
        ),
        ("training: [batch_size]\n", ("run.yaml:1", "training should be a mapping, but is a list")),
        (
            "distributed:\n  strategy: fdsp\n",
            ("run.yaml:2", "auto, single, dp, ddp", "'fdsp'", "write fsdp"),
        ),
        ("distributed:\n  strategy: hybrid\n", ("run.yaml:2", "write fsdp", "hybrid_shard")),
        ("checkpoint:\n  format: full_state_dict\n", ("run.yaml:2", "write full")),
        (
            "training:\n  gradient_checkpointing: true\n",
            ("run.yaml:2", "but is true", "write full"),
        ),
        ("precision:\n  mode: bfloat16\n", ("run.yaml:2", "write bf16")),
        ("distributed:\n  pipeline: {schedule: ScheduleGPipe}\n", ("run.yaml:2", "write GPipe")),
        ("loss_fn: CrossEntropyLoss\n", ("run.yaml:1", "loss_fn", "package.module:Name")),
        ("loss_fn: {args: {}}\n", ("run.yaml:1", "loss_fn.name is missing")),
        ("data:\n  args: 3\n", ("run.yaml:2", "data.args should be a mapping")),
        (
            "monitor:\n  sinks:\n    - jsonl\n    - tensorbord\n",
            ("run.yaml:4", "monitor.sinks[1]", "write tensorboard"),
        ),
        ("distributed:\n  env: {A: [1]}\n", ("run.yaml:2", "distributed.env.A should be text")),
        (
            "distributed:\n  fsdp:\n    auto_wrap_policy: 3\n",
            ("run.yaml:3", "text or a list of texts"),
        ),
        ("training: {gradient_clip: {strategy: nrm}}\n", ("run.yaml:1", "write norm")),
    ],
)
def test_wrong_values_are_refused_with_the_place_and_what_is_taken(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message
    assert "\n\n" not in message
    assert "Error" not in message


def test_all_mistakes_come_in_one_message(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, "training:\n  batchsize: 2\n  seed: x\ndata: {nme: y}\n", "monitor.log_steps=0"
    )
    assert message.splitlines()[0] == "run.yaml has 4 mistakes"
    assert [line.split(":")[0:2] for line in message.splitlines()[1:4]] == [
        ["  run.yaml", n] for n in "234"
    ]
    assert "the override 'monitor.log_steps=0'" in message.splitlines()[4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("run.yaml is empty",)),
        ("# only words\n", ("run.yaml is empty",)),
        ("- a\n", ("run.yaml:1", "a mapping with sections", "a list")),
        ("just words\n", ("run.yaml:1", "a mapping with sections", "text")),
        ("training:\n  seed: [1\n", ("run.yaml:", "not YAML")),
        ("training:\n\tseed: 1\n", ("run.yaml:2", "not YAML", "spaces")),
        ("model: {}\ntraining: seed: 3\n", ("run.yaml:2", "not YAML", "line break")),
        (
            "training: {seed: 1}\n---\ntraining: {seed: 2}\n",
            ("run.yaml:2", "one YAML document", "second"),
        ),
        (
            "training:\n  seed: 1\n  batch_size: 2\n  seed: 3\n",
            ("run.yaml:4", "'seed' is written twice", "line 2"),
        ),
        ("model: {args: *sizes}\n", ("run.yaml:1", "undefined alias", "&name")),
        ("model: &m {args: *m}\n", ("run.yaml:1", "part of")),
        ("? [a]\n: 1\n", ("run.yaml:1", "a key should be text")),
        ("model: !!python/name:os.system x\n", ("run.yaml:1", "not known")),
        ("model: !!int x\n", ("run.yaml:1", "'x'")),
        ("model: {<<: 3}\n", ("run.yaml:1", "`<<` takes a mapping")),
    ],
)
def test_what_is_no_config_is_refused_with_the_line(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message


@pytest.mark.fault(
    "configuration: a YAML bomb",
    "aliases that stand for billions of values",
    "refused",
)
def test_aliases_that_stand_for_billions_are_refused(tmp_path: Path) -> None:
    levels = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    text = "\n".join(["model:", " args:", "  a0: &a0 [x, x]", *levels])
    assert "100,000 values" in refusal(tmp_path, text)


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(
        tmp_path, "model: {args: {a: " + "[" * 5000 + "]" * 5000 + "}}\n"
    )


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "{}", "config.yaml")
    for path, words in [
        ("confg.yaml", ("no file confg.yaml", "did you mean config.yaml")),
        ("far/away.yaml", ("no file far/away.yaml", "lockstep config list")),
        (str(tmp_path), ("is a directory", "config.yaml")),
        ("trainers/fdsp.yaml", ("no file trainers/fdsp.yaml",)),
        ("x" * 300, ("can't be read", "name too long")),
    ]:
        with pytest.raises(UsageError) as caught:
            load_config(path)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    for data in (b"\x89PNG\r\n\x1a\n\x00\x00", b"model: \x00\n", b"\xff\xfe\x00m"):
        (tmp_path / "binary.yaml").write_bytes(data)
        with pytest.raises(UsageError, match=r"binary\.yaml is (not a text|a binary) file"):
            load_config("binary.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    path.chmod(0)
    with pytest.raises(UsageError, match="can't be read"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.seed", ("not an override", "section.key=VALUE")),
        ("=3", ("not an override",)),
        ("training..seed=3", ("not an override",)),
        ("training.seed=[3", ("'training.seed=[3'", "not YAML")),
        ("training.seed=x", ("training.seed", "a whole number", "override")),
        ("training.seed.more=3", ("training.seed", "but is a mapping")),
        ("model.args=3", ("model.args should be a mapping",)),
        ("training=3", ("training should be a mapping",)),
        (
            "trainer_args.max_stepz=3",
            ("unknown key trainer_args.max_stepz", "write training.max_steps (in the block"),
        ),
        (
            "distributed_env.bakend=3",
            ("unknown key distributed_env.bakend", "write distributed.backend"),
        ),
    ],
)
def test_overrides_that_are_none(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    message = refusal(tmp_path, "{}", override)
    for word in words:
        assert word in message


def test_extends_that_leads_nowhere_or_round_in_a_circle(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model: {}\nextends: trainers/fsd.yaml\n")
    assert "run.yaml:2" in message
    assert "write trainers/fsdp.yaml" in message
    assert "trainers/ddp.yaml" in refusal(tmp_path, "extends: qqq\n")
    assert "the name of one file" in refusal(tmp_path, "extends: [a, b]\n")
    written(tmp_path, "extends: run.yaml\n", "other.yaml")
    assert "run.yaml → other.yaml → run.yaml" in refusal(tmp_path, "extends: other.yaml\n")


def test_a_length_said_later_replaces_the_other_kind(tmp_path: Path) -> None:
    """`--max-steps 2` tries a config that counts epochs; so does a file that extends it, and a
    setting in Python.
    """
    epochs = "training: {num_train_epochs: 5}\n"
    written(tmp_path, epochs, "base.yaml")
    for config in (
        loaded(tmp_path, epochs, "training.max_steps=2"),
        loaded(tmp_path, "extends: base.yaml\ntraining: {max_steps: 2}\n"),
        loaded(tmp_path, epochs).replaced({"training.max_steps": 2}),
    ):
        assert (config.training.max_steps, config.training.num_train_epochs) == (2, None)
    both = ("training.max_steps=2", "training.num_train_epochs=5")
    assert "can't end both after 2 steps and after 5 epochs" in refusal(
        tmp_path, "training: {}\n", *both
    )
    assert loaded(tmp_path, epochs, "training.max_steps=null").training.num_train_epochs == 5


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A device or a pipe may never end, and a name with a null byte is none."""
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in ("/dev/zero", "pipe.yaml", "/dev/stdin"):
        assert f"{name} is not a regular file" in refusal(tmp_path, f"extends: {name}\n")
    assert "is not the name of a file" in refusal(tmp_path, 'extends: "a\\0b.yaml"\n')
    with pytest.raises(UsageError, match="is not the name of a file"):
        load_config("a\0b.yaml")
    with pytest.raises(UsageError, match="is not a regular file"):
        load_config("/dev/zero")
