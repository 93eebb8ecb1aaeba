"""Weights are evaluated: the numbers are those that the run recorded, on any ranks."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lockstep import WeightAverage, checkpoint
from lockstep.config import load_config
from lockstep.data import build_data
from lockstep.errors import UsageError
from lockstep.evaluate.measure import Evaluation, Prompts, evaluate, opened
from lockstep.evaluate.subject import Asked, find_subject, for_ranks
from lockstep.evaluate.text import as_json, as_text
from lockstep.trainer import Trainer, build
from lockstep.trainer import run as train
from tests.launch.shared import finish, start
from tests.ranks import run_ranks

_CONFIG = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2, tie_embeddings: true}}
data:
  name: documents
  args: {sources: [a.jsonl, b.jsonl], sequence_length: 32, validation_fraction: 0.3}
training: {max_steps: 4, batch_size: 2, global_batch_size: 4, eval_steps: 2, eval_batches: null}
checkpoint: {save_steps: 2}
distributed: {strategy: fsdp, reproducible: true, device: cpu}
"""
_ACCURACY = "tests.evaluate.test_evaluate:accuracy"


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the likeliest token is the next one, of those that count."""
    return (outputs.argmax(-1) == targets)[targets != -100]


class Rows:
    """A metric with a state: the number of rows that it has seen."""

    def __init__(self) -> None:
        self._rows = 0

    def update(self, outputs: Tensor, _targets: Tensor) -> None:
        self._rows += len(outputs)

    def compute(self) -> int:
        return self._rows


def _write(path: Path, words: str, documents: int) -> None:
    draw = random.Random(words)
    lines = [" ".join(draw.choices(words.split(), k=draw.randint(3, 20))) for _ in range(documents)]
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))


def _train(folder: str) -> None:
    os.chdir(folder)
    assert train(load_config("run.yaml"), output_dir=Path("runs/run"), resume="never") == 0


def _train_others(folder: str) -> None:
    """Train workers by themselves, and an average of the weights that is what is evaluated."""
    os.chdir(folder)
    config = load_config(
        "run.yaml", ["distributed.strategy=diloco", "distributed.reproducible=false"]
    )
    assert train(config, output_dir=Path("runs/local"), resume="never") == 0
    config = load_config("run.yaml")
    data = build_data(config.data)
    averaged = WeightAverage(0.5, evaluate=True)
    trainer = Trainer(
        build(config, data), config=config, output_dir="runs/averaged", after_update=averaged
    )
    trainer.train(data.train, data.validation)


def _evaluate(folder: str, ranks: int, cases: list[tuple[Asked, dict[str, Any]]]) -> list[Any]:
    os.chdir(folder)
    found: list[Any] = []
    for asked, more in cases:
        try:
            subject = find_subject(asked)
            config, _ = for_ranks(subject.config, asked.overrides, ranks, ranks)
            found.append(evaluate(opened(subject, config), **more))
        except UsageError as error:
            found.append(error)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    _write(folder / "a.jsonl", "the cat sat on a mat", 30)
    _write(folder / "b.jsonl", "seven ships sail to an island", 20)
    _write(folder / "c.jsonl", "something else", 15)
    (folder / "run.yaml").write_text(_CONFIG)
    run_ranks(_train, 2, str(folder))
    weights = checkpoint.weights(folder / "runs/run/checkpoints/step-00000004")
    torch.save(weights, folder / "weights.pt")
    newest = checkpoint.newest(folder / "runs/run/checkpoints")
    assert newest is not None
    checkpoint.export_safetensors(newest, folder / "weights.safetensors")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model.save_pretrained(folder / "llama")
    return folder


def _recorded(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "runs/run/metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


RUN = Path("runs/run")
# On one rank and on two; the last is of no reproducible run.
_ALIKE: list[tuple[Asked, dict[str, Any]]] = [
    (Asked(RUN), {"metrics": [_ACCURACY, _ACCURACY.replace("accuracy", "Rows")]}),
    (Asked(RUN, step=2), {}),
    (Asked(Path("weights.safetensors"), config=Path("run.yaml")), {}),
    (Asked(Path("llama"), data=Path("c.jsonl")), {"prompts": Prompts(["some", "e"], 8)}),
]
_ALONE: list[tuple[Asked, dict[str, Any]]] = [
    (Asked(RUN / "checkpoints/step-00000004"), {}),
    (Asked(RUN, data=Path("c.jsonl")), {}),
    (Asked(Path("weights.pt"), config=Path("run.yaml")), {}),
    (Asked(Path("llama"), config=Path("run.yaml")), {}),
    (
        Asked(RUN, overrides=["training.eval_batches=2"]),
        {"metrics": [_ACCURACY.replace("accuracy", "Rows")]},
    ),
]
_STRATEGIES = ["pipeline", "tensor"]


def _without_topology(found: Evaluation) -> Evaluation:
    return replace(found, topology="")


def test_the_numbers_are_those_of_the_run_on_any_number_of_ranks(folder: Path) -> None:
    by_strategy = [(Asked(RUN, overrides=[f"distributed.strategy={s}"]), {}) for s in _STRATEGIES]
    alone = run_ranks(_evaluate, 1, str(folder), 1, [*_ALIKE, *_ALONE])[0]
    first, second = run_ranks(_evaluate, 2, str(folder), 2, [*_ALIKE, *by_strategy])
    assert [error for error in (*alone, *first) if isinstance(error, UsageError)] == []
    assert first == second
    of_one = list(map(_without_topology, alone))
    of_two = list(map(_without_topology, first))
    assert of_one[:3] == of_two[:3]  # in each bit
    assert of_one[3].all.loss == pytest.approx(of_two[3].all.loss, rel=1e-6)
    assert of_one[3].texts == of_two[3].texts

    recorded = _recorded(folder)
    newest, earlier, exported, llama, by_path, other, pickled, _, few = alone
    for found in (newest, by_path, *first[len(_ALIKE) :]):
        assert found.all.loss == found.recorded == recorded[4]
    assert pickled.all == exported.all == newest.all
    assert earlier.all.loss == earlier.recorded == recorded[2] != recorded[4]
    assert other.recorded is None

    assert newest.metrics["Rows"] == newest.all.samples
    assert few.metrics["Rows"] == few.all.samples < newest.all.samples
    assert 0 < newest.metrics["accuracy"] < 1
    assert list(newest.by_source) == ["a.jsonl", "b.jsonl"]
    samples = [each.samples for each in newest.by_source.values()]
    assert sum(samples) == newest.all.samples
    losses = [each.loss for each in newest.by_source.values()]
    assert min(losses) < newest.all.loss < max(losses)
    assert not other.by_source

    assert [text[:4] for text in llama.texts][:1] == ["some"]
    text = as_text(newest)
    assert f"{recorded[4]:.6f} by the run at that step: the same" in text
    assert json.loads(as_json(newest))["all"]["loss"] == recorded[4]


@pytest.mark.full
def test_workers_and_an_average_are_evaluated_as_their_runs_did(folder: Path) -> None:
    run_ranks(_train_others, 2, str(folder))
    cases = [(Asked(Path(f"runs/{name}")), {}) for name in ("averaged", "local")]
    for ranks in (1, 2):
        averaged, local = run_ranks(_evaluate, ranks, str(folder), ranks, cases)[0]
        assert averaged.all.loss == averaged.recorded != _recorded(folder)[4]
        assert local.all.loss == pytest.approx(local.recorded, rel=1e-6)


def test_generated_texts_are_those_of_the_library(folder: Path) -> None:
    """With its cache, and with ours."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "llama").eval()
    ids = torch.tensor([list(b"some")])
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    asked = Asked(Path("llama"), data=Path("c.jsonl"))
    (found,) = run_ranks(
        _evaluate, 1, str(folder), 1, [(asked, {"prompts": Prompts(["some"], 8)})]
    )[0]
    assert found.texts == [bytes(expected).decode(errors="replace")]


