"""LFM3-VL generates what transformers' own class generates, with images and videos expanded along with their rows."""

import pytest
import torch
from transformers import GenerationConfig, set_seed

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig

from .lfm3_vl_cases import IMAGE, MIXED, VIDEO, assert_close, model_fields, pair_of_models, prompts

STEPS = 7
IMAGES = [[2, ("image", 2, 3), 1, ("image", 1, 1), 3], [4, ("image", 3, 1), 2]]
VIDEOS = [[2, ("video", 2, 1, 2), 3], [1, ("video", 1, 3, 1), ("image", 1, 2), 2]]
TEXT = [[5], [9]]
WAYS = {
    "greedy": {},
    "two beams": {"num_beams": 2},
    "three of four beams": {"num_beams": 4, "num_return_sequences": 3},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def models():
    return pair_of_models(Lfm3VlConfig, model_fields())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("rows", [IMAGES, VIDEOS, TEXT, MIXED], ids=["images", "videos", "text", "mixed"])
def test_sequences_equal_transformers(models, rows, way):
    sequences = []
    for model in models:
        set_seed(1)
        inputs = prompts(models[0].config, rows)
        suppressed = {"suppress_tokens": [VIDEO, IMAGE]}
        sequences.append(model.generate(**inputs, **way, **suppressed, max_new_tokens=STEPS, eos_token_id=None))
    ours, theirs = sequences
    assert len(ours) == len(rows) * way.get("num_return_sequences", 1)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [IMAGES, VIDEOS, TEXT, MIXED], ids=["images", "videos", "text", "mixed"])
def test_every_cached_step_equals_a_full_pass(models, rows):
    model, _ = models
    inputs = prompts(model.config, rows)
    length = inputs["input_ids"].shape[1]
    generated = model.generate(
        **inputs, max_new_tokens=STEPS, eos_token_id=None, return_dict_in_generate=True, output_logits=True
    )
    for step, logits in enumerate(generated.logits):
        inputs["input_ids"] = generated.sequences[:, : length + step]
        with torch.no_grad():
            full = model(**inputs, use_cache=False).logits[:, -1]
        assert_close(logits, full, relative=1e-4)
        full[:, [IMAGE, VIDEO]] = -torch.inf
        assert torch.equal(generated.sequences[:, length + step], full.argmax(-1))
        inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)


def test_a_row_generates_the_same_alone_and_in_a_padded_batch(models):
    model, _ = models
    rows = [[2, ("image", 1, 2), 1], [3, ("image", 2, 2), ("image", 1, 3), 4]]
    together = prompts(model.config, rows)
    alone = prompts(model.config, rows[:1])
    alone["pixel_values"] = together["pixel_values"][:8]
    length = alone["input_ids"].shape[1]
    alone["input_ids"] = together["input_ids"][:1, -length:]
    first, *_ = model.generate(**together, max_new_tokens=STEPS, eos_token_id=None)
    (own,) = model.generate(**alone, max_new_tokens=STEPS, eos_token_id=None)
    assert torch.equal(first[-STEPS:], own[-STEPS:])


@pytest.mark.parametrize("way", [WAYS["greedy"], WAYS["three of four beams"]])
def test_features_computed_before_generate_the_same(models, way):
    model, _ = models
    inputs = prompts(model.config, MIXED)
    from_pixels = model.generate(**inputs, **way, max_new_tokens=STEPS, eos_token_id=None)
    with torch.no_grad():
        features = {
            "image": model.get_image_features(inputs.pop("pixel_values"), inputs["image_grid_thw"]),
            "video": model.get_video_features(inputs.pop("pixel_values_videos"), inputs["video_grid_thw"]),
        }
    generated = model.generate(**inputs, mm_encoder_outputs=features, **way, max_new_tokens=STEPS, eos_token_id=None)
    assert torch.equal(generated, from_pixels)


@pytest.fixture
def eager_for_placeholders(models):
    """A model whose head gives its greatest logits to the placeholders, and the next greatest to token 7."""

    def prefer(module, arguments, logits):
        logits[..., [IMAGE, VIDEO]] += 1000
        logits[..., 7] += 500

    handle = models[0].lm_head.register_forward_hook(prefer)
    yield models[0]
    handle.remove()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"suppress_tokens": [8]},
        {"generation_config": GenerationConfig(max_new_tokens=3, pad_token_id=0)},
        {"generation_config": GenerationConfig(max_new_tokens=3, pad_token_id=0, suppress_tokens=[8])},
        {"do_sample": True},
        {"num_beams": 2},
    ],
)
def test_placeholders_are_never_generated(eager_for_placeholders, asked):
    inputs = prompts(eager_for_placeholders.config, IMAGES)
    generated = eager_for_placeholders.generate(**inputs, **({"max_new_tokens": 3} | asked))
    assert (generated[:, inputs["input_ids"].shape[1] :] == 7).all()


@pytest.mark.parametrize(
    "asked", [{"suppress_tokens": [7]}, {"generation_config": GenerationConfig(pad_token_id=0, suppress_tokens=[7])}]
)
def test_tokens_suppressed_by_the_caller_stay_suppressed(eager_for_placeholders, asked):
    inputs = prompts(eager_for_placeholders.config, TEXT)
    generated = eager_for_placeholders.generate(**inputs, **asked, max_new_tokens=3)
    assert not torch.isin(generated[:, inputs["input_ids"].shape[1] :], torch.tensor([7, IMAGE, VIDEO])).any()
