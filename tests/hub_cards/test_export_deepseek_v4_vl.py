"""DeepSeek-V4 folders as published: exported whole, and as a tower, which is all that DeepSeek-V4.1 has here."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from gridtower import (
    DeepseekV4ForConditionalGeneration,
    DeepseekV4ImageProcessor,
    DeepseekV4Processor,
    DeepseekV4VisionModel,
)
from gridtower.hub_cards.export import export
from gridtower.processing.processing_deepseek_v4_vl import CHAT_TEMPLATE

from .test_checkpoints import run_alone
from .tiny_models import DEEPSEEK_V4_TEXT, DEEPSEEK_V4_VISION, picture, tiny_deepseek_v4_vl


def write_published_folder(folder, model, tokenizer):
    """As DeepSeek-V4-Flash-Vision-Exp: no code, no processor files, no chat template."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    fields = json.loads((folder / "config.json").read_text())
    del fields["auto_map"]
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_v41_folder(folder):
    """Tower and aligner of DeepSeek-V4.1, by its names; of the text model one tensor."""
    folder.mkdir()
    vision = DEEPSEEK_V4_VISION | {"max_wh_ratio": None}
    fields = {"model_type": "deepseek_v41", "hidden_size": 32, "torch_dtype": "float32", "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(fields))
    parts = {"vision": "vision_tower", "aligner": "aligner"}
    model = tiny_deepseek_v4_vl()[0].model
    tensors = {
        f"{published}.{name}": tensor
        for published, ours in parts.items()
        for name, tensor in model.get_submodule(ours).state_dict().items()
    }
    save_file(tensors | {"embed.weight": torch.ones(9, 32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    model, processor = tiny_deepseek_v4_vl()
    return write_published_folder(tmp_path_factory.mktemp("source") / "published", model, processor.tokenizer)


@pytest.fixture(scope="module")
def v41(tmp_path_factory):
    return write_v41_folder(tmp_path_factory.mktemp("source") / "v41")


@pytest.fixture(scope="module")
def hub(published, tmp_path_factory):
    return export(published, tmp_path_factory.mktemp("export") / "My.Model-v1.0")


@pytest.fixture(scope="module")
def towers(published, v41, tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    return [export(source, folder / source.name, tower_only=True) for source in (published, v41)]


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tower_tensors(folder):
    tensors = load_file(folder / "model.safetensors").items()
    return {name.removeprefix("vision."): tensor for name, tensor in tensors if name.startswith("vision.")}


def test_published_folders_load_everywhere_without_gridtower(hub, towers, tmp_path):
    image, again = tmp_path / "picture.png", tmp_path / "again"
    picture(24, 40).save(image)
    printed = run_alone(
        f"""
import torch
from transformers import AutoConfig, AutoModel
trust = dict(trust_remote_code=True)
for auto in (AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor, AutoImageProcessor):
    one = auto.from_pretrained(".", **trust)
    print(type(one).__module__.startswith("transformers_modules."), type(one).__name__)
read = pipeline("image-text-to-text", model=".", **trust)
content = [{{"type": "image", "path": {str(image)!r}}}, {{"type": "text", "text": "Read."}}]
answers = read(text=[{{"role": "user", "content": content}}], max_new_tokens=2, return_full_text=False)
print(len(answers), type(read.model).__module__.split(".")[-1], type(read.processor).__module__.split(".")[-1])
inputs = read.processor(text=read.processor.image_token + "Read.", images={str(image)!r}, return_tensors="pt")
with torch.no_grad():
    torch.save(read.model(**inputs).logits, {str(tmp_path / "logits.pt")!r})
read.model.save_pretrained({str(again)!r}), read.processor.save_pretrained({str(again)!r})
for folder in {list(map(str, towers))!r}:
    extract = pipeline("image-feature-extraction", model=folder, **trust)
    print(len(extract({str(image)!r})), type(extract.model).__name__, type(extract.image_processor).__name__)
""",
        hub,
    )
    names = ["DeepseekV4VlConfig", "DeepseekV4VlModel", "DeepseekV4ForConditionalGeneration"]
    processors = ["DeepseekV4Processor", "DeepseekV4ImageProcessor"]
    assert printed[:5] == [f"True {name}" for name in [*names, *processors]]
    assert printed[5] == "1 modeling_deepseek_v4_vl processing_deepseek_v4_vl"
    assert printed[6:] == [f"{6 * 10} DeepseekV4VisionModel DeepseekV4ImageProcessor"] * 2

    processor = DeepseekV4Processor.from_pretrained(hub)
    inputs = processor(text=processor.image_token + "Read.", images=picture(24, 40), return_tensors="pt")
    with torch.no_grad():
        expected = DeepseekV4ForConditionalGeneration.from_pretrained(hub)(**inputs).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-5, atol=1e-5)

    assert load_file(again / "model.safetensors").keys() == load_file(hub / "model.safetensors").keys()
    printed = run_alone(
        """
import torch
model, report = AutoModelForImageTextToText.from_pretrained(".", trust_remote_code=True, output_loading_info=True)
print(type(model).__name__, len(report["missing_keys"]), len(report["unexpected_keys"]))
processor = AutoProcessor.from_pretrained(".", trust_remote_code=True)
inputs = processor(text=processor.image_token + "Read.", images="../picture.png", return_tensors="pt")
with torch.no_grad():
    print(torch.allclose(model(**inputs).logits, torch.load("../logits.pt"), atol=1e-5))
""",
        again,
    )
    assert printed == ["DeepseekV4ForConditionalGeneration 0 0", "True"]


def test_official_fields_and_tensors_stay_as_they_are(published, hub):
    fields = json.loads((hub / "config.json").read_text())
    assert fields.pop("auto_map").keys() == {"AutoConfig", "AutoModel", "AutoModelForImageTextToText"}
    assert fields == json.loads((published / "config.json").read_text())
    kept, sources = hashes(hub), hashes(published)
    assert {name: kept[name] for name in sources if name != "config.json"} == {
        name: value for name, value in sources.items() if name != "config.json"
    }


def test_transformers_own_class_reads_the_text_model_of_an_exported_folder(hub):
    theirs, report = DeepseekV4ForCausalLM.from_pretrained(hub, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    of_images = ("vision.", "aligner.", "image_")
    left = {name.rpartition(".")[2] for name in report["unexpected_keys"] if not name.startswith(of_images)}
    # Biases by which images are routed, and one of a layer that routes text by a table.
    assert left == {"bias_vl", "e_score_correction_bias"}
    input_ids = torch.arange(5, 25)[None]
    ours = DeepseekV4ForConditionalGeneration.from_pretrained(hub)
    with torch.no_grad():
        assert torch.equal(theirs(input_ids).logits, ours(input_ids).logits)


def test_what_published_folders_lack_comes_from_their_configuration(hub):
    settings = json.loads((hub / "processor_config.json").read_text())["image_processor"]
    assert {name: settings[name] for name in ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels")} == {
        "patch_size": 4,
        "downsample_ratio": 2,
        "max_image_tokens": 64,
        "min_pixels": 16,
    }
    assert (hub / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.fixture
def with_templates(published, tmp_path):
    """The published folder with two chat templates by name, in the tokenizer's own file."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        os.link(published / name, source / name)
    settings = json.loads((published / "tokenizer_config.json").read_text())
    templates = [{"name": "default", "template": "{{ bos_token }}"}, {"name": "tools", "template": "{{ tools }}"}]
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
    return source


def test_chat_templates_that_are_there_are_kept(with_templates, tmp_path):
    out = export(with_templates, tmp_path / "out")
    assert not (out / "chat_template.jinja").exists()
    processor = DeepseekV4Processor.from_pretrained(out)
    assert processor.chat_template == {"default": "{{ bos_token }}", "tools": "{{ tools }}"}


def test_processor_files_that_are_there_are_kept(with_templates, tmp_path):
    DeepseekV4ImageProcessor(max_image_tokens=50).to_json_file(with_templates / "preprocessor_config.json")
    out = export(with_templates, tmp_path / "out")
    assert not (out / "processor_config.json").exists()
    assert json.loads((out / "preprocessor_config.json").read_text())["max_image_tokens"] == 50


def test_a_folder_without_a_tokenizer_is_exported_without_a_processor(published, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.link(published / name, source / name)
    out = export(source, tmp_path / "out")
    assert not [path.name for path in out.iterdir() if path.name.endswith(("processor_config.json", ".jinja"))]


def test_a_tokenizer_that_numbers_images_otherwise_is_refused(published, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        os.link(published / name, source / name)
    fields = json.loads((published / "config.json").read_text()) | {"image_start_token_id": 280}
    (source / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="numbers the token of a piece of an image 292, and the model 282"):
        export(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_a_tower_has_the_tensors_of_the_checkpoint_and_computes_the_same(published, v41, towers):
    for source, folder in zip((published, v41), towers):
        written, expected = load_file(folder / "model.safetensors"), tower_tensors(source)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
        tower, report = DeepseekV4VisionModel.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert tower.state_dict().keys() == expected.keys()
    full = DeepseekV4ForConditionalGeneration.from_pretrained(published).model.vision_tower
    inputs = DeepseekV4ImageProcessor.from_pretrained(towers[0])([picture(24, 40), picture(8, 8)], return_tensors="pt")
    tower = DeepseekV4VisionModel.from_pretrained(towers[0])
    assert torch.equal(tower(**inputs).last_hidden_state, full(**inputs).last_hidden_state)


def test_a_v41_tower_keeps_the_rules_of_its_configuration(towers):
    tower, images = (part.from_pretrained(towers[1]) for part in (DeepseekV4VisionModel, DeepseekV4ImageProcessor))
    assert tower.config.token_layout == images.token_layout == "reading_order"
    assert tower.config.max_wh_ratio is None and images.max_wh_ratio is None
    assert tower.config.dtype == torch.float32


def test_an_exported_tower_exports_again(towers, tmp_path):
    for tower_only in (False, True):
        out = export(towers[1], tmp_path / f"again-{tower_only}", tower_only=tower_only)
        assert hashes(out).keys() == hashes(towers[1]).keys()
        assert load_file(out / "model.safetensors").keys() == load_file(towers[1] / "model.safetensors").keys()


def test_the_whole_of_v41_is_refused_and_its_tower_named(v41, tmp_path):
    with pytest.raises(ValueError, match="--tower-only"):
        export(v41, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tower_only", [False, True])
def test_a_model_of_text_alone_is_refused(tower_only, tmp_path):
    DeepseekV4Config(**DEEPSEEK_V4_TEXT).save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="'deepseek_v4' with no vision tower"):
        export(tmp_path / "text", tmp_path / "out", tower_only=tower_only)
    assert os.listdir(tmp_path) == ["text"]


def test_a_sharded_checkpoint_gives_its_tower(published, tmp_path):
    model = DeepseekV4ForConditionalGeneration.from_pretrained(published)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    out = export(tmp_path / "sharded", tmp_path / "tower", tower_only=True)
    assert load_file(out / "model.safetensors").keys() == tower_tensors(published).keys()


def test_cards_say_what_the_folder_is_for(hub, towers):
    card = (hub / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and 'model="My.Model-v1.0"' in card
    for folder in towers:
        assert "pipeline_tag: image-feature-extraction" in (folder / "README.md").read_text()
