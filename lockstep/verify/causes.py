"""Names the cause of a difference.

It is found from what flowed through the step, and from experiments that undo one thing each.

A cause is named if its undoing makes the difference vanish, else the text says what is known.

Tests: tests/verify/test_faults.py, tests/verify/test_updates.py
"""

from collections.abc import Callable, Sequence

from lockstep.errors import listed
from lockstep.strategy import parse_topology
from lockstep.verify import direct_causes, experiments
from lockstep.verify.algebra import OTHER_COUNT, UNRELATED, WRONG_REFERENCE
from lockstep.verify.comparison_result import ROUNDING, UNKNOWN, Cause
from lockstep.verify.comparisons import TOO_FAR
from lockstep.verify.differences import Evidence, first_seen, located, name_ranks, ranks_of
from lockstep.verify.recorded_flow import BACKWARD, FORWARD, LOSS, REDUCTION

# largest relative rounding of a gradient by bfloat16 when the same terms are summed
LOW_ROUNDING = 8 * 2.0**-8


def is_clear(e: Evidence) -> bool:
    """Return whether a cause can be named without further experiments."""
    if e.main.has("samples", "start"):
        return any(rule(e) is not None for rule in DIRECT)
    if direct_causes.update_experiments(e):
        return False
    if direct_causes.update(e) is not None or any(rule(e) is not None for rule in DIRECT):
        return True
    if direct_causes.buffers(e) is not None:
        return not any(flow.settings for flow in e.flows)
    return bool(
        e.deviations and all(d.stage == REDUCTION for d in e.deviations) and not e.not_reduced
    )


def wanted_experiments(e: Evidence, topology: str) -> list[str]:
    """Return the experiments that may undo the difference, from what was seen."""
    if e.main.has("samples", "start"):
        return [experiments.SAMPLES if e.main.has("samples") else experiments.START]
    wanted = direct_causes.update_experiments(e)
    if wanted and not e.main.has("gradient"):
        return wanted
    off = experiments.switched_off(e.config)
    if experiments.RECOMPUTATION in off and not e.main.has("loss"):
        # part by part, nothing is recomputed
        wanted += [experiments.RECOMPUTATION, experiments.SAME_DRAWS]
    if not e.flows:
        wanted += _without_parts(topology)
        return [*wanted, experiments.PERTURB, experiments.DOUBLE, *off]
    if not e.deviations:
        return [*wanted, *_where_parts_agree(e), *off]
    return [*wanted, *_where_parts_deviate(e, topology)]


def _without_parts(topology: str) -> list[str]:
    """Return the experiments for a step that could not be compared part by part: all of them."""
    _, ranks = parse_topology(topology)
    return [
        experiments.SEEDS,
        experiments.SAME_DRAWS,
        experiments.MEMORY,
        experiments.PRECISE,
        *([experiments.ALONE] if ranks > 1 else []),
        experiments.HOOKS,
        *_of_axes(topology),
    ]


def _where_parts_agree(e: Evidence) -> list[str]:
    """Return the experiments for a step whose parts agree when they are given the same inputs."""
    has_settings = any(flow.settings for flow in e.flows)
    return [
        *([experiments.SETTINGS] if has_settings else []),
        experiments.PERTURB,
        experiments.DOUBLE,
        experiments.SEEDS,
        experiments.SAME_DRAWS,
        experiments.MEMORY,
        experiments.ONE_EACH,
    ]


def _where_parts_deviate(e: Evidence, topology: str) -> list[str]:
    """Return the experiments that may undo what deviates, by the stages in which it does."""
    _, ranks = parse_topology(topology)
    wanted = [experiments.ONE_EACH] if e.not_reduced else []
    stages = {d.stage for d in e.deviations}
    if stages == {REDUCTION}:
        return wanted
    notes = " ".join(f"{d.note} {d.relation}" for d in e.deviations)
    if any(flow.draws for flow in e.flows):
        wanted += [experiments.SEEDS, experiments.SAME_DRAWS]
    if any(flow.moved for flow in e.flows):
        wanted.append(experiments.MEMORY)
    if any(flow.settings for flow in e.flows):
        wanted.append(experiments.SETTINGS)
    if any(word in notes for word in ("autocast", "parameters", "rounded to")):
        wanted.append(experiments.PRECISE)
    if ranks > 1:
        wanted.append(experiments.ALONE)
    if BACKWARD in stages and not stages & {FORWARD, LOSS}:
        wanted.append(experiments.HOOKS)
    if "mode instead" in notes:
        wanted.append(experiments.MODES)
    return [*wanted, *_of_axes(topology)]


