"""What a job is: one launcher a machine, each starting the ranks of its machine."""

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
    """A run, and where it is to run.

    Attributes:
        config: the config file.
        overrides: KEY=VALUE, as on the command line.
        output_dir: the run directory; it must be one folder that all machines share, or `checkpoint.format: full`.
        nodes: machines.
        processes: ranks a machine.
        gpus: GPUs a machine; 0: the CPU.
        environment: variables for every rank (`distributed.env`).
        python: the command that runs Python there.
    """

    config: Path
    output_dir: Path
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    processes: int = 1
    gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    python: str = "python"
    max_restarts: int = 0

    @property
    def name(self) -> str:
        """The run directory's, as schedulers take it."""
        text = re.sub(r"[^a-z0-9]+", "-", self.output_dir.name.lower()).strip("-")
        return text[:40].rstrip("-") or "lockstep"

    def command(self, config: str, output_dir: str, *meeting: str) -> list[str]:
        """`python -m lockstep train …` on one machine; `meeting` is how it finds the others."""
        words = [*shlex.split(self.python), "-m", "lockstep", "train", config, *self.overrides]
        words += ["--output-dir", output_dir, "--nproc-per-node", str(self.processes)]
        words += ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        return [*words, "--resume", "auto", *(("--nnodes", str(self.nodes), *meeting) if self.nodes > 1 else ())]


def hand_over(command: Sequence[str], text: str, what: str) -> str:
    """Give `text` to a scheduler's program; returns what that printed.

    Raises:
        UsageError: the program is not here.
        RunError: it refused.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]} is not on this machine", fix=f"--dry-run prints {what}; submit it where {command[0]} is"
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{command[0]} refused {what}", why=done.stderr.strip(), fix="--dry-run prints it")
    return done.stdout.strip()
