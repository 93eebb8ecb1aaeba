"""Judges the programs of `cases.py` with `lockstep verify SCRIPT`, each beside its sound twin.

python -m benchmarks.silent_bugs.programs [--only NAME …] [--out benchmarks/results/silent_bugs_programs.md]
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import machine, page, tell
from benchmarks.silent_bugs.cases import CASES
from lockstep.verify.script.command import verify_script
from lockstep.verify.script.fixes import UNKNOWN

PROGRAM = Path(__file__).parent / "program.py"
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
    began = time.monotonic()
    (outcome,) = verify_script(str(PROGRAM), [name, *["sound"] * sound], [2], steps=STEPS)
    errors = [found for found in outcome.causes if found.is_error]
    text = errors[0].text if errors else outcome.failed or outcome.not_judged
    return JudgedProgram(name, not outcome.passed, [e.kind for e in errors], text, time.monotonic() - began)


HEADER = "| program | reported as | found | cause right | what verify says | seconds | sound twin |"


def row(judged: JudgedProgram, twin: JudgedProgram) -> str:
    """Return the row of a program and its twin."""
    says = f"{', '.join(judged.kinds)}: {' '.join(judged.text.split())[:140]}".replace("|", "/")
    right = "?" if judged.unknown else "✓" if judged.right else "✗"
    passed = f"✗ {', '.join(twin.kinds) or twin.text[:60]}" if twin.found else "passed"
    found = "✓" if judged.found else "✗"
    cells = (judged.name, CASES[judged.name].source, found, right, says, f"{judged.seconds:.0f}", passed)
    return f"| {' | '.join(cells)} |"


def summary(found: Sequence[JudgedProgram], sound: Sequence[JudgedProgram]) -> str:
    """Return the counts in a sentence."""
    seconds = sorted(judged.seconds for judged in (*found, *sound))
    return (
        f"{sum(j.found for j in found)} of {len(found)} faulty programs found; {sum(j.right for j in found)} causes "
        f"right, {sum(j.wrong for j in found)} wrong, {sum(j.found and j.unknown for j in found)} not known; "
        f"{sum(j.found for j in sound)} alarms on {len(sound)} sound twins. A verdict takes "
        f"{seconds[len(seconds) // 2]:.0f} s in the middle, {seconds[-1]:.0f} s at most."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    pairs = []
    for name in given.only or CASES:
        pairs.append((judge(name, sound=False), judge(name, sound=True)))
        print(row(*pairs[-1]), flush=True)
    command = "python -m benchmarks.silent_bugs.programs --out benchmarks/results/silent_bugs_programs.md"
    words = [
        summary([found for found, _ in pairs], [twin for _, twin in pairs]), "",
        "Each program is a script of plain PyTorch on two ranks of gloo (`program.py`, `cases.py`), our own writing,",
        "in which a fault that was reported elsewhere is planted by a few lines; without these it is the twin. Which",
        "causes are right was written together with verify, which has seen them all. A cause is right if it is among",
        "the first two that are named. The machine's load is in the seconds.",
    ]  # fmt: skip
    tell(page("Silent bugs in scripts", command, machine(), words, HEADER, [row(*pair) for pair in pairs]), given.out)


if __name__ == "__main__":
    main()
