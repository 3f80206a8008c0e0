"""LFM3-VL images -> packed patches: resize by the Qwen2-VL rule at native resolution, normalize, cut into patches."""

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_transforms import group_images_by_shape, reorder_images
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from ..configuration.flat_code import SavesItsCode
from .any_image import HALF, ReadsAnyImage, TorchvisionImages, check_normalized_on_device
from .media_loading import channels_first, read_pixels
from .patch_geometry import finished_patches, image_sides, patchify, pixel_bounds


class Lfm3VlImageProcessorKwargs(ImagesKwargs, total=False):
    """`min_pixels` and `max_pixels` are other names for `size["shortest_edge"]` and `size["longest_edge"]`."""

    min_pixels: int | None
    max_pixels: int | None
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    normalize_on_device: bool


class Lfm3VlImageRules(ReadsAnyImage):
    """What both backends share: defaults, bounds, reading of any image, grids.

    `size` holds areas in pixels despite the names of its keys. A picture is always converted to RGB; with
    `do_rescale=False` floating arrays are taken as they are, otherwise every value is brought to 8 bits first.

    `normalize_on_device` (default False): leave the pixels uint8, a quarter of the bytes; the model's tower normalizes
    them, with a mean and a deviation of 0.5.
    """

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    default_to_square = False
    do_rescale = True
    do_normalize = True
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    do_convert_rgb = True
    patch_size = 16
    temporal_patch_size = 2
    merge_size = 2
    normalize_on_device = False
    valid_kwargs = Lfm3VlImageProcessorKwargs
    model_input_names = ["pixel_values", "image_grid_thw"]

    def __init__(self, size=None, min_pixels=None, max_pixels=None, **kwargs):
        super().__init__(size=pixel_bounds(size, type(self).size, min_pixels, max_pixels), **kwargs)

    # The aliases read `size`, so that the two never disagree. Before `size` is set they are unknown.
    @property
    def min_pixels(self):
        return self.__dict__["size"]["shortest_edge"] if "size" in self.__dict__ else None

    @property
    def max_pixels(self):
        return self.__dict__["size"]["longest_edge"] if "size" in self.__dict__ else None

    def _standardize_kwargs(self, min_pixels=None, max_pixels=None, **kwargs):
        # Both aliases have been folded into `size` by now; what arrives here are the configured ones.
        return check_normalized_on_device(super()._standardize_kwargs(**kwargs), HALF)

    def preprocess(self, images, size=None, min_pixels=None, max_pixels=None, **kwargs):
        """Turns images into packed patches.

        Args:
            images: one image or a list (of lists) of them: paths, URLs, bytes, base64, PIL, numpy, torch.
            size, min_pixels, max_pixels: area bounds for this call alone.
            kwargs: any attribute of the processor, for this call alone.

        Returns:
            `BatchFeature` with `pixel_values` float32, uint8 with `normalize_on_device`, (patches, channels *
            temporal_patch_size * patch_size**2) and `image_grid_thw` int64 (images, 3), in patches.

        Raises:
            ValueError: an unreadable image, impossible bounds; names the image.
        """
        bounds = pixel_bounds(size, self.size, min_pixels, max_pixels)
        return super().preprocess(images, size=bounds, **kwargs)

    def target_sides(self, height, width, do_resize, size, patch_size, merge_size):
        """Sides of an image after resizing; without resizing they must already be multiples of the merged cell."""
        factor = patch_size * merge_size
        if do_resize:
            return image_sides(height, width, factor, size["shortest_edge"], size["longest_edge"])
        if height % factor or width % factor:
            raise ValueError(
                f"an image of {height} x {width} pixels cannot be cut into cells of {factor} x {factor}; leave "
                "do_resize on, or pass sides that are multiples"
            )
        return height, width

    def image_grid(self, height, width, images_kwargs=None):
        """(rows, columns) of patches of an image of `height` x `width` pixels, under the overrides in `images_kwargs`."""
        given = images_kwargs or {}
        size = pixel_bounds(given.get("size"), self.size, given.get("min_pixels"), given.get("max_pixels"))
        do_resize, patch_size, merge_size = (
            getattr(self, name) if given.get(name) is None else given[name]
            for name in ("do_resize", "patch_size", "merge_size")
        )
        rows, cols = self.target_sides(height, width, do_resize, size, patch_size, merge_size)
        return rows // patch_size, cols // patch_size

    def get_number_of_image_patches(self, height, width, images_kwargs=None):
        """Patches of an image of `height` x `width` pixels, under the overrides in `images_kwargs`."""
        rows, cols = self.image_grid(height, width, images_kwargs)
        return rows * cols


