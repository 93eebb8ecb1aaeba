"""`lockstep/torch_compat/pipeline_schedules.py`: DualPipeV has its pairs, and they can be taken
apart.
"""

import inspect
from types import SimpleNamespace

from torch import nn
from torch.distributed.pipelining import schedules

from lockstep.parallel.pipeline.schedules import build
from lockstep.torch_compat.pipeline_schedules import UnpairedDualPipeV


def stand_ins(name: str) -> list[SimpleNamespace]:
    """What a schedule reads of the stages of one of two ranks."""
    count = 1 if name in ("GPipe", "1F1B") else 2
    common = {
        "num_stages": 2 * count,
        "group_size": 2,
        "group_rank": 0,
        "submod": nn.Module(),
        "is_first": True,
    }
    return [SimpleNamespace(**common, stage_index=index, is_last=False) for index in range(count)]


def test_dualpipev_pairs_in_the_method_that_is_overridden() -> None:
    source = inspect.getsource(schedules.ScheduleDualPipeV)
    assert source.count("_calculate_single_rank_operations(") == 2
    schedule = build("DualPipeV", stand_ins("DualPipeV"), 4)
    assert isinstance(schedule, UnpairedDualPipeV)
    kinds = {
        entry.computation_type.value
        for row in schedule.pipeline_order.values()
        for entry in row
        if entry
    }
    assert kinds <= {"F", "B", "I", "W"}
