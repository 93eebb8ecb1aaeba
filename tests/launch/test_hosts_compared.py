"""Several hosts that have met: they are compared, and train as one machine would."""

import json
import os
from pathlib import Path

import pytest

from tests.hosts import INTERFACE, Host
from tests.launch.on_hosts import PORT, start_on
from tests.launch.shared import finish
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.root
_SMALL = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 17, block_size: 8, dropout: 0.1}}
data: {name: "mydata:Tokens"}
training: {max_steps: 4, batch_size: 2, global_batch_size: 16, eval_steps: null}
distributed: {device: cpu, reproducible: true}
checkpoint: {save_steps: 4}
monitor: {sinks: [jsonl]}
"""
_DATA = """
import torch
from torch.utils.data import Dataset

class Tokens(Dataset):
    deterministic = True
    def __len__(self): return 64
    def __getitem__(self, index):
        ids = torch.arange(index, index + 9) % 17
        return {"input_ids": ids[:-1], "targets": ids[1:]}
"""


_OTHER_VERSIONS = """
import platform, torch
platform.python_version = lambda: "3.12.9"
torch.__version__ = type(torch.__version__)("2.12.1")
"""


@pytest.mark.full
def test_the_doctor_on_three_hosts_of_which_one_has_another_torch(
    four: list[Host], tmp_path: Path
) -> None:
    """Ports both ways, clocks, that the machines do not share the run directory; versions that
    differ, and where.
    """
    processes = []
    for number in (0, 1, 2):
        own = tmp_path / str(number)
        own.mkdir()
        path = f"{own}:{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
        # where Python starts with another version of itself and of torch, as far as one can see
        if number == 2:
            (own / "sitecustomize.py").write_text(_OTHER_VERSIONS)
        processes.append(
            start_on(
                four[number],
                own,
                "doctor",
                "--json",
                "--nnodes",
                "3",
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(number),
                "--master-addr",
                four[0].address,
                PYTHONPATH=path,
            )
        )
    first, second, third = (finish(process, tmp_path) for process in processes)
    assert (first.code, second.code, third.code) == (1, 1, 1), (first.err, second.err, third.err)
    told = json.loads(first.out)["lines"]
    versions = [
        line["found"] for line in told if line["name"] == "versions" and line["status"] == "bad"
    ]
    assert len(versions) == 2, versions
    assert versions[0].endswith("3.12.9 on rank 2 (host2)")
    assert versions[1].endswith("2.12.1 on rank 2 (host2)")
    lines = {line["name"]: line for line in told}
    assert lines["ports"]["found"] == "3 machines reach one another on ephemeral ports (6 ways)"
    assert lines["clocks"]["found"].startswith("within ")
    assert lines["shared folder"]["status"] == "warning"
    assert f"on {INTERFACE}" in lines["rendezvous"]["found"]
    assert "right on 3 ranks" in lines["all-reduce"]["found"]
    assert second.out == third.out == ""


@pytest.mark.full
@pytest.mark.fault(
    "configuration: one host of four has another config",
    "training.learning_rate=1 on the last of four hosts",
    "every launcher ends with exit code 2 before the first step, naming the rank and the host that"
    " differ",
)
def test_four_hosts_of_which_one_has_another_config(four: list[Host], tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(_SMALL)
    (tmp_path / "mydata.py").write_text(_DATA)
    meeting = (
        "--nnodes",
        "4",
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        f"{four[0].address}:{PORT}",
    )
    processes = [
        start_on(
            host,
            tmp_path,
            "train",
            "small.yaml",
            f"training.learning_rate={rate}",
            "--strategy",
            "ddp",
            "--output-dir",
            "runs/x",
            *meeting,
        )
        for host, rate in zip(four, (0.1, 0.1, 0.1, 1), strict=True)
    ]
    for ended in [finish(process, tmp_path, timeout=200) for process in processes]:
        assert ended.code == 2, ended.err
        assert "lockstep: the config differs: " in ended.err
        assert "(host3)" in ended.err
    assert not (tmp_path / "runs/x/metrics.jsonl").exists()


@pytest.mark.full
def test_two_hosts_of_two_ranks_end_in_the_digest_of_one(four: list[Host], tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(_SMALL)
    (tmp_path / "mydata.py").write_text(_DATA)
    common = ("train", "small.yaml", "--output-dir")
    hybrid = ("distributed.strategy=fsdp", "distributed.fsdp.sharding_strategy=hybrid_shard")
    meeting = (
        "--rdzv-endpoint",
        f"{four[0].address}:{PORT}",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
    )
    two = [start_on(host, tmp_path, *common, "runs/two", *hybrid, *meeting) for host in four[:2]]
    ended = [finish(process, tmp_path, timeout=200) for process in two]
    ended.append(
        finish(start_on(four[0], tmp_path, *common, "runs/one", "--strategy", "single"), tmp_path)
    )
    assert [e.code for e in ended] == [0, 0, 0], [e.err for e in ended]
    from lockstep.checkpoint import digest

    digests = {
        name: digest(tmp_path / f"runs/{name}/checkpoints/step-00000004") for name in ("two", "one")
    }
    assert len(set(digests.values())) == 1, digests
