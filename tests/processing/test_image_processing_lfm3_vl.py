"""The image processors equal the published ones, bit for bit, and keep their bounds in one place."""

import io
import json

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import TensorType

from gridtower.processing.image_processing_lfm3_vl import Lfm3VlImageProcessor, Lfm3VlImageProcessorPil

from .conftest import run_without_torchvision

BACKENDS = [Lfm3VlImageProcessor, Lfm3VlImageProcessorPil]
both_backends = pytest.mark.parametrize("backend", BACKENDS)
SIZES = [(1, 1), (16, 24), (332, 27), (26, 28), (257, 27), (77, 300), (640, 427), (4000, 20), (20, 4000), (1, 200)]


@both_backends
def test_photographs_equal_the_published_processor(backend, photographs, published_images):
    ours = backend()(photographs, return_tensors="pt")
    theirs = published_images[backend](photographs, return_tensors="pt")
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    assert ours["pixel_values"].dtype == torch.float32 and ours["image_grid_thw"].dtype == torch.int64


@both_backends
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_equal_the_published_processor(backend, size, make_picture, published_images):
    picture = make_picture(*size)
    ours, theirs = backend()(picture, return_tensors="pt"), published_images[backend](picture, return_tensors="pt")
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])


@both_backends
@pytest.mark.parametrize("size", [(1, 1000), (1000, 1), (1, 300)])
def test_aspects_that_the_published_processor_refuses_give_a_merged_cell(
    backend, size, make_picture, published_images
):
    with pytest.raises(ValueError, match="aspect"):
        published_images[backend](make_picture(*size), return_tensors="pt")
    features = backend()(make_picture(*size), return_tensors="pt")
    _, rows, cols = features["image_grid_thw"][0].tolist()
    assert rows >= 2 and cols >= 2 and features["pixel_values"].shape == (rows * cols, 3 * 2 * 16 * 16)


@both_backends
@pytest.mark.parametrize(
    "options",
    [
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"patch_size": 14, "merge_size": 3, "temporal_patch_size": 3},
        {"size": {"shortest_edge": 1024, "longest_edge": 65536}},
        {"resample": PIL.Image.Resampling.BILINEAR},
    ],
)
def test_overrides_equal_the_published_processor(backend, options, photographs, published_images):
    ours = backend()(photographs[:1], return_tensors="pt", **options)
    theirs = published_images[backend](photographs[:1], return_tensors="pt", **options)
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"].float())


def test_backends_agree_on_grids_and_within_the_resamplers_difference(photographs, make_picture):
    batch = [*photographs, make_picture(300, 77), make_picture(26, 28)]
    torchvision, pil = (backend()(batch, return_tensors="pt") for backend in BACKENDS)
    assert torch.equal(torchvision["image_grid_thw"], pil["image_grid_thw"])
    # Both resample 8-bit pixels in two passes that round: two steps of 255, each 2 / 255 after normalization.
    difference = (torchvision["pixel_values"] - pil["pixel_values"]).abs()
    assert difference.max() <= 4 / 255 + 1e-6 and difference.mean() < 0.1 / 255


@both_backends
def test_a_batch_equals_its_images_one_by_one(backend, photographs, make_picture):
    batch = [photographs[0], make_picture(64, 96, 1), photographs[1], make_picture(64, 96, 2)]
    for options in ({}, {"disable_grouping": False}):
        together = backend()(batch, return_tensors="pt", **options)
        apart = [backend()(image, return_tensors="pt") for image in batch]
        assert torch.equal(together["pixel_values"], torch.cat([one["pixel_values"] for one in apart]))
        assert torch.equal(together["image_grid_thw"], torch.cat([one["image_grid_thw"] for one in apart]))


@both_backends
def test_turned_photographs_have_upright_grids(backend, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (240, 160)).save(buffer, "JPEG", exif=exif)
    path = tmp_path / "turned.jpg"
    path.write_bytes(buffer.getvalue())
    upright = backend()(PIL.Image.new("RGB", (160, 240)), return_tensors="pt")["image_grid_thw"]
    for source in (str(path), path, buffer.getvalue(), PIL.Image.open(path)):
        assert torch.equal(backend()(source, return_tensors="pt")["image_grid_thw"], upright)


@both_backends
def test_arrays_honour_input_data_format(backend):
    pixels = np.zeros((3, 64, 3), dtype=np.uint8)
    wide, tall = (
        backend()(pixels, input_data_format=form, return_tensors="pt")["image_grid_thw"][0].tolist()
        for form in ("channels_last", "channels_first")
    )
    assert wide == tall[:1] + tall[:0:-1] and wide[2] > wide[1]


@both_backends
def test_floating_pixels_pass_untouched_when_already_rescaled(backend):
    unit = np.random.default_rng(0).random((64, 64, 3), dtype=np.float32)
    options = {"do_resize": False, "do_normalize": False, "return_tensors": "pt"}
    kept = backend()(unit, do_rescale=False, **options)["pixel_values"]
    assert sorted(kept.unique().tolist()) == sorted(np.unique(unit).tolist())
    rescaled = backend()(unit, **options)["pixel_values"]
    assert (rescaled - kept).abs().max() <= 0.5 / 255 + 1e-6


