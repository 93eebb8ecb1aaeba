"""A plan knows what local updates send and hold, and offers them only where they are asked for."""

import pytest

from lockstep.config import config_from
from lockstep.costs.hardware import cluster_of
from lockstep.plan.candidates import Candidate, candidates, evaluate_layout
from lockstep.plan.layouts import model_size_of
from lockstep.plan.workload import workload_of

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 8192, "block_size": 16}
CONFIG = config_from({"model.name": "transformer", "model.args": SIZES, "training.batch_size": 1})
CLUSTER = cluster_of(4, "A100-80GB", "Ethernet 1G", per_node=1)


def judged(**changes: object) -> Candidate:
    work = workload_of(CONFIG)
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return evaluate_layout(work, CONFIG, CLUSTER, named, model_size_of(work, CONFIG))


def test_what_is_sent_and_held() -> None:
    ddp = judged(distributed__strategy="ddp")
    local = judged(distributed__strategy="diloco", distributed__diloco__inner_steps=50)
    int8 = judged(
        distributed__strategy="diloco",
        distributed__diloco__inner_steps=50,
        distributed__diloco__send_as="int8",
    )
    assert ddp.step is not None
    assert local.step is not None
    assert int8.step is not None
    assert local.step.between == pytest.approx(ddp.step.between / 50)
    assert int8.step.between == pytest.approx(ddp.step.between / 50 * (1 + 4 / 256) / 4)
    assert int8.step.seconds < local.step.seconds < ddp.step.seconds
    assert ddp.memory is not None
    assert local.memory is not None
    assert int8.memory is not None
    parameters = model_size_of(workload_of(CONFIG), CONFIG).parameters
    assert local.memory["parameters"] - ddp.memory["parameters"] == 8 * parameters
    assert int8.memory["parameters"] - local.memory["parameters"] == 4 * parameters


@pytest.mark.full
def test_it_is_offered_only_where_it_is_asked_for() -> None:
    for strategy, offered in (("ddp", 0), ("diloco", 1)):
        asked = CONFIG.replaced({"distributed.strategy": strategy})
        found = candidates(workload_of(asked), asked, CLUSTER, pipelines=False)
        assert len({str(c.layout) for c in found} & {"diloco:4"}) == offered
