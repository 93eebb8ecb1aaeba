"""`lockstep doctor` on real ranks, and its cheap half at the start of a run."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.config import config_from
from lockstep.diagnose import BAD, GOOD, WARN, doctor, verdicts
from lockstep.diagnose.verdicts import code_digest, own_facts
from tests.launch.shared import finish, lockstep, start
from tests.ranks import free_port

TINY = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points"}
training: {max_steps: 2, batch_size: 4, global_batch_size: 8, eval_steps: null}
distributed: {strategy: ddp, device: cpu}
checkpoint: {save_strategy: none}
"""


def test_two_ranks_are_looked_at(tmp_path: Path) -> None:
    """Every line of the list is there; a variable that does nothing is marked; nothing is left
    behind.
    """
    ended = lockstep(
        tmp_path,
        "doctor",
        "--nproc-per-node",
        "2",
        "--json",
        "--output-dir",
        "runs",
        NCCL_TIMEOUT="60",
    )
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["good"] is True
    lines = {line["name"]: line for line in told["lines"]}
    assert set(lines) >= {
        "versions",
        "code",
        "variables",
        "GPUs",
        "open files",
        "shared memory",
        "CPU",
        "disk",
        "own name",
        "rendezvous",
        "ports",
        "clocks",
        "all-reduce",
    }
    assert "torch 2." in lines["versions"]["found"]
    assert "on all 2 ranks" in lines["versions"]["found"]
    assert "NCCL_TIMEOUT does nothing in torch" in lines["variables"]["found"]
    assert lines["variables"]["status"] == "warning"
    assert lines["all-reduce"]["found"].startswith("right on 2 ranks: 4 KiB ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    """And no traceback."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "runs"
    exchange = doctor.RankExchange(dist.HashStore(), 0, 1)
    facts = {"local_rank": 0, "machine": "m", "host": "h", "rank": 0, "disk": None}
    line = next(verdicts.disk([facts | doctor.disk(place, exchange, rank_of_machine=True)]))
    assert (line.status, line.found) == (
        BAD,
        f"the run directory can't be written: Not a directory: {place}",
    )


@pytest.mark.parametrize(
    ("sizes", "machines", "status", "found"),
    [
        ({"strategy": "ddp", "tensor_size": 2}, "aabb", GOOD, "ddp:2*tensor:2"),
        (
            {"strategy": "ddp", "tensor_size": 2},
            "aaabbb",
            WARN,
            "2 ranks that exchange activations in every layer",
        ),
        (
            {"strategy": "ddp", "context_size": 2, "tensor_size": 2},
            "aabb",
            WARN,
            "4 ranks that exchange activations",
        ),
        (
            {"strategy": "ddp", "tensor_size": 3},
            "aabb",
            BAD,
            "tensor_size=3 does not divide the number of ranks, 4",
        ),
    ],
)
def test_axes_that_send_in_every_layer_stay_on_a_machine(
    sizes: dict[str, object], machines: str, status: str, found: str
) -> None:
    config = config_from({f"distributed.{key}": value for key, value in sizes.items()})
    (line,) = doctor.axes(config, [{"machine": machine} for machine in machines])
    assert line.status == status
    assert found in line.found


def test_one_process_says_so_and_the_lines_are_for_people(tmp_path: Path) -> None:
    ended = lockstep(tmp_path, "doctor", "--output-dir", str(tmp_path))
    assert ended.code == 0, ended.err
    assert ended.out.startswith("lockstep: doctor: 1 rank(s) on this machine (")
    assert "✓ disk " in ended.out
    assert ended.out.rstrip().splitlines()[-1].startswith("✓ all ")


@pytest.mark.fault(
    "configuration: machines started with different configs",
    "training.learning_rate=1 on one machine of two",
    "every launcher ends with exit code 2 before the first step, naming the ranks that differ",
)
def test_a_different_config_on_one_machine_is_found_at_start(tmp_path: Path) -> None:
    """Each rank would train with its own learning rate, and nobody would know."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    processes = [
        start(
            tmp_path,
            "train",
            "tiny.yaml",
            f"training.learning_rate={rate}",
            *options,
            "--node-rank",
            str(node),
            "--nproc-per-node",
            "1",
            "--output-dir",
            f"runs/{node}",
            OMP_NUM_THREADS="1",
        )
        for node, rate in enumerate(("0.1", "0.2"))
    ]
    for ended in [finish(process, tmp_path) for process in processes]:
        assert ended.code == 2, ended.err
        assert "lockstep: the config differs: " in ended.err
        assert "on rank 1" in ended.err
        assert "start every machine with the same file and the same KEY=VALUE" in ended.err
        assert "Traceback" not in ended.err


def test_the_digest_of_the_code_follows_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "__init__.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_digest(["mine:Net"])
    assert code_digest(["mine:Net"]) == before
    file.write_text("x = 2\n")
    assert code_digest(["mine:Net"]) != before
    assert code_digest([]) != before


def test_text_that_reads_like_a_name_is_no_code() -> None:
    """A prompt, a time of day: Python's own `time` has no file, and `__main__` no place."""
    assert code_digest(["time: 12", "os:path", "__main__:Net", "note: this"]) == code_digest()


def test_a_program_that_hangs_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvidia-smi` does, where a GPU is broken: a run on the others must start all the same."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(verdicts, "_PROGRAM_SECONDS", 0.2)
    assert "driver" not in verdicts.versions()


def test_a_folder_that_cannot_be_is_told_like_one_that_cannot_be_written() -> None:
    found = doctor.disk(Path("x" * 300), doctor.RankExchange(dist.HashStore(), 0, 1), True)
    assert "File name too long" in found["disk_error"]
    assert verdicts.machine_facts(Path("x" * 300))["disk"]["free"] > 0


def test_facts_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only variables of NCCL, gloo and torch travel."""
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    own = own_facts("config")
    assert own["variables"]["NCCL_DEBUG"] == "WARN"
    assert "hush" not in json.dumps(own)
    assert os.environ["HF_TOKEN"] == "hush"


def test_a_run_on_the_cpu_asks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with one GPU its second rank was said to have none."""
    gpu = {"model": "H100", "memory": 80 * 2**30, "uuid": "GPU-1", "peers": True}
    monkeypatch.setattr(verdicts, "visible_gpus", lambda: [gpu])

    def bad(device: str) -> list[str]:
        facts = [
            own_facts(device=device) | {"rank": rank, "local_rank": rank, "local_world_size": 2}
            for rank in range(2)
        ]
        return [line.found for line in verdicts.gpus(facts) if line.status == verdicts.BAD]

    assert any("rank 1 has no GPU of its own" in text for text in bad("auto"))
    assert bad("cpu") == []
