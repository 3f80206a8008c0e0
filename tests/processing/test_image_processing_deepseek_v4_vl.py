"""The image processors size pictures as the reference does, integer for integer, and place them as Pillow does."""

import io
import json
import math

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoImageProcessor

from gridtower.configuration.configuration_deepseek_v4_vl import FLAT_FIELDS, DeepseekV4VisionConfig
from gridtower.processing.image_processing_deepseek_v4_vl import (
    DeepseekV4ImageProcessor,
    DeepseekV4ImageProcessorPil,
    block_tokens,
    placement,
    sides_within_tokens,
)

BACKENDS = [DeepseekV4ImageProcessor, DeepseekV4ImageProcessorPil]
both_backends = pytest.mark.parametrize("backend", BACKENDS)
GREY = (127, 127, 127)
V41 = {"max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None, "token_layout": "reading_order"}
# Small pictures keep their size, up to whole patches.
SMALL = {"patch_size": 4, "downsample_ratio": 2, "min_pixels": 0}
RAW = {"do_rescale": False, "do_normalize": False}
SIZES = [(1, 1), (16, 24), (332, 27), (26, 28), (257, 27), (10, 2000), (2000, 10), (1, 1000), (1000, 1), (80, 640)]


# The published rules, step by step as they are told.


def naive_tokens(height, width, p, r, layout):
    n_h, n_w = math.ceil((height // p) / r), math.ceil((width // p) / r)
    tokens = n_h * (n_w + 1) + 2
    if layout == "interleaved":
        if n_h % 2 == 1:
            tokens += n_w + 1
        if ((n_h + 1) // 2 * (n_w + 1)) % 2 == 1:
            tokens += 2
    return tokens


def naive_solution(height, width, p, r, budget, layout):
    """(height, width), or None where the reference gives up."""
    q = height / width
    w = math.sqrt((budget - 2) / q + 0.25) - 0.5
    h = w * q
    if layout == "reading_order":
        if w < 1:
            return (budget - 2) // 2 * p * r, p * r
        if h < 1:
            return p * r, (budget - 3) * p * r
        beta = min(math.floor(w) * p * r / width, math.floor(h) * p * r / height)
    else:
        if w < 1:
            n_h = (budget - 2) // 2
            while n_h % 2:
                n_h -= 1
            return n_h * p * r, p * r
        if h < 2:
            n_w = (budget - 2) // 2 - 1
            return (2 * p * r, n_w * p * r) if n_w > 1 else None
        n_h = math.floor(h)
        while n_h % 2:
            n_h -= 1
        beta = min(math.floor(w) * p * r / width, n_h * p * r / height)
    return math.floor(height * beta / p) * p, math.floor(width * beta / p) * p


def naive_sides(height, width, p, r, most, min_pixels, max_wh_ratio, layout):
    if max_wh_ratio is not None and width > height * max_wh_ratio:
        width = height * max_wh_ratio
    if 0 < width * height < min_pixels:
        scale = (min_pixels / (width * height)) ** 0.5
        width, height = int(width * scale), int(height * scale)
    sides = math.ceil(height / p) * p, math.ceil(width / p) * p
    budget = limit = most - 3 if layout == "interleaved" else most
    while sides is not None and naive_tokens(*sides, p, r, layout) > limit:
        sides = naive_solution(height, width, p, r, budget, layout)
        budget -= 1
    return sides


def naive_patches(pixels, p):
    """Patches of an array (rows, cols, 3) in raster order, each (3, p, p) flattened."""
    rows, cols = pixels.shape[0] // p, pixels.shape[1] // p
    patches = []
    for row in range(rows):
        for col in range(cols):
            patch = pixels[row * p : (row + 1) * p, col * p : (col + 1) * p]
            patches.append(np.stack([patch[:, :, channel] for channel in range(3)]).ravel())
    return torch.from_numpy(np.stack(patches))


def pillow_picture(picture, height, width, max_wh_ratio):
    if max_wh_ratio is not None and picture.width >= max_wh_ratio * picture.height:
        return picture.resize((width, height))
    return PIL.ImageOps.pad(picture, (width, height), color=GREY)


sides = st.one_of(st.integers(1, 60), st.integers(1, 1000), st.integers(1, 10000))


@given(height=sides, width=sides, most=st.sampled_from([16, 20, 50, 100, 384, 1024]))
@settings(max_examples=150, deadline=None)
@example(height=10, width=2000, most=384)
@example(height=2000, width=10, most=384)
@example(height=1, width=1, most=384)
@pytest.mark.parametrize("layout", ["interleaved", "reading_order"])
@pytest.mark.parametrize("min_pixels, max_wh_ratio", [(147456, 8), (295936, None), (0, 2.5)])
def test_sides_follow_the_published_rules(layout, min_pixels, max_wh_ratio, height, width, most):
    ours = sides_within_tokens(height, width, 14, 3, most, min_pixels, max_wh_ratio, layout)
    theirs = naive_sides(height, width, 14, 3, most, min_pixels, max_wh_ratio, layout)
    # The published rule for interleaved rows has no answer for some pictures under budgets below these.
    assert ours == theirs
    assert all(isinstance(side, int) for side in ours)


@given(
    height=sides,
    width=sides,
    most=st.integers(1, 60),
    patch=st.sampled_from([1, 4, 14]),
    ratio=st.integers(1, 3),
    min_pixels=st.sampled_from([0, 1000, 147456]),
    max_wh_ratio=st.sampled_from([None, 8, 0.3, 0.0001, math.inf]),
    layout=st.sampled_from(["interleaved", "reading_order"]),
)
@settings(max_examples=300, deadline=None)
# Rounded down, one side of each would be nothing.
@example(height=1963, width=124, most=37, patch=4, ratio=1, min_pixels=0, max_wh_ratio=None, layout="interleaved")
@example(height=1501, width=772, most=10, patch=14, ratio=1, min_pixels=0, max_wh_ratio=None, layout="reading_order")
def test_any_budget_gives_a_cell_within_it_or_says_what_is_missing(
    height, width, most, patch, ratio, min_pixels, max_wh_ratio, layout
):
    least = 9 if layout == "interleaved" else 4
    arguments = (height, width, patch, ratio, most, min_pixels, max_wh_ratio, layout)
    if most < least:
        with pytest.raises(ValueError, match=rf"max_image_tokens is {most}, .* give {least} or more"):
            sides_within_tokens(*arguments)
        return
    rows, cols = sides_within_tokens(*arguments)
    assert rows >= patch and cols >= patch and rows % patch == cols % patch == 0
    assert naive_tokens(rows, cols, patch, ratio, layout) <= (most - 3 if layout == "interleaved" else most)


@given(rows=st.integers(1, 60), cols=st.integers(1, 60), layout=st.sampled_from(["interleaved", "reading_order"]))
def test_a_block_is_counted_as_published(rows, cols, layout):
    assert block_tokens(rows, cols, layout) == naive_tokens(rows, cols, 1, 1, layout)


@pytest.mark.parametrize(
    "size, grid",
    [
        ((427, 640), (31, 46)),
        # 384 x 384 pixels, up to whole patches.
        ((1, 1), (28, 28)),
        # Counted as 10 x 80, enlarged to 135 x 1086.
        ((10, 2000), (10, 78)),
        ((2000, 10), (388, 2)),
        # 18 x 18 cells: 342 tokens, start and end, and two pads.
        ((4000, 4000), (54, 54)),
    ],
)
def test_published_limits_give_these_grids(size, grid):
    assert DeepseekV4ImageProcessor().image_grid(*size) == grid


def test_the_aligner_grid_counts_cells_begun():
    processor = DeepseekV4ImageProcessor()
    assert processor.aligner_grid(427, 640) == (11, 16)
    assert processor.aligner_grid(427, 640, {"downsample_ratio": 4}) == (8, 12)
    assert processor.aligner_grid(427, 640, {"max_image_tokens": 60, "downsample_ratio": None}) == (4, 6)
    assert processor.get_number_of_image_patches(427, 640) == 31 * 46


@both_backends
@pytest.mark.parametrize("rules", [{}, V41], ids=["V4", "V4.1"])
def test_photographs_lie_where_pillow_puts_them(backend, rules, photographs):
    processor = backend(**rules)
    pictures = [photographs[0], photographs[1].crop((0, 0, 640, 60)), photographs[1].crop((200, 0, 230, 400))]
    features = processor(pictures, return_tensors="pt", **RAW)
    expected = []
    for picture, (_, rows, cols) in zip(pictures, features["image_grid_thw"].tolist()):
        assert (14 * rows, 14 * cols) == naive_sides(
            picture.height,
            picture.width,
            14,
            3,
            processor.max_image_tokens,
            processor.min_pixels,
            processor.max_wh_ratio,
            processor.token_layout,
        )
        pixels = pillow_picture(picture, 14 * rows, 14 * cols, processor.max_wh_ratio)
        expected.append(naive_patches(np.asarray(pixels), 14))
    difference = (features["pixel_values"] - torch.cat(expected).float()).abs()
    if backend is DeepseekV4ImageProcessorPil:
        assert difference.max() == 0
    # Both resample 8-bit pixels in two passes that round.
    assert difference.max() <= 2 and difference.mean() < 0.1


@both_backends
def test_pixels_are_normalized_to_minus_one_to_one(backend, photographs):
    raw, normalized = (backend()(photographs[0], return_tensors="pt", **options) for options in (RAW, {}))
    pixels = normalized["pixel_values"]
    assert pixels.dtype == torch.float32 and pixels.shape == (31 * 46, 3 * 14 * 14)
    assert torch.allclose(pixels, (raw["pixel_values"] / 255 - 0.5) / 0.5, atol=1e-6)
    assert normalized["image_grid_thw"].dtype == torch.int64 and normalized["image_grid_thw"].tolist() == [[1, 31, 46]]


@given(height=st.integers(1, 70), width=st.integers(1, 70), seed=st.integers(0, 9), min_pixels=st.integers(0, 3000))
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("max_wh_ratio", [2, None])
def test_any_picture_equals_pillow_pixel_for_pixel(max_wh_ratio, height, width, seed, min_pixels):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = PIL.Image.fromarray(pixels)
    rules = {"patch_size": 4, "max_image_tokens": 40, "min_pixels": min_pixels}
    processor = DeepseekV4ImageProcessorPil(max_wh_ratio=max_wh_ratio, **rules)
    features = processor(picture, return_tensors="pt", **RAW)
    _, rows, cols = features["image_grid_thw"][0].tolist()
    expected = naive_patches(np.asarray(pillow_picture(picture, 4 * rows, 4 * cols, max_wh_ratio)), 4)
    assert torch.equal(features["pixel_values"], expected.float())


def test_a_line_that_pillow_would_lose_keeps_one_pixel():
    line = PIL.Image.new("RGB", (1, 20000), "red")
    features = DeepseekV4ImageProcessorPil()(line, return_tensors="pt", **RAW)
    _, rows, cols = features["image_grid_thw"][0].tolist()
    assert (rows, cols) == (564, 3)
    assert (np.asarray(PIL.ImageOps.pad(line, (42, 564 * 14), color=GREY)) == 127).all()
    red = features["pixel_values"].view(-1, 3, 14 * 14)[:, 0] > 200
    assert red.sum() == 564 * 14


@given(height=sides, width=sides, rows=st.integers(1, 50), cols=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_the_letterbox_lies_within_its_area(height, width, rows, cols):
    (inner_rows, inner_cols), (top, left) = placement(height, width, rows, cols, None)
    assert inner_rows >= 1 and inner_cols >= 1 and (inner_rows == rows or inner_cols == cols)
    assert 0 <= top <= top + inner_rows <= rows and 0 <= left <= left + inner_cols <= cols
    assert placement(height, 3 * height, rows, cols, 3) == ((rows, cols), (0, 0))


@both_backends
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rules", [{}, V41], ids=["V4", "V4.1"])
def test_odd_sizes_have_cells_and_backends_agree(backend, rules, size, make_picture):
    processor = backend(**rules)
    features = processor(make_picture(*size), return_tensors="pt")
    rows, cols = processor.image_grid(*size)
    assert features["image_grid_thw"].tolist() == [[1, rows, cols]] and rows >= 1 and cols >= 1
    assert features["pixel_values"].shape == (rows * cols, 3 * 14 * 14)


def test_backends_agree_within_the_resamplers_difference(photographs, make_picture):
    batch = [*photographs, make_picture(300, 77), make_picture(26, 280)]
    torchvision, pil = (backend()(batch, return_tensors="pt") for backend in BACKENDS)
    assert torch.equal(torchvision["image_grid_thw"], pil["image_grid_thw"])
    difference = (torchvision["pixel_values"] - pil["pixel_values"]).abs()
    assert difference.max() <= 2 / 255 / 0.5 + 1e-6 and difference.mean() < 0.1 / 255


@both_backends
def test_a_batch_equals_its_images_one_by_one(backend, make_picture):
    batch = [make_picture(100, 80), make_picture(64, 96, 1), make_picture(30, 30), make_picture(64, 96, 2)]
    together = backend(**SMALL)([[batch[0]], batch[1:]], return_tensors="pt")
    apart = [backend(**SMALL)(image, return_tensors="pt") for image in batch]
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
    expected = [[1, 6, 4]] if orientation >= 5 else [[1, 4, 6]]
    for source in (str(path), path, buffer.getvalue(), PIL.Image.open(path)):
        assert backend(**SMALL)(source, return_tensors="pt")["image_grid_thw"].tolist() == expected


@both_backends
def test_every_kind_of_pixel_becomes_eight_bit_rgb(backend):
    white = [
        PIL.Image.fromarray(np.full((16, 16), 65535, dtype=np.uint16)),
        np.full((16, 16), 65535, dtype=np.uint16),
        *(PIL.Image.new("L", (16, 16), 255).convert(mode) for mode in ("P", "LA", "1", "CMYK")),
        torch.ones(3, 16, 16),
    ]
    assert (backend(**SMALL)(white, return_tensors="pt")["pixel_values"] == 1).all()


@both_backends
def test_arrays_honour_input_data_format(backend):
    pixels = np.zeros((3, 64, 3), dtype=np.uint8)
    for form, expected in ((None, [1, 1, 16]), ("channels_last", [1, 1, 16]), ("channels_first", [1, 16, 1])):
        features = backend(**SMALL, max_wh_ratio=None)(pixels, input_data_format=form, return_tensors="pt")
        assert features["image_grid_thw"][0].tolist() == expected


@both_backends
def test_floating_pixels_pass_untouched_when_already_rescaled(backend):
    unit = np.random.default_rng(0).random((62, 64, 3))
    kept = backend(**SMALL)(unit, do_rescale=False, do_resize=False, patch_size=2, do_normalize=False)["pixel_values"]
    assert kept.dtype == torch.float32
    assert sorted(kept.unique().tolist()) == sorted(np.unique(unit.astype(np.float32)).tolist())
    # Letterboxed, 62 rows become 64, on grey of the same scale.
    boxed = backend(**SMALL)(unit, **RAW)["pixel_values"].view(16, 16, 3, 4, 4)
    margins = torch.stack([boxed[0, :, :, 0], boxed[15, :, :, 3]])
    assert (margins == torch.tensor(127 / 255)).all()
    assert 0 <= boxed.min() and boxed.max() <= 1 and boxed.std() > 0.1


@both_backends
def test_output_types_follow_return_tensors(backend, make_picture):
    for kind, expected in (("pt", torch.Tensor), ("np", np.ndarray)):
        features = backend(**SMALL)(make_picture(40, 50), return_tensors=kind)
        assert all(isinstance(value, expected) for value in features.values())
        assert set(features) == set(backend.model_input_names)


@both_backends
def test_without_resizing_sides_must_be_patches_and_few_enough(backend, make_picture):
    processor = backend(do_resize=False)
    assert processor(make_picture(28, 70), return_tensors="pt")["image_grid_thw"].tolist() == [[1, 2, 5]]
    with pytest.raises(ValueError, match="30 x 70 pixels cannot be cut into patches of 14"):
        processor(make_picture(30, 70))
    # 20 x 20 cells: 420 tokens and start and end.
    with pytest.raises(ValueError, match="takes 422 tokens, 425 with alignment, and max_image_tokens is 384"):
        processor.image_grid(840, 840)
    assert processor.image_grid(840, 840, {"max_image_tokens": 425}) == (60, 60)


@both_backends
def test_unreadable_image_is_named(backend, make_picture):
    with pytest.raises(ValueError, match="image 1: no readable image at 'missing.png'"):
        backend()([make_picture(32, 32), "missing.png"])
    with pytest.raises(ValueError, match="no image"):
        backend()([])


@both_backends
def test_unknown_keyword_is_refused(backend, make_picture):
    with pytest.raises(TypeError, match="max_pixels"):
        backend()(make_picture(32, 32), max_pixels=4096)


@both_backends
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"size": {"longest_edge": 32}}, "size is .*max_image_tokens"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"downsample_ratio": 0}, "downsample_ratio is 0"),
        ({"max_image_tokens": 8}, "max_image_tokens is 8, .* give 9 or more"),
        ({"max_image_tokens": 3, "token_layout": "reading_order"}, "max_image_tokens is 3, .* give 4 or more"),
        ({"min_pixels": -1}, "min_pixels is -1"),
        ({"max_wh_ratio": 0}, "max_wh_ratio is 0"),
        ({"max_wh_ratio": math.nan}, "max_wh_ratio is nan"),
        ({"token_layout": "columns"}, "'columns'"),
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
    picture, limit = make_picture(300, 500), {"max_image_tokens": 60, "min_pixels": 1}
    grid = tuple(side // 14 for side in naive_sides(300, 500, 14, 3, 60, 1, 8, "interleaved"))
    loaded = backend.from_pretrained(tmp_path, **limit)
    for one in (loaded, backend(**limit)):
        assert one.max_image_tokens == 60
        assert one.get_number_of_image_patches(300, 500) == grid[0] * grid[1]
        assert one(picture, return_tensors="pt")["image_grid_thw"].tolist() == [[1, *grid]]
    assert backend()(picture, return_tensors="pt", **limit)["image_grid_thw"].tolist() == [[1, *grid]]
    assert backend().image_grid(300, 500, {**limit, "patch_size": None}) == grid
    assert loaded(picture, max_image_tokens=None, return_tensors="pt")["image_grid_thw"].tolist() == [[1, *grid]]


@both_backends
def test_a_wide_picture_is_letterboxed_where_the_ratio_is_off(backend, make_picture):
    picture = make_picture(20, 400)
    expected = naive_sides(20, 400, 14, 3, 384, 147456, None, "interleaved")
    for processor, options in ((backend(max_wh_ratio=None), {}), (backend(), {"max_wh_ratio": math.inf})):
        features = processor(picture, return_tensors="pt", **RAW, **options)
        _, rows, cols = features["image_grid_thw"][0].tolist()
        assert (14 * rows, 14 * cols) == expected
        inner, (top, left) = placement(20, 400, *expected, None)
        edge = features["pixel_values"].view(rows, cols, 3, 14, 14)[0, :, :, :top]
        assert top > 0 and left == 0 and (edge == 127).all()


@both_backends
def test_a_call_never_changes_what_is_saved(backend, tmp_path, make_picture):
    processor = backend(**V41)
    before = processor.to_dict()
    overrides = {"max_image_tokens": 50, "patch_size": 8, "downsample_ratio": 2, "token_layout": "interleaved"}
    processor(make_picture(300, 200), max_wh_ratio=2, **overrides)
    assert processor.to_dict() == before and before["max_wh_ratio"] is None
    processor.save_pretrained(tmp_path)
    loaded = backend.from_pretrained(tmp_path).to_dict()
    assert {name: value for name, value in loaded.items() if name != "auto_map"} == before


@both_backends
def test_what_we_save_loads_as_remote_code(backend, tmp_path, make_picture):
    processor = backend(**SMALL)
    processor.save_pretrained(tmp_path)
    remote = AutoImageProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")
    picture = make_picture(50, 90)
    ours, theirs = (one(picture, return_tensors="pt")["pixel_values"] for one in (processor, remote))
    assert torch.equal(ours, theirs)


@both_backends
def test_a_published_folder_gives_its_limits_in_either_spelling(backend, tmp_path):
    vision = DeepseekV4VisionConfig(patch_size=7, max_image_tokens=99, min_pixels=5, max_wh_ratio=3)
    flat = {name: getattr(vision, field) for name, field in FLAT_FIELDS.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **flat}))
    processor = backend.from_pretrained(tmp_path, resample=PIL.Image.Resampling.BILINEAR)
    limits = [getattr(processor, name) for name in ("patch_size", "max_image_tokens", "min_pixels", "max_wh_ratio")]
    assert limits == [7, 99, 5, 3] and processor.token_layout == "interleaved"
    assert processor.resample == PIL.Image.Resampling.BILINEAR
    nested = {"model_type": "deepseek_v41", "vision_config": {"max_image_tokens": 1024, "max_wh_ratio": None}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    processor = backend.from_pretrained(tmp_path)
    assert processor.max_image_tokens == 1024 and processor.max_wh_ratio is None
    assert processor.token_layout == "reading_order"
