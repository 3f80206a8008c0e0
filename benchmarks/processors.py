"""Image processors beside transformers' own on torchvision: images in a second, as ratios, for the same pixels.

Both sides must give the same patches before anything is measured. Usage: `python benchmarks/processors.py`, with
gridtower installed or PYTHONPATH set to the checkout.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from side_by_side import in_words, interleaved_seconds, ratio_quartiles

from gridtower import Lfm3VlImageProcessor, PixtralImageProcessor

# By name: (height, width) of the images of a batch.
WORKLOADS = {
    "8x1024": [(1024, 1024)] * 8,
    "8-mixed": [
        (1024, 1024),
        (768, 1024),
        (1024, 640),
        (900, 700),
        (500, 1000),
        (1024, 1024),
        (333, 777),
        (1200, 800),
    ],
    "64x224": [(224, 224)] * 64,
}
INPUTS = ("pil", "array")


class Family(NamedTuple):
    """Processors with the same settings, and what each gives brought to the same form: a list of images' pixels."""

    ours: Callable
    theirs: Callable
    difference: Callable[[dict, dict], float]


def packed_difference(ours: dict, theirs: dict) -> float:
    return (ours["pixel_values"] - theirs["pixel_values"]).abs().max().item()


def padded_difference(ours: dict, theirs: dict) -> float:
    """Ours are patches in raster order, theirs whole images that are filled up."""
    found = ours["pixel_values"].split(ours["image_grid_thw"].prod(-1).tolist())
    differences = []
    for patches, (_, rows, cols), image in zip(found, ours["image_grid_thw"].tolist(), theirs["pixel_values"]):
        cut = image[:, : 16 * rows, : 16 * cols].unfold(1, 16, 16).unfold(2, 16, 16).permute(1, 2, 0, 3, 4)
        differences.append((patches - cut.reshape(rows * cols, -1)).abs().max().item())
    return max(differences)


FAMILIES = {
    "lfm3_vl": Family(
        Lfm3VlImageProcessor(),
        transformers.Qwen2VLImageProcessor(
            patch_size=16, size=dict(Lfm3VlImageProcessor.size), image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        packed_difference,
    ),
    "pixtral": Family(PixtralImageProcessor(), transformers.PixtralImageProcessor(), padded_difference),
}


def make_images(sizes: list[tuple[int, int]], kind: str) -> list:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    return [Image.fromarray(array) for array in arrays] if kind == "pil" else arrays


def compare(family: Family, images: list, repeats: int) -> dict[str, tuple[float, float, float]]:
    """Quartiles of theirs / ours, in time, with pixels finished here and with uint8 pixels.

    Raises:
        ValueError: the sides give different pixels.
    """
    steps = {
        "ours": partial(family.ours, images, return_tensors="pt"),
        "uint8": partial(family.ours, images, normalize_on_device=True, return_tensors="pt"),
        "theirs": partial(family.theirs, images, return_tensors="pt"),
    }
    difference = family.difference(steps["ours"](), steps["theirs"]())
    if not difference <= 1e-5:
        raise ValueError(f"The pixels differ by {difference:.2g}; times of two different computations have no ratio.")
    seconds = interleaved_seconds(steps, repeats)
    return {side: ratio_quartiles(seconds["theirs"], seconds[side]) for side in ("ours", "uint8")}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(
        f"Image processors on torchvision, threads: {options.threads}; theirs: transformers {transformers.__version__}.\n"
        f"theirs/ours: time, median of {options.repeats} interleaved repeats [quartiles]; above 1 ours is faster. uint8: "
        "ours with normalize_on_device=True, which leaves normalizing to the tower."
    )
    for name in options.family:
        for workload in options.workload:
            for kind in INPUTS:
                ratios = compare(FAMILIES[name], make_images(WORKLOADS[workload], kind), options.repeats)
                print(
                    f"{name:8} {workload:8} {kind:6} theirs/ours {in_words(ratios['ours']):22} uint8 {in_words(ratios['uint8'])}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
