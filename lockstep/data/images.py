"""The data set `images`: pictures with labels, a folder for each class, for classifiers.

    data:
      name: images
      args: {path: pictures, image_size: 224}     # pictures/cat/1.png, pictures/dog/2.jpg, …

A sample is `{"pixel_values": float32 [3, image_size, image_size], "labels": int64 []}`, the names
of transformers' image classifiers. A picture is scaled to that size whatever its own is, and its
values, from 0 to 1, become (value − mean) / std. Pictures are read when they are needed.

Tests: tests/data/test_images.py, tests/parity/test_kinds_of_data.py
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batches import CollatingDataset, Data
from lockstep.data.language import at_least_one, check_fraction
from lockstep.errors import UsageError, did_you_mean, first_line, listed
from lockstep.files.paths import local_path

_WHERE = "data.args"
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_CHANNELS = 3
_USUAL = {"image_size": 224, "image_mean": 0.5, "image_std": 0.5}
_SETTINGS = "preprocessor_config.json"


class LabelledImages(CollatingDataset):
    """Pictures that are read from files, with the numbers of their classes.

    Args:
        files: of the pictures.
        labels: the number of each one's class.
        size: of a sample, in pixels along each side.
        mean: of each channel.
        std: of each channel.
    """

    def __init__(
        self, files: Sequence[Path], labels: Sequence[int], size: int, mean: Tensor, std: Tensor
    ) -> None:
        self._files = list(files)
        self._labels = torch.tensor(labels)
        self._size = size
        self._mean = mean
        self._std = std

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self._read(index), "labels": self._labels[index]}

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        pixels = torch.stack([self._read(index) for index in indices])
        return {"pixel_values": pixels, "labels": self._labels[torch.tensor(indices)]}

    def _read(self, index: int) -> Tensor:
        """Return a picture, float32 [3, size, size]; a UsageError if its file is none."""
        library = importlib.import_module("PIL.Image")
        file = self._files[index]
        try:
            with library.open(file) as opened:
                scaled = opened.convert("RGB").resize((self._size, self._size))
        except (OSError, ValueError, SyntaxError) as error:  # what the package raises of bad files
            what = f"{file} is not a picture that can be read"
            fix = "mend it, or take it out of the folder"
            raise UsageError(what, where=str(file), why=first_line(error), fix=fix) from None
        values = torch.from_numpy(np.asarray(scaled, np.float32) / 255).permute(2, 0, 1)
        return (values - self._mean) / self._std


def images(
    *,
    path: str,
    preprocessor: str | None = None,
    image_size: int | None = None,
    image_mean: float | Sequence[float] | None = None,
    image_std: float | Sequence[float] | None = None,
    classes: Sequence[str] | None = None,
    labels_of: str | Sequence[str] | None = None,
    validation: str | None = None,
    validation_fraction: float = 0.0,
) -> Data:
    """Return pictures with labels, or raise a UsageError.

    `path` is a folder with a folder of pictures for each class. `preprocessor` is the folder of a
    model whose `preprocessor_config.json` says size, mean and std; what is written beside it wins,
    and without either they are 224, 0.5 and 0.5. `classes` names the classes in their order; unset:
    the folders' names, sorted. `labels_of` is a path, or several, whose folders are the classes, in
    place of these: an evaluation has those of the training. `validation` is another path, or else
    the last pictures of each class are held out, by `validation_fraction`.
    """
    check_fraction(validation_fraction)
    _require_package()
    given = {"image_size": image_size, "image_mean": image_mean, "image_std": image_std}
    settings = {**_USUAL, **({} if preprocessor is None else _settings_of(preprocessor))}
    settings |= {key: value for key, value in given.items() if value is not None}
    size = at_least_one("image_size", settings["image_size"])
    mean, std = (_of_channels(key, settings[key]) for key in ("image_mean", "image_std"))
    if not (std > 0).all():
        what = f"image_std is {settings['image_std']!r}, by which values are divided"
        raise UsageError(what, where=f"{_WHERE}.image_std", fix="write numbers above 0")

    found = _pictures(path, f"{_WHERE}.path")
    named_by = list(found)
    if labels_of is not None:
        paths = [labels_of] if isinstance(labels_of, str) else labels_of
        where = f"{_WHERE}.labels_of"
        named_by = sorted({name for each in paths for name in _pictures(each, where)})
    names = named_by if classes is None else list(classes)
    train: list[tuple[Path, int]] = []
    held_out: list[tuple[Path, int]] = []
    for name, files in found.items():
        number = _number(name, names, path)
        border = len(files) - (0 if validation else int(len(files) * validation_fraction))
        train += [(file, number) for file in files[:border]]
        held_out += [(file, number) for file in files[border:]]
    if validation is not None:
        for name, files in _pictures(validation, f"{_WHERE}.validation").items():
            number = _number(name, names, validation)
            held_out += [(file, number) for file in files]

    def dataset(part: Sequence[tuple[Path, int]]) -> LabelledImages:
        return LabelledImages([file for file, _ in part], [n for _, n in part], size, mean, std)

    labels = {
        "of": "images",
        "problem_type": "single_label_classification",
        "size": len(names),
        "names": names,
        "padding": None,
    }
    facts = {
        "image_size": size,
        "channels": _CHANNELS,
        "num_labels": len(names),
        "labels": labels,
        "source": path,
    }
    notices = [f"{path}: one of {len(names)} classes for each picture: {listed(names, 8)}"]
    return Data(dataset(train), dataset(held_out) if held_out else None, facts, notices=notices)


def _require_package() -> None:
    try:
        importlib.import_module("PIL.Image")
    except ImportError:
        what = "the data set images needs the package pillow"
        raise UsageError(what, where="data.name: images", fix="pip install pillow") from None


def _settings_of(folder: str) -> dict[str, Any]:
    """Return the size, mean and std that a model's folder says; a UsageError if it says none."""
    where = f"{_WHERE}.preprocessor"
    file = local_path(folder, where) / _SETTINGS
    fix = f"name a folder with a {_SETTINGS}, or write image_size, image_mean and image_std"
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        size = described.get("size", _USUAL["image_size"])
        if isinstance(size, Mapping):
            size = size.get("height", size.get("shortest_edge"))
        found = {key: described[key] for key in ("image_mean", "image_std") if key in described}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        what = f"{file} can't be read"
        raise UsageError(what, where=where, why=first_line(error), fix=fix) from None
    return {"image_size": size, **found}


