"""Vision towers beside transformers' own, and beside their bare products: time and peak memory, as ratios.

Both sides get the same configuration values, weights and pixels, and must agree before anything is measured. *Bare* are
the matrix and attention products that our tower called, on the same weights and shapes, with nothing in between: no
tower can take less time than they do. Usage: `python benchmarks/towers.py`, with gridtower installed or PYTHONPATH set
to the checkout.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import transformers
from side_by_side import (
    MEASURED_MEMORY,
    add_machine_options,
    in_words,
    interleaved_seconds,
    peak_memory,
    ratio_quartiles,
    refuse_impossible,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gridtower import (
    DeepseekV4VisionConfig,
    DeepseekV4VisionModel,
    Lfm3VlVisionModel,
    PixtralVisionModel,
)
from gridtower.modeling.image_patches import patches_of_images

SIDES = ("ours", "theirs")
CELL = 32  # side in pixels of what becomes one text token


def mixed_sizes(count: int, smallest: int, largest: int) -> list[tuple[int, int]]:
    """(height, width) in pixels, both anywhere between the bounds; the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    sides = torch.randint(smallest // CELL, largest // CELL + 1, (count, 2), generator=generator) * CELL
    return [tuple(pair) for pair in sides.tolist()]


# By name: (temporal steps, height, width) of each image or video, in pixels.
COUNTS = (1, 2, 4, 8, 16, 32)
WORKLOADS = {
    "one-1024": [(1, 1024, 1024)],
    "16x448": [(1, 448, 448)] * 16,
    "32-mixed": [(1, height, width) for height, width in mixed_sizes(32, 64, 896)],
    "video-448": [(16, 448, 448)],  # 32 frames, two of them a temporal step
    "128x64": [(1, 64, 64)] * 128,
    **{f"{count}x384": [(1, 384, 384)] * count for count in COUNTS},
}


def lfm3_vl_fields(layers: int, scale: int) -> dict:
    return {
        "hidden_size": 1024 // scale, "intermediate_size": 2560 // scale, "num_hidden_layers": layers,
        "num_attention_heads": 16 // scale, "num_key_value_heads": 8 // scale, "patch_size": 16,
        "layer_types": [("conv", "full_attention")[layer % 2] for layer in range(layers)],
    }  # fmt: skip


def pixtral_fields(layers: int, scale: int) -> dict:
    return {
        "hidden_size": 1024 // scale, "intermediate_size": 4096 // scale, "num_hidden_layers": layers,
        "num_attention_heads": 16 // scale, "patch_size": 16, "image_size": 1024, "hidden_act": "silu",
    }  # fmt: skip


def deepseek_v4_vl_fields(layers: int, scale: int) -> dict:
    return {
        "hidden_size": 1024 // scale, "intermediate_size": 2816 // scale, "num_hidden_layers": layers,
        "num_attention_heads": 16 // scale, "patch_size": 16,
    }  # fmt: skip


class Family(NamedTuple):
    """Both sides' classes (transformers has none for DeepSeek-V4), and configuration fields: those of the checkpoint."""

    ours: type
    theirs: type | None
    fields: Callable[[int, int], dict]
    videos: bool = False


FAMILIES = {
    "lfm3_vl": Family(Lfm3VlVisionModel, transformers.Lfm3VlVisionModel, lfm3_vl_fields, videos=True),
    "pixtral": Family(PixtralVisionModel, transformers.PixtralVisionModel, pixtral_fields),
    "deepseek_v4_vl": Family(DeepseekV4VisionModel, None, deepseek_v4_vl_fields),
}
SLOW_IMPORTS = sorted({kind.__module__ for family in FAMILIES.values() for kind in family[:2] if kind is not None})


class Case(NamedTuple):
    """One comparison: names from the tables above, and where and how it runs."""

    family: str
    workload: str
    mode: str
    layers: int
    scale: int
    dtype: str
    attention: str
    device: str
    threads: int


TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


def make_inputs(case: Case) -> dict[str, dict]:
    """The same pixels for each side, in its own form."""
    generator = torch.Generator().manual_seed(0)
    sizes = WORKLOADS[case.workload]
    dtype = getattr(torch, case.dtype)
    if case.family == "pixtral":
        # Both sides were made for images; ours reads the patches that they are cut into.
        tallest, widest = (max(size[axis] for size in sizes) for axis in (1, 2))
        images = torch.zeros(len(sizes), 3, tallest, widest, dtype=dtype)
        for image, (_, height, width) in zip(images, sizes):
            image[:, :height, :width] = torch.randn(3, height, width, generator=generator)
        bounds = torch.tensor([size[1:] for size in sizes])
        patches, grid = patches_of_images(images, bounds, 16, 3, merge=1)
        theirs = {"pixel_values": images, "image_sizes": bounds.tolist()}
    else:
        grid = torch.tensor([(steps, height // 16, width // 16) for steps, height, width in sizes])
        patch_dim = 3 * 16**2 * (2 if case.family == "lfm3_vl" else 1)
        patches = torch.randn(int(grid.prod(-1).sum()), patch_dim, generator=generator).to(dtype)
        theirs = {"pixel_values": patches, "grid_thw": grid}
    inputs = {"ours": {"pixel_values": patches, "grid_thw": grid}, "theirs": theirs}
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(case.device), inputs)


def build_tower(case: Case, side: str) -> torch.nn.Module:
    family = FAMILIES[case.family]
    kind = getattr(family, side)
    config_class = DeepseekV4VisionConfig if kind is DeepseekV4VisionModel else kind.config_class
    torch.manual_seed(0)
    tower = kind(config_class(**family.fields(case.layers, case.scale)))
    tower.set_attn_implementation(case.attention)
    tower.to(case.device, getattr(torch, case.dtype))
    return tower.train(case.mode == "train").requires_grad_(case.mode == "train")


def make_step(tower: torch.nn.Module, inputs: dict, mode: str) -> Callable[[], torch.Tensor]:
    """`mode` "forward": without a graph; "train": forward and backward, the gradients freed at the end."""

    def forward():
        with torch.no_grad():
            return tower(**inputs).last_hidden_state

    def train():
        states = tower(**inputs).last_hidden_state
        states.float().square().mean().backward()
        tower.zero_grad()
        return states

    return {"forward": forward, "train": train}[mode]


def prepare_step(case: Case, side: str) -> Callable[[], torch.Tensor]:
    """One side's step, in a process where nothing of the other side has ever been built."""
    torch.set_num_threads(case.threads)
    transformers.logging.set_verbosity_error()
    return make_step(build_tower(case, side), make_inputs(case)[side], case.mode)


class BareProducts(TorchDispatchMode):
    """Notes each matrix and attention product that is called; `replay` calls them again, and nothing else.

    Weights are used where they lie; all other operands are replaced by numbers of the same shapes and strides, one
    buffer for each.
    """

    def __init__(self, weights):
        super().__init__()
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.buffers = {}
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.removeprefix("aten::").split(".")[0] in ("mm", "addmm", "bmm", "baddbmm") or "dot_product" in name:
            self.calls.append((function, tree_map_only(torch.Tensor, self.stand_in, args), kwargs or {}))
        return function(*args, **(kwargs or {}))

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self.weights:
            return tensor.detach()
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self.buffers:
            length = 1 + sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride()))
            numbers = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
            if tensor.is_floating_point():
                numbers.normal_()
            self.buffers[key] = numbers.as_strided(tensor.shape, tensor.stride())
        return self.buffers[key]

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over that of theirs."""
    ours, theirs = ours.detach().float().flatten(), theirs.detach().float().flatten()
    return ((ours - theirs).norm() / theirs.norm()).item()


def compare(case: Case, repeats: int, memory: bool) -> dict:
    """Check that both sides agree, then measure them.

    Raises:
        ValueError: they do not agree.
    """
    sides = SIDES if FAMILIES[case.family].theirs is not None else SIDES[:1]
    inputs = make_inputs(case)
    towers = {side: build_tower(case, side) for side in sides}
    steps = {side: make_step(towers[side], inputs[side], case.mode) for side in sides}
    result = {**case._asdict(), "patches": len(inputs["ours"]["pixel_values"])}
    with BareProducts(towers["ours"].parameters()) as bare:
        ours = steps["ours"]()
    if "theirs" in sides:
        towers["theirs"].load_state_dict(towers["ours"].state_dict())
        result["difference"] = largest_difference(ours, steps["theirs"]())
        if not result["difference"] <= TOLERANCES[case.dtype]:
            raise ValueError(
                f"{case}: the towers differ by {result['difference']:.2g}; rounding explains {TOLERANCES[case.dtype]}."
            )
    del ours
    seconds = interleaved_seconds({**steps, "bare": bare.replay}, repeats, device=case.device)
    result["seconds"] = {name: median(times) for name, times in seconds.items()}
    result["over_bare"] = ratio_quartiles(seconds["ours"], seconds["bare"])
    if "theirs" in sides:
        result["speedup"] = ratio_quartiles(seconds["theirs"], seconds["ours"])
    del towers, steps, bare
    if memory:
        peaks = {
            side: peak_memory(prepare_step, case, side, device=case.device, imports=SLOW_IMPORTS) for side in sides
        }
        result["peak_bytes"] = peaks
        result["peak_bytes_per_patch"] = {side: peak / result["patches"] for side, peak in peaks.items()}
        if "theirs" in sides:
            result["memory_share"] = peaks["ours"] / peaks["theirs"]
    return result


def preamble(options: argparse.Namespace) -> str:
    return (
        f"Towers of {options.layers} layers at the checkpoints' widths, {options.dtype}, {options.attention}, "
        f"{options.device}, threads: {options.threads}; theirs: transformers {transformers.__version__}.\n"
        f"Before measuring, the same pixels and weights gave the same states on both sides "
        f"(within {TOLERANCES[options.dtype]:g}, relative).\n"
        f"theirs/ours: time, median of {options.repeats} interleaved repeats [quartiles]; above 1 ours is faster.\n"
        "ours/bare: time over that of our tower's matrix and attention products alone; 1 is the least there can be.\n"
        f"memory: ours / theirs, {MEASURED_MEMORY[options.device]}, each side in a process of its own, after a first "
        "step; and ours per patch."
    )


def table_row(result: dict) -> str:
    memory = ""
    if "peak_bytes" in result:
        share = f"{result['memory_share']:.2f}" if "memory_share" in result else "-"
        memory = f"   memory {share:4} ({result['peak_bytes_per_patch']['ours'] / 2**10:.1f} KiB a patch)"
    return (
        f"{result['family']:14} {result['mode']:7} {result['workload']:9} {result['patches']:6} patches   "
        f"theirs/ours {in_words(result.get('speedup')):22}   ours/bare {in_words(result['over_bare']):22}{memory}"
    )


def draw(results: list[dict], path: Path) -> None:
    """Time and peak memory against the number of images, ours and theirs, of the workloads that differ in it alone."""
    import matplotlib.pyplot as plt

    series = [f"{count}x384" for count in COUNTS]
    families = list(dict.fromkeys(result["family"] for result in results))
    figure, axes = plt.subplots(2, len(families), figsize=(4 * len(families), 6), squeeze=False, sharex=True)
    for column, family in enumerate(families):
        by_workload = {
            result["workload"]: result
            for result in results
            if result["family"] == family and result["mode"] == results[0]["mode"] and result["workload"] in series
        }
        for side in SIDES:
            for row, measure in enumerate(("seconds", "peak_bytes")):
                points = [
                    (COUNTS[series.index(name)], result[measure][side])
                    for name, result in by_workload.items()
                    if side in result.get(measure, {})
                ]
                axes[row, column].loglog(*zip(*points), "o-", base=2, label=side) if points else None
        axes[0, column].set_title(family)
        axes[1, column].set_xlabel("images of 384 x 384 pixels")
        axes[0, column].legend()
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("peak bytes")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--mode", nargs="+", choices=["forward", "train"], default=["forward"])
    parser.add_argument("--layers", type=int, default=2, help="ratios hardly depend on it")
    parser.add_argument(
        "--scale", type=int, choices=[1, 2, 4, 8], default=1, help="divides all widths, to try the script"
    )
    parser.add_argument("--repeats", type=int, default=3)
    add_machine_options(parser, list(TOLERANCES))
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    parser.add_argument(
        "--plot", type=Path, help="draw time and memory against images into this file (needs matplotlib)"
    )
    parser.add_argument("--json", type=Path, help="also write all that was measured into this file")
    options = parser.parse_args(arguments)
    memory = None if options.no_memory else "add --no-memory, or run this on Linux or with --device cuda"
    refuse_impossible(parser, options, ("layers", "repeats", "threads"), memory)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    print(preamble(options), flush=True)
    shared = (options.layers, options.scale, options.dtype, options.attention, options.device, options.threads)
    results = []
    for family in options.family:
        for mode in options.mode:
            for workload in options.workload:
                if workload.startswith("video") and not FAMILIES[family].videos:
                    continue
                results.append(compare(Case(family, workload, mode, *shared), options.repeats, not options.no_memory))
                print(table_row(results[-1]), flush=True)
    if options.json is not None:
        report = {"measured": preamble(options), "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
