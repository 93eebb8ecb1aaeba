"""Label smoothing, the z-loss and losses by chunks: values, gradients, the bits of one process
under each axis.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import config_from
from lockstep.costs.hardware import cluster_of
from lockstep.errors import UsageError
from lockstep.models.language import TokenLosses, set_token_losses
from lockstep.models.protocol import objective_of
from lockstep.parallel.tensor.layer_cut import LayerCut
from lockstep.parallel.tensor.loss_parallel import cut_token_losses
from lockstep.plan.candidates import evaluate_layout
from lockstep.plan.layouts import model_size_of
from lockstep.plan.workload import workload_of
from lockstep.trainer import Trainer
from tests.models.samples import transformer
from tests.parity.same_bits import digest, trainer_for
from tests.parity.toy import LENGTH, Tokens
from tests.ranks import run_ranks
from tests.sampled import sampled

SMOOTHING = 0.1
WEIGHT = 0.02
_SETTINGS = {"training.label_smoothing": SMOOTHING, "training.z_loss": WEIGHT}
_SETTINGS |= {"training.eval_batches": 8}


def _by_hand(logits: Tensor, targets: Tensor, smoothing: float, weight: float) -> Tensor:
    """As the definitions have it: the cross entropy to a distribution, and the squared log of Z."""
    rows = logits.flatten(0, 1).float()
    size = rows.shape[1]
    flat = targets.flatten()
    wanted = torch.full_like(rows, smoothing / size)
    wanted.scatter_(1, flat.clamp_min(0)[:, None], 1 - smoothing + smoothing / size)
    log_z = rows.exp().sum(-1).log()
    losses = -(wanted * (rows - log_z[:, None])).sum(-1) + weight * log_z**2
    return losses.where(flat != -100, 0.0)


@pytest.mark.parametrize(
    "terms", [(0.0, 0.0), (SMOOTHING, 0.0), (0.0, WEIGHT), (SMOOTHING, WEIGHT)]
)
def test_values_and_gradients_are_those_of_the_definition(terms: tuple[float, float]) -> None:
    """Of the whole vocabulary, and of one that is computed in blocks as where ranks cut it."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 12)
    targets = torch.randint(0, 12, (2, 5))
    targets[0, 1] = -100
    whole = TokenLosses()
    whole.regularize(label_smoothing=terms[0], z_loss=terms[1])
    weights = torch.randn(10)  # of each loss, so that no gradient hides behind another

    def both(compute: Any) -> tuple[Tensor, Tensor]:
        given = logits.clone().requires_grad_()
        losses = compute(given)
        (losses * weights).sum().backward()
        assert given.grad is not None
        return losses.detach(), given.grad

    expected = both(lambda given: _by_hand(given, targets, *terms))
    cuts = [LayerCut(None, blocks, sequence=False) for blocks in (1, 3)]
    found = [both(lambda given: whole(given, targets))]
    found += [both(lambda given, c=cut: cut_token_losses(given, targets, c, terms)) for cut in cuts]
    for pair in found:
        torch.testing.assert_close(pair, expected)
    whole.eval()
    plain = _by_hand(logits, targets, 0.0, 0.0)
    torch.testing.assert_close(whole(logits, targets), plain)


def _trained(topologies: list[str]) -> list[tuple[Any, ...]]:
    """Train a few steps; return digest, losses, and the loss of an evaluation."""
    found = []
    for topology in topologies:
        settings = {"training.max_steps": 3, **_SETTINGS}
        trainer = trainer_for(topology, "transformer", settings, n_layer=2, vocab_size=64)
        losses = [float(record.loss).hex() for record in trainer.steps(Tokens())]
        found.append((digest(trainer), losses, trainer.evaluate(Tokens()).hex()))
    return found


@sampled("topologies", ["pipeline:2", "ddp:2", "tensor:2", "fsdp:2"], 4)
def test_the_bits_are_those_of_one_process(topologies: list[str]) -> None:
    """And an evaluation is without the terms, in stages of a pipeline, too."""
    (alone,) = _trained(["single"])
    settings = {"training.max_steps": 3, **_SETTINGS}
    trainer = trainer_for("single", "transformer", settings, n_layer=2, vocab_size=64)
    [record, *_] = trainer.steps(Tokens())
    # Logits are small at first: the z-loss is about 0.02 · log(64)², and both data are alike.
    assert float(record.loss) - trainer.evaluate(Tokens()) > 0.2
    for results in run_ranks(_trained, 2, topologies):
        for topology, found in zip(topologies, results, strict=True):
            assert found == alone, topology


def test_they_are_refused_where_another_loss_counts() -> None:
    with pytest.raises(UsageError, match="not of loss_fn"):
        Trainer(nn.Linear(3, 2), loss_fn=nn.CrossEntropyLoss(), label_smoothing=0.1)
    with pytest.raises(UsageError, match="not of the loss of Linear"):
        Trainer(nn.Linear(3, 2), z_loss=0.1)


