"""Any layout goes on from what any other wrote: the same losses after, model and optimizer and
random numbers.
"""

from pathlib import Path
from typing import Any

import pytest

from lockstep import checkpoint
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.read import read_stored_part
from lockstep.config import config_from
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model, unchecked
from tests.ranks import run_ranks
from tests.sampled import quick_and_full

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"single": {"strategy": "single"}},
    2: {
        "ddp:2": {"strategy": "ddp"},
        "fsdp:2": {"strategy": "fsdp"},
        "pipeline:2": {"strategy": "pipeline", "pipeline_size": 2},
    },
    4: {
        "fsdp:4": {"strategy": "fsdp"},
        "hybrid:2x2": {"strategy": "fsdp", "replicate_size": 2, "shard_size": 2},
        "pipeline:2*fsdp:2": {"strategy": "pipeline", "pipeline_size": 2, "shard_size": 2},
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
BEFORE = 1
AFTER = 2


def trainer(layout: dict[str, Any]) -> Trainer:
    settings = {f"distributed.{key}": value for key, value in layout.items()}
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.learning_rate": 3e-3,
        "training.max_steps": BEFORE + AFTER,
        "precision.mode": "fp32",
    }
    return unchecked(
        Trainer(
            language_model("transformer", tie_embeddings=True),
            config=config_from(common | settings),
        )
    )


def losses(run: Trainer, number: int) -> list[float]:
    steps = run.steps(Tokens())
    return [float(next(steps).loss) for _ in range(number)]


def write(layouts: dict[str, dict[str, Any]], folder: str) -> dict[str, list[float]]:
    """Each layout: some steps, a checkpoint, and the losses of the steps after it."""
    after = {}
    for name, layout in layouts.items():
        run = trainer(layout)
        losses(run, BEFORE)
        run.save_checkpoint(Path(folder, name.replace("*", "-")))
        after[name] = losses(run, AFTER)
    return after


def sources(name: str, *, whole: bool) -> list[str]:
    """Whose checkpoints a layout goes on from: all; or one of the seven, another for each."""
    return NAMES if whole else [NAMES[(NAMES.index(name) + 3) % len(NAMES)]]


def read(
    layouts: dict[str, dict[str, Any]], folder: str, whole: bool
) -> dict[str, list[float] | str]:
    """Each layout: goes on from others' checkpoints."""
    after: dict[str, list[float] | str] = {}
    for name, layout in layouts.items():
        for source in sources(name, whole=whole):
            try:
                run = trainer(layout)
                step, _ = run.load_checkpoint(Path(folder, source.replace("*", "-")))
                assert step == BEFORE
                after[f"{source} -> {name}"] = losses(run, AFTER)
            except Exception as error:
                after[f"{source} -> {name}"] = f"{type(error).__name__}: {error}"
    return after


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loads")


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, list[float]]:
    after: dict[str, list[float]] = {}
    for ranks, layouts in LAYOUTS.items():
        after |= run_ranks(write, ranks, layouts, str(folder))[0]
    return after


def test_every_layout_trains_alike(written: dict[str, list[float]]) -> None:
    for name in NAMES:
        assert written[name] == pytest.approx(written["single"], rel=1e-5), name


def test_trap_25_every_layout_writes_the_same_names_once(
    written: dict[str, list[float]], folder: Path
) -> None:
    """Stages that name their parameters alike overwrite each other, or only one rank's optimizer is
    saved.
    """
    assert written
    found = {}
    for name in NAMES:
        (path,) = Path(folder, name.replace("*", "-")).glob("step-*")
        inside = checkpoint.read_manifest(path)
        optimizer = read_stored_part(locate(path), inside, "optimizer/main").tensors
        found[name] = (inside.parameters, {key: tuple(t.size) for key, t in optimizer.items()})
    assert len(found["single"][1]) >= 2 * len(found["single"][0]), "two moments for each parameter"
    for name in NAMES:
        assert found[name] == found["single"], name


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", quick_and_full(LAYOUTS, [1, 2]))
def test_every_layout_goes_on_from_others(
    written: dict[str, list[float]], folder: Path, ranks: int, whole: bool
) -> None:
    """All 49 pairs, or 7 in which each layout writes and reads once; all differences are told at
    once.
    """
    results = run_ranks(read, ranks, LAYOUTS[ranks], str(folder), whole)[0]
    assert len(results) == len(sources(NAMES[0], whole=whole)) * len(LAYOUTS[ranks])
    wrong = {
        pair: after
        for pair, after in results.items()
        if isinstance(after, str) or after != pytest.approx(written["single"][:], rel=1e-5)
    }
    assert not wrong, wrong
