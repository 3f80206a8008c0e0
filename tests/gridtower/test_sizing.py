"""Plans of memory, checked against what real models of the same shape allocate on a CPU."""

import json
import shutil
from functools import cached_property

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import profile

from gridtower.command_line import main
from gridtower.sizing import plan_memory
from gridtower.traced_memory import held_bytes

from ..hub_cards.tiny_models import TINY_MODELS, picture

# Wide enough that what is small and fixed does not matter.
TOWER = {"hidden_size": 256, "intermediate_size": 512}
WIDER = {
    "lfm3_vl": {
        "vision_config": TOWER | {"num_attention_heads": 4, "num_key_value_heads": 2},
        "text_config": {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192},
        "projector_hidden_size": 512,
    },
    "pixtral": {
        "vision_config": TOWER | {"head_dim": 128},
        "text_config": {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192},
    },
    "deepseek_v4_vl": {
        "vision_config": TOWER | {"max_image_tokens": 256},
        "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 16, "q_lora_rank": 64, "o_lora_rank": 32,
        "vocab_size": 8192,
    },
}  # fmt: skip
# (width, height) in pixels; more patches than go through a layer at once on a CPU.
SIZES = {
    "lfm3_vl": [(64, 64), (96, 48)],
    "pixtral": [(128, 128), (160, 96)],
    "deepseek_v4_vl": [(100, 100), (120, 80)],
}
LIMITS = {
    "lfm3_vl": {"size": {"shortest_edge": 64, "longest_edge": 64 * 96}},
    "pixtral": {"size": {"longest_edge": 160}},
    "deepseek_v4_vl": {"max_image_tokens": 256},
}


class Case:
    """A model with random weights, a folder that holds its configuration and processor, and a prompt with images."""

    def __init__(self, family, folder):
        model, processor = TINY_MODELS[family]()
        fields = model.config.to_dict()
        config_class = type(model.config)
        for name, value in WIDER[family].items():
            fields[name] = fields[name] | value if isinstance(value, dict) and name in fields else value
        if family == "deepseek_v4_vl":
            vision = model.config.vision_config.to_dict() | WIDER[family]["vision_config"]
            fields = {name: value for name, value in fields.items() if not name.startswith("vision_")}
            fields |= {"vision_config": vision}
        config = config_class(**fields)
        for name, value in LIMITS[family].items():
            setattr(processor.image_processor, name, value)
        torch.manual_seed(0)
        self.family, self.folder, self.sizes = family, folder, SIZES[family]
        self.model = type(model)._from_config(config).eval()
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
        images = [picture(height, width) for width, height in self.sizes]
        text = "words " * 100 + processor.image_token * len(images) + " and more words" * 20
        self.inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
        ids = self.inputs["input_ids"]
        self.text_alone = {"input_ids": torch.full_like(ids, 5), "attention_mask": torch.ones_like(ids)}
        self.length = ids.shape[1]

    @cached_property
    def plan(self):
        return planned(self)


@pytest.fixture(scope="module", params=TINY_MODELS)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def allocated_at_most(run):
    """Peak bytes that PyTorch's allocator gave out during the second `run`, above those before it, and what it returned."""
    with torch.no_grad():
        run()
        with profile(profile_memory=True) as recorded:
            result = run()
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def planned(case, **arguments):
    arguments = {"image_sizes": case.sizes, "context": case.length, "dtype": "float32", "device": "cpu"} | arguments
    return plan_memory(case.folder, **arguments)


def test_weights_are_counted_to_the_byte_from_the_configuration_alone(case):
    tensors = (*case.model.parameters(), *case.model.buffers())
    assert sum(case.plan.weights.values()) == sum(tensor.nbytes for tensor in tensors)
    assert not list(case.folder.glob("*.safetensors"))


