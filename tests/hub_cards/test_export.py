"""Exported folders: what is in them, and that they load where gridtower does not exist."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.lfm3_vl import modeling_lfm3_vl as published

from gridtower import Lfm3VlForConditionalGeneration, Lfm3VlProcessor, Lfm3VlVisionModel
from gridtower.hub_cards.export import DEFAULT_MODEL, export

PICTURE = Path(__file__).parents[2] / "examples" / "handwritten_2026.png"
MESSAGES = [{"role": "user", "content": [{"type": "image", "path": str(PICTURE)}, {"type": "text", "text": "Read."}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export("default", tmp_path_factory.mktemp("export") / "My.Model-v1.0")


@pytest.fixture(scope="module")
def tower_folder(tmp_path_factory):
    return export("default", tmp_path_factory.mktemp("export") / "tower", tower_only=True)


def run_without_gridtower(code: str, cwd: Path, tmp_path: Path) -> list[str]:
    head = "import sys; sys.modules['gridtower'] = None\nfrom transformers import *\nsource = sys.argv[1]\n"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", head + code, "." if cwd else ""],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_auto_class_and_the_pipeline_load_the_folder_without_gridtower(folder, tmp_path):
    link = tmp_path / "link.to.model"
    link.symlink_to(folder)
    printed = run_without_gridtower(
        f"""
trust = dict(trust_remote_code=True)
for auto in (AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor, AutoImageProcessor, AutoVideoProcessor):
    print(type(auto.from_pretrained(source, **trust)).__module__.startswith("transformers_modules."))
read = pipeline("image-text-to-text", model={str(link)!r}, **trust)
print(read(text={MESSAGES!r}, return_full_text=False)[0]["generated_text"])
read.model.save_pretrained({str(tmp_path / "again")!r})
AutoProcessor.from_pretrained(source, **trust).save_pretrained({str(tmp_path / "again")!r})
""",
        folder,
        tmp_path,
    )
    assert printed == ["True"] * 6 + ["2026"]
    again = tmp_path / "again"
    printed = run_without_gridtower(
        "print(type(AutoModelForImageTextToText.from_pretrained(source, trust_remote_code=True)).__name__)\n"
        "print(type(AutoProcessor.from_pretrained(source, trust_remote_code=True)).__name__)",
        again,
        tmp_path,
    )
    assert printed == ["Lfm3VlForConditionalGeneration", "Lfm3VlProcessor"]
    assert load_file(again / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def test_tower_alone_extracts_features_without_gridtower(tower_folder, tmp_path):
    printed = run_without_gridtower(
        f"""
extract = pipeline("image-feature-extraction", model=source, trust_remote_code=True)
features = extract({str(PICTURE)!r})
print(len(features), len(features[0]))
""",
        tower_folder,
        tmp_path,
    )
    tower = Lfm3VlVisionModel.from_pretrained(tower_folder)
    full = Lfm3VlForConditionalGeneration.from_pretrained(DEFAULT_MODEL)
    inputs = Lfm3VlProcessor.from_pretrained(DEFAULT_MODEL).image_processor(str(PICTURE), return_tensors="pt")
    states = tower(**inputs).last_hidden_state
    assert printed == [f"{states.shape[0]} {states.shape[1]}"]
    expected = full.model.vision_tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).last_hidden_state
    assert torch.equal(states, expected)


def test_official_names_and_fields_stay_so_that_transformers_own_classes_load_the_folder(folder):
    assert load_file(folder / "model.safetensors").keys() == load_file(DEFAULT_MODEL / "model.safetensors").keys()
    source = json.loads((DEFAULT_MODEL / "config.json").read_text())
    written = json.loads((folder / "config.json").read_text())
    assert {name: value for name, value in written.items() if name != "auto_map"} == {
        name: value for name, value in source.items() if name != "auto_map"
    }
    theirs, report = published.Lfm3VlForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ours = Lfm3VlForConditionalGeneration.from_pretrained(folder)
    inputs = Lfm3VlProcessor.from_pretrained(folder).apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    torch.testing.assert_close(ours.float()(**inputs).logits, theirs.float()(**inputs).logits, rtol=1e-5, atol=1e-4)


def test_folder_of_the_older_layout_gets_its_auto_maps(folder, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    settings = json.loads((folder / "processor_config.json").read_text())
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        os.link(folder / name, old / name)
    for name, part in (
        ("preprocessor_config.json", "image_processor"),
        ("video_preprocessor_config.json", "video_processor"),
    ):
        settings[part].pop("auto_map")
        (old / name).write_text(json.dumps(settings[part]))
    out = export(old, tmp_path / "new")
    assert not (out / "processor_config.json").exists()
    printed = run_without_gridtower(
        "for auto in (AutoProcessor, AutoImageProcessor, AutoVideoProcessor):\n"
        "    print(type(auto.from_pretrained(source, trust_remote_code=True)).__module__.split('.')[-1])",
        out,
        tmp_path,
    )
    assert printed == ["processing_lfm3_vl", "image_processing_lfm3_vl", "video_processing_lfm3_vl"]


def test_card_names_the_pipeline_and_states_the_measured_accuracy(folder, tower_folder):
    card = (folder / "README.md").read_text()
    report = json.loads((DEFAULT_MODEL / "training_report.json").read_text())
    assert "pipeline_tag: image-text-to-text" in card and 'model="My.Model-v1.0"' in card
    for length in "1234":
        assert f"| {length} | {report['exact_match'][length]:.1%} |" in card
    assert all(report["exact_match"][length] >= 0.95 for length in "1234")
    assert "pipeline_tag: image-feature-extraction" in (tower_folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "has no config.json"),
        ({"model_type": "bert"}, "type 'bert'; gridtower knows"),
        ({"model_type": "lfm3_vl", "vision_config": {"conv_kernel_size": 4}}, "odd size such as 5"),
    ],
)
def test_impossible_sources_are_refused_and_leave_nothing(fields, message, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    if fields is not None:
        (source / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        export(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_tower_without_weights_is_refused_and_leaves_nothing(folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    os.link(folder / "config.json", source / "config.json")
    with pytest.raises(ValueError, match="no safetensors with a vision_tower"):
        export(source, tmp_path / "out", tower_only=True)
    assert os.listdir(tmp_path) == ["source"]


def test_missing_source_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match="nowhere is neither a folder nor a repository"):
        export("nowhere", tmp_path / "out")


def test_a_full_target_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        export("default", tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]
