"""LFM3-VL computes what transformers' own classes compute, on odd shapes and ragged inputs."""

import pytest
import torch
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlForConditionalGeneration, Lfm3VlVisionModel

from .lfm3_vl_cases import (
    IMAGE,
    IMAGE_BLOCKS,
    MIXED,
    TOWERS,
    VIDEO_BLOCKS,
    assert_close,
    model_fields,
    pair_of_models,
    prompts,
    ragged_grid,
    random_pixels,
    tower_fields,
)
from .varlen_reference import NAME as VARLEN
from .varlen_reference import use_backend

towers = pytest.mark.parametrize("fields", TOWERS.values(), ids=TOWERS)
backends = pytest.mark.parametrize("backend", ["eager", "sdpa", VARLEN])


@towers
def test_the_tower_equals_transformers(fields):
    ours, theirs = pair_of_models(Lfm3VlVisionConfig, fields)
    grid = ragged_grid(ours.config)
    pixels = random_pixels(ours.config, grid)
    with torch.no_grad():
        assert_close(ours(pixels, grid_thw=grid)[0], theirs(pixels, grid_thw=grid)[0])


@towers
def test_gradients_of_the_tower_equal_transformers(fields):
    gradients = []
    for tower in pair_of_models(Lfm3VlVisionConfig, fields):
        grid = ragged_grid(tower.config)
        pixels = random_pixels(Lfm3VlVisionConfig(**fields), grid).requires_grad_()
        output = tower(pixels, grid_thw=grid).last_hidden_state
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        gradients.append({"pixels": pixels.grad} | {name: p.grad for name, p in tower.named_parameters()})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_close(ours[name], theirs[name])


def root_mean_square(values):
    return values.float().square().mean().sqrt()


@towers
def test_in_bfloat16_the_tower_is_as_near_the_truth_as_transformers(fields):
    # The truth: the same bfloat16 weights and pixels, computed in float32. Both towers round at many places, so they
    # are compared by their distance from it and not with each other.
    ours, theirs = (tower.bfloat16() for tower in pair_of_models(Lfm3VlVisionConfig, fields))
    grid = ragged_grid(ours.config)
    pixels = random_pixels(ours.config, grid).bfloat16()
    with torch.no_grad():
        outputs = [tower(pixels, grid_thw=grid).last_hidden_state for tower in (ours, theirs)]
        truth = theirs.float()(pixels.float(), grid_thw=grid).last_hidden_state
    assert outputs[0].dtype == torch.bfloat16
    our_error, their_error = (root_mean_square(output.float() - truth) for output in outputs)
    assert our_error <= 1.5 * their_error
    assert our_error <= 0.02 * root_mean_square(truth)


@pytest.mark.parametrize("fields", [TOWERS["published pattern"], TOWERS["kernel 7, merge 3"]])
def test_hidden_states_and_maps_come_in_the_order_of_the_input(fields):
    ours, theirs = pair_of_models(Lfm3VlVisionConfig, fields, attn_implementation="eager")
    grid = ragged_grid(ours.config)
    pixels = random_pixels(ours.config, grid)
    with torch.no_grad():
        ours, theirs = (
            tower(pixels, grid_thw=grid, output_hidden_states=True, output_attentions=True) for tower in (ours, theirs)
        )
    assert len(ours.hidden_states) == len(theirs.hidden_states) == len(fields["layer_types"]) + 1
    for our_states, their_states in zip(ours.hidden_states, theirs.hidden_states):
        assert_close(our_states, their_states)
    assert len(ours.attentions) == len(theirs.attentions) == fields["layer_types"].count("full_attention")
    for our_maps, their_maps in zip(ours.attentions, theirs.attentions):
        assert len(our_maps) == len(their_maps) == int(grid[:, 0].sum())
        for our_map, their_map in zip(our_maps, their_maps):
            assert_close(our_map, their_map)


