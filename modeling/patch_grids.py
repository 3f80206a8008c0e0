"""Everything that follows from `grid_thw` by integer arithmetic.

`grid_thw` holds one row (temporal steps, rows, columns) per image or video, in patches. Each temporal step is a *frame*:
attention and convolution stay inside it. Towers receive patches in merge-block order (each block of
`spatial_merge_size**2` patches contiguous, blocks in raster order) and work in *tower order*: frames of one shape next
to each other, patches of a frame in raster order, so that equal frames form one batch without a copy. Nothing here has
parameters; what is built is cached per distinct grid.
"""

from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import NamedTuple

import torch

# Batches repeat few grids, and an entry holds some integers for every patch.
_CACHED_GRIDS = 32


def once_per_grid(build):
    """Keep what `build` returns for the last few grids.

    Not while a graph is traced: its tensors are not real. And never as inference tensors, which a later backward pass
    could not save.
    """
    cached = lru_cache(maxsize=_CACHED_GRIDS)(build)

    @wraps(build)
    def look_up(*arguments):
        if torch.compiler.is_compiling():
            return build(*arguments)
        with torch.inference_mode(False):
            return cached(*arguments)

    return look_up


class FrameRun(NamedTuple):
    """Frames of one shape that lie next to each other in tower order."""

    count: int
    rows: int
    cols: int


class UnseenFrames(NamedTuple):
    """In place of [`PackedFrames`] where only tensors may be looked at: a traced graph, or one that a GPU replays.

    `neighbours` (num_patches, kernel**2), int64: see [`neighbouring_patches`]; None for towers without convolutions.
    """

    neighbours: torch.Tensor | None = None
    segments = None


@dataclass(frozen=True)
class PackedFrames:
    """Frames of a packed batch in tower order, as plain integers.

    `runs` lists the frames by shape, `order` says at which place of the input each of them stood, `tokens_per_item`
    counts the merged cells of each image or video.
    """

    runs: tuple[FrameRun, ...]
    order: tuple[int, ...]
    tokens_per_item: tuple[int, ...]
    neighbours = None

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(number of frames, patches in each) for every stretch of frames of equal length."""
        merged = []
        for count, rows, cols in self.runs:
            if merged and merged[-1][1] == rows * cols:
                merged[-1] = (merged[-1][0] + count, rows * cols)
            else:
                merged.append((count, rows * cols))
        return tuple(merged)

    @property
    def lengths(self) -> list[int]:
        """Patches of each frame."""
        return [rows * cols for count, rows, cols in self.runs for _ in range(count)]


def checked_grid(grid_thw: torch.Tensor, merge: int, num_patches: int | None = None) -> tuple[tuple[int, ...], ...]:
    """`grid_thw` as a tuple of (temporal steps, rows, columns), after the checks that a tower relies on.

    Raises:
        ValueError: there is none, the shape is not (n, 3) with n above 0, the values are no whole numbers, a side is below 1 or does
            not divide by `merge`, or the grids describe another number of patches than `num_patches`.
    """
    if grid_thw is None:
        raise ValueError("The pixels came without their grid; pass what the processor returned together.")
    if not isinstance(grid_thw, torch.Tensor):
        grid_thw = torch.as_tensor(grid_thw)
    if grid_thw.ndim != 2 or grid_thw.shape[1] != 3 or len(grid_thw) == 0 or grid_thw.is_floating_point():
        raise ValueError(
            f"grid_thw has shape {tuple(grid_thw.shape)} and dtype {grid_thw.dtype}; give (number of images or videos, 3) "
            "in int64, at least one row, each being (temporal steps, rows, columns) in patches."
        )
    grid = tuple(map(tuple, grid_thw.tolist()))
    for index, (steps, rows, cols) in enumerate(grid):
        if min(steps, rows, cols) < 1 or rows % merge or cols % merge:
            raise ValueError(
                f"grid_thw[{index}] is {[steps, rows, cols]}; temporal steps, rows and columns must be at least 1 and "
                f"rows and columns must divide by the merge size {merge}. Resize the image to multiples of "
                f"patch_size * {merge}."
            )
    described = sum(steps * rows * cols for steps, rows, cols in grid)
    if num_patches is not None and described != num_patches:
        raise ValueError(
            f"grid_thw describes {described} patches and pixel_values holds {num_patches}; pass the two that the "
            "processor returned together."
        )
    return grid


@once_per_grid
def packed_frames(grid: tuple[tuple[int, ...], ...], merge: int) -> PackedFrames:
    """The frames of a checked grid in tower order: by length, then shape, then place in the input."""
    frames = [(rows * cols, rows, cols) for steps, rows, cols in grid for _ in range(steps)]
    order = sorted(range(len(frames)), key=lambda index: (frames[index], index))
    runs: list[FrameRun] = []
    for index in order:
        _, rows, cols = frames[index]
        if runs and runs[-1][1:] == (rows, cols):
            runs[-1] = FrameRun(runs[-1].count + 1, rows, cols)
        else:
            runs.append(FrameRun(1, rows, cols))
    tokens = tuple(steps * rows * cols // merge**2 for steps, rows, cols in grid)
    return PackedFrames(tuple(runs), tuple(order), tokens)


@once_per_grid
def frame_groups(runs: tuple[FrameRun, ...], room: int) -> tuple[PackedFrames, ...]:
    """The frames of `runs`, whole and in order, in groups of up to `room` patches; a longer frame is one of its own."""
    groups, filled = [[]], 0
    for count, rows, cols in runs:
        while count > 0:
            fitting = (room - filled) // (rows * cols)
            if fitting < 1 and filled > 0:
                groups.append([])
                filled = 0
                continue
            taken = min(count, max(1, fitting))
            groups[-1].append(FrameRun(taken, rows, cols))
            filled += taken * rows * cols
            count -= taken
    return tuple(PackedFrames(tuple(group), (), ()) for group in groups)


@once_per_grid
def tower_permutations(
    grid: tuple[tuple[int, ...], ...], merge: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two index vectors (num_patches,): `x[entry]` brings input order to tower order, `y[leave]` brings it back."""
    frames = [(rows, cols) for steps, rows, cols in grid for _ in range(steps)]
    starts = torch.tensor([0] + [rows * cols for rows, cols in frames]).cumsum(0).tolist()
    order = packed_frames(grid, merge).order
    entry = torch.cat([starts[index] + _raster_order(*frames[index], merge) for index in order])
    return entry.to(device), torch.argsort(entry).to(device)


