"""Orders a rank's passes, sends and receives so that no rank can wait for ever.

A rank's *program* is the list of its passes in the order of the schedule, with sends and receives
between them. All messages of a run have one order over all ranks: that in which they are ready in a
simulated run of the schedule, in which F takes one unit of time, B two, I and W one each. With two
stages on two ranks and 1F1B of two micro-batches:

    time     0        1        2        3        4        5        6        7
    rank 0   F0.0     F0.1     ·        ·        B0.0     B0.0     B0.1     B0.1
    rank 1   ·        F1.0     B1.0     B1.0     F1.1     B1.1     B1.1     ·
    ready             a0       a1                g0                         g1

(`F0.1`: forward pass of stage 0, micro-batch 1; a: activations, for stage 1; g: gradients, for
stage 0.) Each rank starts its sends and receives in that order: a send after the pass that makes
the message, a receive no later than the pass during which the message becomes ready:

    rank 0   F0.0 send a0 · F0.1 send a1 · receive g0 · B0.0 · receive g1 · B0.1
    rank 1   receive a0 · F1.0 · receive a1 · B1.0 · send g0 · F1.1 · B1.1 · send g1

So no rank can wait for ever, whatever serialises messages (one communicator for all of them, one
for each pair of ranks, one queue a rank, sends that wait for their receiver): take the first
message of the order that is not through. All earlier ones are, so it is the next one of both its
ranks; and the pass that makes it needs earlier ones alone. The order must be the same on all ranks,
so the units are fixed, and nothing else may be started on the process group while a run is under
way.

Tests: tests/parallel/execution/test_transport.py
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.costs.steps import ScheduledPass, pipeline

# What passes take, in forward passes of a stage: a backward pass computes gradients of inputs and
# of weights. The order of messages follows from it, so it is the same for all ranks, whatever a
# model takes.
UNITS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Message(NamedTuple):
    """The tensors that a pass makes for a pass of the neighbouring stage."""

    kind: str  # F: activations, for the next stage; B: gradients, for the previous one
    stage: int  # the one that receives it
    micro_batch: int  # position in the run


class Send(NamedTuple):
    """Start to send a message."""

    message: Message
    peer: int  # pipeline rank


class Receive(NamedTuple):
    """Start to receive a message."""

    message: Message
    peer: int  # pipeline rank


Instruction = ScheduledPass | Send | Receive
Program = Sequence[Instruction]


def made_by(scheduled: ScheduledPass, stages: int) -> Message | None:
    """Return the message that a pass makes; None if no other stage waits for it."""
    if scheduled.kind == "F" and scheduled.stage + 1 < stages:
        return Message("F", scheduled.stage + 1, scheduled.micro_batch)
    if scheduled.kind in ("B", "I") and scheduled.stage > 0:
        return Message("B", scheduled.stage - 1, scheduled.micro_batch)
    return None


def needed_by(scheduled: ScheduledPass, stages: int) -> Message | None:
    """Return the message that a pass needs.

    None for one that starts from a batch, a loss, or its own first half.
    """
    if scheduled.kind == "F" and scheduled.stage > 0:
        return Message("F", scheduled.stage, scheduled.micro_batch)
    if scheduled.kind in ("B", "I") and scheduled.stage + 1 < stages:
        return Message("B", scheduled.stage, scheduled.micro_batch)
    return None


class _Ready(NamedTuple):
    """A message between ranks; sorts by the time at which it is ready in the simulated run."""

    time: float
    message: Message
    source: int  # pipeline rank
    target: int  # pipeline rank


def programs(
    orders: Sequence[Sequence[ScheduledPass]], rank_of: Sequence[int]
) -> list[list[Instruction]]:
    """Return each rank's program; the same result on every rank.

    Args:
        orders: each rank's passes in the order of the schedule.
        rank_of: of each stage, its pipeline rank.
    """
    stages = len(rank_of)
    ranks = len(orders)
    seconds = {(kind, stage): cost for kind, cost in UNITS.items() for stage in range(stages)}
    line = pipeline(orders, seconds, [0.0] * stages, rank_of=list(rank_of))
    ends = [
        [task.end for task in line.tasks if task.stream == ("compute", rank)]
        for rank in range(ranks)
    ]
    ready = []
    for rank, order in enumerate(orders):
        for scheduled, end in zip(order, ends[rank], strict=True):
            # Neighbouring stages of one rank, in schedules that give it several, need no message.
            message = made_by(scheduled, stages)
            if message is not None and rank_of[message.stage] != rank:
                ready.append(_Ready(end, message, rank, rank_of[message.stage]))
    ready.sort()
    return [_program(rank, order, ends[rank], ready) for rank, order in enumerate(orders)]


def _program(
    rank: int, order: Sequence[ScheduledPass], ends: Sequence[float], ready: Sequence[_Ready]
) -> list[Instruction]:
    """Put a rank's messages between its passes.

    Args:
        rank: whose program it is.
        order: its passes, in the order of the schedule.
        ends: when each of them ends in the simulated run. A message that is ready before a pass
            ends comes before it.
        ready: the messages of all ranks, in order.
    """
    program: list[Instruction] = []
    waiting = [message for message in ready if rank in (message.source, message.target)]
    done = 0
    for scheduled, end in zip(order, ends, strict=True):
        # A message that is ready when this pass ends is not among them: it may be made by it.
        while done < len(waiting) and waiting[done].time < end:
            program.append(_instruction(waiting[done], rank))
            done += 1
        program.append(scheduled)
    return program + [_instruction(message, rank) for message in waiting[done:]]


def _instruction(ready: _Ready, rank: int) -> Instruction:
    """Return this rank's side of a message."""
    if ready.source == rank:
        return Send(ready.message, ready.target)
    return Receive(ready.message, ready.source)
