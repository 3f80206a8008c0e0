"""[`embed`] as a Ray Data pipeline: portions of rows go to actors, each of which holds the model and writes its shards.

A portion that Ray starts again, after an actor or its machine was lost, writes the same shards under the same names.
"""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path

from .embedding import MOST_WORKERS, EmbeddingJob, embed_rows
from .media_rows import MediaRow

# Rows of a portion, and portions for each actor while there are not more rows.
_MOST_ROWS, _PORTIONS = 1024, 4


def embed_on_ray(
    job: EmbeddingJob, unfinished: Path, rows: list[MediaRow], workers: int | None, actors: int
) -> Iterator:
    """As [`~gridtower.embedding.embed_rows`], by `actors` that decode in `workers` processes each.

    Raises:
        ValueError: Ray is not installed, or the cluster has too few cores.
    """
    try:
        import ray.data
    except ImportError as error:
        raise ValueError('engine="ray" needs Ray: pip install "gridtower[ray]".') from error
    if not rows:
        return
    if not ray.is_initialized():
        ray.init()
    cores, gpus = (int(ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU"))
    workers = min(MOST_WORKERS, max(0, cores // actors - 1)) if workers is None else workers
    if actors * (1 + workers) > cores:
        raise ValueError(
            f"{actors} actors with {workers} workers each take {actors * (1 + workers)} cores, and the cluster has {cores}."
        )
    ray.data.DataContext.get_current().enable_progress_bars = False
    job = replace(job, out=job.out.resolve())
    size = min(_MOST_ROWS, -(-len(rows) // (_PORTIONS * actors)))
    portions = [{"rows": pickle.dumps(rows[start : start + size])} for start in range(0, len(rows), size)]
    happened = ray.data.from_items(portions, override_num_blocks=len(portions)).map_batches(
        EmbeddingActor,
        fn_constructor_args=(job, unfinished.resolve(), workers),
        batch_size=1,
        num_cpus=1 + workers,
        num_gpus=1 if gpus and job.device != "cpu" else 0,
        compute=ray.data.ActorPoolStrategy(size=actors),
    )
    for portion in happened.iter_rows():
        yield from pickle.loads(portion["events"])


class EmbeddingActor:
    """Holds the model; called with a portion of rows, gives what has happened to them."""

    def __init__(self, job: EmbeddingJob, unfinished: Path, workers: int):
        self.job, self.unfinished, self.workers = job, unfinished, workers
        self.encoder = job.encoder()

    def __call__(self, batch: dict) -> dict:
        rows = pickle.loads(batch["rows"][0])
        name = sha256("\n".join(row.key for row in rows).encode()).hexdigest()[:16]
        stems = (f"features-{name}-{number}" for number in count())
        writer = self.job.writer(self.unfinished, stems)
        events = list(embed_rows(self.job, self.encoder, rows, writer, self.workers))
        return {"events": [pickle.dumps(events)]}
