"""`lockstep config show|check|schema|list`."""

import json
from pathlib import Path

import pytest
import yaml

from lockstep.config import Config, load_config
from lockstep.config.commands import run
from lockstep.config.files import SHIPPED, shipped_names
from lockstep.config.prepass import is_template
from lockstep.errors import UsageError
from tests.config.shared import written


def test_show_prints_what_loads_as_the_same_config(tmp_path: Path) -> None:
    text = run("show", "trainers/hybrid.yaml", ["training.batch_size=3", "model.args.n_layer=2"])
    config = load_config(written(tmp_path, text))
    assert config == load_config(
        "trainers/hybrid.yaml", ["training.batch_size=3", "model.args.n_layer=2"]
    )
    assert load_config(written(tmp_path, run("show", None))) == Config()
    assert "seed: 5" in run("show", None, ["training.seed=5"])


def test_check_says_ok_in_one_line(tmp_path: Path) -> None:
    path = written(
        tmp_path, "extends: trainers/ddp.yaml\nmodel: {name: bdh}\ndata: {name: digits}\n"
    )
    overrides = ["training.max_steps=30", "training.gradient_accumulation_steps=4"]
    assert (
        run("check", path, overrides)
        == "ok: bdh on digits, strategy ddp, micro-batch 8 × accumulation 4 a rank, 30 steps,"
        " precision auto"
    )
    assert "global batch 64, 2 epochs" in run(
        "check", str(path), ["training.global_batch_size=64", "training.num_train_epochs=2"]
    )
    for config, overrides, words in [
        (path, ["training.sed=1"], "training.seed"),
        (path, ["model.name=null"], "names no model"),
        (None, [], "which config"),
    ]:
        with pytest.raises(UsageError, match=words):
            run("check", config, overrides)


def test_schema_is_json_schema_with_our_names_and_words() -> None:
    schema = json.loads(run("schema", None))
    checkpoint = schema["$defs"]["CheckpointConfig"]
    assert checkpoint["additionalProperties"] is False
    assert "async" in checkpoint["properties"]
    assert "async_" not in checkpoint["properties"]
    assert all("description" in value for value in checkpoint["properties"].values())


def test_list_names_what_ships_with_a_sentence() -> None:
    lines = run("list", None).splitlines()[2:]
    assert [line.split()[0] for line in lines] == shipped_names()
    trainers = ("single", "dp", "ddp", "fsdp", "pipeline", "hybrid", "accelerate", "diloco")
    assert {f"trainers/{name}.yaml" for name in trainers} <= set(shipped_names())
    assert all(len(line.split()) > 4 for line in lines)


def test_another_verb() -> None:
    with pytest.raises(UsageError, match="write check"):
        run("chek", None)


_SHORT_FORMS = (
    "extends: trainers/fsdp.yaml",
    "loss_fn: mine:Loss",
    "training: {gradient_clip: 0.5}",
    "training: {optimizer: {name: adamw, args: {eps: 1.0e-6}}}",
    "distributed: {env: {NCCL_IB_DISABLE: 1}}",
)


def test_the_schema_accepts_each_config_that_ships_and_refuses_a_slip() -> None:
    """So an editor that checks against it underlines what is wrong, and nothing else."""
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator(json.loads(run("schema", None)))
    shipped = [*SHIPPED.glob("*/*.yaml"), *Path(__file__).parents[2].glob("examples/*.yaml")]
    assert len(shipped) > 20
    texts = [text for text in (path.read_text() for path in shipped) if not is_template(text)]
    for written_so in [*texts, *_SHORT_FORMS]:
        found = [error.message for error in checker.iter_errors(yaml.safe_load(written_so))]
        assert not found, f"{written_so}\n{found}"
    slips = (
        {"training": {"max_stepz": 1}},
        {"training": {"max_steps": "many"}},
        {"distributed": {"strategy": "dpp"}},
        {"extend": "x.yaml"},
    )
    for slip in slips:
        assert list(checker.iter_errors(slip)), slip
