"""A chain that torch's tracer makes computes what the model computes, in every bit, with its
parameters.
"""

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.protocol import blocks_of, objective_of
from lockstep.models.traced import trace
from lockstep.parallel.facts import facts_of
from lockstep.parallel.place import key_model
from lockstep.randomness import RandomState
from tests.models.decoders import decoder, transformers
from tests.parity.pipelines import NoChain
from tests.parity.toy import VOCAB


def ids(samples: int) -> Tensor:
    return torch.randint(0, VOCAB, (samples, 12))


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_traced_model_computes_the_same(training: bool) -> None:
    """Any number of samples; dropout in training and none in evaluation."""
    model = NoChain()
    chain = trace(model, ids(2)).train(training)
    model.train(training)
    assert [name for name, _ in chain.segments()] == [
        "inputs",
        *(f"layers.{i}" for i in range(7)),
        "outputs",
    ]
    assert [n for n, _ in chain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert set(chain.state_dict()) == set(model.state_dict())
    for samples in (2, 5, 1):
        batch = ids(samples)
        results = []
        for each in (model, chain):
            torch.manual_seed(1)
            model.zero_grad()
            outputs = each(batch)
            outputs.square().sum().backward()
            results.append(
                (outputs, [p.grad.clone() for p in model.parameters() if p.grad is not None])
            )
        (one, gradients), (other, others) = results
        assert torch.equal(one, other)
        assert all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-5)
            for a, b in zip(gradients, others, strict=True)
        )


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branching(Running):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) if x.sum() > 0 else x


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Running, "changes buffers in its forward pass: layers.0.1"),
        (Branching, "torch can't export Branching"),
        (Again, "layers.0 runs more than once in a forward pass, and draws random numbers"),
        (lambda: nn.Linear(4, 4), "no repeated blocks"),
    ],
)
def test_what_can_not_be_traced_is_said(model: type[nn.Module], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace(model(), torch.randn(3, 4))


class Drawing(nn.Module):
    """Draws before, in, between and behind its blocks; the second and third have nothing between
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)) for _ in range(4)
        )
        self.head = nn.Linear(16, VOCAB)
        self.dropout = nn.Dropout(0.3)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, None]:
        x = self.dropout(self.embedding(input_ids))
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place != 1:
                x = self.dropout(x.tanh())
        return self.head(self.dropout(x)), None


def test_a_traced_model_draws_what_the_model_draws() -> None:
    """Law 1: keyed by micro-batch and block, cut by the tracer or not, the same dropout, the same
    bits.
    """
    batch = ids(3)
    results = []
    for cut in (False, True):
        model: nn.Module = Drawing()
        model = trace(model, batch) if cut else model
        random_state = RandomState(7, torch.device("cpu"))
        key_model(facts_of(model), random_state)
        with random_state.running("train", 2):
            random_state.at(1)
            logits, nothing = model(batch)
            assert nothing is None
            logits.square().sum().backward()
        results.append((logits, [p.grad for p in model.parameters()]))
    (one, gradients), (other, others) = results
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_what_comes_between_blocks_is_a_segment_where_it_draws() -> None:
    names = [name for name, _ in trace(Drawing(), ids(2)).segments()]
    assert names == [
        "inputs",
        "layers.0",
        "layers.0.after",
        "layers.1",
        "layers.2",
        "layers.2.after",
        "layers.3",
        "outputs",
    ]


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, object]:
        for layer in self.layers:
            x = layer(x)
        return {"y": x, "more": (x.sum(), None, 3)}


def test_outputs_keep_their_structure_and_samples_of_another_shape_are_refused() -> None:
    x = torch.randn(3, 4)
    expected = Dictionary()
    found = trace(Dictionary(), x)
    found.load_state_dict(expected.state_dict())
    one = expected(x)
    other = found(x)
    assert torch.equal(one["y"], other["y"])
    assert torch.equal(one["more"][0], other["more"][0])
    assert other["more"][1:] == (None, 3)
    with pytest.raises(
        UsageError,
        match=r"traced with samples of the shapes \[\(4,\)\], and gets samples of \[\(5,\)\]",
    ):
        # a graph holds lengths as constants: masks and positions would be of the traced one
        found(torch.randn(3, 5))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


@pytest.mark.full
def test_decoders_of_the_library_that_are_wrapped_for_logits() -> None:
    """Their angles are computed without gradients and without autocast: graphs within the graph."""
    model = Logits(decoder("mixtral", attention_dropout=0.0))
    # its experts loop over those that were chosen
    if int(transformers.__version__.partition(".")[0]) < 5:
        with pytest.raises(UsageError, match="torch can't export Logits"):
            trace(model, ids(2))
        return
    chain = trace(model, ids(2))
    assert [name for name, _ in chain.segments()][1:-1] == [
        f"model.model.layers.{i}" for i in range(3)
    ]
    batch = ids(3)
    for precision in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            assert torch.equal(chain(batch), model(batch))


class OwnLoss(nn.Module):
    """Returns its loss, a mean over the targets that are not -1; its list of blocks is named as a
    method is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x).tanh()
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-1
        )


def test_a_loss_in_the_graph_tells_what_it_is_a_mean_over() -> None:
    model = OwnLoss()
    targets = ids(3)
    targets[:2, 3:] = -1
    batch = {"idx": ids(3), "targets": targets}
    loss, _times, count = objective_of(model).of(model, batch)
    chain = trace(model, batch["idx"], targets)
    traced, _times, traced_count = objective_of(chain).of(chain, batch)
    assert (count, traced_count, traced) == (18, 18, loss)


def test_a_list_named_blocks_is_no_obstacle_and_its_members_do_not_run() -> None:
    model = OwnLoss()
    chain = trace(model, ids(2), ids(2))
    assert [n for n, _ in chain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not blocks_of(chain)


def test_a_member_named_as_the_chains_own_is_refused() -> None:
    model = OwnLoss()
    model.segments = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="a member named segments"):
        trace(model, ids(2), ids(2))
