"""Assembles a hub folder that loads with `trust_remote_code=True` where gridtower is not installed.

Official fields and tensor names stay as they are, so the same folder also loads wherever the family is supported
natively; what is added is `auto_map`, the flat code files and the card.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, save_torch_state_dict, snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from ..configuration.configuration_deepseek_v4_vl import DeepseekV4VisionConfig, DeepseekV4VlConfig, vision_fields
from ..configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from ..configuration.configuration_pixtral import (
    PixtralConfig,
    PixtralLlavaConfig,
    PixtralMixedConfig,
    PixtralVisionConfig,
)
from ..configuration.flat_code import write_code
from ..configuration.native_params_pixtral import is_native_folder
from ..modeling.native_pixtral import hf_to_native, native_to_hf
from ..processing.image_processing_deepseek_v4_vl import DeepseekV4ImageProcessor
from ..processing.image_processing_lfm3_vl import Lfm3VlImageProcessor
from ..processing.image_processing_pixtral import PixtralImageProcessor
from ..processing.processing_deepseek_v4_vl import DeepseekV4Processor
from ..processing.processing_lfm3_vl import Lfm3VlProcessor
from ..processing.processing_pixtral import PixtralProcessor
from ..processing.video_processing_lfm3_vl import Lfm3VlVideoProcessor

DEFAULT_MODEL = Path(__file__).resolve().parent / "default_model"
# Left behind by a training run, or written anew by the export.
_NOT_EXPORTED = ("config.json", "README.md", "training_args.bin", "trainer_state.json", "scheduler.pt", "optimizer.pt")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class Family:
    """The classes that read one family's folders, the name of its card, and those of tower and projector among its tensors.

    `published_processor` says whether published folders, which have no processor files, tell all that stands in them.
    """

    config: type
    vision_config: type
    processor: type
    image_processor: type
    video_processor: type | None
    card: str
    tower: str = "vision_tower"
    projector: str = "multi_modal_projector"
    published_processor: bool = False


_LFM3_VL = Family(
    Lfm3VlConfig, Lfm3VlVisionConfig, Lfm3VlProcessor, Lfm3VlImageProcessor, Lfm3VlVideoProcessor, "lfm3_vl"
)
_PIXTRAL = Family(PixtralConfig, PixtralVisionConfig, PixtralProcessor, PixtralImageProcessor, None, "pixtral")
_DEEPSEEK_V4 = Family(
    DeepseekV4VlConfig,
    DeepseekV4VisionConfig,
    DeepseekV4Processor,
    DeepseekV4ImageProcessor,
    None,
    "deepseek_v4_vl",
    tower="vision",
    projector="aligner",
    published_processor=True,
)
_DEEPSEEK_V41 = "deepseek_v41"
FAMILIES = {
    "lfm3_vl": _LFM3_VL,
    "lfm3_vl_vision": _LFM3_VL,
    "mistral3": _PIXTRAL,
    "llava": replace(_PIXTRAL, config=PixtralLlavaConfig),
    "pixtral_mixed": replace(_PIXTRAL, config=PixtralMixedConfig),
    "pixtral": _PIXTRAL,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v4_vision": _DEEPSEEK_V4,
    _DEEPSEEK_V41: _DEEPSEEK_V4,
}
FORMATS = ("hf", "mistral")
PROJECTOR_FILE = "projector.safetensors"


def export(
    source: str | os.PathLike,
    out: str | os.PathLike,
    tower_only: bool = False,
    format: str = "hf",
    with_projector: bool = False,
) -> Path:
    """Write the hub folder of `source` to `out`, and return its path.

    Args:
        source: a folder, a repository on the hub, or `"default"` for the model that comes with gridtower. A Pixtral
            folder may be in Mistral's own layout; one of DeepSeek-V4.1 is exported with `tower_only`.
        out: a folder that does not exist yet, or is empty. It appears complete or not at all.
        tower_only: write the vision tower and its image processor as a model of its own.
        format: `"hf"`, or `"mistral"` for a Pixtral folder in Mistral's own layout.
        with_projector: beside a tower of a whole model, write the state dict of its projector as `projector.safetensors`.

    Raises:
        ValueError: no folder of a family that gridtower knows, an impossible configuration, a layout that the family
            does not have, or `out` holds files.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; name a new one, or empty it first.")
    if format not in FORMATS or (format == "mistral" and tower_only):
        raise ValueError(
            f"format is {format!r} with tower_only={tower_only}; give one of {FORMATS}, a tower being 'hf'."
        )
    if with_projector and not tower_only:
        raise ValueError("with_projector goes with tower_only; a whole model has its projector anyway.")
    folder = source_folder(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        work = Path(scratch, out.name)
        work.mkdir()
        if is_native_folder(folder) and format == "hf":
            folder = _converted(folder, Path(scratch, "converted"))
        if format == "mistral":
            _write_native_folder(folder, work)
        else:
            _write_hub_folder(folder, work, tower_only, with_projector)
        if out.exists():
            out.rmdir()
        work.rename(out)
    return out


def _converted(folder: Path, target: Path) -> Path:
    native_to_hf(folder, target)
    if (folder / "tekken.json").is_file():
        PixtralProcessor.from_pretrained(folder).save_pretrained(target)
    return target


def _write_native_folder(folder: Path, work: Path) -> None:
    family = family_of(_read_json(folder / "config.json"), folder)
    if family.card != "pixtral":
        raise ValueError(f"{folder} holds a model of type {family.config.model_type}, which has no Mistral layout.")
    hf_to_native(folder, work)


def _write_hub_folder(folder: Path, work: Path, tower_only: bool, with_projector: bool) -> None:
    fields = _read_json(folder / "config.json")
    family = family_of(fields, folder, tower_only)
    if tower_only and fields["model_type"] != family.vision_config.model_type:
        _write_tower(folder, work, fields, family)
        if with_projector:
            save_file(_tensors_of(folder, family.projector), work / PROJECTOR_FILE, metadata={"format": "pt"})
    elif with_projector:
        raise ValueError(f"{folder} holds a tower alone; its projector can be written from the whole model only.")
    else:
        _write_model(folder, work, fields, family, link=folder != DEFAULT_MODEL)


def source_folder(source: str | os.PathLike) -> Path:
    """The local folder of a source: `"default"`, a folder, or a repository that is fetched from the hub."""
    if source == "default":
        return DEFAULT_MODEL
    folder = Path(str(source).replace("\\", os.sep)) if not Path(source).exists() else Path(source)
    if folder.is_dir():
        return folder.resolve()
    try:
        return Path(snapshot_download(str(source)))
    except Exception as error:
        raise ValueError(f"{source} is neither a folder nor a repository that can be fetched: {error}") from error


def read_family(folder: Path) -> tuple[Family, dict]:
    """The family of the model or tower in `folder`, and the fields of its config.json; Mistral's own layout has none.

    Raises:
        ValueError: as [`family_of`], or there is no config.json.
    """
    if is_native_folder(folder):
        return _PIXTRAL, {}
    fields = _read_json(folder / "config.json")
    return family_of(fields, folder), fields


def family_of(fields: dict, folder: Path, tower_only: bool = False) -> Family:
    """The family that `fields`, a config.json, belongs to; the configuration is checked on the way."""
    model_type = fields.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"{folder} holds a model of type {model_type!r}; gridtower knows {sorted(FAMILIES)}.")
    family, tower = FAMILIES[model_type], vision_fields(fields)
    kind = family.vision_config if model_type == family.vision_config.model_type else family.config
    if tower_only and tower and model_type == _DEEPSEEK_V41:
        # Of the whole there is no configuration to check by.
        kind, fields = family.vision_config, tower
    config = kind.from_dict({name: value for name, value in fields.items() if name != "auto_map"})
    if not isinstance(config, kind):
        found = "another vision tower than Pixtral's" if tower else "no vision tower"
        raise ValueError(
            f"{folder} holds a model of type {model_type!r} with {found}; transformers loads it as it is."
        )
    return family


