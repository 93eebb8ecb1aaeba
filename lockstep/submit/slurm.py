"""A run as a job of Slurm: a batch script that people can read, and sbatch.

Source: slurm.schedmd.com/sbatch.html (options), slurm.schedmd.com/scontrol.html (requeue); containers as pyxis takes
them (github.com/NVIDIA/pyxis).
"""

import shlex
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.submit.submission import Submission, hand_over


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm knows.

    Attributes:
        options: options of sbatch by name: partition, account, time, mem, cpus-per-task, …
        extra: further `#SBATCH` lines, without that word.
        setup: shell lines before the start: `module load …`, `source …/activate`.
        container: an image; started by pyxis (srun --container-image), or by apptainer where it ends in .sif.
        mounts: HOST:CONTAINER folders for it; the working folder is always there.
        signal_seconds: how long before the time limit ranks are told to save.
    """

    options: dict[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    signal_seconds: int = 120


def script(job: Submission, slurm: SlurmOptions) -> str:
    """The batch script.

    Raises:
        UsageError: an option holds a line break.
    """
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
    meeting = ('"$head:$port"', '"$SLURM_JOB_ID"')
    words = [shlex.quote(word) for word in job.command(str(job.config), str(job.output_dir), "--rdzv-endpoint")]
    if job.nodes > 1:
        words += [meeting[0], "--rdzv-id", meeting[1]]
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
    """Hand the script to sbatch; returns what it printed, with the job's number."""
    Path(job.output_dir).mkdir(parents=True, exist_ok=True)  # Slurm writes its log there, and makes no folders
    return hand_over(["sbatch"], script(job, slurm), "the batch script")


def _container(slurm: SlurmOptions) -> tuple[list[str], list[str]]:
    """Options of srun, and the words before the command."""
    if slurm.container is None:
        return [], []
    if slurm.container.endswith(".sif"):
        binds = [word for mount in slurm.mounts for word in ("--bind", mount)]
        return [], ["apptainer", "exec", "--nv", *binds, slurm.container]
    mounts = ",".join([f"{Path.cwd()}:{Path.cwd()}", *slurm.mounts])
    return [f"--container-image={slurm.container}", f"--container-mounts={mounts}",
            f"--container-workdir={Path.cwd()}"], []  # fmt: skip
