"""Simulates long runs on fleets whose machines fail, in each way in which a run can go on.

    python -m benchmarks.fleet [--days 54] [--runs 20] [--write]

Nothing is run: events (saves, copies, failures, recoveries) follow each other on a clock that is
simulated, with failures at exponential times. A run's time is divided as `lockstep report` divides
that of a real one (`lockstep.report.effective_time`):

    trained    steps that were kept
    waited     GPUs that stand idle until a lost machine is replaced, as time of the whole run
    saved      training stands still for a save or a copy
    recovered  from a failure to the end of the next step
    lost       training since the save or copy that the run goes back to

The ratio of `trained` to their sum is the ETTR. With saves alone it has a closed form (Daly 2006),
which `benchmarks.goodput` has, and a test compares.

Tests: tests/report/test_fleet.py
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.goodput import Reliability, best_interval, expected_goodput
from benchmarks.page import RESULTS, page, tell
from lockstep.report.effective_time import PARTS, shares

DAY = 86400.0
STEP = 5.0  # seconds of a step of a large run; assumed
# Of the 419 unexpected interruptions of Llama 3, 54 were bugs of software: the machine stays.
MACHINE_SHARE = 1 - 54 / 419


@dataclass(frozen=True)
class Fleet:
    """Machines of one run, and what is published of it.

    Attributes:
        mean_time: seconds between two failures of the run.
        published: its ETTR as published; empty if none is.
    """

    name: str
    gpus: int
    mean_time: float
    source: str
    published: str = ""


@dataclass(frozen=True)
class Way:
    """A way in which a run goes on after a failure; seconds.

    Attributes:
        restart: from the loss of a machine to the end of the next step.
        restart_process: the same where the machine stays, and a process has died alone.
        save: training stands still for a save on disk.
        save_every: between two saves; None: as often as loses least, where a failure goes back to
            the newest save.
        copy: training stands still for a copy in memory.
        copy_every: between two copies; infinite: there are none.
        outlives_machines: copies are on another machine, too.
        idle: until a lost machine is replaced; the others train meanwhile.
        replicas: of the model, one of which stands idle in that time.
    """

    name: str
    restart: float
    restart_process: float
    save: float = 10.0
    save_every: float | None = None
    copy: float = 0.0
    copy_every: float = float("inf")
    outlives_machines: bool = False
    idle: float = 0.0
    replicas: int = 1


FROM_DISK = Way("restart from disk", restart=600.0, restart_process=600.0)
SPARES = replace(FROM_DISK, name="the same, spare machines", restart=60.0, restart_process=60.0)
# A copy every ten steps, for which a step takes 2 % longer.
COPIES = replace(
    SPARES,
    name="copies in memory",
    copy=0.02 * STEP,
    copy_every=10 * STEP,
    save_every=3600.0,
    outlives_machines=True,
)
LIVE = replace(
    COPIES,
    name="live recovery",
    restart=10.0,
    restart_process=10.0,
    idle=3600.0,
    replicas=128,
)
# What copies are worth where they die with their machine, as Lockstep's do.
COPIES_OF_ONE_MACHINE = replace(
    COPIES, name="copies that die with a machine", save_every=None, outlives_machines=False
)
WAYS = (FROM_DISK, SPARES, COPIES_OF_ONE_MACHINE, COPIES, LIVE)

FLEETS = (
    Fleet("1,024 GPUs", 1024, 7.9 * 3600, "arXiv:2410.21680"),
    Fleet("9,600 GPUs", 9600, 54 * DAY / 419 * 16384 / 9600, "arXiv:2509.16293", "97 %"),
    Fleet("16,384 GPUs", 16384, 54 * DAY / 419, "arXiv:2407.21783", "more than 90 %"),
    Fleet("16,384 GPUs, at the other rate", 16384, 1.8 * 3600, "arXiv:2410.21680"),
)


def simulate(way: Way, mean_time: float, work: float, *, seed: int = 0) -> dict[str, float]:
    """Simulate `work` seconds of training; return part → seconds.

    Args:
        mean_time: seconds between two failures.
        seed: of the moments of failures, and of what fails.
    """
    random = np.random.default_rng(seed)
    interval = way.save_every or best_interval(way.save, mean_time)
    spent = dict.fromkeys(PARTS, 0.0)
    done = on_disk = copied = 0.0  # seconds of training
    while done < work:
        until_failure = random.exponential(mean_time)
        # ---- train, save and copy until it fails ----
        while done < work:
            next_save = on_disk + interval
            next_copy = copied + way.copy_every
            stop = min(next_save, next_copy, work)
            if until_failure < stop - done:
                done += until_failure
                break
            until_failure -= stop - done
            done = stop
            stall = way.save if stop == next_save else way.copy if stop == next_copy else 0.0
            if until_failure < stall:  # what was being written is not complete
                spent["saved"] += until_failure
                break
            until_failure -= stall
            spent["saved"] += stall
            copied = done
            if stop == next_save:
                on_disk = done
        if done >= work:
            break

        # ---- go back, and begin again; a failure on the way begins the recovery again ----
        loses_machine = random.random() < MACHINE_SHARE
        if loses_machine and not way.outlives_machines:
            copied = on_disk
        spent["lost"] += done - copied
        done = copied
        recovery = way.restart if loses_machine else way.restart_process
        while (fails_after := random.exponential(mean_time)) < recovery:
            spent["recovered"] += fails_after
        spent["recovered"] += recovery
        if loses_machine:
            spent["waited"] += way.idle / way.replicas
    spent["trained"] = work
    return spent


def mean_shares(way: Way, mean_time: float, days: float, runs: int) -> dict[str, float]:
    """Return part → its share of the time of several runs together."""
    found = [simulate(way, mean_time, days * DAY, seed=seed) for seed in range(runs)]
    return shares({part: sum(of[part] for of in found) for part in PARTS})


def rows(days: float, runs: int) -> list[str]:
    """Return the lines of the table."""
    lines = []
    for fleet in FLEETS:
        for way in WAYS:
            found = mean_shares(way, fleet.mean_time, days, runs)
            others = " | ".join(f"{found[part]:.2%}" for part in PARTS[1:])
            lines.append(
                f"| {fleet.name} | {fleet.mean_time / 3600:.1f} | {way.name} |"
                f" **{found['trained']:.1%}** | {others} | {fleet.published} | {fleet.source} |"
            )
    return lines


def closed_form(way: Way, mean_time: float) -> float:
    """Return the ETTR of a run that goes on from saves alone (Daly 2006)."""
    interval = best_interval(way.save, mean_time)
    return expected_goodput(interval, way.save, way.restart, mean_time)


def notes(days: float, runs: int) -> Sequence[str]:
    """Return what the table rests on."""
    llama = Reliability(days * 24 * 16384 / 419, FROM_DISK.restart, FROM_DISK.save)
    mean_time = llama.mean_time(16384)
    by_formula = closed_form(FROM_DISK, mean_time)
    simulated = mean_shares(FROM_DISK, mean_time, days, runs)["trained"]
    return [
        f"Check: by Daly's formula the run of Llama 3 from disk has {by_formula:.2%}, simulated"
        f" {simulated:.2%}.",
        "",
        "Published: failures and the two ratios. Llama 3's ratio is of a run with restarts from"
        " disk,",
        "whose seconds are not published; ByteRobust's has spare machines and copies that outlive",
        "machines, and its rate of failures is not published: that of Llama 3 is taken.",
        "",
        "Measured here: nothing of this size. On four processes of one machine a restart takes",
        "1.12 s and live recovery 0.63 s (results/recovery.md); a step with a copy costs what",
        "results/readiness.md says.",
        "",
        "Assumed: 600 s for a restart that has to find a machine, 60 s with spare machines, 10 s",
        "for live recovery at this size; a save stops training for 10 s, as often as loses least,",
        "or once an hour where copies outlive machines; a step takes"
        f" {STEP:g} s; a copy every ten steps,",
        "for which a step takes 2 % longer; a lost machine is replaced after an hour, in which one",
        "of 128 replicas stands idle; 365 of 419 failures take a machine along.",
        "",
        "What Lockstep has today: restarts from disk on any number of machines. Copies in memory",
        "and live recovery are for one machine; `copies in memory` and `live recovery` are what",
        "they would be worth on several, if a neighbour kept each copy.",
    ]


def main() -> None:
    """Print the page, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--days", type=float, default=54.0, help="of training, of each run")
    parser.add_argument("--runs", type=int, default=20, help="with other seeds, for each row")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    header = "| fleet | hours between failures | a run goes on by | ETTR | "
    header += " | ".join(PARTS[1:]) + " | published | source |"
    text = page(
        "A simulated fleet: effective training time after failures",
        f"python -m benchmarks.fleet --days {asked.days:g} --runs {asked.runs} --write",
        "",
        [f"Shares of the wall time of {asked.runs} simulated runs of {asked.days:g} days each."],
        header,
        rows(asked.days, asked.runs),
        notes(asked.days, asked.runs),
    )
    tell(text, RESULTS / "fleet.md" if asked.write else None)


if __name__ == "__main__":
    main()
