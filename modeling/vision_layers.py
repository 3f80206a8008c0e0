"""What the towers share: entry of pixels, RMSNorm, axial rotary embedding (RoFormer, one axis per half), grouping."""

from functools import lru_cache, wraps

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .patch_grids import frame_groups

# What a CPU works on at a time: float32 values of a norm, which its cache holds, and a layer's input states.
_VALUES_OF_A_BLOCK = 2**19
_BYTES_OF_A_GROUP = 2**22


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis, then scales by a learned weight.

    Mean, root, division and scale run in float32; the result is rounded once, to the input's dtype. `dtype` is the
    weight's, where a checkpoint has it in another than its model's.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        if hidden_states.is_cpu and not torch.compiler.is_compiling():
            return _RMSNormInBlocks.apply(hidden_states, weight, self.eps)[0]
        return F.rms_norm(hidden_states.float(), weight.shape, weight, self.eps).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class _RMSNormInBlocks(torch.autograd.Function):
    """RMSNorm on CPUs, where PyTorch composes `rms_norm`: here float32 copies are of a few rows and stay in the cache.

    Returns the normed states and, for backward, each row's inverse root mean square (num_rows, 1). It can be
    differentiated once.
    """

    @staticmethod
    def forward(states, weight, eps):
        normed = torch.empty_like(states, memory_format=torch.contiguous_format)
        inverses = torch.empty(states.numel() // len(weight), 1)
        for block, place, inverse in _row_blocks(states, normed, inverses):
            wide = block.float()
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=inverse)
            inverse.square_().div_(len(weight)).add_(eps).rsqrt_()
            scaled = torch.mul(wide, inverse, out=place if wide is block else wide)
            place.copy_(scaled.mul_(weight))
        return normed, inverses

    @staticmethod
    def setup_context(ctx, inputs, output):
        states, weight, _ = inputs
        _, inverses = output
        ctx.mark_non_differentiable(inverses)
        ctx.save_for_backward(states, weight, inverses)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        states, weight, inverses = ctx.saved_tensors
        states_gradient = torch.empty_like(states, memory_format=torch.contiguous_format)
        weight_gradient = torch.zeros_like(weight)
        for block, outer, place, inverse in _row_blocks(states, gradient, states_gradient, inverses):
            wide, directions = outer.float(), block.float() * inverse
            along = wide * directions
            if ctx.needs_input_grad[1]:
                weight_gradient += along.sum(0)
            scaled = torch.mul(wide, weight, out=place if wide is outer else wide)
            # What points along a row's own direction changes its length, which the norm takes out again.
            scaled.addcmul_(directions, along.mv(weight)[:, None], value=-1 / len(weight))
            place.copy_(scaled.mul_(inverse))
        return states_gradient, weight_gradient, None


def _row_blocks(states: torch.Tensor, *others: torch.Tensor):
    """The same rows of every tensor, some at a time."""
    rows = max(1, _VALUES_OF_A_BLOCK // states.shape[-1])
    return zip(*(tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in (states, *others)))


def normalized(patches: torch.Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Patches (num_patches, channels * area) in `dtype`; raw uint8 ones as a processor would have given them.

    Those are brought from 0..255 to 0..1 and normalised by channel in float32, and rounded once.
    """
    if patches.dtype != torch.uint8:
        return patches.to(dtype)
    mean, std = (by_pixel(values, patches) for values in (mean, std))
    return ((patches / 255 - mean) / std).to(dtype)


def by_pixel(values: list[float], patches: torch.Tensor) -> torch.Tensor:
    """A value of each channel, repeated for each of its pixels in a patch: (channels * area,), float32."""
    return torch.tensor(values, device=patches.device).repeat_interleave(patches.shape[1] // len(values))


@lru_cache
def axial_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Rotation per patch of every pair of one axis: (head_dim // 4,), float32, on the CPU.

    No buffer holds them, so no cast of a model and no load through the meta device can change them.
    """
    axis_dim = head_dim // 2
    with torch.inference_mode(False), torch.device("cpu"):
        return theta ** -(torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim)


def axial_rotary(positions: torch.Tensor, theta: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for `positions` (num_patches, 2): two tensors (num_patches, head_dim // 2), float32.

    Row frequencies fill the first half, column frequencies the second.
    """
    frequencies = axial_frequencies(theta, head_dim).to(positions.device)
    angles = (positions[..., None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


@lru_cache
def alternating_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Rotation per patch of every pair: (2, head_dim // 4), float32, on the CPU.

    The frequencies of a whole head are dealt out in turn: those of even index to rows, those of odd index to columns.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return frequencies.view(-1, 2).T.contiguous()


def alternating_rotary(positions: torch.Tensor, theta: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`axial_rotary`], with Pixtral's frequencies."""
    frequencies = alternating_frequencies(theta, head_dim).to(positions.device)
    angles = (positions[..., None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim // 2) of `heads` (num_patches, num_heads, head_dim), in float32."""
    cos, sin = torch.cat([cos, cos], dim=1)[:, None], torch.cat([-sin, sin], dim=1)[:, None]
    wide = heads.float()
    partners = wide.roll(heads.shape[-1] // 2, dims=-1)
    return (wide * cos).addcmul_(partners, sin).to(heads.dtype)


def group_by_group(forward):
    """For a layer's `forward`: on a CPU, take a few frames after the other, so that what it makes stays in the cache.

    A batch at once would write each of a layer's products to memory and read it back. Only under `sdpa`: `eager` keeps
    the attention maps of whole batches, and boundaries for variable-length kernels are those of the whole batch.
    """

    @wraps(forward)
    def in_groups(self, hidden_states, cos, sin, cu_seqlens, frames, **kwargs):
        groups = ()
        if hidden_states.is_cpu and self.config._attn_implementation == "sdpa" and frames.segments is not None:
            bytes_of_a_patch = hidden_states.shape[-1] * hidden_states.element_size()
            groups = frame_groups(frames.runs, _BYTES_OF_A_GROUP // bytes_of_a_patch)
        if len(groups) < 2:
            return forward(self, hidden_states, cos, sin, cu_seqlens, frames, **kwargs)
        sizes = [sum(group.lengths) for group in groups]
        parts = zip(*(tensor.split(sizes) for tensor in (hidden_states, cos, sin)), groups)
        outputs = (forward(self, *tensors, cu_seqlens, group, **kwargs) for *tensors, group in parts)
        if torch.is_grad_enabled():
            return torch.cat(list(outputs))
        # Each goes where it belongs at once: a list of them would hold the layer's whole output a second time.
        joined = torch.empty_like(hidden_states)
        for place, output in zip(joined.split(sizes), outputs):
            place.copy_(output)
        return joined

    return in_groups


def learns(tower: nn.Module, pixel_values: torch.Tensor) -> bool:
    """Whether a gradient is wanted anywhere in `tower` or before it.

    To be asked by every tower, because transformers makes the output of each input embedding require gradients when a
    model's checkpointing is switched on: without it a frozen tower would build a graph that nobody reads.
    """
    return pixel_values.requires_grad or any(parameter.requires_grad for parameter in tower.parameters())
