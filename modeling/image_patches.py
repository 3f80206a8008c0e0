"""Whole images, as other libraries pass them, cut into the packed patches that a tower reads."""

import torch

from .patch_grids import checked_grid


def patches_of_images(
    images: torch.Tensor | list[torch.Tensor], image_sizes, patch_size: int, channels: int, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of images in merge-block order, and their grid.

    Args:
        images: a list of (channels, height, width), or (num_images, channels, height, width) padded at the right and
            bottom.
        image_sizes: (num_images, 2), height and width of each without padding, in pixels; None: all of each image.
        patch_size: side of a patch, in pixels; a rest of less than one patch is left out.
        merge: side of a merge block, in patches; 1 gives raster order.

    Returns:
        (num_patches, channels * patch_size**2), each row ordered (channel, row, column), and (num_images, 3), int64.

    Raises:
        ValueError: sizes and images do not fit together, or a side does not divide by the merge size.
    """
    if isinstance(images, torch.Tensor) and images.ndim != 4:
        raise ValueError(
            f"pixel_values has shape {tuple(images.shape)} and came without a grid; give packed patches together with their "
            f"grid, or images (num_images, {channels}, height, width)."
        )
    if image_sizes is None:
        image_sizes = [image.shape[-2:] for image in images]
    sizes = [(int(height), int(width)) for height, width in image_sizes]
    if len(sizes) != len(images):
        raise ValueError(
            f"image_sizes holds {len(sizes)} sizes and pixel_values {len(images)} images; give one for each."
        )
    for index, (image, (height, width)) in enumerate(zip(images, sizes)):
        if image.ndim != 3 or image.shape[0] != channels:
            raise ValueError(f"Image {index} has shape {tuple(image.shape)}; give ({channels}, height, width).")
        if height > image.shape[1] or width > image.shape[2]:
            raise ValueError(
                f"image_sizes[{index}] is {[height, width]} and the image only {list(image.shape[1:])}; sizes are heights and "
                "widths in pixels, without padding."
            )
    grid_thw = torch.tensor([(1, height // patch_size, width // patch_size) for height, width in sizes])
    packed = []
    for image, (_, rows, cols) in zip(images, checked_grid(grid_thw, merge)):
        cut = image[:, : rows * patch_size, : cols * patch_size]
        # (channels, block rows, merge, patch_size, block columns, merge, patch_size)
        cut = cut.reshape(channels, rows // merge, merge, patch_size, cols // merge, merge, patch_size)
        packed.append(cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * cols, -1))
    return torch.cat(packed), grid_thw
