"""How much memory a model needs, and on how many devices it fits: from its `config.json`, without its weights.

Weights are counted on the meta device. Activations and cache are those of the model's own code, which reads a prompt on
tensors that have shapes and no values; no formula of a family stands here.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from transformers.core_model_loading import build_glob_alternation
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer, get_kv_heads_per_rank
from transformers.integrations.accelerate import get_balanced_memory, get_device, infer_auto_device_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration.configuration_deepseek_v4_vl import DeepseekV4VlConfig
from .hub_cards.export import has_processor_files, read_family, source_folder
from .processing.processing_deepseek_v4_vl import ALIGNMENT, BLOCK_TOKENS, PAD, interleaved_block
from .traced_memory import TracedMemory, held_bytes

MARGIN = 0.1
"""Share of a device that a plan leaves free: for the driver, for kernels' scratch space and for fragmentation."""

DEVICES = ("cuda", "cpu")
DTYPES = ("bfloat16", "float16", "float32")
# Tokens of text that a prompt has by default, beside its images.
_TEXT_TOKENS = 1024
_PARTS = {"model.vision_tower.": "tower", "model.language_model.": "text", "lm_head.": "head"}
_FUSED = "flash_on_shapes"


@dataclass(frozen=True)
class ImageCost:
    """What an image of `width` x `height` pixels becomes: patches for the tower, tokens in the prompt."""

    width: int
    height: int
    patches: int
    tokens: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device."""

    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class Placement:
    """A way to place the model: the bytes on each device, whether they fit (None: no limit was given), or why it cannot be."""

    name: str
    devices: tuple[DeviceMemory, ...] = ()
    fits: bool | None = None
    obstacle: str | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What [`plan_memory`] found, in bytes.

    `tower_peak` and `prefill_peak` are the most that is held, beside the weights, until the images are encoded and from then
    until the first token is predicted; `cache` is what stays for the tokens after it. `memory` is that of a device.
    """

    model_type: str
    dtype: str
    device: str
    batch: int
    context: int
    memory: float | None
    images: tuple[ImageCost, ...]
    weights: dict[str, int]
    tower_peak: int
    prefill_peak: int
    cache: int
    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = ()

    @property
    def activations(self) -> int:
        """What is needed beside weights and cache."""
        return max(self.tower_peak, self.prefill_peak) - self.cache

    @property
    def fits(self) -> bool | None:
        """Whether there is a way to place the model; None where no limit was given."""
        return None if self.memory is None else any(placement.fits for placement in self.placements)

    def to_dict(self) -> dict:
        """Everything as plain numbers, strings, lists and dictionaries."""
        return asdict(self) | {"activations": self.activations, "fits": self.fits}

    def table(self) -> str:
        """The same for people, one line for each device that differs."""
        lines = [f"{self.model_type} in {self.dtype} on {self.device}, {self.batch} x {self.context} tokens"]
        lines += [
            f"image of {image.width} x {image.height}: {image.patches} patches, {image.tokens} tokens"
            for image in dict.fromkeys(self.images)
        ]
        lines.append("weights: " + ", ".join(f"{part} {_in_units(size)}" for part, size in self.weights.items()))
        lines.append(
            f"at most beside them: {_in_units(self.tower_peak)} until the images are encoded, "
            f"{_in_units(self.prefill_peak)} until the first token"
        )
        lines.append("{:32}{:>12}{:>12}{:>13}{:>12}".format("", "weights", "cache", "activations", "total"))
        for placement in self.placements:
            lines += self._lines(placement)
        return "\n".join([*lines, *self.notes])

    def _lines(self, placement: Placement) -> list[str]:
        if placement.obstacle is not None:
            return [f"{placement.name:32}not possible: {placement.obstacle}"]
        lines = []
        for index, device in enumerate(placement.devices):
            of = f", device {index}" if len(set(placement.devices)) > 1 else ", each" if index == 0 else None
            if of is None:
                break
            sizes = map(_in_units, (device.weights, device.cache, device.activations, device.total))
            name = placement.name if len(placement.devices) == 1 else placement.name + of
            lines.append("{:32}{:>12}{:>12}{:>13}{:>12}".format(name, *sizes))
        if placement.fits is not None:
            verdict = "fits" if placement.fits else "does not fit"
            lines[-1] += f"  {verdict} {self.memory:g} GB, {MARGIN:.0%} left free"
        return lines


