"""uint8 patches on request, from every family: the pixels that normalizing would have started from."""

import numpy as np
import pytest
import torch

from gridtower import (
    DeepseekV4ImageProcessor,
    DeepseekV4ImageProcessorPil,
    Lfm3VlImageProcessor,
    Lfm3VlImageProcessorPil,
    Lfm3VlVideoProcessor,
    PixtralImageProcessor,
    PixtralImageProcessorPil,
)

IMAGE_PROCESSORS = [
    Lfm3VlImageProcessor,
    Lfm3VlImageProcessorPil,
    PixtralImageProcessor,
    PixtralImageProcessorPil,
    DeepseekV4ImageProcessor,
    DeepseekV4ImageProcessorPil,
]
BOUND_BY_THE_TOWER = [kind for kind in IMAGE_PROCESSORS if "Pixtral" not in kind.__name__]


def assert_same_pixels(raw, finished, processor):
    assert raw.dtype == torch.uint8 and finished.dtype == torch.float32 and raw.shape == finished.shape
    mean, std = (torch.tensor(values).view(3, 1) for values in (processor.image_mean, processor.image_std))
    normalized = ((raw.unflatten(1, (3, -1)) / 255 - mean) / std).flatten(1)
    torch.testing.assert_close(normalized, finished, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", IMAGE_PROCESSORS)
def test_images_stay_8_bit_on_request(kind, make_picture):
    processor = kind()
    pictures = [make_picture(300, 200), make_picture(90, 400), make_picture(300, 200)]
    raw, finished = (processor(pictures, normalize_on_device=wish, return_tensors="pt") for wish in (True, False))
    assert_same_pixels(raw["pixel_values"], finished["pixel_values"], processor)
    assert torch.equal(raw["image_grid_thw"], finished["image_grid_thw"])


def test_clips_stay_8_bit_on_request():
    processor = Lfm3VlVideoProcessor()
    clip = np.random.default_rng(0).integers(0, 256, (5, 64, 96, 3), dtype=np.uint8)
    raw, finished = (
        processor([clip], normalize_on_device=wish, do_sample_frames=False, return_tensors="pt")
        for wish in (True, False)
    )
    assert_same_pixels(raw["pixel_values_videos"], finished["pixel_values_videos"], processor)


@pytest.mark.parametrize("kind", BOUND_BY_THE_TOWER)
def test_statistics_that_the_tower_does_not_know_are_refused(kind, make_picture):
    with pytest.raises(ValueError, match="mean and deviation are 0.5"):
        kind(normalize_on_device=True, image_std=[0.25] * 3)(make_picture(64, 64))


def test_clips_of_other_statistics_are_refused():
    clip = np.zeros((4, 64, 64, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="mean and deviation are 0.5"):
        Lfm3VlVideoProcessor(image_mean=[0.4] * 3)([clip], normalize_on_device=True, do_sample_frames=False)


@pytest.mark.parametrize("kind", IMAGE_PROCESSORS)
def test_pixels_that_nobody_normalizes_are_refused(kind, make_picture):
    with pytest.raises(ValueError, match="do_normalize=False"):
        kind()(make_picture(64, 64), normalize_on_device=True, do_normalize=False)
