"""Ranks that go on when others are killed, in the same processes: real ranks, real kills."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.checkpoint import digest
from tests.faults.test_processes import ranks_of
from tests.faults.tiny import events, hold, steps
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


class Disturbed:
    """Four ranks, some of which are killed or stopped.

    The run goes a few steps beyond those that the test waits for, and not to its end before
    `finish`.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        hold(folder, 1)
        self.run = folder / "run"
        words = begin(folder, 4, "distributed.on_failure=continue", *overrides)
        self.process = start(folder, *words, OMP_NUM_THREADS="1")
        self._ranks: dict[int, int] = {}  # rank at the start → process

    def come_to(self, step: int) -> None:
        """Wait until the run has taken this step."""
        hold(self.folder, step)
        self.wait_until(lambda: max(steps(self.run), default=0) >= step)
        self._ranks = self._ranks or ranks_of(self.folder)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank, by its first number."""
        os.kill(self._ranks[rank], number)

    def wait_for_events(self, kind: str, count: int) -> None:
        """Wait until there are so many events of a kind; steps of theirs are taken."""
        hold(self.folder, max(steps(self.run)) + 3)
        self.wait_until(lambda: len(events(self.run, kind)) >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; the run must not end before."""
        wait_for(lambda: self.process.poll() is not None or condition())
        assert self.process.poll() is None, self.process.communicate()

    def finish(self) -> Ended:
        """Let it go to its end."""
        hold(self.folder, None)
        return finish(self.process, self.folder)


def with_deaths(folder: Path, killed: list[tuple[int, ...]], *overrides: str) -> Ended:
    """Four ranks, some of which are killed.

    Args:
        folder: where it runs.
        killed: of each tuple the first rank dies in the midst of a step, and each further one while
            the others recover from the death before it.
        overrides: of the config.
    """
    run = Disturbed(folder, *overrides)
    deaths = 0
    for number, ranks in enumerate(killed):
        run.come_to(8 * (number + 1))
        for rank in ranks:
            run.send(rank, signal.SIGKILL)
            deaths += 1
            run.wait_for_events("recovery", deaths)
        run.wait_for_events("recovered", number + 1)
    return run.finish()


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
    " copy in memory: with one after each step at the step that was in work; each step is recorded"
    " once, and the digest is that of a run without deaths",
)
@pytest.mark.fault(
    "process: a second rank is killed while the others recover, `distributed.on_failure: continue`",
    "those that are left wait for it in what they have just begun: groups, the load",
    "they begin the recovery again, without it",
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name == "fsdp" else pytest.mark.full) for name in CASES],
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
        assert one["again"] == 0, "a copy after each step: none is lost that was recorded"
        assert [part for part in one["parts"] if part != "interrupted"] == PARTS
        assert one["seconds"] == pytest.approx(sum(one["parts"].values()))
    for resumed in events(run, "resume"):
        assert "/dev/shm/" in resumed["checkpoint"]
    assert steps(run) == list(range(1, 27)), "each step once"
    assert digest(run / "checkpoints/step-00000026") == undisturbed


@pytest.mark.full
def test_after_deaths_a_hang_names_its_rank_and_all_ranks_are_started_again(
    undisturbed: str, tmp_path: Path
) -> None:
    """The stopped one is rank 0 of two by then: it is told by the number with which it began."""
    hang = "distributed.hang.seconds=2"
    run = Disturbed(tmp_path, "distributed.strategy=fsdp", hang, "--max-restarts", "1")
    run.come_to(4)
    run.send(0, signal.SIGKILL)
    run.send(3, signal.SIGKILL)
    run.wait_for_events("recovered", 1)
    run.send(1, signal.SIGSTOP)
    ended = run.finish()
    assert ended.code == 0, ended.err
    assert "rank 1 of 4 failed: it hangs" in ended.err
    assert (tmp_path / "run/logs/rank-1.stacks.txt").stat().st_size > 0
    assert len(events(run.run, "restart")) == 1
    assert digest(run.run / "checkpoints/step-00000026") == undisturbed
