"""Features of very many images: decoded in worker processes, batched by patches, written as shards, resumed after a kill."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from accelerate.utils import convert_file_size_to_int
from torch.utils.data import DataLoader
from tqdm import tqdm

from .feature_shards import (
    FORMATS,
    Failure,
    FeatureFolder,
    ImageFeatures,
    ShardWriter,
    WrittenShard,
    open_feature_folder,
)
from .hub_cards.export import source_folder
from .image_encoder import DTYPES, FEATURES, DecodedImage, ImageDecoder, ImageEncoder
from .media_rows import MediaRow, media_rows

ENGINES = ("local", "ray")
# Images that a worker decodes at once, which spares messages, and such portions that wait for the model.
_PORTION, _WAITING = 4, 4
# Budgets of patches among which equal images are looked for.
_WINDOW = 8
MOST_WORKERS = 16


class EncodedBatch(NamedTuple):
    """A batch that has gone through the model."""

    images: int
    patches: int


@dataclass(frozen=True)
class EmbeddingJob:
    """What a process needs to know to embed rows. The fields are the arguments of [`embed`]."""

    model: Path
    out: Path
    features: str
    format: str
    patches: int
    shard_size: int
    device: str
    dtype: str

    def __post_init__(self):
        for name, known in (("features", FEATURES), ("format", FORMATS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(known)}.")
        for name in ("patches", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more.")

    def encoder(self) -> ImageEncoder:
        return ImageEncoder(self.model, self.features, self.dtype, self.device)

    def writer(self, unfinished: Path, stems: Iterator[str]) -> ShardWriter:
        return ShardWriter(self.out, unfinished, self.format, self.shard_size, stems)


class EmbeddingSummary(NamedTuple):
    """How many images a run embedded, how many it could not read, and how many an earlier run had dealt with."""

    embedded: int
    failed: int
    done_before: int


def embed(
    inputs: Iterable[str | os.PathLike],
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    features: str = "tower",
    format: str = "safetensors",
    patches: int = 16384,
    workers: int | None = None,
    shard_size: int | str = "256MB",
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "local",
    actors: int = 1,
    retry_failed: bool = False,
) -> EmbeddingSummary:
    """Write the features of every image in `inputs` to `out`, as shards.

    May be killed at any moment: the same call again goes on with what is missing, and no image is lost or there twice.
    More inputs may be added. [`read_features`] reads the result back.

    Args:
        inputs: image files, folders, parquet files, tars, JSONL files; [`media_rows`] says what of them is taken, and by
            which keys.
        model: folder of a model of any family, or of a tower alone, as `gridtower export --tower-only` writes it; or a
            repository on the hub. The text model is not loaded.
        out: folder, new or of an earlier call. Besides shards it holds `embedding.json` (what the features depend on),
            `manifest.jsonl` (the keys in each shard) and `failed.jsonl` (key and reason of each image that cannot be
            read).
        features: of each image
            - "tower": the tower's last states, (patches, hidden size); in merge-block order for LFM3-VL and Pixtral, in
              raster order for DeepSeek-V4;
            - "projector": what takes the place of its placeholders in the text, (tokens, text width); in raster order for
              LFM3-VL and Pixtral, for DeepSeek-V4 in the order of the placeholders: rows two by two, column by column
              within the two;
            - "pooled": the mean of its tower states, (1, hidden size).
        format: "safetensors": tensors `features`, all images one after the other, `offsets` (images + 1,) of each in it,
            `grid_thw` (images, 3), `keys`, UTF-8 bytes, and `key_offsets`. "parquet": columns `key`, `grid_thw`, `shape`
            and `features`, flat; bfloat16 becomes float32 there.
        patches: in a batch at most; a greater image goes alone. Nothing is padded.
        workers: processes that decode beside the model; 0: none. By default as many as there are cores left.
        shard_size: bytes of features, about, such as "256MB".
        device: a torch device; "auto": the GPU if there is one.
        dtype: of weights and features: "float32", "bfloat16", "float16", or "auto", that of the checkpoint.
        engine: "local", or "ray": as a Ray Data pipeline on the cluster that Ray finds, or on a local one. Model, inputs
            and `out` must lie where every machine sees them under the same path.
        actors: with "ray", copies of the model, each on one GPU where the cluster has any, and with its own `workers`.
        retry_failed: try again what could not be read before.

    Raises:
        ValueError: an impossible argument, an input that does not exist or holds no image, a folder that is no model, or
            `out` holds something else or the features of another model or other settings. Nothing is written then.
    """
    if engine not in ENGINES or actors < 1 or (actors > 1 and engine == "local"):
        raise ValueError(
            f"engine is {engine!r} with actors={actors}; give one of {ENGINES}, and several actors to ray."
        )
    if workers is not None and workers < 0:
        raise ValueError(f"workers is {workers}; give 0 or more.")
    shard_size = convert_file_size_to_int(shard_size)
    rows = media_rows(inputs)
    job = EmbeddingJob(source_folder(model), Path(out), features, format, patches, shard_size, device, dtype)
    encoder = job.encoder()
    settings = {"model": str(model), "format": format, **encoder.settings()}
    with open_feature_folder(job.out, settings, retry_failed) as folder:
        missing = [row for row in rows if row.key not in folder.done]
        if engine == "ray":
            from .embedding_on_ray import embed_on_ray

            del encoder  # which the actors load for themselves
            events = embed_on_ray(job, folder.unfinished, missing, workers, actors)
        else:
            workers = free_cores() if workers is None else workers
            events = embed_rows(job, encoder, missing, job.writer(folder.unfinished, folder.stems()), workers)
        embedded, failed = _carried_out(events, folder, len(missing))
    return EmbeddingSummary(embedded, failed, len(rows) - len(missing))


def free_cores() -> int:
    """Cores beside the one that feeds the model, as far as decoding can use them."""
    return min(MOST_WORKERS, (os.cpu_count() or 1) - 1)


def embed_rows(
    job: EmbeddingJob, encoder: ImageEncoder, rows: list[MediaRow], writer: ShardWriter, workers: int
) -> Iterator[Failure | EncodedBatch | WrittenShard]:
    """Embeds `rows` in this process; tells of each image that cannot be read, each batch and each shard, once it is so."""
    failures: list[Failure] = []
    images = _readable(_decoded(encoder.decoder, rows, workers), failures)
    for batch in batches_within(images, job.patches):
        found = encoder(batch)
        yield from failures
        failures.clear()
        yield EncodedBatch(len(batch), sum(len(image.patches) for image in batch))
        yield from writer.add(
            [ImageFeatures(image.key, torch.tensor(image.grid), rows) for image, rows in zip(batch, found)]
        )
    yield from failures
    yield from writer.finish()


def batches_within(images: Iterable[DecodedImage], budget: int) -> Iterator[list[DecodedImage]]:
    """Batches of at most `budget` patches, or of one image that has more.

    A stretch of `images` at a time is sorted by size, so that equal grids come together, which the tower takes as one.
    """
    window, held = [], 0
    for image in images:
        window.append(image)
        held += len(image.patches)
        if held >= _WINDOW * budget:
            yield from _filled(window, budget)
            window, held = [], 0
    yield from _filled(window, budget)


def _filled(window: list[DecodedImage], budget: int) -> Iterator[list[DecodedImage]]:
    batch, held = [], 0
    for image in sorted(window, key=lambda image: (len(image.patches), image.grid)):
        if batch and held + len(image.patches) > budget:
            yield batch
            batch, held = [], 0
        batch.append(image)
        held += len(image.patches)
    if batch:
        yield batch


def _decoded(decoder: ImageDecoder, rows: list[MediaRow], workers: int) -> Iterator[DecodedImage | Failure]:
    portions = (rows[start : start + _PORTION] for start in range(0, len(rows), _PORTION))
    loader = DataLoader(
        decoder,
        sampler=portions,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_WAITING if workers else None,
        collate_fn=_as_it_is,  # arrays: a tensor would cost a file descriptor for as long as it waits
    )
    for portion in loader:
        yield from portion


def _as_it_is(portion: list) -> list:
    return portion


def _readable(decoded: Iterable[DecodedImage | Failure], failures: list[Failure]) -> Iterator[DecodedImage]:
    for image in decoded:
        if isinstance(image, Failure):
            failures.append(image)
        else:
            yield image


def _carried_out(events: Iterable, folder: FeatureFolder, total: int) -> tuple[int, int]:
    """Lets `events` happen, notes them in `folder` and shows how far they are; returns images embedded and failed."""
    embedded = failed = patches = 0
    started = monotonic()
    with tqdm(total=total, desc="Embedding", unit="image", disable=None, smoothing=0.05) as bar:
        for event in events:
            folder.take(event)
            if isinstance(event, EncodedBatch):
                embedded += event.images
                patches += event.patches
                bar.set_postfix_str(f"{patches / (monotonic() - started):,.0f} patches/s", refresh=False)
                bar.update(event.images)
            elif isinstance(event, Failure):
                failed += 1
                bar.update()
    return embedded, failed
