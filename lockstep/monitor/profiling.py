"""Runs torch.profiler over a few steps, and writes traces of ranks and a summary to RUN/profile.

The schedule (`monitor.profile`) advances with each step, so that ranks trace the same ones. On CUDA
the summary uses kernels: NCCL's are communication, all others computation. On the CPU it uses
operators: gloo's and c10d's are communication, ATen's computation. Time with both is communication
that overlaps with computation.

Tests: tests/monitor/test_profile.py, tests/monitor/test_ranks.py
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.config import ProfileConfig
from lockstep.division import ceil_div
from lockstep.files.paths import local_path
from lockstep.machine.output import say
from lockstep.monitor.figures import gather_objects
from lockstep.run_directory.run_files import replace_file

Interval = tuple[float, float]
Summary = dict[str, Any]
_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "mpi:")
_TOP = 12
_MOMENTS = 400


def summarise(events: Iterable[Any], rank: int, steps: int) -> Summary:
    """Return one rank's summary of `torch.profiler.profile.events()` over some steps."""
    on_device = list[Any]()
    on_host = list[Any]()
    windows = list[Interval]()
    for event in events:
        if event.name.startswith("ProfilerStep"):
            windows.append(_stretch(event))
        elif not str(event.device_type).endswith(".CPU"):
            on_device.append(event)
        else:
            on_host.append(event)
    # On the host: operators and collectives, without the frames around them.
    chosen = on_device or [
        event for event in on_host if event.name.startswith("aten::") or _talks(event.name)
    ]
    stretches = windows or [_stretch(event) for event in chosen] or [(0.0, 1.0)]
    window = min(start for start, _ in stretches), max(end for _, end in stretches)
    talk = union(within((_stretch(event) for event in chosen if _talks(event.name)), window))
    work = union(within((_stretch(event) for event in chosen if not _talks(event.name)), window))
    total = max(1e-9, window[1] - window[0])
    hidden = length(talk) + length(work) - length(union([*talk, *work]))
    parts = {"compute": length(work) - hidden, "overlapped communication": hidden}
    parts["exposed communication"] = length(talk) - hidden
    parts["idle"] = max(0.0, total - sum(parts.values()))
    shares = {name: round(value / total, 5) for name, value in parts.items()}
    operators = _top(chosen, steps, bool(on_device))
    memory = _memory_curve(on_host, window[0])
    return {
        "rank": rank,
        "seconds": total * 1e-6 / steps,
        "shares": shares,
        "operators": operators,
        "memory": memory,
    }


def combine(ranks: list[Summary], first: int, last: int) -> Summary:
    """Return the summaries of all traced ranks as one.

    Operators and memory are those of the first.
    """
    total = ranks[0]["seconds"] or 1.0
    operators = [
        {**operator, "share": operator["seconds"] / total} for operator in ranks[0]["operators"]
    ]
    about = f"Steps {first} to {last}, {len(ranks)} rank{'s' * (len(ranks) != 1)}."
    return {
        "about": about,
        "verdict": _verdict(ranks),
        "first": first,
        "last": last,
        "operators": operators,
        "memory": ranks[0]["memory"],
        "ranks": [
            {k: v for k, v in rank.items() if k not in ("operators", "memory")} for rank in ranks
        ],
    }


def as_markdown(summary: Summary) -> str:
    """Return a summary as Markdown."""
    lines = [f"# Profile: {summary['about']}", ""]
    for rank in summary["ranks"]:
        shares = ", ".join(f"{share:.0%} {part}" for part, share in rank["shares"].items())
        lines.append(f"- rank {rank['rank']}: {rank['seconds'] * 1e3:.3g} ms per step: {shares}")
    lines += ["", summary["verdict"]]
    if summary["memory"]:
        most, when = max((held, when) for when, held in summary["memory"])
        lines[-1] += (
            f" Memory: at most {most / 2**20:.3g} MiB more than at the start, {when * 1e3:.3g} ms"
            " into it."
        )
    lines += ["", "| operator | ms per step | share | calls per step |", "|---|---|---|---|"]
    for op in summary["operators"]:
        lines.append(
            f"| `{op['name']}` | {op['seconds'] * 1e3:.3g} | {op['share']:.1%} | {op['calls']:g} |"
        )
    return "\n".join(lines) + "\n"


def _verdict(ranks: list[Summary]) -> str:
    """Return a sentence on where most is to be gained, by the mean over ranks."""
    mean = {
        part: sum(rank["shares"][part] for rank in ranks) / len(ranks)
        for part in ranks[0]["shares"]
    }
    if mean["exposed communication"] > 0.2:
        return "Exposed communication offers the most to gain: overlap it with computation."
    if mean["idle"] > 0.3:
        return (
            "Much of the time nothing runs: data, Python between operators, or many small operators"
            " (compile)."
        )
    return "Most of the time is computation."


