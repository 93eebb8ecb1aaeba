"""`lockstep report RUN [RUN2 …] [-o FILE] [--live]`."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.report import times, words
from lockstep.report.advice import advise
from lockstep.report.page import write
from lockstep.report.read import Run, read_run


def run(paths: Sequence[Path], *, output: Path | None, live: bool, port: int) -> int:
    """Write the page, or serve it; and say the most important in words.

    Args:
        output: the file; unset: `RUN/report.html` of the first run.
    """
    if live:
        from lockstep.report.live import serve

        if output is not None:
            raise UsageError("--live serves the page; it writes no file", fix="leave out -o, or --live")
        serve(paths, port, started=lambda text: print(text, flush=True))
        return 0
    runs = [read_run(path) for path in _apart(paths)]
    target = output or paths[0] / "report.html"
    write(runs, target)
    for one in runs:
        print("\n".join(in_words(one)))
    print(f"lockstep: {target}")
    return 0


def in_words(run: Run) -> list[str]:
    """One line about the run, and one for each advice."""
    step, loss = (run.rows[-1]["step"] if run.rows else 0), run.last("loss")
    about = [f"{run.name}: {run.status}, {step} steps"]
    about += [f"loss {loss:.4f}"] if loss is not None else []
    about += [f"{words.seconds(times.typical_step(run))} a step"] if times.typical_step(run) else []
    return [", ".join(about), *(f"  {advice.found} {advice.do}" for advice in advise(run))]


def _apart(paths: Sequence[Path]) -> list[Path]:
    """Each run once, however often it was named."""
    return list({path.resolve(): path for path in paths}.values())
