"""Measures how long it takes until a rank that was killed or stopped is named.

A killed rank is in the middle of collectives.

    python -m benchmarks.failure_times [--write] [--trials 5] [--ranks 2]

    killed, script       `lockstep launch` of a script that does nothing but all-reduces; SIGKILL to
                         a rank
    killed, training     `lockstep train`; SIGKILL to a rank
    stopped, training    the same; SIGSTOP to a rank: seconds beyond the watch time, which is how
                         long a step may take

The clock runs from the signal to the launcher's line. Goals: 5 s each; the first rank that the
launcher names is the one that got the signal, and of a stopped one the line of code is given.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.page import RESULTS, machine, page, tell

ROOT = Path(__file__).parent.parent
_WATCH = 4.0
_TRAINING = f"""
model: {{name: "tests.faults.tiny:Net"}}
data: {{name: "tests.faults.tiny:Points", args: {{seconds: 0.01}}}}
training: {{max_steps: 100000, batch_size: 4, global_batch_size: 8, eval_steps: null}}
distributed: {{device: cpu, hang: {{factor: 2, seconds: {_WATCH}}}}}
checkpoint: {{save_strategy: none}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""
_SCRIPT = """
import os, torch, lockstep
lockstep.setup()
value = torch.ones(2**20)
for number in range(10**9):
    lockstep.all_reduce(value, "max")
    if number == 10:
        open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
"""


class Run:
    """A launcher whose ranks are under way."""

    def __init__(self, folder: Path, ranks: int, *, training: bool) -> None:
        self.folder = folder
        self.ranks = ranks
        self.training = training
        (folder / "tiny.yaml").write_text(_TRAINING)
        (folder / "script.py").write_text(_SCRIPT)
        what = ["train", "tiny.yaml"] if training else ["launch"]
        options = [
            "--nproc-per-node",
            str(ranks),
            "--output-dir",
            "run",
            *([] if training else ["script.py"]),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *what, *options],
            cwd=folder,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def pids(self) -> dict[int, int]:
        """Of the ranks, once they are all in the middle of it."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            found = self._of_training() if self.training else self._of_script()
            if len(found) == self.ranks:
                return found
            time.sleep(0.05)
        raise RuntimeError(f"the ranks did not come: {self.process.communicate()}")

    def _of_script(self) -> dict[int, int]:
        files = [path for path in self.folder.glob("pid-*") if path.read_text()]
        return {int(path.name[4:]): int(path.read_text()) for path in files}

    def _of_training(self) -> dict[int, int]:
        metrics = self.folder / "run/metrics.jsonl"
        events = self.folder / "run/events.jsonl"
        if not metrics.exists() or metrics.read_text().count("\n") < 20:
            return {}
        starts = [json.loads(line) for line in events.read_text().splitlines() if '"start"' in line]
        return {rank["rank"]: rank["process"] for rank in starts[-1]["ranks"]}

    def named(self) -> tuple[float, str]:
        """When the launcher named a rank, and the whole of what it said."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "failed" in line:
                return time.monotonic(), line + self.process.stderr.read()
        raise RuntimeError("the launcher named no rank")


def trial(ranks: int, number: int, *, training: bool) -> float:
    """Seconds from the signal to the line; beyond the watch time, where the rank was stopped."""
    with tempfile.TemporaryDirectory(prefix="lockstep-failure-") as name:
        run = Run(Path(name), ranks, training=training)
        pids: dict[int, int] = {}
        try:
            pids = run.pids()
            victim = random.choice(sorted(pids))
            time.sleep(random.uniform(0.0, 0.5))
            sent = time.monotonic()
            os.kill(pids[victim], number)
            seen, text = run.named()
        finally:
            run.process.kill()
            run.process.wait()
    found = re.search(r"rank (\d+) of \d+ failed", text)
    assert found is not None, text
    assert int(found[1]) == victim, f"rank {victim} got the signal: {text}"
    assert number == signal.SIGKILL or re.search(r"where: host \S+, \S+:\d+ in ", text), text
    return seen - sent - (_WATCH if number == signal.SIGSTOP else 0.0)


CASES = {
    "killed, script": (signal.SIGKILL, False),
    "killed, training": (signal.SIGKILL, True),
    "stopped, training": (signal.SIGSTOP, True),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    rows = []
    good = True
    for case, (number, training) in CASES.items():
        found = [trial(given.ranks, number, training=training) for _ in range(given.trials)]
        good &= max(found) <= 5.0
        rows.append(f"| {case} | {median(found):.2f} | {min(found):.2f} | {max(found):.2f} |")
        print(rows[-1], flush=True)
    text = page(
        "How long until the rank that failed is named",
        f"python -m benchmarks.failure_times --write --trials {given.trials} --ranks {given.ranks}",
        machine(),
        [
            (
                "Seconds from the signal to the launcher's line, which in every trial named the"
                " rank that got it, and"
            ),
            (
                "first; of a stopped one its line of code too, and the seconds are those beyond the"
                " watch time"
            ),
            f"({_WATCH:g} s here). Goal: 5 s.",
        ],
        "| what | median | least | most |",
        rows,
    )
    tell(text, RESULTS / "failure_times.md" if given.write else None)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