def _write_model(folder: Path, work: Path, fields: dict, family: Family, link: bool) -> None:
    for path in tqdm(sorted(folder.iterdir()), desc="Copying", unit="file", disable=None, leave=False):
        if path.is_file() and path.name not in (*_NOT_EXPORTED, *_PROCESSOR_FILES) and path.suffix != ".py":
            _place(path, work / path.name, link)
        elif path.is_dir() and path.name == "chat_templates":
            shutil.copytree(path, work / path.name)
    is_tower = fields["model_type"] == family.vision_config.model_type
    config = family.vision_config if is_tower else family.config
    _write_json(work / "config.json", fields | {"auto_map": dict(config.hub_classes)})
    parts = [config]
    for name in _PROCESSOR_FILES:
        if (folder / name).is_file() and (family.video_processor or "video" not in name):
            settings = _read_json(folder / name)
            _complete_image_settings(name, settings, folder, family)
            parts += _point_to_code(name, settings, family, is_tower)
            _write_json(work / name, settings)
    write_code(work, parts)
    if not is_tower and not has_processor_files(folder) and family.published_processor:
        _write_processor_files(folder, work, family)
    _write_card(work, family, is_tower, folder)


def _write_processor_files(folder: Path, work: Path, family: Family) -> None:
    """What the processor of a folder without such files is, and its chat template; nothing where it has no tokenizer.

    Raises:
        ValueError: the tokenizer is not that of the model.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    processor, config = family.processor.from_pretrained(folder), family.config.from_pretrained(folder)
    if processor.image_token_id != config.image_token_id:
        raise ValueError(
            f"{folder}: the tokenizer numbers the token of a piece of an image {processor.image_token_id}, and the model "
            f"{config.image_token_id}; take the tokenizer that was published with the model, or set image_start_token_id."
        )
    processor.to_json_file(work / "processor_config.json")
    if processor.tokenizer.chat_template is None:
        (work / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")


def _write_tower(folder: Path, work: Path, fields: dict, family: Family) -> None:
    config = family.vision_config
    vision = vision_fields(fields)
    if vision is None:
        raise ValueError(
            f"{folder} holds a model of type {fields['model_type']!r} with no vision tower in config.json."
        )
    vision |= {"model_type": config.model_type}
    if "spatial_merge_size" in fields:
        vision["spatial_merge_size"] = fields["spatial_merge_size"]
    if dtype := vision.get("dtype") or fields.get("dtype"):
        vision["dtype"] = dtype
    vision |= {"architectures": [config.hub_classes["AutoModel"].split(".")[1]], "auto_map": dict(config.hub_classes)}
    _write_json(work / "config.json", vision)

    save_torch_state_dict(_tensors_of(folder, family.tower), work, metadata={"format": "pt"})

    parts = [config]
    if settings := _image_processor_settings(folder, family):
        settings["auto_map"] = dict(family.image_processor.hub_classes)
        _write_json(work / "preprocessor_config.json", settings)
        parts.append(family.image_processor)
    write_code(work, parts)
    _write_card(work, family, True, folder)


def _tensors_of(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a part of the model in `folder`, by their names inside of it."""
    tensors = {}
    for path in tqdm(sorted(folder.glob("*.safetensors")), desc="Reading", unit="shard", disable=None, leave=False):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():
                _, found, inner = f".{name}".partition(f".{part}.")
                if found:
                    tensors[inner] = shard.get_tensor(name)
    if not tensors:
        raise ValueError(f"{folder} has no safetensors with a {part}; export needs the weights beside config.json.")
    return tensors


