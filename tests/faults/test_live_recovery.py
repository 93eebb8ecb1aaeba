"""Ranks that go on when others are killed, in the same processes: real ranks, real kills."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.checkpoint import digest
from tests.faults.test_processes import ranks_of
from tests.faults.tiny import events, steps
from tests.launch.shared import Ended, finish, start, wait_for

YAML = """
model: {name: "tests.faults.tiny:Chain"}
data: {name: "tests.faults.tiny:Points", args: {seconds: 0.002}}
training: {max_steps: 26, batch_size: 2, global_batch_size: 24, eval_steps: null}
distributed: {device: cpu, reproducible: true}
checkpoint: {save_steps: 1000, memory_steps: 1}
monitor: {log_steps: 1, sinks: [jsonl]}
"""


def begin(folder: Path, ranks: int, *overrides: str) -> list[str]:
    (folder / "live.yaml").write_text(YAML)
    return [
        *("train", "live.yaml", "--nproc-per-node", str(ranks), "--output-dir", "run"),
        *overrides,
    ]


def with_deaths(folder: Path, killed: list[tuple[int, ...]], *overrides: str) -> Ended:
    """Four ranks, some of which are killed.

    Args:
        folder: where it runs.
        killed: of each tuple the first rank dies in the midst of a step, and each further one while
            the others recover from the death before it.
        overrides: of the config.
    """
    overrides = ("distributed.on_failure=continue", *overrides)
    process = start(folder, *begin(folder, 4, *overrides), OMP_NUM_THREADS="1")
    run = folder / "run"

    def wait_until(condition: Callable[[], bool]) -> None:
        wait_for(lambda: process.poll() is not None or condition())
        assert process.poll() is None, process.communicate()

    processes: dict[int, int] = {}
    deaths = 0
    for number, ranks in enumerate(killed):
        wait_until(lambda: max(steps(run), default=0) >= 8 * (number + 1))  # noqa: B023
        processes = processes or ranks_of(folder)
        for rank in ranks:
            os.kill(processes[rank], signal.SIGKILL)
            deaths += 1
            wait_until(lambda: len(events(run, "recovery")) == deaths)  # noqa: B023
        wait_until(lambda: len(events(run, "recovered")) > number)  # noqa: B023
    return finish(process, folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    command = begin(folder, 2, "distributed.strategy=ddp", "checkpoint.memory_steps=null")
    ended = finish(start(folder, *command, OMP_NUM_THREADS="1"), folder)
    assert ended.code == 0, ended.err
    return digest(folder / "run/checkpoints/step-00000026")


PARTS = ["noticed", "agreed", "groups", "placed", "loaded", "first_step"]
# name → who is killed, the config, (ranks, spares) of each world, its layouts
Case = tuple[list[tuple[int, ...]], tuple[str, ...], list[tuple[int, int]], list[str]]
CASES: dict[str, Case] = {
    # rank 0, too, which holds the lock of the run directory, and writes its records; before that
    # a second rank, while the others recover from the death of the first
    "fsdp": (
        [(3, 2), (0,)],
        ("distributed.strategy=fsdp",),
        [(3, 0), (2, 0), (1, 0)],
        ["fsdp:4", "fsdp:2", "fsdp:1"],
    ),
    # two stages need an even number of ranks: one of three waits, and takes the next place
    "pipeline": (
        [(2,), (1,)],
        ("distributed.strategy=pipeline", "distributed.pipeline_size=2"),
        [(2, 1), (2, 0)],
        ["pipeline:2*ddp:2", "pipeline:2", "pipeline:2"],
    ),
    "ddp": (
        [(1,), (2,)],
        ("distributed.strategy=ddp",),
        [(3, 0), (2, 0)],
        ["ddp:4", "ddp:3", "ddp:2"],
    ),
}


@pytest.mark.fault(
    "process: ranks are killed (SIGKILL), `distributed.on_failure: continue`",
    "the others wait for them in collectives, in Python and in C++",
    "the others go on in the same processes, on as many ranks as the config allows, from the newest"
    " copy in memory; each step is recorded once, and the digest is that of a run without deaths",
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.full if name == "ddp" else ()) for name in CASES],
)
def test_the_others_go_on_and_end_in_the_same_bits(
    case: str, undisturbed: str, tmp_path: Path
) -> None:
    killed, overrides, worlds, layouts = CASES[case]
    ended = with_deaths(tmp_path, killed, *overrides)
    assert ended.code == 0, ended.err
    run = tmp_path / "run"
    recoveries = events(run, "recovery")
    assert [(one["ranks"], one["spares"]) for one in recoveries] == worlds
    assert [one["lost"] for one in recoveries] == [[rank] for ranks in killed for rank in ranks]
    assert not events(run, "restart")
    recovered = events(run, "recovered")
    assert [one["layout"] for one in recovered] == layouts[1:]
    assert [one["before"] for one in recovered] == layouts[:-1]
    for one in recovered:
        assert one["again"] <= 1, "a copy after each step: the one in flight may be lost"
        assert [part for part in one["parts"] if part != "interrupted"] == PARTS
        assert one["seconds"] == pytest.approx(sum(one["parts"].values()))
    for resumed in events(run, "resume"):
        assert "/dev/shm/" in resumed["checkpoint"]
    assert steps(run) == list(range(1, 27)), "each step once"
    assert digest(run / "checkpoints/step-00000026") == undisturbed
