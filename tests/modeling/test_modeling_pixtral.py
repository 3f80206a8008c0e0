"""The Pixtral tower and model beside transformers' own, and what ours does besides."""

import copy
import json
import weakref

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlavaForConditionalGeneration, Mistral3ForConditionalGeneration
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel as PublishedVisionModel

from gridtower.configuration.configuration_pixtral import (
    PixtralConfig,
    PixtralLlavaConfig,
    PixtralMixedConfig,
    PixtralVisionConfig,
)
from gridtower.modeling.modeling_pixtral import PixtralForConditionalGeneration, PixtralModel, PixtralVisionModel

VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 64,
}  # fmt: skip
TEXT = {
    "model_type": "mistral", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "sliding_window": None,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
IMAGE_TOKEN = 10
SIZES = [(24, 32), (8, 16), (16, 8)]
PUBLISHED = {PixtralConfig: Mistral3ForConditionalGeneration, PixtralLlavaConfig: LlavaForConditionalGeneration}
ODD_TOWERS = [
    {},
    {"patch_size": 14, "num_attention_heads": 1},
    {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 7},
    {"hidden_size": 20, "num_attention_heads": 1, "num_hidden_layers": 1},
    {"num_attention_heads": 8, "hidden_act": "silu"},
    {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
    {"num_channels": 1, "image_mean": [0.5], "image_std": [0.5], "patch_size": 3},
    {"hidden_size": 72, "num_attention_heads": 1, "hidden_act": "relu", "patch_size": 1},
    {"patch_size": 7, "num_hidden_layers": 5, "image_size": [64, 96]},
]
# As documented in PixtralForConditionalGeneration.
LORA_TARGETS = {
    "vision_tower": r".*vision_tower.*\.[qkvo]_proj",
    "multi_modal_projector": r".*multi_modal_projector.*\.(linear_[12]|merging_layer)",
    "language_model": r".*language_model.*\.[qkvo]_proj",
}


def shake(model):
    """Norms off 1, biases off 0, and weights that matter, so that leaving one out shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(4)
    return model.eval()


def make_tower(seed=0, implementation="eager", **fields):
    torch.manual_seed(seed)
    tower = shake(PixtralVisionModel(PixtralVisionConfig(**(VISION | fields))))
    tower.set_attn_implementation(implementation)
    return tower


def published_tower(tower, implementation="eager"):
    fields = {k: v for k, v in tower.config.to_dict().items() if k != "transformers_version"}
    theirs = PublishedVisionModel(transformers.PixtralVisionConfig(**fields)).eval()
    theirs.load_state_dict(tower.state_dict())
    theirs.set_attn_implementation(implementation)
    return theirs.to(tower.dtype)


def make_config(kind=PixtralConfig, vision=(), text=(), **fields):
    fields = {"tie_word_embeddings": False} | fields
    return kind(vision_config=VISION | dict(vision), text_config=TEXT | dict(text), **fields)


def make_model(kind=PixtralConfig, seed=0, **fields):
    torch.manual_seed(seed)
    return shake(PixtralForConditionalGeneration(make_config(kind, **fields)))


def published_model(model, folder):
    model.save_pretrained(folder)
    theirs, loading = PUBLISHED[type(model.config)].from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return theirs.eval()


def make_images(sizes=SIZES, seed=0, channels=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return [torch.randint(0, 256, (channels, *size), generator=generator, dtype=dtype) for size in sizes]
    return [torch.randn(channels, *size, generator=generator, dtype=dtype) for size in sizes]


def pad(images):
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    padded = torch.full((len(images), images[0].shape[0], height, width), 9.0)
    for row, image in zip(padded, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    return padded


def pack(images, patch=4, merge=1):
    """Patches in merge-block order, by a plain loop."""
    rows, grid = [], []
    for image in images:
        height, width = (side // patch for side in image.shape[1:])
        grid.append([1, height, width])
        for top in range(0, height, merge):
            for left in range(0, width, merge):
                for row in range(top, top + merge):
                    for col in range(left, left + merge):
                        cut = image[:, row * patch : (row + 1) * patch, col * patch : (col + 1) * patch]
                        rows.append(cut.reshape(-1))
    return torch.stack(rows), torch.tensor(grid)


def prompt(sizes=SIZES, merge=2, patch=4):
    row = [1]
    for height, width in sizes:
        row += [IMAGE_TOKEN] * (height * width // (patch * merge) ** 2) + [20]
    return torch.tensor([row])


def close(ours, theirs, bound=1e-5):
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


# The tower


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", ODD_TOWERS)
def test_the_tower_equals_transformers_on_a_ragged_padded_batch(fields, implementation):
    tower = make_tower(implementation=implementation, **fields)
    patch, channels = tower.config.patch_size, tower.config.num_channels
    sizes = [(6 * patch, 8 * patch), (2 * patch, 3 * patch), (patch, patch), (5 * patch + patch // 2, 2 * patch)]
    images, sizes = pad(make_images(sizes, channels=channels)), torch.tensor(sizes)
    expected = published_tower(tower, implementation)(images, image_sizes=sizes, output_hidden_states=True)
    actual = tower(images, image_sizes=sizes, output_hidden_states=True)
    scale = expected.last_hidden_state.abs().max().item()
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(ours / scale, theirs / scale)
    close(actual.last_hidden_state / scale, expected.last_hidden_state / scale)


def test_in_bfloat16_the_tower_is_as_near_to_float32_as_transformers():
    tower = make_tower()
    images, sizes = pad(make_images()), torch.tensor(SIZES)
    exact = tower(images, image_sizes=sizes).last_hidden_state
    theirs = published_tower(tower.to(torch.bfloat16))(images, image_sizes=sizes).last_hidden_state.float()
    ours = tower(images, image_sizes=sizes).last_hidden_state.float()
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


def test_gradients_of_the_tower_equal_transformers():
    tower = make_tower()
    theirs = published_tower(tower)
    images, sizes = pad(make_images()), torch.tensor(SIZES)
    for model in (tower, theirs):
        model(images, image_sizes=sizes).last_hidden_state.square().mean().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in tower.named_parameters():
        scale = expected[name].grad.abs().max()
        assert scale > 0, name
        close(parameter.grad / scale, expected[name].grad / scale)


@pytest.mark.parametrize("merge", [1, 2])
def test_packed_padded_and_listed_images_give_the_same_features(merge):
    tower = make_tower(spatial_merge_size=merge)
    images = make_images()
    padded = tower(pad(images), image_sizes=torch.tensor(SIZES)).last_hidden_state[0]
    listed = tower(images).last_hidden_state[0]
    pixels, grid = pack(images, merge=merge)
    packed = tower(pixels, grid_thw=grid).last_hidden_state
    close(listed, padded, 1e-6)
    # Which raster place each packed patch has: its number, packed in the same way.
    places, start = [], 0
    for _, rows, cols in grid.tolist():
        numbers = torch.arange(start, start + rows * cols).view(1, rows, cols)
        places.append(pack([numbers], patch=1, merge=merge)[0])
        start += rows * cols
    close(packed, padded[torch.cat(places).flatten()], 1e-6)


def test_images_without_sizes_are_taken_whole():
    tower = make_tower()
    images = torch.randn(2, 3, 12, 20)
    close(tower(images).last_hidden_state, published_tower(tower)(images).last_hidden_state)


def test_each_frame_of_several_steps_attends_to_itself_only():
    tower = make_tower()
    frames = make_images([(8, 12)] * 3)
    pixels, _ = pack(frames)
    clip = tower(pixels, grid_thw=torch.tensor([[3, 2, 3]])).last_hidden_state
    close(clip, tower(frames).last_hidden_state[0], 1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_patch_reaches_every_patch_of_its_image_and_none_of_another(implementation):
    tower = make_tower(implementation=implementation, spatial_merge_size=2)
    pixels, grid = pack(make_images(), merge=2)
    before = tower(pixels, grid_thw=grid).last_hidden_state
    changed = pixels.clone()
    changed[47] += 1  # the last patch of the first image, which has 6 x 8
    after = tower(changed, grid_thw=grid).last_hidden_state
    assert ((before - after)[:48].abs().amax(-1) > 0).all()
    assert torch.equal(before[48:], after[48:])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5))
def test_an_image_has_the_same_features_alone_and_in_any_batch(grids):
    tower = make_tower(num_hidden_layers=1)
    images = make_images([(4 * rows, 4 * cols) for rows, cols in grids])
    together = tower(images).last_hidden_state[0].split([rows * cols for rows, cols in grids])
    for image, features in zip(images, together):
        close(features, tower([image]).last_hidden_state[0])


def test_a_meta_load_and_a_cast_change_no_rotation(tmp_path):
    tower = make_tower()
    tower.save_pretrained(tmp_path)
    loaded = PixtralVisionModel.from_pretrained(tmp_path, attn_implementation="eager").to(torch.bfloat16)
    assert not list(loaded.buffers())
    images = make_images()
    assert torch.equal(loaded(images).last_hidden_state, tower.to(torch.bfloat16)(images).last_hidden_state)


def test_rotation_in_a_bfloat16_tower_is_exact_far_from_the_origin():
    # Only differences of positions matter. bfloat16 could not tell row 1000 from row 1003.
    tower = make_tower().to(torch.bfloat16)
    with torch.no_grad():
        tower.transformer.layers[0].attention.q_proj.weight.mul_(3)  # attention that is far from even
    pixels, grid = pack(make_images([(24, 32)]))
    near = torch.cartesian_prod(torch.arange(6), torch.arange(8))
    here, there = (
        tower(pixels, grid_thw=grid, position_ids=positions, output_attentions=True).attentions[0][0]
        for positions in (near, near + 1000)
    )
    assert (here - there).abs().max() < 0.01


def test_float32_pixels_enter_a_bfloat16_tower():
    tower = make_tower().to(torch.bfloat16)
    assert tower(make_images()).last_hidden_state.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.0), (torch.float16, 0.0)])
def test_uint8_patches_equal_pixels_that_a_processor_normalised(dtype, bound):
    # float32 folds the statistics into the weight; narrower weights get the very pixels that the float path gets.
    tower = make_tower(image_mean=[0.1, 0.5, 0.9], image_std=[0.2, 0.3, 0.4]).to(dtype)
    raw = make_images(dtype=torch.uint8)
    mean, std = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.3, 0.4])
    normalised = [(image / 255 - mean[:, None, None]) / std[:, None, None] for image in raw]
    pixels, grid = pack(raw)
    assert pixels.dtype == torch.uint8
    expected = tower(normalised).last_hidden_state[0]
    scale = expected.abs().max()
    close(tower(pixels, grid_thw=grid).last_hidden_state / scale, expected / scale, bound)
    close(tower(raw).last_hidden_state[0] / scale, expected / scale, bound)


def test_gradients_pass_the_folded_normalisation():
    tower = make_tower()
    raw = make_images(dtype=torch.uint8)
    mean, std = (torch.tensor(values)[:, None, None] for values in (tower.config.image_mean, tower.config.image_std))
    gradients = []
    for images in (raw, [(image / 255 - mean) / std for image in raw]):
        tower.zero_grad()
        tower(images).last_hidden_state.square().mean().backward()
        gradients.append(tower.patch_conv.weight.grad.clone())
    close(gradients[0] / gradients[1].abs().max(), gradients[1] / gradients[1].abs().max())


def test_only_the_hidden_states_asked_for_are_kept():
    states = make_tower()(make_images(), output_hidden_states=[1, -1]).hidden_states
    assert [state is not None for state in states] == [False, True, False, True]


def test_attention_maps_come_by_image():
    maps = make_tower()(make_images(), output_attentions=True).attentions[0]
    assert [m.shape[-1] for m in maps] == [48, 8, 8]
    close(maps[0].sum(-1), torch.ones(1, 2, 48))


def test_attention_dropout_acts_in_training_only():
    tower = make_tower(attention_dropout=0.5)
    images = make_images()
    assert torch.equal(tower(images).last_hidden_state, make_tower()(images).last_hidden_state)
    tower.train()
    assert not torch.equal(tower(images).last_hidden_state, tower(images).last_hidden_state)


def test_an_override_builds_fewer_layers_and_ignores_the_rest_of_the_checkpoint(tmp_path):
    tower = make_tower()
    tower.save_pretrained(tmp_path)
    short, loading = PixtralVisionModel.from_pretrained(
        tmp_path, num_hidden_layers_override=2, output_loading_info=True
    )
    assert len(short.transformer.layers) == 2
    assert not any(loading.values()), loading
    expected = tower(make_images(), output_hidden_states=True).hidden_states[2]
    close(short(make_images()).last_hidden_state, expected, 1e-6)


class LiveBytes(TorchDispatchMode):
    """Most bytes alive at once among the results of operations."""

    def __init__(self):
        super().__init__()
        self.live, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.most = max(self.most, self.live)
        return result

    def _count(self, storage):
        if storage.data_ptr() == 0 or storage._cdata in self.known:
            return
        size, key = storage.nbytes(), storage._cdata
        self.known.add(key)
        self.live += size

        def forget():
            self.live -= size
            self.known.discard(key)

        weakref.finalize(storage, forget)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_memory_for_each_image_does_not_grow_with_the_batch(implementation):
    tower = make_tower(
        implementation=implementation, hidden_size=8, intermediate_size=8, num_hidden_layers=1, patch_size=56
    )

    def most_bytes(count):
        pixels, grid = torch.zeros(count * 64, tower.config.patch_dim), torch.tensor([[1, 8, 8]] * count)
        with torch.no_grad(), LiveBytes() as memory:
            tower(pixels, grid_thw=grid)
        return memory.most / count

    assert most_bytes(64) <= 1.3 * most_bytes(8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda: {"pixel_values": torch.zeros(4, 47), "grid_thw": torch.tensor([[1, 2, 2]])}, r"\(num_patches, 48\)"),
        (lambda: {"pixel_values": torch.zeros(4, 48), "grid_thw": torch.tensor([[1, 2, 3]])}, "describes 6 patches"),
        (lambda: {"pixel_values": torch.zeros(4, 48)}, "without a grid"),
        (
            lambda: {
                "pixel_values": torch.zeros(4, 48),
                "grid_thw": torch.tensor([[1, 2, 2]]),
                "image_grid_thw": torch.tensor([[1, 2, 2]]),
            },
            "grids once",
        ),
        (lambda: {"pixel_values": torch.zeros(2, 3, 8, 8), "image_sizes": [(8, 8)]}, "1 sizes and pixel_values 2"),
        (
            lambda: {"pixel_values": torch.zeros(1, 3, 8, 8), "image_sizes": [(8, 12)]},
            r"image_sizes\[0\] is \[8, 12\]",
        ),
        (lambda: {"pixel_values": torch.zeros(1, 3, 8, 3)}, r"grid_thw\[0\] is \[1, 2, 0\]"),
        (lambda: {"pixel_values": [torch.zeros(3, 8, 8), torch.zeros(4, 8, 8)]}, "Image 1 has shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_tower()(**inputs())


# The model


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (PixtralConfig, {}),
        (PixtralConfig, {"spatial_merge_size": 1, "multimodal_projector_bias": True}),
        (PixtralConfig, {"spatial_merge_size": 3, "vision_feature_layer": -2}),
        (PixtralConfig, {"vision_feature_layer": [1], "projector_hidden_act": "relu"}),
        (PixtralConfig, {"text": {"model_type": "ministral3"}}),
        (PixtralLlavaConfig, {}),
        (PixtralLlavaConfig, {"multimodal_projector_bias": False, "vision_feature_layer": 1}),
        (PixtralLlavaConfig, {"vision_feature_layer": [-1, 1, -3]}),
        (
            PixtralLlavaConfig,
            {"vision": {"hidden_act": "silu", "num_attention_heads": 4}, "tie_word_embeddings": True},
        ),
    ],
)
def test_the_model_equals_transformers_on_ragged_images(kind, fields, tmp_path):
    ours = make_model(kind, **fields)
    theirs = published_model(ours, tmp_path)
    merge = ours.config.spatial_merge_size
    sizes = [(24, 36), (12, 12), (12, 24)] if merge == 3 else SIZES
    batch = {
        "input_ids": prompt(sizes, merge),
        "pixel_values": pad(make_images(sizes)),
        "image_sizes": torch.tensor(sizes),
        "output_hidden_states": False,
    }
    expected = theirs(**batch, labels=batch["input_ids"])
    actual = ours(**batch, labels=batch["input_ids"])
    close(actual.logits, expected.logits, 3e-5)
    close(actual.loss, expected.loss)
    for ours_, theirs_ in zip(actual.image_outputs.pooler_output, expected.image_outputs.pooler_output, strict=True):
        close(ours_, theirs_, 3e-5)


@pytest.mark.parametrize("kind", [PixtralConfig, PixtralLlavaConfig])
def test_gradients_of_the_model_equal_transformers(kind, tmp_path):
    ours = make_model(kind)
    theirs = published_model(ours, tmp_path)
    ids = prompt(merge=ours.config.spatial_merge_size)
    for model in (ours, theirs):
        model(
            input_ids=ids, labels=ids, pixel_values=pad(make_images()), image_sizes=torch.tensor(SIZES)
        ).loss.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        scale = expected[name].grad.abs().max()
        assert scale > 0, name
        close(parameter.grad / scale, expected[name].grad / scale, 3e-5)


@pytest.mark.parametrize("kind", [PixtralConfig, PixtralLlavaConfig])
def test_packed_pixels_give_the_logits_of_padded_ones(kind):
    model = make_model(kind)
    merge = model.config.spatial_merge_size
    images, ids = make_images(), prompt(merge=merge)
    pixels, grid = pack(images, merge=merge)
    packed = model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid).logits
    close(packed, model(input_ids=ids, pixel_values=pad(images), image_sizes=torch.tensor(SIZES)).logits, 1e-6)
    close(packed, model(input_ids=ids, pixel_values=images).logits, 1e-6)


def test_several_layers_are_joined_also_in_front_of_norm_and_merger():
    model = make_model(vision_feature_layer=[1, -1])
    assert model.model.multi_modal_projector.norm.weight.shape == (64,)
    features = model.get_image_features(make_images()).pooler_output
    assert [tuple(f.shape) for f in features] == [(12, 48), (2, 48), (2, 48)]


@pytest.mark.parametrize(("norm", "merger"), [(True, False), (False, True)])
def test_a_projector_may_have_a_norm_or_a_merger_alone(norm, merger):
    model = make_model(
        PixtralMixedConfig, projector_norm=norm, projector_merger=merger, spatial_merge_size=2 if merger else 1
    )
    names = {name.split(".")[0] for name, _ in model.model.multi_modal_projector.named_parameters()}
    assert names == {"linear_1", "linear_2"} | ({"norm"} if norm else set()) | ({"patch_merger"} if merger else set())
    merge = model.config.spatial_merge_size
    assert model(input_ids=prompt(merge=merge), pixel_values=make_images()).logits.isfinite().all()


def test_another_layer_may_be_chosen_for_one_call():
    model = make_model(PixtralLlavaConfig, vision_feature_layer=2)
    other = copy.deepcopy(model)
    other.config.vision_feature_layer = -1
    chosen = model.get_image_features(make_images(), vision_feature_layer=-1).pooler_output
    for ours, theirs in zip(chosen, other.get_image_features(make_images()).pooler_output, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="names 2 layers"):
        model.get_image_features(make_images(), vision_feature_layer=[1, 2])
    with pytest.raises(ValueError, match='give "full"'):
        model.get_image_features(make_images(), vision_feature_select_strategy="default")
    with pytest.raises(ValueError, match="hidden state 7"):
        model.get_image_features(make_images(), vision_feature_layer=7)


def test_only_the_chosen_vision_layers_are_kept():
    states = (
        make_model(PixtralLlavaConfig, vision_feature_layer=[1, -1]).get_image_features(make_images()).hidden_states
    )
    assert [state is not None for state in states] == [False, True, False, True]
    assert make_model().get_image_features(make_images()).hidden_states is None


@pytest.mark.parametrize("asked", [1, [1], [-3, -3]])
def test_states_asked_for_come_besides_those_that_the_projector_reads(asked):
    model = make_model(PixtralLlavaConfig, vision_feature_layer=2)
    outputs = model.get_image_features(make_images(), output_hidden_states=asked)
    assert [state is not None for state in outputs.hidden_states] == [False, True, True, False]


def test_negative_layers_count_in_the_checkpoint_under_an_override():
    full = make_model(PixtralLlavaConfig, vision_feature_layer=-2)
    short = PixtralForConditionalGeneration(
        make_config(PixtralLlavaConfig, vision={"num_hidden_layers_override": 2}, vision_feature_layer=-2)
    )
    short.load_state_dict(full.state_dict(), strict=False)
    for ours, theirs in zip(*(m.get_image_features(make_images()).pooler_output for m in (short.eval(), full))):
        close(ours, theirs, 1e-6)


def test_drafters_get_the_text_states_that_they_ask_for_and_no_others():
    model = make_model()
    inputs = {"input_ids": prompt(), "pixel_values": make_images()}
    every = model(**inputs, output_hidden_states=True)
    some = model(**inputs, output_hidden_states=[0, 2])
    assert [state is not None for state in some.hidden_states] == [True, False, True, False]
    assert torch.equal(some.hidden_states[2], every.hidden_states[2])
    assert some.image_outputs.hidden_states is None


def test_text_alone_needs_no_pixels():
    ids = torch.tensor([[1, 20, 30, 40]])
    model = make_model()
    close(model(input_ids=ids).logits, model.lm_head(model.model.language_model(ids).last_hidden_state))


def test_images_go_to_their_rows_in_order():
    model = make_model()
    first, second = make_images([(24, 32), (8, 16)])
    one, two = prompt([(24, 32)]), prompt([(8, 16)])
    padded = torch.nn.functional.pad(two, (one.shape[1] - two.shape[1], 0), value=0)
    ids, mask = torch.cat([one, padded]), torch.cat([one, padded]) != 0
    together = model(input_ids=ids, attention_mask=mask.long(), pixel_values=[first, second]).logits
    close(together[0], model(input_ids=one, pixel_values=[first]).logits[0])
    close(together[1, -two.shape[1] :], model(input_ids=two, pixel_values=[second]).logits[0])


def test_the_number_of_placeholders_must_be_that_of_features():
    with pytest.raises(ValueError, match="hold 16 image placeholders .* make 12 features"):
        make_model()(input_ids=prompt(), pixel_values=make_images()[:1])


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_beams_and_several_sequences_keep_their_images(form):
    model = make_model()
    images = make_images([(8, 16), (24, 32), (16, 8)])
    rows = [prompt([(8, 16), (24, 32)])[0], prompt([(16, 8)])[0]]
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=0) for row in rows])
    pixels, grid = pack(images, merge=2)
    media = {
        "packed": {"pixel_values": pixels, "image_grid_thw": grid},
        "padded": {"pixel_values": pad(images), "image_sizes": torch.tensor([image.shape[1:] for image in images])},
    }[form]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = (ids != 0).long()
    many = model.generate(input_ids=ids, attention_mask=mask, **media, num_beams=3, num_return_sequences=3, **options)
    many = many.view(2, 3, -1)
    alone = [(ids[:1], images[:2]), (ids[1:], images[2:])]
    for row, (row_ids, row_images) in enumerate(alone):
        single = model.generate(
            input_ids=row_ids, attention_mask=mask[row : row + 1], pixel_values=row_images, num_beams=3, **options
        )
        assert torch.equal(many[row, 0], single[0])


def test_placeholders_are_never_sampled():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[IMAGE_TOKEN] = 1e3 * model.model.language_model.norm.weight
        model.lm_head.weight[IMAGE_TOKEN + 1] = -model.lm_head.weight[IMAGE_TOKEN]
    ids = model.generate(input_ids=torch.tensor([[1, 20]]), max_new_tokens=5, do_sample=False)
    assert IMAGE_TOKEN not in ids[0, 2:]


def test_every_sub_model_answers_for_its_input_embeddings():
    model = make_model()
    assert model.get_input_embeddings() is model.model.language_model.embed_tokens
    assert model.model.vision_tower.get_input_embeddings() is model.model.vision_tower.patch_conv


@pytest.mark.parametrize("part", LORA_TARGETS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_on_one_part_learns_there_and_nowhere_else(part, reentrant):
    model = make_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=LORA_TARGETS[part], init_lora_weights=False))
    ids = prompt()
    tuned(input_ids=ids, labels=ids, pixel_values=make_images()).loss.backward()
    trained = [(name, p.grad) for name, p in tuned.named_parameters() if p.requires_grad]
    modules = {"vision_tower": 3 * 4, "multi_modal_projector": 3, "language_model": 3 * 4}
    assert len(trained) == 2 * modules[part]
    for name, gradient in trained:
        assert f".{part}." in name
        assert gradient is not None and gradient.abs().max() > 0, name


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    model = make_model()
    rows = [prompt([size]) for size in [(8, 16), (16, 8), (8, 16), (16, 8)]]
    images = make_images([(8, 16), (16, 8), (8, 16), (16, 8)])
    ids, items = torch.cat(rows), sum(row.shape[1] - 1 for row in rows)
    whole = model(input_ids=ids, labels=ids, pixel_values=images, num_items_in_batch=items).loss
    parts = sum(
        model(input_ids=row, labels=row, pixel_values=[image], num_items_in_batch=items).loss
        for row, image in zip(rows, images)
    )
    close(parts, whole)


def test_a_frozen_tower_builds_no_graph():
    model = make_model()
    model.model.vision_tower.requires_grad_(False)
    assert not model.model.vision_tower(make_images()).last_hidden_state.requires_grad


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_tied_only_where_the_configuration_says_so(tied, tmp_path):
    model = make_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert ("language_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = PixtralForConditionalGeneration.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is tied
    close(loaded(input_ids=torch.tensor([[1, 2]])).logits, model(input_ids=torch.tensor([[1, 2]])).logits, 1e-6)


# Published checkpoints: names as they lie on the hub, sizes scaled down

TOWER_NAMES = ["patch_conv.weight", "ln_pre.weight"] + [
    f"transformer.layers.{index}.{leaf}.weight"
    for index in range(2)
    for leaf in (
        "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "attention_norm",
        "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj", "ffn_norm",
    )
]  # fmt: skip
TEXT_NAMES = ["embed_tokens.weight", "norm.weight"] + [
    f"layers.{index}.{leaf}.weight"
    for index in range(2)
    for leaf in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm",
    )
]  # fmt: skip
LINEAR = ["linear_1.weight", "linear_2.weight"]
BIASES = ["linear_1.bias", "linear_2.bias"]
HUB_CONFIGS = {
    "pixtral-12b": {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_seq_length": 1,
        "image_token_index": 10, "model_type": "llava", "projector_hidden_act": "gelu",
        "text_config": {
            "hidden_size": 5120, "head_dim": 128, "intermediate_size": 14336, "is_composition": True,
            "max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
        "vision_config": {
            "head_dim": 64, "hidden_act": "silu", "image_size": 1024, "is_composition": True, "model_type": "pixtral",
            "patch_size": 16, "rope_theta": 10000.0, "tie_word_embeddings": False,
        },
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
    "Mistral-Small-3.1-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
            "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
            "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    },
}  # fmt: skip
HUB_PROJECTORS = {
    "pixtral-12b": LINEAR + BIASES,
    "Mistral-Small-3.1-24B": LINEAR + ["norm.weight", "patch_merger.merging_layer.weight"],
}
SMALL = {"text_config": {**TEXT, "num_hidden_layers": 2}, "vision_config": {**VISION, "num_hidden_layers": 2}}


def hub_names(checkpoint):
    return [
        *(f"vision_tower.{name}" for name in TOWER_NAMES),
        *(f"multi_modal_projector.{name}" for name in HUB_PROJECTORS[checkpoint]),
        *(f"language_model.model.{name}" for name in TEXT_NAMES),
        "language_model.lm_head.weight",
    ]


def small_checkpoint(checkpoint, folder):
    """A folder with the hub's names and fields; every width that the fields name is small."""
    fields = copy.deepcopy(HUB_CONFIGS[checkpoint])
    for part, small in SMALL.items():
        fields[part] |= small | ({"head_dim": 16} if part == "vision_config" else {})
    shapes = {
        name.replace("model.language_model.", "language_model.model.")
        .replace("lm_head", "language_model.lm_head")
        .removeprefix("model."): tensor.shape
        for name, tensor in PixtralForConditionalGeneration(PixtralConfig.from_dict(fields)).state_dict().items()
    }
    assert sorted(shapes) == sorted(hub_names(checkpoint))
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields))
    return tensors


