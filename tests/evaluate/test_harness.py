"""lm-evaluation-harness asks our models: its own likelihoods, of texts that follow a rule.

It is not among the packages that tests need: without it the tests are skipped, and say so.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from lockstep.config import load_config
from lockstep.errors import UsageError
from lockstep.trainer import run as train
from tests.ranks import run_ranks

_CONFIG = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2}}
data: {name: text, args: {path: text.txt, block_size: 32}}
training: {max_steps: 30, batch_size: 8, learning_rate: 1.0e-2, eval_batches: 4}
distributed: {strategy: ddp, device: cpu}
"""
_TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: ["ab", "zz"]
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


def _train(folder: str) -> None:
    os.chdir(folder)
    Path("text.txt").write_text("abababab\n" * 400)
    Path("run.yaml").write_text(_CONFIG)
    rows = [json.dumps({"begin": "ab" * count}) for count in (1, 2, 3)]
    Path("letters.jsonl").write_text("\n".join(rows))
    Path("letters.yaml").write_text(_TASK)
    assert train(load_config("run.yaml"), output_dir=Path("runs/run"), resume="never") == 0


def _ask(folder: str) -> dict[str, Any]:
    """Answer a task by the command's way, and a few requests by the harness's registry."""
    os.chdir(folder)
    os.environ["HF_DATASETS_CACHE"] = str(Path(folder, "cache"))
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from lockstep.evaluate.harness import ask
    from lockstep.evaluate.measure import opened
    from lockstep.evaluate.subject import Asked, find_subject

    subject = find_subject(Asked(Path("runs/run")))
    found = opened(subject, subject.config)
    answers = ask(found, ["letters.yaml"], None)

    model: Any = get_model("lockstep")(already=found)

    def asked(kind: str, *arguments: Any) -> Any:
        request = Instance(request_type=kind, doc={}, arguments=arguments, idx=0)
        return getattr(model, kind)([request])[0]

    likelihood, is_greedy = asked("loglikelihood", "ab", "ab")
    ids = torch.tensor([list(b"abab")])
    logits = found.trainer.forward(ids[:, :-1]).double()[0, 1:]
    refused = []
    for refuse in (lambda: asked("loglikelihood", "a", "b" * 40), lambda: ask(found, ["no"], None)):
        with pytest.raises(UsageError) as error:
            refuse()
        refused.append(str(error.value))
    return {
        "answers": answers,
        "likelihood": likelihood,
        "is_greedy": is_greedy,
        "expected": -float(cross_entropy(logits, ids[0, 2:], reduction="sum")),
        "rolling": asked("loglikelihood_rolling", "ab" * 40),
        "text": asked("generate_until", "abab", {"until": ["\n"], "max_gen_toks": 12}),
        "refused": refused,
    }


def test_a_task_is_answered_on_any_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: lm_eval")
    run_ranks(_train, 1, str(tmp_path))
    alone = run_ranks(_ask, 1, str(tmp_path))[0]
    first, second = run_ranks(_ask, 2, str(tmp_path))
    assert alone["answers"]["letters"]["acc"] == 1.0
    assert first["answers"] == alone["answers"]
    assert second["answers"] == {}  # the first rank of a machine reports
    for found in (alone, first, second):
        assert found["likelihood"] == pytest.approx(found["expected"], rel=1e-9)
        assert found["likelihood"] == pytest.approx(alone["likelihood"], rel=1e-6)
        assert found["is_greedy"]
        assert set(found["text"]) <= {"a", "b"}
        assert "an answer of 40 tokens" in found["refused"][0]
        assert "lm-evaluation-harness has no task" in found["refused"][1]
        assert -200 < found["rolling"] < found["likelihood"]


def test_without_the_harness_one_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lockstep.evaluate.harness", raising=False)
    with pytest.raises(UsageError, match="--tasks needs lm-evaluation-harness"):
        importlib.import_module("lockstep.evaluate.harness")
