"""Runs on products of axes, compared with one process."""

from collections.abc import Sequence
from operator import lt
from typing import Any

from tests.parity.same_bits import Bits, many, of_one_process
from tests.parity.toy import worst
from tests.ranks import run_ranks

Model = tuple[str, dict[str, Any], dict[str, Any]]
"""Its name, settings, and arguments of the model."""

# Of losses, and of norms. A loss moves so far when one activation in bf16 rounds to its other
# neighbour, and a norm by a last digit of bf16. Where a ReLU of BDH opens, a last digit is a jump
# of the gradient: 4e-5 of its norm, with losses that are 4e-7 apart.
LIMITS = {"bf16": (1e-3, 4e-3), "bdh": (1e-5, 1e-4), "": (1e-5, 1e-5)}


def check_against_one_process(ranks: int, cases: list[tuple[Any, ...]]) -> None:
    """Compare (topology, model, settings, steps, model arguments) with one process.

    Equal bits under `reproducible`, which is the default; else losses and norms within 1e-5.
    """
    wrong = []
    for part in launches_of(cases):
        for results in run_ranks(many, ranks, part, timeout=5400):
            wrong += [
                difference
                for case, found in zip(part, results, strict=True)
                if (difference := off(case, found))
            ]
    assert not wrong, "\n".join(map(str, wrong))


def launches_of(cases: list[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """One, or one for each topology of a long grid: the threads of gloo's groups wake up a hundred
    times a second.
    """
    if len(cases) < 40:
        return [cases]
    return [
        [case for case in cases if case[0] == topology]
        for topology in dict.fromkeys(case[0] for case in cases)
    ]


def off(case: tuple[Any, ...], found: Bits) -> tuple[Any, ...] | None:
    """How far a run is from that of one process; None: as near as it must be."""
    topology, *rest = case
    reference = of_one_process(rest)
    if "distributed.reproducible" not in rest[1]:
        return (
            None if found == reference else (topology, rest, "other bits", far(0, found, reference))
        )
    limits = LIMITS.get(rest[1].get("precision.mode", rest[0]), LIMITS[""])
    distances = [far(place, found, reference) for place in range(len(limits))]
    return None if all(map(lt, distances, limits)) else (topology, rest, distances)


def by_turns(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same, every second one with plain sums."""
    return [
        (
            top,
            model,
            {**settings, "distributed.reproducible": False} if place % 2 else settings,
            *rest,
        )
        for place, (top, model, settings, *rest) in enumerate(cases)
    ]


def every(topologies: Sequence[str], models: Sequence[Model]) -> list[tuple[Any, ...]]:
    """Every model on every topology: of each row and column some take 20 steps, the others 4; steps
    are `uneven`.
    """
    turns = min(len(models), len(topologies))
    return uneven(
        [
            (topology, model, settings, 4 if (place + number) % turns else 20, args)
            for place, topology in enumerate(topologies)
            for number, (model, settings, args) in enumerate(models)
        ]
    )


def uneven(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same with five micro-batches a step, which ranks can't share evenly."""
    return [
        (top, model, {**s, "training.global_batch_size": 10}, *rest)
        for top, model, s, *rest in cases
    ]


def far(place: int, found: Bits, reference: Bits) -> float:
    """Of the losses (place 0) or norms (place 1) of two runs."""
    return worst(
        *([(float.fromhex(step[place]),) for step in run] for _, run in (found, reference))
    )
