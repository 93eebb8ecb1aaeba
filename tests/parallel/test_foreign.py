"""Models of others under sharding: what FSDP2 alone crashes on or hangs in trains as in one
process, or is refused.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.strategy import parse_topology
from lockstep.torch_compat.fsdp_state import TAKES_ZEROS
from lockstep.trainer import Trainer
from tests.parity.same_bits import whole
from tests.ranks import run_ranks


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of 8 numbers; the sign of the first one, by which some models route, changes with each
    micro-batch of 2.
    """

    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, 8, generator=torch.Generator().manual_seed(index))
        x[0] = 1.0 if index // 2 % 2 else -1.0
        return x, y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = linear()
        self.mlp = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rest(x)

    def rest(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(torch.tanh(self.attention(x)))
        return out


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.out = linear()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.out(x)
        return out


class Containers(Stack):
    """Its blocks are lists of modules, which can't be called, as x-transformers has them."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.ModuleList([nn.LayerNorm(8), linear(), nn.ParameterList([torch.ones(8)])])
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner, scales in self.layers:  # type: ignore[misc]
            x = x + inner(norm(x)) * scales[0]
        out: Tensor = self.out(x)
        return out


class Scaled(Block):
    """With a parameter that has no dim, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rest(x) * self.scale.exp()


class BesideItsBlocks(Stack):
    """Calls a method of its blocks, never the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.rest(x)  # type: ignore[operator]
        out: Tensor = self.out(x)
        return out


class Experts(nn.Module):
    """Routes by the sign of a sample's first number, which stays as it is: a micro-batch uses one
    of two experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))  # the third one is never used

    def forward(self, x: Tensor) -> Tensor:
        expert = self.experts[0 if x[0, 0] > 0 else 1]
        return torch.cat([x[:, :1], expert(x)[:, 1:]], dim=1)


class SometimesShort(Stack):
    """Leaves its second block out for some data."""

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place != 1 or x[0, 0] > 0:
                x = torch.cat([x[:, :1], layer(x)[:, 1:]], dim=1)
        out: Tensor = self.out(x)
        return out


class Complex(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).to(torch.complex64) @ self.phases).real


class WithoutElements(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 8))


class ScriptedPart(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.jit.script(linear())  # type: ignore[no-untyped-call]


class SeveralTypes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "containers": Containers,
    "scalars": lambda: Stack(Scaled),
    "experts": lambda: Stack(Experts),
    "beside its blocks": BesideItsBlocks,
    "sometimes short": SometimesShort,
    "complex": Complex,
    "without elements": WithoutElements,
    "scripted part": ScriptedPart,
    "scripted blocks": lambda: Stack(lambda: torch.jit.script(linear())),  # type: ignore[no-untyped-call]
    "several types": lambda: Stack(SeveralTypes),
}
POLICY = "distributed.fsdp.auto_wrap_policy"
EXACT: dict[str, Any] = {"distributed.reproducible": True}
UNUSED: dict[str, Any] = {"distributed.ddp.find_unused_parameters": True}

# What trains as in one process.
ALIKE: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("fsdp:2", model, more)
        for model in ("containers", "scalars", "experts")
        for more in ({}, EXACT)
    ),
    (
        "fsdp:2",
        "scalars",
        {"training.optimizer": "sgd", "distributed.fsdp.accumulate": "unsharded"},
    ),
    ("fsdp:2", "beside its blocks", {POLICY: ["Linear"]}),
    ("fsdp:2", "experts", {POLICY: ["Block"]}),
    ("fsdp:2", "sometimes short", {}),
    ("fsdp:2", "sometimes short", EXACT),
    ("ddp:2", "sometimes short", UNUSED),
    ("ddp:2", "sometimes short", UNUSED | EXACT),
    ("ddp:2", "sometimes short", UNUSED | EXACT | {"training.global_batch_size": 12}),
    ("ddp:2", "complex", {}),
    ("ddp:2", "scripted part", {}),
]
# One of each kind, in the quick run.
SOME_ALIKE = [ALIKE[place] for place in (0, 2, 4, -4, -2)]
# Units that the data of some ranks leave out: FSDP of older torches can't join those.
_LEAVES_OUT = [("fsdp:2", "experts"), ("fsdp:2", "sometimes short")]
if not TAKES_ZEROS:
    ALIKE = [case for case in ALIKE if case[:2] not in _LEAVES_OUT]
    SOME_ALIKE = [case for case in SOME_ALIKE if case[:2] not in _LEAVES_OUT]
OTHERS_ALIKE = [case for case in ALIKE if case not in SOME_ALIKE]
# What is refused: (topology, model, settings, what the message says).
REFUSED: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "fsdp:2",
        "beside its blocks",
        {},
        ["layers.0 are used, but its forward() is not called", "[Linear]"],
    ),
    ("fsdp:2", "complex", {}, ["phases is complex", "view_as_complex"]),
    ("ddp:2", "complex", EXACT, ["phases is complex", "view_as_complex"]),
    ("fsdp:2", "without elements", {}, ["nothing has no elements", "write strategy: ddp"]),
    ("fsdp:2", "scripted part", {}, ["out is TorchScript", "write strategy: ddp"]),
    ("ddp:2", "scripted blocks", {}, ["layers.0 is TorchScript", "as it was before"]),
    ("fsdp:2", "several types", {}, ["has parameters of several types", "model.to(torch.float32)"]),
]


