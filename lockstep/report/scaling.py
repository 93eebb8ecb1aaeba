"""Measures how a config scales: `lockstep bench scaling CONFIG --ranks 1,2,4`.

weak     each rank keeps its work, the global batch grows with the ranks; ideal: N times the samples
         per second
strong   the global batch stays; ideal: a step in 1/N of the time

Each point is a run of `lockstep train`; its throughput is the median over its steps after the first
quarter. The caller starts them (`lockstep/launch/bench.py`).
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import IO, Any

from lockstep.config.flags import as_overrides
from lockstep.errors import RunError, UsageError
from lockstep.layout import SIZED
from lockstep.machine.scratch import temporary
from lockstep.report import units
from lockstep.report.charts import COLOURS, chart, line
from lockstep.report.page import Page, render
from lockstep.report.read import after_warmup, read_run
from lockstep.run_directory.run_files import exists_already, write_result
from lockstep.strategy import EXPERT, SINGLE

# Starts `python -m MODULE …` with these variables, its stdout and its stderr in files, as `Popen`.
Start = Callable[[Sequence[str], Mapping[str, str], IO[str], IO[str]], Any]
# Usual speed-ups of GPUs over PCIe, from and to.
EXPECTED = {2: (1.8, 1.9), 4: (3.5, 3.8), 8: (6.5, 7.5), 16: (12.0, 14.0)}


@dataclass(frozen=True)
class Point:
    """The result of one run."""

    kind: str  # `weak` or `strong`
    ranks: int
    rate: float  # samples per second
    step_seconds: float  # median time of a step
    speedup: float  # `rate` over that of the fewest ranks, times their number

    @property
    def efficiency(self) -> float:
        """Speed-up per rank."""
        return self.speedup / self.ranks


def study(
    config: Path,
    overrides: Sequence[str],
    ranks: Sequence[int],
    *,
    steps: int,
    start: Start,
    log: Callable[[str], None],
) -> list[Point]:
    """Run all points, the fewest ranks first. Raises RunError: a run failed."""
    from lockstep.config import load_config

    training = load_config(config, overrides).training
    per_rank = training.batch_size * training.accumulation
    global_batch = training.global_batch_size or per_rank * max((*ranks, 1))
    points: list[Point] = []
    with temporary("scaling") as folder:
        for kind, count in product(("weak", "strong"), sorted(ranks)):
            batch = per_rank * count if kind == "weak" else global_batch
            settings = {
                "training.global_batch_size": batch,
                "training.gradient_accumulation_steps": "null",
            }
            rate, seconds = _measure(
                config, [*overrides, *as_overrides(settings)], count, steps, folder, start
            )
            first = next((p for p in points if p.kind == kind), None)
            speedup = rate / first.rate * first.speedup if first else float(count)
            points.append(Point(kind, count, rate, seconds, speedup))
            ideal = f"{speedup / count:.0%} of ideal"
            log(f"{kind:<8} {count:>3} ranks  {rate:9.1f} samples/s  {speedup:5.2f} ×  {ideal}")
    return points


def _measure(
    config: Path, overrides: Sequence[str], ranks: int, steps: int, folder: Path, start: Start
) -> tuple[float, float]:
    """Return the samples per second and the seconds per step of one run."""
    output = folder / f"{len(list(folder.iterdir()))}"
    printed = folder / f"{output.name}.txt"
    fixed: dict[str, Any] = {
        "training.max_steps": steps,
        "training.eval_steps": "null",
        "training.warmup_steps": 0,
        "checkpoint.save_strategy": "none",
        "monitor.sinks": "[jsonl]",
        "monitor.log_steps": 1,
    }
    if ranks == 1:
        fixed["distributed.strategy"] = SINGLE
        fixed |= {f"distributed.{axis}_size": "null" for axis in (*SIZED, EXPERT)}
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        str(config),
        *overrides,
        *as_overrides(fixed),
    ]
    command += ["--nproc-per-node", str(ranks), "--output-dir", str(output), "--resume", "never"]
    with printed.open("w") as file:
        process = start(command, {**os.environ, "OMP_NUM_THREADS": "1"}, file, file)
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        raise RunError(
            f"the run on {ranks} ranks failed",
            why=printed.read_text(errors="replace").strip()[-800:],
        )
    rows = after_warmup(read_run(output).rows)
    seconds = median(row["step_seconds"] for row in rows)
    return median(row["samples"] for row in rows) / seconds, seconds


def as_markdown(points: list[Point], command: str, about: str) -> str:
    """Return the table, with the usual speed-ups."""
    lines = [
        f"# Scaling\n\n`{command}`\n\n{about}\n",
        f"| {' | '.join(_HEAD)} |\n{'|---' * len(_HEAD)}|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in _rows(points)]
    return "\n".join(lines) + "\n"


_HEAD = ("kind", "ranks", "samples / s", "seconds per step", "speed-up", "of ideal", "expected")


def _rows(points: list[Point]) -> list[list[str]]:
    return [
        [
            p.kind,
            str(p.ranks),
            f"{p.rate:.1f}",
            f"{p.step_seconds:.4f}",
            f"{p.speedup:.2f} ×",
            f"{p.efficiency:.0%}",
            "{:g}–{:g} ×".format(*EXPECTED[p.ranks]) if p.ranks in EXPECTED else "",
        ]
        for p in points
    ]


def page_of(points: list[Point], title: str, made: str, about: str) -> Page:
    """Return a page like a run's report."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    counts = sorted({point.ranks for point in points})
    by_ranks = {"title": "ranks", "ticks": counts}
    speed = [line(counts, counts, "ideal", "c7", width=1.5, dash="dash")]
    share = []
    for kind, colour in zip(kinds, COLOURS, strict=False):
        of_kind = [point for point in points if point.kind == kind]
        at = [point.ranks for point in of_kind]
        speed.append(line(at, [round(point.speedup, 3) for point in of_kind], kind, colour))
        share.append(line(at, [round(point.efficiency, 4) for point in of_kind], kind, colour))
    speed += [
        line([n, n], EXPECTED[n], "expected of GPUs", "c6", label="", width=7)
        for n in counts
        if n in EXPECTED
    ]
    run = {
        "name": title,
        "status": "done",
        "colour": "c1",
        "facts": [("about", about)],
        "lines": [],
        "tiles": [],
    }
    return {
        "title": title,
        "made": made,
        "runs": [run],
        "advice": None,
        "left_out": "",
        "charts": [
            chart(
                "speedup",
                "Speed-up",
                speed,
                note="Relative to the fewest ranks.",
                x=by_ranks,
                y={"unit": " ×"},
            ),
            chart(
                "efficiency",
                "Share of the ideal",
                share,
                x=by_ranks,
                y={"percent": True, "range": [0, 1.1]},
            ),
        ],
        "tables": [{"title": "Measured", "head": [*_HEAD], "rows": _rows(points)}],
        "configs": [],
    }


