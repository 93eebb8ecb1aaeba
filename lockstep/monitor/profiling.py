"""Runs torch.profiler over a few steps, and writes traces of ranks and a summary.

`monitor.profile` in the config profiles once, from the first steps on. A file `profile.request` in the run directory or
SIGUSR2 to rank 0 requests a profile later; the request is sent with the next figures over ranks, so that all ranks
trace the same steps. The schedule advances with each step.

RUN/profile/  step-N-rank-R.json.gz (chrome://tracing, ui.perfetto.dev) · on CUDA step-N-rank-R-memory.pickle
(pytorch.org/memory_viz) · summary.md · summary.json
"""

import json
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.config import ProfileConfig
from lockstep.monitor.figures import gather_objects
from lockstep.monitor.trace import Summary, as_markdown, combine, summarise
from lockstep.torch_compat import memory_history

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
        steps = config.wait + config.warmup + config.active
        traced = not config.ranks or self._rank in config.ranks
        running = self._running = _Running(config, steps)
        if not traced:
            return
        schedule = torch.profiler.schedule(wait=config.wait, warmup=config.warmup, active=config.active, repeat=1)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            memory_history.record(max_entries=200_000)
        running.profile = torch.profiler.profile(
            activities=activities, schedule=schedule, record_shapes=config.record_shapes,
            profile_memory=config.profile_memory, with_stack=config.with_stack,
            on_trace_ready=lambda profile: self._keep(running, profile),
        )  # fmt: skip
        running.profile.start()

    def _keep(self, running: "_Running", profile: Any) -> None:
        """Write the trace and compute its summary, after the active steps; a full disk does not stop the run."""
        name = f"step-{running.first}-rank-{self._rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if torch.cuda.is_available():
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