def test_single_hidden_states_can_be_asked_for():
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    with torch.no_grad():
        some = tower(pixels, grid_thw=grid, output_hidden_states=[1, -1]).hidden_states
        every = tower(pixels, grid_thw=grid, output_hidden_states=True).hidden_states
    assert [states is None for states in some] == [True, False, True, True, True, False]
    assert torch.equal(some[1], every[1]) and torch.equal(some[-1], every[-1])


@backends
@pytest.mark.parametrize("fields", [TOWERS["published pattern"], TOWERS["heads of 72 channels"]])
def test_every_backend_gives_the_same_output(backend, fields):
    tower, theirs = pair_of_models(Lfm3VlVisionConfig, fields)
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    with torch.no_grad():
        assert_close(use_backend(tower, backend)(pixels, grid_thw=grid)[0], theirs(pixels, grid_thw=grid)[0])


@backends
@pytest.mark.parametrize("layers", [["full_attention"] * 2, ["conv"] * 3, ["conv", "full_attention"]])
def test_a_patch_reaches_all_of_its_frame_and_no_other(backend, layers):
    tower, _ = pair_of_models(Lfm3VlVisionConfig, tower_fields(layers, conv_kernel_size=7))
    use_backend(tower, backend)
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    frame_of_patch = torch.repeat_interleave(torch.arange(int(grid[:, 0].sum())), get_vision_cu_seqlens(grid).diff())
    for frame in frame_of_patch.unique():
        last = int((frame_of_patch == frame).nonzero().max())
        changed_pixels = pixels.clone()
        changed_pixels[last] += 1
        with torch.no_grad():
            change = tower(changed_pixels, grid_thw=grid)[0] != tower(pixels, grid_thw=grid)[0]
        assert torch.equal(change.any(-1), frame_of_patch == frame)


@backends
def test_images_together_equal_images_alone(backend):
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    use_backend(tower, backend)
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    with torch.no_grad():
        together = tower(pixels, grid_thw=grid)[0]
        patches = pixels.split(grid.prod(-1).tolist())
        alone = [tower(own, grid_thw=row[None])[0] for own, row in zip(patches, grid)]
    assert_close(together, torch.cat(alone))


@backends
def test_precomputed_keywords_change_nothing(backend):
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    use_backend(tower, backend)
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    boundaries = get_vision_cu_seqlens(grid)
    with torch.no_grad():
        precomputed = tower(
            pixels,
            grid_thw=grid,
            position_ids=get_vision_position_ids(grid, tower.config.spatial_merge_size),
            cu_seqlens=boundaries,
            max_seqlen=int(boundaries.diff().max()),
        )
        assert torch.equal(precomputed[0], tower(pixels, grid_thw=grid)[0])


def test_precomputed_positions_are_used():
    ours, theirs = pair_of_models(Lfm3VlVisionConfig, TOWERS["only attention"])
    grid = ragged_grid(ours.config)
    pixels = random_pixels(ours.config, grid)
    positions = 3 * get_vision_position_ids(grid, ours.config.spatial_merge_size) + torch.tensor([0, 1])
    with torch.no_grad():
        ours, usual = (ours(pixels, grid_thw=grid, **kwargs)[0] for kwargs in ({"position_ids": positions}, {}))
        assert_close(ours, theirs(pixels, grid_thw=grid, position_ids=positions)[0])
    assert not torch.equal(ours, usual)


def test_a_bfloat16_tower_takes_float32_pixels():
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    tower.bfloat16()
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    with torch.no_grad():
        assert torch.equal(tower(pixels, grid_thw=grid)[0], tower(pixels.bfloat16(), grid_thw=grid)[0])


def test_the_tower_answers_with_a_tuple_when_asked():
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    grid = ragged_grid(tower.config)
    pixels = random_pixels(tower.config, grid)
    with torch.no_grad():
        (output,) = tower(pixels, grid_thw=grid, return_dict=False)
        assert torch.equal(output, tower(pixels, grid_thw=grid).last_hidden_state)


def test_the_tower_takes_what_the_image_processor_returns():
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    grid = ragged_grid(tower.config)
    inputs = {"pixel_values": random_pixels(tower.config, grid), "image_grid_thw": grid}
    with torch.no_grad():
        assert torch.equal(tower(**inputs)[0], tower(inputs["pixel_values"], grid)[0])


