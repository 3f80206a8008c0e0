"""What images lie in folders, files, parquet tables, webdataset tars and JSONL, without opening any of them.

Each image gets a key that says where it comes from, and a source, small enough to travel, from which another process reads
it. A tar is read in webdataset's sense: the name of a member without its extension is its key.
"""

import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .processing.collation import (
    CONVERSATION_FIELDS,
    as_messages,
    media_source,
    media_under,
    with_media_under,
)
from .processing.media_loading import flat_media, is_image

IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tga .tif .tiff .webp".split()
)
IMAGE_COLUMN = "image"
_IMAGE_FIELDS = ("image", "images", "path")


class ImageFile(NamedTuple):
    """An image that is a file of its own."""

    path: str

    def read(self) -> Path:
        return Path(self.path)


class FileSlice(NamedTuple):
    """An image that is a stretch of a file: a member of a tar."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class ParquetCell(NamedTuple):
    """An image in a row of a parquet file, counted within its row group."""

    path: str
    row_group: int
    row: int

    def read(self) -> bytes | str:
        cell = media_source(_image_column(self.path, self.row_group)[self.row].as_py())
        if cell is None:
            raise ValueError(f"the column {IMAGE_COLUMN!r} is empty in this row")
        return media_under(os.path.dirname(self.path), cell)


class JsonImage(NamedTuple):
    """One of the images that a line of a JSONL file names or holds."""

    line: FileSlice
    number: int

    def read(self):
        return _images_of_line(self.line.read(), self.line.path)[self.number]


class Unreadable(NamedTuple):
    """What stands for a row, or for the rest of a file, that cannot be read."""

    reason: str

    def read(self):
        raise ValueError(self.reason)


class MediaRow(NamedTuple):
    """One image. `source.read()` gives what `open_image` takes, or raises."""

    key: str
    source: ImageFile | FileSlice | ParquetCell | JsonImage | Unreadable


def media_rows(inputs: Iterable[str | os.PathLike]) -> list[MediaRow]:
    """Every image in `inputs`, once, in their order.

    Args:
        inputs: any number of
            - image files;
            - folders, searched for image files, parquet files and tars at any depth, in the order of names; what begins with
              a full stop is passed over;
            - parquet files with a column `image` of bytes, of `{"bytes", "path"}`, or of paths;
            - uncompressed tars;
            - JSONL files, each row with `image`, `images` or `path`, or a conversation as
              [`~gridtower.as_messages`] takes it.
            Relative paths inside of files start from the folder of the file.

    Returns:
        Rows whose keys are `path` for a file, `path::name` for a member of a tar (without its extension, where that tells it
        from the others), `path::row` for a row of a table, and `path::row.image` where a JSON row has several images; rows
        count from 0. `path` is as given: the same inputs have the same keys. About 300 bytes of memory each.

    Raises:
        ValueError: an input that does not exist, is of none of these kinds, or holds no image; names it.
    """
    rows, seen = [], set()
    for given in inputs:
        before, known = len(rows), False
        for path in _files(os.fspath(given)):
            real = os.path.realpath(path)
            known |= real in seen
            if real not in seen:
                seen.add(real)
                rows.extend(_READERS[_suffix(path)](os.path.abspath(path), _as_key(path)))
        if len(rows) == before and not known:
            raise ValueError(
                f"{given} holds no image; in folders and tars images are told by {_shown(IMAGE_SUFFIXES)}."
            )
    if not rows:
        raise ValueError("no inputs; name images, folders, parquet files, tars or JSONL files.")
    if all(isinstance(row.source, Unreadable) for row in rows):
        raise ValueError(f"nothing can be read of the inputs; the first is {rows[0].key}: {rows[0].source.reason}.")
    return rows


def _files(given: str) -> Iterator[str]:
    if os.path.isfile(given):
        if _suffix(given) not in _READERS:
            raise ValueError(
                f"{given} is not an input; give an image, a folder, a parquet file, an uncompressed tar or a JSONL file."
            )
        yield given
        return
    if not os.path.isdir(given):
        raise ValueError(f"{given} does not exist; name an existing file or folder.")
    for folder, folders, names in os.walk(given):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and _suffix(name) in _IN_FOLDERS:
                yield os.path.join(folder, name)


def _image_file(path: str, key: str) -> Iterator[MediaRow]:
    yield MediaRow(key, ImageFile(path))


def _tar_rows(path: str, key: str) -> Iterator[MediaRow]:
    taken = set()
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members.clear()  # which otherwise grow with the archive
                if not member.isreg() or _suffix(member.name) not in IMAGE_SUFFIXES:
                    continue
                # The same name with two extensions, or twice, is two images.
                names = (os.path.splitext(member.name)[0], member.name, f"{member.name}@{member.offset}")
                name = next(name for name in names if name not in taken)
                taken.add(name)
                yield MediaRow(f"{key}::{_as_key(name)}", FileSlice(path, member.offset_data, member.size))
    except (tarfile.TarError, OSError) as error:
        yield MediaRow(key, Unreadable(f"not a whole, uncompressed tar: {error}"))


def _parquet_rows(path: str, key: str) -> Iterator[MediaRow]:
    parquet = import_parquet()
    from pyarrow import ArrowException

    try:
        metadata = parquet.read_metadata(path)
    except (ArrowException, OSError) as error:
        yield MediaRow(key, Unreadable(f"not a whole parquet file: {error}"))
        return
    names = metadata.schema.to_arrow_schema().names
    if IMAGE_COLUMN not in names:
        raise ValueError(f"{path} has no column {IMAGE_COLUMN!r} but {names}; rename the one that holds the images.")
    first = 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        for row in range(count):
            yield MediaRow(f"{key}::{first + row}", ParquetCell(path, group, row))
        first += count


def _json_rows(path: str, key: str) -> Iterator[MediaRow]:
    offset = number = 0
    with open(path, "rb") as file:
        for line in file:
            place, row_key = FileSlice(path, offset, len(line)), f"{key}::{number}"
            offset += len(line)
            if not line.strip():
                continue
            number += 1
            try:
                images = _images_of_line(line, path)
            except ValueError as error:
                yield MediaRow(row_key, Unreadable(str(error)))
                continue
            for image in range(len(images)):
                yield MediaRow(row_key if len(images) == 1 else f"{row_key}.{image}", JsonImage(place, image))


def _images_of_line(line: bytes, path: str) -> list:
    row, root = json.loads(line), os.path.dirname(path)
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__}; a row is a JSON object with {', '.join(_IMAGE_FIELDS)} or messages")
    if any(row.get(field) is not None for field in CONVERSATION_FIELDS):
        return as_messages(with_media_under(root, row))[1]
    images = next((row[field] for field in _IMAGE_FIELDS if row.get(field) is not None), None)
    return [media_source(image) for image in flat_media(media_under(root, images), is_image)]


@lru_cache(maxsize=1)
def _image_column(path: str, row_group: int):
    # Rows of a group come one after the other: a process that decodes holds one group at a time.
    return import_parquet().ParquetFile(path).read_row_group(row_group, columns=[IMAGE_COLUMN]).column(0)


def import_parquet():
    """`pyarrow.parquet`.

    Raises:
        ValueError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError('parquet needs pyarrow: pip install "gridtower[embed]".') from error
    return pyarrow.parquet


def _shown(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted(suffixes))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _as_key(path: str) -> str:
    # Names of files are bytes; what is no UTF-8 among them is spelled out.
    return os.fsencode(path).decode("utf-8", "backslashreplace")


_IN_FOLDERS = dict.fromkeys(IMAGE_SUFFIXES, _image_file) | {".parquet": _parquet_rows, ".tar": _tar_rows}
_READERS = _IN_FOLDERS | {".jsonl": _json_rows, ".ndjson": _json_rows}
