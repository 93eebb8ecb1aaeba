"""Sound programs of the eighteen kinds on which TrainCheck counts false alarms, without a fault.

    python benchmarks/silent_bugs/sound.py NAME
    torchrun --nproc-per-node 2 benchmarks/silent_bugs/sound.py NAME

The kinds are those of OrderLab/TrainCheck-Evaluation-Workloads, `fp_rate/workloads/setups.yml`
(arXiv:2506.14813), most of them from pytorch/examples. Models and loops are of our own writing,
small, on random data. `PROGRAMS` names the loops; those in `SUPERVISED` differ in what the table
says, and run on several ranks, too.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 48
CLASSES = 4
WORDS = 20
NODES = 32
_NUMBERS = torch.Generator().manual_seed(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_NUMBERS)


def below(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_NUMBERS)


def images(channels: int = 1) -> tuple[Tensor, ...]:
    return normal(SAMPLES, channels, 8, 8), below(CLASSES, SAMPLES)


# ---- models ----


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(
            self.head(F.dropout(self.norm(self.rnn(x[:, 0])[0][:, -1]), 0.2, self.training)), dim=1
        )


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.again(self.two(F.relu(self.norm(self.one(x))))))


class Autoencoder(nn.Module):
    """A variational one."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 8)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x.flatten(1)).chunk(2, 1)
        return (
            self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp()),
            mean,
            log_variance,
        )


class Siamese(nn.Module):
    """Says whether two images are of one class, with one encoder for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(
            self.head(torch.cat([self.encode(x[:, :1]), self.encode(x[:, 1:])], 1))
        )


class Sequences(nn.Module):
    """Predicts a sequence's next values, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.LSTM(1, 8, batch_first=True, dtype=torch.double)
        self.head = nn.Linear(8, 1, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.one(x.unsqueeze(2))[0]).squeeze(2)
        return y


class Words(nn.Module):
    """A language model whose head is its embedding; an LSTM goes on from where the last batch has
    ended.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.embed.weight
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = (
            nn.LSTM(8, 8, batch_first=True) if kind == "lstm" else nn.TransformerEncoder(layer, 1)
        )

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        x = self.embed(ids)
        after = None
        if isinstance(self.body, nn.LSTM):
            x, after = self.body(x, state)
        else:
            x = self.body(
                x, nn.Transformer.generate_square_subsequent_mask(ids.shape[1]), is_causal=True
            )
        return self.head(x), after


class Graph(nn.Module):
    """Classifies the nodes of a graph, by convolution or by attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        links = (normal(NODES, NODES) > 1).float() + torch.eye(NODES)
        self.register_buffer("links", links / links.sum(1, keepdim=True))
        self.one = nn.Linear(8, 16)
        self.two = nn.Linear(16, CLASSES)
        self.score = nn.Linear(16, 2) if kind == "attention" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(F.dropout(x, 0.5, self.training))
        weights = self.links
        if self.score is not None:
            mine, theirs = self.score(h).unbind(1)
            scores = F.leaky_relu(mine[:, None] + theirs[None])
            weights = scores.masked_fill(self.links == 0, -1e9).softmax(1)  # type: ignore[operator]
        return F.log_softmax(weights @ self.two(F.relu(weights @ h)), dim=1)


def convolutions(*after: nn.Module, channels: int = 1) -> nn.Module:
    body = nn.Conv2d(channels, 4, 3, padding=1)
    return nn.Sequential(
        body, nn.ReLU(), *after, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    )


# ---- losses ----


