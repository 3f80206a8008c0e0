"""Pixtral images -> packed patches: shrunk to a longest edge, sides rounded up to whole cells, normalized, cut.

The sizes are those of Mistral's and transformers' own processors, with one addition: no side shrinks to nothing.
"""

import json
from pathlib import Path

import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_transforms import group_images_by_shape, reorder_images
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs, ProcessorMixin
from transformers.utils import logging

from ..configuration.configuration_pixtral import PixtralConfig
from ..configuration.flat_code import SavesItsCode
from .any_image import ReadsAnyImage, TorchvisionImages, check_normalized_on_device
from .media_loading import channels_first, read_pixels
from .patch_geometry import finished_patches, patchify, refuse_empty

logger = logging.get_logger(__name__)

LAYOUTS = ("packed", "padded")


class PixtralImageProcessorKwargs(ImagesKwargs, total=False):
    """What a call or a config may set besides the fields of `ImagesKwargs`; meanings in `PixtralImageRules`."""

    patch_size: dict[str, int] | int
    spatial_merge_size: int
    layout: str
    normalize_on_device: bool


class PixtralImageRules(ReadsAnyImage):
    """What both backends share: defaults, checks, reading of any image, grids, and the two forms of output.

    A picture is always converted to RGB; with `do_rescale=False` floating arrays are taken as they are, otherwise every
    value is brought to 8 bits first.

    `size`: `{"longest_edge": limit}`, or `{"height": limit, "width": limit}`; smaller images are not enlarged.
    `patch_size`: an int, or `{"height": side, "width": side}` as published; kept in the form given.
    `spatial_merge_size` (default 1): side of the block of patches that becomes one token; both sides of a resized image
    are multiples of `patch_size * spatial_merge_size`. Published folders hold it in `processor_config.json` only, where
    `from_pretrained` finds it.
    `layout` (default "packed"): "packed" gives patches of all images in one sequence, each block of
    `spatial_merge_size**2` together. "padded" gives whole images, filled up with zeros at the right and bottom to the
    largest (a plain list with `do_pad=False`), as transformers' own models take them.
    `normalize_on_device` (default False): leave the pixels uint8, a quarter of the bytes; the model's tower normalizes
    them, by `image_mean` and `image_std` of its own configuration.
    """

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size = {"longest_edge": 1024}
    default_to_square = True
    do_rescale = True
    do_normalize = True
    image_mean = [0.48145466, 0.4578275, 0.40821073]
    image_std = [0.26862954, 0.26130258, 0.27577711]
    do_pad = True
    do_convert_rgb = True
    patch_size = {"height": 16, "width": 16}
    spatial_merge_size = 1
    layout = "packed"
    normalize_on_device = False
    valid_kwargs = PixtralImageProcessorKwargs
    model_input_names = ["pixel_values", "image_grid_thw", "image_sizes"]

    @classmethod
    def get_image_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As transformers'; a folder without processor files is read from its `params.json` or `config.json`."""
        folder = Path(pretrained_model_name_or_path)
        files = ("preprocessor_config.json", "processor_config.json")
        if folder.is_dir() and not any((folder / name).is_file() for name in files):
            return settings_of_checkpoint(folder), kwargs
        fields, unused = super().get_image_processor_dict(pretrained_model_name_or_path, **kwargs)
        if "spatial_merge_size" not in fields:
            joint, _ = ProcessorMixin.get_processor_dict(pretrained_model_name_or_path, **kwargs)
            fields["spatial_merge_size"] = joint.get("spatial_merge_size", 1)
        return fields, unused

    @classmethod
    def from_dict(cls, image_processor_dict, **kwargs):
        """As transformers'; warns where the merge size is not among the fields, nor in `kwargs`."""
        # Since transformers 5.25 AutoImageProcessor comes here by itself, with no folder to look for the size in.
        if "spatial_merge_size" not in image_processor_dict | kwargs:
            logger.warning_once(
                "the image processor's settings do not say spatial_merge_size, so it is 1; for a model that merges "
                "patches load with AutoProcessor or PixtralImageProcessor.from_pretrained, or give spatial_merge_size"
            )
        return super().from_dict(image_processor_dict, **kwargs)

    def _standardize_kwargs(self, **kwargs):
        settings = super()._standardize_kwargs(**kwargs)
        edge_limits(settings["size"])
        patch_side(settings["patch_size"])
        if settings["spatial_merge_size"] < 1:
            raise ValueError(f"spatial_merge_size is {settings['spatial_merge_size']}; give a whole number, 1 or more")
        if settings.get("layout", "packed") not in LAYOUTS:
            raise ValueError(f"layout is {settings['layout']!r}; give one of {LAYOUTS}")
        return check_normalized_on_device(settings)

    def preprocess(self, images, **kwargs):
        """Turns images into packed patches, or into whole images of equal size.

        Args:
            images: one image or a list (of lists) of them: paths, URLs, bytes, base64, PIL, numpy, torch.
            kwargs: any attribute of the processor, for this call alone; `None` stands for the processor's own.

        Returns:
            `BatchFeature`. In the layout "packed": `pixel_values` (patches, channels * patch_size**2), each row ordered
            (channel, row, column), and `image_grid_thw` int64 (images, 3), in patches. In the layout "padded":
            `pixel_values` (images, channels, height, width) and `image_sizes` int64 (images, 2), heights and widths
            without the padding. Pixels are float32, or uint8 with `normalize_on_device`.

        Raises:
            ValueError: an unreadable image, which it names, or settings that make no sense.
        """
        given = {name: value for name, value in kwargs.items() if value is not None}
        return super().preprocess(images, **given)

    def target_sides(self, height, width, do_resize, size, cell):
        """Sides of an image after resizing; without resizing they must already be multiples of `cell`, in pixels."""
        if do_resize:
            return sides_within_limits(height, width, cell, *edge_limits(size))
        if height % cell or width % cell:
            raise ValueError(
                f"an image of {height} x {width} pixels cannot be cut into cells of {cell} x {cell}; leave do_resize on, "
                "or pass sides that are multiples"
            )
        return height, width

    def image_grid(self, height, width, images_kwargs=None):
        """(rows, columns) of patches of an image of `height` x `width` pixels, under the overrides in `images_kwargs`."""
        given = images_kwargs or {}
        names = ("do_resize", "size", "default_to_square", "patch_size", "spatial_merge_size")
        settings = self._standardize_kwargs(
            **{name: getattr(self, name) if given.get(name) is None else given[name] for name in names}
        )
        side = patch_side(settings["patch_size"])
        cell = side * settings["spatial_merge_size"]
        rows, cols = self.target_sides(height, width, settings["do_resize"], settings["size"], cell)
        return rows // side, cols // side

    def get_number_of_image_patches(self, height, width, images_kwargs=None):
        """Patches of an image of `height` x `width` pixels, under the overrides in `images_kwargs`."""
        rows, cols = self.image_grid(height, width, images_kwargs)
        return rows * cols