def test_weights_have_the_dtypes_that_loading_gives_them(case, tmp_path):
    case.model.save_pretrained(tmp_path)
    loaded = type(case.model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    plan = plan_memory(tmp_path, images=0, context=8, dtype="bfloat16")
    parts = {"tower": loaded.model.vision_tower, "text": loaded.model.language_model}
    for part, module in parts.items():
        assert plan.weights[part] == sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    assert sum(plan.weights.values()) == sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_a_configuration_is_all_that_a_folder_needs(case, tmp_path):
    shutil.copy(case.folder / "config.json", tmp_path)
    plan = plan_memory(tmp_path, image_sizes=[(64, 48)], dtype="float32", device="cpu")
    assert plan.weights == case.plan.weights
    assert plan.images[0].patches > plan.images[0].tokens > 0


def test_quantized_text_weights_are_counted_as_they_are_on_disk(case, tmp_path):
    case.model.to(torch.bfloat16).save_pretrained(tmp_path)
    case.model.float()
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and not any(part in name for part in ("vision", "projector", "aligner", "head")):
            tensors[name] = tensor.to(torch.float8_e4m3fn)
    save_file(tensors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    plan = plan_memory(tmp_path, images=0, context=8, dtype="bfloat16")
    on_disk = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(plan.weights.values()) == pytest.approx(on_disk, rel=1e-3)
    assert "quantized" in plan.notes[0]


def test_images_cost_the_patches_and_tokens_that_the_processor_makes_of_them(case):
    plan = case.plan
    assert [image.patches for image in plan.images] == case.inputs["image_grid_thw"].prod(-1).tolist()
    assert plan.context == case.length


def test_peak_and_cache_of_a_prompt_with_images_are_those_of_a_real_run(case):
    plan, pixels = case.plan, case.inputs["pixel_values"].nbytes
    most, outputs = allocated_at_most(lambda: case.model(**case.inputs, use_cache=True, logits_to_keep=1))
    assert plan.cache + plan.activations == pytest.approx(most + pixels, rel=0.1)
    assert plan.cache == held_bytes(*outputs.cache.layers)


def test_peak_until_images_are_encoded_is_that_of_a_real_run(case):
    pixels, grid = case.inputs["pixel_values"], case.inputs["image_grid_thw"]
    most, _ = allocated_at_most(lambda: case.model.get_image_features(pixels, grid))
    embeddings = 4 * case.length * case.model.get_input_embeddings().embedding_dim  # made before, float32
    assert case.plan.tower_peak == pytest.approx(most + pixels.nbytes + embeddings, rel=0.1)


def test_peak_of_text_alone_is_that_of_a_real_run(case):
    most, _ = allocated_at_most(lambda: case.model(**case.text_alone, use_cache=True, logits_to_keep=1))
    assert planned(case, images=0).prefill_peak == pytest.approx(most, rel=0.1)


def test_rows_of_a_batch_add_up_as_in_a_real_run(case):
    two = {name: torch.cat([tensor, tensor]) for name, tensor in case.inputs.items()}
    most, _ = allocated_at_most(lambda: case.model(**two, use_cache=True, logits_to_keep=1))
    plan = planned(case, batch=2)
    assert plan.cache + plan.activations == pytest.approx(most + two["pixel_values"].nbytes, rel=0.1)


def test_a_device_without_layers_needs_nothing(case):
    by_layers = planned(case, gpus=8, images=0, context=8).placements[1]
    assert all(device.weights or not device.total for device in by_layers.devices)


def test_several_devices_hold_all_weights_and_what_is_sharded_once(case):
    whole = sum(case.plan.weights.values())
    plan = planned(case, gpus=2, memory=10.0, device="cuda")
    one, by_layers, by_tensors = plan.placements
    assert one.devices[0].weights == sum(device.weights for device in by_layers.devices) == whole
    assert whole / 2 <= by_tensors.devices[0].weights < whole
    assert plan.fits and all(placement.fits for placement in plan.placements)
    assert "fits 10 GB" in plan.table()
    assert planned(case, gpus=2, memory=1e-3).fits is False


def test_a_plan_is_plain_data(case):
    fields = json.loads(json.dumps(case.plan.to_dict()))
    assert fields["cache"] == case.plan.cache and fields["fits"] is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"memory": 0.0}, "memory is 0"),
        ({"images": -1}, "images is -1"),
        ({"image_sizes": [(0, 5)]}, r"image_sizes\[0\]"),
        ({"context": 10}, "context is 10"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_impossible_plans_are_refused(case, wrong, message):
    with pytest.raises(ValueError, match=message):
        planned(case, **wrong)


def test_the_command_prints_a_table_and_says_by_its_status_whether_the_model_fits(capsys):
    assert main(["plan", "--memory", "1", "--image-size", "320x200", "--images", "2"]) == 0
    assert "image of 320 x 200" in capsys.readouterr().out
    assert main(["plan", "--memory", "0.0001", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(["plan", "--image-size", "large"]) == 1
    assert "large" in capsys.readouterr().err