@once_per_grid
def raster_positions(grid: tuple[tuple[int, ...], ...], merge: int, device: torch.device) -> torch.Tensor:
    """(row, column) of every patch in tower order: (num_patches, 2), int64."""
    positions = []
    for count, rows, cols in packed_frames(grid, merge).runs:
        positions.append(torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).view(-1, 2).repeat(count, 1))
    return torch.cat(positions).to(device)


def input_positions(grid: tuple[tuple[int, ...], ...], merge: int, device: torch.device) -> torch.Tensor:
    """As [`raster_positions`], in the order of the input."""
    return raster_positions(grid, merge, device)[tower_permutations(grid, merge, device)[1]]


@once_per_grid
def frame_boundaries(grid: tuple[tuple[int, ...], ...], merge: int, device: torch.device) -> torch.Tensor:
    """`cu_seqlens` of the frames in tower order: (num_frames + 1,), int32, starting at 0."""
    lengths = torch.tensor([0] + packed_frames(grid, merge).lengths)
    return lengths.cumsum(0, dtype=torch.int32).to(device)


@once_per_grid
def covering_blocks(
    grid: tuple[tuple[int, ...], ...], ratio: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `ratio` x `ratio` patches that cover each frame, over its right and bottom edge where it does not divide.

    Returns:
        which patch of the input, raster order within a frame, stands at each place of each block (num_blocks, ratio**2),
        int64; and whether one stands there, bool. Blocks and places are in raster order.
    """
    places, start = [], 0
    for steps, rows, cols in grid:
        for _ in range(steps):
            block_rows, block_cols = -(-rows // ratio), -(-cols // ratio)
            frame = torch.full((block_rows * ratio, block_cols * ratio), -1)
            frame[:rows, :cols] = torch.arange(start, start + rows * cols).view(rows, cols)
            # (block_rows, ratio, block_cols, ratio) -> (blocks, ratio**2)
            places.append(frame.view(block_rows, ratio, block_cols, ratio).transpose(1, 2).reshape(-1, ratio**2))
            start += rows * cols
    index = torch.cat(places).to(device)
    return index.clamp(min=0), index >= 0


@once_per_grid
def neighbouring_patches(
    grid: tuple[tuple[int, ...], ...], merge: int, kernel: int, device: torch.device
) -> torch.Tensor:
    """What lies under each place of a kernel's window around each patch: (num_patches, kernel**2), int64.

    One above the neighbour's place in the input, in merge-block order; 0 beyond the border of the frame. Places of the
    window are in raster order.
    """
    reach, start, tables = kernel // 2, 1, []
    for steps, rows, cols in grid:
        order = _raster_order(rows, cols, merge)
        for _ in range(steps):
            bordered = torch.zeros(rows + 2 * reach, cols + 2 * reach, dtype=torch.int64)
            bordered[reach : reach + rows, reach : reach + cols] = start + order.view(rows, cols)
            # (rows, cols, kernel, kernel) -> (rows * cols, kernel**2), raster order
            windows = bordered.unfold(0, kernel, 1).unfold(1, kernel, 1).reshape(rows * cols, -1)
            tables.append(windows[torch.argsort(order)])
            start += rows * cols
    return torch.cat(tables).to(device)


def _raster_order(rows: int, cols: int, merge: int) -> torch.Tensor:
    """Where each patch of a frame, taken in raster order, stands in merge-block order: (rows * cols,)."""
    blocks = torch.arange(rows * cols).view(rows // merge, cols // merge, merge, merge)
    return blocks.transpose(1, 2).reshape(-1)


class PatchGrids:
    """The grids of one packed batch: what a tower needs on entry, and the way back to the input's order on exit.

    Args:
        grid_thw: (num_images_or_videos, 3), int64.
        merge: side of a merge block, in patches.
        num_patches: rows of `pixel_values`, checked against the grids; None where there are none yet.
        device: where the tower computes.
    """

    def __init__(self, grid_thw: torch.Tensor, merge: int, num_patches: int | None, device: torch.device):
        grid = checked_grid(grid_thw, merge, num_patches)
        self.frames = packed_frames(grid, merge)
        self._key = (grid, merge, device)
        # patches[entry] is in tower order; towers index where they embed, as a copy made before would outlive all layers.
        self.entry, self._leave = tower_permutations(*self._key)

    def enter(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches (num_patches, ...) from the input's order to tower order."""
        return patches[self.entry]

    def leave(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches (num_patches, ...) from tower order to the input's order."""
        return patches[self._leave.to(patches.device)]

    def tower_positions(self, kwargs: dict) -> torch.Tensor:
        """(row, column) of every patch in tower order; a precomputed `position_ids` (input order) is popped and used."""
        position_ids = kwargs.pop("position_ids", None)
        if position_ids is None:
            return raster_positions(*self._key)
        expected = (len(self.entry), 2)
        if position_ids.shape != expected:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; give the (row, column) of each patch, {expected}."
            )
        return self.enter(position_ids)

    def tower_seqlens(self, kwargs: dict) -> tuple[torch.Tensor, int]:
        """Boundaries and greatest length of the frames in tower order; the precomputed `max_seqlen` is popped and used.

        A precomputed `cu_seqlens` is popped and checked for its length only: it follows from the grids, and its order
        is that of the input.
        """
        boundaries = frame_boundaries(*self._key)
        cu_seqlens = kwargs.pop("cu_seqlens", None)
        if cu_seqlens is not None and cu_seqlens.shape != boundaries.shape:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and the grids hold {len(boundaries) - 1} frames; every "
                f"temporal step is a segment of its own, so give {tuple(boundaries.shape)}."
            )
        max_seqlen = kwargs.pop("max_seqlen", None)
        return boundaries, max(self.frames.lengths) if max_seqlen is None else max_seqlen

    def leave_outputs(self, outputs):
        """A tower's outputs in the input's order: hidden states by patch, attention maps by frame and by patch in it."""
        outputs.last_hidden_state = self.leave(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(
                None if states is None else self.leave(states) for states in outputs.hidden_states
            )
        if outputs.attentions is not None:
            outputs.attentions = tuple(map(self._leave_maps, outputs.attentions))
        return outputs

    def _leave_maps(self, maps: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        if maps is None:
            return None
        shapes = [(rows, cols) for count, rows, cols in self.frames.runs for _ in range(count)]
        merge = self._key[1]
        placed = {}
        for place, shape, weights in zip(self.frames.order, shapes, maps):
            back = torch.argsort(_raster_order(*shape, merge)).to(weights.device)
            placed[place] = weights[:, :, back][..., back]
        return tuple(placed[place] for place in sorted(placed))
