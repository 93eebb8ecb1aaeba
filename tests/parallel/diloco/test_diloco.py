"""Workers that train by themselves: the same run wherever they are, resumed anywhere, few bytes,
steps by hand.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config import Config, check, config_from
from lockstep.errors import UsageError
from lockstep.parallel.diloco.workers import BLOCK, QuantizedAllReduce, bytes_each, decode, encode
from lockstep.strategy import resolve
from lockstep.trainer import Trainer, saved_state
from tests.hosts import can_make_hosts, hosts, require_root
from tests.parallel.diloco.diloco_cases import (
    Run,
    all_of,
    interrupted,
    on_ranks,
    resumed,
    trainer_for,
)
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks
from tests.sampled import chosen, quick_and_full

INT8 = {"distributed.diloco.send_as": "int8", "distributed.diloco.fragments": 3}
INT4 = {"distributed.diloco.send_as": "int4"}
MUON = {"training.optimizer": "muon"}
CASES: dict[str, tuple[Any, ...]] = {
    "two workers": ({},),
    "int8, fragments": (INT8,),
    "int4": (INT4,),
    "four workers, of whom some get nothing at an epoch's end": (
        {"distributed.diloco.workers": 4},
    ),
    "running statistics": ({}, "normalised"),
    "muon": (MUON,),
}
# In the quick run; the first three are what other tests here compare with.
QUICK = (
    "int8, fragments",
    "running statistics",
    "four workers, of whom some get nothing at an epoch's end",
)
SAVED = (6, INT8)  # in the middle of a round of 4
EXCHANGES = {
    "ddp": ({"distributed.strategy": "ddp"}, 3),
    "fp32": ({"distributed.diloco.inner_steps": 3}, 3),
    "int8": ({"distributed.diloco.inner_steps": 30, "distributed.diloco.send_as": "int8"}, 30),
    "int4": ({"distributed.diloco.inner_steps": 16, "distributed.diloco.send_as": "int4"}, 16),
}


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> dict[str, tuple[Any, ...]]:
    """What tests of this session compare."""
    asked = {*QUICK[:3], *chosen(request, "case")}
    return {name: case for name, case in CASES.items() if name in asked}


@pytest.fixture(scope="module")
def alone(cases: dict[str, tuple[Any, ...]]) -> dict[str, Run]:
    """One process, which takes the workers in turn."""
    torch.set_num_threads(1)
    return on_ranks(cases)


@pytest.fixture(scope="module")
def on_two(
    cases: dict[str, tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """Two ranks, on two hosts where those can be made; and where the interrupted run was saved."""
    folder = tmp_path_factory.mktemp("diloco") / "saved"
    with hosts(2) if can_make_hosts() else nullcontext([]) as where:
        return run_ranks(all_of, 2, cases, str(folder), SAVED, EXCHANGES, on=where), folder


@pytest.mark.parametrize("case", quick_and_full(CASES, QUICK))
def test_workers_on_ranks_are_workers_in_one_process_to_the_bit(
    case: str, alone: dict[str, Run], on_two: tuple[list[dict[str, Any]], Path]
) -> None:
    for rank in on_two[0]:
        digest, records, loss = rank["runs"][case]
        assert records == alone[case][1]
        assert (digest, loss) == (alone[case][0], alone[case][2])


@pytest.mark.full
def test_four_workers_on_four_ranks(alone: dict[str, Run]) -> None:
    name = "four workers, of whom some get nothing at an epoch's end"
    four = {"distributed.diloco.workers": 4}
    cases = {name: CASES[name], "int8": ({**INT8, **four},), "int4": ({**INT4, **four},)}
    cases["muon"] = ({**MUON, **INT8, **four},)
    here = on_ranks(cases)
    assert here[name] == alone[name]
    assert run_ranks(on_ranks, 4, cases) == [here] * 4


def test_a_run_resumed_in_the_middle_of_a_round_ends_as_the_undisturbed_one(
    tmp_path: Path, alone: dict[str, Run], on_two: tuple[list[dict[str, Any]], Path]
) -> None:
    ranks, saved = on_two
    for rank in ranks:
        assert rank["interrupted"] == alone["int8, fragments"]
    assert interrupted(str(tmp_path / "bn"), 6, {}, "normalised") == alone["running statistics"]
    here = resumed(str(saved), [], INT8)  # saved by two ranks, taken up by one
    assert (here[0], here[1], here[2]) == (
        alone["int8, fragments"][0],
        alone["int8, fragments"][1][6:],
        here[2],
    )


def test_training_step_by_step_is_the_same_run(on_two: tuple[list[dict[str, Any]], Path]) -> None:
    whole, in_pieces = on_two[0][0]["steps"]
    assert whole == in_pieces


def test_bytes_on_the_link_are_those_of_theory_and_a_hundredth_of_ddps(
    on_two: tuple[list[dict[str, Any]], Path],
) -> None:
    require_root()
    for rank in on_two[0]:
        sent = rank["bytes"]
        # 2 (W - 1) / W of the parameters, as fp32, and what Ethernet, TCP and the step's own small
        # all-reduce add.
        assert sent["ddp"] / (4 * sent["parameters"]) == pytest.approx(1, abs=0.03)
        assert sent["fp32"] * 3 / (4 * sent["parameters"]) == pytest.approx(1, abs=0.03)
        assert sent["ddp"] > 100 * sent["int8"]
        assert sent["ddp"] > 100 * sent["int4"]


def test_the_outer_step_is_sgd_with_nesterovs_momentum_on_the_mean_change() -> None:
    """Against torch.optim.SGD, with two models that are trained by hand on the workers'
    micro-batches.
    """
    settings = {
        "training.warmup_steps": 0,
        "training.lr_schedule": "constant",
        "training.max_steps": 100,
    }
    settings |= {
        "training.optimizer": "sgd",
        "training.weight_decay": 0.0,
        "training.learning_rate": 0.5,
    }
    settings |= {
        "model.args.dropout": 0.0,
        "training.gradient_clip.value": 0.3,
        "data.shuffle": False,
    }
    trainer = trainer_for(settings, dropout=0.0)
    common = [p.detach().clone() for p in trainer.placed.parameters.values()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    records = trainer.steps(Tokens())
    for _ in range(3):
        ended = []
        for worker in range(2):
            ended.append(by_hand(trainer, common, worker, trainer.step.progress.step))
        for place, value in enumerate(common):
            value.grad = value - (ended[0][place] + ended[1][place]) / 2
        outer.step()
        for _ in range(4):
            next(records)
        for value, (name, mine) in zip(common, trainer.placed.kept().items(), strict=False):
            torch.testing.assert_close(
                mine, value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def by_hand(
    trainer: Trainer, start: list[torch.Tensor], worker: int, step: int
) -> list[torch.Tensor]:
    """Four plain steps of SGD, clipped, on the half of each global batch that is the worker's."""
    model = language_model("transformer", dropout=0.0).to_empty(device="cpu")
    model.load_state_dict(trainer.placed.parts[0].state_dict())  # buffers
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    data = Tokens()
    for number in range(step, step + 4):
        rows = [data[i] for i in samples_of(number, worker)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        loss = torch.nn.functional.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100
        )
        inner.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        inner.step()
    return [p.detach() for p in model.parameters()]


