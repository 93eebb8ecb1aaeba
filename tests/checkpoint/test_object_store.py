"""Checkpoints in a bucket, over HTTP to a real server: what a folder promises, a bucket does."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import (
    AsyncSaver,
    DamagedBytesError,
    DamagedError,
    Location,
    ObjectStorage,
    UnreachableError,
    object_store,
)
from lockstep.checkpoint.posix import draft_name
from lockstep.config import Config
from lockstep.config.schema import OBJECT_STORAGE
from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.files import object_client
from lockstep.files.object_client import ObjectClient, run_apart
from tests import bucket
from tests.bucket import Proxy, Request
from tests.checkpoint.shared import CONFIG, assert_same, blank, snapshot
from tests.faults.tiny import Points, events, trainer
from tests.forked import lockstep

bucket.require_servers()

REPOSITORY = Path(__file__).parents[2]
PART = 2048  # bytes


@pytest.fixture
def proxy(bucket_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(object_store, "PART_BYTES", PART)  # files of several parts
    return bucket_proxy


@pytest.fixture
def url(bucket_url: str) -> str:
    return bucket_url


def save(storage: ObjectStorage, step: int, shift: float = 0.0) -> Location:
    saved = checkpoint.save(storage, step, snapshot(shift), config_yaml=CONFIG)
    assert isinstance(saved, Location)
    return saved


def keys(url: str, folder: str) -> list[str]:
    return sorted(ObjectClient(url).below(folder))


@pytest.mark.fault(
    "storage: in a bucket: it has no rename",
    "a checkpoint of several objects is written, some files in several parts",
    "every object is put on the condition that there is none, the commit last of all: nothing is"
    " visible before, nothing is overwritten, and it loads to the same bits",
)
def test_everything_comes_back_and_nothing_is_overwritten(proxy: Proxy, url: str) -> None:
    """Traps: an exclusive write that overwrites (s3fs#973); `latest` that moves before the data."""
    path = save(ObjectStorage(url), 100)
    puts = [request for request in proxy.requests if request.method == "PUT"]
    assert all(request.is_conditional for request in puts)
    assert len({request.target for request in puts}) == len(puts)
    assert puts[-1].target.endswith("/commits/step-00000100")
    assert any(request.target.endswith(".part-00001") for request in puts)
    after = blank(snapshot())
    again = Location(ObjectStorage(url), path.name)  # as another process would see it
    checkpoint.load(again, after)
    assert_same(snapshot(), after)
    assert checkpoint.verify(again) == []
    assert checkpoint.list_checkpoints(ObjectStorage(url)) == [path]
    with again.open("state.json") as stream:
        content = stream.read()
        stream.seek(5)
        assert stream.read(7) == content[5:12]
    with pytest.raises(FileNotFoundError), again.open("no-such-file"):
        pass


def test_a_run_that_resumes_asks_for_each_object_once(
    bucket_proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked to choose, and again to load."""
    proxy = bucket_proxy
    monkeypatch.chdir(tmp_path)
    keep = {"storage": {"name": url}, "save_steps": 100}
    trainer(tmp_path / "first", checkpoint=keep).train(Points())
    newest = ObjectStorage(url).pinned("step-00000012")
    named = trainer(tmp_path / "second", checkpoint={"resume": url})
    resumed = trainer(tmp_path / "first", checkpoint=keep)
    for resume in (lambda: resumed.resume("auto"), lambda: named.load_checkpoint(url)):
        proxy.reset()
        resume()
        asked = Counter(
            request.target
            for request in proxy.requests
            if f"data/{newest}/" in request.target and request.method in ("GET", "HEAD")
        )
        assert len(asked) == 7, "the manifest, and what it lists"
        assert set(asked.values()) == {1}
        others = [r.target for r in proxy.requests if r.target not in asked]
        assert not any("data/step-" in target for target in others)
    assert resumed.step.progress.step == named.step.progress.step == 12


def test_a_run_goes_on_from_an_older_one_where_the_newest_is_damaged(
    proxy: Proxy,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = {"storage": {"name": url}, "save_steps": 10}
    trainer(tmp_path / "run", checkpoint=keep).train(Points())
    newest = ObjectStorage(url).pinned("step-00000012")
    part = next(key for key in keys(url, f"data/{newest}/optimizer") if key.endswith("part-00000"))
    data = bytearray(ObjectClient(url).get(part))
    data[100] ^= 1
    ObjectClient(url).put(part, bytes(data))
    again = trainer(tmp_path / "run", checkpoint=keep)
    again.train(Points())
    file = part.partition(f"{newest}/")[2].removesuffix(".part-00000")
    said = f"passing over {url}/step-00000012: {file}: its checksum is not that of what was written"
    assert said in caplog.text
    assert [e["step"] for e in events(tmp_path / "run", "resume")] == [10]
    assert [e["checkpoint"][:13] for e in events(tmp_path / "run", "set_aside")] == [
        "step-00000012"
    ]
    assert ObjectStorage(url).names()[-2] == "step-00000012", "it was written again"


@pytest.mark.parametrize(
    ("fault", "asked"),
    [
        ("drop", "/model/"),
        ("503", "commits/"),
        pytest.param("503", "/model/", marks=pytest.mark.full),
        pytest.param("drop", "commits/", marks=pytest.mark.full),
        pytest.param("drop", "/manifest.json", marks=pytest.mark.full),
        pytest.param("503", "/manifest.json", marks=pytest.mark.full),
    ],
)
@pytest.mark.fault(
    "storage: in a bucket: the service is away while a run resumes",
    "for longer than `retry_seconds`, from the choice of the checkpoint on, or from its load on",
    "one error; nothing is loaded or set aside, and the same command goes on from the newest"
    " checkpoint when the service is back",
)
def test_a_run_waits_for_no_older_checkpoint_of_a_bucket(
    proxy: Proxy,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    asked: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = {"storage": {"name": url, "args": {"retry_seconds": 1}}, "save_steps": 10}
    trainer(tmp_path / "run", checkpoint=keep).train(Points())

    def plan(request: Request) -> str | None:
        is_asked = request.method == "GET" and asked in request.target and ".tmp-" in request.target
        is_asked |= asked == "commits/" and "commits/step-00000012" in request.target
        return fault if is_asked and "step-00000010" not in request.target else None

    proxy.plan = plan
    again = trainer(tmp_path / "run", checkpoint=keep)
    before = {name: tensor.clone() for name, tensor in again.step.placed.kept().items()}
    with pytest.raises(UnreachableError, match="may be whole"):
        again.resume("auto")
    assert all(tensor.equal(before[name]) for name, tensor in again.step.placed.kept().items())
    assert not events(tmp_path / "run", "set_aside")
    assert "passing over" not in caplog.text
    proxy.reset()
    assert ObjectStorage(url).names() == ["step-00000010", "step-00000012"]
    resumed = trainer(tmp_path / "run", checkpoint=keep)
    resumed.resume("auto")
    assert resumed.step.progress.step == 12


def test_an_object_that_is_cut_short_is_damaged(proxy: Proxy, url: str) -> None:
    """A service answers with an error that is asked for bytes after the end of an object."""
    storage = ObjectStorage(url)
    path = save(storage, 1)
    file = "model/__0_0.distcp"
    part = f"data/{storage.pinned(path.name)}/{file}.part-00000"
    data = ObjectClient(url).get(part)
    for cut in (data[:-1], b""):
        ObjectClient(url).put(part, cut)
        again = Location(ObjectStorage(url), path.name)
        assert checkpoint.verify(again)[0].startswith(f"{file}: ")
        with again.open(file) as stream:
            stream.seek(len(data) - 1)
            with pytest.raises(DamagedBytesError):
                stream.read(1)
        with pytest.raises(DamagedError):
            checkpoint.load(again, blank(snapshot()))


def test_only_ranges_that_are_needed_are_read(proxy: Proxy, url: str) -> None:
    storage = ObjectStorage(url)
    path = save(storage, 1)
    size = path.size("model/__0_0.distcp")
    proxy.reset()
    with storage.open(path.name, "model/__0_0.distcp") as stream:
        stream.seek(size - 10)
        assert len(stream.read(10)) == 10
    read = [request.target for request in proxy.requests if ".part-" in request.target]
    assert {target.rpartition("-")[2] for target in read} == {f"{(size - 10) // PART:05d}"}


@pytest.mark.fault(
    "storage: in a bucket: a second writer of the same step",
    "two runs that do not know of each other commit to one prefix",
    "one of them wins, the other is told; nothing of the winner's is changed",
)
def test_a_second_writer_is_told(proxy: Proxy, url: str) -> None:
    first = ObjectStorage(url)
    second = ObjectStorage(url)
    late = second.begin("step-00000001")
    digest = checkpoint.digest(save(first, 1))
    with pytest.raises(FileExistsError):
        second.commit(late, "step-00000001", b"another")
    assert checkpoint.digest(Location(second, "step-00000001")) == digest
    with pytest.raises(UsageError, match="never overwritten"):
        save(second, 1, shift=1.0)


PASSING = ("drop", "lose", "truncate", "duplicate", "delay", "500", "503")


@pytest.mark.full
@pytest.mark.parametrize("faults", [PASSING, *((fault,) for fault in PASSING)])
@pytest.mark.fault(
    "storage: in a bucket: the link or the service fails for a moment",
    "every fourth request is dropped, delayed, sent twice, answered with 500 or 503, or its answer"
    " is lost or cut",
    "requests are tried again; one that had succeeded unheard is recognised; what is committed and"
    " what is loaded has the same bits",
)
def test_a_fault_now_and_then_changes_nothing(
    proxy: Proxy, url: str, faults: tuple[str, ...]
) -> None:
    proxy.plan = lambda request: (
        None if request.number % 4 else faults[request.number // 4 % len(faults)]
    )
    path = save(ObjectStorage(url), 1)
    after = blank(snapshot())
    checkpoint.load(Location(ObjectStorage(url), path.name), after)
    assert_same(snapshot(), after)
    assert len(proxy.requests) > 4 * len(faults)


class Deaths:
    """Saves to one prefix while the service dies, again and again.

    A round lists what is there: the objects of earlier checkpoints, and when they were put, do not
    change. All bits are read once, at the end.
    """

    def __init__(self, proxy: Proxy, url: str) -> None:
        self._proxy = proxy
        self._url = url
        self._committed: list[str] = []
        self._listed: dict[str, float] = {}  # their objects, and when these were put

    def dies_after(self, count: int) -> None:
        """Save while the service dies after so many requests; look when it is back."""
        step = len(self._committed) + 1
        name = f"step-{step:08d}"
        self._proxy.reset()
        self._proxy.plan = lambda request: "drop" if request.number >= count else None
        error: LockstepError | None = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_client, "RETRIES", 1)  # by their number, not by a time
            storage = ObjectStorage(self._url)
        try:
            save(storage, step, shift=float(step))
        except LockstepError as raised:
            error = raised
        self._proxy.reset()
        assert bucket.SECRET not in str(error)
        again = ObjectStorage(self._url)
        found = again.names()
        # the answer to the commit may be what was lost: then there is one although it failed
        assert found in (self._committed, [*self._committed, name])
        assert error is not None or name in found
        again.sweep()
        listed = ObjectClient(self._url).below("")
        assert self._listed.items() <= listed.items()
        left = {key.split("/")[1].partition(".tmp-")[0] for key in listed if key[:5] == "data/"}
        assert left <= {*found, name}
        if name in found:
            self._committed.append(name)
            draft = json.loads(ObjectClient(self._url).get(f"commits/{name}"))["draft"]
            own = (f"commits/{name}", f"data/{draft}/")
            self._listed |= {key: put for key, put in listed.items() if key.startswith(own)}

    def nothing_is_lost(self) -> int:
        """Read every checkpoint and compare it with what was saved; return their number."""
        storage = ObjectStorage(self._url)
        assert storage.names() == self._committed
        for step, name in enumerate(self._committed, 1):
            saved = snapshot(float(step))
            after = blank(saved)
            checkpoint.load(Location(storage, name), after)
            assert_same(saved, after)
        return len(self._committed)


@pytest.fixture
def deaths(proxy: Proxy, url: str) -> Deaths:
    return Deaths(proxy, url)


@pytest.mark.fault(
    "storage: in a bucket: the service dies in the middle of a save, for good",
    "from some request on no connection is answered",
    "the save ends in one error without credentials; older checkpoints are whole, the new one is"
    " whole or invisible, and what was left is swept",
)
def test_a_service_that_dies_loses_nothing(deaths: Deaths) -> None:
    for count in (10_000, 3, 17):  # the first is never reached: an older checkpoint
        deaths.dies_after(count)
    assert deaths.nothing_is_lost() >= 1


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_service_that_dies_a_hundred_times_loses_nothing(proxy: Proxy, url: str) -> None:
    rounds = random.Random(0)
    committed = 0
    for part in range(5):  # in prefixes of their own: each round lists what is there
        deaths = Deaths(proxy, f"{url}-{part}")
        for _ in range(20):  # a save that is not disturbed takes some seventy requests
            deaths.dies_after(rounds.randrange(80))
        committed += deaths.nothing_is_lost()
    print(f"100 deaths, {committed} checkpoints committed and none lost")
    assert 10 <= committed <= 90


def test_drafts_of_dead_writers_are_swept_and_no_others(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url)
    path = save(storage, 1)
    mine = storage.begin("step-00000002")
    client = ObjectClient(url)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = draft_name("step-00000002", pid=ended.pid)
    elsewhere = draft_name("step-00000002", host="another-host")
    for draft in (dead, elsewhere):
        client.put_new(f"data/{draft}/.begun", b"")
        client.put_new(f"data/{draft}/model/__0_0.distcp.part-00000", b"unfinished")
    assert storage.sweep() == [dead]
    assert not keys(url, f"data/{dead}")
    assert checkpoint.verify(path) == []
    storage.delete(mine)
    assert storage.sweep() == []
    monkeypatch.setattr(object_store, "ABANDONED_SECONDS", -3600.0)
    assert storage.sweep() == [elsewhere]
    assert checkpoint.verify(path) == []


@pytest.mark.fault(
    "storage: in a bucket: a listing that is late",
    "it lacks what was just committed, or has what was just deleted",
    "what is committed is not swept, what is deleted is not resumed from: objects are asked for by"
    " their names before a listing is believed",
)
def test_a_late_listing_is_not_believed(proxy: Proxy, url: str) -> None:
    """Trap: a stale listing (marin#1632)."""
    if bucket.SCHEME == "az":
        pytest.skip("the empty listing that the proxy answers with is worded as S3 and Google do")
    storage = ObjectStorage(url)
    path = save(storage, 1)
    nothing = "<ListBucketResult><Name>team</Name></ListBucketResult>"

    def without_commits(request: Request) -> tuple[int, str] | None:
        listed = request.method == "GET" and "list-type=2" in request.target
        return (200, nothing) if listed and "commits" in request.target else None

    proxy.plan = without_commits
    assert storage.names() == []
    assert ObjectStorage(url).sweep() == []
    with pytest.raises(UsageError, match="never overwritten"):
        save(storage, 1)
    proxy.reset()
    assert checkpoint.verify(path) == []
    prefix = url.removeprefix(f"{bucket.SCHEME}://team/")
    listing = (
        f"<ListBucketResult><Name>team</Name><Prefix>{prefix}/commits/</Prefix><Contents><Key>"
        f"{prefix}/commits/step-00000001</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        "<ETag>x</ETag><Size>1</Size></Contents></ListBucketResult>"
    )
    storage.delete(path.name)
    proxy.plan = lambda request: (200, listing) if "list-type=2" in request.target else None
    assert storage.names() == []


def test_a_checkpoint_is_moved_and_deleted(proxy: Proxy, url: str) -> None:
    storage = ObjectStorage(url)
    path = save(storage, 1)
    digest = checkpoint.digest(path)
    storage.move("step-00000001", "step-00000001.aside-0a0a0a0a")
    assert storage.names() == ["step-00000001.aside-0a0a0a0a"]
    moved = save(storage, 1, shift=1.0)
    assert checkpoint.digest(moved) != digest
    storage.delete("step-00000001.aside-0a0a0a0a")
    assert storage.names() == ["step-00000001"]
    assert checkpoint.verify(moved) == []
    storage.delete("step-00000001")
    assert keys(url, "") == []


def test_an_object_that_is_gone_keeps_no_other_from_deletion(proxy: Proxy, url: str) -> None:
    """Services without a request for many answer for each; the first that is gone ended it all."""
    client = ObjectClient(url)
    names = [f"x/{number:02d}" for number in range(24)]
    for name in names[2::3]:
        client.put(name, b"there")
    client.delete(names)
    assert keys(url, "") == []


def test_a_tensor_that_changes_under_a_background_save_does_not(proxy: Proxy, url: str) -> None:
    """Trap: a CPU tensor changed under an async save (pytorch#144657)."""
    storage = ObjectStorage(url)
    proxy.plan = lambda request: "delay" if request.number < 3 else None
    state = snapshot()
    saver = AsyncSaver()
    saver.save(storage, 1, state, config_yaml=CONFIG)
    for tensor in state.model.values():
        tensor.zero_()
    path = saver.wait()
    assert path is not None
    after = blank(snapshot())
    checkpoint.load(path, after)
    assert_same(snapshot(), after)


@pytest.mark.fault(
    "storage: in a bucket: credentials",
    "they stand in the environment of a run whose saves fail",
    "nothing that the run writes or says has them, and a config that would is refused",
)
def test_a_run_keeps_its_checkpoints_in_a_bucket(
    proxy: Proxy,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Trap: a scheme stripped so that reads fall to the local disk (Curator PR 1798)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(object_store, "PART_BYTES", 4096)
    keep = {
        "storage": {"name": url, "args": {"retry_seconds": 1}},
        "save_steps": 4,
        "save_total_limit": 1,
    }
    run = trainer(tmp_path / "run", checkpoint=keep)
    told = f"<Error><Code>SlowDown</Code><Message>not with {bucket.SECRET}</Message></Error>"
    proxy.plan = lambda request: (
        (400, told) if request.method == "PUT" and "data/step-00000004" in request.target else None
    )
    run.train(Points())
    assert "not with ***" in events(tmp_path / "run", "save_failed")[0]["reason"]
    storage = ObjectStorage(url)
    assert storage.names() == ["step-00000012"]
    again = trainer(tmp_path / "run", checkpoint=keep)
    assert again.resume("auto") == Location(storage, "step-00000012")
    assert again.step.progress.step == 12
    assert os.listdir(tmp_path) == ["run"]
    assert not (tmp_path / "run/checkpoints").exists()
    written = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert written
    assert not any(bucket.SECRET.encode() in file.read_bytes() for file in written)
    client = ObjectClient(url)
    assert not any(bucket.SECRET.encode() in client.get(key) for key in keys(url, ""))
    assert bucket.SECRET not in "".join(capfd.readouterr())


@pytest.mark.fault(
    "storage: in a bucket: the service is away for a minute",
    "each connection is dropped, from the first request of a background save on",
    "training takes its steps meanwhile; the save is tried again until the service is back, and no"
    " checkpoint is lost",
)
@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.full)])
def test_a_service_that_is_away_stalls_nothing_but_the_save(
    proxy: Proxy, url: str, tmp_path: Path, seconds: int
) -> None:
    """It comes back when training has taken step 7, the last before it waits for the save, and so
    many seconds have passed.
    """
    keep = {"storage": {"name": url, "args": {}}, "async": True, "save_steps": 4}
    run = trainer(tmp_path / "run", checkpoint=keep)
    away_since: list[float] = []
    dropped: list[Request] = []

    def plan(request: Request) -> str | None:
        done = run.step.progress.step
        if done >= 4 and not away_since:
            away_since.append(time.monotonic())
        if not away_since:
            return None
        # at least one: on a busy machine the save may begin after step 7
        if dropped and done >= 7 and time.monotonic() - away_since[0] >= seconds:
            return None
        dropped.append(request)
        return "drop"

    proxy.plan = plan
    run.train(Points())
    assert dropped
    assert not events(tmp_path / "run", "save_failed")
    steps = [Location(ObjectStorage(url), f"step-{step:08d}") for step in (4, 8, 12)]
    assert [checkpoint.verify(path) for path in steps] == [[], [], []]


def test_what_is_done_apart_and_fails_is_told() -> None:
    def refuse() -> None:
        raise OSError("the disk is full")

    with pytest.raises(RunError, match=r"a look has failed\n.*the disk is full"):
        run_apart(refuse, "a look")
    with pytest.raises(RunError, match=r"a look has failed\n.*has died"):
        run_apart(lambda: os._exit(3), "a look")


def test_credentials_in_a_config_are_refused() -> None:
    with pytest.raises(
        UsageError, match="secret_access_key is a credential, and a config is saved"
    ):
        ObjectClient("s3://team/x", secret_access_key="abc")
    with pytest.raises(UsageError) as caught:
        ObjectClient("s3://me:abcdef@team/x")
    assert "abcdef" not in str(caught.value)


def test_a_url_is_short_for_a_storage() -> None:
    for given in ("s3://team/x", {"name": "s3://team/x", "args": {"region": "eu-west-1"}}):
        config = Config.model_validate({"checkpoint": {"storage": given}})
        storage = config.checkpoint.storage
        assert storage is not None
        assert storage.name == OBJECT_STORAGE
        assert storage.args["url"] == "s3://team/x"


REFUSALS = [
    (403, "InvalidAccessKeyId", "the credentials are not accepted"),
    (403, "SignatureDoesNotMatch", "the credentials are not accepted"),
    (400, "ExpiredToken", "the credentials are not accepted"),
    (404, "NoSuchBucket", "there is no such bucket"),
    (403, "AccessDenied", "lack a right"),
    (301, "PermanentRedirect", "in another region"),
    (400, "AuthorizationHeaderMalformed", "in another region"),
    (403, "RequestTimeTooSkewed", "the clock of this machine is off"),
    (403, "AuthenticationFailed", "the credentials are not accepted"),
    (404, "ContainerNotFound", "there is no such bucket"),
    (403, "AuthorizationFailure", "lack a right"),
]


@pytest.mark.parametrize(("status", "code", "said"), REFUSALS)
@pytest.mark.fault(
    "storage: in a bucket: wrong credentials, no right, no such bucket, another region or a wrong"
    " clock",
    "the service answers the first put as it documents it",
    "refused before ranks start, with exit code 2, in one error that says which it is and what to"
    " do",
)
def test_what_a_service_refuses_is_told_at_start(
    proxy: Proxy, url: str, status: int, code: str, said: str
) -> None:
    text = f"<Error><Code>{code}</Code><Message>As documented.</Message></Error>"
    proxy.plan = lambda request: (status, text) if request.method == "PUT" else None
    with pytest.raises(UsageError, match=said) as caught:
        ObjectStorage(url, retry_seconds=2).check()
    assert caught.value.fix
    assert bucket.SECRET not in str(caught.value)


@pytest.mark.fault(
    "storage: in a bucket: a service without conditional writes",
    "it overwrites what it was asked to create",
    "found by a probe at start, and refused: a second writer could not be told",
)
def test_a_service_without_conditional_puts_is_refused(proxy: Proxy, url: str) -> None:
    if bucket.SCHEME == "az":
        pytest.skip("the condition is signed there, and can't be left out by a proxy")
    ObjectStorage(url).check()
    assert keys(url, "") == []
    proxy.plan = lambda request: "unconditional"
    with pytest.raises(UsageError, match="overwrites an object that it was asked to create"):
        ObjectStorage(url).check()


def test_the_launcher_refuses_a_missing_bucket_before_ranks_start(
    proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "train.yaml").write_text(
        'model: {name: "tests.faults.tiny:Net"}\n'
        'data: {name: "tests.faults.tiny:Points"}\n'
        "training: {max_steps: 2, batch_size: 4}\n"
        "distributed: {device: cpu, strategy: ddp}\n"
        f"checkpoint: {{storage: {bucket.SCHEME}://no-such-bucket/x}}\n"
    )
    command = ["train", "train.yaml", "--nproc-per-node", "2"]
    ended = lockstep(command, tmp_path, {**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("there is no such bucket") == 1
    assert bucket.SECRET not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_many_parts_are_never_in_memory_together(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is faster than the link waits for it."""
    most = 0
    send = object_store._Upload._send

    def counted(upload: object_store._Upload) -> None:
        nonlocal most
        send(upload)
        most = max(most, len(upload._pending))

    monkeypatch.setattr(object_store._Upload, "_send", counted)
    storage = ObjectStorage(url)
    draft = storage.begin("step-00000001")
    data = torch.arange(6 * PART, dtype=torch.int16).numpy().tobytes()
    with storage.write(draft, "x") as stream:
        stream.write(data)
    assert most == object_store._IN_FLIGHT
    with storage.open(draft, "x") as back:
        assert back.read() == data
