"""`trainer.log`: numbers, texts, images and histograms, in every sink that takes them."""

import struct
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Trainer
from lockstep.config import MonitorConfig
from lockstep.errors import NoEffectWarning, UsageError
from lockstep.monitor import Monitor
from lockstep.monitor.media import Media, sorted_values
from lockstep.report.read import read_run
from lockstep.run_directory.records import RunDirectory

VALUES: dict[str, Any] = {
    "accuracy": torch.tensor(0.75),
    "count": 3,
    "said": "so it <goes>",
    "weights": torch.linspace(-1, 1, 64),
    "digits": torch.rand(3, 1, 4, 5),
    "map": np.eye(6),
}


def pixels(png: bytes) -> np.ndarray[Any, Any]:
    """Read a PNG whose rows are not filtered."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    place = 8
    data = b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    return rows[:, 1:].reshape(height, width, {0: 1, 2: 3}[kind])


def test_values_are_told_apart_by_what_they_are() -> None:
    numbers, media = sorted_values(
        {**VALUES, "colours": torch.zeros(3, 2, 7), "bytes": np.full((2, 2, 3), 200)}
    )
    assert numbers == {"accuracy": 0.75, "count": 3.0}
    assert {name: one.kind for name, one in media.items()} == {
        "said": "text",
        "weights": "histogram",
        "digits": "image",
        "map": "image",
        "colours": "image",
        "bytes": "image",
    }
    assert media["colours"].size == (7, 2)
    assert (pixels(media["bytes"].png) == 200).all()
    expected = (torch.cat(list(VALUES["digits"]), -1)[0].numpy() * 255 + 0.5).astype(np.uint8)
    assert (pixels(media["digits"].png)[..., 0] == expected).all()
    assert sum(media["weights"].counts) == 64
    assert (media["weights"].edges[0], media["weights"].edges[-1]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [(object(), "is a object"), (torch.zeros(5, 5, 5), "not an image"), ({"a": 1}, "is a dict")],
)
def test_what_cannot_be_logged_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sorted_values({"it": value})
    with pytest.raises(UsageError, match="'loss' is a name of the run's own records"):
        sorted_values({"loss": 1.0})


def data() -> TensorDataset:
    x = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer(folder: Path | None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(2, 1), loss_fn=nn.MSELoss(), batch_size=4, output_dir=folder, **settings
    )


def test_a_loop_of_ones_own_logs_to_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path)
    for record in run.steps(data()):
        if record.step % 3 == 0:
            run.log(VALUES)
    run._open.close()
    text = capsys.readouterr().out
    assert "step 3  accuracy 0.7500  count 3.0000" in text
    assert "step 6  said: so it <goes>" in text
    directory = RunDirectory(tmp_path)
    rows = directory.read_metrics()
    assert [row["step"] for row in rows if "accuracy" in row] == [3, 6]
    first, _ = [row["media"] for row in rows if "media" in row]
    assert first["said"] == {"kind": "text", "text": "so it <goes>"}
    assert sum(first["weights"]["counts"]) == 64
    assert pixels((tmp_path / first["digits"]["file"]).read_bytes()).shape == (4, 15, 1)
    assert [row["accuracy"] for row in read_run(tmp_path).evaluations] == [0.75, 0.75]


def test_tensorboard_reads_all_of_it(tmp_path: Path) -> None:
    loaded = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = RunDirectory(tmp_path)
    run.create()
    monitor = Monitor(MonitorConfig(sinks=["tensorboard"]), run, is_main=True)
    monitor.on_log(7, VALUES)
    monitor.close()
    assert run.read_events() == [], "nothing failed"
    found = loaded.EventAccumulator(str(run.tensorboard)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("accuracy")] == [(7, 0.75)]
    (image,) = found.Images("digits")
    assert (image.width, image.height) == (15, 4)
    assert pixels(image.encoded_image_string).shape == (4, 15, 1)
    (histogram,) = found.Histograms("weights")
    assert histogram.histogram_value.num == 64
    (text,) = found.Tensors("said")
    assert text.tensor_proto.string_val[0] == b"so it <goes>"


def test_within_a_run_it_goes_where_the_run_is_recorded(tmp_path: Path) -> None:
    """A call after each update logs; a sink that knows numbers alone gets those."""
    found: list[dict[str, Any]] = []

    def look(updates: int) -> None:
        run.log(
            {"half": updates / 2, "note": "even"} if updates % 2 == 0 else {"half": updates / 2}
        )

    run = trainer(
        tmp_path, after_update=look, sinks=["jsonl", "tests.monitor.test_log:Numbers"], max_steps=4
    )
    Numbers.rows = found
    run.train(data(), data())
    assert [row["half"] for row in found if "half" in row] == [0.5, 1.0, 1.5, 2.0]
    assert sum("eval_loss" in row for row in found) == 1
    assert sum("media" in row for row in RunDirectory(tmp_path).read_metrics()) == 2


@pytest.mark.parametrize("way", ["steps", "training_step", "train"])
def test_values_that_nothing_takes_are_told_of_once(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an output_dir numbers and texts are printed, and nothing else is kept."""
    run = trainer(None, max_steps=4)

    def log() -> None:
        run.log({"mine": 1.0, "digits": np.zeros((4, 4))})

    if way == "train":
        run.step.after_update.append(lambda _updates: log())
        with pytest.warns(NoEffectWarning) as told:
            run.train(data())
    else:
        loop = (
            run.steps(data())
            if way == "steps"
            else (run.training_step(data()[:4]) for _ in range(4))
        )
        with pytest.warns(NoEffectWarning) as told:
            deque(log() for _ in loop)
    assert "mine 1.0000" in capsys.readouterr().out
    (one,) = told
    assert "trainer.log keeps nothing of digits" in str(one.message)
    assert "output_dir" in str(one.message)
    assert one.filename == __file__, "the line of the user"


class Numbers:
    """A sink of before there were media."""

    rows: list[dict[str, Any]] = []

    def __init__(self, context: Any) -> None:
        pass

    def on_step(self, row: dict[str, Any]) -> None:
        pass

    def on_eval(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_servers_libraries_take_all_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(kind, reason=f"{kind} IS NOT TESTED: pip install {kind}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = RunDirectory(tmp_path / "run")
    run.create()
    monitor = Monitor(MonitorConfig(sinks=[kind]), run, is_main=True)
    monitor.on_log(7, VALUES)
    monitor.close()
    assert run.read_events() == [], "nothing failed"
    if kind == "mlflow":
        names = {path.name for path in run.path.rglob("*-7.*")}
        assert names == {"said-7.txt", "weights-7.json", "digits-7.png", "map-7.png"}


def test_figures_and_images_of_other_libraries(tmp_path: Path) -> None:
    """By the methods that Matplotlib's figures have."""

    class Figure:
        def savefig(self, target: Any, format: str) -> None:
            assert format == "png"
            target.write(sorted_values({"map": VALUES["map"]})[1]["map"].png)

    (found,) = sorted_values({"figure": Figure()})[1].values()
    assert isinstance(found, Media)
    assert found.size == (6, 6)