def plan_memory(
    model: str | os.PathLike,
    *,
    gpus: int = 1,
    memory: float | None = None,
    image_sizes: Sequence[tuple[int, int]] = ((1024, 1024),),
    images: int = 1,
    batch: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    device: str = "cuda",
) -> MemoryPlan:
    """Memory that a model needs to read prompts with images, all at once, and to keep their cache.

    Args:
        model: folder (its `config.json` is enough), hub repository, or `"default"`; as `gridtower describe` takes them.
        gpus: devices to place the model on.
        memory: gigabytes (10**9 bytes) of each; `MARGIN` of it is left free. None: nothing is said of fitting.
        image_sizes: (width, height) in pixels of the images in each row.
        images: how many of each size a row has; 0: text alone.
        batch: rows.
        context: tokens of a row, image tokens included, all of them read as one prompt; by default those of the images and
            1024 more.
        dtype: of the weights, one of DTYPES; None: the configuration's, or bfloat16.
        device: "cuda": attention in fused kernels, images side by side; "cpu": groups of images one after the other.

    Raises:
        ValueError: a number below 1, an unknown dtype or device, a context that does not hold the images, or no whole model of
            a family that gridtower knows.
    """
    _refuse_impossible(gpus=gpus, memory=memory, images=images, batch=batch, context=context)
    _refuse_unknown(dtype=(dtype, (None, *DTYPES)), device=(device, DEVICES))
    folder = source_folder(model)
    config, family = _configuration(folder)
    sizes = [tuple(size) for size in image_sizes] * images
    costs, row, grids = _prompt(folder, config, family, sizes)
    context = len(row) + _TEXT_TOKENS if context is None else context
    if context <= len(row):
        raise ValueError(
            f"context is {context} and the {len(sizes)} images of a row take {len(row)} tokens; give {len(row) + 1} or more, or "
            "fewer or smaller images."
        )
    dtype = dtype or str(config.dtype or "bfloat16").removeprefix("torch.")
    shapes = _on_meta(config, getattr(torch, dtype))
    weights, notes = _weight_bytes(shapes, config, folder)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and context > longest:
        notes += (f"The text model was made for {longest} tokens.",)
    row += [_text_token(config)] * (context - len(row))
    traced = _traced(shapes, torch.tensor([row] * batch), torch.tensor(grids * batch).view(-1, 3), device)
    limit = None if memory is None else int(memory * 1e9 * (1 - MARGIN))
    return MemoryPlan(
        model_type=config.model_type,
        dtype=dtype,
        device=device,
        batch=batch,
        context=context,
        memory=memory,
        images=costs,
        weights=_by_part(weights),
        tower_peak=traced.tower_peak,
        prefill_peak=traced.prefill_peak,
        cache=traced.cache,
        placements=tuple(_placements(shapes, weights, traced, gpus, limit)),
        notes=notes,
    )


def _refuse_impossible(*, images, memory, **numbers) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; give 1 or more.")
    if images < 0:
        raise ValueError(f"images is {images}; give 0 or more.")
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"memory is {memory}; give the gigabytes of a device, more than 0.")


def _refuse_unknown(**choices) -> None:
    for name, (given, known) in choices.items():
        if given not in known:
            raise ValueError(f"{name} is {given!r}; give one of {[value for value in known if value is not None]}.")


def _configuration(folder: Path):
    """The configuration of the whole model in a folder, and its family."""
    family, fields = read_family(folder)
    if fields.get("model_type") == family.vision_config.model_type:
        raise ValueError(f"{folder} holds a tower alone; name the folder of a whole model.")
    return family.config.from_pretrained(folder), family


def _prompt(folder: Path, config, family, sizes) -> tuple[tuple[ImageCost, ...], list[int], list[list[int]]]:
    """What each image costs, the tokens of a row up to the end of its last image, and the images' grids."""
    for index, size in enumerate(sizes):
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"image_sizes[{index}] is {size}; give (width, height), both 1 or more.")
    if not sizes:
        return (), [], []
    processor = _image_processor(folder, config, family)
    # Temporal steps, rows and columns, in patches.
    grids = [[1, *processor.image_grid(height, width)] for width, height in sizes]
    costs, row = [], []
    for size, grid in zip(sizes, grids):
        block = _image_tokens(config, grid, len(row))
        costs.append(ImageCost(*size, math.prod(grid), len(block)))
        row += block
    return tuple(costs), row, grids


def _image_processor(folder: Path, config, family):
    if has_processor_files(folder) or config.model_type != "lfm3_vl":
        return family.image_processor.from_pretrained(folder)
    vision = config.vision_config
    names = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    return family.image_processor(**{name: getattr(vision, field) for name, field in names.items()})