def trained(
    topology: str, model: str, more: dict[str, Any]
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, norm) of each step, and the parameters after the last one."""
    torch.manual_seed(0)
    values, _ = parse_topology(topology)
    settings = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.max_steps": 3,
        "training.learning_rate": 3e-3,
        "data.shuffle": False,
        "precision.mode": "fp32",
        **{f"distributed.{key}": value for key, value in values.items()},
        **more,
    }
    trainer = Trainer(MODELS[model](), config=config_from(settings), loss_fn=nn.MSELoss())
    steps = [(float(record.loss), float(record.grad_norm)) for record in trainer.steps(Rows())]
    return steps, {
        name: whole(parameter).clone() for name, parameter in trainer.placed.parameters.items()
    }


def message(topology: str, model: str, more: dict[str, Any]) -> str:
    try:
        trained(topology, model, more)
    except UsageError as error:
        return str(error)
    return "no error"


def train_all(cases: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    return [trained(*case) for case in cases]


def in_one_launch(checkpoint: str) -> dict[str, Any]:
    found: dict[str, Any] = {"alike": train_all(SOME_ALIKE)}
    found["refused"] = [message(topology, model, more) for topology, model, more, _ in REFUSED]
    found["gone on"] = gone_on("fsdp", checkpoint)
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    found["detail"] = message("ddp:2", "containers", {})
    return found


def gone_on(strategy: str, checkpoint: str) -> list[float]:
    """Losses after a checkpoint of SGD, whose kernels are fused in one process."""
    trainer = Trainer(
        Stack(),
        config=config_from(
            {
                "training.batch_size": 2,
                "training.max_steps": 4,
                "training.optimizer": "sgd",
                "precision.mode": "fp32",
                "training.optimizer_args": {"momentum": 0.9},
                "training.global_batch_size": 8,
                "distributed.strategy": strategy,
                "data.shuffle": False,
            }
        ),
        loss_fn=nn.MSELoss(),
    )
    steps = trainer.steps(Rows())
    if os.path.exists(checkpoint):
        trainer.load_checkpoint(checkpoint)
    else:
        next(steps), next(steps)
        trainer.save_checkpoint(checkpoint)
    return [float(record.loss) for record in steps]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    path = str(tmp_path_factory.mktemp("sgd") / "step-00000002")
    torch.manual_seed(0)
    return path, gone_on("single", path)


@pytest.fixture(scope="module")
def ranks(checkpoint: tuple[str, list[float]]) -> list[dict[str, Any]]:
    return run_ranks(in_one_launch, 2, checkpoint[0])


def test_trap_76_units_that_cannot_be_called_scalars_and_experts_train_as_in_one_process(
    ranks: list[dict[str, Any]],
) -> None:
    """Containers, parameters without a dim, experts that no rank or only some use in a step, and
    complex ones.
    """
    check_alike(SOME_ALIKE, [rank["alike"] for rank in ranks])


@pytest.mark.full
def test_trap_76_the_others_train_as_in_one_process_too() -> None:
    check_alike(OTHERS_ALIKE, run_ranks(train_all, 2, OTHERS_ALIKE))


def check_alike(cases: list[tuple[str, str, dict[str, Any]]], of_ranks: list[list[Any]]) -> None:
    for place, (topology, model, more) in enumerate(cases):
        steps, parameters = trained("single", model, more)
        for of_rank in of_ranks:
            found, values = of_rank[place]
            exact = more.get("distributed.reproducible")
            assert (
                found == steps
                if exact
                else found == [pytest.approx(pair, rel=1e-5) for pair in steps]
            ), (
                model,
                more,
            )
            for name, value in parameters.items():
                same = (
                    torch.equal(values[name], value)
                    if exact
                    else torch.allclose(values[name], value, atol=1e-5)
                )
                assert same, (topology, model, more, name)


def test_what_cannot_be_sharded_is_one_error_with_what_to_write(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        for (_, model, more, parts), said in zip(REFUSED, rank["refused"], strict=True):
            assert all(part in said for part in parts), (model, more, said)


def test_trap_75_shards_go_on_from_an_sgd_checkpoint_of_one_process(
    ranks: list[dict[str, Any]], checkpoint: tuple[str, list[float]]
) -> None:
    for rank in ranks:
        assert rank["gone on"] == pytest.approx(checkpoint[1], rel=1e-5)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="another torch may survive it"
)
def test_ddp_under_debug_detail_is_refused_where_torch_dies_of_it(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert "segmentation fault" in rank["detail"]


def test_lazy_modules_sparse_gradients_and_closures_are_one_error_each() -> None:
    config = config_from({"training.batch_size": 2, "training.max_steps": 1})
    with pytest.raises(UsageError, match=r"0\.weight, 0\.bias has no shape yet"):
        Trainer(nn.Sequential(nn.LazyLinear(4)), config=config, loss_fn=nn.MSELoss())
    with pytest.raises(UsageError, match="0 makes sparse gradients"):
        Trainer(nn.Sequential(nn.Embedding(4, 4, sparse=True)), config=config, loss_fn=nn.MSELoss())
    model = linear()
    with pytest.raises(UsageError, match="LBFGS evaluates the loss again"):
        next(
            iter(
                Trainer(
                    model, torch.optim.LBFGS(model.parameters()), nn.MSELoss(), config=config
                ).steps(Rows())
            )
        )
