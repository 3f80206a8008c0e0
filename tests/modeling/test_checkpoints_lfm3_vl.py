"""LFM3-VL checkpoints: published tensor names on disk, transformers' names and ours in both directions, no lost weight."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.models.lfm3_vl import modeling_lfm3_vl as published

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlForConditionalGeneration, Lfm3VlModel, Lfm3VlVisionModel

from .lfm3_vl_cases import MIXED, TOWERS, model_fields, pair_of_models, prompts, ragged_grid, random_pixels

CLEAN = {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors"}


def assert_clean(loading_info):
    assert all(not loading_info[kind] for kind in CLEAN if kind in loading_info), loading_info


def vision_shapes(vision, prefix="model.vision_tower."):
    """The tower's published names and shapes, from the architecture alone."""
    size, inner, kernel = vision.hidden_size, vision.intermediate_size, vision.conv_kernel_size
    head = size // vision.num_attention_heads
    groups = vision.num_key_value_heads * head
    shapes = {"patchifier.weight": (size, vision.patch_dim), "embedding_norm.weight": (size,)}
    for index, kind in enumerate(vision.layer_types):
        layer = {"operator_norm": (size,), "ffn_norm": (size,), "feed_forward.w1": (inner, size)}
        layer |= {"feed_forward.w3": (inner, size), "feed_forward.w2": (size, inner)}
        if kind == "conv":
            layer |= {"conv.in_proj": (3 * size, size), "conv.spatial_conv": (size, 1, kernel, kernel)}
            layer |= {"conv.out_proj": (size, size)}
        else:
            layer |= {"self_attn.q_proj": (size, size), "self_attn.out_proj": (size, size)}
            layer |= {"self_attn.k_proj": (groups, size), "self_attn.v_proj": (groups, size)}
            layer |= {"self_attn.q_layernorm": (head,), "self_attn.k_layernorm": (head,)}
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


def published_shapes(config):
    """A whole checkpoint's published names and shapes; those of the text model are transformers', but for the gate."""
    vision, text = config.vision_config, config.text_config
    shapes = vision_shapes(vision)
    merged, inner = vision.hidden_size * vision.spatial_merge_size**2, config.projector_hidden_size
    projector = {
        "layer_norm.weight": (vision.hidden_size,),
        "layer_norm.bias": (vision.hidden_size,),
        "linear_1.weight": (inner, merged),
        "linear_1.bias": (inner,),
        "linear_2.weight": (text.hidden_size, inner),
        "linear_2.bias": (text.hidden_size,),
    }
    shapes |= {f"model.multi_modal_projector.{name}": shape for name, shape in projector.items()}
    with torch.device("meta"):
        text_model = AutoModel.from_config(text)
    for name, parameter in text_model.state_dict().items():
        name = name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")
        shapes[f"model.language_model.{name}"] = tuple(parameter.shape)
    return shapes


def transformers_name(name):
    for old, new in {"patchifier": "patch_embed", "_layernorm": "_norm", "gate_proj": "g_proj"}.items():
        name = name.replace(old, new)
    return name


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def models():
    return pair_of_models(Lfm3VlConfig, model_fields())


def test_a_checkpoint_of_the_published_shapes_loads_whole():
    config = Lfm3VlConfig()
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in published_shapes(config).items()}
    # transformers 5.25 looks for kernels of the model's device, and `kernels` knows no meta device.
    model, info = Lfm3VlForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=state, device_map="meta", use_kernels=False, output_loading_info=True
    )
    assert_clean(info)
    loaded = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert loaded == {transformers_name(name): tuple(tensor.shape) for name, tensor in state.items()}


def test_a_missing_and_a_misshapen_tensor_are_noticed():
    config = Lfm3VlConfig(**model_fields())
    state = {name: torch.zeros(shape) for name, shape in published_shapes(config).items()}
    state.pop("model.vision_tower.patchifier.weight")
    state["model.vision_tower.layers.1.self_attn.extra_layernorm.weight"] = torch.zeros(3)
    _, info = Lfm3VlForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"model.vision_tower.patch_embed.weight"}
    assert set(info["unexpected_keys"]) == {"model.vision_tower.layers.1.self_attn.extra_layernorm.weight"}


def test_names_and_shapes_on_disk_are_the_published_ones(models, tmp_path):
    ours, _ = models
    on_disk = {name: tuple(tensor.shape) for name, tensor in saved(ours, tmp_path).items()}
    assert on_disk == published_shapes(ours.config)


def test_a_tower_alone_is_saved_under_the_published_names(tmp_path):
    tower, _ = pair_of_models(Lfm3VlVisionConfig, TOWERS["published pattern"])
    on_disk = {name: tuple(tensor.shape) for name, tensor in saved(tower, tmp_path).items()}
    assert on_disk == vision_shapes(tower.config, prefix="")


