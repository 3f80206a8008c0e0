"""Any image or clip becomes upright 8-bit RGB, and media find their prompts."""

import base64
import io

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtower.processing.media_loading import (
    channel_axis,
    is_image,
    is_video,
    open_image,
    open_nested,
    rgb_pixels,
    share_among_prompts,
)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels_of(source, **options):
    return rgb_pixels(open_image(source), **options)


@pytest.fixture
def picture():
    rows, cols = np.mgrid[0:16, 0:24]
    return PIL.Image.fromarray(np.stack([rows * 15, cols * 10, rows + cols], axis=-1).astype(np.uint8))


@pytest.fixture
def every_source(picture, tmp_path):
    path = tmp_path / "a picture é.png"
    picture.save(path)
    data = encoded(picture)
    text = base64.b64encode(data).decode()
    array = np.array(picture)
    return {
        "path": str(path),
        "pathlib": path,
        "file URL": path.as_uri(),
        "bytes": data,
        "bytearray": bytearray(data),
        "base64": text,
        "data URL": f"data:image/png;base64,{text}",
        "PIL": picture,
        "numpy": array,
        "numpy channels first": array.transpose(2, 0, 1),
        "torch": torch.from_numpy(array),
        "torch channels first": torch.from_numpy(array).permute(2, 0, 1),
        "read-only, reversed": array[::-1][::-1],
    }


def test_every_kind_of_source_gives_the_same_pixels(every_source, picture):
    expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    for name, source in every_source.items():
        assert torch.equal(pixels_of(source), expected), name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_from_every_source(orientation, tmp_path):
    picture = PIL.Image.fromarray(np.zeros((16, 24, 3), dtype=np.uint8))
    picture.paste((255, 255, 255), (0, 0, 8, 8))  # white at the stored top left
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, "JPEG", quality=100, exif=exif)
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    sources = [path, data, "data:image/jpeg;base64," + base64.b64encode(data).decode(), PIL.Image.open(path)]
    # Where the stored top left corner shows: EXIF 2.3, tag 274.
    bottom = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    for source in sources:
        pixels = pixels_of(source)
        assert tuple(pixels.shape) == ((3, 16, 24) if orientation <= 4 else (3, 24, 16))
        assert pixels[0, -4 if bottom else 3, -4 if right else 3] > 250
        assert pixels[0, 3 if bottom else -4, 3 if right else -4] < 5


@pytest.mark.parametrize("value, expected", [(65535, 255), (32896, 128), (257, 1), (0, 0)])
def test_sixteen_bit_grey_is_scaled_not_clipped(value, expected):
    array = np.full((5, 7), value, dtype=np.uint16)
    deep = PIL.Image.fromarray(array)
    assert deep.mode == "I;16"
    wide = PIL.Image.fromarray(array.astype(np.int32))
    assert wide.mode == "I"
    for source in (
        deep,
        wide,
        encoded(deep),
        encoded(deep, "TIFF"),
        array,
        torch.from_numpy(array),
        array.astype(">u2"),
    ):
        assert pixels_of(source).unique().tolist() == [expected]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "RGBA", "LA", "PA", "RGBX"])
def test_every_pil_mode_becomes_rgb(picture, mode):
    grey = mode in ("1", "L", "LA")
    converted = picture.convert("P").convert("PA") if mode == "PA" else picture.convert(mode)
    pixels = pixels_of(converted)
    assert pixels.shape == (3, 16, 24) and pixels.dtype == torch.uint8
    expected = converted.convert("RGB") if not grey else converted.convert("L").convert("RGB")
    assert torch.equal(pixels, torch.from_numpy(np.array(expected)).permute(2, 0, 1))


def test_transparency_lies_over_white():
    clear = PIL.Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    half = np.full((4, 4, 4), 128, dtype=np.uint8)
    palette = PIL.Image.new("P", (4, 4), 0)
    assert pixels_of(clear).unique().tolist() == [255]
    assert pixels_of(PIL.Image.new("LA", (4, 4), (10, 0))).unique().tolist() == [255]
    assert pixels_of(encoded(palette, transparency=0)).unique().tolist() == [255]
    assert pixels_of(np.zeros((4, 4, 4), dtype=np.uint8)).unique().tolist() == [255]
    assert pixels_of(half).unique().tolist() == pixels_of(PIL.Image.fromarray(half)).unique().tolist() == [191]


@pytest.mark.parametrize(
    "shape, axis",
    [
        ((1, 1000, 3), -1),
        ((3, 50, 3), -1),
        ((3, 50, 60), -3),
        ((50, 60, 3), -1),
        ((4, 50, 60), -3),
        ((50, 60, 4), -1),
        ((1, 28, 28), -3),
        ((28, 28, 1), -1),
        ((3, 50, 1), -3),
        ((1, 50, 4), -1),
        ((3, 20, 30, 3), -1),
        ((20, 3, 30, 3), -1),
        ((20, 3, 30, 40), -3),
        ((4, 4, 30, 3), -1),
        ((20, 30), None),
    ],
)
def test_channel_axis_goes_by_position(shape, axis):
    assert channel_axis(shape) == axis


