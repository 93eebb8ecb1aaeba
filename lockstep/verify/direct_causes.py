"""Names causes that are seen in a step itself, or beside its gradients.

Other samples, other first values, results that vary, buffers; options and state of the optimizer,
hooks around it, what is frozen or left. The latter are read off both sides, and, where they can be,
undone on both: the values agree then.

Tests: tests/verify/test_updates.py
"""

from collections.abc import Callable

from lockstep.errors import listed
from lockstep.verify import experiments
from lockstep.verify.comparison_result import UNKNOWN, Cause
from lockstep.verify.differences import Evidence, first_seen, located, name_ranks
from lockstep.verify.trace import UpdateFacts


def data(e: Evidence) -> Cause | None:
    """Return a cause if ranks train on other samples; with the reference's, the step agrees."""
    seen = [d.name for d in e.main.differences if d.aspect == "samples"]
    return (
        _undone(e, experiments.SAMPLES, "data order", f"ranks train on other data: {seen[0]}")
        if seen
        else None
    )


def start(e: Evidence) -> Cause | None:
    """Return a cause if ranks start from other values; with the reference's, the step agrees."""
    first = [d for d in e.main.differences if d.aspect == "start"]
    if not first:
        return None
    text = (
        f"{name_ranks(first[0].ranks)} started from other values of"
        f" {listed([d.name for d in first])}"
    )
    return _undone(e, experiments.START, "first values", text)


def _undone(e: Evidence, name: str, kind: str, text: str) -> Cause | None:
    """Return the cause if its experiment undoes it, or if nothing follows from it.

    None before it is tried.
    """
    if e.agrees(name) or not e.main.has("gradient", "value", "loss"):
        return Cause(kind, text, [name])
    if name in e.left_out:
        return Cause(UNKNOWN, f"{text}; {name}: not possible ({e.left_out[name]})")
    return (
        Cause(UNKNOWN, f"{text}; {name} the step differs still{located(e)}", [name])
        if name in e.tried
        else None
    )


def nondeterminism(e: Evidence) -> Cause | None:
    """Return a cause if a step that is taken twice differs from itself.

    Samples are compared before operations: other samples make every operation return others.
    """
    kind = "non-deterministic operation"
    once = e.facts(experiments.AGAIN)
    twice = e.facts(experiments.AGAIN_TOO)
    if once is not None and twice is not None and once.samples != twice.samples:
        text = (
            "the samples are others each time that one process reads them: they depend on the"
            " clock, the process or random numbers without a seed"
        )
        return Cause("samples that vary", text, ["the samples of the same step, read twice"])
    if once is not None and twice is not None and once.outputs != twice.outputs:
        pairs = zip(once.outputs, twice.outputs, strict=False)
        module = next((a[0] for a, b in pairs if a != b), "the model")
        text = (
            f"{module or 'the model'} returns something else each time: an operation that is not"
            " deterministic, or random numbers from outside torch's generator"
        )
        return Cause(kind, text, ["the same step twice in one process"])
    first = e.tried.get(experiments.AGAIN)
    second = e.tried.get(experiments.AGAIN_TOO)
    if first is None or second is None:
        return None
    by = ["the same step twice on the same ranks"]
    for rank, (output, other) in enumerate(zip(first.outputs, second.outputs, strict=False)):
        differs = [a[0] or "the model" for a, b in zip(output, other, strict=False) if a != b]
        if differs:
            text = (
                f"on rank {rank} {differs[0]} returns something else each time, not so in one"
                " process"
            )
            return Cause(kind, text, by)
    if first.fingerprints != second.fingerprints:
        name = next(
            n for n in first.fingerprints if first.fingerprints[n] != second.fingerprints.get(n)
        )
        text = (
            f"the gradient of {name} is another one each time that these ranks take the step, not"
            " so in one process"
        )
        return Cause(kind, text, by)
    return None


def buffers(e: Evidence) -> Cause | None:
    """Return a cause if nothing but buffers differs."""
    names = [d.name for d in e.main.differences if d.aspect == "buffer"]
    if not names or e.main.has("gradient", "value", "loss"):
        return None
    return Cause(
        "buffer", f"the buffer {names[0]} drifts; its gradients do not", ["values of buffers"]
    )


