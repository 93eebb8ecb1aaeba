"""Names the cause of a difference, from what flowed through the step and from experiments that undo one thing each.

The first step in which a topology differs is taken again by it and the reference, from the reference's state before
it. First part by part (`lockstep.verify.flow`), which says where it differs; then with one thing changed on both sides.
A cause is named if its undoing makes the difference vanish, else the text says what is known.
"""

from collections.abc import Callable, Sequence

from lockstep.errors import listed
from lockstep.strategy import parse_topology
from lockstep.verify.differences import TOO_FAR
from lockstep.verify.evidence import Cause, Evidence, located, name_ranks, ranks_of
from lockstep.verify.experiments import (
    AGAIN,
    AGAIN_TOO,
    ALONE,
    CHAIN,
    CLIP,
    COMPILE,
    COMPRESSION,
    DOUBLE,
    DRAWS,
    FLOAT32,
    FORCED,
    HOOKS,
    MEMORY,
    MODES,
    ONE_EACH,
    PERTURB,
    PRECISE,
    RECOMPUTATION,
    SEEDS,
    WHOLE,
    switched_off,
)
from lockstep.verify.recorded_flow import BACKWARD, FORWARD, LOSS, REDUCTION, Deviation

LOW_ROUNDING = 8 * 2.0**-8  # largest relative rounding of a gradient by bfloat16 when the same terms are summed
UNKNOWN = "cause not known"


def is_clear(e: Evidence) -> bool:
    """Return whether a cause can be named without further experiments."""
    only_reduced = e.deviations and all(d.stage == REDUCTION for d in e.deviations)
    return any(rule(e) is not None for rule in DIRECT) or bool(only_reduced and not e.all_reduce_missing)


def wanted_experiments(e: Evidence, topology: str) -> list[str]:
    """Return the experiments that may undo the difference, from what was seen."""
    values, ranks = parse_topology(topology)
    found = e.deviations
    if e.flows and not found:
        return [PERTURB, DOUBLE, SEEDS, DRAWS, MEMORY, ONE_EACH, *switched_off(e.config)]
    wanted = [ONE_EACH] if found and e.all_reduce_missing else []
    if e.flows and all(d.stage == REDUCTION for d in found):
        return wanted
    stages, notes = {d.stage for d in found}, " ".join(f"{d.note} {d.relation}" for d in found)
    if any(flow.draws for flow in e.flows) or not e.flows:
        wanted += [SEEDS, DRAWS]
    if any(flow.moved for flow in e.flows) or not e.flows:
        wanted.append(MEMORY)
    if "autocast" in notes or "parameters" in notes or "rounded to" in notes or not e.flows:
        wanted.append(PRECISE)
    wanted += [ALONE] if ranks > 1 else []
    wanted += [HOOKS] if BACKWARD in stages and not stages & {FORWARD, LOSS} else []
    wanted += [MODES] if "mode instead" in notes else []
    wanted += [CHAIN] if values.get("pipeline_size") else [WHOLE] if values.get("context_size") else []
    return wanted if e.flows else [*wanted, PERTURB, DOUBLE, *switched_off(e.config)]


Rule = Callable[[Evidence], Cause | None]


def cause_of(evidence: Evidence) -> Cause:
    """Return the cause by the first rule that applies: direct evidence before experiments, narrow before wide ones."""
    for rule in (*DIRECT, *RULES):
        cause = rule(evidence)
        if cause is not None:
            return cause
    text = "none of the experiments makes the difference go away"
    for name, why in evidence.left_out.items():
        text += f"; {name}: not possible ({why})"
    return Cause(UNKNOWN, text, list(evidence.tried))


# ---- what is seen directly ----


def _data(e: Evidence) -> Cause | None:
    seen = [d for d in e.found.differences if d.aspect == "samples"]
    if not seen:
        return None
    return Cause("data order", f"ranks train on other data: {seen[0].name}", ["hashes of each micro-batch"])


def _start(e: Evidence) -> Cause | None:
    first = [d for d in e.found.differences if d.aspect == "start"]
    if not first:
        return None
    names = ", ".join(d.name for d in first[:3]) + (" …" if len(first) > 3 else "")
    return Cause(
        "first values", f"{name_ranks(first[0].ranks)} started from other values of {names}", ["values before step 1"]
    )


def _nondeterminism(e: Evidence) -> Cause | None:
    once, twice = e.facts(AGAIN), e.facts(AGAIN_TOO)
    if once is not None and twice is not None and once.outputs != twice.outputs:
        pairs = zip(once.outputs, twice.outputs, strict=False)
        module = next((a[0] for a, b in pairs if a != b), "the model")
        text = f"{module or 'the model'} returns something else each time: an operation that is not deterministic, or "
        return Cause(
            "non-deterministic operation", text + "random numbers from outside torch's generator",
            ["the same step twice in one process"],
        )  # fmt: skip
    first, second = e.tried.get(AGAIN), e.tried.get(AGAIN_TOO)
    if first is None or second is None:
        return None
    for rank, (one, other) in enumerate(zip(first.outputs, second.outputs, strict=False)):
        differs = [a[0] or "the model" for a, b in zip(one, other, strict=False) if a != b]
        if differs:
            return Cause(
                "non-deterministic operation",
                f"on rank {rank} {differs[0]} returns something else each time, not so in one process",
                ["the same step twice on the same ranks"],
            )
    if first.fingerprints != second.fingerprints:
        name = next(n for n in first.fingerprints if first.fingerprints[n] != second.fingerprints.get(n))
        return Cause(
            "non-deterministic operation",
            f"the gradient of {name} is another one each time that these ranks take the step, not so in one process",
            ["the same step twice on the same ranks"],
        )
    return None