def settings_of_checkpoint(folder):
    """Fields of an image processor for a folder that holds the model alone, in Mistral's layout or converted from it."""
    config = PixtralConfig.from_pretrained(folder)
    vision = config.vision_config
    limit = json.loads(config.native_params or "{}").get("vision_encoder", {}).get("max_image_size", vision.image_size)
    return {
        "size": {"longest_edge": limit} if isinstance(limit, int) else dict(zip(("height", "width"), limit)),
        "patch_size": vision.patch_size,
        "spatial_merge_size": config.spatial_merge_size,
        "image_mean": list(vision.image_mean),
        "image_std": list(vision.image_std),
    }


def edge_limits(size):
    """(height, width) that `size` allows at most.

    Raises:
        ValueError: other keys than `longest_edge` alone, or `height` and `width`, or a limit below 1.
    """
    given = {name: value for name, value in dict(size).items() if value is not None}
    if set(given) == {"longest_edge"}:
        limits = (given["longest_edge"], given["longest_edge"])
    elif set(given) == {"height", "width"}:
        limits = (given["height"], given["width"])
    else:
        limits = (0, 0)
    if min(limits) < 1:
        raise ValueError(f'size is {given}; give {{"longest_edge": limit}}, or height and width, in pixels from 1 up')
    return limits


def patch_side(patch_size):
    """Side of a patch in pixels, from an int or `{"height": side, "width": side}`.

    Raises:
        ValueError: patches that are not square, or smaller than a pixel.
    """
    sides = set(patch_size.values()) if isinstance(patch_size, dict) else {patch_size}
    if len(sides) != 1 or min(sides) < 1:
        raise ValueError(f"patch_size is {patch_size}; patches are square, give their side in pixels, 1 or more")
    return sides.pop()


