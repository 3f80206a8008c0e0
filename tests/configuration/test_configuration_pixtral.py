"""The Pixtral configurations: three published shapes in, the same shapes out."""

import copy
import json

import pytest
from transformers import AutoConfig, CLIPVisionConfig, LlavaConfig, Mistral3Config
from transformers import PixtralVisionConfig as PublishedVisionConfig

from gridtower.configuration.configuration_pixtral import (
    PixtralConfig,
    PixtralLlavaConfig,
    PixtralMixedConfig,
    PixtralVisionConfig,
)
from gridtower.configuration.native_params_pixtral import config_fields, params_from_config

NATIVE = {
    "dim": 48, "n_layers": 2, "head_dim": 16, "hidden_dim": 64, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 1e6,
    "norm_eps": 1e-5, "vocab_size": 64,
    "vision_encoder": {
        "hidden_size": 32, "num_channels": 3, "image_size": 64, "patch_size": 4, "rope_theta": 10000.0,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "adapter_bias": True,
        "image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13,
    },
}  # fmt: skip
MERGING = {
    "mm_projector_id": "patch_merge", "spatial_merge_size": 2, "add_pre_mm_projector_layer_norm": True,
    "adapter_bias": False, "max_image_size": 64,
}  # fmt: skip


def native(vision=(), **fields):
    params = copy.deepcopy(NATIVE) | fields
    params["vision_encoder"] |= dict(vision)
    return params


def native_folder(folder, params):
    (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.mark.parametrize(("kind", "published"), [(PixtralConfig, Mistral3Config), (PixtralLlavaConfig, LlavaConfig)])
def test_a_published_configuration_keeps_its_fields_and_type(kind, published, tmp_path):
    theirs = published(
        vision_config={"model_type": "pixtral", "num_hidden_layers": 5},
        text_config={"model_type": "mistral", "hidden_size": 96, "sliding_window": None},
        image_token_index=7,
        vision_feature_layer=[-1, 2],
        **({"vision_feature_select_strategy": "full"} if published is LlavaConfig else {}),
    )
    theirs.save_pretrained(tmp_path / "theirs")
    ours = PixtralConfig.from_pretrained(tmp_path / "theirs")
    assert type(ours) is kind and ours.image_token_id == 7
    ours.save_pretrained(tmp_path / "ours")
    back = AutoConfig.from_pretrained(tmp_path / "ours")
    assert type(back) is published
    for name, value in theirs.to_dict().items():
        if name not in ("_name_or_path", "transformers_version", "vision_config", "text_config"):
            assert back.to_dict()[name] == value, name
    for part in ("vision_config", "text_config"):
        written = back.to_dict()[part]
        assert {name: written[name] for name in theirs.to_dict()[part]} == theirs.to_dict()[part]


@pytest.mark.parametrize(("kind", "published"), [(PixtralConfig, Mistral3Config), (PixtralLlavaConfig, LlavaConfig)])
def test_a_saved_folder_names_the_class_of_its_type(kind, published, tmp_path):
    kind().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoConfig"] == f"configuration_pixtral.{kind.__name__}"
    assert written["model_type"] == published.model_type
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded).__name__ == kind.__name__
    where = {"_name_or_path": "", "auto_map": {}}
    assert loaded.to_dict() | where == kind.from_pretrained(tmp_path).to_dict() | where


def test_defaults_are_the_published_shapes():
    small, twelve = PixtralConfig(), PixtralLlavaConfig()
    assert (small.vision_config.patch_size, small.spatial_merge_size, small.text_config.intermediate_size) == (
        14,
        2,
        32768,
    )
    assert (twelve.vision_config.patch_size, twelve.spatial_merge_size, twelve.text_config.intermediate_size) == (
        16,
        1,
        14336,
    )
    assert twelve.vision_config.head_dim == 64 and twelve.text_config.rope_parameters["rope_theta"] == 1e9


def test_the_tower_learns_its_packing_from_the_whole():
    assert PixtralConfig(spatial_merge_size=3).vision_config.spatial_merge_size == 3
    assert PixtralLlavaConfig(vision_config={"spatial_merge_size": 2}).vision_config.spatial_merge_size == 1


def test_transformers_own_tower_configuration_is_accepted():
    config = PixtralConfig(vision_config=PublishedVisionConfig(hidden_size=64, num_attention_heads=4))
    assert isinstance(config.vision_config, PixtralVisionConfig) and config.vision_config.hidden_size == 64


def test_a_llava_file_with_another_tower_stays_transformers_own():
    fields = LlavaConfig(vision_config=CLIPVisionConfig()).to_dict()
    assert type(PixtralLlavaConfig.from_dict(fields)) is LlavaConfig
    with pytest.raises(ValueError, match="clip_vision_model"):
        PixtralConfig(vision_config={"model_type": "clip_vision_model"})


def test_legacy_rope_theta_is_read():
    config = PixtralVisionConfig(rope_theta=123.0, head_dim=64)
    assert config.rope_parameters == {"rope_type": "axial", "rope_theta": 123.0}


def test_layers_are_found_by_number():
    config = PixtralVisionConfig(num_hidden_layers=6, num_hidden_layers_override=4)
    assert [config.state_index(layer) for layer in (0, 4, -3, -7)] == [0, 4, 4, 0]
    for layer in (5, -2, -8, 7):
        with pytest.raises(ValueError, match="builds 4 of 6 layers"):
            config.state_index(layer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"require_post_norm": True}, "no norm after its last layer"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers_override": 25}, "give 0 to 24"),
        ({"hidden_size": 1000}, "head_dim must be"),
        ({"head_dim": 32}, "head_dim 32 do not fit"),
        ({"hidden_size": 96}, "multiple of 4"),
        ({"image_mean": [0.5]}, "image_mean has 1 values"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "axial"),
        ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
    ],
)
def test_an_impossible_tower_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PixtralVisionConfig(**fields)


