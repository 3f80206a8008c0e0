"""Shards of image features in a folder, each of which appears complete or not at all, and can be found again.

The shards are the truth: what is done is read from them, so that a process may be killed at any moment. They are written in a
folder of the run and moved into place. The next run takes that folder away first, and with it whatever a process of the
last one that still lives might have put in place later.
"""

import ctypes
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file

from .media_rows import import_parquet

FORMATS = ("safetensors", "parquet")
SETTINGS, MANIFEST, FAILED = "embedding.json", "manifest.jsonl", "failed.jsonl"
# Said in messages and not compared: a folder may be moved.
_NOT_COMPARED = ("model",)
# Of features that are small, so that a kill costs minutes and not hours.
_MOST_IMAGES = 16384


class Failure(NamedTuple):
    """An image that could not be read."""

    key: str
    reason: str


class WrittenShard(NamedTuple):
    """A shard that has been put in place, and what it holds."""

    name: str
    keys: list[str]


class ImageFeatures(NamedTuple):
    """One image: `grid_thw` (3,) int64, in patches, and `features` (rows, width)."""

    key: str
    grid_thw: torch.Tensor
    features: torch.Tensor


def read_features(folder: str | os.PathLike) -> Iterator[ImageFeatures]:
    """What [`embed`] wrote, image by image, shard after shard.

    Returns:
        Each an `ImageFeatures`: `key`, `grid_thw` (3,) int64, and `features` (rows, width) in the dtype of the shard.

    Raises:
        ValueError: nothing was embedded there.
    """
    settings = Path(folder, SETTINGS)
    if not settings.is_file():
        raise ValueError(f"{folder} has no {SETTINGS}; give the folder that `gridtower embed` wrote.")
    format = json.loads(settings.read_text(encoding="utf-8"))["format"]
    for path in _shards(Path(folder), format):
        yield from _READ[format](path)


class FeatureFolder:
    """The folder of one run: what is done, and what is added. Made by [`open_feature_folder`].

    Attributes:
        done: keys that are in a shard or have failed, as of the start.
        unfinished: the folder of the run, in which shards are written.
    """

    def __init__(self, out: Path, format: str, unfinished: Path):
        self.out, self.unfinished = out, unfinished
        shards = [WrittenShard(path.name, _READ_KEYS[format](path)) for path in _shards(out, format)]
        self.done = {key for shard in shards for key in shard.keys} | _failed_keys(out / FAILED)
        numbers = [re.fullmatch(r"features-(\d{5,})\..*", shard.name) for shard in shards]
        self.next_number = 1 + max((int(number[1]) for number in numbers if number), default=-1)
        lines = "".join(map(_manifest_line, shards))
        _put(out / MANIFEST, unfinished, lambda path: path.write_text(lines, encoding="utf-8"))

    def stems(self) -> Iterator[str]:
        """Names for new shards, without their suffix."""
        return (f"features-{number:05d}" for number in count(self.next_number))

    def take(self, event) -> None:
        """Notes a `Failure` or a `WrittenShard`; anything else is passed over."""
        if isinstance(event, Failure):
            _append(self.out / FAILED, json.dumps(event._asdict()) + "\n")
        elif isinstance(event, WrittenShard):
            _append(self.out / MANIFEST, _manifest_line(event))


@contextmanager
def open_feature_folder(out: Path, settings: dict, retry_failed: bool) -> Iterator[FeatureFolder]:
    """The folder to write to, new or from an earlier run with the same settings; no other process may have it open.

    Args:
        settings: what the features depend on, as JSON, with `format` among it.
        retry_failed: forget which images could not be read.

    Raises:
        ValueError: the folder holds something else, features of other settings, or is in use.
    """
    foreign = [path.name for path in out.iterdir() if not path.name.startswith(".")] if out.exists() else []
    if foreign and SETTINGS not in foreign:
        raise ValueError(f"{out} holds {foreign[0]} and no {SETTINGS}; name a new or empty folder.")
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lock").acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another process is embedding into {out}; wait for it, or name another folder.") from error
    with lock:
        unfinished = out / f".unfinished-{uuid.uuid4().hex}"
        for left_behind in list(out.glob(".unfinished-*")):
            # Renamed first: at once nothing more can be written or moved there.
            left_behind.rename(out / f".removed-{uuid.uuid4().hex}")
        for removed in out.glob(".removed-*"):
            shutil.rmtree(removed, ignore_errors=True)
        unfinished.mkdir()
        try:
            _check_settings(out / SETTINGS, settings, unfinished)
            if retry_failed:
                (out / FAILED).unlink(missing_ok=True)
            yield FeatureFolder(out, settings["format"], unfinished)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


