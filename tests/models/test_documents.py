"""Sequences of several documents, which do not see each other and count their positions from their
own begin.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.attention import Attend, positions_within
from lockstep.models.protocol import objective_of
from tests.parity.toy import Packed, Tokens, language_model


def filled(name: str) -> nn.Module:
    model = language_model(name, dropout=0.0).to_empty(device="cpu").eval()
    torch.manual_seed(0)
    model.init_weights()  # type: ignore[operator]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def logits(outputs: Any) -> Tensor:
    found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return found


@pytest.mark.parametrize("name", ["transformer", "mixture", "bdh"])
def test_a_document_among_others_is_as_if_alone(name: str) -> None:
    model = filled(name)
    batch = Packed()[3]
    ids = batch["input_ids"][None]
    documents = batch["document_ids"][None]
    together = logits(model(ids, documents))
    edges = [
        0,
        *((documents[0, 1:] != documents[0, :-1]).nonzero().flatten() + 1).tolist(),
        documents.shape[1],
    ]
    assert len(edges) == 4
    for begin, end in pairwise(edges):
        torch.testing.assert_close(
            together[:, begin:end], logits(model(ids[:, begin:end])), rtol=1e-4, atol=1e-5
        )
    assert not torch.allclose(together, logits(model(ids)), rtol=1e-1, atol=1e-1)


def test_the_latent_of_a_document_sees_nothing_of_the_others() -> None:
    model = filled("free_transformer")
    batch = Packed()[3]
    ids = batch["input_ids"][None]
    documents = batch["document_ids"][None]
    other = ids.clone()
    other[:, documents[0] != documents[0, 0]] += 1
    first = documents[0] == documents[0, 0]
    found = [model(each, documents)[1] for each in (ids, other % 61)]
    assert torch.equal(found[0][:, first], found[1][:, first])
    assert not torch.equal(found[0], found[1])


def test_positions_count_from_the_begin_of_a_document() -> None:
    assert positions_within(torch.tensor([[4, 4, 4, 0, 0, 7], [1, 1, 2, 3, 3, 3]])).tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 1, 0, 0, 1, 2],
    ]


def test_a_run_of_queries_sees_its_documents() -> None:
    q = torch.randn(2, 4, 8, 16)
    k = torch.randn(2, 2, 8, 16)
    v = torch.randn(2, 2, 8, 16)
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [2, 2, 3, 3, 3, 3, 4, 4]])
    for causal in (True, False):
        attend = Attend(causal=causal)
        seen = 6 if causal else 8
        run = attend.run(q[:, :, 4:6], k[:, :, :seen], v[:, :, :seen], 4, documents)
        torch.testing.assert_close(run, attend(q, k, v, documents)[:, :, 4:6])


class Deaf(nn.Module):
    """A model that looks at token ids alone."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.sum()


def test_a_model_that_is_not_given_them_is_refused() -> None:
    objective = objective_of(Deaf())
    objective.inputs(Tokens()[0])
    with pytest.raises(UsageError, match="Deaf does not take document_ids"):
        objective.inputs(Packed()[0])


def test_a_model_of_the_library_that_may_mix_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    unknown = objective_of(language_model("hf:llama"))
    unknown.inputs(Packed()[0])
    model = language_model("hf:llama")
    for kind in ("llama9", "gpt_oss"):
        model.config.model_type = kind
        with pytest.raises(UsageError, match=f"hf:{kind} is not known to keep the documents"):
            objective_of(model).inputs(Packed()[0])
    model.config.model_type = "llama"
    with monkeypatch.context() as patched:
        patched.setattr("lockstep.models.hf_causal._KEEPS_THEM_SINCE", 99)
        with pytest.raises(UsageError, match=r"transformers [\d.]+ is not known to keep packed"):
            objective_of(model).inputs(Packed()[0])
    cut = language_model("hf:qwen3")
    cut.context_plan()  # as where sequences are cut over ranks
    objective_of(cut).inputs(Tokens()[0])
    with pytest.raises(
        UsageError, match="qwen3 is cut along its sequences, and these hold several documents"
    ):
        objective_of(cut).inputs(Packed()[0])
    balanced = {"num_local_experts": 4, "output_router_logits": True}
    mixture = objective_of(language_model("hf:mixtral", **balanced))
    with pytest.raises(UsageError, match="does not take document_ids"):
        mixture.inputs(Packed()[0])


def test_a_model_of_ones_own_takes_them_by_name() -> None:
    class Own(nn.Module):
        def forward(self, input_ids: Tensor, document_ids: Tensor) -> Tensor:
            return (input_ids + document_ids).sum()

    batch = Packed()[0]
    assert objective_of(Own()).inputs(batch)[1]["document_ids"] is batch["document_ids"]
