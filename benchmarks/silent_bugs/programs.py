"""Judges the programs of `cases.py` with `lockstep verify SCRIPT`, each beside its sound twin, and
those of `sound.py`.

The latter are watched as one process, too, as `lockstep launch --watch-training` does.

python -m benchmarks.silent_bugs.programs [--only NAME …] [--out
benchmarks/results/silent_bugs_programs.md]
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import machine, page, table, tell
from benchmarks.silent_bugs.cases import CASES
from benchmarks.silent_bugs.sound import ON_RANKS, PROGRAMS
from lockstep.machine.scratch import temporary
from lockstep.verify.command import verify_script
from lockstep.verify.comparison_result import UNKNOWN

FOLDER = Path(__file__).parent
STEPS = 3


@dataclass
class JudgedProgram:
    """One program.

    Attributes:
        found: whether it did not pass.
        kinds: of the causes that are errors.
        text: of the first of them.
        seconds: for the verdict.
    """

    name: str
    found: bool
    kinds: list[str]
    text: str
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the planted cause is among the first two that are named."""
        return any(kind in CASES[self.name].kinds for kind in self.kinds[:2])

    @property
    def unknown(self) -> bool:
        """Whether nothing is named as the cause."""
        return not [kind for kind in self.kinds if kind != UNKNOWN]

    @property
    def wrong(self) -> bool:
        """Whether another cause than the planted one is named."""
        return self.found and not self.right and not self.unknown


def judge(name: str, *, sound: bool) -> JudgedProgram:
    """Verify one program on two ranks."""
    return _judge(name, "program.py", name, *["sound"] * sound)


def _judge(name: str, script: str, *arguments: str) -> JudgedProgram:
    began = time.monotonic()
    (outcome,) = verify_script(str(FOLDER / script), arguments, [2], steps=STEPS)
    errors = [found for found in outcome.causes if found.is_error]
    text = errors[0].text if errors else outcome.failed or outcome.not_judged
    return JudgedProgram(
        name, not outcome.passed, [e.kind for e in errors], text, time.monotonic() - began
    )


def watch(name: str) -> list[str]:
    """Return what is found while a sound program runs as one process, "did not run" if it fails."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--nproc-per-node",
        "1",
        "--watch-training",
        "1",
    ]
    with temporary("watched") as folder:
        command += ["--output-dir", str(folder), str(FOLDER / "sound.py"), name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.findall(r"watch-training: ✗ rank \d+: (.*?):", ended.stdout + ended.stderr)
    return found + ["did not run"] * (ended.returncode != 0)


def sound_row(name: str) -> tuple[str, int]:
    """Return the row of a sound program, and the number of alarms."""
    watched = watch(name)
    judged = _judge(name, "sound.py", name) if name in ON_RANKS else None
    says = (
        "one process alone"
        if judged is None
        else "passed"
        if not judged.found
        else f"✗ {', '.join(judged.kinds)}"
    )
    alarms = len(watched) + (judged is not None and judged.found)
    return f"| {name} | {', '.join(watched) or 'nothing found'} | {says} |", alarms


HEADER = "| program | reported as | found | cause right | what verify says | seconds | sound twin |"


def row(judged: JudgedProgram, twin: JudgedProgram) -> str:
    """Return the row of a program and its twin."""
    says = f"{', '.join(judged.kinds)}: {' '.join(judged.text.split())[:140]}".replace("|", "/")
    right = "?" if judged.unknown else "✓" if judged.right else "✗"
    passed = f"✗ {', '.join(twin.kinds) or twin.text[:60]}" if twin.found else "passed"
    found = "✓" if judged.found else "✗"
    cells = (
        judged.name,
        CASES[judged.name].source,
        found,
        right,
        says,
        f"{judged.seconds:.0f}",
        passed,
    )
    return f"| {' | '.join(cells)} |"


def goals(
    found: Sequence[JudgedProgram], twins: Sequence[JudgedProgram], alarms: int, sound: int
) -> list[str]:
    """Return what is wanted beside what is shown, as a table."""
    number = len(found)
    unknown = sum(j.found and j.unknown for j in found)
    seconds = sorted(judged.seconds for judged in (*found, *twins)) or [0.0]
    rows = [
        ("≥ 95 % of the programs found", f"{sum(j.found for j in found)} of {number}"),
        (
            "≥ 90 % with the right cause",
            f"{sum(j.right for j in found)} of {number}; {unknown} not known",
        ),
        ("no wrong cause", f"{sum(j.wrong for j in found)}"),
        ("no alarm on the sound twins", f"{sum(j.found for j in twins)} of {len(twins)}"),
        ("no alarm on TrainCheck's 18 sound programs", f"{alarms} of {sound}"),
        (
            "a verdict in 15 s",
            f"{seconds[len(seconds) // 2]:.0f} s in the middle, {seconds[-1]:.0f} s at most",
        ),
    ]
    return table("| goal | shown |", [f"| {goal} | {shown} |" for goal, shown in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    pairs = []
    sound = []
    alarms = 0
    for name in CASES:
        if not given.only or name in given.only:
            pairs.append((judge(name, sound=False), judge(name, sound=True)))
            print(row(*pairs[-1]), flush=True)
    for name in PROGRAMS:
        if not given.only or name in given.only:
            written, number = sound_row(name)
            sound = [*sound, written]
            alarms = alarms + number
            print(written, flush=True)
    command = (
        "python -m benchmarks.silent_bugs.programs --out benchmarks/results/silent_bugs_programs.md"
    )
    words = [
        *goals([found for found, _ in pairs], [twin for _, twin in pairs], alarms, len(sound)),
        "",
        (
            "Each program is a script of plain PyTorch on two ranks of gloo (`program.py`,"
            " `cases.py`), our own writing,"
        ),
        (
            "in which a fault that was reported elsewhere is planted by a few lines; without these"
            " it is the twin. Which"
        ),
        (
            "causes are right was written together with verify, which has seen them all. A cause is"
            " right if it is among"
        ),
        "the first two that are named. The machine's load is in the seconds.",
    ]
    after = [
        (
            "Sound programs (`sound.py`), of the kinds of TrainCheck's"
            " (`fp_rate/workloads/setups.yml` of"
        ),
        (
            "OrderLab/TrainCheck-Evaluation-Workloads), as one process under `lockstep launch"
            " --watch-training 1`, and"
        ),
        "those whose samples can be dealt out, on two ranks under `lockstep verify`:",
        "",
        *table("| program | watched | on two ranks |", sound),
    ]
    tell(
        page(
            "Silent bugs in scripts",
            command,
            machine(),
            words,
            HEADER,
            [row(*pair) for pair in pairs],
            after,
        ),
        given.out,
    )


if __name__ == "__main__":
    main()
