"""Hosts whose disks are all the storage there is: folders stand for them, with a server each."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep import checkpoint
from lockstep.checkpoint import HostDisks, SaveOptions, Snapshot, Storage, object_store
from lockstep.checkpoint.host_disk import DiskServer, OtherDisk, OwnDisk
from lockstep.checkpoint.host_disks import DisksClient
from lockstep.config import CheckpointConfig
from lockstep.errors import RunError
from lockstep.run_directory.records import RunDirectory
from tests.checkpoint.places import Disks
from tests.checkpoint.shared import CONFIG, assert_same, blank, known, snapshot
from tests.hosts import Host, hosts, require_root
from tests.ranks import REPOSITORY, free_port, run_ranks


def two_disks(folder: Path, token: str = "secret") -> tuple[DisksClient, OwnDisk, DiskServer]:
    """What a rank of the first host has of two, and the second host's own disk."""
    second = OwnDisk(folder / "second")
    server = DiskServer(second, "127.0.0.1", "secret")
    client = DisksClient(OwnDisk(folder / "first"))
    client.disks.append(OtherDisk("the second host", "127.0.0.1", server.port, token))
    return client, second, server


def test_an_object_is_on_two_disks_and_read_from_either(tmp_path: Path) -> None:
    client, second, server = two_disks(tmp_path)
    client.check()
    assert client.below("commits") == {}
    data = os.urandom(100_000)
    client.put_new("data/draft/model/0", data)
    assert second.read("data/draft/model/0") == data
    client.put_new("data/draft/model/0", data)  # the answer to an earlier try was lost
    with pytest.raises(FileExistsError):
        client.put_new("data/draft/model/0", b"others")
    shutil.rmtree(tmp_path / "first")
    assert client.get("data/draft/model/0") == data
    assert client.get_range("data/draft/model/0", 10, 5) == data[10:15]
    assert client.get_range("data/draft/model/0", 10, 0) == b""
    assert client.size("data/draft/model/0") == len(data)
    assert client.inside("data") == ["draft"]
    assert list(client.below("data")) == ["data/draft/model/0"]
    with pytest.raises(OSError, match="gave 5 of 6 bytes"):
        client.get_range("data/draft/model/0", len(data) - 5, 6)
    client.delete(["data/draft/model/0", "data/none"])
    assert second.below("data") == {}
    assert not (tmp_path / "second/data/draft").exists()
    with pytest.raises(FileNotFoundError):
        client.get("data/draft/model/0")
    server.close()
    client.disks[1] = OtherDisk("the second host", "127.0.0.1", server.port, "secret")
    with pytest.raises(OSError, match="the second host does not answer"):
        client.put_new("data/draft/model/1", b"x")
    with pytest.raises(RunError, match="can't be used"):
        client.check()


@pytest.mark.promise("names below the folder alone, to those who send a word of 128 random bits")
def test_a_server_answers_those_with_the_token_and_names_below_its_folder(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    client, second, server = two_disks(tmp_path, token="another")
    with pytest.raises(OSError, match="not the token"):
        client.put_new("commits/step-00000001", b"x")
    assert second.below("commits") == {}
    known_token = OtherDisk("it", "127.0.0.1", server.port, "secret")
    for key in ("../outside", "data/../../outside", "data//x", "data/a b"):
        with pytest.raises(OSError, match="is not the name of an object"):
            known_token.read(key)
        with pytest.raises(OSError, match="is not the name of an object"):
            known_token.create(key, b"x")
    (tmp_path / "second/data").mkdir(parents=True)
    (tmp_path / "second/data/link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="link"):
        known_token.read("data/link")
    server.close()


def test_what_is_sent_without_the_token_is_not_read(tmp_path: Path) -> None:
    _, _, server = two_disks(tmp_path)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"PUT /data/x HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n")
        assert b"401" in connection.recv(100)  # at once, without the bytes
    server.close()


def hosts_of(folder: Path, rank: int) -> Path:
    """Two ranks a host."""
    return folder / f"host-{rank // 2}"


def sharded(shift: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (4,))
    return {
        name: distribute_tensor(known(name, (8, 4)) + shift, mesh, [Shard(0)])
        for name in ("a", "b", "c")
    }


def on_two_hosts(folder: Path) -> list[str]:
    """Save twice; return what the storage has."""
    rank = int(os.environ["RANK"])
    storage = HostDisks(str(hosts_of(folder, rank)))
    storage.meet()
    assert checkpoint.is_shared(storage)
    for step in (1, 2):
        state = Snapshot(sharded(float(step)), {}, {"step": step})
        checkpoint.save(storage, step, state, config_yaml=CONFIG, options=SaveOptions())
    return sorted(storage.names())


def on_three_ranks_after_a_loss(folder: Path) -> dict[str, Any]:
    """Load on another number of ranks, of which the last is on a host with an empty disk."""
    rank = int(os.environ["RANK"])
    storage = HostDisks(str(folder / ("host-1" if rank < 2 else "new")))
    storage.meet()
    newest = checkpoint.newest(storage)
    assert newest is not None
    mesh = init_device_mesh("cpu", (3,))
    blank = {
        name: distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]) for name in ("a", "b", "c")
    }
    state = checkpoint.load(newest, Snapshot(blank, {}, {}))
    del state
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in blank.items()
    }