def test_another_trainer_takes_them_back() -> None:
    model: Any = transformer()
    Trainer(model, z_loss=0.1)
    assert model.token_losses.terms == (0.0, 0.1)
    Trainer(model)
    assert model.token_losses.terms == (0.0, 0.0)


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return made


_VOCABULARY = 2003
_LENGTH = 30
_MODELS = ["transformer", "tied", "bdh", "mixture", "free_transformer"]
_FAMILIES = ["llama", "gpt2", "gemma2", "cohere", "granite"]  # three scale or cap their logits


def _wide(name: str) -> nn.Module:
    """A model whose logits are by far its largest activations; in training, without draws."""
    from lockstep.models import get_model

    torch.manual_seed(0)
    args: dict[str, Any] = {"n_layer": 1, "n_embd": 8, "n_head": 2, "dropout": 0.0}
    args |= {"vocab_size": _VOCABULARY, "block_size": _LENGTH}
    if name == "bdh":
        args["mlp_multiplier"] = 4
    if name == "free_transformer":
        args["latent_bits"] = 2
    if name == "tied":
        args["tie_embeddings"] = True
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
        args = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        args |= {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.0}
        if name == "hf:gpt2":
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            args = {"n_embd": 8, "n_layer": 1, "n_head": 2, **drops}
        args |= {"vocab_size": _VOCABULARY, "block_size": _LENGTH}
        if name == "hf:gemma2":
            args["head_dim"] = 4
    model = get_model("transformer" if name == "tied" else name)(**args)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def _loss_and_gradient(
    model: nn.Module, batch: dict[str, Tensor], chunks: int
) -> tuple[float, Tensor, int]:
    """The summed loss, its gradient, and the most elements of a tensor on the way."""
    set_token_losses(
        model, label_smoothing=SMOOTHING, z_loss=WEIGHT, chunks=chunks, has_loss_fn=False
    )
    objective = objective_of(model)
    model.zero_grad()
    torch.manual_seed(0)  # the Free Transformer draws
    with _Largest() as largest:
        loss, _, _ = objective.of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(parts).double(), largest.elements


@pytest.mark.parametrize("name", [*_MODELS, *(f"hf:{family}" for family in _FAMILIES)])
def test_chunks_are_the_whole_without_its_logits(name: str) -> None:
    """Losses and gradients, in either precision; an evaluation does not hold them either."""
    model = _wide(name)
    ids = torch.randint(0, _VOCABULARY, (2, _LENGTH))
    targets = torch.randint(0, _VOCABULARY, (2, _LENGTH))
    targets[0, 1] = -100
    batch = {"input_ids": ids, "targets": targets}
    both = ((torch.float32, 1e-5), (torch.float64, 1e-10))
    for dtype, tolerance in both[:1] if name == "bdh" else both:  # its sums are in float32
        model = model.to(dtype)
        loss, gradient, largest = _loss_and_gradient(model, batch, 1)
        assert largest >= ids.numel() * _VOCABULARY
        for chunks in (4, 7):
            found, by_chunks, most = _loss_and_gradient(model, batch, chunks)
            # the logits of a chunk of both texts, or the weight of the output layer
            assert most <= max(2 * math.ceil(_LENGTH / chunks), 8) * _VOCABULARY
            assert found == pytest.approx(loss, rel=tolerance)
            assert (by_chunks - gradient).norm() <= tolerance * gradient.norm()
        plain = model.eval()
        with torch.no_grad(), _Largest() as seen:
            summed = objective_of(plain).of(plain, batch)[0]
        assert seen.elements < ids.numel() * _VOCABULARY / 2
        assert float(summed) < loss  # without the terms
        model.train()


@pytest.mark.parametrize("name", ["transformer", "hf:llama"])
def test_chunks_cost_no_precision_in_bfloat16(name: str) -> None:
    """Under autocast the gradient is as far from that in float32 as without chunks."""
    model = _wide(name)
    ids = torch.randint(0, _VOCABULARY, (2, _LENGTH))
    batch = {"input_ids": ids, "targets": ids.roll(-1, 1)}
    loss, exact, _ = _loss_and_gradient(model, batch, 1)
    with torch.autocast("cpu", torch.bfloat16):
        of_all, whole, _ = _loss_and_gradient(model, batch, 1)
        by_chunks, gradient, most = _loss_and_gradient(model, batch, 4)
    assert most <= 2 * math.ceil(_LENGTH / 4) * _VOCABULARY
    assert by_chunks == pytest.approx(of_all, rel=1e-6)
    assert of_all == pytest.approx(loss, rel=1e-2)
    assert (gradient - exact).norm() <= 1.1 * (whole - exact).norm()


