"""The tower and the projector of a folder, loaded without its text model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gridtower import PixtralModel
from gridtower.image_encoder import ImageEncoder
from gridtower.media_rows import media_rows

from ..hub_cards.tiny_models import TINY_MODELS, picture
from ..modeling.test_native_pixtral import native_folder
from ..processing.test_processing_pixtral import write_native_folder


@pytest.fixture
def picture_row(tmp_path):
    picture(16, 24).save(tmp_path / "picture.png")
    return media_rows([tmp_path / "picture.png"])[0]


def saved(family, folder):
    for part in TINY_MODELS[family]():
        part.save_pretrained(folder)
    return folder


def rewrite(folder, keep):
    """The weights of `folder` without those whose names `keep` refuses."""
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if keep(name)}
    assert 0 < len(kept) < len(load_file(path))
    save_file(kept, path, metadata={"format": "pt"})


def is_of_the_eyes(name):
    return any(part in name.split(".") for part in ("vision_tower", "vision", "multi_modal_projector", "aligner")) or (
        "image_" in name
    )


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_text_model_is_not_loaded_and_may_be_missing(family, tmp_path, picture_row):
    folder = saved(family, tmp_path / "model")
    whole = ImageEncoder(folder, "projector", "auto", "cpu")
    assert not [name for name, _ in whole.model.named_parameters() if "language_model" in name or "head" in name]
    rewrite(folder, is_of_the_eyes)
    eyes = ImageEncoder(folder, "projector", "auto", "cpu")
    assert eyes.settings() == whole.settings()
    image = eyes.decoder.decoded(picture_row)
    assert image.patches.dtype.name == "uint8"
    assert torch.equal(eyes([image])[0], whole([image])[0])


@pytest.mark.parametrize("family", TINY_MODELS)
def test_missing_weights_of_the_tower_are_an_error(family, tmp_path):
    folder = saved(family, tmp_path / "model")
    rewrite(folder, lambda name: "vision" not in name or "norm" not in name)
    with pytest.raises(ValueError, match="lacks .* weights of the vision tower or projector"):
        ImageEncoder(folder, "tower", "auto", "cpu")


def test_weights_that_were_trained_on_are_another_model(tmp_path):
    before = ImageEncoder(saved("pixtral", tmp_path / "a"), "tower", "auto", "cpu").settings()
    assert ImageEncoder(saved("pixtral", tmp_path / "b"), "tower", "auto", "cpu").settings() == before
    model, _ = TINY_MODELS["pixtral"]()
    next(model.model.vision_tower.parameters()).data[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "a")
    after = ImageEncoder(tmp_path / "a", "tower", "auto", "cpu").settings()
    assert [name for name in after if after[name] != before[name]] == ["weights"]


def test_features_have_the_dtype_that_was_asked_for(tmp_path, picture_row):
    folder = saved("deepseek_v4_vl", tmp_path / "model")
    for features in ("tower", "projector", "pooled"):
        encoder = ImageEncoder(folder, features, "bfloat16", "cpu")
        assert encoder.settings()["dtype"] == "bfloat16"
        assert encoder([encoder.decoder.decoded(picture_row)])[0].dtype == torch.bfloat16


def test_a_folder_in_mistrals_own_layout_is_read(tmp_path, picture_row):
    folder = write_native_folder(tmp_path / "native")
    native_folder(folder, params=json.loads((folder / "params.json").read_text()))
    encoder = ImageEncoder(folder, "projector", "auto", "cpu")
    image = encoder.decoder.decoded(picture_row)
    expected = PixtralModel.from_pretrained(folder).get_image_features(
        torch.from_numpy(image.patches), torch.tensor([image.grid]), return_dict=True
    )
    torch.testing.assert_close(encoder([image])[0], expected.pooler_output[0], atol=1e-5, rtol=1e-5)


def test_pixels_are_normalized_by_the_processor_where_the_tower_would_do_it_otherwise(tmp_path, picture_row):
    folder = saved("lfm3_vl", tmp_path / "model")
    path = folder / "processor_config.json"
    fields = json.loads(path.read_text())
    fields["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]
    path.write_text(json.dumps(fields))
    image = ImageEncoder(folder, "tower", "auto", "cpu").decoder.decoded(picture_row)
    assert image.patches.dtype.name == "float32"


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        ImageEncoder(tmp_path, "tower", "auto", "cpu")