def samples_of(step: int, worker: int) -> list[int]:
    """Without shuffling; the sixth step ends an epoch of 83 with two micro-batches of which the
    last holds one.
    """
    place = step % 6
    samples = list(range(83))[16 * place : 16 * place + 16]
    half = 2 * ((len(samples) + 1) // 2 // 2)
    return samples[half:] if worker else samples[:half]


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_what_travels_is_near_to_what_was_sent(kind: str) -> None:
    values = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[0, :BLOCK] = 0
    coded = encode(values, kind)
    assert coded.numel() == values.numel() * bytes_each(kind)
    got_through = decode(coded, kind)
    error = (got_through - values).abs().max() / values.abs().max()
    half = {
        "fp32": 0.0,
        "fp16": 1e-3,
        "bf16": 4e-3,
        "int8": 0.5 / 127 * 1.001,
        "int4": 0.5 / 7 * 1.001,
    }[kind]
    assert error <= half
    mean, lost = QuantizedAllReduce(kind, None).mean(values[:, :300])
    assert (mean.shape, lost.shape) == ((300,), (3, 300))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_rounded_away_comes_with_the_next_exchanges(kind: str) -> None:
    """With error feedback the sum of the means keeps up with the mean of the changes, on the way
    there and back.
    """
    wire = QuantizedAllReduce(kind, None)
    errors = torch.zeros(2, 3 * BLOCK)
    sent = torch.zeros(3 * BLOCK)
    changes = torch.randn(2, 3 * BLOCK, generator=torch.Generator().manual_seed(1))
    for _ in range(50):
        mean, errors = wire.mean(changes + errors)
        sent += mean
    at_once = (wire.mean(changes)[0] - changes.mean(0)).abs().max()
    assert (sent / 50 - changes.mean(0)).abs().max() < 0.06 * at_once
    # nothing is lost
    torch.testing.assert_close(sent + errors.mean(0), 50 * changes.mean(0), rtol=1e-4, atol=1e-4)


def test_workers_may_begin_where_a_synchronous_run_ended(tmp_path: Path) -> None:
    """Its model and its optimizer state are each worker's."""
    single = {"distributed.strategy": "single", "training.max_steps": 5}
    before = trainer_for(single)
    for _ in before.steps(Tokens()):
        pass
    before.save_checkpoint(tmp_path)
    after = trainer_for({})
    assert after.load_checkpoint(tmp_path)[0] == 5
    state = saved_state.snapshot(after.state)
    for name, parameter in before.placed.parameters.items():
        moment = before.optimizer.state[parameter]["exp_avg"]
        for worker in (0, 1):
            assert torch.equal(state.extra["workers"][f"worker-{worker}/values/{name}"], parameter)
            assert torch.equal(state.optimizers["main"][f"worker-{worker}/{name}//exp_avg"], moment)
    assert len(list(after.steps(Tokens()))) == 9


def test_another_number_of_workers_can_not_go_on(tmp_path: Path) -> None:
    first = trainer_for({"training.max_steps": 1, "training.warmup_steps": 0})
    for _ in first.steps(Tokens()):
        pass
    first.save_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"2 workers, and this run has 4(.|\n)*diloco.workers: 2"):
        trainer_for({"distributed.diloco.workers": 4}).load_checkpoint(tmp_path)


