"""Names causes that are seen in a step itself: other samples, other first values, results that vary, buffers."""

from lockstep.verify.differences import name_ranks
from lockstep.verify.evidence import Cause, Evidence
from lockstep.verify.experiments import AGAIN, AGAIN_TOO


def data(e: Evidence) -> Cause | None:
    """Return a cause if ranks train on other samples."""
    seen = [d for d in e.found.differences if d.aspect == "samples"]
    if not seen:
        return None
    return Cause("data order", f"ranks train on other data: {seen[0].name}", ["hashes of each micro-batch"])


def start(e: Evidence) -> Cause | None:
    """Return a cause if ranks start from other values."""
    first = [d for d in e.found.differences if d.aspect == "start"]
    if not first:
        return None
    names = ", ".join(d.name for d in first[:3]) + (" …" if len(first) > 3 else "")
    return Cause(
        "first values", f"{name_ranks(first[0].ranks)} started from other values of {names}", ["values before step 1"]
    )


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
