"""Adapters of a folder are trained further; what is wrong with the folder is one error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.checkpoint import export_hugging_face
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.models import check_model
from lockstep.trainer import Trainer, build
from tests.models.test_hf_auto import Samples, config_of, library
from tests.parity.adapted import LORA, Labelled, trainer_of, write_base
from tests.parity.toy import Tokens

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_base(tmp_path_factory.mktemp("base"))


def saved_by_peft(base: str, folder: Path, auto: str = "AutoModelForCausalLM", **more: Any) -> Path:
    """A folder of an adapter whose values are all drawn, and its base as peft loads it."""
    theirs = getattr(transformers, auto).from_pretrained(base.removeprefix("hf:"))
    torch.manual_seed(2)
    settings = {**LORA, "init_lora_weights": False, **more}
    peft.get_peft_model(theirs, peft.LoraConfig(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return saved_by_peft(base, folder / "saved", task_type="CAUSAL_LM")


def ids() -> torch.Tensor:
    return torch.stack([Tokens()[index]["input_ids"] for index in range(3)])


def test_the_adapters_of_a_folder_are_trained_from_where_they_were(
    base: str, adapter: Path
) -> None:
    config = config_of(base, adapter=str(adapter))
    check_model(config.model)
    model: Any = build(config, Data(None))
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert len(trained) == 2 * 2 * 3
    assert all("lora_" in name for name in trained)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base.removeprefix("hf:"))
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    assert torch.equal(model.eval()(ids()), theirs(input_ids=ids(), use_cache=False).logits)


def test_what_was_trained_goes_into_a_folder_and_on_from_there(base: str, tmp_path: Path) -> None:
    """Trained here, exported as adapters, and named by the next config."""
    first = trainer_of(base, "single", {})
    next(iter(first.steps(Tokens())))
    export_hugging_face(
        first.save_checkpoint(tmp_path / "step-00000001"), tmp_path / "out", adapter=True
    )
    second = trainer_of(
        base, "single", {"model.lora": None, "model.adapter": str(tmp_path / "out")}
    )
    for name, value in first.placed.parameters.items():
        assert torch.equal(value, second.placed.parameters[name]), name


def edited(adapter: Path, folder: Path, edit: Callable[[Path], object]) -> str:
    shutil.copytree(adapter, folder)
    edit(folder)
    return str(folder)


def with_config(**changes: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return write


def without_a_layer(folder: Path) -> None:
    values = load_file(folder / WEIGHTS)
    save_file(
        {name: value for name, value in values.items() if "layers.1" not in name}, folder / WEIGHTS
    )


def cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])


def as_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (shutil.rmtree, "there is no folder"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"not a folder of an adapter.* no {WEIGHTS}"),
        (as_a_pickle, "adapter_model.bin is a pickle"),
        (cut_off, f"{WEIGHTS} can't be read"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            "adapter_config.json is not a config of an adapter",
        ),
        (with_config(r=8), r"is \[4, \d+\](.|\n)*with r: 8 of adapter_config.json"),
        (with_config(target_modules=["w_proj"]), r"can't put these adapters(.|\n)*w_proj"),
        (
            with_config(target_modules=["q_proj", "k_proj", "down_proj"]),
            r"does not fit the model's layers: it lacks .*k_proj",
        ),
        (with_config(target_modules=["q_proj"]), r"no layer of it takes .*down_proj"),
        (without_a_layer, r"it lacks .*layers\.1"),
        (with_config(init_lora_weights="pissa"), "began with init_lora_weights: pissa"),
        (with_config(peft_type="IA3"), r"is not a config|of the kind"),
        (with_config(task_type="SEQ_CLS"), r"auto: AutoModelForSequenceClassification"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_error_before_anything_has_values(
    base: str, adapter: Path, tmp_path: Path, edit: Callable[[Path], object], says: str
) -> None:
    folder = edited(adapter, tmp_path / "adapter", edit)
    with pytest.raises(UsageError, match=says):
        check_model(config_of(base, adapter=folder).model)


def test_an_adapter_of_another_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    wider = write_base(tmp_path / "wider", intermediate_size=56)
    says = r"down_proj\.lora_A\.weight of the adapter in .* is \[4, \d+\](.|\n)*\[4, 56\]"
    with pytest.raises(UsageError, match=says):
        check_model(config_of(wider, adapter=str(adapter)).model)
    longer = write_base(tmp_path / "longer", num_hidden_layers=4)
    with pytest.raises(UsageError, match=r"it lacks .*layers\.3"):
        check_model(config_of(longer, adapter=str(adapter)).model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.lora": {"r": 16}}, "model.lora describes new adapters, and .* has some"),
        ({"distributed.tensor_size": 2}, "layers with adapters can't be cut over ranks"),
        ({"model.name": "transformer"}, "model.adapter is for models of Hugging Face"),
    ],
)
def test_what_contradicts_it_is_refused_when_it_is_loaded(
    base: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        config_of(base, adapter="adapter").replaced(changes)


def test_a_head_that_was_trained_in_full_goes_on_without_a_word(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The base has none, and the folder's is taken; no warning says that one is drawn."""
    masked, _ = library("AutoModelForMaskedLM")
    masked.save_pretrained(tmp_path / "base")
    base = f"hf:{tmp_path / 'base'}"
    auto = "AutoModelForSequenceClassification"
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query"]}
    without = saved_by_peft(base, tmp_path / "without", auto, **settings)
    says = r"pooler.*would stay as drawn at random(.|\n)*modules_to_save: \[.*pooler"
    with pytest.raises(UsageError, match=says):
        build(config_of(base, auto=auto, adapter=str(without)), Data(None))
    settings["modules_to_save"] = ["classifier", "pooler"]
    folder = saved_by_peft(base, tmp_path / "adapter", auto, **settings)
    head = load_file(folder / WEIGHTS)["base_model.model.classifier.weight"]
    recwarn.clear()
    model: Any = build(config_of(base, auto=auto, adapter=str(folder)), Data(None))
    assert not [each for each in recwarn if "drawn" in str(each.message)]
    assert torch.equal(model.classifier.modules_to_save.default.weight, head)
    with pytest.raises(UsageError, match=r"is \[2, 16\](.|\n)*model\.args\.num_labels"):
        build(config_of(base, auto=auto, adapter=str(folder), args={"num_labels": 5}), Data(None))


