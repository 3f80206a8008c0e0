"""Mistral's own Pixtral folders: `params.json` and `consolidated*.safetensors`, read, written and converted.

Two things differ from the published Hugging Face layout: names, and the order of rows in query and key projections.
Mistral turns neighbouring rows (2i, 2i + 1) of a head together, the layout here rows (i, i + head_dim / 2). Tensors are
streamed: at no time does a conversion hold more than one.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from ..configuration.configuration_pixtral import PixtralConfig
from ..configuration.native_params_pixtral import (
    config_fields,
    is_native_folder,
    params_from_config,
    read_params,
)

_TOP = {
    "tok_embeddings": "language_model.model.embed_tokens",
    "norm": "language_model.model.norm",
    "output": "language_model.lm_head",
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
}
_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_TEXT_LAYER = {
    **{f"attention.{native}": f"self_attn.{ours}" for native, ours in _ATTENTION.items()},
    **{f"feed_forward.{native}": f"mlp.{ours}" for native, ours in _FEED_FORWARD.items()},
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_VISION_LAYER = {
    **{f"attention.{native}": f"attention.{ours}" for native, ours in _ATTENTION.items()},
    **{f"feed_forward.{native}": f"feed_forward.{ours}" for native, ours in _FEED_FORWARD.items()},
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Files that both kinds of folder hold under one name.
_SHARED_FILES = ("tekken.json", "SYSTEM_PROMPT.txt", "LICENSE")


class Module(NamedTuple):
    """A module's native and published name, and the heads whose rows the two layouts order differently, if any."""

    native: str
    published: str
    heads: int | None


def modules(config: PixtralConfig) -> list[Module]:
    """Every module of a native checkpoint."""
    text, vision = config.text_config, config.vision_config
    text_heads = {"attention.wq": text.num_attention_heads, "attention.wk": text.num_key_value_heads}
    vision_heads = dict.fromkeys(text_heads, vision.num_attention_heads)
    towers = [
        ("layers", "language_model.model.layers", text.num_hidden_layers, _TEXT_LAYER, text_heads),
        (
            "vision_encoder.transformer.layers", "vision_tower.transformer.layers",
            vision.num_hidden_layers, _VISION_LAYER, vision_heads,
        ),
    ]  # fmt: skip
    found = [Module(native, published, None) for native, published in _TOP.items()]
    for native_stem, published_stem, count, leaves, heads in towers:
        found += [
            Module(f"{native_stem}.{index}.{native}", f"{published_stem}.{index}.{published}", heads.get(native))
            for index in range(count)
            for native, published in leaves.items()
        ]
    return found


def published_names(config: PixtralConfig) -> dict[str, tuple[str, int | None]]:
    """Native module name -> published name, heads."""
    return {module.native: (module.published, module.heads) for module in modules(config)}


def native_names(config: PixtralConfig) -> dict[str, tuple[str, int | None]]:
    """Published module name, or the name of the same module in a model -> native name, heads."""
    names = {}
    for module in modules(config):
        in_model = module.published.replace("language_model.lm_head", "lm_head").replace(
            "language_model.model", "language_model"
        )
        in_model = in_model if in_model == "lm_head" else f"model.{in_model}"
        names |= dict.fromkeys((module.published, in_model), (module.native, module.heads))
    return names


def halves_from_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (heads * head_dim, ...) from Mistral's order to the published one."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def pairs_from_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The way back."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk, under the name and in the order of rows that it is to have. Indexing reads it."""

    name: str
    source: str
    file: safe_open
    reorder: Callable[[torch.Tensor, int], torch.Tensor]
    heads: int | None

    def __getitem__(self, index):
        tensor = self.file.get_tensor(self.source)
        return (tensor if self.heads is None else self.reorder(tensor, self.heads))[index]

    def get_shape(self) -> list[int]:
        return self.file.get_slice(self.source).get_shape()

    def get_dtype(self) -> str:
        """As safetensors names it, such as "BF16"."""
        return self.file.get_slice(self.source).get_dtype()

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.get_dtype()]

    def is_floating_point(self) -> bool:
        return True


def stored_tensors(
    files: list[Path],
    names: dict[str, tuple[str, int | None]],
    reorder: Callable[[torch.Tensor, int], torch.Tensor],
) -> dict[Path, list[StoredTensor]]:
    """What each of `files` holds, in the order of the file, named and ordered for the other layout; nothing is read yet.

    Raises:
        ValueError: a tensor that `names` has no module for, or that is not of floating point.
    """
    held, unknown = {}, []
    for path in files:
        file, held[path] = safe_open(path, framework="pt"), []
        for source in file.offset_keys():
            module, _, leaf = source.rpartition(".")
            if module not in names or leaf not in ("weight", "bias"):
                unknown.append(source)
                continue
            name, heads = names[module]
            held[path].append(StoredTensor(f"{name}.{leaf}", source, file, reorder, heads))
            if held[path][-1].get_dtype() not in _DTYPES:
                raise ValueError(
                    f"{source} in {path} is {held[path][-1].get_dtype()}; only {', '.join(_DTYPES)} can be converted, take "
                    "the checkpoint before quantisation."
                )
    if unknown:
        raise ValueError(
            f"{files[0].parent} holds {len(unknown)} tensors that a Pixtral checkpoint does not have, such as {unknown[:3]}; "
            "does the description beside them (params.json or config.json) belong to them?"
        )
    return held


