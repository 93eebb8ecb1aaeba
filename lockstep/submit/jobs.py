"""What became of a job that was submitted: its state, its output, and its end.

A job is named as `lockstep submit` names it: `slurm:4711`, `kubernetes:job/small-run`,
`ray:raysubmit_xxxx`. Slurm and Ray are asked. For Kubernetes the commands are returned, and not
run.

Tests: tests/submit/test_jobs.py, tests/submit/test_real_slurm.py, tests/submit/test_real_ray.py
"""

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from lockstep.errors import RunError, UsageError
from lockstep.submit import kubernetes, ray_job

VERBS = {
    "status": "print the state of a job",
    "logs": "print what a job has written",
    "cancel": "end a job; its ranks save before, as far as the scheduler lets them",
}
_FORMS = "slurm:NUMBER, kubernetes:job/NAME or ray:ID, as `lockstep submit` prints it"


def run(verb: str, named: str, given: argparse.Namespace) -> str:
    """Do what the verb says with a job; return the text to print."""
    if verb not in VERBS:
        raise UsageError(f"jobs knows no {verb}", where="VERB", fix="write status, logs or cancel")
    scheduler, _, job = named.partition(":")
    if scheduler == "slurm" and re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        return _SLURM[verb](job)
    if scheduler == "ray" and re.fullmatch(r"[A-Za-z0-9_.-]+", job):
        return ray_job.VERBS[verb](job, given)
    kind, _, name = job.partition("/")
    if scheduler == "kubernetes" and kind in kubernetes.KINDS and name:
        return _of_kubernetes(verb, kind, name, given)
    raise UsageError(f"{named} is not the name of a job", where="JOB", fix=f"write {_FORMS}")


def _slurm(*command: str) -> str:
    """Run a program of Slurm, and return its output."""
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]} is not on this machine",
            fix="start the command where Slurm's programs are",
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"Slurm refuses {shlex.join(command)}", why=done.stderr.strip(), fix=_GONE)
    return done.stdout


_GONE = "Slurm forgets a job some minutes after its end; its output is RUN/slurm-NUMBER.out"


def _facts(job: str) -> dict[str, str]:
    """Return what Slurm knows of a job, by its own names."""
    told = _slurm("scontrol", "show", "job", job, "--oneliner")
    # A value may have spaces; a name has none, and follows one.
    return dict(re.findall(r"(?:^|(?<= ))([A-Za-z:/]+)=(.*?)(?= [A-Za-z:/]+=|\s*$)", told, re.M))


def _slurm_status(job: str) -> str:
    facts = _facts(job)
    reason = facts.get("Reason", "None")
    lines = [f"{facts['JobState']}" + f" ({reason})" * (reason != "None")]
    shown = {
        "machines": "NodeList",
        "time": "RunTime",
        "limit": "TimeLimit",
        "requeued": "Restarts",
        "exit code": "ExitCode",
        "output": "StdOut",
    }
    lines += [
        f"{label}: {facts[name]}"
        for label, name in shown.items()
        if facts.get(name, "(null)") != "(null)"
    ]
    return "\n".join(lines)


def _slurm_logs(job: str) -> str:
    path = Path(_facts(job).get("StdOut", ""))
    try:
        return path.read_text(errors="replace").rstrip("\n")
    except FileNotFoundError:
        return f"nothing yet: {path}"


def _slurm_cancel(job: str) -> str:
    _facts(job)  # scancel says nothing of a number that is none
    _slurm("scancel", job)
    return f"slurm:{job} is told to end"


_SLURM = {"status": _slurm_status, "logs": _slurm_logs, "cancel": _slurm_cancel}


def _of_kubernetes(verb: str, kind: str, name: str, given: argparse.Namespace) -> str:
    """Return the commands, which this machine need not be able to run."""
    owner = kubernetes.KINDS[kind]
    label = {
        "job": f"job-name={name}",
        "jobset": f"jobset.sigs.k8s.io/jobset-name={name}",
        "trainjob": f"jobset.sigs.k8s.io/jobset-name={name}",
    }[kind]
    commands = {
        "status": [["get", f"{owner}/{name}"], ["get", "pods", "-l", label]],
        "logs": [["logs", "-l", label, "--prefix", "--tail=-1"]],
        "cancel": [["delete", f"{owner}/{name}"]],
    }[verb]
    where = kubernetes.namespace_options(given)
    lines = [shlex.join(["kubectl", *where, *command]) for command in commands]
    return "\n".join(["# not run: a cluster of Kubernetes is asked by its own program", *lines])