@pytest.mark.parametrize(
    "pixels, grid, message",
    [
        ((4, 23), [[1, 2, 2]], r"shape \(4, 23\); give \(num_patches, 24\)"),
        ((1, 3, 4, 4), [[1, 2, 2]], r"shape \(1, 3, 4, 4\); give \(num_patches, 24\)"),
        ((4, 24), [[1, 2, 3]], r"grid_thw\[0\] is \[1, 2, 3\]"),
        ((4, 24), [[1, 2, 2], [1, 2, 2]], "describes 8 patches and pixel_values holds 4"),
        ((4, 24), [1, 2, 2], r"grid_thw has shape \(3,\)"),
    ],
)
def test_pixels_that_fit_no_grid_are_refused(pixels, grid, message):
    tower = Lfm3VlVisionModel(Lfm3VlVisionConfig(**tower_fields()))
    with pytest.raises(ValueError, match=message):
        tower(torch.zeros(pixels), grid_thw=torch.tensor(grid))


def test_a_tower_without_grids_says_what_it_wants():
    tower = Lfm3VlVisionModel(Lfm3VlVisionConfig(**tower_fields()))
    with pytest.raises(ValueError, match="grid_thw"):
        tower(torch.zeros(4, 24))


@towers
def test_the_model_equals_transformers(fields):
    ours, theirs = pair_of_models(Lfm3VlConfig, model_fields(fields))
    inputs = prompts(ours.config, MIXED)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with torch.no_grad():
        ours, theirs = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
    assert_close(ours.logits, theirs.logits)
    assert_close(ours.loss, theirs.loss)
    for modality in ("image_outputs", "video_outputs"):
        for our_image, their_image in zip(ours[modality].pooler_output, theirs[modality].pooler_output, strict=True):
            assert_close(our_image, their_image)


@pytest.mark.parametrize("fields", [TOWERS["published pattern"], TOWERS["kernel 7, merge 3"]])
def test_gradients_of_the_model_equal_transformers(fields):
    gradients = []
    ours, theirs = pair_of_models(Lfm3VlConfig, model_fields(fields))
    # Theirs in float64: two computations in float32 are each off by half of what is allowed here.
    for model, dtype in ((ours, torch.float32), (theirs.double(), torch.float64)):
        inputs = prompts(Lfm3VlConfig(**model_fields(fields)), MIXED)
        for name in ("pixel_values", "pixel_values_videos"):
            inputs[name] = inputs[name].to(dtype).requires_grad_()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        pixels = {name: inputs[name].grad for name in ("pixel_values", "pixel_values_videos")}
        gradients.append(pixels | {name: parameter.grad for name, parameter in model.named_parameters()})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_close(ours[name], theirs[name])


def test_in_bfloat16_the_model_is_as_near_the_truth_as_transformers():
    ours, theirs = (model.bfloat16() for model in pair_of_models(Lfm3VlConfig, model_fields()))
    inputs = prompts(ours.config, MIXED)
    pixels = ("pixel_values", "pixel_values_videos")
    half = inputs | {name: inputs[name].bfloat16() for name in pixels}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        outputs = [model(**half).logits[real] for model in (ours, theirs)]
        truth = theirs.float()(**(inputs | {name: half[name].float() for name in pixels})).logits[real]
    our_error, their_error = (root_mean_square(output.float() - truth) for output in outputs)
    assert our_error <= 1.5 * their_error
    assert our_error <= 0.03 * root_mean_square(truth)


def test_a_bfloat16_model_takes_float32_pixels():
    model, _ = pair_of_models(Lfm3VlConfig, model_fields())
    model.bfloat16()
    inputs = prompts(model.config, MIXED)
    with torch.no_grad():
        assert model(**inputs).logits.dtype == torch.bfloat16


@pytest.fixture
def model():
    return pair_of_models(Lfm3VlConfig, model_fields())[0]


