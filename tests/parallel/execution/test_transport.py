"""Messages between stages: their order can't deadlock, and what carries them loses, mixes up and
piles up nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.costs.steps import ScheduledPass
from lockstep.parallel.execution.programs import (
    Instruction,
    Message,
    Receive,
    Send,
    made_by,
    needed_by,
    programs,
)
from lockstep.parallel.execution.transport import Described, KnownMessages, Meta, PeerToPeer
from lockstep.parallel.pipeline.schedules import SCHEDULES, actions, forward_program_of, holders
from lockstep.process_group.collectives import message_device
from tests.ranks import run_ranks

RANKS = range(2, 9)
MICRO_BATCHES = range(1, 17)
Programs = Sequence[Sequence[Instruction]]


def stages_of(name: str) -> int:
    """How many stages a rank has under a schedule, here."""
    return 1 if name in ("GPipe", "1F1B") else 2


def cases(name: str) -> list[tuple[int, int]]:
    """(ranks, micro-batches that the schedule takes), each once."""
    facts = SCHEDULES[name]
    found = {
        (r, facts.padded(count, r, r * stages_of(name))): None
        for r in RANKS
        for count in MICRO_BATCHES
    }
    return list(found)


def all_get_through(of_ranks: Programs, rank_of: Sequence[int]) -> bool:
    """Run programs whose sends and receives block their rank until the other side is at them, too.

    Nothing that serialises messages is stricter: one communicator for all, one for each pair of
    ranks, one queue a rank. A pass whose message is not there has no program to blame but its own:
    that is an error at once.
    """
    stages = len(rank_of)
    at = [0] * len(of_ranks)
    there: set[tuple[Message, int]] = set()  # messages, and the ranks that have them
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(of_ranks):
            while at[rank] < len(program):
                each = program[at[rank]]
                if isinstance(each, ScheduledPass):
                    needed = needed_by(each, stages)
                    assert needed is None or (needed, rank) in there, (rank, each)
                    made = made_by(each, stages)
                    there |= set() if made is None else {(made, rank)}
                else:
                    theirs = of_ranks[each.peer][at[each.peer] : at[each.peer] + 1]
                    wanted = (
                        Receive(each.message, rank)
                        if isinstance(each, Send)
                        else Send(each.message, rank)
                    )
                    if list(theirs) != [wanted]:
                        break  # the other rank is elsewhere: wait for it
                    there.add((each.message, each.peer if isinstance(each, Send) else rank))
                    at[each.peer] += 1
                at[rank] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, of_ranks, strict=True))


def just_in_time(
    orders: Sequence[Sequence[ScheduledPass]], rank_of: Sequence[int]
) -> list[list[Instruction]]:
    """Broken on purpose: receive right before the pass that needs a message, send right after the
    one that makes it.
    """
    found = []
    for rank, order in enumerate(orders):
        program: list[Instruction] = []
        for each in order:
            needed = needed_by(each, len(rank_of))
            made = made_by(each, len(rank_of))
            if needed is not None:
                source = rank_of[each.stage + (-1 if each.kind == "F" else 1)]
                program += [Receive(needed, source)] if source != rank else []
            program.append(each)
            if made is not None and rank_of[made.stage] != rank:
                program.append(Send(made, rank_of[made.stage]))
        found.append(program)
    return found


def made(
    name: str, ranks: int, count: int, make: Callable[..., Any] = programs
) -> tuple[Programs, list[int]]:
    rank_of = holders(name, ranks, stages_of(name))
    return make(actions(name, ranks, stages_of(name), count), rank_of), rank_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks_though_every_send_waits_for_its_receiver(name: str) -> None:
    for ranks, count in cases(name):
        assert all_get_through(*made(name, ranks, count)), (ranks, count)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_simulation_finds_the_deadlocks_of_another_order(name: str) -> None:
    broken = [
        case for case in cases(name) if not all_get_through(*made(name, *case, make=just_in_time))
    ]
    assert len(broken) > len(cases(name)) // 2


def test_the_simulation_finds_two_receives_in_the_wrong_order() -> None:
    of_ranks, rank_of = made("1F1B", 4, 8)
    assert all_get_through(of_ranks, rank_of)
    second = list(of_ranks[1])
    places = [place for place, each in enumerate(second) if isinstance(each, Receive)]
    second[places[0]], second[places[1]] = second[places[1]], second[places[0]]
    assert not all_get_through([of_ranks[0], second, *of_ranks[2:]], rank_of)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_has_the_passes_of_its_schedule_and_each_message_once(name: str) -> None:
    of_ranks, _ = made(name, 4, 8)
    for program, order in zip(of_ranks, actions(name, 4, stages_of(name), 8), strict=True):
        assert [each for each in program if isinstance(each, ScheduledPass)] == order
    sent = [each.message for program in of_ranks for each in program if isinstance(each, Send)]
    received = [
        each.message for program in of_ranks for each in program if isinstance(each, Receive)
    ]
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)


def test_the_example_of_the_module_is_what_programs_are() -> None:
    """Two stages on two ranks, 1F1B of two micro-batches, as `transport.py` shows them."""

    def text(each: Instruction) -> str:
        if isinstance(each, ScheduledPass):
            return f"{each.kind}{each.stage}.{each.micro_batch}"
        verb = "send" if isinstance(each, Send) else "receive"
        return f"{verb} {'a' if each.message.kind == 'F' else 'g'}{each.message.micro_batch}"

    first, second = ([text(each) for each in program] for program in made("1F1B", 2, 2)[0])
    assert " ".join(first) == "F0.0 send a0 F0.1 send a1 receive g0 B0.0 receive g1 B0.1"
    assert " ".join(second) == "receive a0 F1.0 receive a1 B1.0 send g0 F1.1 B1.1 send g1"


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_forward_passes_alone_do_not_deadlock(name: str) -> None:
    for ranks in RANKS:
        for count in (1, 2, ranks, 2 * ranks + 1):
            of_ranks = [
                forward_program_of(name, ranks, stages_of(name), count, rank)
                for rank in range(ranks)
            ]
            assert all_get_through(of_ranks, holders(name, ranks, stages_of(name))), (ranks, count)


# ---- what carries messages ----


def of_two(count: int) -> KnownMessages:
    """Messages of a [3, 4] and a [2], of which the first brings its strides."""
    metas = (Meta.of(torch.empty(3, 4)), Meta.of(torch.empty(2)))
    return KnownMessages(
        {Message("F", 1, place): metas for place in range(count)},
        with_strides={Message("F", 1, 0)},
    )


def two_ranks() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    me = dist.get_rank()
    first = Message("F", 1, 0)
    known = PeerToPeer(group, torch.device("cpu"))
    known.begin(of_two(8))
    described = Described(group, torch.device("cpu"), torch.device("cpu"))
    found: dict[str, Any] = {"kept": []}
    if me == 0:
        for place in range(8):
            tensors = torch.full((4, 3), float(place)).t(), torch.full((2,), -float(place))
            known.send(Message("F", 1, place), 1, tensors)
            found["kept"].append(len(known._leaving))
        known.finish()
        described.send(first, 1, (torch.ones(2, requires_grad=True) * 3, torch.tensor([7])))
        return found
    for place in range(8):
        known.receive(Message("F", 1, place), 0)
    # They are taken in another order than they arrive in.
    taken = [known.take(Message("F", 1, place))[0] for place in (1, 0, *range(2, 8))]
    found["taken"] = [tensor.mean().item() for tensor in taken]
    found["strides"] = [tensor.stride() for tensor in taken]
    found["noted"] = known.strides
    described.receive(first, 0)
    one, other = described.take(first)
    found["described"] = one.tolist(), one.requires_grad, other.tolist(), other.requires_grad
    return found


def test_tensors_arrive_under_their_message_and_are_let_go_once_they_are_through() -> None:
    sender, receiver = run_ranks(two_ranks, 2)
    assert receiver["taken"] == [1.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert receiver["described"] == ([3.0, 3.0], True, [7], False)
    # only the first message, which was taken second, has brought its strides
    assert receiver["strides"] == [(4, 1), (1, 3), *[(4, 1)] * 6]
    assert receiver["noted"] == {Message("F", 1, 0): [(1, 3), (1,)]}
    assert sender["kept"] == [
        3,
        5,
        4,
        4,
        4,
        4,
        4,
        4,
    ]  # of two messages at most, of two tensors each; the first has strides


@pytest.mark.parametrize(
    ("serves", "device", "carried_on"),
    [
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
    ],
)
def test_gloo_carries_what_lies_on_the_host(
    serves: str, device: str, carried_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the memory of a GPU, its sends end the process."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: serves)
    group: Any = None
    assert message_device(group, torch.device(device)) == torch.device(carried_on)
