"""Runs torch.profiler over a few steps, and writes traces of ranks and a summary.

`monitor.profile` in the config profiles once, from the first steps on. A file `profile.request` in the run directory or
SIGUSR2 to rank 0 requests a profile later; the request is sent with the next figures over ranks, so that all ranks
trace the same steps. The schedule advances with each step.

RUN/profile/  step-N-rank-R.json.gz (chrome://tracing, ui.perfetto.dev) · on CUDA step-N-rank-R-memory.pickle
(pytorch.org/memory_viz) · summary.md · summary.json

The summary has the shares of computation, exposed and overlapped communication and idle time, and the memory curve. On
CUDA it uses kernels: NCCL's are communication, all others computation. On the CPU it uses operators: gloo's and c10d's
are communication, ATen's computation. Time with both is communication that overlaps with computation.
"""

import json
import logging
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.config import ProfileConfig
from lockstep.monitor.figures import gather_objects

# ---- the summary of a trace ----


Interval = tuple[float, float]
Summary = dict[str, Any]
_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "mpi:")
_TOP = 12
_MOMENTS = 400


def summarise(events: Iterable[Any], rank: int, steps: int) -> Summary:
    """Return one rank's summary of `torch.profiler.profile.events()` over some steps."""
    on_device: list[Any] = []
    on_host: list[Any] = []
    windows: list[Interval] = []
    for event in events:
        if event.name.startswith("ProfilerStep"):
            windows.append(_stretch(event))
        elif not str(event.device_type).endswith(".CPU"):
            on_device.append(event)
        else:
            on_host.append(event)
    chosen = [event for event in (on_device or on_host) if on_device or _counts(event)]
    window = _span(windows or [_stretch(event) for event in chosen])
    talk = union(within((_stretch(event) for event in chosen if _talks(event.name)), window))
    work = union(within((_stretch(event) for event in chosen if not _talks(event.name)), window))
    total = max(1e-9, window[1] - window[0])
    hidden = length(talk) + length(work) - length(union([*talk, *work]))
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
        "memory": _memory_curve(on_host, window[0]),
    }


def combine(ranks: list[Summary], first: int, last: int) -> Summary:
    """Return the summaries of all traced ranks as one; operators and memory are those of the first."""
    total = ranks[0]["seconds"] or 1.0
    operators = [{**operator, "share": operator["seconds"] / total} for operator in ranks[0]["operators"]]
    about = f"Steps {first} to {last}, {len(ranks)} rank{'s' * (len(ranks) != 1)}."
    return {"about": about, "verdict": _verdict(ranks), "first": first, "last": last, "operators": operators,
            "memory": ranks[0]["memory"],
            "ranks": [{k: v for k, v in rank.items() if k not in ("operators", "memory")} for rank in ranks],
            }  # fmt: skip


def as_markdown(summary: Summary) -> str:
    """Return a summary as Markdown."""
    lines = [f"# Profile: {summary['about']}", ""]
    for rank in summary["ranks"]:
        shares = ", ".join(f"{share:.0%} {part}" for part, share in rank["shares"].items())
        lines.append(f"- rank {rank['rank']}: {rank['seconds'] * 1e3:.3g} ms per step: {shares}")
    lines += ["", summary["verdict"]]
    if summary["memory"]:
        most, when = max((held, when) for when, held in summary["memory"])
        lines[-1] += f" Memory: at most {most / 2**20:.3g} MiB more than at the start, {when * 1e3:.3g} ms into it."
    lines += ["", "| operator | ms per step | share | calls per step |", "|---|---|---|---|"]
    lines += [
        f"| `{op['name']}` | {op['seconds'] * 1e3:.3g} | {op['share']:.1%} | {op['calls']:g} |"
        for op in summary["operators"]
    ]
    return "\n".join(lines) + "\n"


def _verdict(ranks: list[Summary]) -> str:
    mean = {part: sum(rank["shares"][part] for rank in ranks) / len(ranks) for part in ranks[0]["shares"]}
    if mean["exposed communication"] > 0.2:
        return "Exposed communication offers the most to gain: overlap it with computation."
    if mean["idle"] > 0.3:
        return "Much of the time nothing runs: data, Python between operators, or many small operators (compile)."
    return "Most of the time is computation."


