"""The fine-tuning script: what its file may say, what it shows beforehand, what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from finetune import edit_distance, memory_estimate, read_settings
from peft import PeftModel
from train_digits import FAMILIES, answering
from transformers import set_seed
from write_conversations import main as write_conversations

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "finetune.py"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "turned"
    with pytest.MonkeyPatch.context() as patch:
        arguments = [str(folder), "--rows", "6", "--validation-rows", "3", "--turn", "30"]
        patch.setattr("sys.argv", ["write_conversations.py", *arguments])
        write_conversations()
    return folder


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def untrained(request, tmp_path_factory):
    set_seed(0)
    family = FAMILIES[request.param]
    processor = family.make_processor()
    model = family.make_model(processor)
    model.generation_config = answering(processor)
    folder = tmp_path_factory.mktemp("model") / request.param
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, folder


def settings_file(folder, model, conversations, **training):
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(conversations / "train.jsonl"), "validation": str(conversations / "validation.jsonl")},
        "parts": {
            "tower": {"training": "frozen"},
            "projector": {"training": "full", "learning_rate": 0.01},
            "text": {"training": "lora", "rank": 2},
        },
        "generation": {"rows": 2, "max_new_tokens": 2},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
        }
        | training,
    }
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run(*arguments, launcher=()):
    """What the script prints, in a process of its own: it registers our classes under the Auto classes."""
    command = [sys.executable, *launcher, SCRIPT, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_dry_run_shows_parts_a_row_and_memory_and_writes_nothing(untrained, conversations, tmp_path):
    _, folder = untrained
    shown = run("--config", settings_file(tmp_path, folder, conversations), "--dry-run")
    answer = json.loads((conversations / "train.jsonl").read_text().splitlines()[0])["messages"][1]["content"]
    assert f"\033[32m{answer}<|im_end|>\033[0m" in shown
    assert "tower" in shown and "6 of 6 rows" in shown and "activations" in shown
    assert not (tmp_path / "run").exists()


def test_a_run_trains_evaluates_by_writing_and_leaves_an_adapter_that_loads(untrained, conversations, tmp_path):
    model, folder = untrained
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 1}
    run("--config", settings_file(tmp_path, folder, conversations, **every_step))
    metrics = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert {"eval_loss", "eval_exact_match", "eval_character_error_rate"} <= metrics.keys()
    assert 0 <= metrics["eval_exact_match"] <= 1
    tuned = PeftModel.from_pretrained(type(model).from_pretrained(folder), tmp_path / "run")
    learned = {name for name, tensor in tuned.named_parameters() if "lora_B" in name and tensor.abs().max() > 0}
    assert learned and all("language_model" in name for name in learned)
    assert any("modules_to_save" in name for name, _ in tuned.named_parameters())
    assert list((tmp_path / "run").glob("processing_*.py"))


def test_two_ranks_with_shards_learn_what_one_process_learns(untrained, conversations, tmp_path):
    model, folder = untrained
    full = {"parts": {part: {"training": "full"} for part in ("tower", "projector", "text")}}
    settings = {"optim": "sgd", "learning_rate": 0.1, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    accelerate = yaml.safe_load((EXAMPLES / "fsdp2.yaml").read_text()) | {"num_processes": 2, "use_cpu": True}
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(accelerate))
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    launcher += ["--config_file", tmp_path / "fsdp2.yaml", Path(__file__).with_name("fsdp_on_cpus.py")]
    found = {}
    for name, started_by, rows in (("one", (), 2), ("two", launcher, 1)):
        (tmp_path / name).mkdir()
        path = settings_file(tmp_path / name, folder, conversations, per_device_train_batch_size=rows, **settings)
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | full))
        run("--config", path, launcher=started_by)
        written = tmp_path / name / "run"
        metrics = json.loads((written / "eval_results.json").read_text())
        found[name] = [type(model).from_pretrained(step) for step in (written / "checkpoint-1", written)], metrics
    (one, of_one), (two, of_two) = found["one"], found["two"]
    for ours, theirs in zip(two, one):
        for (name, weight), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5, msg=name)
    assert any((weight != start).any() for weight, start in zip(one[1].parameters(), model.parameters()))
    for name in ("eval_exact_match", "eval_character_error_rate"):
        assert of_two[name] == pytest.approx(of_one[name], rel=1e-5)


def test_memory_counts_weights_gradients_optimizer_and_what_backward_needs():
    layer = torch.nn.Linear(100, 50, bias=False)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, inputs):
            return type("Output", (), {"loss": self.layer(inputs).relu().sum()})

    sizes = memory_estimate(Model(), {"inputs": torch.randn(8, 100)})
    # The matrix product needs its inputs, the rectifier its outputs.
    kept = 4 * (8 * 100 + 8 * 50)
    assert sizes == {"weights": 20_000, "gradients": 20_000, "optimizer": 40_000, "activations": kept}


@pytest.mark.parametrize(
    "one, other, distance",
    [("", "", 0), ("2026", "2026", 0), ("", "12", 2), ("kitten", "sitting", 3), ("2026", "206", 1), ("13", "31", 2)],
)
def test_edit_distance(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@pytest.mark.parametrize(
    "content, overrides, message",
    [
        ("modle: {}", [], r"unknown section\(s\) \['modle'\]"),
        ("model: {pth: a}", [], r"unknown key\(s\) \['pth'\] in 'model'"),
        ("model: {path: a}", [], "data.train is missing"),
        ("model: {path: a}", ["model"], "write section.key=value"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(content, overrides, message, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_settings(path, overrides)


def test_the_command_line_is_put_over_the_file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: {path: a}\ndata: {train: b}\ntraining: {output_dir: c, max_steps: 3}")
    overrides = ["training.max_steps=5", "parts.text.rank=4", "data.validation=d"]
    settings = read_settings(path, overrides)
    assert settings["training"] == {"output_dir": "c", "max_steps": 5}
    assert settings["parts"] == {"text": {"rank": 4}} and settings["data"]["validation"] == "d"


def test_the_example_file_names_nothing_that_there_is_not():
    read_settings(EXAMPLES / "finetune.yaml", [])