_MISTAKES: list[tuple[Asked, dict[str, Any], str]] = [
    (Asked(Path("nowhere")), {}, "there is no file or folder nowhere"),
    (Asked(Path("a.jsonl")), {}, "is neither a run nor weights"),
    (Asked(Path("weights.pt")), {}, "does not say of which model"),
    (Asked(Path("llama")), {}, "has no data of its own"),
    (Asked(Path("weights.pt"), config=Path("run.yaml"), step=2), {}, "chooses a checkpoint"),
    (Asked(RUN, config=Path("run.yaml")), {}, "has a config of its own"),
    (Asked(RUN, step=3), {}, "keeps no checkpoint of step 3"),
    (Asked(RUN, data=Path("nowhere.jsonl")), {}, "there is no file or folder nowhere.jsonl"),
    (Asked(RUN, overrides=["data.args.validation_fraction=0"]), {}, "have no validation part"),
    (Asked(RUN, overrides=["model.args.n_embd=32"]), {}, "does not fit this model"),
    (Asked(RUN), {"metrics": [f"{__name__}:nothing"]}, "has no nothing"),
    (Asked(RUN), {"metrics": [f"{__name__}:RUN"]}, "is neither called nor updated"),
    (
        Asked(Path("weights.pt"), config=Path("run.yaml"), overrides=["model.args.n_embd=32"]),
        {},
        "has another model's weights",
    ),
    (
        Asked(Path("weights.pt"), config=Path("run.yaml"), overrides=["model.args.n_layer=3"]),
        {},
        "lacks layers.2",
    ),
    (
        Asked(Path("weights.pt"), config=Path("run.yaml"), overrides=["model.args.n_layer=1"]),
        {},
        "the model has no layers.1",
    ),
    (
        Asked(RUN, overrides=["data.name=digits", "data.args={}"]),
        {"prompts": Prompts(["a"])},
        "are not text",
    ),
]