def _image_tokens(config, grid: list[int], start: int) -> list[int]:
    """Ids of all tokens that an image becomes in a prompt, `start` tokens standing before it."""
    _, rows, cols = grid
    if isinstance(config, DeepseekV4VlConfig):
        ids = {name: config.image_start_token_id + number for number, name in enumerate(BLOCK_TOKENS)}
        ratio = config.vision_config.downsample_ratio
        pads = (ALIGNMENT - 1 - start) % ALIGNMENT
        return [ids[name] for name in [PAD] * pads + interleaved_block(-(-rows // ratio), -(-cols // ratio))]
    merge, text = config.vision_config.spatial_merge_size, _text_token(config)
    cells = [config.image_token_id] * (cols // merge)
    if config.model_type == "lfm3_vl":
        # Vision start and end stand around it.
        return [text, *cells * (rows // merge), text]
    # A break or the end stands after each row.
    return [*cells, text] * (rows // merge)


def _text_token(config) -> int:
    """An id that stands for no image and no video."""
    placeholders = (getattr(config, "image_token_id", None), getattr(config, "video_token_id", None))
    return next(token for token in range(3) if token not in placeholders)


def _on_meta(config, dtype: torch.dtype) -> nn.Module:
    """The model as `from_pretrained` would make it, on the meta device."""
    name = config.hub_classes["AutoModelForImageTextToText"].split(".")[1]
    with torch.device("meta"):
        model = getattr(import_module(__package__), name)._from_config(config, dtype=dtype)
    plan = model._get_dtype_plan(dtype)
    if plan:
        kept, by_group, _ = build_glob_alternation(list(plan))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if (match := kept.search(name)) and tensor.is_floating_point():
                tensor.data = tensor.data.to(plan[by_group[match.lastgroup]])
    model.tie_weights()
    return model.eval()


def _weight_bytes(model: nn.Module, config, folder: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Bytes of every parameter and buffer by name, tied ones once; and what to know of them."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sizes = {name: tensor.nbytes for name, tensor in tensors}
    if getattr(config, "quantization_config", None) is None:
        return sizes, ()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return sizes, (f"The weights are quantized and not in {folder}: counted in full width.",)
    text = [name for name in sizes if name.startswith("model.language_model.")]
    on_disk = sum(map(_bytes_in_file, files)) - sum(size for name, size in sizes.items() if name not in set(text))
    share = on_disk / sum(sizes[name] for name in text)
    return sizes | {name: int(sizes[name] * share) for name in text}, (
        "The text weights are counted as on disk, quantized.",
    )


def _bytes_in_file(path: Path) -> int:
    """Bytes of the tensors in a safetensors file, but for the layers of DeepSeek-V4 that predict further tokens: none loads them."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    places = [
        fields["data_offsets"] for name, fields in header.items() if name != "__metadata__" and "mtp." not in name
    ]
    return sum(end - start for start, end in places)


def _by_part(sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of tower, projector (with the vectors of an image's marks), text and head; a tied head has none of its own."""
    parts = dict.fromkeys(("tower", "projector", "text", "head"), 0)
    for name, size in sizes.items():
        parts[next((part for prefix, part in _PARTS.items() if name.startswith(prefix)), "projector")] += size
    return parts


@dataclass(frozen=True)
class _Traced:
    """Bytes that reading the prompts needs; `layers` holds those of keys and values, and of other states, by text layer."""

    tower_peak: int
    prefill_peak: int
    layers: tuple[tuple[int, int], ...]

    @property
    def cache(self) -> int:
        return sum(map(sum, self.layers))

    @property
    def activations(self) -> int:
        return max(self.tower_peak, self.prefill_peak) - self.cache


@torch.no_grad()
def _traced(model: nn.Module, input_ids: torch.Tensor, grids: torch.Tensor, device: str) -> _Traced:
    """Reads the prompts as `generate` does, on shapes; afterwards the model is one of fake tensors."""
    trace = TracedMemory()
    trace.adopt(model)
    vision = model.config.vision_config
    if device == "cuda":
        # Towers then neither take images in groups, as on a CPU, nor one call of attention for each of their shapes.
        ALL_ATTENTION_FUNCTIONS.register(_FUSED, _fused_attention)
        vision._attn_implementation = _FUSED
    images = {}
    if len(grids):
        pixels = torch.empty(int(grids.prod(-1).sum()), vision.patch_dim, device="meta")
        images = {"pixel_values": trace.stand_in(pixels), "image_grid_thw": grids}
        del pixels
    peaks = []

    def images_are_encoded(module, args, kwargs):
        peaks.append(trace.peak)
        trace.peak = trace.live

    hook = model.model.language_model.register_forward_pre_hook(images_are_encoded, with_kwargs=True)
    with trace:
        cache = model(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            use_cache=True,
            logits_to_keep=1,
            **images,
        ).cache
    hook.remove()
    layers = []
    for layer in cache.layers:
        attended = held_bytes(getattr(layer, "keys", None), getattr(layer, "values", None))
        layers.append((attended, held_bytes(layer) - attended))
    return _Traced(peaks[0], trace.peak, tuple(layers))


def _fused_attention(module, query, key, value, attention_mask, **kwargs):
    """Shapes of a variable-length kernel: its output, and while it runs the logarithm of each row's sum."""
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    del sums
    return query.new_empty(query.transpose(1, 2).shape), None


def _placements(model: nn.Module, weights: dict[str, int], traced: _Traced, gpus: int, limit: int | None):
    """On one device, and on all by layers and by tensors."""
    whole = DeviceMemory(sum(weights.values()), traced.cache, traced.activations)
    yield _placed("one device", [whole], limit)
    if gpus > 1:
        yield _split_by_layers(model, weights, traced, gpus, limit)
        yield _split_by_tensors(model, weights, traced, gpus, limit)


def _placed(name: str, devices: list[DeviceMemory], limit: int | None) -> Placement:
    fits = None if limit is None else all(device.total <= limit for device in devices)
    return Placement(name, tuple(devices), fits)


def _split_by_layers(model, weights, traced: _Traced, gpus: int, limit: int | None) -> Placement:
    """As `device_map="auto"` would, were each device told to leave room for activations and its share of the cache.

    Activations count in full on each device that has layers.
    """
    name = f"device_map over {gpus}"
    room = sum(weights.values())
    if limit is not None:
        room = min(room, limit - traced.activations - traced.cache // gpus)
    if room <= 0:
        return Placement(name, fits=False, obstacle="activations and cache alone do not fit")
    # The map is made from the sizes of tensors, which are those of weights that are not quantized.
    full = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    most = dict.fromkeys(range(gpus), int(room * full / sum(weights.values())))
    unsplit = model._no_split_modules
    with _devices_elsewhere():
        balanced = get_balanced_memory(model, max_memory=most, no_split_module_classes=unsplit)
        device_map = infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=unsplit)
    if not set(device_map.values()) <= set(range(gpus)):
        return Placement(name, fits=False, obstacle="a part of the weights would be offloaded")
    on_device = [0] * gpus
    for tensor, size in weights.items():
        on_device[get_device(device_map, tensor)] += size
    caches = [0] * gpus
    for index, layer in enumerate(traced.layers):
        caches[get_device(device_map, f"model.language_model.layers.{index}.")] += sum(layer)
    used = set(device_map.values())
    devices = [
        DeviceMemory(*sizes, traced.activations if index in used else 0)
        for index, sizes in enumerate(zip(on_device, caches))
    ]
    return _placed(name, devices, limit)


@contextmanager
def _devices_elsewhere():
    """Without accelerate's warnings that this machine lacks the devices that are planned for."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _split_by_tensors(model, weights, traced: _Traced, gpus: int, limit: int | None) -> Placement:
    """What the model's `tp_plan` shards, divided; all other weights, the activations and other states on each device."""
    name = f"tensor parallel over {gpus}"
    # Of single modules and parameters; without the parts whose heads do not divide, which stay whole.
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=gpus))
    text = {key: style for key, style in plan.items() if key.startswith("model.language_model.")}
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", 1)
    on_each = get_kv_heads_per_rank(text, heads, gpus)
    sharded = {tensor for tensor, value in model.named_parameters() if _is_sharded(plan.get(tensor), value.ndim)}
    on_device = sum(-(-size // gpus) if tensor in sharded else size for tensor, size in weights.items())
    cache = sum(keys * on_each // heads + other for keys, other in traced.layers)
    return _placed(name, [DeviceMemory(on_device, cache, traced.activations)] * gpus, limit)


def _is_sharded(style: str | None, ndim: int) -> bool:
    """Whether a plan's style divides a parameter."""
    if style is None or (ndim == 1 and "rowwise" in style):
        return False
    return type(ALL_PARALLEL_STYLES[style]).shard_param is not TensorParallelLayer.shard_param


def _in_units(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
