"""Pictures that have broken elsewhere, through every image processor: turned, deep, of few rows, of an odd axis order."""

import base64
import io

import numpy as np
import PIL.Image
import pytest
import torch

from gridtower.processing.image_processing_deepseek_v4_vl import (
    DeepseekV4ImageProcessor,
    DeepseekV4ImageProcessorPil,
    DeepseekV4ImageRules,
)
from gridtower.processing.image_processing_lfm3_vl import Lfm3VlImageProcessor, Lfm3VlImageProcessorPil
from gridtower.processing.image_processing_pixtral import PixtralImageProcessor, PixtralImageProcessorPil

# Patches of 4 x 4 pixels, merged 2 x 2. Every family resizes the strips, in its own way, and little else.
DEEPSEEK_RULES = {"downsample_ratio": 2, "min_pixels": 0, "max_wh_ratio": None}
PROCESSORS = [
    *(kind(patch_size=4, min_pixels=64, max_pixels=10**6) for kind in (Lfm3VlImageProcessor, Lfm3VlImageProcessorPil)),
    *(kind(patch_size=4, spatial_merge_size=2) for kind in (PixtralImageProcessor, PixtralImageProcessorPil)),
    *(kind(patch_size=4, **DEEPSEEK_RULES) for kind in (DeepseekV4ImageProcessor, DeepseekV4ImageProcessorPil)),
]
every_processor = pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: type(one).__name__)


def grid_step(processor):
    """What rows and columns of patches come in multiples of; DeepSeek-V4 merges blocks that are partly empty too."""
    return 1 if isinstance(processor, DeepseekV4ImageRules) else 2


def grid_of(processor, source, **options):
    return processor(source, return_tensors="pt", **options)["image_grid_thw"].tolist()


@every_processor
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_grid_is_that_of_the_upright_photograph(processor, orientation, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (24, 16)).save(buffer, "JPEG", exif=exif)
    data, path = buffer.getvalue(), tmp_path / "photograph.jpg"
    path.write_bytes(data)
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    upright = [[1, 6, 4]] if orientation >= 5 else [[1, 4, 6]]
    for source in (str(path), path, data, url, PIL.Image.open(path)):
        assert grid_of(processor, source) == upright


@every_processor
def test_white_is_white_in_every_kind_of_pixel(processor):
    deep = np.full((16, 16), 65535, dtype=np.uint16)
    palette = PIL.Image.new("P", (16, 16), 1)
    palette.putpalette([0, 0, 0, 255, 255, 255])
    grey = [PIL.Image.new(mode, (16, 16), value) for mode, value in (("L", 255), ("LA", (255, 255)), ("1", 1))]
    white = processor(PIL.Image.new("RGB", (16, 16), "white"), return_tensors="pt")["pixel_values"]
    black = processor(PIL.Image.new("RGB", (16, 16)), return_tensors="pt")["pixel_values"]
    assert not torch.equal(white, black)
    others = [PIL.Image.fromarray(deep), deep, torch.from_numpy(deep), palette, *grey, PIL.Image.new("CMYK", (16, 16))]
    for source in others:
        assert torch.equal(processor(source, return_tensors="pt")["pixel_values"], white)


@every_processor
def test_the_channel_axis_is_found_by_position_in_arrays_and_tensors(processor):
    wide = np.zeros((8, 40, 3), dtype=np.uint8)
    for source in (wide, torch.from_numpy(wide), wide.transpose(2, 0, 1), torch.from_numpy(wide).permute(2, 0, 1)):
        assert grid_of(processor, source) == [[1, 2, 10]]
    for height in (1, 3):
        flat = np.zeros((height, 1000, 3), dtype=np.uint8)
        for source in (flat, torch.from_numpy(flat), PIL.Image.fromarray(flat)):
            (_, rows, cols) = grid_of(processor, source)[0]
            assert rows == grid_step(processor) and cols > 10 * rows
        if height == 3:
            (_, rows, cols) = grid_of(processor, flat, input_data_format="channels_first")[0]
            assert cols == grid_step(processor) and rows > 10 * cols


@every_processor
@pytest.mark.parametrize("size", [(332, 27), (26, 28), (257, 27), (1, 1000), (1000, 1), (1, 1)])
def test_every_picture_gives_at_least_one_merged_cell(processor, size):
    features = processor(PIL.Image.new("RGB", size[::-1]), return_tensors="pt")
    _, rows, cols = features["image_grid_thw"][0].tolist()
    step = grid_step(processor)
    assert rows >= step and cols >= step and rows % step == cols % step == 0
    assert len(features["pixel_values"]) == rows * cols