def test_ranks_that_the_strategy_does_not_fit_have_the_whole_model(folder: Path) -> None:
    overrides = ["distributed.strategy=pipeline", "distributed.pipeline_size=4"]
    trained = load_config(folder / "run.yaml", overrides)
    kept, line = for_ranks(trained, [], 4, 4)
    assert (kept, line) == (trained, "")
    config, line = for_ranks(trained, [], 2, 2)
    assert (config.distributed.strategy, config.distributed.pipeline_size) == ("ddp", None)
    assert (
        line == "evaluates on 2 ranks as ddp what was trained as pipeline: each has the whole model"
    )
    config, _ = for_ranks(trained, [], 1, 1)
    assert config.distributed.strategy == "single"
    asked = trained.replaced({"distributed.strategy": "fsdp"})
    assert for_ranks(asked, ["distributed.strategy=fsdp"], 3, 3) == (asked, "")


def test_other_tokens_are_refused(folder: Path) -> None:
    """A model of bytes, and data that were cut by another tokenizer."""
    words = {"a": 0, "b": 1, "[UNK]": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "words.json").write_text(json.dumps(tokenizer))
    other = _CONFIG.replace("sequence_length", "tokenizer: words.json, sequence_length")
    (folder / "words.yaml").write_text(other)
    asked = Asked(RUN, data=Path("words.yaml"))
    (error,) = run_ranks(_evaluate, 1, str(folder), 1, [(asked, {})])[0]
    assert isinstance(error, UsageError), error
    assert "cut into other tokens" in str(error)


def test_each_mistake_is_one_error(folder: Path) -> None:
    cases = [(asked, more) for asked, more, _ in _MISTAKES]
    found = run_ranks(_evaluate, 1, str(folder), 1, cases)[0]
    for error, (asked, _, expected) in zip(found, _MISTAKES, strict=True):
        assert isinstance(error, UsageError), (asked, error)
        assert expected in str(error)


def test_the_command_starts_ranks_and_prints_one_object(folder: Path) -> None:
    given = ["runs/run", "--nproc-per-node", "2", "--json", "--prompt", "the", "--tokens", "3"]
    ended = finish(start(folder, "evaluate", *given, OMP_NUM_THREADS="1"), folder)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["all"]["loss"] == _recorded(folder)[4]
    assert found["topology"] == "fsdp:2"
    assert found["texts"][0].startswith("the")