def _memory_curve(events: list[Any], begun: float) -> list[tuple[float, float]]:
    """Return (seconds since `begun`, bytes allocated since then), the peak of each stretch of the trace.

    It is the device's memory if there is any. The list is empty if allocations were not recorded.
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
    """Return whether an event is an operator or a collective, not a frame around them."""
    return event.name.startswith("aten::") or _talks(event.name)


def _talks(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def _stretch(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _span(stretches: list[Interval]) -> Interval:
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


# ---- intervals of time ----


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
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if end > start]


# ---- the profiler ----


REQUEST = "profile.request"
_SIGNAL = signal.SIGUSR2
_log = logging.getLogger("lockstep")


class Profiler:
    """Profiles steps; called after every step on every rank.

    Args:
        config: unset: only on request.
        folder: `RUN/profile`.
        rank: this rank.
        is_main: whether this is rank 0.
        event: called when a profile is written.
    """

    def __init__(
        self, config: ProfileConfig | None, folder: Path, *, rank: int, is_main: bool, event: Callable[..., None]
    ) -> None:
        self._config = config or ProfileConfig(wait=0, ranks=[])
        self._on_demand = ProfileConfig(**{**self._config.model_dump(), "wait": 0})
        self._folder = Path(self._config.dir) if self._config.dir else folder
        self._rank, self._is_main, self._event = rank, is_main, event
        self._running: _Running | None = None
        self._signalled = self._listens = False
        if config is not None:
            self._begin(self._config)

    def begin_on_request(self) -> None:
        """Begin a profile at the next step, after all ranks learned of the request."""
        if self._running is None:
            self._begin(self._on_demand)

    def on_step(self, step: int) -> None:
        """Count a step; at the profile's last step end it, where all ranks meet."""
        running = self._running
        if running is None:
            return
        if running.first is None:
            running.first = step
        running.left -= 1
        if running.profile is not None:
            running.profile.step()
        if running.left == 0:
            self._running = None
            self._finish(running, step)

    def take_request(self, run: Path) -> bool:
        """Return whether rank 0 got a request for a profile, and remove the request."""
        came, self._signalled = self._signalled, False
        try:
            (run / REQUEST).unlink()
        except OSError:
            return came
        return True

    def listen(self) -> None:
        """Take SIGUSR2 as a request, unless the program handles it already."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            signal.signal(_SIGNAL, self._on_signal)
            self._listens = True

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self._signalled = True

    def close(self) -> None:
        """Stop listening; a profile that is running is discarded."""
        if self._listens:
            signal.signal(_SIGNAL, signal.SIG_DFL)
            self._listens = False
        running, self._running = self._running, None
        if running is not None and running.profile is not None:
            running.profile.stop()

    def _begin(self, config: ProfileConfig) -> None:
        import torch

        from lockstep import accelerator
        from lockstep.torch_compat import memory_history

        steps = config.wait + config.warmup + config.active
        traced = not config.ranks or self._rank in config.ranks
        running = self._running = _Running(config, steps)
        if not traced:
            return
        schedule = torch.profiler.schedule(wait=config.wait, warmup=config.warmup, active=config.active, repeat=1)
        kernels = accelerator.profiler_activity()
        activities = [torch.profiler.ProfilerActivity.CPU, *([] if kernels is None else [kernels])]
        if accelerator.keeps_memory_history():
            memory_history.record(max_entries=200_000)
        running.profile = torch.profiler.profile(
            activities=activities, schedule=schedule, record_shapes=config.record_shapes,
            profile_memory=config.profile_memory, with_stack=config.with_stack,
            on_trace_ready=lambda profile: self._keep(running, profile),
        )  # fmt: skip
        running.profile.start()

    def _keep(self, running: "_Running", profile: Any) -> None:
        """Write the trace and compute its summary, after the active steps; a full disk does not stop the run."""
        from lockstep import accelerator
        from lockstep.torch_compat import memory_history

        name = f"step-{running.first}-rank-{self._rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if accelerator.keeps_memory_history():
                snapshot = str(self._folder / f"{name}-memory.pickle")
                memory_history.write(snapshot)
                memory_history.stop()
        except (OSError, RuntimeError) as error:
            _log.warning("warning: the trace of rank %d could not be written: %s", self._rank, error)
        running.summary = summarise(profile.events(), self._rank, running.config.active)

    def _finish(self, running: "_Running", step: int) -> None:
        if running.profile is not None:
            running.profile.stop()
            running.profile = None  # it holds the trace, and its own callback holds it
        found = [summary for summary in gather_objects(running.summary) if summary is not None]
        if not self._is_main or not found:
            return
        summary = combine(found, step - running.config.active + 1, step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "summary.json").write_text(json.dumps(summary))
            (self._folder / "summary.md").write_text(as_markdown(summary))
        except OSError as error:
            _log.warning("warning: the summary of the profile could not be written: %s", error)
            return
        print(f"lockstep: profile of {len(found)} rank(s) in {self._folder}: summary.md, traces", flush=True)
        self._event("profile", step=step, text=f"{len(found)} rank(s), {self._folder}")


class _Running:
    def __init__(self, config: ProfileConfig, steps: int) -> None:
        self.config, self.left = config, steps
        self.profile: Any = None
        self.summary: Summary | None = None
        self.first: int | None = None