def test_a_host_that_is_gone_for_good_takes_nothing_along(tmp_path: Path) -> None:
    names = run_ranks(on_two_hosts, 4, tmp_path)
    assert names == [["step-00000001", "step-00000002"]] * 4
    shutil.rmtree(tmp_path / "host-0")  # rank 0's
    alone = HostDisks(str(tmp_path / "host-1"))
    assert [checkpoint.verify(alone.path(name)) for name in alone.names()] == [[], []]
    for loaded in run_ranks(on_three_ranks_after_a_loss, 3, tmp_path):
        for name, tensor in loaded.items():
            assert torch.equal(tensor, known(name, (8, 4)) + 2.0)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    """The disks of two hosts."""
    made = Disks(tmp_path)
    yield made
    made.close()


def flip(on_disk: Path) -> None:
    data = bytearray(on_disk.read_bytes())
    data[len(data) // 2] ^= 0x10
    on_disk.write_bytes(data)


def cut_short(on_disk: Path) -> None:
    on_disk.write_bytes(on_disk.read_bytes()[:-5])


def lengthen(on_disk: Path) -> None:
    on_disk.write_bytes(on_disk.read_bytes() + b"?")


@pytest.mark.parametrize("harm", [flip, cut_short, lengthen, Path.unlink])
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.fault(
    "storage: on the hosts' own disks: one host's copy of any file is damaged or gone",
    "`checkpoint.storage: disks:FOLDER`; a bit is flipped, the file is cut short or longer",
    "the copy on the next host is taken, and a warning names both: the newest checkpoint is whole;"
    " a damaged copy is written anew on the host whose ranks read it",
)
def test_a_neighbour_s_copy_is_taken_where_one_is_damaged(
    harm: Callable[[Path], None],
    host: int,
    disks: Disks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 2048)  # so that files are of several objects
    path = disks.save(1)
    disks.save(2, shift=1.0)
    there = [one for one in disks.roots[host].rglob("*") if one.is_file()]
    commits = [one for one in there if one.parent.name == "commits"]
    parts = [one for one in there if ".part-" in one.name]
    assert len(commits) == 2
    assert len(parts) > 2
    for on_disk in there:
        harm(on_disk)
    again = disks.directory.inner
    assert checkpoint.verify(path) == []
    found = checkpoint.resume_point(again)
    assert found is not None
    assert found.name == "step-00000002"
    loaded = blank(snapshot())
    checkpoint.load(found, loaded)
    assert_same(snapshot(1.0), loaded)
    said = {one.getMessage() for one in caplog.records if " is damaged on " in one.getMessage()}
    named = {text.partition(" is damaged on ")[0].rpartition(": ")[2] for text in said}
    keys = {one.relative_to(disks.roots[host]).as_posix() for one in [*commits, *parts]}
    # the second host's copies are not looked at where the first one's are whole
    assert (named >= keys) == (host == 0 and harm is not Path.unlink)
    assert not named or host == 0
    if named:
        assert f" is damaged on {disks.roots[0]}: the copy on the disk of the second host is" in (
            min(said)
        )
        shutil.rmtree(disks.roots[1])  # what was damaged is written anew: there are two copies
        whole = HostDisks(str(disks.roots[0]))
        assert [checkpoint.verify(whole.path(name)) for name in whole.names()] == [[], []]


def test_a_copy_that_can_not_be_repaired_is_told_and_read_elsewhere(
    disks: Disks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = disks.save(1)
    flip(next(one for one in disks.roots[0].rglob("*") if one.parent.name == "commits"))

    def refuse(_file: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    assert checkpoint.verify(path) == []
    assert "could not be repaired: [Errno 30] Read-only file system" in caplog.text


def test_what_no_host_has_is_no_checkpoint(tmp_path: Path) -> None:
    """Both copies of a file are damaged or gone: an older checkpoint is taken."""
    storage: Storage = HostDisks(str(tmp_path / "disk"))
    for step in (1, 2):
        checkpoint.save(storage, step, snapshot(), config_yaml=CONFIG, options=SaveOptions())
    (file,) = (tmp_path / "disk/data").glob("step-00000002.*/model/*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found = checkpoint.resume_point(storage)
    assert found is not None
    assert found.name == "step-00000001"


def test_the_key_names_a_folder_of_each_host() -> None:
    """As docs/how_to/checkpoints.md writes it."""
    spec = CheckpointConfig(storage="disks:/scratch/first").storage  # type: ignore[arg-type]
    assert spec is not None
    assert checkpoint.build_storage(spec).__class__ is HostDisks
    assert str(checkpoint.build_storage(spec)) == "disks:/scratch/first"


CONFIG_OF_A_RUN = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points"}
training: {batch_size: 2, global_batch_size: 8}
distributed: {device: cpu, strategy: fsdp}
checkpoint: {save_steps: 10, storage: "disks:disk"}
monitor: {log_steps: 1, sinks: [jsonl]}
"""


def launched(
    hosts: list[Path], steps: int, networks: Mapping[Path, Host] = MappingProxyType({})
) -> list[psutil.Popen]:
    """A launcher of two ranks on each host, whose disk is its working directory; `networks` has the
    namespace of a host that is in one.
    """
    port = free_port()
    first = networks[hosts[0]].address if networks else "127.0.0.1"
    started = []
    for number, host in enumerate(hosts):
        host.mkdir(exist_ok=True)
        (host / "train.yaml").write_text(CONFIG_OF_A_RUN)
        several = ["--nnodes", str(len(hosts)), "--node-rank", str(number)]
        where = ["--master-addr", first, "--master-port", str(port)]
        network = networks.get(host)
        options = ["--output-dir", "run", "--nproc-per-node", str(4 // len(hosts))]
        options += [f"training.max_steps={steps}"]
        options += [*several, *where] if len(hosts) > 1 else []
        started.append(
            psutil.Popen(
                [
                    *([] if network is None else network.command),
                    *(sys.executable, "-m", "lockstep", "train", "train.yaml", *options),
                ],
                cwd=host,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    **({} if network is None else network.environment),
                },
                stdout=(host / "said").open("a"),
                stderr=subprocess.STDOUT,
            )
        )
    return started


def ended(
    hosts: list[Path], steps: int, networks: Mapping[Path, Host] = MappingProxyType({})
) -> str:
    """Train to the end; return the digest."""
    codes = [process.wait() for process in launched(hosts, steps, networks)]
    assert codes == [0] * len(hosts), [(host / "said").read_text() for host in hosts]
    newest = checkpoint.newest(HostDisks(str(hosts[0] / "disk")))
    assert newest is not None
    assert newest.name == f"step-{steps:08d}"
    return checkpoint.digest(newest)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.fault(
    "storage: on the hosts' own disks: a host is gone for good",
    "`checkpoint.storage: disks:FOLDER`; all processes of a host die, and its disk is lost",
    "the hosts that are left, or one with an empty disk in its place, go on from the newest"
    " checkpoint, and end in the bits of a run without interruption",
)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_goes_on_without_a_host(tmp_path: Path, lost: int) -> None:
    without_a_host(tmp_path, lost, {})


@pytest.mark.full
@pytest.mark.root
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lost", [0, 1])
def test_hosts_with_networks_of_their_own_go_on_without_one(tmp_path: Path, lost: int) -> None:
    """They reach each other's disks by the addresses of their network."""
    require_root()
    with hosts(3) as three:
        folders = [tmp_path / name for name in ("host-0", "host-1", "new")]
        without_a_host(tmp_path, lost, dict(zip(folders, three, strict=True)))


def without_a_host(tmp_path: Path, lost: int, networks: Mapping[Path, Host]) -> None:
    """Lose one of two hosts; go on with the other alone, then with a new one."""
    folders = [tmp_path / f"host-{number}" for number in (0, 1)]
    running = launched(folders, 1_000_000, networks)
    disk = HostDisks(str(folders[1 - lost] / "disk"))
    while len(disk.names()) < 2:
        assert all(process.poll() is None for process in running)
        psutil.wait_procs(running, 0.5)
    for process in running:
        for one in [process, *process.children(recursive=True)]:
            one.kill()
    psutil.wait_procs(running)
    shutil.rmtree(folders[lost])
    left = folders[1 - lost]
    reached = max(checkpoint.step_of(name) or 0 for name in disk.names())
    alone = ended([left], reached + 10, networks)
    resumed = [e["step"] for e in RunDirectory(left / "run").read_events() if e["kind"] == "resume"]
    assert resumed == [reached]
    both = [left, tmp_path / "new"] if lost else [tmp_path / "new", left]
    replaced = ended(both, reached + 20, networks)
    straight = [tmp_path / "straight"]
    assert ended(straight, reached + 10) == alone
    assert ended(straight, reached + 20) == replaced
