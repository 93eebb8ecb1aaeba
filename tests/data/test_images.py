"""Pictures with labels, a folder for each class."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data import Data, build_data
from lockstep.errors import UsageError

Image = pytest.importorskip("PIL.Image")


def pictures(folder: Path, **counts: int) -> Path:
    """A folder for each class; the pixels of a picture are its number."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((6, 9, 3), number * 10, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


def made(folder: Path, **args: Any) -> Data:
    arguments = {"path": str(folder), "image_size": 4, **args}
    return build_data(DataConfig(name="images", args=arguments))


def test_a_folder_is_a_class(tmp_path: Path) -> None:
    data = made(pictures(tmp_path, dog=2, cat=3), image_mean=0.0, image_std=1.0)
    assert data.facts["labels"]["names"] == ["cat", "dog"]
    assert [int(data.train[n]["labels"]) for n in range(5)] == [0, 0, 0, 1, 1]
    batch = data.train.collated([2, 4])
    assert batch["pixel_values"].shape == (2, 3, 4, 4)
    torch.testing.assert_close(batch["pixel_values"][0], torch.full((3, 4, 4), 20 / 255))
    assert torch.equal(batch["pixel_values"][1], data.train[4]["pixel_values"])


def test_the_last_pictures_of_each_class_are_held_out(tmp_path: Path) -> None:
    data = made(pictures(tmp_path / "a", cat=4, dog=8), validation_fraction=0.25)
    assert [int(sample["labels"]) for sample in data.validation] == [0, 1, 1]
    assert len(data.train) == 9
    other = pictures(tmp_path / "b", dog=1)
    data = made(tmp_path / "a", validation=str(other))
    assert (len(data.train), [int(each["labels"]) for each in data.validation]) == (12, [1])


def test_classes_are_those_of_the_training_where_these_are_named(tmp_path: Path) -> None:
    """As an evaluation does it, on a folder that lacks one."""
    first = pictures(tmp_path / "a", bird=1, cat=1, dog=1)
    second = pictures(tmp_path / "b", cat=1, dog=1)
    data = made(second, labels_of=[str(first)])
    assert [int(sample["labels"]) for sample in data.train] == [1, 2]
    data = made(second, classes=["dog", "cat"])
    assert [int(sample["labels"]) for sample in data.train] == [1, 0]


def test_a_models_folder_says_how_pictures_are_scaled(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "a", cat=2, dog=1)
    mean = [0.1, 0.2, 0.3]
    std = [0.5, 0.6, 0.7]
    described = {"size": {"height": 8, "width": 8}, "image_mean": mean, "image_std": std}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    data = made(folder, image_size=None, preprocessor=str(tmp_path))
    found = data.train[1]["pixel_values"]
    assert found.shape == (3, 8, 8)
    expected = (10 / 255 - torch.tensor(mean)) / torch.tensor(std)
    torch.testing.assert_close(found[:, 0, 0], expected)
    assert made(folder, preprocessor=str(tmp_path)).facts["image_size"] == 4, "what is written wins"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "nowhere"}, "there is no folder 'nowhere'"),
        ({"path": "empty"}, "empty has no folder in it, and so no class"),
        ({"path": "one"}, "one has one class: cat"),
        ({"path": "hollow"}, r"there is no picture in .*hollow/dog"),
        ({"classes": ["cat", "dgo"]}, "dog is none of the classes; did you mean 'dgo'"),
        ({"image_std": 0}, "image_std is 0, by which values are divided"),
        ({"image_mean": [0.5, 0.5]}, "image_mean should be a number for each channel, but is"),
        ({"image_size": "big"}, "image_size should be a whole number"),
        ({"preprocessor": "empty"}, r"preprocessor_config\.json can't be read"),
    ],
)
def test_what_can_not_be_is_one_error(
    args: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "both", cat=1, dog=1)
    pictures(tmp_path / "one", cat=1)
    pictures(tmp_path / "hollow", cat=1)
    (tmp_path / "hollow/dog").mkdir()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        made(Path("both"), **args)


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    data = made(pictures(tmp_path, cat=1, dog=1))
    (tmp_path / "dog/00.png").write_bytes(b"no picture")
    with pytest.raises(UsageError, match=r"dog/00\.png is not a picture that can be read"):
        data.train.collated([1])