def test_features_computed_before_equal_pixels(model):
    inputs = prompts(model.config, MIXED)
    with torch.no_grad():
        from_pixels = model(**inputs).logits
        features = {
            "image": model.get_image_features(inputs.pop("pixel_values"), inputs["image_grid_thw"]),
            "video": model.get_video_features(inputs.pop("pixel_values_videos"), inputs["video_grid_thw"]),
        }
        assert_close(model(**inputs, mm_encoder_outputs=features).logits, from_pixels)


def test_features_of_images_go_with_pixels_of_videos(model):
    inputs = prompts(model.config, MIXED)
    with torch.no_grad():
        from_pixels = model(**inputs).logits
        features = {"image": model.get_image_features(inputs.pop("pixel_values"), inputs["image_grid_thw"])}
        assert_close(model(**inputs, mm_encoder_outputs=features).logits, from_pixels)
    assert list(features) == ["image"]  # the caller's own dictionary stays as it was


def test_images_and_videos_in_one_prompt_are_encoded_as_each_alone_in_one_pass(model):
    model.set_attn_implementation("eager")
    inputs = prompts(model.config, MIXED)
    inputs["pixel_values"] = torch.randint(0, 256, inputs["pixel_values"].shape, dtype=torch.uint8)
    passes = []
    model.model.vision_tower.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    details = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        together = model(**inputs, **details)
        assert len(passes) == 1
        apart = {
            "image_outputs": model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], **details),
            "video_outputs": model.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"], **details
            ),
        }
    for kind, alone in apart.items():
        found = together[kind]
        assert_close(found.last_hidden_state, alone.last_hidden_state)
        for name in ("pooler_output", "hidden_states"):
            for ours, theirs in zip(found[name], alone[name], strict=True):
                assert_close(ours, theirs)
        for ours, theirs in zip(found.attentions, alone.attentions, strict=True):
            assert (ours is None) == (theirs is None)
            for our_map, their_map in zip(ours or (), theirs or (), strict=True):
                assert_close(our_map, their_map)


def test_patches_that_a_video_has_too_many_do_not_fill_up_for_those_that_an_image_lacks(model):
    inputs = prompts(model.config, MIXED)
    area = model.config.vision_config.spatial_merge_size**2
    moved = inputs["pixel_values"][-area:]
    inputs["pixel_values"] = inputs["pixel_values"][:-area]
    inputs["pixel_values_videos"] = torch.cat([moved, inputs["pixel_values_videos"]])
    with pytest.raises(ValueError, match="patches"):
        model(**inputs)


def test_embeddings_in_place_of_ids_give_the_same(model):
    inputs = prompts(model.config, MIXED)
    with torch.no_grad():
        from_ids = model(**inputs).logits
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
        assert torch.equal(model(**inputs, inputs_embeds=embeddings).logits, from_ids)


def test_text_alone_needs_no_pixels(model):
    ours, theirs = pair_of_models(Lfm3VlConfig, model_fields())
    inputs = prompts(model.config, [[5], [9]])
    with torch.no_grad():
        assert_close(ours(**inputs).logits, theirs(**inputs).logits)


def test_rows_are_independent_of_each_other(model):
    together = prompts(model.config, [[3, ("image", 1, 2), 4], [2, ("image", 3, 3), ("image", 1, 1), 2]])
    first = {
        "input_ids": together["input_ids"][:1, -9:],
        "pixel_values": together["pixel_values"][:8],
        "image_grid_thw": together["image_grid_thw"][:1],
    }
    with torch.no_grad():
        assert_close(model(**together).logits[:1, -9:], model(**first).logits)


def precomputed(config, inputs):
    keywords = {}
    for media in ("image", "video"):
        grid = inputs[f"{media}_grid_thw"]
        keywords[f"{media}_position_ids"] = get_vision_position_ids(grid, config.vision_config.spatial_merge_size)
        keywords[f"{media}_cu_seqlens"] = get_vision_cu_seqlens(grid)
        keywords[f"{media}_max_seqlen"] = int(keywords[f"{media}_cu_seqlens"].diff().max())
    return keywords