def read_native_config(folder) -> PixtralConfig:
    """Configuration of a native folder, of the class whose published shape it has.

    Raises:
        ValueError: there is no `params.json`, or it describes something else.
    """
    if not (Path(folder) / "params.json").is_file():
        raise ValueError(f"{folder} has no params.json; give the folder of a checkpoint in Mistral's own layout.")
    return PixtralConfig.from_dict(config_fields(read_params(folder)))


def native_state_dict(folder, config: PixtralConfig) -> dict[str, StoredTensor]:
    """The tensors of a native folder under their published names, to be read by transformers' loader."""
    files = _weight_files(Path(folder), "consolidated")
    held = stored_tensors(files, published_names(config), halves_from_pairs)
    return {tensor.name: tensor for tensors in held.values() for tensor in tensors}


class ReadsNativeFolders:
    """First base of the full models: `from_pretrained` takes Mistral's own folders too."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """As transformers', and for a local folder with `params.json` and `consolidated*.safetensors`.

        Tensors of such a folder are read one at a time, renamed and reordered on the way.
        """
        folder = pretrained_model_name_or_path
        if folder is None or not is_native_folder(folder):
            return super().from_pretrained(folder, *model_args, config=config, **kwargs)
        config = read_native_config(folder) if config is None else config
        tensors = native_state_dict(folder, config)
        loaded = super().from_pretrained(None, *model_args, config=config, state_dict=tensors, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = str(folder)
        return loaded


def native_to_hf(folder, out) -> Path:
    """Convert a native folder to one that transformers' classes load: weights, `config.json`, `tekken.json`.

    Args:
        folder: holds `params.json` and `consolidated*.safetensors`.
        out: created; weight files match those of `folder` one to one, with an index where there are several.

    Returns:
        `out`.

    Raises:
        ValueError: the folder is not native, or holds tensors that no Pixtral has; before anything is written.
    """
    folder, out = Path(folder), Path(out)
    config = read_native_config(folder)
    held = stored_tensors(_weight_files(folder, "consolidated"), published_names(config), halves_from_pairs)
    config.dtype = next(tensor.dtype for tensors in held.values() for tensor in tensors)
    out.mkdir(parents=True, exist_ok=True)
    _write_weights(held, out, "model")
    config.save_pretrained(out)
    _copy_shared(folder, out)
    return out


def hf_to_native(folder, out) -> Path:
    """Convert a folder in the Hugging Face layout, ours or transformers', to Mistral's own; the way back from above.

    Raises:
        ValueError: the native layout cannot express the configuration or a tensor; before anything is written.
    """
    folder, out = Path(folder), Path(out)
    config = PixtralConfig.from_pretrained(folder)
    held = stored_tensors(_weight_files(folder, "model"), native_names(config), pairs_from_halves)
    # Published configurations do not always say it; the weights do.
    config.tie_word_embeddings = not any(tensor.name == "output.weight" for file in held.values() for tensor in file)
    params = params_from_config(config)
    out.mkdir(parents=True, exist_ok=True)
    _write_weights(held, out, "consolidated")
    (out / "params.json").write_text(params, encoding="utf-8")
    _copy_shared(folder, out)
    return out


def _weight_files(folder: Path, stem: str) -> list[Path]:
    files = sorted(folder.glob(f"{stem}.safetensors")) or sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has neither {stem}.safetensors nor {stem}-*-of-*.safetensors.")
    return files


def _copy_shared(folder: Path, out: Path) -> None:
    for name in _SHARED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _write_weights(held: dict[Path, list[StoredTensor]], out: Path, stem: str) -> None:
    weight_map, total = {}, 0
    for number, tensors in enumerate(held.values(), start=1):
        name = f"{stem}.safetensors" if len(held) == 1 else f"{stem}-{number:05}-of-{len(held):05}.safetensors"
        total += write_safetensors(tensors, out / name)
        weight_map |= {tensor.name: name for tensor in tensors}
    if len(held) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(tensors: list[StoredTensor], path: Path) -> int:
    """Write tensors one after the other, never two in memory; returns the bytes of their data.

    safetensors' own writer takes all tensors at once. The format: length of the header (8 bytes, little-endian), header
    (JSON, padded with spaces to a multiple of 8), data.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        shape = tensor.get_shape()
        start, end = end, end + math.prod(shape) * tensor.dtype.itemsize
        header[tensor.name] = {"dtype": tensor.get_dtype(), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            tensor[...].contiguous().flatten().view(torch.uint8).numpy().tofile(file)
    return end