@both_backends
def test_output_types_follow_return_tensors(backend, make_picture):
    for kind, expected in ((TensorType.PYTORCH, torch.Tensor), (TensorType.NUMPY, np.ndarray)):
        features = backend()(make_picture(40, 50), return_tensors=kind.value)
        assert isinstance(features["pixel_values"], expected) and set(features) == set(backend.model_input_names)


@both_backends
def test_without_resizing_sides_must_fit_the_cell(backend, make_picture):
    grid = backend()(make_picture(32, 96), do_resize=False, return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 2, 6]]
    with pytest.raises(ValueError, match="33 x 96"):
        backend()(make_picture(33, 96), do_resize=False)


@both_backends
def test_unreadable_image_is_named(backend, make_picture):
    with pytest.raises(ValueError, match="image 1: no readable image at 'missing.png'"):
        backend()([make_picture(32, 32), "missing.png"])


@both_backends
def test_unknown_keyword_is_refused(backend, make_picture):
    with pytest.raises(TypeError, match="max_pixel"):
        backend()(make_picture(32, 32), max_pixel=4096)


@both_backends
def test_bounds_agree_wherever_they_are_given_and_read(backend, tmp_path, make_picture):
    backend().save_pretrained(tmp_path)
    loaded = backend.from_pretrained(tmp_path, max_pixels=401408)
    for one in (
        loaded,
        backend(max_pixels=401408),
        backend(size={"longest_edge": 401408}),
        backend(size={"max_pixels": 401408, "min_pixels": 65536}),
    ):
        assert one.size == {"shortest_edge": 65536, "longest_edge": 401408}
        assert (one.min_pixels, one.max_pixels) == (65536, 401408)
    picture = make_picture(1080, 1920)
    grid = loaded(picture, return_tensors="pt")["image_grid_thw"]
    for per_call in ({"max_pixels": 401408}, {"size": {"shortest_edge": 65536, "longest_edge": 401408}}):
        assert torch.equal(backend()(picture, return_tensors="pt", **per_call)["image_grid_thw"], grid)
        assert backend().get_number_of_image_patches(1080, 1920, per_call) == grid.prod()
    assert loaded.get_number_of_image_patches(1080, 1920) == grid.prod()


@both_backends
def test_a_call_never_changes_what_is_saved(backend, tmp_path, make_picture):
    processor = backend(max_pixels=200000)
    before = processor.to_dict()
    processor(make_picture(300, 200), max_pixels=90000, min_pixels=1024, patch_size=8)
    processor(make_picture(300, 200), size={"shortest_edge": 1024, "longest_edge": 2048})
    assert processor.to_dict() == before
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["size"] == {"shortest_edge": 65536, "longest_edge": 200000}
    assert saved["image_processor_type"] == "Lfm3VlImageProcessor"
    loaded = backend.from_pretrained(tmp_path).to_dict()
    assert {name: value for name, value in loaded.items() if name != "auto_map"} == before


@pytest.mark.parametrize(
    "wrong", [{"size": {"height": 32, "width": 32}}, {"min_pixels": 0}, {"min_pixels": 5000, "max_pixels": 4096}]
)
@both_backends
def test_impossible_bounds_are_refused(backend, wrong, make_picture):
    with pytest.raises(ValueError, match="shortest_edge"):
        backend(**wrong)
    with pytest.raises(ValueError, match="shortest_edge"):
        backend()(make_picture(32, 32), **wrong)


@given(height=st.integers(1, 400), width=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_patch_count_equals_the_grid(height, width):
    picture = PIL.Image.new("RGB", (width, height))
    for backend in BACKENDS:
        processor = backend(min_pixels=1024, max_pixels=65536)
        grid = processor(picture, return_tensors="pt")["image_grid_thw"]
        assert processor.get_number_of_image_patches(height, width) == grid.prod()


@both_backends
def test_an_empty_list_of_images_is_refused(backend):
    with pytest.raises(ValueError, match="no image"):
        backend()([])


WITHOUT_TORCHVISION = """
import PIL.Image
from gridtower.processing.image_processing_lfm3_vl import Lfm3VlImageProcessor
from gridtower.processing.processing_lfm3_vl import Lfm3VlProcessor
picture = PIL.Image.new("RGB", (40, 50))
processor = Lfm3VlProcessor.from_pretrained(sys.argv[1])
print(type(processor.image_processor).__name__)
print(processor(text=processor.image_token, images=picture, return_tensors="pt")["image_grid_thw"].tolist())
for refused in (Lfm3VlImageProcessor, lambda: processor(text=processor.video_token, videos=[picture, picture])):
    try:
        refused()
    except ImportError as error:
        print(error)
"""


def test_without_torchvision_images_go_through_pil_and_the_rest_says_what_to_install(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    backend, grid, *errors = run_without_torchvision(WITHOUT_TORCHVISION, tmp_path)
    assert backend == "Lfm3VlImageProcessorPil"
    picture = PIL.Image.new("RGB", (40, 50))
    assert grid == str(Lfm3VlImageProcessor()(picture, return_tensors="pt")["image_grid_thw"].tolist())
    assert len(errors) == 2 and all("pip install torchvision" in error for error in errors)
