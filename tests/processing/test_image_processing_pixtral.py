"""The image processors equal the published ones, bit for bit, and pack what those pad."""

import io
import json
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoImageProcessor
from transformers.image_utils import SizeDict
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil as PublishedPil
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size as published_rule

from gridtower.configuration.configuration_pixtral import PixtralConfig
from gridtower.processing.image_processing_pixtral import (
    PixtralImageProcessor,
    PixtralImageProcessorPil,
    sides_within_limits,
)

PUBLISHED = {PixtralImageProcessor: transformers.PixtralImageProcessor, PixtralImageProcessorPil: PublishedPil}
BACKENDS = list(PUBLISHED)
both_backends = pytest.mark.parametrize("backend", BACKENDS)
# What Pixtral-12B and Mistral-Small-3.1 publish; the published joint processor multiplies the two sizes for each call.
LLAVA = {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}}
MISTRAL3 = {"size": {"longest_edge": 1540}, "patch_size": 14, "spatial_merge_size": 2}
SHAPES = {
    "llava": (LLAVA, LLAVA),
    "mistral3": (MISTRAL3, {"size": MISTRAL3["size"], "patch_size": {"height": 28, "width": 28}}),
}
both_shapes = pytest.mark.parametrize("shape", SHAPES)
SIZES = [(1, 1), (16, 24), (332, 27), (26, 28), (257, 27), (77, 300), (1500, 40), (40, 1500), (1, 1000), (1000, 1)]
WHITE = (1 - np.array([0.48145466, 0.4578275, 0.40821073])) / np.array([0.26862954, 0.26130258, 0.27577711])


def naive_patches(image, side, merge):
    """Patches of (3, rows, cols) in merge-block order, by a plain loop."""
    rows, cols = (pixels // side for pixels in image.shape[1:])
    return torch.stack(
        [
            image[:, row * side : (row + 1) * side, col * side : (col + 1) * side].flatten()
            for block_row in range(0, rows, merge)
            for block_col in range(0, cols, merge)
            for row in range(block_row, block_row + merge)
            for col in range(block_col, block_col + merge)
        ]
    )


def assert_same_pictures(ours, theirs):
    assert ours["image_sizes"].tolist() == torch.as_tensor(theirs["image_sizes"]).tolist()
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])


@both_backends
@both_shapes
def test_padded_photographs_equal_the_published_processor(backend, shape, photographs, make_picture):
    ours, theirs = SHAPES[shape]
    batch = [photographs[0], make_picture(70, 30), photographs[1].crop((0, 0, 300, 333))]
    features = backend(**ours, layout="padded")(batch, return_tensors="pt")
    assert set(features) == {"pixel_values", "image_sizes"}
    assert_same_pictures(features, PUBLISHED[backend](**theirs)(batch, return_tensors="pt"))


@both_backends
@both_shapes
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_equal_the_published_processor(backend, shape, size, make_picture):
    ours, theirs = SHAPES[shape]
    picture = make_picture(*size)
    features = backend(**ours, layout="padded")(picture, return_tensors="pt")
    assert_same_pictures(features, PUBLISHED[backend](**theirs)(picture, return_tensors="pt"))


@both_backends
@pytest.mark.parametrize(
    "options",
    [
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"size": {"longest_edge": 100}},
        {"size": {"height": 50, "width": 300}},
        {"size": 200},
        {"patch_size": {"height": 14, "width": 14}},
        {"resample": PIL.Image.Resampling.BILINEAR},
    ],
)
def test_overrides_equal_the_published_processor(backend, options, photographs):
    picture = photographs[0].crop((0, 0, 200, 150))
    features = backend(layout="padded")(picture, return_tensors="pt", **options)
    assert_same_pictures(features, PUBLISHED[backend]()(picture, return_tensors="pt", **options))


@both_backends
def test_without_padding_whole_images_come_as_a_list(backend, make_picture):
    batch = [make_picture(30, 40), make_picture(60, 20)]
    features = backend(layout="padded", do_pad=False)(batch)
    theirs = PUBLISHED[backend](do_pad=False)(batch)
    for ours, published in zip(features["pixel_values"], theirs["pixel_values"]):
        assert np.array_equal(ours, published)


