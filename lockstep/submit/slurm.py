"""Renders a run as a Slurm batch script that people can read, and submits it with sbatch.

Source: slurm.schedmd.com/sbatch.html (options), slurm.schedmd.com/scontrol.html (requeue); container options are those
of pyxis (github.com/NVIDIA/pyxis).
"""

import shlex
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.submit import Submission, run_scheduler


@dataclass(frozen=True)
class SlurmOptions:
    """Options that only Slurm has."""

    # options of sbatch by name: partition, account, time, mem, cpus-per-task, …
    options: dict[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()  # further `#SBATCH` lines, without that word
    setup: tuple[str, ...] = ()  # shell lines before the start: `module load …`, `source …/activate`
    # an image, started by pyxis (srun --container-image), or by apptainer if it ends in .sif
    container: str | None = None
    mounts: tuple[str, ...] = ()  # HOST:CONTAINER folders for the container; the working folder is always mounted
    signal_seconds: int = 120  # how long before the time limit ranks get the signal to save


def script(job: Submission, slurm: SlurmOptions) -> str:
    """Return the batch script. Raises UsageError: an option contains a line break."""
    import jinja2

    for text in (*slurm.options.values(), *slurm.extra, str(job.output_dir)):
        if "\n" in text:
            raise UsageError(
                f"an option of sbatch is one line, not {text!r}",
                where="lockstep submit slurm",
                fix="give each option on its own",
            )
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["quote"] = shlex.quote
    template = environment.from_string(files("lockstep.submit").joinpath("slurm.sh.j2").read_text())
    rendezvous = ('"$head:$port"', '"$SLURM_JOB_ID"')
    words = [shlex.quote(word) for word in job.command(str(job.config), str(job.output_dir), "--rdzv-endpoint")]
    if job.nodes > 1:
        words += [rendezvous[0], "--rdzv-id", rendezvous[1]]
    started, wrapper = _container(slurm)
    return template.render(
        job=job,
        options=slurm.options,
        extra=slurm.extra,
        setup=slurm.setup,
        signal_seconds=slurm.signal_seconds,
        log=f"{job.output_dir}/slurm-%j.out",
        container=started,
        command=" ".join([*map(shlex.quote, wrapper), *words]),
    )


def submit(job: Submission, slurm: SlurmOptions) -> str:
    """Submit the script with sbatch, and return its output, which has the job's number."""
    Path(job.output_dir).mkdir(parents=True, exist_ok=True)  # Slurm writes its log there, but makes no folders
    return run_scheduler(["sbatch"], script(job, slurm), "the batch script")


def _container(slurm: SlurmOptions) -> tuple[list[str], list[str]]:
    """Return the options of srun, and the words before the command."""
    if slurm.container is None:
        return [], []
    if slurm.container.endswith(".sif"):
        binds = [word for mount in slurm.mounts for word in ("--bind", mount)]
        return [], ["apptainer", "exec", "--nv", *binds, slurm.container]
    mounts = ",".join([f"{Path.cwd()}:{Path.cwd()}", *slurm.mounts])
    return [f"--container-image={slurm.container}", f"--container-mounts={mounts}",
            f"--container-workdir={Path.cwd()}"], []  # fmt: skip
