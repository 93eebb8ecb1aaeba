"""`lockstep jobs` without a scheduler: what names a job, and the commands of Kubernetes."""

import stat
from pathlib import Path

import pytest

from lockstep.cli import main


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["jobs", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "job", "commands"),
    [
        (
            "status",
            "job/small",
            ["kubectl get job/small", "kubectl get pods -l job-name=small"],
        ),
        (
            "logs",
            "jobset/small",
            ["kubectl logs -l jobset.sigs.k8s.io/jobset-name=small --prefix --tail=-1"],
        ),
        ("cancel", "jobset/small", ["kubectl delete jobset.jobset.x-k8s.io/small"]),
        ("cancel", "trainjob/small", ["kubectl delete trainjob/small"]),
    ],
)
def test_kubernetes_is_shown_and_not_run(
    capsys: pytest.CaptureFixture[str], verb: str, job: str, commands: list[str]
) -> None:
    first, *shown = said(capsys, verb, f"kubernetes:{job}").splitlines()
    assert first.startswith("# not run:")
    assert shown == commands
    shown = said(capsys, verb, f"kubernetes:{job}", "--namespace", "team").splitlines()[1:]
    assert shown == [line.replace("kubectl", "kubectl --namespace team") for line in commands]


@pytest.mark.parametrize(
    "job",
    ["4711", "slurm:x", "slurm:", "ray:", "ray:x/y", "kubernetes:pod/x", "kubernetes:x", "bus:3"],
)
def test_what_is_not_the_name_of_a_job(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert main(["jobs", "status", job]) == 2
    assert f"{job} is not the name of a job" in capsys.readouterr().err


def test_another_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "stop", "slurm:1"]) == 2
    assert "jobs knows no stop" in capsys.readouterr().err


_SCONTROL = r"""
case "$3" in 4711) ;; *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; esac
echo "JobId=4711 JobName=small UserId=me(1) JobState=PENDING Reason=Priority Restarts=1 \
RunTime=00:01:00 TimeLimit=UNLIMITED NodeList=(null) ExitCode=0:0 Command=(null) \
WorkDir=$PWD StdErr=$PWD/a b/slurm-4711.out StdOut=$PWD/a b/slurm-4711.out Power="
"""


def test_what_slurm_says_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own names; a value may have spaces."""
    monkeypatch.chdir(tmp_path)
    for name, body in (("scontrol", _SCONTROL), ("scancel", 'echo "$@" > cancelled')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    output = tmp_path / "a b" / "slurm-4711.out"
    assert said(capsys, "status", "slurm:4711").splitlines() == [
        "PENDING (Priority)",
        "time: 00:01:00",
        "limit: UNLIMITED",
        "requeued: 1",
        "exit code: 0:0",
        f"output: {output}",
    ]
    assert said(capsys, "logs", "slurm:4711") == f"nothing yet: {output}\n"
    output.parent.mkdir()
    output.write_text("step 1\nstep 2\n")
    assert said(capsys, "logs", "slurm:4711") == "step 1\nstep 2\n"
    assert said(capsys, "cancel", "slurm:4711") == "slurm:4711 is told to end\n"
    assert (tmp_path / "cancelled").read_text() == "4711\n"
    for verb in ("status", "logs", "cancel"):
        assert main(["jobs", verb, "slurm:4712"]) == 1
        said_no = capsys.readouterr().err
        assert "Slurm refuses scontrol show job 4712" in said_no
        assert "Invalid job id specified" in said_no


def test_no_slurm_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["jobs", "status", "slurm:1"]) == 2
    assert "scontrol is not on this machine" in capsys.readouterr().err
