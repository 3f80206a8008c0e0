"""What follows from `grid_thw`, against loops that spell it out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from gridtower.modeling.patch_grids import (
    PatchGrids,
    checked_grid,
    frame_boundaries,
    packed_frames,
    raster_positions,
    tower_permutations,
)

CPU = torch.device("cpu")
merges = st.integers(1, 3)
steps_and_blocks = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
ragged_grids = st.lists(steps_and_blocks, min_size=1, max_size=5)


def in_patches(blocks, merge):
    return tuple((steps, rows * merge, cols * merge) for steps, rows, cols in blocks)


def frames_of(grid):
    """(rows, columns) of every frame, in the order of the input."""
    return [(rows, cols) for steps, rows, cols in grid for _ in range(steps)]


def input_patches(grid, merge):
    """(frame, row, column) of every patch in the order of the input: frame by frame, block by block."""
    patches = []
    for frame, (rows, cols) in enumerate(frames_of(grid)):
        for block_row in range(0, rows, merge):
            for block_col in range(0, cols, merge):
                for row in range(block_row, block_row + merge):
                    for col in range(block_col, block_col + merge):
                        patches.append((frame, row, col))
    return patches


def tower_patches(grid):
    """(frame, row, column) of every patch in tower order: equal shapes together, short frames first, raster inside."""
    frames = frames_of(grid)
    order = sorted(range(len(frames)), key=lambda f: (frames[f][0] * frames[f][1], frames[f], f))
    return [(f, row, col) for f in order for row in range(frames[f][0]) for col in range(frames[f][1])]


def runs_of_equal(values):
    """(count, value) of every stretch of equal values."""
    runs = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0] + 1, value)
        else:
            runs.append((1, value))
    return runs


@given(ragged_grids, merges)
def test_patches_enter_the_tower_frame_by_frame_in_raster_order(blocks, merge):
    grid = in_patches(blocks, merge)
    entry, _ = tower_permutations(grid, merge, CPU)
    before = input_patches(grid, merge)
    assert [before[place] for place in entry.tolist()] == tower_patches(grid)


@given(ragged_grids, merges)
def test_leaving_undoes_entering(blocks, merge):
    grid = in_patches(blocks, merge)
    grids = PatchGrids(torch.tensor(grid), merge, sum(t * h * w for t, h, w in grid), CPU)
    patches = torch.arange(sum(t * h * w for t, h, w in grid))[:, None]
    assert torch.equal(grids.leave(grids.enter(patches)), patches)
    assert torch.equal(grids.enter(grids.leave(patches)), patches)


@given(ragged_grids, merges)
def test_positions_are_row_and_column(blocks, merge):
    grid = in_patches(blocks, merge)
    positions = raster_positions(grid, merge, CPU)
    assert positions.dtype == torch.int64
    assert positions.tolist() == [[row, col] for _, row, col in tower_patches(grid)]


@given(ragged_grids, merges)
def test_boundaries_lie_between_frames(blocks, merge):
    grid = in_patches(blocks, merge)
    boundaries = frame_boundaries(grid, merge, CPU)
    assert boundaries.dtype == torch.int32
    frame_of_patch = [frame for frame, _, _ in tower_patches(grid)]
    changes = [i for i in range(1, len(frame_of_patch)) if frame_of_patch[i] != frame_of_patch[i - 1]]
    assert boundaries.tolist() == [0, *changes, len(frame_of_patch)]


@given(ragged_grids, merges)
def test_equal_frames_lie_together_and_are_counted(blocks, merge):
    grid = in_patches(blocks, merge)
    frames = packed_frames(grid, merge)
    shapes = [frames_of(grid)[place] for place in frames.order]
    assert [(run.count, (run.rows, run.cols)) for run in frames.runs] == runs_of_equal(shapes)
    assert len({(run.rows, run.cols) for run in frames.runs}) == len(frames.runs)
    assert frames.lengths == [rows * cols for rows, cols in shapes]
    assert list(frames.segments) == runs_of_equal(frames.lengths)
    assert len({length for _, length in frames.segments}) == len(frames.segments)


@given(ragged_grids, merges)
def test_each_image_or_video_has_a_token_for_every_block(blocks, merge):
    frames = packed_frames(in_patches(blocks, merge), merge)
    assert frames.tokens_per_item == tuple(steps * rows * cols for steps, rows, cols in blocks)


@given(ragged_grids, merges)
def test_precomputed_positions_and_boundaries_of_transformers_change_nothing(blocks, merge):
    grid = torch.tensor(in_patches(blocks, merge))
    grids = PatchGrids(grid, merge, int(grid.prod(-1).sum()), CPU)
    precomputed = {
        "position_ids": get_vision_position_ids(grid, merge),
        "cu_seqlens": get_vision_cu_seqlens(grid),
        "max_seqlen": 7_777,
    }
    kwargs = dict(precomputed)
    positions, (boundaries, longest) = grids.tower_positions(kwargs), grids.tower_seqlens(kwargs)
    assert kwargs == {} and longest == 7_777
    assert torch.equal(positions, grids.tower_positions({}))
    own_boundaries, own_longest = grids.tower_seqlens({})
    assert torch.equal(boundaries, own_boundaries)
    assert own_longest == max(boundaries.diff().tolist())


@pytest.mark.parametrize(
    "grid, merge, num_patches, message",
    [
        ([[1, 4, 4], [1, 4, 6], [1, 5, 4]], 2, None, r"grid_thw\[2\] is \[1, 5, 4\]; .*merge size 2"),
        ([[1, 4, 4], [1, 6, 4]], 3, None, r"grid_thw\[0\]"),
        ([[1, 3, 3], [1, 3, 4]], 3, None, r"grid_thw\[1\] is \[1, 3, 4\].*patch_size \* 3"),
        ([[1, 2, 2], [0, 2, 2]], 1, None, r"grid_thw\[1\] is \[0, 2, 2\]; .*at least 1"),
        ([[1, -2, 2]], 1, None, r"grid_thw\[0\]"),
        ([1, 2, 2], 1, None, r"shape \(3,\) .*give \(number of images or videos, 3\)"),
        ([[2, 2]], 1, None, r"shape \(1, 2\)"),
        ([[1, 2, 2], [2, 2, 4]], 1, 19, "describes 20 patches and pixel_values holds 19"),
        ([[1.0, 2.0, 2.0]], 1, 4, "dtype torch.float32; give .* in int64"),
        (torch.zeros(0, 3, dtype=torch.long), 1, 0, "at least one row"),
    ],
)
def test_grids_that_no_tower_can_use_are_refused_by_index(grid, merge, num_patches, message):
    with pytest.raises(ValueError, match=message):
        checked_grid(torch.as_tensor(grid), merge, num_patches)


def test_cu_seqlens_of_whole_clips_are_refused():
    grid = torch.tensor([[3, 2, 2]])
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \(2,\) and the grids hold 3 frames"):
        PatchGrids(grid, 1, 12, CPU).tower_seqlens({"cu_seqlens": torch.tensor([0, 12])})


def test_position_ids_of_another_grid_are_refused():
    with pytest.raises(ValueError, match=r"position_ids has shape \(4, 3\).*\(12, 2\)"):
        PatchGrids(torch.tensor([[3, 2, 2]]), 1, 12, CPU).tower_positions({"position_ids": torch.zeros(4, 3).long()})


def test_what_inference_mode_built_can_be_trained_with():
    # no other test uses this grid, so that it is built here
    grid, merge, num_patches = ((1, 34, 38), (3, 38, 34)), 2, 4 * 34 * 38
    with torch.inference_mode():
        grids = PatchGrids(torch.tensor(grid), merge, num_patches, CPU)
        built = [*tower_permutations(grid, merge, CPU), grids.tower_positions({}), grids.tower_seqlens({})[0]]
    assert not any(tensor.is_inference() for tensor in built)
    weight = torch.ones(1, requires_grad=True)
    patches = torch.rand(num_patches, 1) * weight
    grids.leave(grids.enter(patches) * grids.tower_positions({})[:, :1]).sum().backward()
    assert weight.grad is not None


def test_a_grid_seen_again_is_not_built_again():
    grid = ((1, 2, 4), (2, 4, 4))
    assert raster_positions(grid, 2, CPU) is raster_positions(grid, 2, CPU)
    assert raster_positions(grid, 2, CPU) is not raster_positions(grid, 1, CPU)
