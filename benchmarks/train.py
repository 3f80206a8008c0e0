"""Training step of gridtower's models beside transformers' own of the same size: time and peak memory, as ratios.

Both sides get the same configuration values, weights and rows, and must agree on the loss and the gradients before
anything is measured. The text model is transformers' on both sides: tower, projector and the placing of features differ.
Usage: `python benchmarks/train.py`, with gridtower installed or PYTHONPATH set to the checkout.
"""

import argparse
import json
import re
from collections.abc import Callable
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
from torch.nn.utils.rnn import pad_sequence

from gridtower import (
    Lfm3VlForConditionalGeneration,
    Lfm3VlImageProcessor,
    PixtralForConditionalGeneration,
    PixtralImageProcessor,
)

SIDES = ("ours", "theirs")
PATCH, MERGE = 16, 2
CELL = PATCH * MERGE  # side in pixels of what becomes one text token
PADDING = 0
LEFT_OUT = {"deepseek_v4_vl": "transformers has no class with DeepSeek-V4's tower to set beside ours"}


class Size(NamedTuple):
    """Widths and layers of a model, cells along the side of the largest image, and words in a row."""

    width: int
    layers: int
    heads: int
    text_width: int
    text_layers: int
    vocabulary: int
    side: int
    words: int

    @property
    def image_token(self) -> int:
        return self.vocabulary - 1


SIZES = {
    "tiny": Size(32, 3, 2, 32, 2, vocabulary=128, side=4, words=4),
    "small": Size(192, 4, 4, 192, 2, vocabulary=4096, side=6, words=24),
    "base": Size(1024, 14, 16, 1024, 8, vocabulary=32768, side=14, words=128),  # images of 448 x 448 pixels
}


def workloads(size: Size) -> dict[str, list[tuple[list[tuple[int, int]], int]]]:
    """By name: for each row of the batch the (rows, columns) of its images, in cells, and its number of words."""
    side, half, third = size.side, size.side // 2, size.side // 3
    mixed = [
        (side, side), (side, half), (half, side), (third, side), (side, third), (half, half), (half, third), (third, third),
    ]  # fmt: skip
    return {
        "mixed": [([image], size.words) for image in mixed],
        "equal": [([(side, side)], size.words)] * 16,
        "text": [
            ([(side, side), (half, side)], size.words),
            ([], 4 * size.words),
            ([(third, half)], 2 * size.words),
            ([], size.words),
        ],
    }


