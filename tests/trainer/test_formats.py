"""A run goes on from a checkpoint of each format, written in the background or not, and ends in the
same bits.
"""

from pathlib import Path

import pytest

from lockstep import checkpoint
from tests.faults.tiny import Points, trainer
from tests.ranks import run_ranks
from tests.sampled import sampled

FORMATS = ("sharded", "full", "local")
STRATEGIES = {"fsdp": True, "ddp": False}  # strategy → whether it is saved in the background


ALL = [f"{strategy}-{kept}" for strategy in STRATEGIES for kept in FORMATS]


def each_format(folder: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """Train to step 12, resume at step 6 and train to step 12 again; return both digests of each
    combination.
    """
    digests = {}
    for name in names:
        strategy, _, kept = name.partition("-")
        run = Path(folder, name)
        sections = {
            "distributed": {"device": "cpu", "strategy": strategy},
            "checkpoint": {"format": kept, "async": STRATEGIES[strategy], "save_steps": 6},
        }
        trainer(run, **sections).train(Points())
        last = run / "checkpoints/step-00000012"
        before = checkpoint.digest(last)
        again = trainer(run, **sections)
        again.resume(str(run / "checkpoints/step-00000006"))
        again.train(Points())
        digests[name] = (before, checkpoint.digest(last))
    return digests


@pytest.mark.fault(
    "process: a run is resumed from each format of checkpoint",
    "`checkpoint.format` is sharded, full or local; `checkpoint.async` is on or off",
    "the run goes on with its optimizer's state, and ends in the bits of the run that was not"
    " interrupted",
)
@sampled("names", ALL, 4)
def test_a_run_resumes_from_each_format(tmp_path: Path, names: list[str]) -> None:
    for said in run_ranks(each_format, 2, str(tmp_path), names):
        assert list(said) == names
        assert {name for name, (before, after) in said.items() if before != after} == set()
