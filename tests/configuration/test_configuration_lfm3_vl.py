"""The LFM3-VL configuration: the published numbers, what it refuses, and what it keeps of an official file."""

import json

import pytest
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlConfig as PublishedConfig
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlVisionConfig as PublishedVisionConfig

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig

CODE_FIELDS = {"auto_map", "architectures", "transformers_version"}
PARTIAL = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
SLIDING = {"rope_type": "default", "rope_theta": 10_000.0}


def published_fields(config):
    return {name: value for name, value in config.to_dict().items() if name not in CODE_FIELDS}


@pytest.mark.parametrize(
    "ours, published", [(Lfm3VlConfig, PublishedConfig), (Lfm3VlVisionConfig, PublishedVisionConfig)]
)
def test_defaults_are_those_of_transformers(ours, published):
    assert published_fields(ours()) == published_fields(published())


def test_defaults_describe_the_published_tower():
    config = Lfm3VlVisionConfig()
    assert (config.head_dim, config.patch_dim) == (64, 3 * 2 * 16 * 16)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    "fields, accepted",
    [
        ({"hidden_size": 0}, "hidden_size is 0; give a whole number of at least 1"),
        ({"intermediate_size": -3}, "intermediate_size is -3"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
        ({"temporal_patch_size": 0}, "temporal_patch_size is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"conv_kernel_size": -1}, "conv_kernel_size is -1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; give 0 or more"),
        ({"hidden_size": 100}, "give a multiple of 16, such as 112"),
        ({"hidden_size": 96}, "multiple of 4"),
        ({"num_key_value_heads": 3}, r"give one of \[1, 2, 4, 8, 16\]"),
        ({"conv_kernel_size": 4}, "give an odd size such as 5"),
        ({"num_hidden_layers": 2, "layer_types": ["conv"]}, "give one type for each layer"),
        (
            {"num_hidden_layers": 2, "layer_types": ["conv", "sliding_attention"]},
            r"layer_types\[1\] is 'sliding_attention'; give one of \['conv', 'full_attention'\]",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, 'knows only "axial"'),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 'knows only "axial"'),
        ({"rope_parameters": {"rope_theta": -1.0}}, "give a number above 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; give a number above 0"),
    ],
)
def test_an_impossible_tower_is_refused_with_what_would_be_accepted(fields, accepted):
    with pytest.raises(ValueError, match=accepted):
        Lfm3VlVisionConfig(**fields)
    with pytest.raises(ValueError, match=accepted):
        Lfm3VlConfig(vision_config=fields)


@pytest.mark.parametrize(
    "fields, accepted",
    [
        ({"image_token_id": 5, "video_token_id": 5}, "give two different ids"),
        ({"projector_hidden_size": 0}, "give at least 1"),
        ({"projector_hidden_act": "glue"}, "projector_hidden_act is 'glue'; give one of .*'gelu'"),
    ],
)
def test_an_impossible_model_is_refused_with_what_would_be_accepted(fields, accepted):
    with pytest.raises(ValueError, match=accepted):
        Lfm3VlConfig(**fields)


@pytest.mark.parametrize("value", ["two", 1.5, None])
def test_a_size_that_is_no_whole_number_is_refused(value):
    with pytest.raises(Exception, match="patch_size"):
        Lfm3VlVisionConfig(patch_size=value)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_layer_types_follow_the_number_of_layers(layers):
    assert Lfm3VlVisionConfig(num_hidden_layers=layers).layer_types == ["conv", "conv", "full_attention"][:layers]


def test_a_rotation_labelled_default_is_the_axial_one():
    rope = {"rope_type": "default", "rope_theta": 5_000.0}
    assert Lfm3VlVisionConfig(rope_parameters=rope).rope_parameters == {"rope_type": "axial", "rope_theta": 5_000.0}


def test_rotation_defaults_to_the_published_axial_one():
    rope = Lfm3VlVisionConfig().rope_parameters
    assert rope == {"rope_type": "axial", "rope_theta": 1_000_000.0}


