"""The loss over pairs, beside its formula, and the model that it compares with."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.models import get_model
from lockstep.models.adapters import has_adapters, without_adapters
from lockstep.models.preferences import DirectPreferences
from lockstep.trainer import check_named
from lockstep.trainer.named_loss import check_named_loss, loss_fn_of

VOCAB = 16


def tiny() -> nn.Module:
    torch.manual_seed(0)
    build = get_model("transformer")
    return build(n_layer=1, n_embd=16, n_head=2, vocab_size=VOCAB, block_size=16, dropout=0.0)


def batch_of_pairs() -> dict[str, torch.Tensor]:
    """Two sequences of 16: two pairs of answers, and one; what is left is padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, 16), generator=generator)
    documents = torch.tensor(
        [[0] * 4 + [1] * 3 + [2] * 4 + [3] * 5, [0] * 6 + [1] * 5 + [2] * 5], dtype=torch.int64
    )
    targets = torch.randint(0, VOCAB, (2, 16), generator=generator)
    counts = torch.zeros(2, 16, dtype=torch.bool)
    counts[0, [2, 3, 6, 9, 10, 14]] = True
    counts[1, [4, 5, 8, 9]] = True
    return {
        "input_ids": ids,
        "targets": targets.where(counts, torch.tensor(-100)),
        "document_ids": documents,
        "pairs": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    }


def by_hand(model: Any, batch: dict[str, torch.Tensor], row: int, document: int) -> torch.Tensor:
    """The log-likelihood of one answer, alone in its sequence."""
    inside = batch["document_ids"][row] == document
    logits = model(batch["input_ids"][row, inside][None])[0].log_softmax(-1)
    targets = batch["targets"][row, inside]
    at = torch.arange(len(targets))
    return (logits[at, targets.clamp(min=0)] * (targets != -100)).sum()


def of_pair(ahead: list[torch.Tensor], counts: list[int], **terms: Any) -> torch.Tensor:
    """The loss of a pair by the formula of its paper, with a beta of 0.5.

    `ahead` is by how much each answer has gained, `counts` how many tokens it has.
    """
    smoothing = terms.get("label_smoothing", 0.0)
    margin = 0.5 * (ahead[0] - ahead[1])
    right = torch.sigmoid(margin)
    wrong = torch.sigmoid(-margin)
    if terms.get("loss_type") == "hinge":
        return torch.clamp(1 - margin, min=0)
    if terms.get("loss_type") == "ipo":
        return (ahead[0] / counts[0] - ahead[1] / counts[1] - 1 / (2 * 0.5)) ** 2
    if terms.get("loss_type") == "sigmoid_norm":
        return -torch.sigmoid(0.5 * (ahead[0] / counts[0] - ahead[1] / counts[1])).log()
    if terms.get("loss_type") == "robust":
        return (-(1 - smoothing) * right.log() + smoothing * wrong.log()) / (1 - 2 * smoothing)
    return -(1 - smoothing) * right.log() - smoothing * wrong.log()


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"label_smoothing": 0.1},
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"loss_type": "robust"},
        {"loss_type": "hinge"},
        {"loss_type": "sigmoid_norm"},
        {"loss_type": "ipo"},
        {"nll_weight": 0.3},
        {"loss_type": "ipo", "nll_weight": 0.3},
    ],
    ids=str,
)
def test_the_loss_is_that_of_the_paper(terms: dict[str, Any]) -> None:
    """The model has moved away from its reference."""
    model = tiny()
    loss_fn = DirectPreferences(beta=0.5, **terms)
    loss_fn.bind_model(model)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = batch_of_pairs()
    expected = torch.zeros(())
    for row, pairs in ((0, 2), (1, 1)):
        for pair in range(pairs):
            answers = (2 * pair, 2 * pair + 1)
            ours = [by_hand(model, batch, row, each) for each in answers]
            theirs = [by_hand(reference, batch, row, each) for each in answers]
            in_answer = batch["targets"][row] != -100
            numbers = batch["document_ids"][row]
            counts = [int((in_answer & (numbers == each)).sum()) for each in answers]
            ahead = [our - their for our, their in zip(ours, theirs, strict=True)]
            expected = expected + of_pair(ahead, counts, **terms)
            expected = expected - terms.get("nll_weight", 0.0) * ours[0] / counts[0]
    others = {key: batch[key] for key in ("input_ids", "document_ids", "pairs")}
    loss = loss_fn(model(batch["input_ids"], batch["document_ids"]), batch["targets"], **others)
    torch.testing.assert_close(loss, expected)
    assert loss_fn.count(batch) == 3
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in loss_fn.parameters())


