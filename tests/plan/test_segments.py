"""Stages of equal time, from segments that are run."""

import pytest
import torch
import yaml
from torch import Tensor, nn

from lockstep.cli import main
from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.plan import workload
from lockstep.plan.workload import Workload, equal_stages, measure_segments

now = [0.0]  # a clock that segments alone advance


class Slow(nn.Module):
    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(8, 8)
        self.idle = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        now[0] += self.seconds
        return torch.tanh(self.linear(x)) + 0 * self.idle.sum()


def chain() -> nn.Sequential:
    """Many parameters in front, much time behind."""
    return nn.Sequential(
        *(Slow(s, w) for s, w in [(0, 1000), (0, 1000), (0.01, 1), (0.02, 1), (0.01, 1)])
    )


def test_stages_are_of_equal_time_not_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_now", lambda _device: now[0])
    config = config_from({"training.batch_size": 4})
    work = Workload(chain, (torch.zeros(8), torch.zeros(8)), nn.MSELoss())
    measured = measure_segments(work, config, torch.device("cpu"), 3)
    assert [one.name for one in measured] == list("01234")
    assert [one.parameters for one in measured] == [1072, 1072, 73, 73, 73]
    assert [one.forward for one in measured] == pytest.approx([0, 0, 0.01, 0.02, 0.01])
    # the input and tanh's result, of four samples
    assert 2 * 4 * 8 * 4 >= measured[1].kept >= 4 * 8 * 4
    parts, spec = equal_stages(measured, 2)
    assert [list(span) for span in parts.stages] in ([[0, 1, 2], [3, 4]], [[0, 1, 2, 3], [4]])
    assert list(spec.values()) == ["beginning"]
    with pytest.raises(UsageError, match="5 segments can't make 6 stages"):
        equal_stages(measured, 6)


def test_the_command_prints_a_split_spec(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "model.args.n_layer=3",
        "model.args.n_embd=16",
        "model.args.n_head=2",
        "training.batch_size=1",
    ]
    assert main(["plan", "ready/transformer.yaml", "--stages", "2", *small]) == 0
    shown = capsys.readouterr().out
    spec = yaml.safe_load(shown[shown.index("distributed:") :])["distributed"]["pipeline"][
        "split_spec"
    ]
    assert len(spec) == 1
    assert "layers.1" in shown
