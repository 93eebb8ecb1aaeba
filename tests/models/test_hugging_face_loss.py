"""Losses of transformers' models are counted as each model's own forward pass computes them.

The reference is the author's own loop in plain PyTorch: the loss and gradient of `model(**batch)`
for the whole batch.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import Trainer
from tests.ranks import run_ranks
from tests.sampled import quick_and_full, sampled

transformers = pytest.importorskip("transformers")

from benchmarks import families  # noqa: E402
from benchmarks.tiny_models import batch_for, tiny  # noqa: E402
from lockstep.errors import UsageError  # noqa: E402

EQUAL = {
    "T5ForConditionalGeneration": ("t5", "SEQ_TO_SEQ_CAUSAL_LM", "labels that are not -100"),
    "WhisperForConditionalGeneration": ("whisper", "SPEECH_SEQ_2_SEQ", "labels that are not -100"),
    "BertForMaskedLM": ("bert", "MASKED_LM", "labels that are not -100"),
    "BertForSequenceClassification": ("bert", "SEQUENCE_CLASSIFICATION", "samples"),
    "BertForTokenClassification": ("bert", "TOKEN_CLASSIFICATION", "labels that are not -100"),
    "BertForQuestionAnswering": ("bert", "QUESTION_ANSWERING", "samples"),
    "ViTForImageClassification": ("vit", "IMAGE_CLASSIFICATION", "samples"),
    "ResNetForImageClassification": ("resnet", "IMAGE_CLASSIFICATION", "samples"),
    "GPT2LMHeadModel": ("gpt2", "CAUSAL_LM", "labels that are not -100, shifted by the model"),
    "LlamaForCausalLM": ("llama", "CAUSAL_LM", "labels that are not -100, shifted by the model"),
    "Qwen3ForCausalLM": ("qwen3", "CAUSAL_LM", "labels that are not -100, shifted by the model"),
    "MixtralForCausalLM": (
        "mixtral",
        "CAUSAL_LM",
        "labels that are not -100, shifted by the model",
    ),
    "MambaForCausalLM": ("mamba", "CAUSAL_LM", "labels that are not -100, shifted by the model"),
}
REFUSED = {
    # a sample's loss depends on the others
    "CLIPModel": ("clip", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    # the mean over masked words plus the mean over samples
    "BertForPreTraining": ("bert", "PRETRAINING"),
}


# of each way to count one; the others, and most tasks below, are in the full grid
SOME_EQUAL = (
    "T5ForConditionalGeneration",
    "BertForMaskedLM",
    "BertForQuestionAnswering",
    "ResNetForImageClassification",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
)


@pytest.mark.parametrize("name", quick_and_full(EQUAL, SOME_EQUAL))
def test_each_cut_of_the_batch_has_the_loss_and_gradient_of_the_whole(name: str) -> None:
    model_type, task, how = EQUAL[name]
    row = families.walk(task, model_type, name)
    assert (row.outcome, row.how) == (families.EQUAL, how)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_told_is_refused_before_it_trains(name: str) -> None:
    model_type, task = REFUSED[name]
    row = families.walk(task, model_type, name)
    assert row.outcome == families.REFUSED, row


RECORDED = {row.name: row for row in families.recorded()}
ONE_OF_EACH_TASK = {
    row.task: row
    for outcome in (families.REFUSED, families.EQUAL)
    for row in RECORDED.values()
    if row.outcome == outcome
}
# one in four, without one that takes ten seconds, and some of each outcome
SOME_TASKS = [task for task in sorted(ONE_OF_EACH_TASK) if task != "OBJECT_DETECTION"][::4]
assert {ONE_OF_EACH_TASK[task].outcome for task in SOME_TASKS} >= {families.REFUSED, families.EQUAL}
as_recorded = pytest.mark.skipif(
    any(row.version != transformers.__version__ for row in RECORDED.values()),
    reason="another version was recorded",
)


@as_recorded
@pytest.mark.parametrize(
    "task",
    quick_and_full(ONE_OF_EACH_TASK, SOME_TASKS),
)
def test_a_class_of_each_task_is_counted_as_recorded(task: str) -> None:
    recorded = ONE_OF_EACH_TASK[task]
    model_type = next(kind for _, kind, name in families.classes() if name == recorded.name)
    assert families.walk(task, model_type, recorded.name) == recorded


@as_recorded
@pytest.mark.full
@pytest.mark.timeout(7200)
def test_no_class_of_any_mapping_is_counted_worse_than_recorded() -> None:
    """Equal stays equal, refused stays refused or becomes equal, and what was built is built.

    The largest of the models stay in the process: it was seen to hold more than 5 GB.
    """
    rows = list(families.walk_all())
    assert not [row for row in rows if row.outcome == families.WRONG]
    best = (families.EQUAL, families.REFUSED, families.NO_LOSS, families.NOT_BUILT)
    assert not [
        (row, RECORDED[row.name])
        for row in rows
        if row.name in RECORDED and best.index(row.outcome) > best.index(RECORDED[row.name].outcome)
    ]
    equal = sum(row.outcome == families.EQUAL for row in RECORDED.values())
    assert sum(row.outcome == families.EQUAL for row in rows) >= equal


def test_the_page_holds_what_was_walked() -> None:
    rows = families.recorded()
    assert families.PAGE.read_text() == families.page(rows)
    assert {row.outcome for row in rows} <= {
        families.EQUAL,
        families.REFUSED,
        families.NO_LOSS,
        families.NOT_BUILT,
    }


@as_recorded
def test_each_class_of_the_library_has_a_row() -> None:
    assert set(RECORDED) == {name for _, _, name in families.classes()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    deterministic = True

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


def first_step(
    name: str, model_type: str, task: str, strategy: str, batch_size: int, **args: Any
) -> tuple[float, float]:
    """(loss of a step over the whole batch, the plain loop's)."""
    model = tiny(name, model_type)
    for key, value in args.items():
        setattr(model.config, key, value)
    batch = batch_for(model, task)
    with torch.no_grad():
        expected = float(model(**batch).loss)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        strategy=strategy,
        batch_size=batch_size,
        global_batch_size=4,
        max_steps=2,
    )
    first, second = trainer.steps(Rows(batch), epochs=2)
    # another order, the same samples
    assert float(second.loss) == pytest.approx(float(first.loss), rel=1e-5)
    return float(first.loss), expected