_CHUNKED = {**_SETTINGS, "training.loss_chunks": 3}


def _chunked(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Train (model, topology, settings) for two steps: digest, losses, an evaluation, a metric."""
    found = []
    for model, topology, settings in cases:
        # a piece of a sequence has two positions or more, so it can be cut
        data = Tokens(128 if settings == _BOTH else LENGTH)
        settings = {"training.max_steps": 2, **_CHUNKED, **settings}
        trainer = trainer_for(topology, model, settings, vocab_size=64)
        losses = [float(record.loss).hex() for record in trainer.steps(data)]
        metrics = {"width": lambda outputs, _targets: outputs.shape[-1]}
        if model != "transformer":
            metrics = {}  # outputs are several
        measured = trainer.evaluate(data, metrics=metrics) if metrics else None
        found.append((digest(trainer), losses, trainer.evaluate(data), measured))
    return found


_OPEN = {axis: {"distributed.open_axes": [axis]} for axis in ("tensor", "context")}
_BOTH = {"distributed.open_axes": ["tensor", "context"]}


def _check_chunks(ranks: int, cases: list[tuple[Any, ...]]) -> None:
    alone: list[tuple[Any, Any]] = []  # settings, and what comes of them in one process
    for results in run_ranks(_chunked, ranks, cases, timeout=1800):
        for (model, topology, settings), found in zip(cases, results, strict=True):
            one = (model, settings)
            if all(one != known for known, _ in alone):
                alone += [(one, each) for each in _chunked([(model, "single", settings)])]
            assert found == next(each for known, each in alone if known == one), (model, topology)


def _on_two(model: str) -> list[tuple[Any, ...]]:
    plain: list[tuple[Any, ...]] = [(model, each, {}) for each in ("fsdp:2", "pipeline:2")]
    return [*plain, *((model, f"{axis}:2", settings) for axis, settings in _OPEN.items())]


def test_chunks_have_the_bits_of_one_process() -> None:
    """On shards; the test below has every topology."""
    _check_chunks(2, _on_two("transformer")[:1])


@pytest.mark.full
@pytest.mark.parametrize("model", ["transformer", "bdh", "mixture", "free_transformer", "hf:llama"])
def test_chunks_have_the_bits_of_one_process_in_each_model(model: str) -> None:
    _check_chunks(2, [(model, "ddp:2", {}), *_on_two(model)])
    four: list[tuple[Any, ...]] = [
        (model, each, {}) for each in ("hybrid:2x2", "pipeline:2*fsdp:2")
    ]
    four += [(model, "fsdp:2*tensor:2", _OPEN["tensor"])]
    four += [(model, "pipeline:2*context:2", _OPEN["context"])]
    four += [(model, "context:2*tensor:2", _BOTH)]
    _check_chunks(4, four)


def _near(topologies: list[str]) -> list[list[float]]:
    """Losses where bits are not asked for."""
    found = []
    for topology in topologies:
        settings = {"training.max_steps": 3, **_CHUNKED, "distributed.reproducible": False}
        trainer = trainer_for(topology, "transformer", settings, vocab_size=64)
        found.append([float(record.loss) for record in trainer.steps(Tokens())])
    return found


@pytest.mark.full
def test_chunks_where_bits_are_not_asked_for() -> None:
    settings = {"training.max_steps": 3, **_SETTINGS}
    trainer = trainer_for("single", "transformer", settings, vocab_size=64)
    expected = [float(record.loss) for record in trainer.steps(Tokens())]
    topologies = ["ddp:2", "fsdp:2", "pipeline:2", "tensor:2", "context:2"]
    for results in run_ranks(_near, 2, topologies):
        for topology, found in zip(topologies, results, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), topology


def test_chunks_are_refused_where_the_output_layer_is_not_known() -> None:
    with pytest.raises(UsageError, match="loss_chunks=2: loss_fn"):
        Trainer(transformer(), loss_fn=nn.CrossEntropyLoss(), loss_chunks=2)
    with pytest.raises(UsageError, match="loss_chunks=2: the loss of Linear"):
        Trainer(nn.Linear(3, 2), loss_chunks=2)


def test_a_plan_counts_the_logits_of_one_chunk() -> None:
    config = config_from(
        {
            "model.name": "transformer",
            "model.args": {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50_000},
            "training.batch_size": 2,
            "training.loss_chunks": 8,
        }
    )

    def peak(chunks: int) -> int:
        asked = config.replaced({"training.loss_chunks": chunks})
        work = workload_of(asked)
        cluster = cluster_of(1, "A100-40GB")
        change = {"distributed.strategy": "single"}
        layout = evaluate_layout(work, asked, cluster, change, model_size_of(work, asked))
        assert layout.memory is not None
        return layout.needed_bytes

    logits = 2 * 512 * 50_000 * 4
    assert peak(1) > 2 * logits
    assert peak(8) < logits
