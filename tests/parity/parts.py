"""The parity matrix of data-parallel strategies: which cases there are, and how far they may be
from one process.

`whole=True` is every combination, run by `make test-full` and recorded by `python -m
tests.parity.record`; `whole=False` a selection in which strategies, models, accumulation and
checkpointing take turns. Of that `make test` runs a sample (`parts_of_make_test`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tests.parity.matrix import MODELS, STEPS, STRATEGIES, Case, Result, reference, run_all
from tests.ranks import run_ranks

VARIANTS = [
    (accumulation, checkpointing) for checkpointing in ("none", "full") for accumulation in (3, 1)
]
# which needs two, and says so
ON_ONE_RANK = ("dp", *(name for name in STRATEGIES if name != "hybrid_shard"))
HALF_MODES = ("bf16", "fp16")
FIRST_SCALE = ("precision.loss_scale.initial_scale", 1024.0)
COMPILED = (("training.compile", True),)


class Limits(NamedTuple):
    """Largest relative differences: of the first step; of losses, and of norms, in all steps."""

    first: float
    losses: float
    norms: float


# fp32: sums in another order, over 5 steps of AdamW.
EXACT = Limits(1e-5, 1e-5, 1e-5)
# Where a ReLU opens, as in the VAE, a last digit of a parameter is a jump of the gradient:
# hybrid_shard on 4 ranks, the fifth step, 1.9e-4 of its norm, with losses that are 2e-8 apart. In
# float64 that run is within 5e-8 of one process. BDH has ReLUs, too: `accelerate` on 2 ranks is
# 4.2e-4 of a norm off, with losses that are 4e-8 apart.
EXACT_OF_RELUS = Limits(1e-5, 1e-5, 1e-3)
# Autocast rounds activations at the same places under every strategy, over the same fp32
# parameters: the first step is the same to the order of an fp32 sum. From then on parameters differ
# in their last digits, so that now and then an activation rounds to its other neighbour, 2^-8
# (bf16) or 2^-11 (fp16) away; and where a ReLU opens, as in the VAE, the gradient jumps. One
# rounding to the other side moves a loss by up to 4e-5 in these models; bf16 itself moves it by
# more than 1e-4, so that a run in the wrong precision is out of bounds.
HALF = Limits(5e-6, 1e-4, 2e-2)
HALF_OF_IMAGES = Limits(5e-6, 1e-3, 5e-2)


def limits(case: Case) -> Limits:
    if dict(case.more).get("precision.mode") not in HALF_MODES:
        return EXACT_OF_RELUS if case.model in ("vae", "bdh") else EXACT
    return HALF_OF_IMAGES if case.model == "vae" else HALF


def deviation(one: Result, other: Result) -> Limits:
    """How far two runs are apart."""
    pairs = list(zip(one.steps, other.steps, strict=True))
    losses, norms = ([abs(a[k] - b[k]) / abs(b[k]) for a, b in pairs] for k in (0, 1))
    assert all(a[2] == b[2] for a, b in pairs), "they saw other samples"
    return Limits(max(losses[0], norms[0]), max(losses), max(norms))


class Outcome(NamedTuple):
    """Of a case, on the rank where it is worst.

    Attributes:
        problem: empty where all is well.
    """

    case: Case
    found: Limits | None
    problem: str


def outcome(case: Case, ranks: int, results: Sequence[Result | str]) -> Outcome:
    """Judge what each rank made of a case."""
    expected = reference(case, case.micro_batches(ranks))
    worst = Limits(0.0, 0.0, 0.0)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            return Outcome(case, None, f"rank {rank} of {ranks}, {case}: {result}")
        if result.num_parameters != expected.num_parameters:
            return Outcome(
                case, None, f"rank {rank} of {ranks}, {case}: {result.num_parameters} parameters"
            )
        worst = Limits(*map(max, worst, deviation(result, expected)))
    allowed = limits(case)
    far = any(found > most for found, most in zip(worst, allowed, strict=True))
    return Outcome(case, worst, f"{ranks} ranks, {case}: {worst}, allowed {allowed}" if far else "")


class Part(NamedTuple):
    """Cases that one launch runs."""

    name: str
    ranks: int
    cases: list[Case]

    def run(self, timeout: float = 900) -> list[Outcome]:
        results = run_ranks(run_all, self.ranks, self.cases, timeout=timeout)
        of_cases = zip(*results, strict=True)
        return [
            outcome(case, self.ranks, of_ranks)
            for case, of_ranks in zip(self.cases, of_cases, strict=True)
        ]


def one_rank(*, whole: bool) -> list[Case]:
    """What each strategy makes of a single process."""
    if whole:
        return [
            Case(model, s, *variant)
            for s in ON_ONE_RANK
            for model in MODELS
            for variant in VARIANTS
        ]
    return [
        Case(model, s, 3, "full")
        for s in ON_ONE_RANK
        for model in (MODELS if s == "full_shard" else ["transformer"])
    ]


def exact(ranks: int, *, whole: bool) -> list[Case]:
    """Return every model under every strategy in fp32, with each accumulation and checkpointing.

    Unless `whole`, the variants take turns, and one fifth of the models runs on 2 ranks, one fifth
    on 4, for two steps.
    """
    cases = []
    for i, strategy in enumerate(STRATEGIES):
        for j, model in enumerate(MODELS):
            if whole or (i + j + ranks // 2) % 5 == 0:
                turn = (i + j // 2 + ranks // 2) % len(VARIANTS)
                chosen = VARIANTS if whole else [VARIANTS[turn]]
                cases += [Case(model, strategy, *v, steps=STEPS if whole else 2) for v in chosen]
    return cases


def half(*, whole: bool) -> list[Case]:
    """bf16 and fp16, with accumulation and checkpointing; unless `whole`, models and strategies
    take turns.
    """
    models = tuple(MODELS) if whole else ("transformer", "bdh", "vae")
    strategies = tuple(STRATEGIES) if whole else ("ddp", "full_shard")
    return [
        Case(
            model,
            strategy,
            3,
            "full",
            (("precision.mode", mode), FIRST_SCALE),
            STEPS if whole else 2,
        )
        for i, mode in enumerate(HALF_MODES)
        for j, model in enumerate(models)
        for k, strategy in enumerate(strategies)
        if whole or (i + j + k) % 2 == 0
    ]


def compiled(*, whole: bool) -> list[Case]:
    """torch.compile; on more than two ranks, if hybrid shards are to be more than replicas."""
    chosen = [("full_shard", "full")]
    if whole:
        chosen += [("ddp", "selective"), *((strategy, "none") for strategy in STRATEGIES)]
    return [
        Case("transformer", strategy, 3, checkpointing, COMPILED)
        for strategy, checkpointing in chosen
    ]


def parts() -> list[Part]:
    """Return the whole matrix."""
    return [
        Part("fp32", 1, one_rank(whole=True)),
        *(Part("fp32", ranks, exact(ranks, whole=True)) for ranks in (2, 4)),
        *(Part("bf16 and fp16", ranks, half(whole=True)) for ranks in (2, 4)),
        Part("compiled", 4, compiled(whole=True)),
        Part("fp32, one model", 8, [c for c in exact(8, whole=True) if c.model == "tied"]),
    ]


def parts_of_make_test() -> list[Part]:
    """Return what `make test` runs: the tests mark the other cases `full`, by this list."""
    on_one_rank = [case for case in one_rank(whole=False) if case.model == "transformer"]
    return [
        Part("fp32", 1, on_one_rank),
        Part("fp32", 2, exact(2, whole=False)[::2]),
        Part("bf16 and fp16", 2, half(whole=False)[::3]),  # both, replicas and shards
    ]