def _memory_curve(events: list[Any], begun: float) -> list[tuple[float, float]]:
    """Return (seconds since `begun`, bytes allocated since then), the peak of each stretch.

    The memory is the device's, or the host's if no memory of a device was used.
    """
    on_device = any(event.self_device_memory_usage for event in events)
    held = 0.0
    curve = list[tuple[float, float]]()
    for event in sorted(events, key=lambda event: event.time_range.end):
        change = event.self_device_memory_usage if on_device else event.self_cpu_memory_usage
        if change:
            held += change
            curve.append(((event.time_range.end - begun) * 1e-6, held))
    stretch = max(1, ceil_div(len(curve), _MOMENTS))
    return [
        max(curve[i : i + stretch], key=lambda moment: moment[1])
        for i in range(0, len(curve), stretch)
    ]


def _talks(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def _stretch(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _top(events: list[Any], steps: int, on_device: bool) -> list[Summary]:
    """Return the operators that take most time, with seconds and calls a step."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        spent = (
            event.time_range.elapsed_us()
            if on_device or _talks(event.name)
            else event.self_cpu_time_total
        )
        seconds[event.name] += spent * 1e-6 / steps
        calls[event.name] += 1
    best = sorted(seconds, key=lambda name: -seconds[name])[:_TOP]
    return [
        {"name": name[:120], "seconds": seconds[name], "calls": calls[name] / steps}
        for name in best
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length."""
    return sum(end - start for start, end in disjoint)


def within(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Cut intervals to a window."""
    clipped = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in clipped if end > start]


_log = logging.getLogger("lockstep")


class Profiler:
    """Profiles the first steps; called after every step on every rank.

    `event` tells that it is written.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, rank: int, event: Callable[..., None]
    ) -> None:
        import torch

        from lockstep.machine import accelerator
        from lockstep.torch_compat import memory_history

        self._config = config
        self._rank = rank
        self._event = event
        self._folder = local_path(config.dir, "monitor.profile.dir") if config.dir else folder
        self._left = config.wait + config.warmup + config.active
        self._first: int | None = None
        self._profile: Any = None
        self._summary: Summary | None = None
        if config.ranks and rank not in config.ranks:
            return
        schedule = torch.profiler.schedule(
            wait=config.wait, warmup=config.warmup, active=config.active, repeat=1
        )
        kernels = accelerator.profiler_activity()
        activities = [torch.profiler.ProfilerActivity.CPU, *([] if kernels is None else [kernels])]
        if accelerator.keeps_memory_history():
            memory_history.record(max_entries=200_000)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            on_trace_ready=self._keep,
        )
        self._profile.start()

    def on_step(self, step: int) -> None:
        """Count a step; at the profile's last step end it, where all ranks meet."""
        if self._left == 0:
            return
        if self._first is None:
            self._first = step
        self._left -= 1
        if self._profile is not None:
            self._profile.step()
        if self._left == 0:
            self._finish(step)

    def close(self) -> None:
        """Stop, and say so if the run has ended before the traced steps."""
        if self._rank == 0 and self._first is not None and self._left > 0:
            config = self._config
            needed = config.wait + config.warmup + config.active
            _log.warning(
                "warning: monitor.profile has written nothing: wait, warmup and active are %d"
                " steps, the run had %d",
                needed,
                needed - self._left,
            )
            self._left = 0
        self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _keep(self, profile: Any) -> None:
        """Write the trace and compute its summary, after the active steps.

        A full disk does not stop the run.
        """
        from lockstep.machine import accelerator
        from lockstep.torch_compat import memory_history

        name = f"step-{self._first}-rank-{self._rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if accelerator.keeps_memory_history():
                snapshot = str(self._folder / f"{name}-memory.pickle")
                memory_history.write(snapshot)
                memory_history.stop()
        except (OSError, RuntimeError) as error:
            _log.warning(
                "warning: the trace of rank %d could not be written: %s", self._rank, error
            )
        self._summary = summarise(profile.events(), self._rank, self._config.active)

    def _finish(self, step: int) -> None:
        """End the recording, and write a summary over all recorded ranks."""
        self._stop()  # it holds the trace, and its own callback holds it
        summaries = gather_objects(self._summary)
        written = [summary for summary in summaries if summary is not None]
        if self._rank == 0 and not written:
            ranks = self._config.ranks
            last = len(summaries) - 1
            _log.warning(
                "warning: monitor.profile.ranks names %s, and the run has ranks 0 to %d",
                ranks,
                last,
            )
        if self._rank != 0 or not written:
            return
        summary = combine(written, step - self._config.active + 1, step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / "summary.json", json.dumps(summary))
            replace_file(self._folder / "summary.md", as_markdown(summary))
        except OSError as error:
            _log.warning("warning: the summary of the profile could not be written: %s", error)
            return
        say(f"profile of {len(written)} rank(s) in {self._folder}: summary.md, traces")
        self._event("profile", step=step, text=f"{len(written)} rank(s), {self._folder}")