def classes(runs: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(runs(x), y)


def autoencoding(runs: nn.Module, x: Tensor, _y: Tensor) -> Tensor:
    image, mean, log_variance = runs(x)
    divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
    every = F.binary_cross_entropy_with_logits(image, x.flatten(1).sigmoid(), reduction="sum")
    return (every + divergence) / len(x)


class NextWord:
    """The loss of a language model, which carries its state from batch to batch."""

    def __init__(self) -> None:
        self.state: Any = None

    def __call__(self, runs: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        state = (
            None
            if self.state is None or not runs.training
            else tuple(part.detach() for part in self.state)
        )
        logits, after = runs(ids, state)
        self.state = after if runs.training else self.state
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Supervised:
    """A loop over batches.

    Attributes:
        data: makes inputs and targets.
        by_hand: learning rate with which the loop writes its weights itself; where ranks are
            compared, SGD does.
        scaled: with autocast and a loss scaler.
        shuffled: False: in order.
        clip: the largest norm.
        on_ranks: whether its samples can be dealt out; else all of them are one batch.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]] = images
    loss: Callable[..., Tensor] = classes
    optimizer: Callable[..., optim.Optimizer] = optim.Adadelta
    by_hand: float = 0.0
    scaled: bool = False
    shuffled: bool = True
    clip: float = 0.0
    on_ranks: bool = True

    def __call__(self) -> None:
        torch.manual_seed(0)
        data = TensorDataset(*self.data())
        model = self.model()
        sampler = DistributedSampler(data, shuffle=self.shuffled) if dist.is_initialized() else None
        train: Iterable[Any] = DataLoader(
            data, 8, shuffle=self.shuffled and sampler is None, sampler=sampler
        )
        train = train if self.on_ranks else [data.tensors]
        runs = DistributedDataParallel(model) if sampler is not None else model
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # dropout of each rank
        by_hand = self.by_hand if "RANK" not in os.environ else 0.0
        optimizer = (
            optim.SGD(model.parameters(), self.by_hand)
            if self.by_hand
            else self.optimizer(model.parameters())
        )
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        scaler = torch.amp.GradScaler("cpu", enabled=self.scaled)
        for epoch in range(4):
            if sampler is not None:
                sampler.set_epoch(epoch)
            runs.train()
            for batch in train:

                def backward(batch: Any = batch) -> Tensor:
                    optimizer.zero_grad()
                    with torch.autocast("cpu", enabled=self.scaled):
                        loss = self.loss(runs, *batch)
                    scaler.scale(loss).backward()
                    return loss

                if isinstance(optimizer, optim.LBFGS):
                    optimizer.step(backward)  # type: ignore[arg-type]
                    continue
                backward()
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                if by_hand:
                    for parameter in model.parameters():
                        parameter.data.add_(parameter.grad, alpha=-by_hand)  # type: ignore[arg-type]
                else:
                    scaler.step(optimizer)
                    scaler.update()
            if not by_hand:
                schedule.step()
            runs.eval()
            with torch.no_grad():
                print(
                    f"epoch {epoch}: {sum(float(self.loss(runs, *batch)) for batch in train):.3f}",
                    flush=True,
                )


def fit(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda runs, x, y: loss(runs(x), y)


def polynomial() -> tuple[Tensor, ...]:
    x = normal(SAMPLES, 1) ** torch.arange(1, 5)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5], [0.1]]) + 3


def text() -> tuple[Tensor, ...]:
    ids = below(WORDS, SAMPLES * 6 + 1)
    return tuple(x.view(-1, 8, 6).flatten(0, 1) for x in (ids[:-1], ids[1:]))


def pairs() -> tuple[Tensor, ...]:
    return normal(SAMPLES, 2, 8, 8), below(2, SAMPLES, 1).float()


def waves() -> tuple[Tensor, ...]:
    x = torch.sin(torch.arange(13) / 2 + 6 * torch.rand(SAMPLES, 1, generator=_NUMBERS)).double()
    return x[:, :-1], x[:, 1:]


def graph() -> tuple[Tensor, ...]:
    return normal(NODES, 8), below(CLASSES, NODES)


LINEAR = partial(nn.Sequential, nn.Linear(20, 15), nn.Linear(15, 1))
WORD_LOOP: dict[str, Any] = {"data": text, "by_hand": 1.0, "shuffled": False, "clip": 0.25}
ON_GRAPH: dict[str, Any] = {
    "data": graph,
    "optimizer": partial(optim.Adam, weight_decay=5e-4),
    "on_ranks": False,
}
SUPERVISED: dict[str, Supervised] = {
    "mnist": Supervised(lambda: convolutions(nn.Dropout(0.25))),
    "mnist-rnn": Supervised(Rows, loss=fit(F.nll_loss)),
    "resnet18": Supervised(
        lambda: convolutions(Residual(), Residual(), channels=3),
        lambda: images(3),
        optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
    ),
    "ddp-multigpu": Supervised(
        LINEAR,
        lambda: (normal(SAMPLES, 20), below(2, SAMPLES, 1).float()),
        fit(F.binary_cross_entropy_with_logits),
        partial(optim.SGD, lr=1e-3),
    ),
    "autocast": Supervised(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)),
        lambda: (normal(SAMPLES, 16), normal(SAMPLES, 16)),
        fit(F.mse_loss),
        partial(optim.SGD, lr=1e-3),
        scaled=True,
    ),
    "vae": Supervised(Autoencoder, loss=autoencoding, optimizer=partial(optim.Adam, lr=1e-3)),
    "regression": Supervised(
        lambda: nn.Linear(4, 1), polynomial, fit(F.smooth_l1_loss), by_hand=0.1
    ),
    "siamese-network": Supervised(Siamese, pairs, fit(F.binary_cross_entropy)),
    "time-sequence-prediction": Supervised(
        Sequences, waves, fit(F.mse_loss), partial(optim.LBFGS, lr=0.8, max_iter=4)
    ),
    "word-language-model-lstm": Supervised(lambda: Words("lstm"), loss=NextWord(), **WORD_LOOP),
    "word-language-model-transformer": Supervised(
        lambda: Words("transformer"), loss=NextWord(), **WORD_LOOP
    ),
    "gcn": Supervised(lambda: Graph("convolution"), **ON_GRAPH),
    "gat": Supervised(lambda: Graph("attention"), **ON_GRAPH),
}


# ---- loops of another shape ----


def dcgan() -> None:
    """Two networks and two optimizers; the judge's gradients of the generator's step are thrown
    away.
    """
    torch.manual_seed(0)
    data = TensorDataset(normal(SAMPLES, 1, 8, 8), normal(SAMPLES, 4, 1, 1))
    makes: nn.Module = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 4),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
        nn.Tanh(),
    )
    judges: nn.Module = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4), nn.Flatten(0), nn.Sigmoid()
    )
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    if sampler is not None:
        makes = DistributedDataParallel(makes)
        judges = DistributedDataParallel(judges)
    mine, its = (
        optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (makes, judges)
    )
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for real, noise in DataLoader(data, 8, sampler=sampler, shuffle=sampler is None):
            judges.zero_grad()
            F.binary_cross_entropy(judges(real), torch.ones(len(real))).backward()
            made = makes(noise)
            F.binary_cross_entropy(judges(made.detach()), torch.zeros(len(real))).backward()
            its.step()
            makes.zero_grad()
            F.binary_cross_entropy(judges(made), torch.ones(len(real))).backward()
            mine.step()


def forward_forward() -> None:
    """Trains each layer on its own, by how it tells samples with right labels from samples with
    wrong ones.
    """
    torch.manual_seed(0)
    right = normal(SAMPLES, 16)
    wrong = normal(SAMPLES, 16)
    for layer in (nn.Linear(16, 12), nn.Linear(12, 8)):
        optimizer = optim.Adam(layer.parameters(), lr=0.03)
        for _ in range(10):
            good, bad = (F.relu(layer(F.normalize(x))).pow(2).mean(1) for x in (right, wrong))
            optimizer.zero_grad()
            F.softplus(torch.cat([2 - good, bad - 2])).mean().backward()
            optimizer.step()
        right, wrong = (F.relu(layer(F.normalize(x))).detach() for x in (right, wrong))


def _hogwild_worker(number: int, model: nn.Module) -> None:
    torch.manual_seed(number)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for x, y in DataLoader(TensorDataset(*images()), 8, shuffle=True):
        optimizer.zero_grad()
        classes(model, x, y).backward()
        optimizer.step()


def hogwild() -> None:
    """Two processes write the same weights, without waiting for each other."""
    torch.manual_seed(0)
    model = convolutions(nn.Dropout(0.25)).share_memory()
    torch.multiprocessing.spawn(_hogwild_worker, (model,), nprocs=2)  # type: ignore[no-untyped-call]


def policy_gradient(*, critic: bool) -> None:
    """Learns from episodes of a walk: from the returns alone, or from how far they are above what a
    critic expects.
    """
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.1), nn.ReLU())
    head = nn.Linear(16, 3 if critic else 2)
    model = nn.Sequential(body, head)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(8):
        place = torch.zeros(2)
        said = []
        values = []
        rewards = []
        for _ in range(10):
            out = model(place)
            chosen = Categorical(logits=out[:2])
            action = chosen.sample()  # type: ignore[no-untyped-call]
            said.append(chosen.log_prob(action))  # type: ignore[no-untyped-call]
            values.append(out[-1])
            place = place + torch.tensor([0.1, -0.1])[action] + torch.tensor([0.0, 0.1])
            rewards.append(-float(place[0].abs()))
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        expected = torch.stack(values) if critic else torch.zeros(10)
        loss = -(torch.stack(said) * (returns - expected.detach())).sum()
        optimizer.zero_grad()
        (loss + F.smooth_l1_loss(expected, returns, reduction="sum") if critic else loss).backward()
        optimizer.step()


PROGRAMS: dict[str, Callable[[], None]] = {
    **SUPERVISED,
    "dcgan": dcgan,
    "mnist-forward-forward": forward_forward,
    "mnist-hogwild": hogwild,
    "reinforce-reinforce": partial(policy_gradient, critic=False),
    "reinforce-actor-critic": partial(policy_gradient, critic=True),
}
ON_RANKS = [*(name for name, one in SUPERVISED.items() if one.on_ranks), "dcgan"]

if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    PROGRAMS[sys.argv[1]]()