@both_backends
@pytest.mark.parametrize("merge", [1, 2, 3])
def test_packed_patches_are_the_padded_images_cut_in_merge_block_order(backend, merge, make_picture):
    batch = [make_picture(70, 30), make_picture(20, 90, 1), make_picture(70, 30, 2)]
    options = {"patch_size": 14, "spatial_merge_size": merge, "return_tensors": "pt"}
    packed, padded = (backend(layout=layout)(batch, **options) for layout in ("packed", "padded"))
    pictures = [
        image[:, :rows, :cols] for image, (rows, cols) in zip(padded["pixel_values"], padded["image_sizes"].tolist())
    ]
    expected = [naive_patches(picture, 14, merge) for picture in pictures]
    assert torch.equal(packed["pixel_values"], torch.cat(expected))
    assert packed["image_grid_thw"].tolist() == [[1, one.shape[1] // 14, one.shape[2] // 14] for one in pictures]
    assert set(packed) == {"pixel_values", "image_grid_thw"} and packed["image_grid_thw"].dtype == torch.int64


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), cell=st.sampled_from([14, 16, 28, 32]))
@settings(max_examples=300, deadline=None)
def test_sides_equal_the_published_rule(height, width, cell):
    ours = sides_within_limits(height, width, cell, 1024, 1024)
    theirs = published_rule(np.broadcast_to(np.uint8(0), (height, width, 3)), 1024, cell, "channels_last")
    assert ours == tuple(max(side, cell) for side in theirs)
    assert max(ours) <= -(-1024 // cell) * cell


def test_each_side_is_rounded_up_to_a_merged_cell():
    rows, cols = PixtralImageProcessor(**MISTRAL3).image_grid(1080, 675)
    assert (rows // 2) * (cols // 2) == 975


@both_backends
@pytest.mark.parametrize("size", [(332, 27), (26, 28), (257, 27), (1, 1000), (1000, 1), (1, 5000), (5000, 1)])
def test_extreme_shapes_keep_at_least_one_merged_cell(backend, size, make_picture):
    features = backend(**MISTRAL3)(make_picture(*size), size={"longest_edge": 300}, return_tensors="pt")
    _, rows, cols = features["image_grid_thw"][0].tolist()
    assert rows >= 2 and cols >= 2 and rows % 2 == cols % 2 == 0
    assert features["pixel_values"].shape == (rows * cols, 3 * 14 * 14)


def test_backends_agree_on_grids_and_within_the_resamplers_difference(photographs, make_picture):
    batch = [*photographs, make_picture(300, 77), make_picture(26, 28)]
    torchvision, pil = (backend()(batch, return_tensors="pt") for backend in BACKENDS)
    assert torch.equal(torchvision["image_grid_thw"], pil["image_grid_thw"])
    # Both resample 8-bit pixels in two passes that round: two steps of 255, divided by the smallest deviation.
    difference = (torchvision["pixel_values"] - pil["pixel_values"]).abs()
    assert difference.max() <= 2 / 255 / 0.26 and difference.mean() < 0.1 / 255


@both_backends
def test_a_batch_equals_its_images_one_by_one(backend, photographs, make_picture):
    batch = [photographs[0].resize((100, 80)), make_picture(64, 96, 1), make_picture(30, 30), make_picture(64, 96, 2)]
    apart = [backend()(image, return_tensors="pt") for image in batch]
    for options in ({}, {"disable_grouping": False}):
        together = backend()(batch, return_tensors="pt", **options)
        for name in ("pixel_values", "image_grid_thw"):
            assert torch.equal(together[name], torch.cat([one[name] for one in apart]))


@both_backends
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_photographs_have_upright_grids(backend, orientation, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (24, 16)).save(buffer, "JPEG", exif=exif)
    path = tmp_path / "turned.jpg"
    path.write_bytes(buffer.getvalue())
    expected = [[1, 3, 2]] if orientation >= 5 else [[1, 2, 3]]
    for source in (str(path), path, buffer.getvalue(), PIL.Image.open(path)):
        assert backend(patch_size=8)(source, return_tensors="pt")["image_grid_thw"].tolist() == expected


@both_backends
def test_every_kind_of_pixel_becomes_eight_bit_rgb(backend):
    white = [
        PIL.Image.fromarray(np.full((16, 16), 65535, dtype=np.uint16)),
        np.full((16, 16), 65535, dtype=np.uint16),
        *(PIL.Image.new("L", (16, 16), 255).convert(mode) for mode in ("P", "LA", "1", "CMYK")),
        torch.ones(3, 16, 16),
    ]
    rows = backend()(white, return_tensors="pt")["pixel_values"].view(len(white), 3, -1)
    assert torch.allclose(rows, torch.tensor(WHITE, dtype=torch.float32)[:, None].expand_as(rows), atol=1e-6)


@both_backends
def test_arrays_honour_input_data_format(backend):
    for pixels, wide, tall in (
        (np.zeros((3, 64, 3), dtype=np.uint8), [1, 1, 4], [1, 4, 1]),
        (torch.zeros((3, 64, 3), dtype=torch.uint8), [1, 1, 4], [1, 4, 1]),
        (np.zeros((1, 1000, 3), dtype=np.uint8), [1, 1, 63], None),
    ):
        for form, expected in ((None, wide), ("channels_last", wide), ("channels_first", tall)):
            if expected is not None:
                features = backend()(pixels, input_data_format=form, return_tensors="pt")
                assert features["image_grid_thw"][0].tolist() == expected


@both_backends
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_pixels_normalized_on_the_device_come_as_bytes(backend, layout, photographs):
    picture = photographs[0].crop((0, 0, 200, 150))
    raw, normalized = (
        backend(layout=layout, size={"longest_edge": 100}, normalize_on_device=wish)(picture, return_tensors="pt")
        for wish in (True, False)
    )
    pixels = raw["pixel_values"]
    assert pixels.dtype == torch.uint8 and normalized["pixel_values"].dtype == torch.float32
    mean, std = (torch.tensor(values).view(3, 1) for values in (backend.image_mean, backend.image_std))
    by_hand = (pixels.view(len(pixels), 3, -1) / 255 - mean) / std
    assert torch.allclose(by_hand.view_as(pixels), normalized["pixel_values"], atol=1e-6)


@both_backends
def test_floating_pixels_pass_untouched_when_already_rescaled(backend):
    unit = np.random.default_rng(0).random((64, 64, 3))
    options = {"do_resize": False, "do_normalize": False, "return_tensors": "pt"}
    kept = backend()(unit, do_rescale=False, **options)["pixel_values"]
    assert kept.dtype == torch.float32
    assert sorted(kept.unique().tolist()) == sorted(np.unique(unit.astype(np.float32)).tolist())
    assert (backend()(unit, **options)["pixel_values"] - kept).abs().max() <= 0.5 / 255 + 1e-6


@both_backends
def test_output_types_follow_return_tensors(backend, make_picture):
    for kind, expected in (("pt", torch.Tensor), ("np", np.ndarray)):
        for layout in ("packed", "padded"):
            features = backend(layout=layout)(make_picture(40, 50), return_tensors=kind)
            assert all(isinstance(value, expected) for value in features.values())
            assert set(features) <= set(backend.model_input_names)


@both_backends
def test_without_resizing_sides_must_fit_the_cell(backend, make_picture):
    processor = backend(**MISTRAL3, do_resize=False)
    assert processor(make_picture(28, 84), return_tensors="pt")["image_grid_thw"].tolist() == [[1, 2, 6]]
    with pytest.raises(ValueError, match="42 x 84 pixels cannot be cut into cells of 28"):
        processor(make_picture(42, 84))


@both_backends
def test_unreadable_image_is_named(backend, make_picture):
    with pytest.raises(ValueError, match="image 1: no readable image at 'missing.png'"):
        backend()([make_picture(32, 32), "missing.png"])
    with pytest.raises(ValueError, match="no image"):
        backend()([])


@both_backends
def test_unknown_keyword_is_refused(backend, make_picture):
    with pytest.raises(TypeError, match="longest_edge"):
        backend()(make_picture(32, 32), longest_edge=4096)


@both_backends
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"size": {"shortest_edge": 32}}, "size is"),
        ({"size": {"longest_edge": 0}}, "size is"),
        ({"patch_size": {"height": 16, "width": 14}}, "square"),
        ({"patch_size": 0}, "square"),
        ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
        ({"layout": "ragged"}, "'ragged'"),
        ({"normalize_on_device": True, "do_normalize": False}, "do_normalize=False"),
    ],
)
def test_impossible_settings_are_refused(backend, wrong, message, make_picture):
    with pytest.raises(ValueError, match=message):
        backend(**wrong)
    with pytest.raises(ValueError, match=message):
        backend()(make_picture(32, 32), **wrong)


