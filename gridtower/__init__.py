"""Native-resolution vision towers and the vision-language models around them, for Hugging Face transformers.

Every public class is imported on first use, so `import gridtower` costs nothing. `register()` makes the Auto classes
know ours; nothing is registered on import.
"""

from importlib import import_module
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if not (_HERE / "modeling").is_dir():
    # In a checkout the rooms lie next to this folder; installed, they lie inside it.
    __path__.append(str(_HERE.parent))

_PUBLIC = {
    "configuration.configuration_lfm3_vl": ["Lfm3VlConfig", "Lfm3VlVisionConfig"],
    "modeling.modeling_lfm3_vl": [
        "Lfm3VlForConditionalGeneration",
        "Lfm3VlModel",
        "Lfm3VlMultiModalProjector",
        "Lfm3VlVisionModel",
    ],
    "configuration.configuration_pixtral": [
        "PixtralConfig",
        "PixtralLlavaConfig",
        "PixtralMixedConfig",
        "PixtralVisionConfig",
    ],
    "modeling.modeling_pixtral": [
        "PixtralForConditionalGeneration",
        "PixtralModel",
        "PixtralMultiModalProjector",
        "PixtralPatchMerger",
        "PixtralVisionModel",
    ],
    "modeling.modeling_pixtral_types": [
        "PixtralLlavaForConditionalGeneration",
        "PixtralLlavaModel",
        "PixtralMixedForConditionalGeneration",
        "PixtralMixedModel",
    ],
    "modeling.native_pixtral": ["hf_to_native", "native_to_hf"],
    "processing.image_processing_pixtral": ["PixtralImageProcessor", "PixtralImageProcessorPil"],
    "processing.processing_pixtral": ["PixtralProcessor"],
    "processing.image_processing_lfm3_vl": ["Lfm3VlImageProcessor", "Lfm3VlImageProcessorPil"],
    "processing.processing_lfm3_vl": ["Lfm3VlProcessor"],
    "processing.video_processing_lfm3_vl": ["Lfm3VlVideoProcessor"],
    "hub_cards.export": ["export"],
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [*sorted(_MODULES), "register"]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"gridtower has no {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})


def register() -> None:
    """Put our classes under transformers' Auto classes, in place of its own where both know a `model_type`.

    Afterwards `AutoModel.from_pretrained(folder)` and the like give ours, without `trust_remote_code`. May be called
    more than once.
    """
    for names in _FAMILIES:
        _register_family(*names)


# Composite configurations and models by prefix, then the vision tower, the processors and the video processor by theirs.
_FAMILIES = (
    ("Lfm3Vl", "Lfm3Vl", "Lfm3VlVideoProcessor"),
    ("Pixtral", "Pixtral", None),
    ("PixtralLlava", "Pixtral", None),
    ("PixtralMixed", "Pixtral", None),
)


def _register_family(model: str, family: str, video_processor: str | None) -> None:
    import transformers

    here = __getattr__
    config, vision_config = here(f"{model}Config"), here(f"{family}VisionConfig")
    for config_class in (config, vision_config):
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    transformers.AutoModel.register(config, here(f"{model}Model"), exist_ok=True)
    transformers.AutoModel.register(vision_config, here(f"{family}VisionModel"), exist_ok=True)
    transformers.AutoModelForImageTextToText.register(config, here(f"{model}ForConditionalGeneration"), exist_ok=True)
    transformers.AutoProcessor.register(config, here(f"{family}Processor"), exist_ok=True)
    backends = {"torchvision": here(f"{family}ImageProcessor"), "pil": here(f"{family}ImageProcessorPil")}
    for config_class in (config, vision_config):
        transformers.AutoImageProcessor.register(config_class, image_processor_classes=backends, exist_ok=True)
    if video_processor is not None:
        transformers.AutoVideoProcessor.register(config, here(video_processor), exist_ok=True)
