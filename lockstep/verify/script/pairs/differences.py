"""Finds what is other in two runs of scripts, A and B, beside what they compute.

Each function looks at one kind: it returns a sentence, or "" where the runs are the same. What is
given to B of A afterwards, kind by kind, is in `given.py`.

Tests: tests/verify/test_pair.py
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from lockstep.errors import listed
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.feeds import step_batches
from lockstep.verify.script.observed.draws import LoopDraw
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.world import with_complete_tensors

Records = Sequence[ScriptRecord]
"""Of the ranks of a run."""


def missing_parameters(of_b: Records, of_a: Records) -> Cause | None:
    """Return the cause if A and B do not have the same parameters."""
    if not of_b[0].first and of_a[0].first:
        text = "B's model is in evaluation mode when it trains"
        return Cause("evaluation mode", text, ["the mode of each model that is called"])
    shapes = [
        {name: piece.shape for record in records for name, piece in record.first.items()}
        for records in (of_a, of_b)
    ]
    other = [name for name in shapes[0] if shapes[0][name] != shapes[1].get(name)]
    more = [name for name in shapes[1] if name not in shapes[0]]
    if not other and not more:
        return None
    parts = [f"B has no parameter like A's {listed(other, 5)}"] if other else []
    parts += [f"A has none like B's {listed(more, 5)}"] if more else []
    by = "names and shapes of the parameters"
    return Cause("parameters", "; ".join(parts), [by], column="first values")


def pairing(of_b: Records, of_a: Records) -> dict[str, str]:
    """Return what B can be given of A where it differs: what it is → what is known of it."""
    texts = {
        "first values": _other_first_values(of_b, of_a),
        "samples": _other_samples(of_b, of_a),
        "random numbers": _other_draws(of_b, of_a),
    }
    return {kind: text for kind, text in texts.items() if text}


def _other_first_values(of_b: Records, of_a: Records) -> str:
    pairs = zip(with_complete_tensors(of_b), with_complete_tensors(of_a), strict=True)
    for b, a in pairs:
        wrong = [
            name
            for name, piece in a.first.items()
            if name not in b.first or not torch.equal(piece.local, b.first[name].local)
        ]
        if wrong:
            return f"B starts from other values of {listed(wrong, 5)} than A"
    return ""


def _other_samples(of_b: Records, of_a: Records) -> str:
    for rank, (b, a) in enumerate(zip(of_b, of_a, strict=True)):
        for number in range(min(len(b.steps), len(a.steps))):
            read = [_samples_read(record, number) for record in (b, a)]
            passed = [record.steps[number].elements for record in (b, a)]
            if read[0] != read[1] and passed[0] != passed[1]:
                where = f" on rank {rank}" if rank else ""
                return f"B trains on other samples than A in step {number + 1}{where}"
    return ""


def _samples_read(record: ScriptRecord, number: int) -> list[str]:
    """Return the samples of a step, in order; without a loader the rows of the model's inputs."""
    trained = step_batches(record, number)
    if trained is None:
        return [row for rows in record.steps[number].inputs for row in rows]
    batches = record.batches[trained.loader]
    return [sample for index in trained.indices for sample in batches[index]]


def _other_draws(of_b: Records, of_a: Records) -> str:
    """Return what the loop or a forward pass of B draws otherwise than A; empty if nothing."""
    for b, a in zip(of_b, of_a, strict=True):
        for draw, other in zip(b.draws, as_drawn(a, b), strict=False):
            if draw.outside and other is not None and not draw.has_value_of(other):
                return f"{draw.place} draws other numbers than A"
        steps = zip(b.steps, a.steps, strict=False)
        passes = chain.from_iterable(zip(m.draws, r.draws, strict=False) for m, r in steps)
        for pass_of_b, pass_of_a in passes:
            names = [
                name
                for name in pass_of_b.moved
                if pass_of_b.before[name] != pass_of_a.before.get(name)
            ]
            if names or pass_of_b.moved != pass_of_a.moved:
                drawn = listed(sorted({*pass_of_b.moved, *pass_of_a.moved}))
                return f"a forward pass of B draws other numbers than A's from {drawn}'s"
    return ""


def as_drawn(a: ScriptRecord, b: ScriptRecord) -> list[LoopDraw | None]:
    """Return what A has drawn in place of each draw of B, keyed by B's batches and lines.

    A draw is the one of the same name and number for the same batch.
    """
    waiting: dict[tuple[int, str], list[LoopDraw]] = {}  # (batch, name) → A's draws, in order
    for draw in a.draws:
        waiting.setdefault((draw.batch[1], draw.name), []).append(draw)
    drawn: list[LoopDraw | None] = []
    for draw in b.draws:
        drawn_by_a = waiting.get((draw.batch[1], draw.name), [])
        drawn.append(replace(draw, value=drawn_by_a.pop(0).value) if drawn_by_a else None)
    return drawn


def other_settings(of_b: Records, of_a: Records, steps: int) -> str:
    """Return the first setting of the optimizer that is another in B."""
    for number in range(steps):
        groups_of_b = of_b[0].steps[number].settings
        groups_of_a = of_a[0].steps[number].settings
        for group, other in zip(groups_of_b, groups_of_a, strict=False):
            for key in sorted({*group} & {*other}):  # another optimizer has others
                if group[key] != other[key]:
                    name = "the learning rate" if key == "lr" else key
                    return (
                        f"{name} is {group[key]} in B and {other[key]} in A, in step {number + 1}"
                    )
    return ""


def other_precision(of_b: Records, of_a: Records) -> str:
    """Return the dtypes with which B computes, if they are not those of A."""
    for b, a in zip(of_b, of_a, strict=True):
        for step_of_b, step_of_a in zip(b.steps, a.steps, strict=False):
            if step_of_b.dtypes != step_of_a.dtypes:
                return (
                    f"B computes with {listed(sorted(step_of_b.dtypes))}, and A with"
                    f" {listed(sorted(step_of_a.dtypes))}"
                )
    return ""
