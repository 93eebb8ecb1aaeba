"""Label smoothing and the z-loss: values, gradients, the bits of one process under each axis."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.language import TokenLosses
from lockstep.parallel.loss_parallel import cut_token_losses
from lockstep.parallel.tensor_blocks import LayerCut
from lockstep.trainer import Trainer
from tests.models.samples import transformer
from tests.parity.same_bits import digest, trainer_for
from tests.parity.toy import Tokens
from tests.ranks import run_ranks

SMOOTHING = 0.1
WEIGHT = 0.02
_SETTINGS = {"training.label_smoothing": SMOOTHING, "training.z_loss": WEIGHT}


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


def test_the_bits_are_those_of_one_process() -> None:
    """And an evaluation is without the terms, in stages of a pipeline, too."""
    topologies = ["ddp:2", "fsdp:2", "pipeline:2", "tensor:2"]
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
