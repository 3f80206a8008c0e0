"""`gridtower embed` over very many small images: images in a second, memory over time, and whether each one is there.

Makes tars of random PNGs of 32 to 64 pixels and an LFM3-VL tower of random weights, then runs the command as a user does,
once for each setting. Memory is that of the process that holds the model, read every second, as the median of each quarter
of the run; with Ray it is that of the driver. Usage: `python benchmarks/embedding.py --images 20000 --workers 1 2 --actors 1 2`.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from gridtower import Lfm3VlImageProcessor, Lfm3VlVisionConfig, Lfm3VlVisionModel

IMAGES_PER_TAR = 2000
# One in so many is no image.
BROKEN = 1000


def write_tower(folder: Path, layers: int, width: int) -> None:
    torch.manual_seed(0)
    kinds = ["conv", "full_attention"]
    config = Lfm3VlVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        layer_types=[kinds[index % 2] for index in range(layers)],
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
    )
    Lfm3VlVisionModel(config).save_pretrained(folder)
    Lfm3VlImageProcessor(min_pixels=32 * 32).save_pretrained(folder)


def write_tars(folder: Path, images: int) -> list[str]:
    """Tars with `images` members; returns the keys that embedding is to know them by."""
    folder.mkdir()
    rng, keys = np.random.default_rng(0), []
    for first in range(0, images, IMAGES_PER_TAR):
        path = folder / f"{first // IMAGES_PER_TAR:05d}.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(first, min(images, first + IMAGES_PER_TAR)):
                content = b"no image" if number % BROKEN == 7 else png(rng)
                member = tarfile.TarInfo(f"{number:08d}.png")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                keys.append(f"{path}::{number:08d}")
    return keys


def png(rng: np.random.Generator) -> bytes:
    height, width = rng.integers(32, 65, 2)
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def run_command(tars: Path, tower: Path, out: Path, options: list[str]) -> tuple[float, list[float]]:
    """Seconds from the moment that the inputs and the model are read, and MiB of resident memory at each second of them."""
    command = [sys.executable, "-m", "gridtower.command_line", "embed", str(tars), "--model", str(tower)]
    process = subprocess.Popen([*command, "--out", str(out), "--features", "pooled", "--device", "cpu", *options])
    watched, memory, started = psutil.Process(process.pid), [], None
    while process.poll() is None:
        if started is None and (out / "manifest.jsonl").exists():
            started = time.monotonic()
        if started is not None:
            try:
                memory.append(watched.memory_info().rss / 2**20)
            except psutil.NoSuchProcess:
                break
        time.sleep(1 if started else 0.05)
    if process.wait():
        raise SystemExit(f"the command ended with status {process.returncode}")
    return time.monotonic() - started, memory


def missing_and_repeated(out: Path, keys: list[str]) -> tuple[int, int]:
    """Keys that are nowhere, and entries beyond the first of each."""
    lines = [json.loads(line) for line in (out / "manifest.jsonl").open(encoding="utf-8")]
    failed = out / "failed.jsonl"
    found = Counter(key for line in lines for key in line["keys"])
    if failed.exists():
        found.update(json.loads(line)["key"] for line in failed.open(encoding="utf-8"))
    assert set(found) <= set(keys)
    return len(set(keys) - set(found)), sum(found.values()) - len(found)


def steady_rate(out: Path) -> float:
    """Images in a second from the first shard to the last: without what it takes to start."""
    lines = [json.loads(line) for line in (out / "manifest.jsonl").open(encoding="utf-8")]
    times = sorted(((out / line["shard"]).stat().st_mtime, line["images"]) for line in lines)
    return sum(images for _, images in times[1:]) / (times[-1][0] - times[0][0])


def quarters(memory: list[float]) -> list[int]:
    """Medians of the four quarters of a run."""
    bounds = np.linspace(0, len(memory), 5).astype(int)
    return [round(statistics.median(memory[start:end])) for start, end in zip(bounds, bounds[1:]) if end > start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="one local run for each")
    parser.add_argument("--actors", type=int, nargs="*", default=[], help="one run on Ray for each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--patches", default="2048", help="in a batch; few, so that memory is seen over many batches")
    parser.add_argument("--shard-size", default="1MB", help="small, so that memory is seen over many shards")
    arguments = parser.parse_args()
    runs = [(f"local, {n} workers", ["--workers", str(n)]) for n in arguments.workers]
    for actors in arguments.actors:
        runs.append((f"ray, {actors} actors", ["--engine", "ray", "--actors", str(actors), "--workers", "0"]))
    sizes = ["--patches", arguments.patches, "--shard-size", arguments.shard_size]
    print(f"{arguments.images} images, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        tower, tars = Path(scratch, "tower"), Path(scratch, "tars")
        write_tower(tower, arguments.layers, arguments.width)
        keys = write_tars(tars, arguments.images)
        for number, (name, options) in enumerate(runs):
            out = Path(scratch, f"out-{number}")
            seconds, memory = run_command(tars, tower, out, [*options, *sizes])
            missing, repeated = missing_and_repeated(out, keys)
            print(
                f"{name}: {steady_rate(out):.0f} images/s, {seconds:.0f} s with the start; resident MiB by quarter "
                f"{quarters(memory)}; missing {missing}, repeated {repeated}; {len(list(out.glob('features-*')))} shards",
                flush=True,
            )


if __name__ == "__main__":
    main()