def test_a_released_partial_rotation_keeps_its_meaning():
    config = Lfm3VlConfig(
        text_config={"rope_parameters": {"full_attention": dict(PARTIAL), "sliding_attention": SLIDING}}
    )
    assert config.text_config.rope_parameters["full_attention"] == {**PARTIAL, "rope_type": "proportional"}
    assert config.text_config.rope_parameters["sliding_attention"] == SLIDING


def test_a_whole_rotation_is_left_as_it_is():
    whole = {"rope_type": "default", "rope_theta": 5_000.0, "partial_rotary_factor": 1.0}
    config = Lfm3VlConfig(
        text_config={"rope_parameters": {"full_attention": dict(whole), "sliding_attention": SLIDING}}
    )
    assert config.text_config.rope_parameters["full_attention"] == whole


def test_a_relabelled_rotation_survives_saving(tmp_path):
    Lfm3VlConfig(
        text_config={"rope_parameters": {"full_attention": dict(PARTIAL), "sliding_attention": SLIDING}}
    ).save_pretrained(tmp_path)
    again = Lfm3VlConfig.from_pretrained(tmp_path)
    assert again.text_config.rope_parameters["full_attention"]["rope_type"] == "proportional"


def test_another_text_model_keeps_its_rotation():
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = Lfm3VlConfig(text_config={"model_type": "llama", "rope_parameters": dict(rope)})
    assert config.text_config.model_type == "llama"
    assert config.text_config.rope_parameters == rope


def tiny():
    vision = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "vision_config": vision,
        "text_config": {"model_type": "lfm3", "vocab_size": 50, "num_hidden_layers": 4, "hidden_size": 32},
        "image_token_id": 40,
        "video_token_id": 41,
        "projector_hidden_size": 8,
    }


def test_a_saved_configuration_comes_back_equal(tmp_path):
    config = Lfm3VlConfig(**tiny())
    config.save_pretrained(tmp_path)
    again = Lfm3VlConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()


def test_the_tower_reads_its_part_of_a_composite_file(tmp_path):
    Lfm3VlConfig(**tiny()).save_pretrained(tmp_path)
    assert Lfm3VlVisionConfig.from_pretrained(tmp_path).num_hidden_layers == 3


def test_transformers_own_class_reads_our_file(tmp_path):
    Lfm3VlConfig(**tiny()).save_pretrained(tmp_path)
    published = PublishedConfig.from_pretrained(tmp_path)
    assert published_fields(published) == published_fields(PublishedConfig(**tiny()))


def test_our_class_reads_transformers_own_file(tmp_path):
    PublishedConfig(**tiny()).save_pretrained(tmp_path)
    assert published_fields(Lfm3VlConfig.from_pretrained(tmp_path)) == published_fields(Lfm3VlConfig(**tiny()))


def test_official_and_unknown_fields_stay_in_the_file(tmp_path):
    PublishedConfig(**tiny()).save_pretrained(tmp_path)
    official = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16", "released": "with care"}
    official["vision_config"]["note"] = "kept"
    (tmp_path / "config.json").write_text(json.dumps(official))
    Lfm3VlConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["vision_config"]["note"] == "kept"
    assert {name: written.get(name) for name in official} == official


def test_only_the_outer_configuration_names_its_code(tmp_path):
    Lfm3VlConfig(**tiny()).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoModelForImageTextToText"] == "modeling_lfm3_vl.Lfm3VlForConditionalGeneration"
    assert "auto_map" not in written["vision_config"] and "auto_map" not in written["text_config"]


def test_a_configuration_built_from_a_saved_tower_gives_it_no_auto_map(tmp_path):
    Lfm3VlVisionConfig(**tiny()["vision_config"]).save_pretrained(tmp_path / "tower")
    tower = Lfm3VlVisionConfig.from_pretrained(tmp_path / "tower")
    Lfm3VlConfig(**{**tiny(), "vision_config": tower}).save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())["vision_config"]
