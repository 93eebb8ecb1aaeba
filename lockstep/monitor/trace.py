"""What a trace says: how much of the time is computing, communication that shows, communication that hides, nothing;
and how much more memory was held, from moment to moment, than when it began.

On CUDA by kernels: NCCL's are communication, all others computing. On the CPU by operators: gloo's and c10d's are
communication, ATen's computing. Time in which both run is communication that hides behind computing.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lockstep.monitor.intervals import Interval, length, shared, union, within

Summary = dict[str, Any]
_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "mpi:")
_TOP = 12
_MOMENTS = 400


def summarise(events: Iterable[Any], rank: int, steps: int) -> Summary:
    """One rank's figures.

    Args:
        events: `torch.profiler.profile.events()`.
        steps: how many were traced.
    """
    on_device: list[Any] = []
    on_host: list[Any] = []
    windows: list[Interval] = []
    for event in events:
        stretch = (event.time_range.start, event.time_range.end)
        if event.name.startswith("ProfilerStep"):
            windows.append(stretch)
        elif "CUDA" in str(event.device_type):
            on_device.append(event)
        else:
            on_host.append(event)
    chosen = [event for event in (on_device or on_host) if on_device or _counts(event)]
    window = (min(s for s, _ in windows), max(e for _, e in windows)) if windows else _span(chosen)
    talk = union(within((_stretch(event) for event in chosen if _talks(event.name)), window))
    work = union(within((_stretch(event) for event in chosen if not _talks(event.name)), window))
    total, hidden = max(1e-9, window[1] - window[0]), shared(talk, work)
    parts = {
        "compute": length(work) - hidden,
        "overlapped communication": hidden,
        "exposed communication": length(talk) - hidden,
    }
    parts["idle"] = max(0.0, total - sum(parts.values()))
    return {
        "rank": rank,
        "seconds": total * 1e-6 / steps,
        "shares": {name: round(value / total, 5) for name, value in parts.items()},
        "operators": _top(chosen, steps, bool(on_device)),
        "memory": _held(on_host, window[0]),
    }


def together(ranks: list[Summary], first: int, last: int) -> Summary:
    """The figures of all traced ranks; operators of the first."""
    total = ranks[0]["seconds"] or 1.0
    operators = [{**operator, "share": operator["seconds"] / total} for operator in ranks[0]["operators"]]
    about = f"Steps {first} to {last}, {len(ranks)} rank{'s' * (len(ranks) != 1)}."
    return {"about": about, "verdict": _verdict(ranks), "first": first, "last": last, "operators": operators,
            "memory": ranks[0]["memory"],
            "ranks": [{k: v for k, v in rank.items() if k not in ("operators", "memory")} for rank in ranks],
            }  # fmt: skip


def in_words(summary: Summary) -> str:
    """Markdown."""
    lines = [f"# Profile: {summary['about']}", ""]
    for rank in summary["ranks"]:
        said = ", ".join(f"{share:.0%} {part}" for part, share in rank["shares"].items())
        lines.append(f"- rank {rank['rank']}: {rank['seconds'] * 1e3:.3g} ms a step: {said}")
    lines += ["", summary["verdict"]]
    if summary["memory"]:
        most, when = max((held, when) for when, held in summary["memory"])
        lines[-1] += f" Memory: at most {most / 2**20:.3g} MiB more than at the start, {when * 1e3:.3g} ms into it."
    lines += ["", "| operator | ms a step | share | calls a step |", "|---|---|---|---|"]
    lines += [
        f"| `{op['name']}` | {op['seconds'] * 1e3:.3g} | {op['share']:.1%} | {op['calls']:g} |"
        for op in summary["operators"]
    ]
    return "\n".join(lines) + "\n"


def _verdict(ranks: list[Summary]) -> str:
    mean = {part: sum(rank["shares"][part] for rank in ranks) / len(ranks) for part in ranks[0]["shares"]}
    if mean["exposed communication"] > 0.2:
        return "Communication that does not hide behind computing takes the most that could be won back."
    if mean["idle"] > 0.3:
        return "For much of the time nothing runs: data, Python between operators, or many small operators (compile)."
    return "Most of the time is computing."


def _held(events: list[Any], begun: float) -> list[tuple[float, float]]:
    """(seconds since `begun`, bytes held more than then), the peak of each stretch of the trace; of the device, if any.

    Empty where allocations were not recorded.
    """
    on_device = any(event.self_device_memory_usage for event in events)
    held, curve = 0.0, list[tuple[float, float]]()
    for event in sorted(events, key=lambda event: event.time_range.end):
        change = event.self_device_memory_usage if on_device else event.self_cpu_memory_usage
        if change:
            held += change
            curve.append(((event.time_range.end - begun) * 1e-6, held))
    stretch = max(1, -(-len(curve) // _MOMENTS))
    return [max(curve[i : i + stretch], key=lambda moment: moment[1]) for i in range(0, len(curve), stretch)]


def _counts(event: Any) -> bool:
    """Operators and collectives, not the frames around them."""
    return event.name.startswith("aten::") or _talks(event.name)


def _talks(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def _stretch(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _span(events: list[Any]) -> Interval:
    stretches = [_stretch(event) for event in events]
    return (min(s for s, _ in stretches), max(e for _, e in stretches)) if stretches else (0.0, 1.0)


def _top(events: list[Any], steps: int, on_device: bool) -> list[Summary]:
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        spent = event.time_range.elapsed_us() if on_device or _talks(event.name) else event.self_cpu_time_total
        seconds[event.name] += spent * 1e-6 / steps
        calls[event.name] += 1
    best = sorted(seconds, key=lambda name: -seconds[name])[:_TOP]
    return [{"name": name[:120], "seconds": seconds[name], "calls": calls[name] / steps} for name in best]
