"""Runs on products of axes, compared with one process."""

from typing import Any

from tests.parity.same_bits import many
from tests.parity.toy import worst
from tests.ranks import run_ranks

# Of losses, and of norms. A loss moves so far when one activation in bf16 rounds to its other neighbour. Where a ReLU
# of BDH opens, a last digit is a jump of the gradient: 4e-5 of its norm, with losses that are 4e-7 apart.
LIMITS = {"bf16": (1e-3, 1e-3), "bdh": (1e-5, 1e-4), "": (1e-5, 1e-5)}


def check_against_one_process(ranks: int, cases: list[tuple[Any, ...]]) -> None:
    """Compare (topology, model, settings, steps, model arguments) with one process.

    Equal bits under `reproducible`, which is the default; else losses and norms within 1e-5.
    """
    expected = {repr(rest): many([("single", *rest)])[0] for _, *rest in cases}
    for results in run_ranks(many, ranks, cases, timeout=5400):
        for (topology, *rest), found in zip(cases, results, strict=True):
            reference = expected[repr(rest)]
            if "distributed.reproducible" not in rest[1]:
                assert found == reference, (topology, rest)
                continue
            limits = LIMITS.get(rest[1].get("precision.mode", rest[0]), LIMITS[""])
            for place, limit in enumerate(limits):
                far = worst(*([(float.fromhex(step[place]),) for step in run] for _, run in (found, reference)))
                assert far < limit, (topology, rest, place, far)
