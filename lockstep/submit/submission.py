"""A run, and the machines that it needs, whatever starts it there.

Tests: tests/submit/test_slurm.py, tests/submit/test_kubernetes.py
"""

import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep.files.paths import is_bucket_url
from lockstep.run_directory.run_mirror import local_folder


@dataclass(frozen=True)
class Submission:
    """Describes a run, and the machines that it needs."""

    config: Path  # the config file
    # the run directory, or the URL of a bucket; one folder that all machines share, unless
    # `checkpoint.format` is `full`
    output_dir: str
    overrides: tuple[str, ...] = ()  # KEY=VALUE, as on the command line
    nodes: int = 1  # number of machines
    processes: int = 1  # ranks per machine
    gpus: int = 0  # GPUs per machine; 0: the CPU
    # variables for every rank (`distributed.env`)
    environment: dict[str, str] = field(default_factory=dict)
    python: str = "python"  # the command that runs Python there
    max_restarts: int = 0  # as for `lockstep train`

    @property
    def name(self) -> str:
        """The run directory's name, in the characters that schedulers accept."""
        text = re.sub(r"[^a-z0-9]+", "-", Path(self.output_dir).name.lower()).strip("-")
        return text[:40].rstrip("-") or "lockstep"

    @property
    def is_in_bucket(self) -> bool:
        """Return whether the run directory is a bucket."""
        return is_bucket_url(self.output_dir)

    @property
    def folder(self) -> Path:
        """The folder of a machine where the run writes its records, in a bucket's place, too."""
        return local_folder(self.output_dir) if self.is_in_bucket else Path(self.output_dir)

    def with_overrides(self, overrides: tuple[str, ...]) -> "Submission":
        """Return the same run with these overrides."""
        return replace(self, overrides=overrides)

    def command(self, config: str, output_dir: str, *rendezvous: str) -> list[str]:
        """Return `python -m lockstep train …` for one machine.

        `rendezvous` are its options to find the others.
        """
        words = [*shlex.split(self.python), "-m", "lockstep", "train", config, *self.overrides]
        words += ["--output-dir", output_dir, "--nproc-per-node", str(self.processes)]
        words += ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        words += ["--resume", "auto"]
        return [*words, *(("--nnodes", str(self.nodes), *rendezvous) if self.nodes > 1 else ())]


class PlainDumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: nothing is written by reference."""
        return True


PlainDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