def _buffers(e: Evidence) -> Cause | None:
    names = [d.name for d in e.found.differences if d.aspect == "buffer"]
    if not names or e.found.has("gradient", "value", "loss"):
        return None
    return Cause("buffer", f"the buffer {names[0]} drifts; its gradients do not", ["values of buffers"])


def _record_only(e: Evidence) -> Cause | None:
    """Return a cause if gradients and values agree, but a number of the record does not."""
    if e.found.has("gradient", "value"):
        return None
    for aspect, kind in (("loss", "loss"), ("norm", "clip norm")):
        if e.found.has(aspect):
            return Cause(kind, f"the {aspect} is another one, gradients and updated values are not", [f"the {aspect}"])
    return None


def _update(e: Evidence) -> Cause | None:
    if e.found.has("gradient", "samples", "start") or not e.found.has("value"):
        return None
    wrong = [d for d in e.found.differences if d.aspect == "value"]
    text = "the optimizer gets the same gradients, and makes other values of them"
    where = f": on {name_ranks(wrong[0].ranks)}, {listed([d.name for d in wrong])}"
    return Cause("optimizer", text + where, ["gradients and values"])


def _rounds(e: Evidence) -> Cause | None:
    """Return rounding if each part computes the same from the same inputs, and the reference rounds as much.

    What the reference rounds is measured against float64, or by changed last bits.
    """
    if e.deviations or (e.found.has("samples", "start", "loss") and not e.found.has("gradient")):
        return None
    texts = {
        DOUBLE: "about as near to a float64 reference ({:.1e}) as one process in float32",
        PERTURB: "about as far ({:.1e}) as the last bits of parameters move the reference",
    }
    for name, text in texts.items():
        result = e.tried.get(name)
        if e.found.has("gradient") and result is not None and not result.has("gradient"):
            return Cause("rounding", text.format(result.rounding), [name], False)
    return None


def _chaos(e: Evidence) -> Cause | None:
    """Judge part by part a network in which last bits move the gradient by more than a bound can be."""
    why = e.left_out.get(PERTURB, "")
    if not why.startswith(TOO_FAR) or e.deviations:
        return None
    unjudged = [name for flow in e.flows for name in flow.unjudged]
    if not e.flows or unjudged:
        parts = f" ({listed(sorted(set(unjudged)))})" if unjudged else ""
        text = f"{why}: a difference of that size can't be told from rounding, part by part neither{parts}"
        return Cause("cannot judge", text, [PERTURB], is_judged=False)
    number = sum(flow.parts for flow in e.flows)
    text = f"{why}; but each module, gradient and sum agrees when it is given the same inputs ({number} compared)"
    return Cause("rounding", text, [PERTURB, FORCED], False)


# ---- what undoing it shows ----


def _not_synchronized(e: Evidence) -> Cause | None:
    # Where the norm differs, clipping makes all gradients differ; part by part, nothing is clipped.
    seen = e.tried.get(FORCED, e.tried.get(CLIP, e.found))
    unsynchronized = seen.unsynchronized
    earlier = [d for d in e.deviations if d.stage != REDUCTION]
    if not unsynchronized or (earlier and not e.all_reduce_missing):
        return None
    everything = len(unsynchronized) == len(seen.fingerprints)
    how = _relations([d for d in e.deviations if d.stage == REDUCTION])
    if not everything and e.all_reduce_missing:
        return Cause(
            "unsynchronised parameter",
            f"replicas keep their own gradients of {listed(unsynchronized)}: they are not reduced{how}",
            ["gradients compared between ranks"],
        )
    if not everything:
        return None
    if e.agrees(ONE_EACH):
        return Cause(
            "synchronisation",
            "gradients of some micro-batches are not reduced: the reducing backward pass is not the last of the step"
            + how,
            ["gradients compared between ranks", ONE_EACH],
        )
    if not e.all_reduce_missing:
        return None
    text = f"no gradient is reduced over the replicas{how}"
    return Cause("synchronisation", text, ["gradients compared between ranks"])


def _when(name: str, kind: str, text: str) -> Rule:
    def rule(e: Evidence) -> Cause | None:
        return Cause(kind, text + located(e), [name]) if e.agrees(name) else None

    return rule