ON_RANKS = ["BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification"]


def on_ranks(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for name in names:
            model_type, task, _ = EQUAL[name]
            found[f"{strategy} {name}"] = [
                first_step(name, model_type, task, strategy, size) for size in (1, 2)
            ]
        try:
            first_step("BertForPreTraining", "bert", "PRETRAINING", strategy, 1)
        except UsageError as error:
            found[f"{strategy} refused"] = str(error)
    name = "LlamaForCausalLM"
    model_type, task, _ = EQUAL[name]
    found[f"pipeline {name}"] = [
        first_step(name, model_type, task, "pipeline", size) for size in (1, 2)
    ]
    return found


@sampled("names", ON_RANKS, 3)
def test_ranks_count_alike(names: list[str]) -> None:
    one, other = run_ranks(on_ranks, 2, names)
    assert one == other
    for name in ("ddp refused", "fsdp refused"):
        assert "def count(self, batch)" in one.pop(name)
    for name, pairs in one.items():
        for loss, expected in pairs:
            assert loss == pytest.approx(expected, rel=1e-5), name


def test_the_balance_of_experts_is_neither_dropped_nor_divided_by_the_tokens() -> None:
    name = "MixtralForCausalLM"
    model_type, task, _ = EQUAL["MixtralForCausalLM"]
    args = {"output_router_logits": True}
    whole, expected = first_step(name, model_type, task, "single", 4, **args)
    assert whole == pytest.approx(expected, rel=1e-6)
    model = tiny(name, model_type)
    model.config.output_router_logits = True
    batch = batch_for(model, task)
    with torch.no_grad():
        halves = [
            model(**{key: value[at : at + 2] for key, value in batch.items()}) for at in (0, 2)
        ]
    counts = [float((batch["labels"][at : at + 2, 1:] != -100).sum()) for at in (0, 2)]
    assert halves[0].aux_loss > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # as the plain loop's, without dropout
        warnings.filterwarnings("ignore", "the model is in evaluation mode")
        cut, _ = first_step(name, model_type, task, "single", 2, **args)
    mean = sum(float(half.loss) * count for half, count in zip(halves, counts, strict=True)) / sum(
        counts
    )
    assert cut == pytest.approx(mean, rel=1e-6)


def test_a_model_that_is_refused_trains_with_a_count_of_its_own() -> None:
    class Clip(transformers.CLIPModel):  # type: ignore[misc, name-defined]
        def count(self, batch: Any) -> int:
            return len(batch["input_ids"])

    donor = tiny("CLIPModel", "clip")
    model: nn.Module = Clip(donor.config)
    batch = batch_for(donor, "ZERO_SHOT_IMAGE_CLASSIFICATION")
    placed = lockstep.place(model, "single")
    halves = [{k: v[at : at + 2] if v.ndim else v for k, v in batch.items()} for at in (0, 2)]
    with pytest.warns(UserWarning, match="depends on the others"):
        placed.backward(*halves)


class TwoMeans(nn.Module):
    """A mean over words plus one over texts; every word and text has the same loss before the first
    step.
    """

    # as a model of the library has them
    config = None
    _no_split_modules = ()
    loss_function = None

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.zeros(8, 3))
        self.texts = nn.Parameter(torch.zeros(8, 2))

    def forward(self, input_ids: Tensor, labels: Tensor, order: Tensor) -> dict[str, Tensor]:
        words = nn.functional.cross_entropy(self.words[input_ids].flatten(0, 1), labels.flatten())
        return {"loss": words + nn.functional.cross_entropy(self.texts[input_ids[:, 0]], order)}


@pytest.mark.parametrize("alike", [False, True])
def test_a_sum_of_means_with_other_proportions_in_each_cut_is_refused_however_close_its_losses_are(
    alike: bool,
) -> None:
    """AlbertForPreTraining: a fresh model has nearly one loss for all words, so a comparison sees
    no difference.
    """
    ids = torch.arange(24).view(4, 6) % 8
    labels = ids % 3
    for row in range(4):
        labels[row, : 2 if alike else row] = -100
    batch = {"input_ids": ids, "labels": labels, "order": torch.arange(4) % 2}
    halves = [{key: value[at : at + 2] for key, value in batch.items()} for at in (0, 2)]
    model = TwoMeans()
    placed = lockstep.place(model, "single")
    if alike:
        assert float(placed.backward(*halves)) == pytest.approx(
            float(model(**batch)["loss"].detach()), rel=1e-6
        )
    else:
        with pytest.raises(UsageError, match="does not add up"):
            placed.backward(*halves)
