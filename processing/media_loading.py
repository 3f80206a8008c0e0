"""Any picture or clip that a caller may hold -> upright 8-bit RGB, and the sharing of media among prompts.

Family-neutral: nothing here knows a model. Orientation follows the EXIF specification, alpha compositing Porter and
Duff's "over" on white.
"""

import base64
import binascii
import io
import mimetypes
import os
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import PIL.ExifTags
import PIL.Image
import PIL.ImageOps
import torch
from transformers.image_utils import ChannelDimension
from transformers.image_utils import load_image as download_image


def is_array(value):
    return isinstance(value, (np.ndarray, torch.Tensor))


def is_nest(value):
    return isinstance(value, (list, tuple))


def local_path(source):
    """The path that a `str`, `pathlib.Path` or `file://` URL names."""
    source = os.fspath(source)
    return url2pathname(urlparse(source).path) if source.startswith("file://") else source


def open_image(source):
    """Opens one image and turns it upright by its EXIF orientation.

    Args:
        source: path, `pathlib.Path`, `file://` or http(s) URL, `data:` URL, base64 text, bytes, PIL image, array or
            tensor. Arrays carry no orientation and pass through untouched.

    Returns:
        `PIL.Image.Image` in its own mode, or the array itself.

    Raises:
        ValueError: nothing readable there; the message says what was tried.
    """
    if is_array(source):
        return source
    if isinstance(source, PIL.Image.Image):
        return upright(source)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return download_image(source)
    if isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)):
        return read_image_file(source)
    raise ValueError(
        f"cannot read an image from {type(source).__name__}; pass a path, a URL, bytes, base64 text, a PIL image, "
        "a numpy array or a torch tensor"
    )


def upright(image):
    """`image` (PIL) rotated and mirrored as its EXIF orientation says; all eight orientations."""
    if image.getexif().get(PIL.ExifTags.Base.Orientation, 1) == 1:
        return image
    return PIL.ImageOps.exif_transpose(image)


def read_image_file(source):
    shown = repr(source if len(str(source)) <= 80 else str(source)[:77] + "...")
    try:
        with PIL.Image.open(encoded_bytes(source)) as image:
            image.load()
            return upright(image)
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"no readable image at {shown}: {error}") from error


