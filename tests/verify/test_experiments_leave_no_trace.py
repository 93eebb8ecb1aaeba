"""What an experiment changes is gone after it."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.verify.experiments import DOUBLE
from lockstep.verify.subject import MAIN, Case, Spec, Subject
from lockstep.verify.worker import record


class Rows(Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), float(index))
        return x, x


def test_a_model_that_is_handed_out_each_time_stays_float32(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    config = config_from(
        {"training.batch_size": 2, "training.max_steps": 2, "distributed.strategy": "single"}
    )
    spec = Spec(config, lambda: Subject(model, Rows(), nn.MSELoss()), steps=1)
    cases = [Case(MAIN), Case(DOUBLE, switches=frozenset({DOUBLE})), Case("again")]
    for case in cases:
        record(spec, case, tmp_path)
    assert model.weight.dtype is torch.get_default_dtype() is torch.float32