def test_a_model_of_pefts_own_trains_and_is_exported(
    base: str, adapter: Path, tmp_path: Path
) -> None:
    """Loaded by peft and handed over: both folders of its run are as those of a config's run."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base.removeprefix("hf:"))
    model = peft.PeftModel.from_pretrained(theirs, adapter, is_trainable=True)
    trainer = Trainer(model, "sgd", learning_rate=0.5, batch_size=2, max_steps=2)
    list(trainer.steps(Labelled()))
    saved = trainer.save_checkpoint(tmp_path / "step-00000002")
    with torch.no_grad():
        expected = model.eval()(input_ids=ids(), use_cache=False).logits
    export_hugging_face(saved, tmp_path / "merged")
    export_hugging_face(saved, tmp_path / "adapter", adapter=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(base.removeprefix("hf:"))
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    for found in (merged, again):
        logits = found.eval()(input_ids=ids(), use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_peft_has_frozen_is_told_how_to_be_trained(base: str, adapter: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base.removeprefix("hf:"))
    model = peft.PeftModel.from_pretrained(theirs, adapter)
    trainer = Trainer(model, "sgd", batch_size=2, max_steps=2)
    with pytest.raises(UsageError, match="is_trainable=True"):
        next(iter(trainer.steps(Labelled())))


def test_a_classifiers_head_is_in_the_folders_of_its_run(tmp_path: Path) -> None:
    """As peft has it: the head beside the adapters, and merged."""
    theirs, sample = library("AutoModelForSequenceClassification")
    theirs.save_pretrained(tmp_path / "base")
    lora = {"r": 4, "target_modules": ["query", "value"]}
    config = config_of(f"hf:{tmp_path / 'base'}", lora=lora)
    trainer = Trainer(build(config, Data(None)), config=config)
    list(trainer.steps(Samples(sample)))
    saved = trainer.save_checkpoint(tmp_path / "step-00000002")
    root: Any = trainer.placed.root
    batch = {key: value[None] for key, value in sample(0).items()}
    with torch.no_grad():
        expected = root.eval()(**batch).logits
        assert not torch.equal(expected, theirs.eval()(**batch).logits)
    export_hugging_face(saved, tmp_path / "merged")
    export_hugging_face(saved, tmp_path / "adapter", adapter=True)
    names = load_file(tmp_path / "adapter" / WEIGHTS)
    assert "base_model.model.classifier.weight" in names
    of_library = transformers.AutoModelForSequenceClassification
    merged = of_library.from_pretrained(tmp_path / "merged")
    again = peft.PeftModel.from_pretrained(
        of_library.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    for found in (merged, again):
        logits = found.eval()(**batch).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