def encoded_bytes(source):
    """What `PIL.Image.open` takes: an existing path, or a file object over the bytes that `source` is or spells."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if isinstance(source, os.PathLike) or source.startswith("file://") or os.path.isfile(source):
        return local_path(source)
    text = source.split(",", 1)[-1] if source.startswith("data:") else source
    try:
        return io.BytesIO(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise FileNotFoundError("no such file, and not base64 either") from error


def channel_axis(shape, input_data_format=None):
    """The channel axis, -1 or -3, of an image or clip of `shape`; `None` for a single (rows, cols) plane.

    `input_data_format` ("channels_first" or "channels_last") decides when given. Otherwise the position decides, for
    arrays and tensors alike: the last axis if it holds 3 or 4 channels, else the third from the end if that does,
    else the same with 1 or 2 channels. So (1, 1000, 3) and (3, N, 3) are channels-last.

    Raises:
        ValueError: no axis has 1 to 4 entries, or the one that `input_data_format` names has not.
    """
    if len(shape) < 3:
        return None
    if input_data_format is not None:
        axis = -3 if ChannelDimension(input_data_format) == ChannelDimension.FIRST else -1
        if shape[axis] in (1, 2, 3, 4):
            return axis
        raise ValueError(
            f"shape {tuple(shape)} read as {ChannelDimension(input_data_format).value} has {shape[axis]} channels; "
            "1 to 4 are accepted, check `input_data_format`"
        )
    for counts in ((3, 4), (1, 2)):
        for axis in (-1, -3):
            if shape[axis] in counts:
                return axis
    raise ValueError(
        f"no axis of shape {tuple(shape)} can hold 1 to 4 channels; pass an image of rows, cols, channels"
    )


def channels_first(pixels, input_data_format=None):
    """`pixels` (array or tensor, 2 to 4 axes) as a tensor (..., channels, rows, cols); values and dtype stay."""
    if isinstance(pixels, np.ndarray):
        # torch takes neither foreign byte order nor negative strides, and warns of read-only memory.
        pixels = torch.from_numpy(np.require(pixels, pixels.dtype.newbyteorder("="), ["C", "W"]))
    axis = channel_axis(pixels.shape, input_data_format)
    if axis is None:
        return pixels[None]
    return pixels if axis == -3 else pixels.movedim(-1, -3)


def eight_bit(pixels):
    """Integer, floating or boolean `pixels` (tensor) as uint8.

    16-bit samples (uint16, or wider integers with values above 255) are divided by 257 and rounded, so 65535 becomes
    255. Floating values are read as 0..1 when none exceeds 1, otherwise as 0..255. Booleans become 0 and 255.

    Raises:
        ValueError: a value is negative, too large or not finite.
    """
    if pixels.dtype == torch.uint8:
        return pixels
    if pixels.dtype == torch.bool:
        return pixels.to(torch.uint8) * 255
    values = pixels.to(torch.float32)
    low, high = (values.min().item(), values.max().item()) if values.numel() else (0.0, 0.0)
    limit = 255 if pixels.is_floating_point() else 65535
    if not (low >= 0 and high <= limit):
        raise ValueError(
            f"{pixels.dtype} pixels reach from {low:g} to {high:g}; accepted are integers in 0..65535 and floating "
            "values in 0..1 or 0..255. For pixels that are already scaled and normalized pass do_rescale=False"
        )
    if pixels.is_floating_point():
        return (values * 255 if high <= 1 else values).round().to(torch.uint8)
    if pixels.dtype == torch.uint16 or high > 255:
        return (values / 257).round().to(torch.uint8)
    return pixels.to(torch.uint8)


def pil_to_rgb(image):
    """8-bit RGB `PIL.Image` of any mode: 16-bit greys (`I`, `I;16…`) are scaled, transparency lies over white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow clips these modes on conversion. Mode I is how it holds 16-bit greys of PNG and TIFF.
        samples = np.asarray(image)
        samples = samples if image.mode == "F" else checked_sixteen_bit(samples)
        return PIL.Image.fromarray(eight_bit(torch.from_numpy(np.array(samples))).numpy()).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def checked_sixteen_bit(samples):
    if samples.size and not 0 <= samples.min() <= samples.max() <= 65535:
        raise ValueError(f"grey samples reach from {samples.min()} to {samples.max()}; 16-bit images hold 0..65535")
    return samples.astype(np.uint16)


def rgb_pixels(image, input_data_format=None):
    """An opened image as upright 8-bit RGB.

    Args:
        image: what `open_image` returns. PIL images are always rows, cols, channels; for arrays see `channel_axis`
            and, for values, `eight_bit`. One channel is grey, two are grey and alpha, four are RGB and alpha.
        input_data_format: "channels_first" or "channels_last", for arrays.

    Returns:
        `torch.Tensor` uint8 (3, rows, cols); a clip of frames (frames, …) gives (frames, 3, rows, cols).

    Raises:
        ValueError: an empty image, a wrong number of axes, channels or an impossible value range.
    """
    if isinstance(image, PIL.Image.Image):
        pixels = torch.from_numpy(np.array(pil_to_rgb(image))).permute(2, 0, 1)
    elif image.ndim in (2, 3, 4):
        pixels = array_to_rgb(eight_bit(channels_first(image, input_data_format)))
    else:
        raise ValueError(f"an image has 2 or 3 axes and a clip 4, got shape {tuple(image.shape)}")
    if 0 in pixels.shape:
        raise ValueError(f"empty image of shape {tuple(pixels.shape)}; every side needs at least one pixel")
    return pixels


def read_pixels(image, do_rescale, input_data_format):
    """(3, rows, cols): 8-bit RGB, or floating values untouched when the caller has rescaled them already."""
    floating = is_array(image) and "float" in str(image.dtype)
    return (
        channels_first(image, input_data_format)
        if floating and not do_rescale
        else rgb_pixels(image, input_data_format)
    )


