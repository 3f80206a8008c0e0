"""The eyes of a model: its image processor, and its tower and projector without the text model."""

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils import is_torchvision_available

from .feature_shards import Failure
from .hub_cards.export import read_family
from .media_rows import MediaRow
from .processing.media_loading import open_image

FEATURES = ("tower", "projector", "pooled")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Tensors of a whole model that stand beside its tower and its projector, by the published names and ours.
_OF_THE_TEXT_MODEL = [r"language_model\.", r"(^|\.)lm_head", r"(^|\.)head\."]


class DecodedImage(NamedTuple):
    """An image as packed patches (num_patches, …), uint8 where the tower normalizes them, and its (steps, rows, cols)."""

    key: str
    patches: np.ndarray
    grid: tuple[int, int, int]


class ImageDecoder:
    """Opens images and cuts them into patches; small enough to travel to other processes.

    Indexing, as a `DataLoader` does, takes a list of rows and gives a `DecodedImage` or a `Failure` for each.
    """

    def __init__(self, folder: Path, vision_config):
        family, _ = read_family(folder)
        name = family.image_processor.__name__
        self.processor = _ours(name if is_torchvision_available() else f"{name}Pil").from_pretrained(folder)
        self.settings = {"normalize_on_device": _normalizes_alike(self.processor, vision_config)}
        if hasattr(self.processor, "layout"):
            self.settings["layout"] = "packed"

    def __getitem__(self, rows: list[MediaRow]) -> list[DecodedImage | Failure]:
        return [self.decoded(row) for row in rows]

    def decoded(self, row: MediaRow) -> DecodedImage | Failure:
        try:
            inputs = self.processor(open_image(row.source.read()), return_tensors="np", **self.settings)
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # decoders of broken files raise whatever they come across
            return Failure(row.key, str(error).removeprefix("image 0: ") or type(error).__name__)
        return DecodedImage(row.key, inputs["pixel_values"], tuple(inputs["image_grid_thw"][0].tolist()))


class ImageEncoder:
    """Tower, and projector where the folder has one, on one device.

    Args:
        folder: a model of any family, in any layout that its class reads, or a tower alone.
        features: "tower", "projector" or "pooled", as [`embed`] explains them.
        dtype: of weights and features, or "auto" for that of the checkpoint.
        device: a torch device, or "auto".

    Raises:
        ValueError: no such folder, weights that are missing, or a projector is asked of a tower.
    """

    def __init__(self, folder: Path, features: str, dtype: str, device: str):
        self.features = features
        model = _load(folder, features, dtype)
        self.weights = _fingerprint(model)
        self.device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).eval()
        self.tower = getattr(model, "vision_tower", model)
        self.dtype = self.tower.dtype
        self.decoder = ImageDecoder(folder, self.tower.config)

    def settings(self) -> dict:
        """What the features depend on, as JSON: an equal model gives the same, wherever it lies."""
        processor = json.loads(self.decoder.processor.to_json_string())
        return {
            "model_type": self.model.config.model_type,
            "features": self.features,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weights": self.weights,
            "image_processor": {name: value for name, value in processor.items() if name != "auto_map"},
        }

    @torch.no_grad()
    def __call__(self, images: list[DecodedImage]) -> list[torch.Tensor]:
        """Features of each image, (rows, width) on the CPU, in the order of `images`."""
        patches = torch.from_numpy(np.concatenate([image.patches for image in images])).to(self.device)
        grids = torch.tensor([image.grid for image in images])
        if self.features == "projector":
            encoded = self.model.get_image_features(pixel_values=patches, image_grid_thw=grids, return_dict=True)
            found = encoded.pooler_output
        else:
            states = self.tower(patches, grid_thw=grids, return_dict=True).last_hidden_state
            found = states.split(grids.prod(-1).tolist())
            if self.features == "pooled":
                found = [image.float().mean(0, keepdim=True) for image in found]
        # One transfer for all.
        return list(torch.cat(list(found)).to("cpu", self.dtype).split([len(image) for image in found]))


def _load(folder: Path, features: str, dtype: str):
    family, fields = read_family(folder)
    if fields.get("model_type") != family.vision_config.model_type:
        model_class, config_class = _without_text_model(_model_class(family.config)), family.config
    elif features == "projector":
        raise ValueError(f"{folder} holds a tower alone; projector features need the whole model.")
    else:
        model_class, config_class = _model_class(family.vision_config), family.vision_config
    config = None
    if fields:
        config = config_class.from_pretrained(folder)
        # Of the text model: towers and projectors are published unquantized, and a quantizer may want a GPU.
        config.__dict__.pop("quantization_config", None)
    model, found = model_class.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    if missing := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of the vision tower or projector, such as {missing[0]}."
        )
    return model


def _model_class(config_class: type) -> type:
    return _ours(config_class.hub_classes["AutoModel"].split(".")[1])


def _ours(name: str) -> type:
    return getattr(sys.modules[__package__], name)


def _without_text_model(model_class: type) -> type:
    """`model_class` under its own name, by which transformers finds how tensors are named, without its text model."""

    def __init__(self, config):
        # Under `from_pretrained` the text model has no storage yet.
        model_class.__init__(self, config)
        del self.language_model

    body = {"__init__": __init__, "_keys_to_ignore_on_load_unexpected": _OF_THE_TEXT_MODEL}
    return type(model_class.__name__, (model_class,), body)


def _fingerprint(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _normalizes_alike(processor, vision_config) -> bool:
    """Whether the tower would normalize uint8 patches as the processor does."""
    half = [0.5] * 3
    mean, std = (list(getattr(vision_config, name, half)) for name in ("image_mean", "image_std"))
    return (
        processor.do_rescale
        and processor.do_normalize
        and abs(processor.rescale_factor * 255 - 1) < 1e-6
        and (list(processor.image_mean), list(processor.image_std)) == (mean, std)
    )
