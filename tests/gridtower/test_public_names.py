"""`import gridtower`: cheap, complete, and without side effects until `register()` is called."""

import subprocess
import sys

import pytest
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import gridtower

from ..hub_cards.tiny_models import DEEPSEEK_V4_TEXT, TINY_MODELS, tiny_deepseek_v4_vl


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_torch_nor_transformers():
    loaded = run("import gridtower, sys; print({'torch', 'transformers'} & set(sys.modules))")
    assert loaded.strip() == "set()"


@pytest.mark.parametrize("name", gridtower.__all__)
def test_every_public_name_resolves_to_what_it_says(name):
    # A constant has no name of its own.
    assert getattr(getattr(gridtower, name), "__name__", name) == name
    assert name in dir(gridtower)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="Lfm3VlModel"):
        gridtower.Lfm4VlModel  # noqa: B018


def test_register_puts_our_classes_under_the_auto_classes_and_import_alone_does_not():
    printed = run(
        """
import gridtower, transformers
def made(config):
    return type(transformers.AutoConfig.for_model("lfm3_vl_vision")).__module__.split(".")[0]
print(made(None))
gridtower.register()
gridtower.register()
print(made(None))
config = gridtower.Lfm3VlVisionConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
print(type(transformers.AutoModel.from_config(config)) is gridtower.Lfm3VlVisionModel)
mapping = transformers.models.auto
print(mapping.processing_auto.PROCESSOR_MAPPING[gridtower.Lfm3VlConfig] is gridtower.Lfm3VlProcessor)
print(mapping.video_processing_auto.VIDEO_PROCESSOR_MAPPING[gridtower.Lfm3VlConfig]["torchvision"] is gridtower.Lfm3VlVideoProcessor)
print(mapping.image_processing_auto.IMAGE_PROCESSOR_MAPPING[gridtower.Lfm3VlConfig]["pil"].__name__)
print(mapping.image_processing_auto.IMAGE_PROCESSOR_MAPPING[gridtower.DeepseekV4VisionConfig]["torchvision"].__name__)
print(mapping.processing_auto.PROCESSOR_MAPPING[gridtower.DeepseekV4VlConfig].__name__)
print(mapping.modeling_auto.MODEL_MAPPING[gridtower.DeepseekV4VlConfig].__name__)
print(mapping.modeling_auto.MODEL_MAPPING[gridtower.DeepseekV4VisionConfig].__name__)
for name in ("Lfm3VlConfig", "PixtralConfig", "PixtralLlavaConfig", "PixtralMixedConfig", "DeepseekV4VlConfig"):
    print(mapping.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[getattr(gridtower, name)].__name__)
"""
    )
    assert printed.split() == [
        "transformers", "gridtower", "True", "True", "True", "Lfm3VlImageProcessorPil",
        "DeepseekV4ImageProcessor", "DeepseekV4Processor", "DeepseekV4VlModel", "DeepseekV4VisionModel",
        "Lfm3VlForConditionalGeneration", "PixtralForConditionalGeneration", "PixtralLlavaForConditionalGeneration",
        "PixtralMixedForConditionalGeneration", "DeepseekV4ForConditionalGeneration",
    ]  # fmt: skip


def test_after_register_a_saved_processor_comes_back_as_ours(tmp_path):
    for family, make in TINY_MODELS.items():
        make()[1].save_pretrained(tmp_path / family)
    printed = run(
        f"""
import gridtower, transformers
gridtower.register()
for family in {list(TINY_MODELS)!r}:
    joint = transformers.AutoProcessor.from_pretrained({str(tmp_path)!r} + "/" + family)
    images = transformers.AutoImageProcessor.from_pretrained({str(tmp_path)!r} + "/" + family)
    for one in (joint, joint.image_processor, images):
        print(type(one).__module__.split(".")[0])
"""
    )
    assert printed.split() == ["gridtower"] * 9


def test_after_register_a_text_only_deepseek_v4_folder_is_transformers_own_and_one_with_a_tower_ours(tmp_path):
    DeepseekV4ForCausalLM(DeepseekV4Config(**DEEPSEEK_V4_TEXT)).save_pretrained(tmp_path / "text")
    tiny_deepseek_v4_vl()[0].save_pretrained(tmp_path / "vision")
    printed = run(
        f"""
import gridtower, transformers
gridtower.register()
def show(auto_class, folder):
    loaded = getattr(transformers, auto_class).from_pretrained({str(tmp_path)!r} + "/" + folder)
    print(type(loaded).__module__.split(".")[0], type(loaded).__name__)
for auto_class in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
    show(auto_class, "text")
for auto_class in ("AutoConfig", "AutoModel", "AutoModelForImageTextToText"):
    show(auto_class, "vision")
"""
    )
    text = ["DeepseekV4Config", "DeepseekV4Model", "DeepseekV4ForCausalLM"]
    vision = ["DeepseekV4VlConfig", "DeepseekV4VlModel", "DeepseekV4ForConditionalGeneration"]
    assert printed.splitlines() == [
        *(f"transformers {name}" for name in text),
        *(f"gridtower {name}" for name in vision),
    ]