def lfm3_vl_fields(size: Size) -> dict:
    return {
        "vision_config": {
            "hidden_size": size.width, "intermediate_size": size.width * 5 // 2, "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads, "num_key_value_heads": size.heads // 2, "patch_size": PATCH,
        },
        "text_config": {
            "model_type": "lfm3", "vocab_size": size.vocabulary, "hidden_size": size.text_width,
            "intermediate_size": size.text_width * 3, "num_hidden_layers": size.text_layers, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": size.text_width // 4, "pad_token_id": PADDING, "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "image_token_id": size.image_token, "video_token_id": size.vocabulary - 2,
        "vision_start_token_id": size.vocabulary - 3, "vision_end_token_id": size.vocabulary - 4,
        "projector_hidden_size": size.text_width * 2,
    }  # fmt: skip


def lfm3_vl_media(images: list[torch.Tensor]) -> dict:
    processor = Lfm3VlImageProcessor(patch_size=PATCH, merge_size=MERGE, min_pixels=CELL**2)
    packed = processor(images, return_tensors="pt")
    return {"ours": packed, "theirs": packed}


def pixtral_fields(size: Size) -> dict:
    return {
        "vision_config": {
            "model_type": "pixtral", "hidden_size": size.width, "intermediate_size": size.width * 4,
            "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "patch_size": PATCH,
            "image_size": size.side * CELL,
        },
        "text_config": {
            "model_type": "mistral", "vocab_size": size.vocabulary, "hidden_size": size.text_width,
            "intermediate_size": size.text_width * 3, "num_hidden_layers": size.text_layers, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": size.text_width // 4, "sliding_window": None, "rms_norm_eps": 1e-5,
        },
        "image_token_index": size.image_token, "spatial_merge_size": MERGE, "tie_word_embeddings": False,
    }  # fmt: skip


def pixtral_media(images: list[torch.Tensor]) -> dict:
    processor = PixtralImageProcessor(patch_size=PATCH, spatial_merge_size=MERGE)
    layouts = {"ours": "packed", "theirs": "padded"}
    return {side: processor(images, layout=layout, return_tensors="pt") for side, layout in layouts.items()}


class Family(NamedTuple):
    """Both sides' classes, the configuration fields of a size, and images in each side's own form."""

    ours: type
    theirs: type
    fields: Callable[[Size], dict]
    media: Callable[[list[torch.Tensor]], dict]


FAMILIES = {
    "lfm3_vl": Family(
        Lfm3VlForConditionalGeneration, transformers.Lfm3VlForConditionalGeneration, lfm3_vl_fields, lfm3_vl_media
    ),
    "pixtral": Family(
        PixtralForConditionalGeneration, transformers.Mistral3ForConditionalGeneration, pixtral_fields, pixtral_media
    ),
}
SLOW_IMPORTS = [
    *(kind.__module__ for family in FAMILIES.values() for kind in (family.ours, family.theirs)),
    *(kind.__module__ for kind in (Lfm3VlImageProcessor, PixtralImageProcessor)),
]
# Parameters that are trained, by the part's name: those whose name matches.
PARTS = {"all": "", "tower": "vision_tower", "projector": "multi_modal_projector", "text": "language_model|lm_head"}
TOWER_AND_TEXT_LORA = r".*(vision_tower|language_model).*\.([qkvo]|in|out)_proj"


class Case(NamedTuple):
    """One comparison: names from the tables above, and where and how it runs."""

    family: str
    workload: str
    train: str
    size: str
    dtype: str
    attention: str
    device: str
    threads: int


class Tolerance(NamedTuple):
    """Relative differences between the sides that rounding explains."""

    loss: float
    gradient: float


TOLERANCES = {"float32": Tolerance(1e-5, 1e-3), "bfloat16": Tolerance(1e-2, 0.2)}


def make_inputs(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """The same left-padded rows for each side; labels are the words, and no placeholder or padding."""
    size = SIZES[case.size]
    rows = workloads(size)[case.workload]
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shapes_of_row, _ in rows for shape in shapes_of_row]
    images = [
        torch.randint(0, 256, (3, height * CELL, width * CELL), dtype=torch.uint8, generator=generator)
        for height, width in shapes
    ]
    ids = []
    for shapes_of_row, words in rows:
        placeholders = torch.full((sum(height * width for height, width in shapes_of_row),), size.image_token)
        ids.append(torch.cat([placeholders, torch.randint(3, size.vocabulary - 4, (words,), generator=generator)]))
    input_ids = pad_sequence(ids, batch_first=True, padding_value=PADDING, padding_side="left")
    words_only = (input_ids != PADDING) & (input_ids != size.image_token)
    text = {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PADDING).long(),
        "labels": input_ids.masked_fill(~words_only, -100),
    }
    dtype = getattr(torch, case.dtype)
    return {
        side: {
            name: tensor.to(case.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in {**text, **media}.items()
        }
        for side, media in FAMILIES[case.family].media(images).items()
    }


def build_model(case: Case, side: str) -> torch.nn.Module:
    """One side's model with random weights, ready to train the case's parts."""
    family = FAMILIES[case.family]
    kind = getattr(family, side)
    torch.manual_seed(0)
    model = kind(kind.config_class(**family.fields(SIZES[case.size])))
    model.set_attn_implementation(case.attention)
    model.to(case.device, getattr(torch, case.dtype)).train()
    if case.train == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=8, target_modules=TOWER_AND_TEXT_LORA))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(PARTS[case.train], name) is not None)
    return model


def build_pair(case: Case) -> dict[str, torch.nn.Module]:
    """Both sides' models with the same weights."""
    models = {side: build_model(case, side) for side in SIDES}
    models["ours"].load_state_dict(models["theirs"].state_dict())
    return models


def check_agreement(models: dict, inputs: dict, tolerance: Tolerance) -> dict[str, float]:
    """Relative differences between the losses, and between the gradients of the part where they differ most.

    Raises:
        ValueError: a difference beyond the tolerance; times of two different computations have no ratio.
    """
    losses, gradients = {}, {}
    for side, model in models.items():
        loss = model(**inputs[side], use_cache=False).loss
        loss.backward()
        losses[side] = loss.item()
        gradients[side] = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    if gradients["ours"].keys() != gradients["theirs"].keys():
        names = sorted(gradients["ours"].keys() ^ gradients["theirs"].keys())
        raise ValueError(f"Only one side has gradients for {names}; train the same parameters on both.")
    difference = Tolerance(
        abs(losses["ours"] - losses["theirs"]) / abs(losses["theirs"]),
        max(gradient_difference(gradients, pattern) for pattern in PARTS.values()),
    )
    # Written so that a nan is refused too.
    if not (difference.loss <= tolerance.loss and difference.gradient <= tolerance.gradient):
        raise ValueError(
            f"The sides compute different things: losses {losses}, relative differences {difference}; rounding explains "
            f"at most {tolerance}."
        )
    return {"loss": losses["ours"], "loss_difference": difference.loss, "gradient_difference": difference.gradient}