def trained_with_weights(scale: float) -> list[float]:
    """The values of a classifier after four steps of two workers, by its classes' weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    weights = scale * torch.tensor([1.0, 2.0, 0.5])
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(weight=weights),
        strategy="diloco",
        device="cpu",
        batch_size=4,
        global_batch_size=8,
        max_steps=4,
    )
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    trainer.train(TensorDataset(inputs, torch.arange(32) % 3))
    return [v for p in trainer.placed.parameters.values() for v in p.flatten().tolist()]


def test_weights_that_add_up_to_less_than_one_are_divided_by() -> None:
    """Their mean is that of any multiple of them; sums below 1 were once taken for 1."""
    expected = trained_with_weights(1.0)
    # a float32 rounds by 6e-8, and four steps add up some of it
    assert trained_with_weights(1e-3) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def diloco(**settings: Any) -> Config:
    return config_from(
        {
            "distributed.strategy": "diloco",
            **{key.replace("__", "."): v for key, v in settings.items()},
        }
    )


def test_what_is_refused() -> None:
    layout = resolve(diloco(distributed__diloco__workers=8).distributed, 4)
    assert (str(layout), layout.workers) == ("diloco:4 (8 workers)", 8)
    assert str(resolve(diloco().distributed, 4)) == "diloco:4"
    with pytest.raises(
        UsageError, match=r"6 = 1 × 4 \+ 2(.|\n)*start 3 ranks, or set workers to 8"
    ):
        resolve(diloco(distributed__diloco__workers=6).distributed, 4)
    with pytest.raises(UsageError, match="whole on one rank"):
        resolve(diloco(distributed__shard_size=2).distributed, 4)
    with pytest.raises(UsageError, match="5 fragments can't be spread over 4 steps"):
        check(diloco(distributed__diloco__fragments=5, distributed__diloco__inner_steps=4))
    with pytest.raises(UsageError, match="fewer than the 8 workers"):
        check(
            diloco(
                distributed__diloco__workers=8,
                training__batch_size=4,
                training__global_batch_size=16,
            )
        )
    with pytest.raises(UsageError, match="send_as"):
        check(diloco(distributed__ddp__compression__kind="bf16"))
    with pytest.raises(UsageError, match="where workers share a rank"):
        trainer_for({}).training_step(Tokens()[0])