def sides_within_limits(height, width, cell, max_height, max_width):
    """Sides in pixels to which an image is resized: within the limits, then rounded up to multiples of `cell`.

    Raises:
        ValueError: a side below 1.
    """
    refuse_empty(height, width)
    ratio = max(height / max_height, width / max_width)
    if ratio > 1:
        # diff -> the published rule lets the short side of an extreme aspect become 0, and fails
        height, width = (max(1, int(side / ratio)) for side in (height, width))
    return -(-height // cell) * cell, -(-width // cell) * cell


def packed_images(images, patch_size, merge_size, normalize):
    """Patches of `images`, tensors (channels, rows, cols), in one sequence, and their grids."""
    patches = torch.cat([patchify(image[None, None], patch_size, merge_size, 1)[0] for image in images])
    # Cut before normalizing, which only looks at the channel: 8-bit pixels are a quarter of the memory traffic.
    pixels = finished_patches(patches, images[0].shape[0], normalize)
    grids = [[1, image.shape[-2] // patch_size, image.shape[-1] // patch_size] for image in images]
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def padded_images(images, do_pad, normalize):
    """`images`, tensors (channels, rows, cols), as one tensor or, without `do_pad`, as a list, and their sizes."""
    sizes = torch.tensor([image.shape[-2:] for image in images])
    images = [normalize(image) for image in images]
    if do_pad:
        height, width = sizes.amax(0).tolist()
        images = torch.stack(
            [
                torch.nn.functional.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]))
                for image in images
            ]
        )
    return {"pixel_values": images, "image_sizes": sizes}


class PixtralImageProcessor(SavesItsCode, PixtralImageRules, TorchvisionImages):
    """Pixtral image processor on torchvision: 8-bit until the end, equal sizes resized together."""

    hub_classes = {"AutoImageProcessor": "image_processing_pixtral.PixtralImageProcessor"}

    def _preprocess(
        self,
        images,
        do_resize,
        size,
        resample,
        do_rescale,
        rescale_factor,
        do_normalize,
        image_mean,
        image_std,
        do_pad,
        patch_size,
        spatial_merge_size,
        layout,
        normalize_on_device,
        disable_grouping,
        return_tensors,
        **kwargs,
    ):
        patch_size = patch_side(patch_size)
        groups, index = group_images_by_shape(images, disable_grouping=disable_grouping)
        for shape, stack in groups.items():
            sides = self.target_sides(*stack.shape[-2:], do_resize, size, patch_size * spatial_merge_size)
            if do_resize:
                groups[shape] = self.resize(stack, SizeDict(height=sides[0], width=sides[1]), resample=resample)
        images = reorder_images(groups, index)

        def normalize(pixels):
            if normalize_on_device:
                return pixels
            pixels = self.rescale_and_normalize(
                pixels, do_rescale, rescale_factor, do_normalize, image_mean, image_std
            )
            return pixels.float() if pixels.is_floating_point() else pixels

        if layout == "packed":
            data = packed_images(images, patch_size, spatial_merge_size, normalize)
        else:
            data = padded_images(images, do_pad, normalize)
        return BatchFeature(data, tensor_type=return_tensors)


class PixtralImageProcessorPil(SavesItsCode, PixtralImageRules, PilBackend):
    """Pixtral image processor on PIL and numpy: the same grids, resampled by Pillow."""

    hub_classes = {"AutoImageProcessor": "image_processing_pixtral.PixtralImageProcessorPil"}

    def process_image(self, image, do_rescale=True, input_data_format=None, **kwargs):
        return read_pixels(image, do_rescale, input_data_format).numpy()

    def _preprocess(
        self,
        images,
        do_resize,
        size,
        resample,
        do_rescale,
        rescale_factor,
        do_normalize,
        image_mean,
        image_std,
        do_pad,
        patch_size,
        spatial_merge_size,
        layout,
        normalize_on_device,
        return_tensors,
        **kwargs,
    ):
        patch_size = patch_side(patch_size)
        finished = []
        for image in images:
            sides = self.target_sides(*image.shape[-2:], do_resize, size, patch_size * spatial_merge_size)
            if do_resize:
                image = self.resize(image, SizeDict(height=sides[0], width=sides[1]), resample=resample)
            if do_rescale and not normalize_on_device:
                image = self.rescale(image, rescale_factor)
            if do_normalize and not normalize_on_device:
                image = self.normalize(image, image_mean, image_std)
            image = channels_first(image, "channels_first")
            finished.append(image.float() if image.is_floating_point() else image)
        if layout == "packed":
            data = packed_images(finished, patch_size, spatial_merge_size, normalize=lambda pixels: pixels)
        else:
            data = padded_images(finished, do_pad, normalize=lambda pixels: pixels)
        return BatchFeature(data, tensor_type=return_tensors)