class Lfm3VlImageProcessor(SavesItsCode, Lfm3VlImageRules, TorchvisionImages):
    """LFM3-VL image processor on torchvision: 8-bit throughout, equal sizes resized together."""

    hub_classes = {"AutoImageProcessor": "image_processing_lfm3_vl.Lfm3VlImageProcessor"}

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
        patch_size,
        temporal_patch_size,
        merge_size,
        normalize_on_device,
        disable_grouping,
        return_tensors,
        **kwargs,
    ):
        groups, index = group_images_by_shape(images, disable_grouping=disable_grouping)
        patches, grids = {}, {}
        for shape, stack in groups.items():
            rows, cols = self.target_sides(*stack.shape[-2:], do_resize, size, patch_size, merge_size)
            if do_resize:
                stack = self.resize(stack, SizeDict(height=rows, width=cols), resample=resample)
            # Cut 8-bit pixels, and convert at the end: a quarter of the memory traffic of cutting floats.
            patches[shape] = patchify(stack[:, None], patch_size, merge_size, 1)
            grids[shape] = [[1, rows // patch_size, cols // patch_size]] * len(stack)

        def normalize(pixels):
            if normalize_on_device:
                return pixels
            return self.rescale_and_normalize(pixels, do_rescale, rescale_factor, do_normalize, image_mean, image_std)

        packed = torch.cat(reorder_images(patches, index))
        pixels = finished_patches(packed, images[0].shape[0], normalize, temporal_patch_size)
        data = {"pixel_values": pixels, "image_grid_thw": torch.tensor(reorder_images(grids, index)).view(-1, 3)}
        return BatchFeature(data, tensor_type=return_tensors)


class Lfm3VlImageProcessorPil(SavesItsCode, Lfm3VlImageRules, PilBackend):
    """LFM3-VL image processor on PIL and numpy: the same grids, resampled by Pillow."""

    hub_classes = {"AutoImageProcessor": "image_processing_lfm3_vl.Lfm3VlImageProcessorPil"}

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
        patch_size,
        temporal_patch_size,
        merge_size,
        normalize_on_device,
        return_tensors,
        **kwargs,
    ):
        patches, grids = [], []
        for image in images:
            rows, cols = self.target_sides(*image.shape[-2:], do_resize, size, patch_size, merge_size)
            if do_resize:
                image = self.resize(image, SizeDict(height=rows, width=cols), resample=resample)
            if do_rescale and not normalize_on_device:
                image = self.rescale(image, rescale_factor)
            if do_normalize and not normalize_on_device:
                image = self.normalize(image, image_mean, image_std)
            frames = channels_first(image, "channels_first")[None, None]
            frames = frames if normalize_on_device else frames.to(torch.float32)
            patches.append(patchify(frames, patch_size, merge_size, 1)[0])
            grids.append([1, rows // patch_size, cols // patch_size])
        pixels = finished_patches(torch.cat(patches), images[0].shape[0], lambda few: few, temporal_patch_size)
        data = {"pixel_values": pixels.numpy(), "image_grid_thw": np.array(grids).reshape(-1, 3)}
        return BatchFeature(data, tensor_type=return_tensors)
