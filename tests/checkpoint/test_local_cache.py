"""A bucket's newest checkpoints are on this machine's disk too, and never believed blindly."""

from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import Location, ObjectStorage
from lockstep.checkpoint.local_cache import KEPT
from lockstep.errors import NoEffectWarning, UsageError
from tests import bucket
from tests.bucket import Proxy
from tests.checkpoint.shared import CONFIG, assert_same, blank, flip, snapshot
from tests.faults.tiny import Points, trainer

bucket.require_servers()


def storage_with(url: str, folder: Path) -> ObjectStorage:
    storage = ObjectStorage(url)
    storage.cache_in(folder)
    return storage


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.distcp"))


def read_from_bucket(proxy: Proxy, storage: ObjectStorage, step: int) -> list[str]:
    """Load a checkpoint, compare its bits, and return the tensor files that the bucket sent."""
    proxy.reset()
    saved = snapshot(float(step))
    after = blank(saved)
    checkpoint.load(Location(storage, f"step-{step:08d}"), after)
    assert_same(saved, after)
    gets = [request.target for request in proxy.requests if request.method == "GET"]
    return sorted({target.partition("/data/")[2] for target in gets if ".distcp" in target})


@pytest.mark.fault(
    "storage: in a bucket: the cache on the machine's disk is damaged, gone or full",
    "`checkpoint.local_cache`; a bit flips there, its disk is full, or a file is deleted",
    "a file that is whole there is not read from the bucket; any other one is, to the same bits; a"
    " save does not fail for it",
)
def test_what_is_whole_here_is_read_here(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    storage = storage_with(bucket_url, cache)
    for step in range(1, KEPT + 3):
        checkpoint.save(storage, step, snapshot(float(step)), config_yaml=CONFIG)
    newest = KEPT + 2
    kept = sorted({path.name[:13] for path in next(cache.iterdir()).iterdir()})
    assert kept == [f"step-{step:08d}" for step in range(2, newest + 1)]  # one may be in writing
    assert not [path for path in cache.rglob("*") if ".tmp-" in path.name and path.is_file()]

    assert read_from_bucket(bucket_proxy, storage_with(bucket_url, cache), newest) == []
    assert len(read_from_bucket(bucket_proxy, storage_with(bucket_url, cache), 1)) == 3

    damaged, missing, *_ = tensor_files(next(cache.iterdir()))[-3:]
    flip(damaged, 100)
    missing.unlink()
    read = read_from_bucket(bucket_proxy, storage_with(bucket_url, cache), newest)
    relative = [path.relative_to(next(cache.iterdir())).as_posix() for path in (damaged, missing)]
    assert read == sorted(relative)
    assert not damaged.exists()
    assert "is damaged: deleted" in caplog.text

    storage.delete(f"step-{newest:08d}")
    assert not [path for path in next(cache.iterdir()).iterdir() if f"{newest:08d}" in path.name]

    occupied = tmp_path / "a-file"
    occupied.write_text("")
    without = storage_with(bucket_url, occupied)
    checkpoint.save(without, 9, snapshot(9.0), config_yaml=CONFIG)
    assert caplog.text.count("local_cache can't be written") == 1
    assert len(read_from_bucket(bucket_proxy, without, 9)) == 3


def test_a_run_fills_its_cache_and_resumes_from_it(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    keep = {"storage": bucket_url, "local_cache": str(tmp_path / "cache"), "save_steps": 6}
    trainer(tmp_path / "run", checkpoint=keep).train(Points())
    bucket_proxy.reset()
    again = trainer(tmp_path / "run", checkpoint=keep)
    assert again.resume("auto") == Location(ObjectStorage(bucket_url), "step-00000012")
    assert not [r for r in bucket_proxy.requests if r.method == "GET" and ".distcp" in r.target]


def test_a_cache_is_for_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"local_cache.* without a bucket"):
        trainer(tmp_path / "run", checkpoint={"local_cache": str(tmp_path / "cache")})
    with pytest.warns(NoEffectWarning, match="local_cache"):
        trainer(None, checkpoint={"local_cache": str(tmp_path / "cache")})  # type: ignore[arg-type]
