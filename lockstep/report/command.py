"""Runs `lockstep report` and `lockstep bench`."""

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.report import units
from lockstep.report.advice import advise
from lockstep.report.page import write
from lockstep.report.read import RunData, read_run, typical_step


def run(paths: Sequence[Path], *, output: Path | None, live: bool, port: int) -> int:
    """Write the page or serve it, and print a summary.

    Args:
        paths: run directories.
        output: the file; unset: `RUN/report.html` of the first run.
        live: serve the page instead.
        port: for `live`.
    """
    if live:
        from lockstep.report.page import serve

        if output is not None:
            raise UsageError("--live serves the page; it writes no file", fix="leave out -o, or --live")
        serve(paths, port, started=lambda text: print(text, flush=True))
        return 0
    runs = [read_run(path) for path in _distinct(paths)]
    target = output or paths[0] / "report.html"
    write(runs, target)
    for one in runs:
        print("\n".join(summary(one)))
    print(f"lockstep: {target}")
    return 0


def bench(
    what: str, config: Path, overrides: Sequence[str], *, ranks: str, sleeping: str, steps: int, output: Path
) -> int:
    """Run `lockstep bench scaling`: print a table, and write `output`.md and `output`.html."""
    from lockstep.report import scaling
    from lockstep.report.page import render

    if what != "scaling":
        raise UsageError(f"there is no study {what!r}", where="lockstep bench", fix="lockstep bench scaling CONFIG")
    output.parent.mkdir(parents=True, exist_ok=True)  # fail before measuring for minutes
    called = shlex.join(["lockstep", "bench", what, str(config), *overrides, "--ranks", ranks, "--sleeping", sleeping])
    points = scaling.study(
        config, overrides, _counts("--ranks", ranks), sleeping=_counts("--sleeping", sleeping), steps=steps,
        log=lambda text: print(text, flush=True),
    )  # fmt: skip
    about = f"{len(os.sched_getaffinity(0))} cores, {steps} steps per run, {units.moment(time.time())}"
    output.with_suffix(".md").write_text(scaling.as_markdown(points, f"{called} --steps {steps}", about))
    page = scaling.page_of(points, f"Scaling of {config.name}", units.moment(time.time()), f"{called}; {about}")
    output.with_suffix(".html").write_text(render(page))
    print(f"lockstep: {output.with_suffix('.md')}, {output.with_suffix('.html')}")
    return 0


def _counts(option: str, text: str) -> list[int]:
    try:
        counts = sorted({int(word) for word in text.split(",") if word.strip()})
    except ValueError:
        counts = [0]
    if counts and counts[0] < 1:
        raise UsageError(f"{option} {text} is not a list of numbers from 1 on", where=option, fix=f"{option} 1,2,4")
    return counts


def summary(run: RunData) -> list[str]:
    """Return one line about the run, and one for each piece of advice."""
    step, loss = (run.rows[-1]["step"] if run.rows else 0), run.last("loss")
    about = [f"{run.name}: {run.status}, {step} steps"]
    about += [f"loss {loss:.4f}"] if loss is not None else []
    about += [f"{units.seconds(typical_step(run))} per step"] if typical_step(run) else []
    return [", ".join(about), *(f"  {advice.found} {advice.do}" for advice in advise(run))]


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """Return each run once, even if it is named several times."""
    return list({path.resolve(): path for path in paths}.values())
