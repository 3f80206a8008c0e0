"""The DeepSeek-V4 vision configurations: two published spellings in, the flat one out, and what is refused."""

import json

import pytest
from transformers import AutoConfig, DeepseekV4Config

from gridtower.configuration.configuration_deepseek_v4_vl import DeepseekV4VisionConfig, DeepseekV4VlConfig

FLAT = {
    "vision_dim": 64, "vision_n_heads": 4, "vision_n_layers": 3, "vision_inter_dim": 96, "vision_patch_size": 7,
    "vision_rope_theta": 500.0, "vision_downsample_ratio": 2, "vision_max_n_token": 200, "vision_min_pixels": 1000,
    "vision_max_wh_ratio": 5,
}  # fmt: skip
NESTED = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 96, "patch_size": 7,
    "rope_theta": 500.0, "downsample_ratio": 2, "max_image_tokens": 200, "min_pixels": 1000, "max_wh_ratio": 5,
}  # fmt: skip
TEXT = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_hidden_layers": 2,
}
# As published with DeepSeek-V4.1-Flash.
V41_VISION = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 32, "intermediate_size": 2816,
    "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 295936,
    "max_wh_ratio": None,
}  # fmt: skip
V41 = {"model_type": "deepseek_v41", "hidden_size": 4096, "vision_config": V41_VISION}


def folder_of(path, fields):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def tower_of(config):
    return {name: getattr(config, name) for name in NESTED}


def test_defaults_are_the_published_shape():
    config = DeepseekV4VlConfig()
    tower = config.vision_config
    assert tower_of(tower) == V41_VISION | {"max_image_tokens": 384, "min_pixels": 147456, "max_wh_ratio": 8}
    assert (tower.head_dim, tower.patch_dim, tower.token_layout) == (64, 588, "interleaved")
    assert (config.hidden_size, config.vocab_size) == (4096, 129280)


@pytest.mark.parametrize("spelling", [FLAT, {"vision_config": NESTED}], ids=["flat", "nested"])
def test_both_spellings_are_read(spelling, tmp_path):
    folder = folder_of(tmp_path, TEXT | spelling)
    whole = DeepseekV4VlConfig.from_pretrained(folder)
    assert type(whole) is DeepseekV4VlConfig and whole.hidden_size == 256
    for tower in (whole.vision_config, DeepseekV4VisionConfig.from_pretrained(folder)):
        assert type(tower) is DeepseekV4VisionConfig
        assert tower_of(tower) == NESTED and tower.token_layout == "interleaved"


@pytest.mark.parametrize("spelling", [FLAT, {"vision_config": NESTED}], ids=["flat", "nested"])
def test_the_flat_spelling_is_written(spelling, tmp_path):
    config = DeepseekV4VlConfig.from_pretrained(folder_of(tmp_path / "source", TEXT | spelling))
    config.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: written[name] for name in FLAT} == FLAT and "vision_config" not in written
    assert (written["architectures"], written["model_type"]) == (["DeepseekV4ForCausalLM"], "deepseek_v4")
    again = DeepseekV4VlConfig.from_pretrained(tmp_path / "saved")
    assert tower_of(again.vision_config) == NESTED
    assert again.to_dict() | {"auto_map": None} == config.to_dict() | {"auto_map": None}


def test_a_saved_folder_names_its_code_and_is_still_transformers_own(tmp_path):
    DeepseekV4VlConfig.from_dict(TEXT | FLAT).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DeepseekV4Config
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded).__name__ == "DeepseekV4VlConfig" and tower_of(loaded.vision_config) == NESTED


def test_a_ratio_of_none_survives_saving(tmp_path):
    DeepseekV4VlConfig.from_dict(TEXT | FLAT | {"vision_max_wh_ratio": None}).save_pretrained(tmp_path)
    assert DeepseekV4VlConfig.from_pretrained(tmp_path).vision_config.max_wh_ratio is None


def test_the_text_fields_are_those_of_transformers():
    theirs, ours = DeepseekV4Config(**TEXT).to_dict(), DeepseekV4VlConfig(**TEXT).to_dict()
    assert {name: ours[name] for name in theirs} == theirs
    assert ours.keys() - theirs.keys() == {*FLAT, "image_start_token_id"}


def test_the_tower_of_a_v41_file_has_its_layout(tmp_path):
    tower = DeepseekV4VisionConfig.from_pretrained(folder_of(tmp_path, V41))
    assert tower_of(tower) == V41_VISION and tower.token_layout == "reading_order"
    tower.save_pretrained(tmp_path / "tower")
    assert DeepseekV4VisionConfig.from_pretrained(tmp_path / "tower").token_layout == "reading_order"


def test_the_whole_of_a_v41_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="deepseek_v41.*--tower-only"):
        DeepseekV4VlConfig.from_pretrained(folder_of(tmp_path, V41))


@pytest.mark.parametrize("tower", [{}, {"vision_n_layers": 0}, {"vision_config": None}], ids=["none", "empty", "null"])
def test_a_file_without_a_tower_is_transformers_own(tower, tmp_path):
    config = DeepseekV4VlConfig.from_pretrained(folder_of(tmp_path, TEXT | tower))
    assert type(config) is DeepseekV4Config and config.hidden_size == 256


def test_the_five_ids_of_an_image_follow_each_other():
    config = DeepseekV4VlConfig(image_start_token_id=7)
    names = ("image_pad", "image", "image_newline", "image_end")
    assert [getattr(config, f"{name}_token_id") for name in names] == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; give a whole number of at least 1"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"downsample_ratio": 0}, "downsample_ratio is 0"),
        ({"max_image_tokens": 0}, "max_image_tokens is 0"),
        ({"min_pixels": -1}, "min_pixels is -1; give 0 or more"),
        ({"hidden_size": 1000}, "multiples of 4 channels"),
        ({"hidden_size": 96}, "multiples of 4 channels"),
        ({"max_wh_ratio": 0}, "max_wh_ratio is 0; give a number above 0, or None"),
        ({"token_layout": "raster"}, "token_layout is 'raster'; give one of"),
    ],
)
def test_an_impossible_tower_is_refused_alone_and_in_the_whole(fields, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV4VisionConfig(**fields)
    with pytest.raises(ValueError, match=message):
        DeepseekV4VlConfig(vision_config=fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_config": {"token_layout": "reading_order"}}, 'takes only "interleaved" images'),
        ({"image_start_token_id": -1}, "image_start_token_id is -1"),
        ({"image_start_token_id": 96, "vocab_size": 100}, "the five ids .* give 0 to 95"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV4VlConfig(**fields)


def test_the_last_five_ids_of_the_vocabulary_may_be_those_of_images():
    assert DeepseekV4VlConfig(image_start_token_id=95, vocab_size=100).image_end_token_id == 99
