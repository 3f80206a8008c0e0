"""Sizes equal the published rules where those answer, and patches lie in merge-block order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as published_image_rule
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as published_video_rule

from gridtower.processing.patch_geometry import image_sides, patchify, video_sides

sides = st.integers(1, 5000)


@given(
    height=sides,
    width=sides,
    factor=st.sampled_from([14, 28, 32, 48]),
    budget=st.sampled_from([(1024, 100352), (65536, 16777216)]),
)
@settings(max_examples=400, deadline=None)
def test_image_sides_equal_the_published_rule(height, width, factor, budget):
    ours = image_sides(height, width, factor, *budget)
    if max(height, width) <= 200 * min(height, width):
        assert ours == published_image_rule(height, width, factor, *budget)
    assert min(ours) >= factor and ours[0] % factor == ours[1] % factor == 0


@given(
    steps=st.integers(1, 60),
    height=sides,
    width=sides,
    factor=st.sampled_from([28, 32]),
    temporal=st.sampled_from([1, 2]),
)
@settings(max_examples=400, deadline=None)
def test_video_sides_equal_the_published_rule_on_whole_steps(steps, height, width, factor, temporal):
    frames = steps * temporal
    ours = video_sides(frames, height, width, factor, temporal, 4096, 25165824)
    try:
        theirs = published_video_rule(frames, height, width, temporal, factor, 4096, 25165824)
    except ValueError:
        assert max(height, width) > 190 * min(height, width)
    else:
        assert ours == theirs
    assert min(ours) >= factor and ours[0] % factor == ours[1] % factor == 0


@pytest.mark.parametrize(
    "height, width", [(1, 1), (332, 27), (26, 28), (257, 27), (1, 1000), (1000, 1), (4000, 20), (1, 10**6)]
)
def test_extreme_aspects_give_at_least_one_cell_within_the_budget(height, width):
    for rule in (image_sides(height, width, 32, 65536, 16777216), video_sides(1, height, width, 32, 2, 4096, 8388608)):
        assert min(rule) >= 32
        assert rule[0] * rule[1] <= 16777216


def test_a_strip_beyond_the_published_aspect_fits_a_small_budget():
    assert image_sides(1, 1000, 32, 1024, 4096) == (32, 128)


@pytest.mark.parametrize("side", [(0, 5), (5, 0), (-1, 5)])
def test_empty_pictures_are_refused(side):
    with pytest.raises(ValueError, match=f"{side[0]} x {side[1]}"):
        image_sides(*side, 32, 1, 4096)
    with pytest.raises(ValueError, match=f"{side[0]} x {side[1]}"):
        video_sides(2, *side, 32, 2, 1, 4096)


@pytest.mark.parametrize("frames, padded", [(1, 2), (3, 4), (5, 6), (7, 8)])
def test_odd_frame_counts_are_sized_as_if_padded(frames, padded):
    bounds = (4096, 60000)
    assert video_sides(frames, 333, 222, 32, 2, *bounds) == video_sides(padded, 333, 222, 32, 2, *bounds)


def naive_patches(clip, patch, merge, temporal):
    """One clip (frames, channels, rows, cols), patch by patch, in nested loops."""
    frames, _, height, width = clip.shape
    found = []
    for start in range(0, frames, temporal):
        step = [clip[min(start + offset, frames - 1)] for offset in range(temporal)]
        for block_row in range(0, height, patch * merge):
            for block_col in range(0, width, patch * merge):
                for row in range(block_row, block_row + patch * merge, patch):
                    for col in range(block_col, block_col + patch * merge, patch):
                        cut = [frame[:, row : row + patch, col : col + patch] for frame in step]
                        found.append(np.stack(cut, axis=1).ravel())  # (channels, temporal, row, col)
    return np.stack(found)


@given(
    frames=st.integers(1, 7),
    rows=st.integers(1, 3),
    cols=st.integers(1, 3),
    patch=st.integers(1, 4),
    merge=st.integers(1, 3),
    temporal=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_patches_equal_a_naive_loop(frames, rows, cols, patch, merge, temporal):
    shape = (2, frames, 3, rows * patch * merge, cols * patch * merge)
    clips = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    patches = patchify(torch.from_numpy(clips), patch, merge, temporal).numpy()
    for clip, ours in zip(clips, patches):
        np.testing.assert_array_equal(ours, naive_patches(clip, patch, merge, temporal))