def test_a_post_norm_that_is_not_required_is_no_error():
    assert "require_post_norm" not in PixtralVisionConfig(require_post_norm=False).to_dict()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PixtralConfig, {"vision_feature_select_strategy": "default"}, "no class token"),
        (PixtralConfig, {"vision_feature_layer": []}, "empty list"),
        (PixtralConfig, {"vision_feature_layer": [0, 25]}, "hidden state 25"),
        (PixtralConfig, {"spatial_merge_size": 0}, "spatial_merge_size is 0"),
        (PixtralConfig, {"projector_norm": False}, "PixtralLlavaConfig for neither"),
        (PixtralLlavaConfig, {"projector_merger": True}, "PixtralConfig for both"),
        (PixtralLlavaConfig, {"spatial_merge_size": 2}, "every patch is a token"),
        (PixtralMixedConfig, {"projector_merger": False}, "every patch is a token"),
    ],
)
def test_parts_that_do_not_fit_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize(
    ("vision", "kind"),
    [
        ({}, PixtralLlavaConfig),
        (MERGING, PixtralConfig),
        (MERGING | {"add_pre_mm_projector_layer_norm": False}, PixtralMixedConfig),
        ({"add_pre_mm_projector_layer_norm": True}, PixtralMixedConfig),
    ],
)
def test_a_native_folder_becomes_the_shape_that_it_has(vision, kind, tmp_path):
    params = native(vision)
    config = PixtralConfig.from_pretrained(native_folder(tmp_path, params))
    assert type(config) is kind
    assert config.projector_merger is ("mm_projector_id" in vision)
    assert config.multimodal_projector_bias is params["vision_encoder"]["adapter_bias"]
    assert (config.text_config.num_key_value_heads, config.text_config.head_dim) == (2, 16)
    assert config.text_config.sliding_window is None
    assert config.vision_config.hidden_act == "silu"
    assert not config.tie_word_embeddings


def test_unused_keywords_of_a_native_folder_are_handed_back(tmp_path):
    folder = native_folder(tmp_path, native())
    config, unused = PixtralConfig.from_pretrained(folder, image_token_index=11, other=1, return_unused_kwargs=True)
    assert config.image_token_id == 11 and unused == {"other": 1}


@pytest.mark.parametrize(
    "params",
    [
        native(),
        native(MERGING, tied_embeddings=True, max_position_embeddings=4096, sliding_window=512),
        native(MERGING, model_type="transformer", vision_encoder_note={"a": [1, None]}, max_seq_len=128000),
        native(
            MERGING,
            max_position_embeddings=512,
            yarn={"original_max_position_embeddings": 128, "factor": 4, "apply_scale": False, "beta": 32, "alpha": 1},
            llama_4_scaling={"original_max_position_embeddings": 128, "beta": 0.1},
        ),
    ],
)
def test_params_come_back_as_they_were(params, tmp_path):
    text = json.dumps(params, indent=3)
    PixtralConfig.from_dict(config_fields(text)).save_pretrained(tmp_path)
    assert params_from_config(PixtralConfig.from_pretrained(tmp_path)) == text


def test_a_changed_configuration_changes_params_and_keeps_unknown_fields():
    config = PixtralConfig.from_dict(config_fields(json.dumps(native(MERGING, unknown="kept"))))
    config.text_config.vocab_size = 128
    params = json.loads(params_from_config(config))
    assert (params["vocab_size"], params["unknown"]) == (128, "kept")
    assert params["vision_encoder"]["image_break_token_id"] == 12


def test_params_can_be_written_for_a_configuration_that_never_had_any():
    config = PixtralConfig(vision_config={"hidden_act": "silu"}, tie_word_embeddings=False)
    again = PixtralConfig.from_dict(config_fields(params_from_config(config)))
    for part in (again, config):
        part.native_params = None
        part.architectures = None
    assert again.to_dict() == config.to_dict()


def test_yarn_makes_the_text_model_one_that_knows_it():
    yarn = {"original_max_position_embeddings": 128, "factor": 4, "apply_scale": True, "beta": 32, "alpha": 1}
    text = PixtralConfig.from_dict(
        config_fields(json.dumps(native(yarn=yarn, max_position_embeddings=512)))
    ).text_config
    assert text.model_type == "ministral3" and text.rope_parameters["llama_4_scaling_beta"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (native(quantization={"qformat_weight": "fp8_e4m3"}), "quantised"),
        (native(moe={"num_experts": 8}), "expert"),
        ({k: v for k, v in native().items() if k != "vision_encoder"}, "no 'vision_encoder'"),
        (native(n_kv_heads=None), "no 'n_kv_heads'"),
        (native({"patch_size": None}), "vision_encoder.patch_size"),
    ],
)
def test_a_native_folder_of_another_kind_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        config_fields(json.dumps(params))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "vision_config.hidden_act is 'gelu'"),
        ({"vision_config": {"hidden_act": "silu"}, "vision_feature_layer": -2}, r"vision_feature_layer is \[23\]"),
        ({"vision_config": {"hidden_act": "silu"}, "text_config": {"model_type": "llama"}}, "model_type is 'llama'"),
    ],
)
def test_what_the_native_layout_has_no_field_for_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        params_from_config(PixtralConfig(**fields))
