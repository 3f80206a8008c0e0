"""Towers run from tensors alone: all that follows from `grid_thw` is computed beforehand.

For graphs that must not look at values: `torch.compile(fullgraph=True)`, `torch.export`, CUDA graphs.
"""

import torch

from .patch_grids import UnseenFrames, checked_grid, input_positions


class RunsFromMetadata:
    """Mixin of the towers, which give `rotary(positions)`, `check_patches(pixel_values)` and `_encode`."""

    spatial_merge_size = 1
    packed_inputs = ("cos", "sin", "cu_seqlens", "max_seqlen")  # of the metadata, what `forward_packed` takes

    def on_this_device(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """`pixel_values` where the tower computes; of a tower that is offloaded accelerate has moved them already."""
        return pixel_values if self.device.type == "meta" else pixel_values.to(self.device)

    def packed_metadata(self, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
        """All that the tower needs to know of `grid_thw`, as tensors on the tower's device.

        Args:
            grid_thw: (num_images_or_videos, 3), int64, as `forward` takes it.

        Returns:
            `cos`, `sin` (num_patches, head_dim // 2), float32; `cu_seqlens` (num_frames + 1,), int32; `max_seqlen` (),
            int32, on the CPU, where kernels read it. LFM3-VL: also `neighbours` (num_patches, conv_kernel_size**2),
            int64. DeepSeek-V4: also `merge_index` and `merge_mask` (num_tokens, downsample_ratio**2), for the aligner.
            Everything is in the order of the input.

        Raises:
            ValueError: as `forward`.
        """
        grid = checked_grid(grid_thw, self.spatial_merge_size)
        cos, sin = self.rotary(input_positions(grid, self.spatial_merge_size, self.device))
        lengths = torch.tensor([0] + [rows * cols for steps, rows, cols in grid for _ in range(steps)])
        return {
            "cos": cos,
            "sin": sin,
            "cu_seqlens": lengths.cumsum(0, dtype=torch.int32).to(self.device),
            "max_seqlen": lengths.max().int(),
            **self.more_metadata(grid, self.device),
        }

    def more_metadata(self, grid: tuple[tuple[int, ...], ...], device: torch.device) -> dict[str, torch.Tensor]:
        """What this tower needs besides."""
        return {}

    def forward_packed(
        self,
        pixel_values: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: torch.Tensor | int,
        neighbours: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `forward`, from the tensors of [`packed_metadata`] alone: (num_patches, hidden_size).

        Nothing is read back from the device under a flash backend, nor under `sdpa` where PyTorch has a variable-length
        kernel (CUDA, half precision); elsewhere an operator that graphs need not look into reads `cu_seqlens`.
        """
        self.check_patches(pixel_values)
        frames = UnseenFrames(neighbours)
        return self._encode(pixel_values, cos, sin, cu_seqlens, frames, max_seqlen=max_seqlen).last_hidden_state