def update_experiments(e: Evidence) -> list[str]:
    """Return the experiments that may undo what is seen to differ around the update."""
    updates = [*e.main.updates, e.main.right_update]
    wanted = (
        [experiments.OPTIONS] if e.main.has("optimizer") and e.main.has("gradient", "value") else []
    )
    if e.main.has("gradient") and any(update.by_hooks for update in updates):
        wanted.append(experiments.OPTIMIZER_HOOKS)
    if e.main.has("value"):
        wanted += [experiments.STATE] if _differ(e, lambda update: update.state_changed) else []
        wanted += [experiments.BEFORE] if _differ(e, lambda update: update.before) else []
        wanted += [experiments.AFTER] if any(update.after for update in updates) else []
    return wanted


def _differ(e: Evidence, what: Callable[[UpdateFacts], list[str]]) -> list[str]:
    """Return the names that are in the list of a rank or of the reference, but not in both.

    Names that a rank does not hold are left out.
    """
    right = e.main.right_update
    names: dict[str, None] = {}
    for update in e.main.updates:
        options = update.options if update.options else right.options
        names |= dict.fromkeys(
            name for name in set(what(update)) ^ set(what(right)) if name in options
        )
    return sorted(names)


def _ranks_where(e: Evidence, holds: Callable[[UpdateFacts], object]) -> list[int]:
    return [rank for rank, update in enumerate(e.main.updates) if holds(update)]


# ---- what is seen directly ----


def left_over(e: Evidence) -> Cause | None:
    """Return a cause if the step agrees in a new process that starts from the same state."""
    if not e.main.step or not e.agrees(experiments.AGAIN):
        return None
    stale = _differ(e, lambda update: update.stale)
    if stale:
        ranks = _ranks_where(e, lambda update: update.stale)
        text = (
            f"{name_ranks(ranks)} adds to the gradients of the step before: nothing sets"
            f" {listed(stale)} to zero"
        )
        return Cause(
            "gradients not zeroed", text, ["gradients at the start of the step", experiments.AGAIN]
        )
    text = (
        "the step agrees where a new process takes it from the same state: an earlier step of the"
        f" same process leaves something behind that no checkpoint holds; {first_seen(e)}"
    )
    return Cause("earlier steps", text, [experiments.AGAIN])


def tied(e: Evidence) -> Cause | None:
    """Return a cause if parameters are one on one side and two on the other."""
    shared = e.main.right_update.tied
    missing = [
        d for d in e.main.differences if d.aspect == "start" and d.missing and d.name in shared
    ]
    if not missing:
        return None
    names = ", ".join(
        f"{d.name}, which the reference shares with {shared[d.name]}" for d in missing
    )
    text = f"{name_ranks(missing[0].ranks)} trains apart {names}"
    return Cause("tied weights", text, ["names of parameters"])


def frozen(e: Evidence) -> Cause | None:
    """Return a cause if all missing gradients are of parameters that one side has frozen."""
    names = _differ(e, lambda update: update.frozen)
    missing = {d.name for d in e.main.differences if d.aspect == "gradient" and d.missing}
    # where a gradient is missing, another norm clips the others
    seen = e.tried.get(experiments.FORCED, e.main)
    others = e.deviations or any(d.aspect == "gradient" and not d.missing for d in seen.differences)
    if not missing or not missing <= set(names) or others:
        return None
    ranks = _ranks_where(e, lambda update: set(update.frozen) & set(names))
    who = (
        f"on {name_ranks(ranks)}, and are trained in the reference"
        if ranks
        else "in the reference, not on ranks"
    )
    return Cause(
        "frozen parameter",
        f"{listed(names)} require no gradient {who}",
        ["requires_grad", "gradients"],
    )


def without_update(e: Evidence) -> Cause | None:
    """Return a cause if a rank leaves out the update that the reference makes."""
    ranks = _ranks_where(e, lambda update: not update.called)
    if (
        not ranks
        or not e.main.right_update.called
        or not e.main.has("value")
        or e.main.has("gradient")
    ):
        return None
    names = {d.name for d in e.main.differences if d.aspect == "value"}
    if not all(names <= set(e.main.updates[rank].unmoved) for rank in ranks):
        text = (
            f"the optimizer's step is replaced on {name_ranks(ranks)}: it is not called, and makes"
            " other values"
        )
        return Cause(
            "optimizer", f"{text} of {listed(sorted(names))}", ["calls of the optimizer", "values"]
        )
    text = (
        f"the update is skipped on {name_ranks(ranks)}: the optimizer's step is not called, and the"
        " values stay"
    )
    return Cause("optimizer", text, ["calls of the optimizer", "gradients and values"])