def has_processor_files(folder: Path) -> bool:
    """Whether a folder says what its image processor is."""
    return any((folder / name).is_file() for name in _PROCESSOR_FILES[:2])


def _image_processor_settings(folder: Path, family: Family) -> dict | None:
    if not has_processor_files(folder) and not family.published_processor:
        return None
    # Read by the class itself: older layouts spread the fields over several files, or have them in config.json.
    settings = family.image_processor.from_pretrained(folder).to_dict()
    return {name: value for name, value in settings.items() if name not in ("processor_class", "auto_map")}


def _complete_image_settings(name: str, settings: dict, folder: Path, family: Family) -> None:
    """Add to the image processor's settings, in place, the fields that older layouts keep elsewhere.

    Since transformers 5.25 `AutoImageProcessor` hands a class what it found in one place, instead of the folder.
    """
    nested = settings if name == "preprocessor_config.json" else settings.get("image_processor")
    if isinstance(nested, dict):
        found, _ = family.image_processor.get_image_processor_dict(folder)
        nested |= {field: value for field, value in found.items() if field not in nested}


def _point_to_code(name: str, settings: dict, family: Family, is_tower: bool) -> list[type]:
    """Add `auto_map` to the settings of a processor file, in place; returns the classes that it then names."""
    own = {
        "processor_config.json": family.processor,
        "preprocessor_config.json": family.image_processor,
        "video_preprocessor_config.json": family.video_processor,
    }[name]
    parts = [own]
    settings["auto_map"] = dict(own.hub_classes)
    if not is_tower:
        # A folder of the older layout has no processor_config.json; AutoProcessor then looks here.
        settings["auto_map"] |= family.processor.hub_classes
        parts.append(family.processor)
    for part, nested in ((family.image_processor, "image_processor"), (family.video_processor, "video_processor")):
        if isinstance(settings.get(nested), dict):
            settings[nested]["auto_map"] = dict(part.hub_classes)
            parts.append(part)
    return parts


def _write_card(work: Path, family: Family, is_tower: bool, folder: Path) -> None:
    report = folder / "training_report.json"
    card = ModelCard.from_template(
        ModelCardData(
            license="apache-2.0" if folder == DEFAULT_MODEL else None,
            library_name="transformers",
            pipeline_tag="image-feature-extraction" if is_tower else "image-text-to-text",
        ),
        template_path=str(Path(__file__).resolve().parent / f"{family.card}.md"),
        name=work.name,
        is_tower=is_tower,
        report=_read_json(report) if report.is_file() else None,
    )
    card.save(work / "README.md")


def _place(path: Path, target: Path, link: bool) -> None:
    if link:
        try:
            return os.link(path.resolve(), target)
        except OSError:
            pass  # another file system: copy
    shutil.copyfile(path, target)


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; name the folder that `save_pretrained` wrote.")
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
