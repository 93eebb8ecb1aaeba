"""Ranks on two hosts that go on when others are killed, or a host is lost: real ranks and kills.

The hosts are network namespaces, and have shared memory of their own.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint import digest, list_checkpoints, verify
from tests.faults.test_live_recovery import PARTS, Disturbed, begin, undisturbed  # noqa: F401
from tests.faults.tiny import events, hold, steps
from tests.hosts import Host, hosts, require_root
from tests.launch.on_hosts import PORT, start_on
from tests.launch.shared import Ended, alive, finish, wait_for

pytestmark = pytest.mark.root
LAST = "checkpoints/step-00000026"


@pytest.fixture
def two() -> Iterator[list[Host]]:
    require_root()
    with hosts(2) as made:
        yield made


class OnTwo(Disturbed):
    """A run with two ranks on each of two hosts; `process` is the launcher of the first one."""

    def __init__(self, folder: Path, two: list[Host], *overrides: str, **variables: str) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._ranks = {}
        hold(folder, 1)
        words = begin(folder, 2, "distributed.on_failure=continue", *overrides)
        where = ("--nnodes", "2", "--master-addr", two[0].address, "--master-port", PORT)
        self.launchers = [
            start_on(host, folder, *words, *where, "--node-rank", str(number), **variables)
            for number, host in enumerate(two)
        ]
        self.process = self.launchers[0]

    def end(self) -> list[Ended]:
        """Let it go to its end, on both hosts."""
        hold(self.folder, None)
        return [finish(launcher, self.folder) for launcher in self.launchers]


def assert_went_on(run: Path, layouts: list[str], digest_of_undisturbed: str) -> None:
    """The run has come to its end on these layouts, one after the other, in the same bits."""
    recovered = events(run, "recovered")
    assert [one["layout"] for one in recovered] == layouts
    for one in recovered:
        assert one["again"] == 0, "a copy after each step: none is lost that was recorded"
        assert [part for part in one["parts"] if part != "interrupted"] == PARTS
    for resumed in events(run, "resume"):
        assert "/dev/shm/" in resumed["checkpoint"]
    assert not events(run, "restart")
    assert steps(run) == list(range(1, 27)), "each step once"
    assert digest(run / LAST) == digest_of_undisturbed


@pytest.mark.full
@pytest.mark.fault(
    "process: ranks are killed on either of two hosts, `distributed.on_failure: continue`",
    "ranks of the other host wait for them, and only the launcher of their own host sees it",
    "the launchers tell each other, and the others go on as on one machine, in the same bits; also"
    " where rank 0 was killed, whose host has the stores",
)
def test_ranks_of_both_hosts_go_on(
    two: list[Host],
    undisturbed: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = OnTwo(tmp_path, two, "distributed.strategy=fsdp")
    for number, rank in enumerate((3, 0), start=1):
        run.come_to(8 * number)
        run.send(rank, signal.SIGKILL)
        run.wait_for_events("recovered", number)
    ended = run.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert [one["lost"] for one in events(run.run, "recovery")] == [[3], [0]]
    assert_went_on(run.run, ["fsdp:3", "fsdp:2"], undisturbed)


# name → strategy, ranks that are killed, and layouts
CASES: dict[str, tuple[tuple[str, ...], list[int], list[str]]] = {
    "ddp": (("ddp",), [2, 1], ["ddp:3", "ddp:2"]),
    # the stages are on both hosts; one of three ranks waits, and takes the next place
    "pipeline": (
        ("pipeline", "distributed.pipeline_size=2"),
        [1, 0],
        ["pipeline:2", "pipeline:2"],
    ),
    # rank 0 moves to the other host, while the first one's launcher still has the stores
    "rank 0's host": (("fsdp",), [0, 1], ["fsdp:3", "fsdp:2"]),
    "hybrid": (
        ("fsdp", "distributed.fsdp.sharding_strategy=hybrid_shard"),
        [1],
        ["fsdp:3"],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_both_hosts_go_on_under_each_strategy(
    case: str,
    two: list[Host],
    undisturbed: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    (strategy, *more), killed, layouts = CASES[case]
    run = OnTwo(tmp_path, two, f"distributed.strategy={strategy}", *more)
    for number, rank in enumerate(killed, start=1):
        run.come_to(8 * number)
        run.send(rank, signal.SIGKILL)
        run.wait_for_events("recovered", number)
    ended = run.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert_went_on(run.run, layouts, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.fault(
    "process: a rank on either of two hosts dies in an update, `distributed.on_failure: continue`",
    "some of the others, on both hosts, have made the update, and some have not",
    "all go on from the newest copy that both hosts have: none keeps an update of its own",
)
def test_ranks_that_are_ahead_of_others_step_back(
    strategy: str,
    two: list[Host],
    undisturbed: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = OnTwo(
        tmp_path,
        two,
        f"distributed.strategy={strategy}",
        "data.name=tests.faults.deaths_in_update:Points",
        # rank 2 dies with rank 1 behind it; then rank 0, and nobody but it is behind
        DIE_IN_UPDATE="10:2:1,18:0:",
    )
    run.come_to(8)
    run.wait_for_events("recovered", 1)
    run.come_to(16)
    run.wait_for_events("recovered", 2)
    ended = run.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert [one["lost"] for one in events(run.run, "recovery")] == [[2], [0]]
    assert [one["step"] for one in events(run.run, "resume")] == [9, 17]
    made = [sorted(path.name for path in tmp_path.glob(f"ahead-{each}-*")) for each in (10, 18)]
    assert made == [["ahead-10-0", "ahead-10-3"], ["ahead-18-1", "ahead-18-3"]]
    assert_went_on(run.run, [f"{strategy}:3", f"{strategy}:2"], undisturbed)


@pytest.mark.full
@pytest.mark.fault(
    "process: the launcher of another host than the first is killed, and its ranks with it,"
    " `distributed.on_failure: continue`",
    "a machine loses power",
    "after 10 s without a sign of life it is taken for lost: the ranks of the other hosts go on"
    " from their own copies in memory, in the same bits",
)
def test_a_host_that_is_lost_is_done_without(
    two: list[Host],
    undisturbed: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = OnTwo(tmp_path, two, "distributed.strategy=fsdp")
    run.come_to(8)
    run.launchers[1].kill()
    run.wait_for_events("recovered", 1)
    ended = run.end()
    assert ended[0].code == 0, ended
    assert_went_on(run.run, ["fsdp:2"], undisturbed)


@pytest.mark.full
@pytest.mark.fault(
    "network: the link between two hosts is cut for ever, `distributed.on_failure: continue`",
    "no packet arrives any more, and no connection is reset",
    "the ranks of the first host go on; the launcher of the other one hears nothing for 10 s, and"
    " ends its ranks with one error",
)
def test_the_first_host_goes_on_when_the_link_is_cut(
    two: list[Host],
    undisturbed: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = OnTwo(tmp_path, two, "distributed.strategy=ddp")
    run.come_to(8)
    ranks = dict(run._ranks)
    two[1].cut()
    run.wait_for_events("recovered", 1)
    ended = run.end()
    assert [one.code for one in ended] == [0, 1], ended
    assert "which says who goes on after deaths, is gone" in ended[1].err
    assert "Traceback" not in ended[1].err
    assert not any(alive(ranks[rank]) for rank in (2, 3))
    assert_went_on(run.run, ["ddp:2"], undisturbed)


@pytest.mark.full
@pytest.mark.fault(
    "process: the launcher of the host with the store is killed, `distributed.on_failure:"
    " continue`",
    "nobody can say who goes on",
    "the launcher of the other host ends its ranks with one error, and writes the newest copy in"
    " memory among the run's checkpoints",
)
def test_without_the_first_host_the_run_ends_with_its_newest_copy(
    two: list[Host], tmp_path: Path
) -> None:
    run = OnTwo(tmp_path, two, "distributed.strategy=fsdp")
    run.come_to(8)
    ranks = dict(run._ranks)
    run.launchers[0].kill()
    ended = run.end()
    assert ended[1].code == 1, ended
    assert "which says who goes on after deaths, is gone" in ended[1].err
    assert "Traceback" not in ended[1].err
    wait_for(lambda: not any(alive(ranks[rank]) for rank in (2, 3)))
    (saved,) = list_checkpoints(run.run / "checkpoints")
    assert verify(saved) == []
    assert int(saved.name.removeprefix("step-")) >= 7
    assert f"the newest copy in memory is saved: run/checkpoints/{saved.name}" in ended[1].err


@pytest.mark.full
@pytest.mark.fault(
    "process: a rank on one of two hosts is killed, `checkpoint.memory_steps: k`, `--max-restarts`",
    "all ranks are started again, on both hosts",
    "each host goes on from its own copy in memory: no recorded step is trained again",
)
def test_ranks_of_both_hosts_are_started_again_from_their_copies(
    two: list[Host],
    undisturbed: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    restart = "distributed.on_failure=restart"
    run = OnTwo(tmp_path, two, "distributed.strategy=fsdp", restart, "--max-restarts", "1")
    run.come_to(8)
    run.send(3, signal.SIGKILL)
    ended = run.end()
    assert [one.code for one in ended] == [0, 0], ended
    (resumed,) = events(run.run, "resume")
    assert "/dev/shm/" in resumed["checkpoint"]
    assert resumed["step"] >= 8
    assert steps(run.run) == list(range(1, 27)), "each step once"
    assert digest(run.run / LAST) == undisturbed
