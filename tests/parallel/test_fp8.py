"""Linears in float8: which ones, what they compute, the same step under every strategy, and what is
refused.
"""

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.models.protocol import blocks_of
from lockstep.parallel.fp8 import apply_fp8
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model, losses, worst
from tests.ranks import run_ranks

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="NOT TESTED: float8 needs `pip install torchao`"
)
CPU = torch.device("cpu")
EMULATED = {"precision.fp8": "emulated"}
STEPS = 2
# All numbers of the first step, whose weights are the same in every bit; and of later ones, before
# which a sum that ended in another bit made something round to the next number of float8, an eighth
# of itself away.
FIRST = 1e-6
LATER = 2e-3

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ddp": {"distributed.strategy": "ddp"},
    "fsdp": {"distributed.strategy": "fsdp"},
    "checkpointed": {"distributed.strategy": "fsdp", "training.gradient_checkpointing": "full"},
    "pipeline": {"distributed.strategy": "pipeline"},
    "zero bubble": {
        "distributed.strategy": "pipeline",
        "distributed.pipeline.schedule": "ZBVZeroBubble",
        "distributed.pipeline.stages_per_rank": 2,
    },
}

MODES = {"fp32": ("fsdp",), "bf16": ("pipeline",)}
ALL_MODES = {mode: tuple(TOPOLOGIES) for mode in MODES}


class Block(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.second = shared
        self.narrow = nn.Linear(48, 24)
        self.hooked = nn.Linear(32, 32)
        self.own = Doubled(32, 32)
        self.hooked.register_forward_hook(lambda _module, _args, output: output)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(48, 32, bias=False)
        self.layers = nn.ModuleList([Block(shared), Block(shared)])
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@needs_torchao
def test_linears_inside_blocks_are_taken_and_keep_their_parameters() -> None:
    model = Stack()
    before = dict(model.named_parameters())
    shared = model.layers[0].second
    model.eval()
    (notice,) = apply_fp8(model, blocks_of(model), "emulated", CPU)
    assert notice.startswith("fp8: 3 of 10 linears, emulated, torchao ")
    taken = [
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    ]
    assert taken == ["layers.0.first", "layers.0.second", "layers.1.first"]
    assert model.layers[1].second is model.layers[0].second is not shared
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert not any(module.training for module in model.modules())


@needs_torchao
def test_products_are_of_numbers_rounded_to_float8() -> None:
    """Against the roundings written out: e4m3 forward, e5m2 for the gradient of what comes out."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(32, 16)), nn.Sequential(nn.Linear(32, 16))])
    weight = model[0][0].weight
    bias = model[0][0].bias
    apply_fp8(model, blocks_of(model), "emulated", CPU)
    x = torch.randn(3, 5, 32, requires_grad=True)
    pull = torch.randn(3, 5, 16)
    y = model[0](x)
    y.backward(pull)

    def rounded(tensor: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        scale = torch.finfo(dtype).max / tensor.detach().abs().max()
        return (tensor.detach() * scale).to(dtype).float() / scale

    low = rounded(pull, torch.float8_e5m2)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.detach(), rounded(x) @ rounded(weight).T + bias.detach(), **close)
    torch.testing.assert_close(x.grad, low @ rounded(weight), **close)
    torch.testing.assert_close(weight.grad, low.flatten(0, 1).T @ rounded(x).flatten(0, 1), **close)
    torch.testing.assert_close(bias.grad, pull.sum((0, 1)), **close)
    assert not torch.allclose(y.detach(), x.detach() @ weight.detach().T + bias.detach(), **close)


def in_one_launch(
    modes: dict[str, tuple[str, ...]],
) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    return {
        (name, mode): losses({**TOPOLOGIES[name], **EMULATED, "precision.mode": mode}, steps=STEPS)
        for mode, names in modes.items()
        for name in names
    }


@needs_torchao
@pytest.mark.parametrize(
    "modes", [MODES, pytest.param(ALL_MODES, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_every_strategy_takes_the_step_of_one_process(modes: dict[str, tuple[str, ...]]) -> None:
    """Loss and gradient norm, dropout and uneven masks on; in the first step far closer than float8
    comes to fp32.
    """
    found = run_ranks(in_one_launch, 2, modes)
    for mode, names in modes.items():
        alone = losses({**EMULATED, "precision.mode": mode}, steps=STEPS)
        plain = losses({"precision.mode": mode}, steps=1)
        assert worst(plain[:1], alone[:1]) > 50 * FIRST, "float8 has no effect"
        for name in names:
            for result in (of_rank[name, mode] for of_rank in found):
                assert worst(result[:1], alone[:1]) < FIRST, (name, mode)
                assert worst(result, alone) < LATER, (name, mode)


@needs_torchao
def test_it_is_said_at_start_and_checkpoints_know_nothing_of_it() -> None:
    trainers = [
        Trainer(
            language_model("transformer"), config=config_from({"training.max_steps": 1, **more})
        )
        for more in (EMULATED, {})
    ]
    for trainer in trainers:
        list(trainer.steps(Tokens()))
    assert any(
        notice.startswith("fp8: 14 of 14 linears") for notice in trainers[0].placed.log_lines
    )
    assert not any("fp8" in notice for notice in trainers[1].placed.log_lines)
    with_it, without = (
        [
            (name, tensor.shape, tensor.dtype)
            for name, tensor in trainer.placed.parts[0].state_dict().items()
        ]
        for trainer in trainers
    )
    assert with_it == without


@pytest.mark.full
@needs_torchao
def test_compiled_blocks_multiply_in_float8() -> None:
    """Without dropout: compiled code draws other random numbers."""
    compiled, eager, plain = (
        losses({"training.compile": on, "precision.fp8": fp8}, steps=STEPS, dropout=0.0, n_layer=2)
        for on, fp8 in ((True, "emulated"), (False, "emulated"), (False, "none"))
    )
    assert worst(compiled[:1], eager[:1]) < FIRST < worst(plain[:1], eager[:1]) / 50
    assert worst(compiled, eager) < LATER


# ---- refused ----


def refusal(model: nn.Module, kind: str, device: torch.device = CPU) -> str:
    with pytest.raises(UsageError) as caught:
        apply_fp8(model, blocks_of(model), kind, device)
    return str(caught.value)


def test_a_model_without_such_linears_is_refused() -> None:
    said = refusal(language_model("bdh"), "emulated")
    assert "none of the 1 nn.Linear in BDH can multiply in float8" in said
    assert "multiples of 16" in said
    assert "write fp8: none" in said


def test_hardware_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(Stack(), "linears")
    assert "needs an NVIDIA GPU that multiplies in float8, and this is the device cpu" in said
    assert "H100" in said
    assert "fp8: emulated" in said
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert "this is NVIDIA A100" in refusal(Stack(), "linears", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    # the next question
    assert "multiples of 16" in refusal(language_model("bdh"), "linears", torch.device("cuda"))


def test_without_torchao_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    said = refusal(Stack(), "emulated")
    assert "precision.fp8 needs torchao, which is not installed" in said
    assert "pip install torchao" in said


def test_equal_bits_are_not_promised() -> None:
    with pytest.raises(UsageError, match=r"equal bits are not shown for precision\.fp8: emulated"):
        config_from({**EMULATED, "distributed.strategy": "ddp", "distributed.reproducible": True})
