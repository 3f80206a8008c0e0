"""DeepSeek-V4 images -> packed patches: sized by the tokens they may take, letterboxed on grey, normalized, cut.

The sizes are those of the reference implementations of DeepSeek-V4-Flash-Vision-Exp and DeepSeek-V4.1-Flash, integer for
integer; the letterbox is that of `PIL.ImageOps.pad`.
"""

import math
from pathlib import Path

import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from ..configuration.configuration_deepseek_v4_vl import TOKEN_LAYOUTS, DeepseekV4VisionConfig
from ..configuration.flat_code import SavesItsCode
from .any_image import HALF, ReadsAnyImage, TorchvisionImages, check_normalized_on_device
from .media_loading import channels_first, read_pixels
from .patch_geometry import finished_patches, patchify, refuse_empty

LETTERBOX_GREY = 127
# Of a layout's tokens for an image, those kept back for alignment, and the number that its rows come in multiples of.
ALIGNMENT_TOKENS = {"interleaved": 3, "reading_order": 0}
ROW_STEPS = {"interleaved": 2, "reading_order": 1}
# What the size of an image follows from, besides its own.
SIZE_RULES = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio", "token_layout")


class DeepseekV4ImageProcessorKwargs(ImagesKwargs, total=False):
    """What a call or a config may set besides the fields of `ImagesKwargs`; meanings in `DeepseekV4ImageRules`."""

    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | int | None
    token_layout: str
    normalize_on_device: bool


