"""The batch script with which Slurm starts a launcher on each machine of a run.

Sources: slurm.schedmd.com/sbatch.html (options), slurm.schedmd.com/scontrol.html (requeue);
container options are those of pyxis (github.com/NVIDIA/pyxis).

Tests: tests/submit/test_slurm.py, tests/submit/test_real_slurm.py
"""

import argparse
import shlex
from importlib.resources import files
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.submit.submission import Submission

_SBATCH = ("time", "partition", "account", "qos", "cpus-per-task", "mem", "constraint")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only Slurm has."""
    add = parser.add_argument
    for name in _SBATCH:
        add(f"--{name}", help=f"as sbatch's --{name}")
    add(
        "--signal-seconds",
        metavar="N",
        type=int,
        default=120,
        help="save N s before the limit (default: 120)",
    )
    add("--container", metavar="IMAGE", help="by pyxis; a .sif file by apptainer")
    add(
        "--mount",
        metavar="HOST:CONTAINER",
        action="append",
        default=[],
        help="a folder for the container",
    )
    add(
        "--setup",
        metavar="LINE",
        action="append",
        default=[],
        help="a shell line before the start: module load …",
    )
    add(
        "--sbatch",
        metavar="LINE",
        action="append",
        default=[],
        help="a further #SBATCH line: --exclusive",
    )


def batch_script(job: Submission, given: argparse.Namespace) -> str:
    """Return the batch script. Raises UsageError: an option contains a line break."""
    import jinja2

    options = {name: getattr(given, name.replace("-", "_")) for name in _SBATCH}
    options = {name: value for name, value in options.items() if value is not None}
    for text in (*options.values(), *given.sbatch, job.output_dir):
        if "\n" in text:
            raise UsageError(
                f"an option of sbatch is one line, not {text!r}",
                where="lockstep submit slurm",
                fix="give each option on its own",
            )
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["quote"] = shlex.quote
    template = environment.from_string(files("lockstep.submit").joinpath("slurm.sh.j2").read_text())
    words = [
        shlex.quote(word)
        for word in job.command(str(job.config), job.output_dir, "--rdzv-endpoint")
    ]
    if job.nodes > 1:
        words += ['"$head:$port"', "--rdzv-id", '"$SLURM_JOB_ID"']
    started, wrapper = _container(given)
    return template.render(
        job=job,
        options=options,
        extra=given.sbatch,
        setup=given.setup,
        signal_seconds=given.signal_seconds,
        log=f"{job.folder}/slurm-%j.out",
        container=started,
        command=" ".join([*map(shlex.quote, wrapper), *words]),
    )


def _container(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    if given.container is None:
        return [], []
    if given.container.endswith(".sif"):
        binds = [word for mount in given.mount for word in ("--bind", mount)]
        return [], ["apptainer", "exec", "--nv", *binds, given.container]
    mounts = ",".join([f"{Path.cwd()}:{Path.cwd()}", *given.mount])
    return [
        f"--container-image={given.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={Path.cwd()}",
    ], []