def test_input_data_format_decides_where_it_is_given():
    array = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    first = rgb_pixels(array, "channels_first")
    assert torch.equal(first, torch.from_numpy(array))
    assert torch.equal(rgb_pixels(torch.from_numpy(array), "channels_last"), first.permute(2, 0, 1))
    with pytest.raises(ValueError, match="channels_first has 50 channels"):
        rgb_pixels(np.zeros((50, 60, 3), dtype=np.uint8), "channels_first")


def test_pil_images_of_height_one_stay_one_pixel_high():
    assert pixels_of(PIL.Image.new("RGB", (1000, 1))).shape == (3, 1, 1000)
    assert pixels_of(PIL.Image.new("L", (3, 1))).shape == (3, 1, 3)


def test_floating_pixels_are_unit_range_or_bytes():
    ramp = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    expected = torch.from_numpy((ramp * 255).round().astype(np.uint8)).expand(3, 3, 4)
    for source in (ramp, ramp.astype(np.float64), ramp * 255, torch.from_numpy(ramp), PIL.Image.fromarray(ramp)):
        assert torch.equal(pixels_of(source), expected)
    assert torch.equal(
        pixels_of(torch.from_numpy(ramp).bfloat16()), pixels_of(torch.from_numpy(ramp).bfloat16().float())
    )


def test_booleans_and_small_integers_are_eight_bit():
    assert pixels_of(np.eye(2, dtype=bool))[0].tolist() == [[255, 0], [0, 255]]
    assert pixels_of(np.array([[0, 255], [7, 8]], dtype=np.int64))[0].tolist() == [[0, 255], [7, 8]]


@pytest.mark.parametrize(
    "bad, message",
    [
        (np.full((2, 2), -1), "-1"),
        (np.full((2, 2), 70000), "70000"),
        (np.full((2, 2), np.nan, dtype=np.float32), "nan"),
        (np.full((2, 2, 3), -0.5, dtype=np.float32), "do_rescale=False"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "empty"),
        (np.zeros((5, 6, 7), dtype=np.uint8), "channels"),
        (np.zeros(5, dtype=np.uint8), "axes"),
        ("missing.png", "missing.png"),
        (b"not an image", "not an image"),
        (base64.b64encode(b"not an image").decode(), "no readable image"),
        (3, "int"),
    ],
)
def test_what_cannot_be_read_is_refused_by_place(bad, message):
    with pytest.raises(ValueError, match=rf"(?s)^image 1, 0: .*{message}"):
        open_nested([[], [bad]], pixels_of, "image")


def test_truncated_file_is_a_value_error(photographs):
    with pytest.raises(ValueError, match="no readable image"):
        open_image(encoded(photographs[0], "JPEG")[:5000])


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_flat_list_is_dealt_out_by_placeholder_counts(counts):
    images = [f"{number}.png" for number in range(sum(counts))]
    shares = share_among_prompts(images, counts, is_image, "image")
    assert [len(share) for share in shares] == counts
    assert [image for share in shares for image in share] == images
    assert share_among_prompts(shares, counts, is_image, "image") == shares


def test_prompts_without_images_may_pass_an_empty_list_or_none():
    for media in ([["a"], []], [["a"], None], ["a"]):
        assert share_among_prompts(media, [1, 0], is_image, "image") == [["a"], []]
    assert share_among_prompts(None, [0, 0], is_image, "image") == [[], []]


@pytest.mark.parametrize(
    "media, counts, message",
    [
        (["a"], [2], r"prompt 0 has 2 image placeholder\(s\) but 1 image"),
        (["a"], [0], r"prompt 0 has 0 image placeholder\(s\) but 1 image"),
        (None, [0, 1], r"prompt 1 has 1 image placeholder\(s\) but 0 image"),
        (["a", "b", "c"], [1, 1], r"prompt 1 has 1 image placeholder\(s\) but 2 image"),
        ([["a", "b"], []], [1, 1], r"prompt 0 has 1 image placeholder\(s\) but 2 image"),
        ([["a", "b"]], [1, 1], "1 lists of images were passed for 2 prompts"),
    ],
)
def test_unequal_counts_name_the_prompt_the_placeholders_and_the_media(media, counts, message):
    with pytest.raises(ValueError, match=message):
        share_among_prompts(media, counts, is_image, "image")


def test_clips_are_told_from_lists_of_clips(picture):
    frames = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    for clip in ("a.mp4", b"...", frames, torch.from_numpy(frames), [picture] * 2, list(frames), ["1.png", "2.jpg"]):
        assert is_video(clip)
        assert len(share_among_prompts(clip, [1], is_video, "video")[0]) == 1
        assert [len(share) for share in share_among_prompts([clip, clip], [1, 1], is_video, "video")] == [1, 1]
        assert [len(share) for share in share_among_prompts([[clip, clip], None], [2, 0], is_video, "video")] == [2, 0]
    for batch in (["a.mp4", "b.mp4"], [frames, frames], np.stack([frames, frames])):
        assert not is_video(batch)
        assert len(share_among_prompts(batch, [2], is_video, "video")[0]) == 2