def array_to_rgb(pixels):
    """uint8 (..., channels, rows, cols) with 1 to 4 channels -> (..., 3, rows, cols), alpha over white."""
    channels = pixels.shape[-3]
    if channels == 3:
        return pixels
    color, alpha = (pixels, None) if channels == 1 else (pixels[..., :-1, :, :], pixels[..., -1:, :, :].float() / 255)
    if alpha is not None:
        color = (color * alpha + 255 * (1 - alpha)).round().to(torch.uint8)
    return color if color.shape[-3] == 3 else color.expand(*color.shape[:-3], 3, *color.shape[-2:])


def open_nested(media, open_one, noun):
    """`media` (one, or lists of any depth) with `open_one` applied to each; `None` in a list stands for no media.

    Raises:
        ValueError: prefixed with the place of the entry, for instance "image 0, 2: …".
    """

    def visit(entry, place):
        if is_nest(entry):
            return [visit([] if child is None else child, (*place, number)) for number, child in enumerate(entry)]
        try:
            return open_one(entry)
        except ValueError as error:
            where = f"{noun} {', '.join(map(str, place))}" if place else noun
            raise ValueError(f"{where}: {error}") from error

    return visit(media, ())


def is_image(entry):
    """Whether `entry` is one image, opened or not; lists, batches of images and `None` are not."""
    return entry is not None and not is_nest(entry) and not (is_array(entry) and entry.ndim > 3)


def is_video(entry):
    """Whether `entry` is one clip: a path, a URL, bytes, an array (frames, …) or a list of frames.

    Frames are PIL images, arrays, or paths that bear an image suffix; a list of other paths is several clips.
    """
    if not is_nest(entry):
        return (
            entry is not None and not isinstance(entry, PIL.Image.Image) and not (is_array(entry) and entry.ndim != 4)
        )
    return bool(entry) and all(is_frame(frame) for frame in entry)


def is_frame(entry):
    if isinstance(entry, (str, os.PathLike)):
        kind = mimetypes.guess_type(os.fspath(entry))[0] or ""
        return kind.startswith("image/") and kind != "image/gif"
    return isinstance(entry, PIL.Image.Image) or (is_array(entry) and entry.ndim in (2, 3))


def media_list(media, is_one):
    """One image or clip, a batch array, `None` or a list of them, as a list whose entries may still be lists."""
    if media is None:
        return []
    if is_one(media):
        return [media]
    if is_nest(media):
        return list(media)
    # A picture where a clip is expected is a clip of one frame; an array with one axis more is a batch.
    return [[media]] if is_frame(media) else list(media)


def flat_media(media, is_one):
    """All images or clips in `media`, in order, without their grouping by prompt."""
    flat = []
    for entry in media_list(media, is_one):
        flat.extend([entry] if is_one(entry) else flat_media(entry, is_one))
    return flat


def share_among_prompts(media, placeholder_counts, is_one, noun):
    """Deals images or clips to the prompts whose placeholders they fill.

    Args:
        media: `None`, one, a flat list (dealt out in order by the counts), or one list (or `None`) for each prompt.
        placeholder_counts: placeholders in each prompt.
        is_one: `is_image` or `is_video`.
        noun: "image" or "video", for messages.

    Returns:
        `list[list]`, one for each prompt.

    Raises:
        ValueError: names the prompt, its placeholders and its media where the two differ.
    """
    entries = media_list(media, is_one)
    if all(is_one(entry) for entry in entries):
        starts = np.cumsum([0, *placeholder_counts])
        shares = [entries[start : start + count] for start, count in zip(starts, placeholder_counts)]
        if shares:
            shares[-1] = entries[starts[-2] :]
    elif len(entries) == len(placeholder_counts):
        shares = [flat_media(entry, is_one) for entry in entries]
    else:
        raise ValueError(
            f"{len(entries)} lists of {noun}s were passed for {len(placeholder_counts)} prompts; pass one list for each "
            f"prompt (empty where it has no {noun}), or one flat list"
        )
    for prompt, (count, share) in enumerate(zip(placeholder_counts, shares)):
        if count != len(share):
            raise ValueError(
                f"prompt {prompt} has {count} {noun} placeholder(s) but {len(share)} {noun}(s) to fill them "
                f"(placeholders in all prompts: {list(placeholder_counts)}); write one placeholder for each {noun}"
            )
    return shares
