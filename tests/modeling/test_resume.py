"""A Trainer that stops and goes on, keeps the best, and pushes; adapters alone and merged; bfloat16 throughout."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePath

import huggingface_hub
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from gridtower.modeling.trainable_parts import LORA_TARGETS

from ..hub_cards.tiny_models import TINY_MODELS, LabelledPrompts, trainer_settings
from .test_trainer import families, make_trainer

REPOSITORY = "someone/My.Model-v1.0"


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=name)


def whole_batch(prompts):
    return prompts.collate([prompts[index] for index in range(len(prompts))])


def assert_whole(names):
    """Weights, processor and all code that `auto_map` will ask for are among the files."""
    families = {name.removeprefix("modeling_") for name in names if name.startswith("modeling_")}
    assert {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json"} <= names
    assert any(f"configuration_{family}" in names and f"processing_{family}" in names for family in families)


# Stopping and going on


@families
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(family, tmp_path):
    settings = {
        "max_steps": 4, "per_device_train_batch_size": 1, "optim": "adamw_torch", "learning_rate": 1e-2,
        "lr_scheduler_type": "linear", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    whole, resumed = (make_trainer(family, tmp_path, **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected, found = (
        {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
        for trainer in (whole, resumed)
    )
    assert found == pytest.approx(expected, abs=1e-6) and expected.keys() == {1, 2, 3, 4}
    assert_same_tensors(resumed.model.state_dict(), whole.model.state_dict())


@families
def test_a_run_with_adapters_resumes_as_well(family, tmp_path):
    targets = "|".join(LORA_TARGETS[family].values())
    settings = {"max_steps": 2, "optim": "adamw_torch", "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    losses = []
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        trainer = make_trainer(family, tmp_path, per_device_train_batch_size=2, **settings)
        torch.manual_seed(0)
        tuned = get_peft_model(trainer.model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        trainer.model = trainer.model_wrapped = tuned
        trainer.train(resume_from_checkpoint=checkpoint)
        losses.append(trainer.state.log_history[-2]["loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@families
def test_the_best_and_the_last_checkpoint_stay_and_the_best_comes_back(family, tmp_path):
    # The worst loss counts as best, because it stands at the beginning.
    trainer = make_trainer(
        family, tmp_path, max_steps=3, per_device_train_batch_size=4, save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, save_total_limit=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses[0] > losses[1] > losses[2]
    assert {folder.name for folder in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-3"}
    kept = {number: type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{number}") for number in (1, 3)}
    assert_same_tensors(trainer.model.state_dict(), kept[1].state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-6)
    for number in (1, 3):
        files = list((tmp_path / f"checkpoint-{number}").iterdir())
        assert_whole({file.stem if file.suffix == ".py" else file.name for file in files})
    with pytest.raises(AssertionError):
        assert_same_tensors(kept[3].state_dict(), kept[1].state_dict())


# Tensors by name


@families
def test_tensors_load_under_their_published_names(family, tmp_path):
    model, _ = TINY_MODELS[family]()
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    assert published.keys() - model.state_dict().keys()
    fresh, _ = TINY_MODELS[family]()
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    result = fresh.load_state_dict(published, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= fresh.all_tied_weights_keys.keys()
    assert_same_tensors(fresh.state_dict(), model.state_dict())


@families
def test_a_part_of_the_tensors_leaves_the_others_alone(family, tmp_path):
    model, _ = TINY_MODELS[family]()
    model.save_pretrained(tmp_path)
    published = {
        name: tensor + 1 for name, tensor in load_file(tmp_path / "model.safetensors").items() if "norm" in name
    }
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = model.load_state_dict(published, strict=False)
    assert not result.unexpected_keys
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + (name not in result.missing_keys))


@families
def test_a_name_that_nobody_knows_is_still_told(family):
    model, _ = TINY_MODELS[family]()
    tensors = model.state_dict() | {"nowhere.weight": torch.zeros(1)}
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == ["nowhere.weight"]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "nowhere.weight"'):
        model.load_state_dict(tensors)


# Pushing


class RecordingHub(BaseHTTPRequestHandler):
    """As much of a hub as takes uploads; the server keeps the files of each commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://127.0.0.1:{self.server.server_port}"
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in self.path:
            entries = [json.loads(line) for line in body.splitlines()]
            files = [entry["value"] for entry in entries if entry["key"] == "file"]
            self.server.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            answer = {"commitUrl": f"{address}/{REPOSITORY}/commit/{'a' * 40}", "commitOid": "a" * 40}
        else:  # a new repository, or a check of the card
            answer = {"url": f"{address}/{REPOSITORY}", "errors": [], "warnings": []}
        self.answer(200, json.dumps(answer).encode())

    def do_GET(self):
        self.answer(404, b"", ("X-Error-Code", "EntryNotFound"))

    do_HEAD = do_GET

    def answer(self, status, body, *headers):
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing is printed."""


@pytest.fixture
def commits(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), RecordingHub)
    server.commits = []
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # the next one talks to this address
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.commits
    server.shutdown()
    server.server_close()


def assert_loads(files, folder, model, prompts):
    """`files`, by name, are a folder whose model computes what `model` does, with all code that it names."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert_whole({PurePath(name).stem if name.endswith(".py") else name for name in files})
    for reference in json.loads(files["config.json"])["auto_map"].values():
        assert f"{reference.split('.')[0]}.py" in files
    batch = whole_batch(prompts)
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        torch.testing.assert_close(type(model).from_pretrained(folder)(**batch).logits, expected, rtol=0, atol=1e-5)


