"""Turns a run into a job of Slurm or of Kubernetes, which starts one launcher per machine. Nothing here loads torch."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import RunError, UsageError


@dataclass(frozen=True)
class Submission:
    """A run, and the machines that it needs."""

    config: Path  # the config file
    output_dir: Path  # the run directory; one folder that all machines share, unless `checkpoint.format` is `full`
    overrides: tuple[str, ...] = ()  # KEY=VALUE, as on the command line
    nodes: int = 1  # number of machines
    processes: int = 1  # ranks per machine
    gpus: int = 0  # GPUs per machine; 0: the CPU
    environment: dict[str, str] = field(default_factory=dict)  # variables for every rank (`distributed.env`)
    python: str = "python"  # the command that runs Python there
    max_restarts: int = 0  # as for `lockstep train`

    @property
    def name(self) -> str:
        """The run directory's name, in the characters that schedulers accept."""
        text = re.sub(r"[^a-z0-9]+", "-", self.output_dir.name.lower()).strip("-")
        return text[:40].rstrip("-") or "lockstep"

    def command(self, config: str, output_dir: str, *rendezvous: str) -> list[str]:
        """Return `python -m lockstep train …` for one machine; `rendezvous` are its options to find the others."""
        words = [*shlex.split(self.python), "-m", "lockstep", "train", config, *self.overrides]
        words += ["--output-dir", output_dir, "--nproc-per-node", str(self.processes)]
        words += ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        return [*words, "--resume", "auto", *(("--nnodes", str(self.nodes), *rendezvous) if self.nodes > 1 else ())]


def run_scheduler(command: Sequence[str], text: str, what: str) -> str:
    """Run a scheduler's program with `text` as input, and return its output. Raises: it is missing, or failed."""
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]} is not on this machine", fix=f"--dry-run prints {what}; submit it where {command[0]} is"
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{command[0]} failed for {what}", why=done.stderr.strip(), fix="--dry-run prints it")
    return done.stdout.strip()
