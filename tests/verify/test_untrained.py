"""Networks that no optimizer trains are compared over ranks, where they were the same before."""

import torch
from torch import nn

from lockstep.verify.own_lines import code_at
from lockstep.verify.script.causes.replicas import networks_apart
from lockstep.verify.script.observed.untrained import UntrainedNetworks
from lockstep.verify.script.record import RecordedStep, ScriptRecord
from lockstep.verify.script.world import World


def world(*ranks: list[str], weights: str = "same", line: str = "") -> World:
    records = []
    for rank, prints in enumerate(ranks):
        steps = [
            RecordedStep(
                untrained={"Sequential": each},
                loaded_at={"Sequential": line} if line and not rank else {},
                before={"a": f"{weights} {rank * (weights != 'same')}"},
            )
            for each in prints
        ]
        records.append(ScriptRecord(steps))
    return World(records)


def test_a_target_network_of_a_rank() -> None:
    (cause,) = networks_apart(world(["a", "b"], ["a", "a"], line="train.py:4"), 2)
    assert cause.kind == "computation of a rank"
    assert "in step 2, rank 1 calls another Sequential" in cause.text
    assert cause.line == "train.py:4"
    assert networks_apart(world(["a", "b"], ["a", "b"]), 2) == []
    # a teacher of each rank's own, and one beside weights that are apart anyway
    assert networks_apart(world(["a", "b"], ["c", "d"]), 2) == []
    assert networks_apart(world(["a", "b"], ["a", "a"], weights="other"), 2) == []
    late = world(["a", "b"], ["a", "a"])
    late.records[1].steps[0].untrained.clear()  # rank 1 evaluates it now and then
    assert networks_apart(late, 2) == []


def test_what_a_step_calls() -> None:
    trained = nn.Linear(2, 2)
    target = nn.Linear(2, 2)
    networks = UntrainedNetworks(lambda: set(map(id, trained.parameters())))
    networks.called(trained)
    networks.called(nn.ReLU())
    networks.called(target)
    before, _ = networks.take()
    assert list(before) == ["Linear"]
    with torch.no_grad():
        target.weight.add_(1)
    networks.loaded(target)
    networks.called(target)
    after, lines = networks.take()
    assert after != before
    assert code_at(lines["Linear"]) == "networks.loaded(target)"
    assert networks.take()[0] == {}