def _recomputation(e: Evidence) -> Cause | None:
    if not e.agrees(RECOMPUTATION):
        return None
    if e.agrees(DRAWS):
        return Cause(
            "random numbers in recomputation",
            "activation checkpointing draws other numbers when it recomputes than in the forward pass",
            [RECOMPUTATION, DRAWS],
        )
    return Cause("recomputation", "activation checkpointing recomputes something else", [RECOMPUTATION])


def _memory(e: Evidence) -> Cause | None:
    if not e.agrees(MEMORY):
        return None
    moved = list(dict.fromkeys(name for flow in e.flows for name in flow.moved))
    text = f"a forward pass changes {listed(moved)}, which a later micro-batch reads: each rank sees its own ones only"
    return Cause("memory", text + located(e), [MEMORY])


def _random(e: Evidence) -> Cause | None:
    seeds = e.found.seeds
    odd = sorted(rank for rank, seed in seeds.items() if seed != e.config.training.seed)
    if e.agrees(SEEDS):
        who = (
            f"{name_ranks(odd)} {'has' if len(odd) == 1 else 'have'} another seed" if odd else "keys of random numbers"
        )
        return Cause("random numbers", f"{who}: dropout or noise is not the reference's{located(e)}", [SEEDS])
    if e.agrees(DRAWS):
        text = "ranks draw numbers that do not depend on (seed, step, micro-batch, block) alone"
        return Cause("random numbers", text + located(e), [DRAWS])
    return None


def _other_ranks(e: Evidence) -> Cause | None:
    if not e.agrees(ALONE):
        return None
    calls = list(dict.fromkeys(name for flow in e.flows for name in flow.collectives))
    called = f" (it calls {', '.join(calls)})" if calls else ""
    text = f"the forward pass or the loss depends on the rank, or on what other ranks compute{called}"
    return Cause("other ranks", text + located(e), [ALONE])


def _positions(e: Evidence) -> Cause | None:
    if not e.agrees(WHOLE):
        return None
    where = e.tried[WHOLE].module or "the model"
    text = f"{where} lets positions of a sequence meet outside of an Attend: each rank sees its own part of them only"
    return Cause("context", text, [WHOLE])


def _clip(e: Evidence) -> Cause | None:
    if e.deviations or not e.agrees(CLIP):
        return None
    norms = [d.name for d in e.found.differences if d.aspect == "norm"]
    seen = f": {norms[0]}" if norms else ""
    return Cause("clip norm", f"gradients are right until they are clipped, by another norm{seen}", [CLIP])


def _low_precision(e: Evidence) -> Cause | None:
    if e.deviations:
        return None
    if e.agrees(FLOAT32):
        if e.found.distance("gradient") <= LOW_ROUNDING:
            text = "low precision rounds differently here; in float32 the steps agree"
            return Cause("rounding", text, [FLOAT32], False)
        return Cause("low precision", "more than rounding goes wrong in low precision, and not in float32", [FLOAT32])
    if e.agrees(COMPILE):
        return Cause("compilation", "compiled code computes something else than on one rank", [COMPILE])
    return None


def _normalisation(e: Evidence) -> Cause | None:
    """Return a cause if losses differ by their weight alone: the number of targets that a micro-batch counts."""
    losses = [d for d in e.deviations if d.stage == LOSS and "targets instead of" in d.relation]
    if not losses or any(d.stage == FORWARD for d in e.deviations):
        return None
    first = losses[0]
    text = f"micro-batches do not weigh by their valid targets: micro-batch {first.micro_batch} {first.relation}"
    return Cause("loss normalisation", text + f" on {name_ranks(ranks_of(losses))}", [FORCED])


def _place(e: Evidence) -> Cause | None:
    """Return where the step differs, part by part: with the reference's value there, everything else agrees."""
    found = e.deviations
    if not found:
        return None
    first = found[0]
    kinds = {FORWARD: "forward", LOSS: "loss", BACKWARD: "backward", REDUCTION: "reduction"}
    return Cause(kinds[first.stage], located(e).removeprefix(f"; {first.stage}: "), [FORCED])


def _relations(found: Sequence[Deviation]) -> str:
    """Return a clause on how deviations relate to the reference."""
    return f" ({found[0].module} {found[0].relation} on {name_ranks(ranks_of(found[:1]))})" if found else ""


DIRECT: Sequence[Rule] = (_data, _start, _nondeterminism, _buffers, _update)
RULES: Sequence[Rule] = (
    _rounds,
    _normalisation,
    _when(COMPRESSION, "compression", "what is sent in place of gradients does not add up to them"),
    _record_only,
    _not_synchronized,
    _recomputation,
    _when(MODES, "training mode", "modules are not in training mode on a rank"),
    _when(PRECISE, "low precision", "a rank computes in 16 bits what the reference does in 32"),
    _when(CHAIN, "segments", "segments() computes something else than forward()"),
    _memory,
    _positions,
    _random,
    _other_ranks,
    _when(HOOKS, "gradient hook", "a hook changes gradients in the backward pass"),
    _clip,
    _low_precision,
    _place,
    _chaos,
    _when(
        ONE_EACH, "accumulation", "accumulating over micro-batches gives another sum than one micro-batch a rank"
    ),
)  # fmt: skip
