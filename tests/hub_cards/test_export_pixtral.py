"""Pixtral folders: from Mistral's own layout to a hub folder and back."""

import hashlib
import json

import PIL.Image
import pytest
import torch
from transformers import LlavaForConditionalGeneration
from transformers import PixtralProcessor as PublishedProcessor

from gridtower import PixtralForConditionalGeneration, PixtralProcessor, PixtralVisionModel
from gridtower.hub_cards.export import export

from ..modeling.test_native_pixtral import native_folder
from ..processing.test_processing_pixtral import write_native_folder
from .test_export import run_without_gridtower
from .tiny_models import tiny_pixtral

PROMPT = "[INST][IMG]he[/INST]"


@pytest.fixture
def native(tmp_path):
    folder, with_tokens = tmp_path / "native", write_native_folder(tmp_path / "tokens")
    native_folder(folder, params=json.loads((with_tokens / "params.json").read_text()))
    (with_tokens / "tekken.json").replace(folder / "tekken.json")
    return folder


@pytest.fixture
def picture():
    return PIL.Image.linear_gradient("L").resize((40, 24)).convert("RGB")


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_native_folder_becomes_one_that_ours_theirs_and_remote_code_load(native, picture, tmp_path):
    out = export(native, tmp_path / "hub")
    ours = PixtralForConditionalGeneration.from_pretrained(native)
    inputs = PixtralProcessor.from_pretrained(out)(text=PROMPT, images=picture, return_tensors="pt")
    expected = ours(**inputs).logits
    torch.testing.assert_close(PixtralForConditionalGeneration.from_pretrained(out)(**inputs).logits, expected)

    theirs = LlavaForConditionalGeneration.from_pretrained(out)
    padded = PublishedProcessor.from_pretrained(out)(text=PROMPT, images=picture, return_tensors="pt")
    torch.testing.assert_close(theirs(**padded).logits, expected, rtol=1e-5, atol=1e-4)

    picture.save(tmp_path / "picture.png")
    printed = run_without_gridtower(
        f"""
read = pipeline("image-text-to-text", model=source, trust_remote_code=True)
print(type(read.model).__module__.split(".")[-1], type(read.processor).__module__.split(".")[-1])
read(images=[{str(tmp_path / "picture.png")!r}], text="[IMG]he", max_new_tokens=2)
""",
        out,
        tmp_path,
    )
    assert printed == ["modeling_pixtral_types processing_pixtral"]


def test_back_in_the_native_layout_every_file_is_the_same(native, tmp_path):
    before = hashes(native)
    hub = export(native, tmp_path / "hub")
    assert hashes(export(hub, tmp_path / "back", format="mistral")) == before


def test_the_tower_alone_extracts_features(native, picture, tmp_path):
    tower_folder = export(native, tmp_path / "tower", tower_only=True)
    picture.save(tmp_path / "picture.png")
    printed = run_without_gridtower(
        f"""
extract = pipeline("image-feature-extraction", model=source, trust_remote_code=True)
print(len(extract({str(tmp_path / "picture.png")!r})))
""",
        tower_folder,
        tmp_path,
    )
    assert printed == [str(10 * 6)]
    inputs = PixtralProcessor.from_pretrained(native).image_processor(picture, return_tensors="pt")
    tower = PixtralVisionModel.from_pretrained(tower_folder)
    full = PixtralForConditionalGeneration.from_pretrained(native)
    states = full.get_image_features(**inputs).last_hidden_state
    torch.testing.assert_close(tower(**inputs).last_hidden_state, states)


@pytest.mark.parametrize("layout", ["one file", "two files"])
def test_the_image_processor_by_itself_knows_the_merge_size_of_the_joint_file(layout, tmp_path):
    model, processor = tiny_pixtral()
    assert processor.spatial_merge_size == 2
    source = tmp_path / "source"
    model.save_pretrained(source)
    processor.save_pretrained(source)
    joint = json.loads((source / "processor_config.json").read_text())
    images = joint["image_processor"]
    del images["spatial_merge_size"]
    if layout == "two files":
        (source / "preprocessor_config.json").write_text(json.dumps(joint.pop("image_processor")))
    (source / "processor_config.json").write_text(json.dumps(joint | {"spatial_merge_size": 2}))
    load = "print(AutoImageProcessor.from_pretrained(source, trust_remote_code=True).spatial_merge_size)"
    assert run_without_gridtower(load, export(source, tmp_path / "hub"), tmp_path) == ["2"]


def test_a_llava_folder_with_another_tower_is_refused(tmp_path):
    (tmp_path / "clip").mkdir()
    fields = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    (tmp_path / "clip" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="another vision tower than Pixtral"):
        export(tmp_path / "clip", tmp_path / "out")


def test_other_families_have_no_native_layout(tmp_path):
    with pytest.raises(ValueError, match="no Mistral layout"):
        export("default", tmp_path / "out", format="mistral")
