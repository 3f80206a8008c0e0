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
    "configuration.configuration_deepseek_v4_vl": ["DeepseekV4VisionConfig", "DeepseekV4VlConfig"],
    "modeling.modeling_deepseek_v4_vl": [
        "DeepseekV4Aligner",
        "DeepseekV4ForConditionalGeneration",
        "DeepseekV4VisionModel",
        "DeepseekV4VlModel",
    ],
    "processing.image_processing_deepseek_v4_vl": ["DeepseekV4ImageProcessor", "DeepseekV4ImageProcessorPil"],
    "processing.processing_deepseek_v4_vl": ["DeepseekV4Processor"],
    "processing.collation": ["ConversationCollator", "as_messages", "labelled_text", "read_conversations"],
    "modeling.cuda_graphs": ["GraphedTower"],
    "modeling.data_parallel": ["encode_data_parallel"],
    "modeling.trainable_parts": ["QUANTIZATION_SKIPS", "Part", "parameter_groups", "parts_summary", "prepare_parts"],
    "hub_cards.export": ["export"],
    "embedding": ["embed"],
    "feature_shards": ["read_features"],
    "sizing": ["plan_memory"],
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

    Afterwards `AutoModel.from_pretrained(folder)` and the like give ours, without `trust_remote_code`. A DeepSeek-V4
    folder without a tower still gives transformers' text classes. May be called more than once.
    """
    for names in _FAMILIES:
        _register_family(*names)


# Configurations of the whole models and of their tower, which name the model classes, then the processors.
_FAMILIES = (
    (
        ("Lfm3VlConfig",),
        "Lfm3VlVisionConfig",
        "Lfm3VlProcessor",
        "Lfm3VlImageProcessor",
        "Lfm3VlVideoProcessor",
    ),
    (
        ("PixtralConfig", "PixtralLlavaConfig", "PixtralMixedConfig"),
        "PixtralVisionConfig",
        "PixtralProcessor",
        "PixtralImageProcessor",
        None,
    ),
    (
        ("DeepseekV4VlConfig",),
        "DeepseekV4VisionConfig",
        "DeepseekV4Processor",
        "DeepseekV4ImageProcessor",
        None,
    ),
)


def _register_family(
    models: tuple[str, ...], tower: str, processor: str, image_processor: str, video_processor: str | None
) -> None:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    here = __getattr__
    # AutoProcessor finds a saved processor by the name of its class, and among its own before those registered.
    for model_type in [key for key, name in PROCESSOR_MAPPING_NAMES.items() if name == processor]:
        del PROCESSOR_MAPPING_NAMES[model_type]
    backends = {"torchvision": here(image_processor), "pil": here(f"{image_processor}Pil")}
    for config in map(here, (*models, tower)):
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_class, reference in config.hub_classes.items():
            if auto_class != "AutoConfig":
                model = here(reference.split(".")[1])
                getattr(transformers, auto_class).register(config, model, exist_ok=True)
        transformers.AutoImageProcessor.register(config, image_processor_classes=backends, exist_ok=True)
    for config in map(here, models):
        transformers.AutoProcessor.register(config, here(processor), exist_ok=True)
        if video_processor is not None:
            transformers.AutoVideoProcessor.register(config, here(video_processor), exist_ok=True)