def test_a_metric_and_the_loss_of_a_batch_ask_the_reference_once() -> None:
    """Where ranks have shards of it, all of them compute it together, and a metric is of one."""
    model = tiny()
    loss_fn = DirectPreferences()
    loss_fn.bind_model(model)
    calls = []
    assert loss_fn.reference is not None
    loss_fn.reference.register_forward_hook(lambda *_: calls.append(1))
    batch = batch_of_pairs()
    logits = model(batch["input_ids"], batch["document_ids"])
    likelier = F.one_hot(batch["targets"].clamp(min=0), VOCAB) * 2.0
    sign = 1 - 2 * (batch["document_ids"] % 2)
    for expected in (1.0, 0.0):
        moved = logits + sign[..., None] * likelier
        assert loss_fn.accuracy(moved, **batch).tolist() == [expected] * 3
        loss_fn(moved, **batch)
        sign = -sign
    assert len(calls) == 2


def test_without_its_adapters_a_model_is_what_it_was() -> None:
    peft = pytest.importorskip("peft")
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    before = layers[0](x)
    assert not has_adapters(layers)
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, layers, "default")
    assert has_adapters(layers)
    layers[1].eval()
    trained = [parameter.requires_grad for parameter in layers.parameters()]
    with without_adapters(layers):
        assert torch.equal(layers(x), before)
    assert [parameter.requires_grad for parameter in layers.parameters()] == trained
    assert (layers.training, layers[0].training, layers[1].training) == (True, True, False)
    assert not torch.equal(layers(x), before)


def test_a_stage_of_a_model_is_no_reference() -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    config = peft.LoraConfig(r=2, target_modules=names[:1])
    peft.inject_adapter_in_model(config, model, "default")
    loss_fn = DirectPreferences()
    loss_fn.bind_model(model)
    assert loss_fn.reference is None
    model.to("meta")
    with pytest.raises(UsageError, match="the model without its adapters, and a stage has a part"):
        loss_fn(torch.zeros(2, 16, VOCAB), **batch_of_pairs())


def test_what_it_can_not_compare_is_one_error() -> None:
    for arguments, message in (
        ({"beta": 0.0}, "dpo can't use the beta 0.0"),
        ({"beta": "high"}, "dpo can't use the beta 'high'"),
        ({"label_smoothing": 0.5}, "dpo can't use the label_smoothing 0.5"),
        ({"nll_weight": -1}, "dpo can't use the nll_weight -1"),
        ({"loss_type": "higne"}, r"dpo has no loss_type 'higne'; did you mean 'hinge'\?"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing beside loss_type: ipo"),
        ({"reference": 3}, "the reference of dpo is 3"),
    ):
        with pytest.raises(UsageError, match=message):
            DirectPreferences(**arguments)
        named = {"name": "dpo", "args": arguments}
        data = {"data.name": "preferences", "model.name": "transformer"}
        with pytest.raises(UsageError, match=message):
            check_named(config_from({**data, "loss_fn": named}), "x.yaml")
    with pytest.raises(UsageError, match="Linear is not a causal language model"):
        DirectPreferences().bind_model(nn.Linear(2, 2))
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(UsageError, match="this one has no values yet"):
        DirectPreferences().bind_model(model)
    batch = batch_of_pairs()
    with pytest.raises(UsageError, match="the loss dpo is one over pairs, and a batch has"):
        DirectPreferences().count({key: batch[key] for key in ("input_ids", "targets")})
    with pytest.raises(UsageError, match="has no reference yet"):
        DirectPreferences()(torch.zeros(2, 16, VOCAB), **batch)
    part = {**batch, "input_ids": batch["input_ids"][:, :8], "targets": batch["targets"][:, :8]}
    with pytest.raises(UsageError, match="compares answers in full, and sequences are cut"):
        DirectPreferences()(torch.zeros(2, 8, VOCAB), **part)


def test_a_config_names_it() -> None:
    config = config_from({"loss_fn": {"name": "dpo", "args": {"beta": 0.3}}})
    assert config.loss_fn is not None
    check_named_loss(config.loss_fn)
    loss_fn = loss_fn_of(config)
    assert isinstance(loss_fn, DirectPreferences)
    assert loss_fn.beta == 0.3
    given = DirectPreferences(reference=tiny())
    given.bind_model(tiny())
    assert given.reference is not None