@both_backends
def test_settings_agree_wherever_they_are_given_and_read(backend, tmp_path, make_picture):
    backend().save_pretrained(tmp_path)
    picture, limit = make_picture(300, 500), {"longest_edge": 200}
    loaded = backend.from_pretrained(tmp_path, size=limit)
    for one in (loaded, backend(size=limit)):
        assert one.size == SizeDict(longest_edge=200)
        assert one.get_number_of_image_patches(300, 500) == 8 * 13
        assert one(picture, return_tensors="pt")["image_grid_thw"].tolist() == [[1, 8, 13]]
    assert backend()(picture, size=limit, return_tensors="pt")["image_grid_thw"].tolist() == [[1, 8, 13]]
    assert backend().image_grid(300, 500, {"size": limit, "patch_size": None}) == (8, 13)
    assert loaded(picture, size=None, do_resize=None, return_tensors="pt")["image_grid_thw"].tolist() == [[1, 8, 13]]
    assert backend().image_grid(300, 500, {"size": limit, "spatial_merge_size": 2}) == (8, 14)


@both_backends
def test_a_call_never_changes_what_is_saved(backend, tmp_path, make_picture):
    processor = backend(**MISTRAL3)
    before = processor.to_dict()
    overrides = {"size": {"longest_edge": 64}, "patch_size": 8, "spatial_merge_size": 3, "layout": "padded"}
    processor(make_picture(300, 200), **overrides)
    processor(make_picture(300, 200), normalize_on_device=True)
    assert processor.to_dict() == before
    processor.save_pretrained(tmp_path)
    loaded = backend.from_pretrained(tmp_path).to_dict()
    assert {name: value for name, value in loaded.items() if name != "auto_map"} == before