def gradient_difference(gradients: dict[str, dict[str, torch.Tensor]], pattern: str) -> float:
    """Norm of the difference over that of theirs, over the parameters whose names match; 0 where there are none."""
    pairs = [(gradients["ours"][n], g) for n, g in gradients["theirs"].items() if re.search(pattern, n)]
    if not pairs:
        return 0.0
    difference = sum((ours - theirs).square().sum() for ours, theirs in pairs).sqrt()
    return (difference / sum(theirs.square().sum() for _, theirs in pairs).sqrt()).item()


def training_step(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Forward, backward and update, to be called again and again; gradients are freed at its end."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step():
        model(**inputs, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepare_step(case: Case, side: str) -> Callable[[], None]:
    """One side's step, in a process where nothing of the other side has ever been built."""
    torch.set_num_threads(case.threads)
    transformers.logging.set_verbosity_error()
    return training_step(build_model(case, side), make_inputs(case)[side])


def compare(case: Case, repeats: int) -> dict:
    """Check that both sides agree, then measure them; ratios are theirs / ours.

    Raises:
        ValueError: they do not agree.
    """
    inputs = make_inputs(case)
    models = build_pair(case)
    agreement = check_agreement(models, inputs, TOLERANCES[case.dtype])
    steps = {side: training_step(models[side], inputs[side]) for side in SIDES}
    seconds = interleaved_seconds(steps, repeats, device=case.device)
    lower, middle, upper = ratio_quartiles(seconds["theirs"], seconds["ours"])
    del models, steps
    peaks = {side: peak_memory(prepare_step, case, side, device=case.device, imports=SLOW_IMPORTS) for side in SIDES}
    return {
        "family": case.family,
        "train": case.train,
        "workload": case.workload,
        "patches": int(inputs["ours"]["image_grid_thw"].prod(-1).sum()),
        **agreement,
        "time_ratio": middle,
        "time_ratio_quartiles": [lower, upper],
        "seconds": {side: median(times) for side, times in seconds.items()},
        "memory_ratio": peaks["theirs"] / peaks["ours"],
        "peak_bytes": peaks,
    }


def preamble(options: argparse.Namespace) -> str:
    tolerance = TOLERANCES[options.dtype]
    return (
        f"One training step (forward, backward, AdamW) of gridtower beside transformers {transformers.__version__}: "
        f"{options.size}, {options.dtype}, {options.attention}, {options.device}, threads: {options.threads}.\n"
        f"Before measuring, the same rows and weights gave the same loss (within {tolerance.loss:g}) and gradients "
        f"(within {tolerance.gradient:g}) on both sides, relative.\n"
        f"time: theirs / ours, median of {options.repeats} interleaved repeats [quartiles]; above 1 ours is faster.\n"
        f"memory: theirs / ours, {MEASURED_MEMORY[options.device]}, each side in a process of its own, after a first step; "
        "above 1 ours needs less."
    )


def table_row(result: dict) -> str:
    lower, upper = result["time_ratio_quartiles"]
    ratio = in_words((lower, result["time_ratio"], upper))
    seconds, peaks = result["seconds"], {side: peak / 2**20 for side, peak in result["peak_bytes"].items()}
    return (
        f"{result['family']:8} {result['train']:10} {result['workload']:6} {result['patches']:6} patches   "
        f"time {ratio} ({seconds['theirs']:.3f} / {seconds['ours']:.3f} s)   "
        f"memory {result['memory_ratio']:.2f} ({peaks['theirs']:.0f} / {peaks['ours']:.0f} MiB)"
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=list(workloads(SIZES["tiny"])),
        default=list(workloads(SIZES["tiny"])),
        help="mixed: 8 rows with an image each, of 8 shapes; equal: 16 rows with an image of the same shape each; "
        "text: 4 rows with two, no, one and no image",
    )
    parser.add_argument(
        "--train",
        nargs="+",
        choices=[*PARTS, "lora"],
        default=["all"],
        help="the part that learns, everything else is frozen; lora: adapters on the attention of tower and text (needs peft)",
    )
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="small: seconds a step on a CPU; base: for a GPU"
    )
    parser.add_argument("--repeats", type=int, default=5)
    add_machine_options(parser, list(TOLERANCES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    refuse_impossible(parser, options, ("repeats", "threads"), "run this on Linux, or with --device cuda")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    shared = (options.size, options.dtype, options.attention, options.device, options.threads)
    if not options.json:
        print(preamble(options), flush=True)
    results = []
    for family in options.family:
        for train in options.train:
            for workload in options.workload:
                results.append(compare(Case(family, workload, train, *shared), options.repeats))
                if not options.json:
                    print(table_row(results[-1]), flush=True)
    if options.json:
        report = {"setting": vars(options), "measured": preamble(options), "results": results, "left_out": LEFT_OUT}
        print(json.dumps(report))
        return
    for family, reason in LEFT_OUT.items():
        print(f"{family}: left out; {reason}.")


if __name__ == "__main__":
    main()