@backends
def test_precomputed_keywords_reach_the_tower_through_the_model(model, backend):
    use_backend(model.model.vision_tower, backend)
    inputs = prompts(model.config, MIXED)
    keywords = precomputed(model.config, inputs)
    with torch.no_grad():
        usual = model(**inputs).logits
        assert_close(model(**inputs, **keywords).logits, usual)
        for media in ("image", "video"):
            moved = keywords | {f"{media}_position_ids": 5 * keywords[f"{media}_position_ids"]}
            assert (model(**inputs, **moved).logits - usual).abs().max() > 1e-3 * usual.abs().max()


def test_fewer_placeholders_than_features_are_refused(model):
    inputs = prompts(model.config, MIXED)
    place = (inputs["input_ids"] == IMAGE).nonzero()[0]
    inputs["input_ids"][tuple(place)] = 5
    with pytest.raises(ValueError, match=r"hold 12 image placeholders \(token 90\) and the images make 13 features"):
        model(**inputs)


def test_more_placeholders_than_features_are_refused(model):
    inputs = prompts(model.config, MIXED)
    inputs["input_ids"][0, -1] = model.config.video_token_id
    with pytest.raises(ValueError, match=r"hold 5 video placeholders \(token 91\) and the videos make 4 features"):
        model(**inputs)


@pytest.mark.parametrize("media, pixels", [("image", "pixel_values"), ("video", "pixel_values_videos")])
def test_pixels_without_their_grid_are_refused(model, media, pixels):
    inputs = prompts(model.config, MIXED)
    inputs.pop(f"{media}_grid_thw")
    with pytest.raises(ValueError, match=f"{media}_grid_thw"):
        model(**inputs)


def test_pixels_and_features_of_one_kind_together_are_refused(model):
    inputs = prompts(model.config, MIXED)
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    with pytest.raises(ValueError, match=r"either image pixels or mm_encoder_outputs\['image'\]"):
        model(**inputs, mm_encoder_outputs={"image": features})


def test_an_unknown_kind_of_features_is_refused(model):
    inputs = prompts(model.config, [[4]])
    with pytest.raises(ValueError, match=r"holds \['audio'\]; give features under \['image', 'video'\]"):
        model(**inputs, mm_encoder_outputs={"audio": None})


@pytest.mark.parametrize("both", [True, False])
def test_exactly_one_of_ids_and_embeddings_is_wanted(model, both):
    inputs = prompts(model.config, [[4]])
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]) if both else None
    if not both:
        inputs["input_ids"] = None
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(**inputs)


def test_every_image_and_video_has_its_own_features(model):
    vision = model.config.vision_config
    for blocks, features in ((IMAGE_BLOCKS, model.get_image_features), (VIDEO_BLOCKS, model.get_video_features)):
        grid = ragged_grid(vision, blocks)
        with torch.no_grad():
            outputs = features(random_pixels(vision, grid), grid)
        assert [len(tokens) for tokens in outputs.pooler_output] == [t * h * w for t, h, w in blocks]


def test_logits_are_computed_for_the_positions_asked_for(model):
    inputs = prompts(model.config, MIXED)
    with torch.no_grad():
        logits = model(**inputs).logits
        assert_close(model(**inputs, logits_to_keep=2).logits, logits[:, -2:])
        assert_close(model(**inputs, logits_to_keep=torch.tensor([0, 3])).logits, logits[:, [0, 3]])


def test_every_part_names_its_input_embedding(model):
    tower = model.model.vision_tower
    assert tower.get_input_embeddings() is tower.patch_embed
    words = model.model.language_model.embed_tokens
    for part in (model, model.model, model.model.language_model):
        assert part.get_input_embeddings() is words


def test_head_and_words_share_their_weight(model):
    assert model.lm_head.weight is model.get_input_embeddings().weight
    untied = Lfm3VlForConditionalGeneration(Lfm3VlConfig(**model_fields(tie_word_embeddings=False)))
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight
