"""How much faster several hosts are than one, where computing is sleep. Needs root.

    python -m benchmarks.two_hosts [--write] [--hosts 1,2] [--ranks 2] [--steps 30] [--rate 1gbit]

Hosts are network namespaces on links of a set rate; each runs `lockstep train` with the same
options, as people start it. The global batch is the same on one host and on several, so a step is
the same step, and ideal is its time divided by the number of hosts. Sleeping ranks need no cores:
what is lost to the ideal is Lockstep's, torch's and the link's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.page import RESULTS, machine, page, tell
from tests.hosts import Host, hosts

ROOT = Path(__file__).parent.parent
_WARM = 5  # steps that are not counted
_WIDTH = 256
_CONFIG = """
model: {{name: "benchmarks.sleeping:Sleeper", args: {{milliseconds: {milliseconds}, n_embd: {width}}}}}
data: {{name: "benchmarks.sleeping:SleepSamples", args: {{n_embd: {width}}}}}
training: {{max_steps: {steps}, batch_size: 2, global_batch_size: {batch}, eval_steps: null}}
distributed: {{strategy: ddp, device: cpu}}
checkpoint: {{save_strategy: none}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""


def seconds_a_step(on: list[Host], folder: Path, ranks: int) -> float:
    """Median over the steps that count, of a run on these hosts."""
    run = folder / f"run-{len(on)}"
    options = ["--nproc-per-node", str(ranks), "--output-dir", str(run)]
    if len(on) > 1:
        options += ["--nnodes", str(len(on)), "--rdzv-endpoint", f"{on[0].address}:29500"]
    command = [sys.executable, "-m", "lockstep", "train", str(folder / "sleep.yaml"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*host.command, *command], cwd=ROOT, env=environment) for host in on
    ]
    try:
        codes = [process.wait(600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * len(on), f"the runs ended with {codes}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return median(
        row["step_seconds"] for row in rows if row["step"] > _WARM and "step_seconds" in row
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--hosts", default="1,2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--milliseconds", type=float, default=25.0)
    given = parser.parse_args()
    counts = [int(count) for count in given.hosts.split(",")]
    # two micro-batches of two samples on each rank of the most hosts
    batch = 4 * given.ranks * max(counts)
    found: dict[int, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-two-hosts-") as name,
        hosts(max(counts), given.rate) as made,
    ):
        config = _CONFIG.format(
            milliseconds=given.milliseconds, width=_WIDTH, steps=given.steps, batch=batch
        )
        Path(name, "sleep.yaml").write_text(config)
        for count in counts:
            found[count] = seconds_a_step(made[:count], Path(name), given.ranks)
    rows = []
    for count, seconds in found.items():
        ideal = batch / (count * given.ranks) * given.milliseconds / 1000
        speed_up = found[counts[0]] * counts[0] / seconds
        rows.append(
            f"| {count} | {count * given.ranks} | {seconds:.4f} | {ideal:.4f} | {speed_up:.2f} × | "
            f"{speed_up / count:.0%} |"
        )
        print(rows[-1], flush=True)
    options = (
        f"--hosts {given.hosts} --ranks {given.ranks} --steps {given.steps} --rate {given.rate}"
    )
    text = page(
        "Several hosts against one, with sleeping compute",
        f"python -m benchmarks.two_hosts --write {options}",
        machine(),
        [
            (
                f"ddp, {given.ranks} ranks a host, {given.milliseconds:g} ms a sample, {batch}"
                " samples a step on any"
            ),
            (
                f"number of hosts, gradients of {2 * _WIDTH * _WIDTH * 4 / 1e6:.2f} MB over links"
                f" of {given.rate}, each"
            ),
            f"host a `lockstep train` of its own. Medians over the steps after the first {_WARM}.",
        ],
        "| hosts | ranks | s a step | s that it sleeps | speed-up over one host | of ideal |",
        rows,
    )
    tell(text, RESULTS / "two_hosts.md" if given.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
