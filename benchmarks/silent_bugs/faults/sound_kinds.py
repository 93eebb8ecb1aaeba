"""Sound models of further kinds: own randomness, coupled samples, two passes, libraries, other
axes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.axes import experts, transformer
from benchmarks.silent_bugs.faults.models import (
    VOCAB,
    WIDTH,
    Block,
    Net,
    Tokens,
    Vectors,
    net,
    vectors,
)
from benchmarks.silent_bugs.faults.registry import sound
from lockstep.trainer.whole_batch import WholeBatch
from lockstep.verify import Subject


@sound()
def stochastic_depth() -> Subject:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if torch.rand(()) < 0.7 else x + 0.0 * super().forward(x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Dropped()
    return net(model)


@sound()
def own_generator_seeded_by_the_sample() -> Subject:
    class Noisy(Net):
        def forward(self, ids: Tensor) -> Tensor:
            each = [torch.Generator().manual_seed(int(sample.sum())) for sample in ids]
            noise = torch.stack([torch.randn(VOCAB, generator=generator) for generator in each])
            return super().forward(ids) + 0.1 * noise.unsqueeze(1)

    return net(Noisy())


@sound()
def variational_autoencoder() -> Subject:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encode = nn.Linear(WIDTH, 8)
            self.decode = nn.Linear(4, WIDTH)

        def forward(self, x: Tensor, _y: Tensor) -> Tensor:
            mean, log_variance = self.encode(x).chunk(2, 1)
            made = self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp())
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
            return ((made - x).square().sum(1) + divergence).mean()

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(Autoencoder(), Vectors())


@sound()
def recurrent() -> Subject:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__(blocks=0)
            del self.place
            self.memory = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.memory(self.embed(ids))[0])
            return logits

    return net(Recurrent())


@sound()
def quantisation_aware() -> Subject:
    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
            rounded = (self.weight / scale).round() * scale
            return functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    torch.manual_seed(0)
    return vectors(nn.Sequential(Quantised(WIDTH, 32), nn.ReLU(), Quantised(32, WIDTH)))


@sound()
def gradient_penalty() -> Subject:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.judge = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            between = ((x + y) / 2).requires_grad_()
            with torch.enable_grad():
                score = self.judge(between).sum()
                (slope,) = torch.autograd.grad(score, between, create_graph=torch.is_grad_enabled())
            penalty = (slope.norm(dim=1) - 1).square()
            return (self.judge(x).squeeze(1) - self.judge(y).squeeze(1) + 10 * penalty).mean()

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(Penalised(), Vectors())


class Reversed(torch.autograd.Function):
    """Passes values on, and their gradient with the other sign."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


@sound()
def adversary_behind_a_reversed_gradient() -> Subject:
    class Adversarial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(WIDTH, 32)
            self.task = nn.Linear(32, WIDTH)
            self.domain = nn.Linear(32, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            domain = self.domain(Reversed.apply(h))
            return functional.mse_loss(self.task(h), y) + functional.cross_entropy(
                domain, (x[:, 0] > 0).long()
            )

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(Adversarial(), Vectors())


class Towers(nn.Module):
    """Two encoders of two views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.one(x)), functional.normalize(self.other(y))


def clip_loss(outputs: Any, _targets: Any) -> Tensor:
    one, other = outputs
    return functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


@sound()
def contrastive_over_the_whole_batch() -> Subject:
    return Subject(Towers(), Views(), loss_fn=WholeBatch(clip_loss))


class Views(Vectors):
    """Two views of each sample, by the names of the model's arguments."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}


@sound(
    settings={
        "training.lr_schedule": "cosine",
        "training.warmup_steps": 3,
        "training.gradient_clip": 0.1,
    }
)
def two_groups_of_parameters_under_a_schedule() -> Subject:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        decayed, others = (
            [p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False)
        )
        return torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}], lr=3e-3
        )

    return Subject(Net(), Tokens(), optimizer=optimizer)


@sound(topology="fsdp:2")
def batch_norm_sharded() -> Subject:
    torch.manual_seed(0)
    return vectors(
        nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))
    )


@sound(topology="hybrid:2x2")
def language_model_on_replicas_of_shards() -> Subject:
    return net()


@sound(topology="context:2")
def transformer_whose_sequences_are_cut() -> Subject:
    return net(transformer(dropout=0.1))


@sound(topology="tensor:2")
def transformer_whose_layers_are_cut() -> Subject:
    return net(transformer(dropout=0.1))


@sound(topology="ddp:2*expert:2")
def mixture_in_balance() -> Subject:
    return net(experts(balance="step"))
