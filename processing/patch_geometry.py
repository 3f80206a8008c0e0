"""From picture sizes to patch grids and from frames to packed patches: integer arithmetic and one permutation.

The sizes are those of the Qwen2-VL image rule and the Qwen3-VL video rule (both in transformers), with one addition:
any aspect ratio gives at least one merged cell.
"""

import math

# Beyond this ratio the published rules refuse; here the longer side gives way to the pixel budget instead.
EXTREME_ASPECT = 200
_PATCHES_AT_A_TIME = 512


def pixel_bounds(size, default, min_pixels=None, max_pixels=None):
    """The area bounds as `{"shortest_edge", "longest_edge"}`; what is not given comes from `default`.

    Raises:
        ValueError: an unknown key, a bound below 1, or bounds in the wrong order.
    """
    given = dict(size or {})
    bounds = dict(default)
    for edge, alias, value in (
        ("shortest_edge", "min_pixels", min_pixels),
        ("longest_edge", "max_pixels", max_pixels),
    ):
        candidates = (value, given.pop(alias, None), given.pop(edge, None))
        bounds[edge] = next((bound for bound in candidates if bound is not None), bounds[edge])
    if given or not 1 <= bounds["shortest_edge"] <= bounds["longest_edge"]:
        raise ValueError(
            f"size {bounds | given} is not a pair of pixel areas: pass shortest_edge (or min_pixels) and longest_edge "
            "(or max_pixels) with 1 <= shortest_edge <= longest_edge, and nothing else"
        )
    return bounds


def sides_within_budget(height, width, factor, min_pixels, max_pixels, frames=1):
    """Sides rounded to multiples of `factor` (ties to even), then rescaled if `frames` of them miss the budget."""
    rows = round(height / factor) * factor
    cols = round(width / factor) * factor
    if frames * rows * cols > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        cols = max(factor, math.floor(width / shrink / factor) * factor)
    elif frames * rows * cols < min_pixels:
        # A side that rounds to nothing comes here too (bounds are at least 1): rounding up leaves one cell.
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        cols = math.ceil(width * grow / factor) * factor
    if max(height, width) <= EXTREME_ASPECT * min(height, width):
        return rows, cols
    longest = max(factor, max_pixels // (frames * min(rows, cols)) // factor * factor)
    return min(rows, longest), min(cols, longest)


def image_sides(height, width, factor, min_pixels, max_pixels):
    """Sides in pixels to which an image is resized (the Qwen2-VL rule).

    Args:
        height, width: sides of the image, at least 1.
        factor: patch_size * merge_size; both results are multiples of it.
        min_pixels, max_pixels: bounds of the area. Aspect ratios up to 200 may pass them as in the published rule.

    Raises:
        ValueError: a side below 1.
    """
    refuse_empty(height, width)
    return sides_within_budget(height, width, factor, min_pixels, max_pixels)


def video_sides(num_frames, height, width, factor, temporal_factor, min_pixels, max_pixels):
    """Sides in pixels to which the frames of a clip are resized (the Qwen3-VL rule).

    As `image_sides`, with the bounds counting the pixels of the whole clip and sides below `factor` enlarged first.
    `num_frames` is rounded up to `temporal_factor` before anything is measured, since the last frame is repeated
    (diff -> the published rule rounds 5 frames to 4 and refuses a single one).
    """
    refuse_empty(height, width)
    num_frames = padded_frames(num_frames, temporal_factor)
    if height < factor or width < factor:
        enlarge = max(factor / height, factor / width)
        height, width = int(height * enlarge), int(width * enlarge)
    return sides_within_budget(height, width, factor, min_pixels, max_pixels, frames=num_frames)


def refuse_empty(height, width):
    if height < 1 or width < 1:
        raise ValueError(f"a picture of {height} x {width} pixels has nothing to show; both sides must be at least 1")


def padded_frames(num_frames, temporal_patch_size):
    """Frames after the last one is repeated up to a multiple of `temporal_patch_size`."""
    return num_frames + -num_frames % temporal_patch_size


def finished_patches(patches, channels, normalize, repeats=1):
    """8-bit patches as the tower takes them, in one pass.

    Args:
        patches: tensor (num_patches, channels * area).
        normalize: from (some patches, channels, area, 1) to its values, of the same shape.
        repeats: how often each channel's values follow one another, the temporal frames of a still.

    Returns:
        Tensor (num_patches, channels * repeats * area), of the dtype that `normalize` gives.
    """
    area = patches.shape[1] // channels
    finished = None
    # A few at a time: what normalizing makes in between stays in the processor's cache.
    for start in range(0, len(patches), _PATCHES_AT_A_TIME):
        values = normalize(patches[start : start + _PATCHES_AT_A_TIME].view(-1, channels, area, 1)).squeeze(-1)
        if finished is None:
            finished = values.new_empty(len(patches), channels, repeats, area)
        finished[start : start + len(values)] = values[:, :, None]
    return finished.flatten(1)


def patchify(frames, patch_size, merge_size, temporal_patch_size):
    """Cuts clips of equal size into flattened patches in merge-block order.

    Args:
        frames: tensor (clips, frames, channels, rows, cols); rows and cols multiples of patch_size * merge_size.

    Returns:
        Tensor (clips, patches, channels * temporal_patch_size * patch_size**2) of the same dtype, the last axis in
        the order (channel, temporal, row, col). Each merge_size x merge_size block of patches is contiguous, blocks
        run in raster order, temporal steps come one after another.
    """
    if missing := -frames.shape[1] % temporal_patch_size:
        frames = frames[:, [*range(frames.shape[1]), *[-1] * missing]]
    clips, num_frames, channels, height, width = frames.shape
    steps, rows, cols = num_frames // temporal_patch_size, height // patch_size, width // patch_size
    patches = frames.reshape(
        clips,
        steps,
        temporal_patch_size,
        channels,
        rows // merge_size,
        merge_size,
        patch_size,
        cols // merge_size,
        merge_size,
        patch_size,
    )
    # (clips, steps, block row, block col, row in block, col in block, channels, temporal, row, col)
    patches = patches.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return patches.reshape(clips, steps * rows * cols, channels * temporal_patch_size * patch_size**2)
