"""`lockstep/launch/agent.py` in this process: its ranks are real ones that only wait."""

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from lockstep.failures.hang import HangWatch
from lockstep.launch.agent import Agent, NothingToTail
from lockstep.launch.options import LaunchOptions
from lockstep.launch.rendezvous_handlers import handler, open_store
from lockstep.live.ranks import LiveRanks
from lockstep.live.world import LiveWorld
from tests.launch.shared import alive, wait_for


def agent(folder: Path, ranks: int, live: LiveRanks) -> Agent:
    """An agent of ranks that sleep; a stopped one hangs after a second."""
    options = LaunchOptions()
    store = open_store(options, print)
    spec = WorkerSpec(
        "default",
        ranks,
        handler(options, store),
        entrypoint="/bin/sleep",
        args=("600",),
        max_restarts=0,
        monitor_interval=0.02,
    )
    watch = HangWatch(folder / "beats", folder, None, 1.0, 60.0)
    return Agent(
        spec,
        failures=folder,
        logs=folder,
        on_restart=lambda cause, left: None,
        watch=watch,
        checkpoints=folder,
        live=live,
        meeting=store,
    )


def test_torch_tails_no_output_of_ranks() -> None:
    """Two threads a rank would, and each restart would wait 0.2 s for them."""
    variables: dict[int, dict[str, str]] = {0: {}, 1: {}}
    places = NothingToTail().reify(variables)
    assert not places.tee_stdouts
    assert not places.tee_stderrs
    assert places.stdouts == {0: "", 1: ""}, "the launcher's own output"
    assert variables == {rank: {"TORCHELASTIC_ERROR_FILE": ""} for rank in (0, 1)}


def test_a_rank_that_dies_while_the_others_are_told_of_another_one_is_a_death_like_any(
    tmp_path: Path,
) -> None:
    """It has ended before the look at the ranks in which the first one was found is over."""
    (tmp_path / "beats").mkdir()
    worlds: list[LiveWorld] = []

    def kill(rank: int) -> None:
        pid = agent_of_ranks.pids()[rank]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid))

    def on_change(world: LiveWorld) -> None:
        worlds.append(world)
        if world.generation == 1:
            kill(3)
        else:
            kill(1)
            kill(2)

    live = LiveRanks(
        tmp_path / "world.json", tmp_path / "beats", tmp_path, lambda *_: True, on_change
    )
    agent_of_ranks = agent(tmp_path, 4, live)
    look = agent_of_ranks.look_at_ranks
    agent_of_ranks.look_at_ranks = lambda group: (  # type: ignore[method-assign]
        kill(0) if not worlds else None,
        look(group),
    )[1]
    result = agent_of_ranks.run()
    agent_of_ranks.leave_rendezvous(5.0)
    assert [[*world.members] for world in worlds] == [[1, 2, 3], [1, 2]]
    assert result.state == WorkerState.FAILED, "the last two die together"
    assert live.refusal == "no rank of 2 would be left"
    assert LiveWorld.read(tmp_path / "world.json").over


@pytest.mark.fault(
    "hang: a rank that waits for a place is stopped (SIGSTOP), `distributed.on_failure: continue`",
    "no other rank misses it before the end of the run, when the launcher waits for it to leave",
    "it is ended after `hang.seconds`, and nobody has to stop for that",
)
def test_a_spare_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody misses it before the end, when the launcher waits for all ranks to leave."""
    (tmp_path / "beats").mkdir()
    worlds: list[LiveWorld] = []
    live = LiveRanks(
        tmp_path / "world.json",
        tmp_path / "beats",
        tmp_path,
        lambda ranks, _each: ranks % 2 == 0,
        worlds.append,
    )
    agent_of_ranks = agent(tmp_path, 4, live)
    look = agent_of_ranks.look_at_ranks
    disturbances = [(0, signal.SIGKILL), (3, signal.SIGSTOP)]

    def disturb_and_look(group: WorkerGroup) -> RunResult:
        pids = agent_of_ranks.pids()
        if len(worlds) == 2 - len(disturbances):
            rank, number = disturbances.pop(0)
            os.kill(pids[rank], number)
        if worlds and not live.world.spares:
            assert not alive(pids[3])
            for pid in pids[1:3]:
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda ended=pid: not alive(ended))  # type: ignore[misc]
        return look(group)

    agent_of_ranks.look_at_ranks = disturb_and_look  # type: ignore[method-assign]
    result = agent_of_ranks.run()
    agent_of_ranks.leave_rendezvous(5.0)
    assert [([*world.members], [*world.spares]) for world in worlds] == [([1, 2], [3])]
    assert [*live.world.members] == [1, 2]
    assert result.state == WorkerState.FAILED, "the last two die together"
