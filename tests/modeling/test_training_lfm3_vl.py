"""LFM3-VL trains: losses that add up, checkpointed and frozen towers, low-rank adapters inside the tower."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig

from .lfm3_vl_cases import MIXED, TOWERS, assert_close, model_fields, pair_of_models, prompts

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
TOWER_ADAPTER = r"model\.vision_tower\..*\.(q_proj|v_proj|in_proj|w2)"


@pytest.fixture
def model():
    model, _ = pair_of_models(Lfm3VlConfig, model_fields(TOWERS["published pattern"]))
    return model.train()


def loss_of(model, inputs):
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return model(**inputs, labels=labels).loss


def gradients_of(model):
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def single_rows(inputs):
    """The rows of `MIXED` as batches of one: row 0 has an image and a video, row 1 two images, row 2 text alone."""
    image_patches = inputs["image_grid_thw"].prod(-1).tolist()
    image_pixels = inputs["pixel_values"].split(image_patches)
    for row, images in enumerate(([0], [1, 2], [])):
        single = {name: inputs[name][row : row + 1] for name in ("input_ids", "attention_mask", "labels")}
        if images:
            single["pixel_values"] = torch.cat([image_pixels[image] for image in images])
            single["image_grid_thw"] = inputs["image_grid_thw"][images]
        if row == 0:
            single |= {name: inputs[name] for name in ("pixel_values_videos", "video_grid_thw")}
        yield single


def test_accumulated_single_rows_equal_one_batch(model):
    inputs = prompts(model.config, MIXED)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    items = (inputs["labels"][:, 1:] != -100).sum()
    whole = model(**inputs, num_items_in_batch=items).loss
    whole.backward()
    expected = gradients_of(model)
    accumulated = 0
    for single in single_rows(inputs):
        loss = model(**single, num_items_in_batch=items).loss
        loss.backward()
        accumulated += loss.detach()
    assert_close(accumulated, whole.detach())
    for name, gradient in gradients_of(model).items():
        assert_close(gradient, expected[name], relative=2e-5)


def test_the_loss_is_the_mean_over_labelled_tokens_by_default(model):
    inputs = prompts(model.config, MIXED)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    outputs = model(**inputs, labels=labels)
    logits = outputs.logits[:, :-1].flatten(0, 1)
    assert_close(outputs.loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))


@REENTRANT
def test_checkpointing_changes_no_gradient(model, reentrant):
    inputs = prompts(model.config, MIXED)
    loss_of(model, inputs).backward()
    expected = gradients_of(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    runs = []
    model.model.vision_tower.layers[0].feed_forward.register_forward_pre_hook(lambda *_: runs.append(1))
    loss_of(model, inputs).backward()
    assert len(runs) == 2  # images and videos together, forward and again for backward
    gradients = gradients_of(model)
    assert gradients.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    for name in expected:
        assert_close(gradients[name], expected[name])


@REENTRANT
def test_adapters_in_the_tower_learn_under_checkpointing(model, reentrant):
    inputs = prompts(model.config, MIXED)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=TOWER_ADAPTER, lora_dropout=0.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    loss_of(adapted, inputs).backward()
    expected = gradients_of(adapted)
    assert expected.keys() == {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert all("vision_tower" in name and gradient.abs().max() > 0 for name, gradient in expected.items())

    adapted.base_model.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    adapted.enable_input_require_grads()
    loss_of(adapted, inputs).backward()
    gradients = gradients_of(adapted)
    for name in expected:
        assert_close(gradients[name], expected[name])


@REENTRANT
def test_a_frozen_tower_builds_no_graph(model, reentrant):
    inputs = prompts(model.config, MIXED)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.model.vision_tower.requires_grad_(False)
    outputs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    assert not outputs.last_hidden_state.requires_grad
    assert all(features.requires_grad for features in outputs.pooler_output)
    runs = []
    model.model.vision_tower.layers[0].register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    loss_of(model, inputs).backward()
    assert runs == [False]  # images and videos together, never again for backward
    gradients = gradients_of(model)
    assert not any("vision_tower" in name for name in gradients)
    assert gradients["model.multi_modal_projector.linear_1.weight"].abs().max() > 0


def test_pixels_get_gradients_through_a_frozen_tower(model):
    inputs = prompts(model.config, MIXED)
    model.model.vision_tower.requires_grad_(False)
    inputs["pixel_values"].requires_grad_()
    loss_of(model, inputs).backward()
    assert inputs["pixel_values"].grad.abs().amax(1).min() > 0


def test_a_frozen_vision_side_builds_no_graph(model):
    inputs = prompts(model.config, MIXED)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    outputs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    assert not any(features.requires_grad for features in outputs.pooler_output)
    loss_of(model, inputs).backward()
    assert all("language_model" in name or "lm_head" in name for name in gradients_of(model))


def test_a_row_without_pictures_trains_beside_others(model):
    inputs = prompts(model.config, [[4], [2, ("image", 1, 2), 3]])
    loss_of(model, inputs).backward()
    assert gradients_of(model).keys() == {name for name, _ in model.named_parameters()}


def test_a_step_after_inference_on_the_same_grid_trains(model):
    inputs = prompts(model.config, [[3, ("image", 7, 5), 2]])
    with torch.inference_mode():
        model(**inputs)
    loss_of(model, inputs).backward()
    assert gradients_of(model)["model.vision_tower.patch_embed.weight"].abs().max() > 0


def test_a_few_steps_lower_the_loss(model):
    inputs = prompts(model.config, MIXED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