class ShardWriter:
    """Collects features and puts them in place as shards of about `shard_size` bytes."""

    def __init__(self, out: Path, unfinished: Path, format: str, shard_size: int, stems: Iterator[str]):
        self.out, self.unfinished, self.format = out, unfinished, format
        self.shard_size, self.stems = shard_size, stems
        self.images: list[ImageFeatures] = []
        self.bytes = 0

    def add(self, images: list[ImageFeatures]) -> Iterator[WrittenShard]:
        """Takes the images of one batch; gives the shard that they fill, if they do."""
        self.images += images
        self.bytes += sum(image.features.nbytes for image in images)
        if self.bytes >= self.shard_size or len(self.images) >= _MOST_IMAGES:
            yield from self.finish()

    def finish(self) -> Iterator[WrittenShard]:
        """Gives the shard of what is left, if anything is."""
        if not self.images:
            return
        path = self.out / f"{next(self.stems)}.{self.format}"
        _put(path, self.unfinished, lambda temporary: _WRITE[self.format](temporary, self.images))
        shard = WrittenShard(path.name, [image.key for image in self.images])
        self.images, self.bytes = [], 0
        _return_freed_memory()
        yield shard


def _return_freed_memory() -> None:
    """To the system: glibc keeps what lies between small tensors of a shard, more with every one; others need no call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim:
        trim(0)


def _write_safetensors(path: Path, images: list[ImageFeatures]) -> None:
    keys = [image.key.encode() for image in images]
    tensors = {
        "features": torch.cat([image.features for image in images]),
        "offsets": _offsets([len(image.features) for image in images]),
        "grid_thw": torch.stack([image.grid_thw for image in images]),
        # Bytes in a tensor: the header, where text could stand, has a limit and is read as a whole.
        "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8),
        "key_offsets": _offsets(map(len, keys)),
    }
    save_file(tensors, path, metadata={"format": "pt"})


def _read_safetensors_keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as shard:
        text, ends = shard.get_tensor("keys").numpy().tobytes(), shard.get_tensor("key_offsets").tolist()
    return [text[start:end].decode() for start, end in zip(ends, ends[1:])]


def _read_safetensors(path: Path) -> Iterator[ImageFeatures]:
    keys = _read_safetensors_keys(path)
    with safe_open(path, framework="pt") as shard:
        grids, ends = shard.get_tensor("grid_thw"), shard.get_tensor("offsets").tolist()
        features = shard.get_slice("features")
        for key, grid, start, end in zip(keys, grids, ends, ends[1:]):
            yield ImageFeatures(key, grid, features[start:end])


def _offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _write_parquet(path: Path, images: list[ImageFeatures]) -> None:
    parquet = import_parquet()
    import pyarrow

    packed = torch.cat([image.features for image in images])
    # Arrow has no bfloat16; float32 holds its values exactly.
    values = packed.float() if packed.dtype == torch.bfloat16 else packed
    ends = pyarrow.array(_offsets([image.features.numel() for image in images]).numpy())
    columns = {
        "key": pyarrow.array([image.key for image in images], pyarrow.string()),
        "grid_thw": _of_fixed_length([image.grid_thw.tolist() for image in images]),
        "shape": _of_fixed_length([list(image.features.shape) for image in images]),
        "features": pyarrow.LargeListArray.from_arrays(ends, pyarrow.array(values.flatten().numpy())),
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=1024)


def _of_fixed_length(rows: list[list[int]]):
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.array(rows).flatten()), len(rows[0]))


def _read_parquet_keys(path: Path) -> list[str]:
    return import_parquet().read_table(path, columns=["key"])["key"].to_pylist()


def _read_parquet(path: Path) -> Iterator[ImageFeatures]:
    for batch in import_parquet().ParquetFile(path).iter_batches(batch_size=64):
        for key, grid, shape, features in zip(*(batch[name] for name in ("key", "grid_thw", "shape", "features"))):
            values = torch.from_numpy(features.values.to_numpy(zero_copy_only=False).copy())
            yield ImageFeatures(key.as_py(), torch.tensor(grid.as_py()), values.view(shape.as_py()))


_WRITE = {"safetensors": _write_safetensors, "parquet": _write_parquet}
_READ = {"safetensors": _read_safetensors, "parquet": _read_parquet}
_READ_KEYS = {"safetensors": _read_safetensors_keys, "parquet": _read_parquet_keys}


def _shards(out: Path, format: str) -> list[Path]:
    return sorted(out.glob(f"features-*.{format}"))


def _check_settings(path: Path, settings: dict, unfinished: Path) -> None:
    if not path.exists():
        text = json.dumps(settings, indent=2) + "\n"
        return _put(path, unfinished, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    earlier = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name} is {settings.get(name)!r} and was {earlier.get(name)!r}"
        for name in sorted({*settings, *earlier} - {*_NOT_COMPARED})
        if settings.get(name) != earlier.get(name)
    ]
    if changed:
        raise ValueError(
            f"{path.parent} holds features of another run: {'; '.join(changed)}. Name another folder, or repeat what "
            f"{path.name} there says."
        )


def _failed_keys(path: Path) -> set[str]:
    if not path.exists():
        return set()
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # killed in the midst of a line, which is ASCII: that image is tried again
        os.truncate(path, len(whole))
    return {json.loads(line)["key"] for line in whole.splitlines()}


def _manifest_line(shard: WrittenShard) -> str:
    return json.dumps({"shard": shard.name, "images": len(shard.keys), "keys": shard.keys}) + "\n"


def _append(path: Path, line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def _put(path: Path, unfinished: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a file in `unfinished`, which then takes the place of `path`; lasting, should the machine fail."""
    temporary = unfinished / f"{uuid.uuid4().hex}-{path.name}"
    write(temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
