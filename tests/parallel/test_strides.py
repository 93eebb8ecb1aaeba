"""Parameters and buffers that do not lie row by row: laid so, computed with as before,
or refused.
"""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.row_by_row import lay_out
from lockstep.parallel.strides import (
    copied_to,
    laid_out,
    lay_gradients,
    lay_states,
    lies_row_by_row,
)
from lockstep.trainer import Trainer
from tests.parity.foreign import seeded
from tests.parity.foreign_kinds import photo, strided
from tests.parity.same_bits import digest
from tests.ranks import run_ranks


class Seen(nn.Conv2d):
    """Notes the strides of its weight."""

    strides: tuple[int, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        self.strides = self.weight.stride()
        return super().forward(input)


def test_a_module_computes_with_the_format_in_which_it_came() -> None:
    for kernel, groups in ((3, 1), (1, 1), (3, 6)):
        torch.manual_seed(0)
        came: Any = Seen(6, 6, kernel, groups=groups).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        strides = came.weight.stride()
        image = torch.randn(2, 6, 5, 5)
        wanted = came(image)
        wanted.square().sum().backward()
        gradient = came.weight.grad
        came.weight.grad = None
        weight = came.weight
        [line] = lay_out(came)
        assert "weight lay strided in memory" in line
        assert came.weight is weight
        assert lies_row_by_row(came.weight)
        made = came(image)
        assert came.strides == strides
        assert torch.equal(made, wanted)
        made.square().sum().backward()
        assert torch.equal(came.weight.grad, gradient)
        assert lies_row_by_row(came.weight.grad)
        assert "weight" not in vars(came)
        with pytest.raises(RuntimeError):
            came(torch.randn(2, 5, 5, 5))
        assert "weight" not in vars(came)  # also after an error
        assert not lay_out(came)


def test_what_lies_strided_keeps_its_values() -> None:
    model = nn.ParameterDict(
        {
            "transposed": nn.Parameter(torch.randn(3, 5).t()),
            "second": nn.Parameter(torch.randn(8)[::2]),
            "frozen": nn.Parameter(torch.randn(1, 4).expand(3, 4), requires_grad=False),
            "plain": nn.Parameter(torch.randn(3, 4)),
            "scalar": nn.Parameter(torch.tensor(2.0)),
            "empty": nn.Parameter(torch.empty(0, 3)),
        }
    )
    model.register_buffer("crossed", torch.randn(4, 4).t())
    model.register_buffer("levels", torch.rand(1, 4).expand(3, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    lay_out(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert lies_row_by_row(tensor), name
    assert {name for name, p in model.named_parameters() if p.data_ptr() == places[name]} == {
        "plain",
        "scalar",
        "empty",
    }


def test_pieces_of_one_memory_are_no_shared_memory() -> None:
    """As `nn.RNN` lays its weights on a GPU, and readers of files theirs; two names of one
    parameter neither.
    """
    whole = torch.randn(4, 6)
    model = nn.ParameterDict(
        {"left": nn.Parameter(whole[:, :3]), "right": nn.Parameter(whole[:, 3:])}
    )
    model["again"] = model["left"]
    lay_out(model)
    assert torch.equal(torch.cat([model["left"], model["right"]], 1), whole)
    odd = nn.ParameterDict({"odd": nn.Parameter(torch.randn(9)[1:])})
    lay_out(odd)
    assert odd["odd"].storage_offset() == 1
    lay_out(odd, aligned=True)
    assert odd["odd"].storage_offset() == 0


def shared() -> dict[str, dict[str, Any]]:
    weight = nn.Parameter(torch.randn(4, 6))
    return {
        "encoder and decoder are": {"encoder": weight, "decoder": nn.Parameter(weight.data.t())},
        "weight and rows are": {"weight": weight, "rows": nn.Parameter(weight.data[1:3])},
        "weight and mirror are": {"weight": weight, "mirror": weight.data.view(6, 4)},
        "elements of the parameter wide lie": {
            "wide": nn.Parameter(torch.randn(1, 4).expand(3, 4))
        },
        "elements of the parameter windows lie": {
            "windows": nn.Parameter(torch.randn(9).unfold(0, 3, 2))
        },
    }


@pytest.mark.parametrize("what", shared())
def test_shared_memory_is_refused(what: str) -> None:
    model = nn.Module()
    for name, tensor in shared()[what].items():
        register = (
            model.register_parameter if isinstance(tensor, nn.Parameter) else model.register_buffer
        )
        register(name, tensor)
    with pytest.raises(UsageError, match=re.escape(what)):
        lay_out(model)


def test_a_gradient_and_a_state_lie_as_their_parameter_does() -> None:
    """Fused updates take all three as they lie in memory."""
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    average = torch.randn_like(weight)
    gradient = torch.randn_like(weight)
    state["exp_avg"] = average.to(memory_format=torch.channels_last)
    weight.grad = gradient.to(memory_format=torch.channels_last)
    lay_gradients([weight])
    lay_states(optimizer)
    assert lies_row_by_row(weight.grad)
    assert lies_row_by_row(state["exp_avg"])
    assert torch.equal(weight.grad, gradient)
    assert torch.equal(state["exp_avg"], average)


class Photos(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = photo(index)
        return sample["input"], sample["label"]


def trainer_of(strategy: str, model: nn.Module, **settings: Any) -> Trainer:
    return Trainer(
        model,
        "adamw",
        nn.CrossEntropyLoss(),
        strategy=strategy,
        batch_size=2,
        global_batch_size=8,
        learning_rate=1e-2,
        **settings,
    )


def relay(strategies: list[str], folder: str) -> str:
    """The digest of a run that goes on under another strategy every two steps, from a
    checkpoint.
    """
    found = ""
    for turn, strategy in enumerate(strategies):
        trainer = trainer_of(strategy, seeded(strided)(), reproducible=True)
        if turn:
            trainer.load_checkpoint(folder)
        for _ in islice(trainer.steps(Photos(), epochs=9), 2):
            pass
        trainer.save_checkpoint(folder)
        found = digest(trainer)
    return found


def without_the_tree(strategy: str, *, strides: bool) -> list[float]:
    """The losses of strategies that promise no bits, of the strided model or of its twin that lies
    row by row.
    """
    model = seeded(strided)()
    if not strides:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return [
        float(record.loss)
        for record in islice(trainer_of(strategy, model).steps(Photos(), epochs=9), 3)
    ]


def on_a_rank(folder: str) -> tuple[str, list[list[list[float]]]]:
    both = [
        [without_the_tree(strategy, strides=it_is) for it_is in (True, False)]
        for strategy in ("diloco", "accelerate")
    ]
    return relay(["ddp", "fsdp", "pipeline"], folder), both


def formats_that_differ() -> str:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 5))
    if torch.distributed.get_rank():
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(UsageError) as found:
        trainer_of("ddp", model)
    return str(found.value)


def test_ranks_must_agree_on_formats() -> None:
    for told in run_ranks(formats_that_differ, 2):
        assert "have other shapes or memory formats on one rank than on another" in told


@pytest.mark.full
def test_other_strategies_and_changes_between_them(tmp_path: Path) -> None:
    """`tests/parity/test_foreign.py` compares this model with plain PyTorch under ddp, fsdp and
    pipelines.
    """
    wanted = relay(["single"] * 3, str(tmp_path / "one"))
    for found, pairs in run_ranks(on_a_rank, 2, str(tmp_path / "two")):
        assert found == wanted
        for one, other in pairs:
            assert one == pytest.approx(other, rel=1e-5)
    assert without_the_tree("dp", strides=True) == pytest.approx(
        without_the_tree("dp", strides=False), rel=1e-5
    )


class Filters(nn.Module):
    """A convolution, a norm and a shift; their outputs are `strided` like photos whose channels lie
    together.
    """

    def __init__(self, channels: int, *, strided: bool) -> None:
        super().__init__()
        self.strided = strided
        self.shift = nn.Parameter(torch.randn(48, 1, 1))
        self.conv = nn.Conv2d(channels, 48, 3, padding=1)
        self.norm = nn.GroupNorm(4, 48)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.conv(x)) + self.shift
        return (
            made.flatten(2).mT.contiguous().mT.view_as(made) if self.strided else made.contiguous()
        )


class Turned(Filters):
    """Begins with a copy in another memory format, so that a gradient lies so, and its input does
    not.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class Spread(nn.Module):
    """Puts out an expanded tensor, of which some columns are left out."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True).expand(-1, -1, 9, 9)[:, :, :, ::2]


def pictured(kind: str) -> nn.Module:
    torch.manual_seed(0)
    middle: dict[str, list[nn.Module]] = {
        "outputs": [Filters(3, strided=True), Filters(48, strided=True)],
        "gradients": [Filters(3, strided=False), Turned(48, strided=False)],
        "expanded": [nn.Sequential(Filters(3, strided=False), Spread()), Filters(48, strided=True)],
    }
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 2))
    return nn.Sequential(*middle[kind], Filters(48, strided=kind == "outputs"), last)


