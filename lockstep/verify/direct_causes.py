"""Names causes that are seen in a step itself: other samples, other first values, results that vary, buffers."""

from lockstep.errors import listed
from lockstep.verify.differences import name_ranks
from lockstep.verify.evidence import UNKNOWN, Cause, Evidence, located
from lockstep.verify.experiments import AGAIN, AGAIN_TOO, SAMPLES, START


def data(e: Evidence) -> Cause | None:
    """Return a cause if ranks train on other samples; with the reference's, the step agrees."""
    seen = [d.name for d in e.found.differences if d.aspect == "samples"]
    return _undone(e, SAMPLES, "data order", f"ranks train on other data: {seen[0]}") if seen else None


def start(e: Evidence) -> Cause | None:
    """Return a cause if ranks start from other values; with the reference's, the step agrees."""
    first = [d for d in e.found.differences if d.aspect == "start"]
    if not first:
        return None
    text = f"{name_ranks(first[0].ranks)} started from other values of {listed([d.name for d in first])}"
    return _undone(e, START, "first values", text)


def _undone(e: Evidence, name: str, kind: str, text: str) -> Cause | None:
    """Return the cause if its experiment undoes it, or if nothing follows from it; None before it is tried."""
    if e.agrees(name) or not e.found.has("gradient", "value", "loss"):
        return Cause(kind, text, [name])
    if name in e.left_out:
        return Cause(UNKNOWN, f"{text}; {name}: not possible ({e.left_out[name]})")
    return Cause(UNKNOWN, f"{text}; {name} the step differs still{located(e)}", [name]) if name in e.tried else None


def nondeterminism(e: Evidence) -> Cause | None:
    """Return a cause if a step that is taken twice differs from itself."""
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


def buffers(e: Evidence) -> Cause | None:
    """Return a cause if nothing but buffers differs."""
    names = [d.name for d in e.found.differences if d.aspect == "buffer"]
    if not names or e.found.has("gradient", "value", "loss"):
        return None
    return Cause("buffer", f"the buffer {names[0]} drifts; its gradients do not", ["values of buffers"])