def require_measurable(what: str, ranks: str, output: Path) -> list[int]:
    """Return the numbers of ranks to measure with. Raises UsageError before minutes of work."""
    if what != "scaling":
        raise UsageError(
            f"there is no study {what!r}",
            where="lockstep bench",
            fix="lockstep bench scaling CONFIG",
        )
    for suffix in (".md", ".html"):
        if os.path.lexists(output.with_suffix(suffix)):
            raise exists_already(output.with_suffix(suffix))
    try:
        counts = sorted({int(word) for word in ranks.split(",") if word.strip()})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UsageError(
            f"--ranks {ranks} is not a list of numbers from 1 on",
            where="--ranks",
            fix="--ranks 1,2,4",
        )
    return counts


def bench(
    config: Path,
    overrides: Sequence[str],
    *,
    ranks: Sequence[int],
    steps: int,
    output: Path,
    start: Start,
) -> int:
    """Measure, print a table, and write `output`.md and `output`.html."""
    output.parent.mkdir(parents=True, exist_ok=True)
    words = ["lockstep", "bench", "scaling", str(config), *overrides]
    called = shlex.join([*words, "--ranks", ",".join(map(str, ranks))])
    points = study(
        config, overrides, ranks, steps=steps, start=start, log=partial(print, flush=True)
    )
    about = (
        f"{len(os.sched_getaffinity(0))} cores, {steps} steps per run, {units.moment(time.time())}"
    )
    write_result(output.with_suffix(".md"), as_markdown(points, f"{called} --steps {steps}", about))
    page = page_of(
        points, f"Scaling of {config.name}", units.moment(time.time()), f"{called}; {about}"
    )
    write_result(output.with_suffix(".html"), render(page))
    print(f"lockstep: {output.with_suffix('.md')}, {output.with_suffix('.html')}")
    return 0