@pytest.mark.parametrize("checkpoint", HUB_CONFIGS)
def test_a_published_checkpoint_loads_and_saves_under_its_names(checkpoint, tmp_path):
    tensors = small_checkpoint(checkpoint, tmp_path)
    model, loading = PixtralForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == HUB_CONFIGS[checkpoint]["model_type"]
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("checkpoint", HUB_CONFIGS)
def test_the_model_without_its_head_loads_a_published_checkpoint(checkpoint, tmp_path):
    small_checkpoint(checkpoint, tmp_path)
    _, loading = PixtralModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert loading["unexpected_keys"] <= {"language_model.lm_head.weight", "lm_head.weight"}


@pytest.mark.parametrize("checkpoint", HUB_CONFIGS)
def test_a_published_configuration_builds_the_published_shapes(checkpoint):
    with torch.device("meta"):
        model = PixtralForConditionalGeneration(PixtralConfig.from_dict(copy.deepcopy(HUB_CONFIGS[checkpoint])))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["model.language_model.layers.39.self_attn.k_proj.weight"] == (1024, 5120)
    assert shapes["model.vision_tower.transformer.layers.23.feed_forward.down_proj.weight"] == (1024, 4096)
    assert shapes["model.multi_modal_projector.linear_1.weight"] == (5120, 1024)
    theirs = PUBLISHED[type(model.config)]
    with torch.device("meta"):
        expected = theirs(theirs.config_class.from_dict(copy.deepcopy(HUB_CONFIGS[checkpoint])))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
