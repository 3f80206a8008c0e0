"""Checkpoints that Trainer wrote, and folders of every name, load where gridtower does not exist."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Trainer, TrainingArguments

from gridtower.hub_cards.export import source_folder

from .tiny_models import TINY_MODELS, LabelledPrompts, picture, trainer_settings

families = pytest.mark.parametrize("family", TINY_MODELS)
REPOSITORY = "someone/My.Model-v1.0"
COMMITS = {"main": "a" * 40, "old": "b" * 40}


def run_alone(code, folder, without=()):
    """Lines that `code` prints in a process of its own, offline, in `folder`, with gridtower and `without` not there."""
    head = f"""
import sys
sys.modules.update(dict.fromkeys({("gridtower", *without)!r}))
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, pipeline
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder.parent / f"{folder.name}-code")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@families
def test_a_trainer_checkpoint_loads_from_anywhere_and_computes_the_same(family, tmp_path):
    model, processor = TINY_MODELS[family]()
    prompts = LabelledPrompts(processor)
    run = tmp_path / "My.Run-v1.0"
    trainer = Trainer(
        model,
        TrainingArguments(**trainer_settings(run, save_strategy="steps", save_steps=1)),
        data_collator=prompts.collate,
        train_dataset=prompts,
        processing_class=processor,
    )
    trainer.train()
    checkpoint = run / "checkpoint-1"
    link = tmp_path / "a.link"
    link.symlink_to(checkpoint)
    text, images = zip(*prompts.rows)
    torch.save((list(text), list(images)), tmp_path / "prompts.pt")
    printed = run_alone(
        f"""
import torch
text, images = torch.load({str(tmp_path / "prompts.pt")!r}, weights_only=False)
for folder in (".", {str(link)!r}, {str(checkpoint) + os.sep!r}):
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    for part in (model, processor, processor.image_processor):
        print(type(part).__module__.startswith("transformers_modules."))
    with torch.no_grad():
        logits = model(**processor(text=text, images=images, return_tensors="pt")).logits
    torch.save(logits, {str(tmp_path / "logits.pt")!r})
    again = {str(tmp_path / "again")!r}
    model.save_pretrained(again), processor.save_pretrained(again)
""",
        checkpoint,
    )
    assert printed == ["True"] * 9
    batch = prompts.collate([prompts[index] for index in range(len(prompts))])
    with torch.no_grad():
        expected = trainer.model.eval()(**batch).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-5, atol=1e-5)
    code = {path.name: path.read_text() for path in checkpoint.glob("*.py")}
    assert code and code == {path.name: path.read_text() for path in (tmp_path / "again").glob("*.py")}


SIZES = {
    "deepseek_v4_vl": [{"max_image_tokens": 64}, {"max_image_tokens": 32}],
    "lfm3_vl": [{"size": {"shortest_edge": 64, "longest_edge": area}} for area in (64, 144)],
    "pixtral": [{"size": {"longest_edge": edge}} for edge in (32, 16)],
}


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.25"), reason="takes given parts from 5.25 on")
@families
def test_given_parts_stand_for_those_of_the_checkpoint(family, tmp_path):
    _, processor = TINY_MODELS[family]()
    media = {name: getattr(processor, name) for name in processor.get_attributes() if name != "tokenizer"}
    processor.tokenizer.save_pretrained(tmp_path)
    loaded = type(processor).from_pretrained(tmp_path, **media)
    assert all(getattr(loaded, name) is part for name, part in media.items())
    processor.save_pretrained(tmp_path)
    assert type(processor).from_pretrained(tmp_path, tokenizer=processor.tokenizer).tokenizer is processor.tokenizer


@families
def test_a_pinned_revision_reaches_the_processor_and_its_code(family, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    model, processor = TINY_MODELS[family]()
    processor.save_pretrained(tmp_path / "processor")
    grids = []
    for (revision, commit), size in zip(COMMITS.items(), SIZES[family]):
        sized = type(processor).from_pretrained(tmp_path / "processor", **size)
        grids.append(sized.image_processor(picture(40, 40), return_tensors="pt")["image_grid_thw"].tolist())
        (repository / "refs" / revision).write_text(commit)
        model.save_pretrained(repository / "snapshots" / commit)
        sized.save_pretrained(repository / "snapshots" / commit)
    assert grids[0] != grids[1]
    picture(40, 40).save(tmp_path / "picture.png")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    printed = run_alone(
        f"""
for pinned in ({{}}, {{"revision": "old"}}):
    options = dict(trust_remote_code=True, **pinned)
    joint = AutoProcessor.from_pretrained({REPOSITORY!r}, **options)
    images = AutoImageProcessor.from_pretrained({REPOSITORY!r}, **options)
    read = pipeline("image-text-to-text", model={REPOSITORY!r}, **options)
    for one in (joint.image_processor, images, read.processor.image_processor):
        print(one({str(tmp_path / "picture.png")!r}, return_tensors="pt")["image_grid_thw"].tolist())
    print(*(commit for one in (joint, joint.image_processor, images, read.model, read.processor)
            for commit in {tuple(COMMITS.values())!r} if commit in type(one).__module__))
""",
        tmp_path,
    )
    expected = [[*[str(grid)] * 3, " ".join([commit] * 5)] for grid, commit in zip(grids, COMMITS.values())]
    assert printed == expected[0] + expected[1]


@families
def test_a_saved_folder_loads_without_any_optional_package(family, tmp_path):
    model, processor = TINY_MODELS[family]()
    model.save_pretrained(tmp_path / "My.Model-v1.0")
    processor.save_pretrained(tmp_path / "My.Model-v1.0")
    picture(16, 8).save(tmp_path / "picture.png")
    printed = run_alone(
        """
model = AutoModelForImageTextToText.from_pretrained("My.Model-v1.0/", trust_remote_code=True)
processor = AutoProcessor.from_pretrained("My.Model-v1.0/", trust_remote_code=True)
print(type(processor.image_processor).__name__)
inputs = processor(text=processor.image_token, images="picture.png", return_tensors="pt")
print(model.generate(**inputs, max_new_tokens=1).shape[0])
""",
        tmp_path,
        without=("torchvision", "torchcodec", "av", "decord", "cv2", "peft", "trl", "sklearn", "mistral_common"),
    )
    assert printed[0].endswith("ImageProcessorPil") and printed[1] == "1"


def test_a_path_with_backslashes_names_the_same_folder(tmp_path, monkeypatch):
    (tmp_path / "models" / "My.Model-v1.0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert source_folder("models\\My.Model-v1.0") == tmp_path / "models" / "My.Model-v1.0"
