"""A loss function with weights of its own trains as in plain PyTorch, under every strategy.

The reference is a loop over whole batches, with one optimizer over the weights of model and loss
function.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Trainer, WholeBatch, checkpoint
from lockstep.checkpoint import digest_tensors
from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.models import get_model
from tests.ranks import run_ranks

SAMPLES = 48
BATCH = 16
CLASSES = 5
STEPS = 6


class Proxies(nn.Module):
    """One vector for each class, a temperature without a dim, something frozen, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.proxies = nn.Parameter(torch.randn(CLASSES, 6))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, CLASSES))
        self.inner = nn.CrossEntropyLoss(weight=torch.ones(CLASSES))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        similar = F.normalize(outputs) @ F.normalize(self.proxies).T
        loss: Tensor = self.inner(self.temperature.exp() * similar * self.scale, targets)
        return loss + 0.1 * self.temperature


class Similar(nn.Module):
    """CLIP's kind: a sample's loss depends on all others."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, outputs: Tensor, _targets: Tensor) -> Tensor:
        similar = F.normalize(outputs[:, :3]) @ F.normalize(outputs[:, 3:]).T
        return F.cross_entropy(similar * self.temperature.exp(), torch.arange(len(outputs)))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) % CLASSES
    )


def built(loss: type[nn.Module] = Proxies) -> tuple[nn.Sequential, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6)]
    return nn.Sequential(*layers), loss()


def trained(loss: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in loss.parameters() if parameter.requires_grad]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


Rows = list[tuple[float, float]]


def plain(kind: type[nn.Module] = Proxies) -> tuple[Rows, dict[str, Tensor]]:
    """Return (loss, norm) of each step, and the state after them."""
    model, loss_fn = built(kind)
    both = [*model.parameters(), *trained(loss_fn)]
    optimizer = adamw(both)
    x, y = data().tensors
    rows = []
    for step in range(STEPS):
        batch = torch.arange(BATCH) + step % 3 * BATCH
        loss = loss_fn(model(x[batch]), y[batch])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(both, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    state = {
        **model.state_dict(),
        **{f"loss_fn.{name}": value for name, value in loss_fn.state_dict().items()},
    }
    return rows, {
        name: value.detach()
        for name, value in state.items()
        if "frozen" not in name and "inner" not in name
    }


def with_all_in_one(model: nn.Module, loss: nn.Module) -> Any:
    return adamw([*model.parameters(), *trained(loss)])


def with_function(_model: nn.Module, _loss: nn.Module) -> Any:
    return adamw


def with_function_that_adds_them(_model: nn.Module, loss: nn.Module) -> Any:
    return lambda parameters: adamw([*parameters, *trained(loss)])


def with_a_group_of_their_own(_model: nn.Module, loss: nn.Module) -> Any:
    return lambda parameters: adamw([{"params": parameters}, {"params": trained(loss)}])


SETTINGS: Any = {
    "batch_size": 2,
    "global_batch_size": BATCH,
    "gradient_clip": 0.5,
    "shuffle": False,
}


def run(
    optimizer: Callable[..., Any], kind: type[nn.Module], settings: dict[str, Any]
) -> tuple[Rows, dict[str, Tensor]]:
    model, loss = built(kind)
    loss_fn = loss if kind is Proxies else WholeBatch(loss)
    trainer = Trainer(model, optimizer(model, loss), loss_fn, **{**SETTINGS, **settings})
    rows = [
        (float(record.loss), float(record.grad_norm)) for record in trainer.steps(data(), epochs=2)
    ]
    return rows, trainer.state_dict()


Case = tuple[Callable[..., Any], type[nn.Module], dict[str, Any]]


def all_of(cases: list[Case]) -> list[tuple[Rows, dict[str, Tensor]]]:
    return [run(*case) for case in cases]


def check(cases: list[Case], found: list[tuple[Rows, dict[str, Tensor]]]) -> None:
    for (optimizer, kind, settings), (rows, state) in zip(cases, found, strict=True):
        case = optimizer.__name__, kind.__name__, settings
        expected, final = plain(kind)
        assert torch.tensor(rows).sub(torch.tensor(expected)).abs().max() < 1e-5, case
        assert state.keys() == final.keys(), case
        assert all(
            torch.allclose(state[name], value, atol=1e-5) for name, value in final.items()
        ), case


def digest_of(state: dict[str, Tensor]) -> str:
    return digest_tensors(sorted(state.items()))


EXACT = {"reproducible": True}
PLAIN_OUTER_STEP = {
    "workers": 1,
    "inner_steps": 100,
    "outer_momentum": 0.0,
    "outer_learning_rate": 1.0,
}
OF_ONE: list[Case] = [
    (with_all_in_one, Proxies, {}),
    (with_function, Proxies, EXACT),
    (with_function_that_adds_them, Proxies, {"strategy": "dp"}),
    (with_a_group_of_their_own, Proxies, {}),
    (with_function, Similar, {}),
    (with_function, Proxies, {"strategy": "diloco", "diloco": PLAIN_OUTER_STEP}),
]
OF_TWO: list[Case] = [
    (with_all_in_one, Proxies, {"strategy": "ddp"}),
    (with_function, Proxies, {**EXACT, "strategy": "ddp"}),
    (with_function_that_adds_them, Proxies, {"strategy": "fsdp"}),
    (with_a_group_of_their_own, Proxies, {**EXACT, "strategy": "fsdp"}),
    (with_all_in_one, Proxies, {"strategy": "pipeline"}),
    (with_function, Proxies, {**EXACT, "strategy": "pipeline"}),
    (with_function, Similar, {"strategy": "ddp"}),
    (with_function, Similar, {"strategy": "pipeline"}),
]
HYBRID = {"strategy": "fsdp", "fsdp": {"sharding_strategy": "hybrid_shard"}, "shard_size": 2}
SCHEDULES = ("InterleavedZeroBubble", "GPipe")
GRID: list[tuple[int, dict[str, Any]]] = [
    (2, {"strategy": "accelerate"}),
    *((2, {"strategy": "pipeline", "pipeline": {"schedule": name}}) for name in SCHEDULES),
    *((3, {**exact, "strategy": "ddp"}) for exact in ({}, EXACT)),
    *((4, {**HYBRID, **exact}) for exact in ({}, EXACT)),
    *(
        (4, {**exact, "strategy": "pipeline", "pipeline_size": 2, "shard_size": n})
        for n in (1, 2)
        for exact in ({}, EXACT)
    ),
]


def test_they_train_in_one_process() -> None:
    check(OF_ONE, all_of(OF_ONE))


@pytest.mark.parametrize(
    "cases",
    [[OF_TWO[1], OF_TWO[2], *OF_TWO[5:7]], pytest.param(OF_TWO, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_they_train_on_two_ranks_as_in_one_process(cases: list[Case]) -> None:
    found = run_ranks(all_of, 2, cases)[0]
    check(cases, found)
    exact = digest_of(run(with_function, Proxies, EXACT)[1])
    for case, (_, state) in zip(cases, found, strict=True):
        assert "reproducible" not in case[2] or digest_of(state) == exact, case


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_they_train_on_every_layout(ranks: int) -> None:
    cases: list[Case] = [
        (with_function, Proxies, settings) for size, settings in GRID if size == ranks
    ]
    if ranks == 2:
        cases += [
            (with_function, Similar, {**EXACT, "strategy": name})
            for name in ("ddp", "fsdp", "pipeline")
        ]
    found = run_ranks(all_of, ranks, cases)[0]
    check(cases, found)
    for case, (_, state) in zip(cases, found, strict=True):
        if case[2].get("reproducible"):
            assert digest_of(state) == digest_of(run(with_function, case[1], EXACT)[1]), case


class Scaled(nn.Module):
    """For logits of a language model, whose sequences and vocabulary may be cut."""

    reduction = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.2))
        self.bias = nn.Parameter(torch.linspace(-0.1, 0.1, 32))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        scores = logits * self.temperature.exp() + self.bias
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(32, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "targets": ids[1:]}


def texts(cases: list[dict[str, Any]]) -> list[tuple[Rows, str]]:
    found = []
    for settings in cases:
        torch.manual_seed(0)
        model = get_model("transformer")(
            vocab_size=32, block_size=8, n_embd=16, n_head=4, n_layer=2
        )
        trainer = Trainer(
            model,
            "adamw",
            Scaled(),
            batch_size=2,
            global_batch_size=8,
            gradient_clip=0.5,
            **settings,
        )
        rows = [(float(record.loss), float(record.grad_norm)) for record in trainer.steps(Texts())]
        state = trainer.state_dict()
        found.append((rows, digest_of(state)))
        assert not trainer.is_main_process or "loss_fn.bias" in state
    return found


def test_they_train_where_sequences_and_layers_are_cut() -> None:
    cases: list[dict[str, Any]] = [
        {"strategy": "tensor", "reproducible": True},
        {"strategy": "tensor"},
        {"strategy": "context"},
    ]
    (expected, exact), (rows, _) = texts([{"reproducible": True}, {}])
    assert torch.allclose(torch.tensor(rows), torch.tensor(expected), atol=1e-5)
    found = run_ranks(texts, 2, cases)[0]
    assert found[0][1] == exact
    for rows, _ in found:
        assert torch.allclose(torch.tensor(rows), torch.tensor(expected), atol=1e-5)


def test_they_are_refused_where_sums_are_over_chunks() -> None:
    with pytest.raises(
        UsageError, match=r"the loss function has weights of its own: loss_fn\.temperature"
    ):
        texts([{"reproducible": True, "context_blocks": 4}])


def placed_by_hand(strategy: str) -> tuple[Rows, dict[str, Tensor]]:
    model, loss_fn = built()
    placed = lockstep.place(model, strategy=strategy, loss_fn=loss_fn)
    optimizer = adamw(placed.parameters())
    x, y = data().tensors
    rows = []
    for step in range(STEPS):
        batches = (torch.arange(BATCH) + step % 3 * BATCH).view(-1, 2)[
            placed.data_parallel_rank :: placed.data_parallel_size
        ]
        loss = placed.backward(*((x[batch], y[batch]) for batch in batches))
        rows.append((float(loss), float(placed.clip_grad_norm_(0.5))))
        optimizer.step()
        optimizer.zero_grad()
    return rows, placed.state_dict()


def test_they_train_in_a_loop_of_ones_own() -> None:
    cases: list[Case] = [(with_function, Proxies, {})]
    check(cases, [placed_by_hand("single")])
    check(cases, [run_ranks(placed_by_hand, 2, "fsdp")[0]])


def saved_and_resumed(strategies: list[str], folder: str) -> dict[str, Tensor]:
    """Save after three steps under one strategy, and go on under the other."""
    for place, strategy in enumerate(strategies, 1):
        model, loss = built()
        steps = STEPS * place // len(strategies)
        trainer = Trainer(
            model, adamw, loss, strategy=strategy, output_dir=folder, max_steps=steps, **SETTINGS
        )
        trainer.train(data())
    return trainer.state_dict()


def test_they_are_saved_and_resumed_under_another_strategy(tmp_path: Path) -> None:
    _, expected = plain()
    state = run_ranks(saved_and_resumed, 2, ["pipeline", "fsdp"], str(tmp_path))[0]
    assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in expected.items())
    path = tmp_path / "checkpoints" / f"step-{STEPS:08}"
    model, loss = built()
    model.load_state_dict(checkpoint.weights(path))
    loss.load_state_dict(checkpoint.loss_weights(path), strict=False)
    assert torch.allclose(loss.proxies.detach(), expected["loss_fn.proxies"], atol=1e-5)  # type: ignore[arg-type]
    # whoever evaluates needs no loss function
    plain_model = Trainer(built()[0], adamw, F.cross_entropy, **SETTINGS)
    with pytest.raises(UsageError, match="does not fit"):
        plain_model.load_checkpoint(path)  # its optimizer has other parameters


def test_what_the_optimizer_forgets_is_told() -> None:
    model, loss = built()
    with pytest.warns(
        UserWarning, match=r"loss_fn\.temperature, loss_fn\.proxies is in no group of the optimizer"
    ):
        Trainer(model, adamw(model.parameters()), loss, **SETTINGS)


def test_weights_in_a_closure_are_refused() -> None:
    scale = nn.Parameter(torch.tensor(1.0))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * scale.exp(), targets)

    model = built()[0]
    with pytest.raises(UsageError, match=r"write a loss function with weights as an nn\.Module"):
        Trainer(model, adamw([*model.parameters(), scale]), loss_fn, **SETTINGS)
    with pytest.raises(
        UsageError, match="the loss function trains a parameter that it holds in a closure"
    ):
        next(Trainer(built()[0], "adamw", loss_fn, **SETTINGS).steps(data()))
    teacher = nn.Linear(4, CLASSES)  # asked without a graph, so that nothing in it trains

    def distilled(outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            teacher(torch.zeros(1, 4))
        return F.cross_entropy(outputs, targets)

    assert next(Trainer(built()[0], "adamw", distilled, **SETTINGS).steps(data())).step == 1


def shared() -> None:
    model, loss = built()
    loss.proxies = model[4].weight
    Trainer(model, "adamw", loss, strategy="fsdp", **SETTINGS)


def test_what_the_loss_shares_with_a_model_that_is_cut_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"the loss function uses 4\.weight of the model"):
        run_ranks(shared, 2)


def test_a_config_names_one() -> None:
    config = config_from(
        {"loss_fn": {"name": f"{__name__}:Proxies"}, "training.learning_rate": 0.05}
    )
    torch.manual_seed(3)
    trainer = Trainer(built()[0], config=config, **SETTINGS)
    before = trainer.state_dict()["loss_fn.proxies"].clone()
    next(trainer.steps(data()))
    assert not torch.equal(trainer.state_dict()["loss_fn.proxies"], before)
    assert (
        trainer.placed.num_parameters
        == sum(p.numel() for p in built()[0].parameters()) + 6 * CLASSES + 1
    )


def test_evaluation_leaves_them_and_their_buffers() -> None:
    class Counting(Proxies):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            assert self.training == torch.is_grad_enabled()
            return super().forward(outputs, targets)

    model, loss = built(Counting)
    trainer = Trainer(model, adamw, loss, **SETTINGS)
    trainer.loss_check.skip()
    next(trainer.steps(data()))
    assert trainer.evaluate(data()) > 0
    assert loss.training
