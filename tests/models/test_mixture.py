"""The mixture of experts against the same sums written token by token, and what keeps its experts
in use.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models import get_model
from lockstep.models.mixture import Mixture, MixtureLayer
from tests.models.samples import mixture, texts


def layer_of(**args: Any) -> MixtureLayer:
    torch.manual_seed(0)
    layer = mixture(**args).layers[0].mlp
    torch.nn.init.normal_(layer.router.weight)  # scores that differ
    return layer


def by_hand(layer: MixtureLayer, token: Tensor) -> tuple[Tensor, list[int]]:
    """One token through its experts."""
    router = layer.router
    experts = layer.experts
    logits = router.weight @ token
    scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    ranked = scores + (router.bias if router.bias_rate else 0)
    chosen = ranked.argsort(descending=True)[: router.top_k].tolist()
    total = sum(scores[e] for e in chosen) if router.top_k > 1 else 1.0
    y = sum(
        scores[e]
        / total
        * (experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)))
        for e in chosen
    )
    return y + (layer.shared(token) if layer.shared is not None else 0), chosen


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"router": "sigmoid", "top_k": 3},
        {"top_k": 1, "n_shared": 0},
        {"n_shared": 2, "bias_rate": 0.1},
    ],
    ids=str,
)
def test_each_token_goes_through_its_experts_and_none_is_dropped(args: dict[str, Any]) -> None:
    layer = layer_of(**args)
    if "bias_rate" in args:
        # all tokens to one expert, however unlikely
        layer.router.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    x = torch.randn(2, 5, 16, requires_grad=True)
    y, terms = layer(x)
    made = [by_hand(layer, token) for token in x.flatten(0, 1)]
    expected = torch.stack([one for one, _ in made]).view_as(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    parameters = [x, *layer.parameters()]
    found, wanted = (
        torch.autograd.grad((out * weights).sum(), parameters, retain_graph=True)
        for out in (y, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if "bias_rate" in args:
        assert all(0 in chosen for _, chosen in made)
    counts = torch.bincount(torch.tensor([e for _, chosen in made for e in chosen]), minlength=4)
    logits = F.linear(x.flatten(0, 1), layer.router.weight)
    scores = (
        logits.softmax(-1)
        if layer.router.score == "softmax"
        else F.normalize(logits.sigmoid(), p=1, dim=-1)
    )
    balance = 4 * (counts / counts.sum() * scores.mean(0)).sum()
    torch.testing.assert_close(terms, torch.stack([balance, logits.logsumexp(-1).square().mean()]))


def test_the_loss_is_that_of_its_terms_and_plain_in_evaluation() -> None:
    model = mixture(balance_weight=0.5, z_weight=0.25)
    batch = texts()
    logits, terms = model(batch["input_ids"])
    count = model.count(batch)
    found = model.loss_terms((logits, terms), batch)
    torch.testing.assert_close(found["balance"], 0.5 * count * terms[0])
    torch.testing.assert_close(found["router_z"], 0.25 * count * terms[1])
    assert terms[0] >= 3  # three layers: 1 each if even, more if not
    model.eval()
    outputs = model(batch["input_ids"])
    assert torch.equal(outputs[1], torch.zeros(2))
    assert torch.equal(
        model.loss(outputs, batch), model.loss_terms(outputs, batch)["cross_entropy"]
    )


def test_the_load_of_a_step_moves_the_bias_and_is_in_the_next_steps_balance() -> None:
    layer = layer_of(balance="step", bias_rate=0.01)
    x = torch.randn(2, 5, 16)
    _, terms = layer(x)
    assert terms[0] == 0  # there was no step
    router = layer.router
    counts = router.step_counts.clone()
    assert counts.sum() == 2 * 5 * 2
    router.end_step(counts)
    torch.testing.assert_close(router.bias, 0.01 * (5.0 - counts).sign())
    _, terms = layer(x)
    scores = F.linear(x.flatten(0, 1), router.weight).softmax(-1)
    torch.testing.assert_close(terms[0], 4 * (counts / 20 * scores.mean(0)).sum())
    layer.eval()
    before = router.step_counts.clone()
    layer(x)
    assert torch.equal(router.step_counts, before)


def test_a_bias_evens_out_loads() -> None:
    layer = layer_of(bias_rate=0.02, balance="none")
    layer.router.weight.data *= 0.1
    layer.router.weight.data[0] += 0.05  # expert 0 is likelier for tokens whose sum is positive
    x = torch.randn(8, 32, 16) + 0.5
    loads = []
    for _ in range(60):
        layer(x)
        loads.append(layer.router.step_counts.clone())
        layer.router.step_counts.zero_()
        layer.router.end_step(loads[-1])
    assert loads[0].max() > 1.5 * loads[0].double().mean()
    assert loads[-1].max() < 1.15 * loads[-1].double().mean()


def test_a_transformer_of_equal_activated_parameters() -> None:
    """As `ready/transformer.yaml` is to `ready/mixture.yaml`: its layers are as wide as a token's
    experts together.
    """
    sizes = {"n_layer": 2, "n_embd": 48, "n_head": 4, "vocab_size": 24}
    sparse: Mixture = get_model("mixture")(
        **sizes, n_expert=8, top_k=2, n_shared=1, expert_hidden=40
    )  # type: ignore[assignment]
    dense = get_model("transformer")(**sizes, mlp_hidden=3 * 40)
    routed = sum(p.numel() for _, module in sparse.experts() for p in module.parameters())
    routers = sum(layer.mlp.router.weight.numel() for layer in sparse.layers)  # type: ignore[union-attr]
    activated = sum(p.numel() for p in sparse.parameters()) - routed + routed * 2 // 8 - routers
    assert activated == sum(p.numel() for p in dense.parameters())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"top_k": 5}, "top_k=5 of n_expert=4"),
        ({"router": "softplus"}, "router='softplus' is not known"),
        ({"balance": "global"}, "balance='global' is not known"),
        ({"expert_hidden": 0}, "expert_hidden=0"),
    ],
)
def test_sizes_that_do_not_fit(args: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mixture(**args)