def test_our_checkpoint_loads_in_transformers(models, tmp_path):
    ours, _ = models
    ours.save_pretrained(tmp_path)
    theirs, info = published.Lfm3VlForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert_clean(info)
    assert_same_weights(theirs, ours)


def test_a_checkpoint_of_transformers_loads_in_ours(models, tmp_path):
    _, theirs = models
    theirs.save_pretrained(tmp_path)
    ours, info = Lfm3VlForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert_clean(info)
    assert_same_weights(ours, theirs)


def assert_same_weights(model, other):
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    for name in weights:
        assert torch.equal(weights[name], others[name]), name


def test_both_classes_write_the_same_keys(models, tmp_path):
    ours, theirs = models
    first = saved(ours, tmp_path / "ours")
    second = saved(theirs, tmp_path / "theirs")
    assert first.keys() == second.keys()
    again = Lfm3VlForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert saved(again, tmp_path / "again").keys() == first.keys()


@pytest.mark.parametrize("spelling", [transformers_name, lambda name: name], ids=["transformers", "published"])
@pytest.mark.parametrize("model_class", [Lfm3VlForConditionalGeneration, Lfm3VlModel])
def test_both_spellings_load(models, spelling, model_class, tmp_path):
    ours, _ = models
    weights = saved(ours, tmp_path)
    renamed = {spelling(name): tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert_clean(info)
    assert_same_weights(model, ours if model_class is Lfm3VlForConditionalGeneration else ours.model)


def test_similar_longer_names_are_not_renamed():
    tower = Lfm3VlVisionConfig(**TOWERS["published pattern"])
    state = {name: torch.zeros(shape) for name, shape in vision_shapes(tower, prefix="").items()}
    strangers = {"my_patchifier.weight", "patchifier_2.weight", "layers.2.self_attn.q_layernorm_scale"}
    state |= {name: torch.zeros(1) for name in strangers}
    _, info = Lfm3VlVisionModel.from_pretrained(None, config=tower, state_dict=state, output_loading_info=True)
    assert set(info["unexpected_keys"]) == strangers and not info["missing_keys"]


def test_a_tower_taken_out_of_a_model_is_saved_and_loaded_alone(models, tmp_path):
    ours, _ = models
    ours.model.vision_tower.save_pretrained(tmp_path)
    tower, info = Lfm3VlVisionModel.from_pretrained(tmp_path, output_loading_info=True)
    assert_clean(info)
    assert_same_weights(tower, ours.model.vision_tower)


def test_tied_weights_survive_a_round_trip(models, tmp_path):
    ours, _ = models
    assert "lm_head.weight" not in saved(ours, tmp_path)
    again = Lfm3VlForConditionalGeneration.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.language_model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, ours.lm_head.weight)


def test_untied_weights_survive_a_round_trip(tmp_path):
    model = Lfm3VlForConditionalGeneration(Lfm3VlConfig(**model_fields(tie_word_embeddings=False)))
    torch.nn.init.normal_(model.lm_head.weight)
    assert "lm_head.weight" in saved(model, tmp_path)
    again = Lfm3VlForConditionalGeneration.from_pretrained(tmp_path)
    assert_same_weights(again, model)


def test_a_checkpoint_in_shards_loads(models, tmp_path):
    ours, _ = models
    ours.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again, info = Lfm3VlForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert_clean(info)
    assert_same_weights(again, ours)


def test_weights_loaded_then_cast_compute_what_a_fresh_model_computes_bit_for_bit(models, tmp_path):
    ours, _ = models
    ours.save_pretrained(tmp_path)
    fresh = Lfm3VlForConditionalGeneration(Lfm3VlConfig(**model_fields())).eval()
    fresh.load_state_dict(ours.state_dict())
    loaded = Lfm3VlForConditionalGeneration.from_pretrained(tmp_path)
    inputs = prompts(ours.config, MIXED)
    with torch.no_grad():
        assert torch.equal(loaded.to(torch.bfloat16)(**inputs).logits, fresh.to(torch.bfloat16)(**inputs).logits)


def test_rotation_stays_in_float32_when_the_tower_is_cast(tmp_path):
    # In bfloat16 the frequencies would be off by up to a 256th, and by turns at the far end of a wide grid.
    tower, theirs = pair_of_models(Lfm3VlVisionConfig, TOWERS["only attention"])
    tower.save_pretrained(tmp_path)
    cast = Lfm3VlVisionModel.from_pretrained(tmp_path, dtype=torch.bfloat16).to(torch.bfloat16).float()
    grid = ragged_grid(tower.config, [(1, 2, 300)])
    pixels = random_pixels(tower.config, grid)
    theirs.load_state_dict(cast.state_dict())
    with torch.no_grad():
        difference = cast(pixels, grid_thw=grid)[0] - theirs(pixels, grid_thw=grid)[0]
    assert difference.abs().max() < 1e-4