def _of_axes(topology: str) -> list[str]:
    """Return the experiments that undo what an axis does to the forward pass."""
    values, _ = parse_topology(topology)
    if values.get("pipeline_size"):
        return [experiments.CHAIN]
    return [experiments.COMPLETE] if values.get("context_size") else []


Rule = Callable[[Evidence], Cause | None]


def cause_of(evidence: Evidence) -> Cause:
    """Return the cause by the first rule that applies.

    Direct evidence comes before experiments, narrow rules before wide ones.
    """
    for rule in (*DIRECT, *RULES):
        cause = rule(evidence)
        if cause is not None:
            return cause
    text = f"{first_seen(evidence)}{located(evidence)}; no experiment makes the difference go away"
    for name, why in evidence.left_out.items():
        text += f"; {name}: not possible ({why})"
    return Cause(UNKNOWN, text, list(evidence.tried))


def _record_only(e: Evidence) -> Cause | None:
    if e.main.has("gradient", "value"):
        return None
    for aspect, kind in (("loss", "loss"), ("norm", "clip norm")):
        if e.main.has(aspect):
            return Cause(
                kind,
                f"the {aspect} is another one, gradients and updated values are not",
                [f"the {aspect}"],
            )
    return None


def _rounds(e: Evidence) -> Cause | None:
    """Return rounding as the cause if all parts agree and the reference rounds as much.

    Its rounding is measured against float64, or by changing the last bits of parameters.
    """
    if e.all_deviations or (e.main.has("samples", "start", "loss") and not e.main.has("gradient")):
        return None
    for name, text in (
        (
            experiments.DOUBLE,
            "about as near to a float64 reference ({:.1e}) as one process in float32",
        ),
        (
            experiments.PERTURB,
            "about as far ({:.1e}) as the last bits of parameters move the reference",
        ),
    ):
        result = e.tried.get(name)
        if e.main.has("gradient") and result is not None and not result.has("gradient"):
            return Cause(ROUNDING, text.format(result.rounding), [name], False)
    return None


def _chaos(e: Evidence) -> Cause | None:
    """Judge a network part by part if last bits move its gradient farther than a bound can be."""
    why = e.left_out.get(experiments.PERTURB, "")
    if not why.startswith(TOO_FAR) or e.all_deviations:
        return None
    unjudged = [name for flow in e.flows for name in flow.unjudged]
    if not e.flows or unjudged:
        parts = f" ({listed(sorted(set(unjudged)))})" if unjudged else ""
        text = (
            f"{why}: a difference of that size can't be told from rounding, part by part"
            f" neither{parts}"
        )
        return Cause("cannot judge", text, [experiments.PERTURB], is_judged=False)
    number = sum(flow.parts for flow in e.flows)
    text = (
        f"{why}; but each module, gradient and sum agrees when it is given the same inputs"
        f" ({number} compared)"
    )
    return Cause(ROUNDING, text, [experiments.PERTURB, experiments.FORCED], False)


# ---- what undoing it shows ----


def _not_synchronized(e: Evidence) -> Cause | None:
    """Return a cause if replicas step with gradients of their own."""
    # Where the norm differs, clipping makes all gradients differ; part by part, nothing is clipped.
    forced = e.tried.get(experiments.FORCED, e.main)
    own = e.not_reduced
    unsynchronized = forced.unsynchronized
    if not own or not unsynchronized:
        return None
    first = next(d for d in e.deviations if d.stage == REDUCTION and d.module in own)
    how = f" ({first.module} {first.relation} on rank {first.rank})"
    compared = "gradients compared between ranks"
    everything = len(unsynchronized) == len(forced.fingerprints)
    if everything and e.agrees(experiments.ONE_EACH):
        text = (
            "gradients of some micro-batches are not reduced: the reducing backward pass is not the"
            " last of the step"
        )
        return Cause("synchronisation", text + how, [compared, experiments.ONE_EACH])
    if not set(unsynchronized) <= own:
        return None
    if everything:
        return Cause(
            "synchronisation", f"no gradient is reduced over the replicas{how}", [compared]
        )
    text = (
        f"replicas keep their own gradients of {listed(unsynchronized)}: they are not reduced{how}"
    )
    return Cause("unsynchronised parameter", text, [compared])


def _when(name: str, kind: str, text: str) -> Rule:
    def rule(e: Evidence) -> Cause | None:
        return Cause(kind, text + located(e), [name]) if e.agrees(name) else None

    return rule


def _recomputation(e: Evidence) -> Cause | None:
    if not e.agrees(experiments.RECOMPUTATION):
        return None
    if e.agrees(experiments.SAME_DRAWS):
        text = (
            "activation checkpointing draws other numbers when it recomputes than in the forward"
            " pass"
        )
        by = [experiments.RECOMPUTATION, experiments.SAME_DRAWS]
        return Cause("random numbers in recomputation", text, by)
    return Cause(
        "recomputation",
        "activation checkpointing recomputes something else",
        [experiments.RECOMPUTATION],
    )


def _settings(e: Evidence) -> Cause | None:
    if not e.agrees(experiments.SETTINGS):
        return None
    ranks = [rank for rank, flow in enumerate(e.flows) if flow.settings]
    names = list(dict.fromkeys(name for flow in e.flows for name in flow.settings))
    return Cause(
        "module settings",
        f"on {name_ranks(ranks)}, {listed(names)}{located(e)}",
        [experiments.SETTINGS],
    )


def _memory(e: Evidence) -> Cause | None:
    moved = list(dict.fromkeys(name for flow in e.flows for name in flow.moved))
    if not e.agrees(
        experiments.MEMORY, left_out=[name.removeprefix("the buffer ") for name in moved]
    ):
        return None
    which = "which" if len(moved) == 1 else "at least one of which"
    text = (
        f"a forward pass changes {listed(moved)}, {which} a later micro-batch reads: each rank sees"
        " its own ones only"
    )
    return Cause("memory", text + located(e), [experiments.MEMORY])


def _random(e: Evidence) -> Cause | None:
    odd = sorted(rank for rank, seed in e.main.seeds.items() if seed != e.config.training.seed)
    if e.agrees(experiments.SEEDS):
        has = "has" if len(odd) == 1 else "have"
        text = f"{name_ranks(odd)} {has} another seed" if odd else "keys of random numbers"
        text += f": dropout or noise is not the reference's{located(e)}"
        return Cause("random numbers", text, [experiments.SEEDS])
    if e.agrees(experiments.SAME_DRAWS):
        text = "ranks draw numbers that do not depend on (seed, step, micro-batch, block) alone"
        return Cause("random numbers", text + located(e), [experiments.SAME_DRAWS])
    return None


def _other_ranks(e: Evidence) -> Cause | None:
    if not e.agrees(experiments.ALONE):
        return None
    calls = list(dict.fromkeys(name for flow in e.flows for name in flow.collectives))
    called = f" (it calls {', '.join(calls)})" if calls else ""
    text = (
        f"the forward pass or the loss depends on the rank, or on what other ranks compute{called}"
    )
    return Cause("other ranks", text + located(e), [experiments.ALONE])


def _positions(e: Evidence) -> Cause | None:
    """Return a cause if the step agrees where each rank computes entire sequences."""
    if not e.agrees(experiments.COMPLETE):
        return None
    where = e.tried[experiments.COMPLETE].module
    if not where:
        text = (
            "the step agrees where each rank computes whole sequences: what differs is between the"
            " parts of a sequence"
        )
        return Cause("context", text, [experiments.COMPLETE])
    if e.tried[experiments.COMPLETE].numbers:
        text = (
            f"{where} gives the positions of a rank's part of a sequence other numbers than those"
            " of the whole have"
        )
        return Cause("positions", text, [experiments.COMPLETE])
    text = (
        f"{where} lets positions of a sequence meet outside of an Attend: each rank sees its own"
        " part of them only"
    )
    return Cause("context", text, [experiments.COMPLETE])


def _clip(e: Evidence) -> Cause | None:
    if e.deviations or not e.agrees(experiments.CLIP):
        return None
    norms = [d for d in e.main.differences if d.aspect == "norm"]
    how = (
        f"by another norm: {norms[0].name} on {name_ranks(norms[0].ranks)}"
        if norms
        else "from the same norm"
    )
    ranks = sorted({rank for d in e.main.differences if d.aspect == "gradient" for rank in d.ranks})
    where = f"; clipped, they differ on {name_ranks(ranks)}" if ranks else ""
    return Cause(
        "clip norm", f"gradients are right until they are clipped, {how}{where}", [experiments.CLIP]
    )


def _low_precision(e: Evidence) -> Cause | None:
    """Return a cause, or rounding, if the step agrees in float32 or without compilation."""
    if e.deviations:
        return None
    if e.agrees(experiments.FLOAT32):
        if e.main.distance("gradient") <= LOW_ROUNDING:
            text = "low precision rounds differently here; in float32 the steps agree"
            return Cause(ROUNDING, text, [experiments.FLOAT32], False)
        text = "more than rounding goes wrong in low precision, and not in float32"
        return Cause("low precision", text, [experiments.FLOAT32])
    if e.agrees(experiments.COMPILE):
        return Cause(
            "compilation",
            "compiled code computes something else than on one rank",
            [experiments.COMPILE],
        )
    return None


def _normalisation(e: Evidence) -> Cause | None:
    """Return a cause if losses differ by their weight alone.

    The weight is the number of targets that a micro-batch counts.
    """
    # gradients of another weight follow from it
    losses = [d for d in e.deviations if d.stage == LOSS]
    earlier = any(d.stage == FORWARD for d in e.deviations)
    if not losses or earlier or not all(d.relation.kind == OTHER_COUNT for d in losses):
        return None
    first = losses[0]
    text = (
        f"micro-batches do not weigh by their valid targets: micro-batch {first.micro_batch}"
        f" {first.relation}"
    )
    return Cause(
        "loss normalisation", text + f" on {name_ranks(ranks_of(losses))}", [experiments.FORCED]
    )


def _place(e: Evidence) -> Cause | None:
    """Return the first part in which the step differs as the cause.

    With the reference's value there, everything else agrees.
    """
    deviations = e.deviations
    if not deviations:
        return None
    first = deviations[0]
    if first.stage == REDUCTION and first.relation.kind == WRONG_REFERENCE:
        text = (
            f"the gradient of {first.module} is not the sum over a step's micro-batches:"
            f" {first.relation}"
        )
        return Cause("accumulation", text, [experiments.FORCED])
    return Cause(first.stage, located(e).removeprefix(f"; {first.stage}: "), [experiments.FORCED])


def _by_themselves(e: Evidence) -> Cause | None:
    """Name the gradients that differ if they are few.

    Then neither the loss nor what flows back through layers differs.
    """
    without_clipping = e.tried.get(experiments.CLIP, e.main)
    wrong = [d for d in without_clipping.differences if d.aspect == "gradient"]
    few = 0 < 2 * len(wrong) <= len(without_clipping.fingerprints)
    if e.flows or not few or without_clipping.has("start", "samples", "loss"):
        return None
    # The first are those of which it is known how they relate to the reference's.
    first, *others = sorted(wrong, key=lambda d: d.relation is None or d.relation.kind == UNRELATED)
    text = (
        f"the gradient of {first.name}"
        f" {first.relation or f'is another one on {name_ranks(first.ranks)}'}"
    )
    also = f"; also {listed([d.name for d in others])}" if others else ""
    return Cause(
        "gradient",
        f"{text}, and those of most other parameters agree{also}",
        ["gradients of each rank"],
    )


DIRECT: Sequence[Rule] = (
    direct_causes.data,
    direct_causes.tied,
    direct_causes.start,
    direct_causes.nondeterminism,
    direct_causes.left_over,
    direct_causes.frozen,
    direct_causes.without_update,
)
RULES: Sequence[Rule] = (
    direct_causes.options,
    direct_causes.state,
    direct_causes.optimizer_hook,
    direct_causes.before,
    direct_causes.after,
    direct_causes.update,
    _rounds,
    _normalisation,
    _when(
        experiments.COMPRESSION,
        "compression",
        "what is sent in place of gradients does not add up to them",
    ),
    _record_only,
    _not_synchronized,
    _recomputation,
    _when(experiments.MODES, "training mode", "modules are not in training mode on a rank"),
    _when(
        experiments.PRECISE,
        "low precision",
        "a rank computes in 16 bits what the reference does in 32",
    ),
    _when(experiments.CHAIN, "segments", "segments() computes something else than forward()"),
    _settings,
    _memory,
    direct_causes.buffers,
    _positions,
    _random,
    _other_ranks,
    _when(experiments.HOOKS, "gradient hook", "a hook changes gradients in the backward pass"),
    _clip,
    _low_precision,
    _place,
    _by_themselves,
    _chaos,
    _when(
        experiments.ONE_EACH,
        "accumulation",
        "accumulating over micro-batches gives another sum than one micro-batch a rank",
    ),
)