def update(e: Evidence) -> Cause | None:
    """Return a cause if values differ, and gradients and all that can be undone do not."""
    if e.main.has("gradient", "samples", "start") or not e.main.has("value"):
        return None
    wrong = [d for d in e.main.differences if d.aspect == "value"]
    names = [d.name for d in wrong]
    ranks = sorted({rank for d in wrong for rank in d.ranks})
    changed = {*_differ(e, lambda update: update.before), *_differ(e, lambda update: update.after)}
    if changed & set(names):  # by something else than the optimizer, and undoing that is not enough
        return None
    text = "the optimizer gets the same gradients and produces other values"
    where = f" of {listed(names)} on {name_ranks(ranks)}"
    updates = [e.main.updates[rank] for rank in wrong[0].ranks]
    right = e.main.right_update
    if all(
        name in update.unmoved and name not in right.unmoved for name in names for update in updates
    ):
        lacks = all(
            not update.options.get(name) and right.options.get(name)
            for name in names
            for update in updates
        )
        where += (
            ", which the optimizer does not hold"
            if lacks
            else ", which keep the values of before the step"
        )
    return Cause("optimizer", text + where, ["gradients and values"])


# ---- what undoing it shows ----


def options(e: Evidence) -> Cause | None:
    """Return a cause if options of the optimizer differ; with the reference's, the values agree."""
    seen = [d for d in e.main.differences if d.aspect == "optimizer"]
    if not seen or (e.main.has("gradient", "value") and not e.agrees(experiments.OPTIONS)):
        return None
    text = "; ".join(f"the optimizer of {name_ranks(d.ranks)} has {d.name}" for d in seen)
    by = (
        experiments.OPTIONS
        if e.agrees(experiments.OPTIONS)
        else "options of the optimizer on both sides"
    )
    return Cause("optimizer", text, [by])


def state(e: Evidence) -> Cause | None:
    """Return a cause if the optimizer's state is changed before the update.

    With the state of the step's start, values agree.
    """
    names = _differ(e, lambda update: update.state_changed)
    if not names or not e.agrees(experiments.STATE):
        return None
    ranks = _ranks_where(e, lambda update: set(update.state_changed) & set(names))
    text = (
        "the optimizer's state is lost or changed between a step's start and its update on"
        f" {name_ranks(ranks)}"
    )
    return Cause("optimizer", f"{text}: of {listed(names)}", [experiments.STATE])


def optimizer_hook(e: Evidence) -> Cause | None:
    """Return a cause if hooks of the optimizer change gradients; without them, all agrees."""
    if not e.agrees(experiments.OPTIMIZER_HOOKS):
        return None
    ranks = _ranks_where(e, lambda update: update.by_hooks)
    also = "" if e.main.right_update.by_hooks else ", and not in the reference"
    text = (
        f"a hook of the optimizer changes gradients before its update on {name_ranks(ranks)}{also}"
    )
    return Cause("optimizer hook", text + located(e), [experiments.OPTIMIZER_HOOKS])


def before(e: Evidence) -> Cause | None:
    """Return a cause if something changes values before the optimizer does.

    With the values of the step's start, everything agrees.
    """
    return _beside(e, experiments.BEFORE, "before", lambda update: update.before)


def after(e: Evidence) -> Cause | None:
    """Return a cause if something else than the optimizer changes values.

    Without it, they agree.
    """
    return _beside(e, experiments.AFTER, "after", lambda update: update.after)


def _beside(
    e: Evidence, name: str, side: str, what: Callable[[UpdateFacts], list[str]]
) -> Cause | None:
    """Return a cause if values change beside the update, and agree where that is undone."""
    if not e.agrees(name):
        return None
    when = f"{side} the optimizer's update"
    names = _differ(e, what) or [d.name for d in e.main.differences if d.aspect == "value"]
    changes = _ranks_where(e, lambda update: set(what(update)) & set(names))
    others = [rank for rank in range(len(e.main.updates)) if rank not in changes]
    in_reference = bool(set(what(e.main.right_update)) & set(names))
    if in_reference and others:
        text = (
            f"the values of {listed(names)} change {when} in the reference, not on"
            f" {name_ranks(others)}"
        )
    elif not in_reference:
        text = (
            f"the values of {listed(names)} change {when} on {name_ranks(changes)}, not in the"
            " reference"
        )
    else:
        text = f"what changes the values of {listed(names)} {when} changes them otherwise on ranks"
    return Cause(f"{side} the update", text, [name])
