"""Ranks that go on when others are killed, in the same processes: real ranks, real kills."""

import os
import signal
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


def with_deaths(folder: Path, killed: list[int], *overrides: str) -> Ended:
    """Four ranks, some of which are killed one after another, each in the midst of a step."""
    overrides = ("distributed.on_failure=continue", *overrides)
    process = start(folder, *begin(folder, 4, *overrides), OMP_NUM_THREADS="1")
    run = folder / "run"

    def come_to(step: int) -> bool:
        return process.poll() is not None or max(steps(run), default=0) >= step

    processes: dict[int, int] = {}
    for number, rank in enumerate(killed):
        wait_for(lambda number=number: come_to(8 * (number + 1)))  # type: ignore[misc]
        assert process.poll() is None, process.communicate()
        processes = processes or ranks_of(folder)
        os.kill(processes[rank], signal.SIGKILL)
        wait_for(
            lambda number=number: (  # type: ignore[misc]
                process.poll() is not None or len(events(run, "resume")) > number
            )
        )
    return finish(process, folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    command = begin(folder, 2, "distributed.strategy=ddp", "checkpoint.memory_steps=null")
    ended = finish(start(folder, *command, OMP_NUM_THREADS="1"), folder)
    assert ended.code == 0, ended.err
    return digest(folder / "run/checkpoints/step-00000026")


CASES = {
    # rank 0, too, which holds the lock of the run directory, and writes its records
    "fsdp": ([3, 0], ("distributed.strategy=fsdp",), [(3, 0), (2, 0)]),
    # two stages need an even number of ranks: one of three waits, and takes the next place
    "pipeline": (
        [2, 1],
        ("distributed.strategy=pipeline", "distributed.pipeline_size=2"),
        [(2, 1), (2, 0)],
    ),
    "ddp": ([1, 2], ("distributed.strategy=ddp",), [(3, 0), (2, 0)]),
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
    killed, overrides, worlds = CASES[case]
    ended = with_deaths(tmp_path, killed, *overrides)
    assert ended.code == 0, ended.err
    run = tmp_path / "run"
    recoveries = events(run, "recovery")
    assert [(one["ranks"], one["spares"]) for one in recoveries] == worlds
    assert [one["lost"] for one in recoveries] == [[rank] for rank in killed]
    assert not events(run, "restart")
    for resumed in events(run, "resume"):
        assert "/dev/shm/" in resumed["checkpoint"]
    assert steps(run) == list(range(1, 27)), "each step once"
    assert digest(run / "checkpoints/step-00000026") == undisturbed