def _of_channels(key: str, value: Any) -> Tensor:
    """Return a number for each channel, float32 [3, 1, 1], or raise a UsageError."""
    members = list(value) if isinstance(value, Sequence) else [value] * _CHANNELS
    is_number = all(isinstance(each, int | float) and np.isfinite(each) for each in members)
    if len(members) != _CHANNELS or not is_number:
        what = f"{key} should be a number for each channel, but is {value!r:.60}"
        fix = f"write a number, or a list of {_CHANNELS}"
        raise UsageError(what, where=f"{_WHERE}.{key}", fix=fix)
    return torch.tensor(members, dtype=torch.float32)[:, None, None]


def _pictures(path: str, where: str) -> dict[str, list[Path]]:
    """Return the pictures of each class, by its folder's name, in order; a UsageError if none."""
    folder = local_path(path, where)
    fix = "name a folder that holds one folder of pictures for each class"
    if not folder.is_dir():
        raise UsageError(f"there is no folder {path!r}", where=where, fix=fix)
    inside = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    pictures = {each.name: _files_in(each) for each in inside if each.is_dir()}
    empty = [name for name, files in pictures.items() if not files]
    if empty:
        what = f"there is no picture in {folder / empty[0]}"
        fix = f"take the folder away; pictures are {', '.join(_ENDINGS)}"
        raise UsageError(what, where=where, fix=fix)
    if len(pictures) < 2 and where == f"{_WHERE}.path":
        what = f"{path} has {'one class' if pictures else 'no folder'}: {listed(list(pictures))}"
        if not pictures:
            what = f"{path} has no folder in it, and so no class"
        raise UsageError(what, where=where, fix=fix)
    return pictures


def _files_in(folder: Path) -> list[Path]:
    found = (each for each in folder.rglob("*") if each.suffix.lower() in _ENDINGS)
    return sorted(each for each in found if each.is_file() and not each.name.startswith("."))


def _number(name: str, names: Sequence[str], path: str) -> int:
    """Return the number of a class, or raise a UsageError if there is no such class."""
    if name not in names:
        what = f"the folder {Path(path) / name} is none of the classes{did_you_mean(name, names)}"
        fix = f"the classes are {listed(list(names), 8)}; data.args.classes names others"
        raise UsageError(what, where=f"{_WHERE}.classes", fix=fix)
    return list(names).index(name)