@families
def test_a_trainer_pushes_whole_folders_while_it_trains_and_afterwards(family, tmp_path, commits):
    trainer = make_trainer(
        family, tmp_path / "run", push_to_hub=True, hub_model_id=REPOSITORY, hub_token="hf_none",
        save_strategy="steps", save_steps=1, per_device_train_batch_size=4,
    )  # fmt: skip
    trainer.train()
    trainer.push_to_hub()
    assert len(commits) == 2
    for number, files in enumerate(commits):
        assert_loads(files, tmp_path / f"pushed{number}", trainer.model, trainer.train_dataset)


@families
def test_a_model_and_its_processor_push_themselves(family, tmp_path, commits):
    model, processor = TINY_MODELS[family]()
    model.push_to_hub(REPOSITORY, token="hf_none")
    processor.push_to_hub(REPOSITORY, token="hf_none")
    assert_loads(commits[0] | commits[1], tmp_path / "pushed", model, LabelledPrompts(processor))


# Adapters


@families
def test_an_adapter_computes_the_same_alone_and_merged(family, tmp_path):
    model, processor = TINY_MODELS[family]()
    model.save_pretrained(tmp_path / "base")
    batch = whole_batch(LabelledPrompts(processor))
    targets = "|".join(LORA_TARGETS[family].values())
    with torch.no_grad():
        base = model(**batch).logits
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
        expected = tuned(**batch).logits
        assert (expected - base).abs().max() > 1e-3
        tuned.save_pretrained(tmp_path / "adapter")
        assert not (tmp_path / "adapter" / "model.safetensors").exists()
        again = PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
        torch.testing.assert_close(again(**batch).logits, expected, rtol=0, atol=1e-6)
        again.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = type(model).from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=0, atol=1e-4)
    plain, changed = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("base", "merged"))
    assert plain == changed
    plain, changed = ({file.name for file in (tmp_path / name).iterdir()} for name in ("base", "merged"))
    assert plain == changed and any(name.startswith("modeling_") for name in plain)


# Precision


@families
def test_a_bfloat16_model_trains_without_autocast(family, tmp_path):
    whole, processor = TINY_MODELS[family]()
    whole.save_pretrained(tmp_path / "float32")
    model = type(whole).from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    prompts = LabelledPrompts(processor)
    batch = whole_batch(prompts)
    assert batch["pixel_values"].dtype == torch.float32
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = trainer_settings(tmp_path, per_device_train_batch_size=4, learning_rate=1.0)
    trainer = Trainer(model, TrainingArguments(**settings), data_collator=prompts.collate, train_dataset=prompts)
    loss = trainer.train().training_loss
    assert loss == pytest.approx(whole(**batch).loss.item(), rel=2e-2)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == before[name].dtype and parameter.isfinite().all()
    parts = ("vision_tower", "language_model", "aligner" if family == "deepseek_v4_vl" else "multi_modal_projector")
    for part in parts:
        assert any(part in name and (parameter != before[name]).any() for name, parameter in model.named_parameters())
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