@both_backends
@both_shapes
def test_published_fields_come_back_the_same(backend, shape, tmp_path):
    PUBLISHED[backend](**SHAPES[shape][1]).save_pretrained(tmp_path / "published")
    published = json.loads((tmp_path / "published" / "preprocessor_config.json").read_text())
    backend.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "ours")
    ours = json.loads((tmp_path / "ours" / "preprocessor_config.json").read_text())
    assert published.items() <= ours.items()
    assert set(ours) - set(published) == {"auto_map", "spatial_merge_size", "layout", "normalize_on_device"}


@both_backends
def test_what_we_save_loads_in_the_published_class_and_as_remote_code(backend, tmp_path, make_picture):
    processor = backend(size={"longest_edge": 64})
    processor.save_pretrained(tmp_path)
    picture = make_picture(50, 90)
    published = PUBLISHED[backend].from_pretrained(tmp_path)(picture, return_tensors="pt")
    assert_same_pictures(processor(picture, layout="padded", return_tensors="pt"), published)
    remote = AutoImageProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")
    ours, theirs = (one(picture, return_tensors="pt")["pixel_values"] for one in (processor, remote))
    assert torch.equal(ours, theirs)


@both_backends
def test_the_merge_size_of_a_published_folder_is_found_in_the_joint_file(backend, tmp_path):
    fields = {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14, "size": {"longest_edge": 1540}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields | {"crop_size": None}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": 14, "spatial_merge_size": 2}))
    processor = backend.from_pretrained(tmp_path)
    assert processor.spatial_merge_size == 2 and processor.patch_size == 14
    assert processor.image_grid(1080, 675) == (78, 50)


@both_backends
def test_settings_without_a_merge_size_are_taken_as_one_with_a_warning(backend):
    # In another process: a warning comes once.
    code = "from gridtower import *; "
    for fields, warned in (({"patch_size": 14}, True), ({"patch_size": 14, "spatial_merge_size": 1}, False)):
        show = f"print({backend.__name__}.from_dict({fields}).spatial_merge_size)"
        done = subprocess.run([sys.executable, "-c", code + show], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["1"] and ("give spatial_merge_size" in done.stderr) == warned


@both_backends
def test_a_folder_of_a_model_alone_gives_its_sizes(backend, tmp_path):
    vision = {"patch_size": 14, "image_size": 700, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    PixtralConfig(vision_config=vision).save_pretrained(tmp_path)
    processor = backend.from_pretrained(tmp_path, resample=PIL.Image.Resampling.BILINEAR)
    assert (processor.patch_size, processor.spatial_merge_size, processor.size.longest_edge) == (14, 2, 700)
    assert processor.resample == PIL.Image.Resampling.BILINEAR
    assert (*processor.image_mean, *processor.image_std) == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@given(height=st.integers(1, 400), width=st.integers(1, 400), merge=st.sampled_from([1, 2]))
@settings(max_examples=30, deadline=None)
def test_patch_count_equals_the_grid(height, width, merge):
    picture = PIL.Image.new("RGB", (width, height))
    for backend in BACKENDS:
        processor = backend(size={"longest_edge": 100}, patch_size=8, spatial_merge_size=merge)
        grid = processor(picture, return_tensors="pt")["image_grid_thw"]
        assert processor.get_number_of_image_patches(height, width) == grid.prod()
        assert processor.image_grid(height, width) == tuple(grid[0, 1:].tolist())