class DeepseekV4ImageRules(ReadsAnyImage):
    """What both backends share: defaults, checks, reading of any image, sizes, letterbox and patches.

    A picture is always converted to RGB; with `do_rescale=False` floating arrays, 0 to 1, are taken as they are,
    otherwise every value is brought to 8 bits first.

    `patch_size`: side of a patch in pixels.
    `downsample_ratio`: side of the block of patches that becomes one token, a cell; the last cells may be partly empty.
    `max_image_tokens`: most tokens of an image, those of its start, rows, padding, alignment and end included.
    `min_pixels`: area below which an image is enlarged.
    `max_wh_ratio`: from this width for a height of 1 on, an image is stretched to its size; all others are letterboxed.
    None, in the constructor, or infinity: letterbox all.
    `token_layout`: "interleaved" (DeepSeek-V4) or "reading_order" (DeepSeek-V4.1).
    `normalize_on_device` (default False): leave the pixels uint8, a quarter of the bytes; the model's tower normalizes
    them, with a mean and a deviation of 0.5.
    """

    do_resize = True
    resample = PILImageResampling.BICUBIC
    do_rescale = True
    do_normalize = True
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    do_convert_rgb = True
    patch_size = 14
    downsample_ratio = 3
    max_image_tokens = 384
    min_pixels = 147456
    max_wh_ratio = 8
    token_layout = "interleaved"
    normalize_on_device = False
    valid_kwargs = DeepseekV4ImageProcessorKwargs
    model_input_names = ["pixel_values", "image_grid_thw"]

    @classmethod
    def get_image_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As transformers'; a folder without processor files, as published, is read from its `config.json`."""
        folder = Path(pretrained_model_name_or_path)
        files = ("preprocessor_config.json", "processor_config.json")
        if folder.is_dir() and not any((folder / name).is_file() for name in files):
            config = DeepseekV4VisionConfig.from_pretrained(folder)
            return {name: getattr(config, name) for name in SIZE_RULES}, kwargs
        return super().get_image_processor_dict(pretrained_model_name_or_path, **kwargs)

    def _set_attributes(self, **kwargs):
        super()._set_attributes(**kwargs)
        # The inherited method takes None for "not given"; of this field it is a value, and the published one of V4.1.
        self.max_wh_ratio = kwargs.get("max_wh_ratio", self.max_wh_ratio)

    def _standardize_kwargs(self, **kwargs):
        settings = super()._standardize_kwargs(**kwargs)
        if settings["size"] is not None:
            raise ValueError(
                f"size is {dict(settings['size'])}; sizes follow from max_image_tokens and min_pixels, give those"
            )
        for name in ("patch_size", "downsample_ratio"):
            if settings[name] < 1:
                raise ValueError(f"{name} is {settings[name]}; give a whole number, 1 or more")
        if settings["min_pixels"] < 0:
            raise ValueError(f"min_pixels is {settings['min_pixels']}; give an area in pixels, 0 or more")
        if settings["max_wh_ratio"] is not None and not settings["max_wh_ratio"] > 0:
            raise ValueError(f"max_wh_ratio is {settings['max_wh_ratio']}; give a width for a height of 1, above 0")
        if settings["token_layout"] not in TOKEN_LAYOUTS:
            raise ValueError(f"token_layout is {settings['token_layout']!r}; give one of {TOKEN_LAYOUTS}")
        token_budget(settings["max_image_tokens"], settings["token_layout"])
        return check_normalized_on_device(settings, HALF)

    def _validate_preprocess_kwargs(self, **kwargs):
        # The inherited check wants a `size` wherever images are resized.
        super()._validate_preprocess_kwargs(**(kwargs | {"do_resize": False}))

    def preprocess(self, images, **kwargs):
        """Turns images into packed patches.

        Args:
            images: one image or a list (of lists) of them: paths, URLs, bytes, base64, PIL, numpy, torch.
            kwargs: any attribute of the processor, for this call alone; `None` stands for the processor's own.

        Returns:
            `BatchFeature` with `pixel_values` float32, uint8 with `normalize_on_device`, (patches, 3 * patch_size**2),
            each row ordered (channel, row, column), the patches of an image in raster order, and `image_grid_thw` int64
            (images, 3), in patches.

        Raises:
            ValueError: an unreadable image, which it names, or settings that make no sense.
        """
        given = {name: value for name, value in kwargs.items() if value is not None}
        return super().preprocess(images, **given)

    def _preprocess(
        self,
        images,
        do_resize,
        resample,
        do_rescale,
        rescale_factor,
        do_normalize,
        image_mean,
        image_std,
        normalize_on_device,
        return_tensors,
        **kwargs,
    ):
        rules, side = {name: kwargs[name] for name in SIZE_RULES}, kwargs["patch_size"]
        images = [self.fitted(image, do_resize, resample, rules) for image in images]

        def normalize(pixels):
            if normalize_on_device:
                return pixels
            pixels = pixels.float()
            if do_rescale:
                pixels = pixels * rescale_factor
            if do_normalize:
                mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (image_mean, image_std))
                pixels = (pixels - mean) / std
            return pixels

        patches = torch.cat([patchify(image[None, None], side, 1, 1)[0] for image in images])
        # Cut before normalizing, which only looks at the channel: 8-bit pixels are a quarter of the memory traffic.
        pixels = finished_patches(patches, images[0].shape[0], normalize)
        grids = [[1, image.shape[-2] // side, image.shape[-1] // side] for image in images]
        data = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        return BatchFeature(data, tensor_type=return_tensors)

    def fitted(self, image, do_resize, resample, rules):
        """`image`, a tensor (channels, rows, cols), at the size that `rules` give it."""
        height, width = image.shape[-2:]
        rows, cols = target_sides(height, width, do_resize, rules)
        if not do_resize:
            return image
        inner, (top, left) = placement(height, width, rows, cols, rules["max_wh_ratio"])
        image = self.resize(image, SizeDict(height=inner[0], width=inner[1]), resample=resample)
        margins = (left, cols - inner[1] - left, top, rows - inner[0] - top)
        grey = LETTERBOX_GREY / 255 if image.is_floating_point() else LETTERBOX_GREY
        return torch.nn.functional.pad(image, margins, value=grey)

    def size_rules(self, images_kwargs=None):
        """(`do_resize`, values of SIZE_RULES by name), the processor's own under the overrides in `images_kwargs`."""
        given = images_kwargs or {}
        settings = self._standardize_kwargs(
            **{
                name: getattr(self, name) if given.get(name) is None else given[name]
                for name in ("size", "do_resize", *SIZE_RULES)
            }
        )
        return settings["do_resize"], {name: settings[name] for name in SIZE_RULES}

    def image_grid(self, height, width, images_kwargs=None):
        """(rows, columns) of patches of an image of `height` x `width` pixels, under the overrides in `images_kwargs`."""
        do_resize, rules = self.size_rules(images_kwargs)
        rows, cols = target_sides(height, width, do_resize, rules)
        return rows // rules["patch_size"], cols // rules["patch_size"]

    def aligner_grid(self, height, width, images_kwargs=None):
        """(rows, columns) of image tokens of an image of `height` x `width` pixels, under the same overrides."""
        ratio = self.size_rules(images_kwargs)[1]["downsample_ratio"]
        rows, cols = self.image_grid(height, width, images_kwargs)
        return -(-rows // ratio), -(-cols // ratio)

    def get_number_of_image_patches(self, height, width, images_kwargs=None):
        """Patches of an image of `height` x `width` pixels, under the overrides in `images_kwargs`."""
        rows, cols = self.image_grid(height, width, images_kwargs)
        return rows * cols


def block_tokens(rows, cols, token_layout):
    """Tokens of the block that `rows` x `cols` cells become in the prompt, without those that align it."""
    if token_layout == "reading_order":
        return rows * (cols + 1) + 2
    pairs = -(-rows // 2) * (cols + 1)
    return 2 * (pairs + pairs % 2) + 2


def token_budget(max_image_tokens, token_layout):
    """Tokens that a block may have at most.

    Raises:
        ValueError: not even one cell fits.
    """
    budget, least = max_image_tokens - ALIGNMENT_TOKENS[token_layout], block_tokens(1, 1, token_layout)
    if budget < least:
        raise ValueError(
            f"max_image_tokens is {max_image_tokens}, and the smallest image takes {least} tokens and "
            f"{ALIGNMENT_TOKENS[token_layout]} for alignment; give {least + ALIGNMENT_TOKENS[token_layout]} or more"
        )
    return budget


def target_sides(height, width, do_resize, rules):
    """Sides of an image in pixels by `rules`, those of SIZE_RULES; without resizing its own, which must obey them."""
    if do_resize:
        return sides_within_tokens(height, width, **rules)
    refuse_empty(height, width)
    side, limit, layout = rules["patch_size"], rules["max_image_tokens"], rules["token_layout"]
    if height % side or width % side:
        raise ValueError(
            f"an image of {height} x {width} pixels cannot be cut into patches of {side} x {side}; leave do_resize on, or "
            "pass sides that are multiples"
        )
    needed = tokens_of_sides(height, width, side, rules["downsample_ratio"], layout)
    if needed > token_budget(limit, layout):
        raise ValueError(
            f"an image of {height} x {width} pixels takes {needed} tokens, {needed + ALIGNMENT_TOKENS[layout]} with "
            f"alignment, and max_image_tokens is {limit}; leave do_resize on, or raise it"
        )
    return height, width


def tokens_of_sides(height, width, patch_size, downsample_ratio, token_layout):
    cell = patch_size * downsample_ratio
    return block_tokens(-(-height // cell), -(-width // cell), token_layout)


def sides_within_tokens(
    height, width, patch_size, downsample_ratio, max_image_tokens, min_pixels, max_wh_ratio, token_layout
):
    """Sides in pixels to which an image is resized, multiples of `patch_size`, at least one cell.

    An image too small is enlarged to `min_pixels`, an image too wide counts as `max_wh_ratio` times its height; what
    then takes too many tokens is solved for the budget, of all aspects. The arithmetic keeps the reference's order, as
    the last bit decides between two integers.

    Raises:
        ValueError: a side below 1, or a budget below one cell.
    """
    refuse_empty(height, width)
    budget = token_budget(max_image_tokens, token_layout)
    if max_wh_ratio is not None:
        width = min(width, height * max_wh_ratio)
    if width * height < min_pixels:
        scale = (min_pixels / (width * height)) ** 0.5
        height, width = (max(1, int(side * scale)) for side in (height, width))
    sides = tuple(math.ceil(side / patch_size) * patch_size for side in (height, width))
    # Each solution may still be a row of padding over. That of the smallest budget never is: it is one or two cells.
    for goal in range(budget, block_tokens(1, 1, token_layout) - 1, -1):
        if tokens_of_sides(*sides, patch_size, downsample_ratio, token_layout) <= budget:
            break
        sides = solved_sides(height, width, patch_size, downsample_ratio, goal, ROW_STEPS[token_layout])
    return sides


def solved_sides(height, width, patch_size, downsample_ratio, budget, row_step):
    """Sides in pixels of the shape of `height` x `width` that is about `budget` tokens, in rows by `row_step`."""
    ratio, cell = height / width, patch_size * downsample_ratio
    # c columns and c * ratio rows, with a newline each, a start and an end: c * ratio * (c + 1) + 2 = budget
    most_cols = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
    most_rows = most_cols * ratio
    if most_cols < 1:
        rows = (budget - 2) // 2
        return (rows - rows % row_step) * cell, cell
    if most_rows < row_step:
        return row_step * cell, ((budget - 2) // row_step - 1) * cell
    rows, cols = math.floor(most_rows), math.floor(most_cols)
    rows -= rows % row_step
    scale = min(cols * cell / width, rows * cell / height)
    # diff -> the published rule can round a side to nothing where cells are small
    return tuple(max(1, math.floor(side * scale / patch_size)) * patch_size for side in (height, width))


def placement(height, width, rows, cols, max_wh_ratio):
    """((inner rows, inner columns), (top, left)): where an image of `height` x `width` lies within `rows` x `cols`.

    The whole area from `max_wh_ratio` on, otherwise as large as its shape allows, and central, the way of
    `PIL.ImageOps.pad`, roundings included.
    """
    if max_wh_ratio is not None and width >= max_wh_ratio * height:
        return (rows, cols), (0, 0)
    inner_rows, inner_cols = rows, cols
    # diff -> Pillow lets an image that rounds to nothing vanish
    if width / height > cols / rows:
        inner_rows = max(1, round(height / width * cols))
    elif width / height < cols / rows:
        inner_cols = max(1, round(width / height * rows))
    return (inner_rows, inner_cols), (round((rows - inner_rows) * 0.5), round((cols - inner_cols) * 0.5))


class DeepseekV4ImageProcessor(SavesItsCode, DeepseekV4ImageRules, TorchvisionImages):
    """DeepSeek-V4 image processor on torchvision, on any device: 8-bit until the end."""

    hub_classes = {"AutoImageProcessor": "image_processing_deepseek_v4_vl.DeepseekV4ImageProcessor"}


class DeepseekV4ImageProcessorPil(SavesItsCode, DeepseekV4ImageRules, PilBackend):
    """DeepSeek-V4 image processor on PIL: the same grids, resampled by Pillow, pixel for pixel as the reference."""

    hub_classes = {"AutoImageProcessor": "image_processing_deepseek_v4_vl.DeepseekV4ImageProcessorPil"}

    def process_image(self, image, do_rescale=True, input_data_format=None, **kwargs):
        return read_pixels(image, do_rescale, input_data_format)

    def resize(self, image, size, resample=None, **kwargs):
        return channels_first(super().resize(image.numpy(), size, resample=resample), "channels_first")
