"""Train a small BDH on two ranks, then let it write: `make demo`."""

import shutil
import subprocess
import sys
from pathlib import Path

from lockstep.evaluate.sample import sample
from lockstep.run_directory.records import RunDirectory

HERE = Path(__file__).parent
RUN = RunDirectory(Path("runs/demo"))


def main() -> int:
    shutil.rmtree(RUN.path, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        str(HERE / "demo.yaml"),
        "--nproc-per-node",
        "2",
    ]
    code = subprocess.call([*command, "--output-dir", str(RUN.path)])
    if code:
        return code
    losses = [row["loss"] for row in RUN.read_metrics() if "loss" in row]
    evaluated = [row["eval_loss"] for row in RUN.read_metrics() if "eval_loss" in row]
    print(
        f"\nloss before {losses[0]:.3f}, after {losses[-1]:.3f}; on text that it never saw"
        f" {evaluated[-1]:.3f}"
    )
    print("\nIt now writes:\n")
    print(sample(RUN.path, prompt="The ", num_tokens=240, temperature=0.7))
    print(
        f"\nThe run: {RUN.path}/ (metrics.jsonl, events.jsonl, checkpoints/, logs/, tensorboard/)"
    )
    print(f"Its digest: lockstep checkpoint digest {RUN.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