PICTURED = ("outputs", "gradients", "expanded")


def of_pictures(kind: str, strategy: str, schedule: str = "1F1B") -> tuple[str, float]:
    x = torch.randn(24, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.flatten(1)[:, :2])
    settings: Any = {
        "batch_size": 3,
        "global_batch_size": 12,
        "shuffle": False,
        "reproducible": True,
    }
    if strategy == "pipeline":
        settings |= {"schedule": schedule, "stages_per_rank": 1 if schedule == "1F1B" else 2}
    trainer = Trainer(
        pictured(kind), "sgd", nn.MSELoss(), strategy=strategy, learning_rate=0.05, **settings
    )
    list(trainer.steps(data))
    return digest(trainer), trainer.evaluate(data)


def pictures_in_stages(kinds: list[tuple[str, str]]) -> list[tuple[str, float]]:
    return [of_pictures(kind, "pipeline", schedule) for kind, schedule in kinds]


def test_what_stages_exchange_keeps_its_strides() -> None:
    """In every bit the same as on one process: kernels round otherwise where a tensor lies
    otherwise.
    """
    cases = [(kind, "1F1B") for kind in PICTURED]
    cases += [
        ("outputs", "ZBVZeroBubble"),
        ("gradients", "InterleavedZeroBubble"),
        ("expanded", "Interleaved1F1B"),
    ]
    alone = {kind: of_pictures(kind, "single") for kind in PICTURED}
    for found in run_ranks(pictures_in_stages, 2, cases):
        for case, run in zip(cases, found, strict=True):
            assert run == alone[case[0]], case


def test_a_copy_has_the_strides_that_are_asked_for() -> None:
    values = torch.randn(4, 6)
    for like in (
        values.t().contiguous().t(),
        torch.empty(4, 12)[:, ::2],
        values[:1].expand(4, 6),
        values,
    ):
        whole = values[:1].expand(4, 6) if like.stride(0) == 0 else values
        copy = copied_to(whole, like.stride())
        assert copy.stride() == like.stride()
        assert torch.equal(copy, whole)
        assert copy.data_ptr() != whole.data_ptr()
        assert laid_out(whole, whole.stride()) is whole
    assert lies_row_by_row(copied_to(values, (3, 1)))  # they would lie in the same memory
