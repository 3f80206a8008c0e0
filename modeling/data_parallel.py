"""Towers that share the images of one batch among ranks: each encodes some, all get all features.

For ranks that hold the same batch and the whole tower, such as those of a tensor-parallel text model.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .patch_grids import checked_grid


def encode_data_parallel(
    tower: nn.Module, pixel_values: torch.Tensor, grid_thw: torch.Tensor, group: dist.ProcessGroup | None = None
) -> BaseModelOutputWithPooling:
    """Encode packed images (or videos), each on one of the ranks of `group`; one collective brings the features together.

    Gradients are those of one process, where every rank goes on to the same loss: a rank takes back those of its own
    images, and one more collective sums those of the weights.

    Args:
        tower: a tower, or a whole model, whose projector then takes part. The same weights on every rank, unsharded.
        pixel_values: the packed patches of all images, the same on every rank.
        grid_thw: (num_images, 3), int64, as the tower takes it.
        group: the ranks; None: all of them.

    Returns:
        Of a tower `last_hidden_state` (num_patches, hidden_size), of a whole model `pooler_output`, one tensor (tokens,
        text width) for each image; the same on every rank, in the order of the input. The latter goes into the model as
        `mm_encoder_outputs={"image": …}`.

    Raises:
        ValueError: grids that are malformed or do not fit the patches, or reentrant gradient checkpointing, which would
            pass the sum by.
    """
    part = tower.base_model  # without a language head
    whole = hasattr(part, "vision_tower")
    encoder = _ImageFeatures(part) if whole else _PatchStates(part)
    vision = part.vision_tower if whole else part
    side = vision.spatial_merge_size
    grid = checked_grid(grid_thw, side, len(pixel_values))
    _refuse_reentrant(vision)

    shares = images_by_rank(image_costs(vision, grid), dist.get_world_size(group))
    rows = [encoder.rows(*image) for image in grid]
    rows_of_share = [sum(rows[index] for index in share) for share in shares]
    patches = pixel_values.split([steps * height * width for steps, height, width in grid])
    rank = dist.get_rank(group)
    mine = shares[rank]
    if mine:
        pixels, own_grid = torch.cat([patches[index] for index in mine]), grid_thw[mine]
    else:  # something for the graph, so that this rank takes part in the sum of gradients
        pixels, own_grid = patches[0][: side**2], grid_thw.new_tensor([[1, side, side]])
    features = encoder.with_summed_gradients(pixels, own_grid, group)
    gathered = _Gather.apply(features[: rows_of_share[rank]], max(rows_of_share), group)
    encoded = [None] * len(grid)
    for share, count, of_rank in zip(shares, rows_of_share, gathered):
        for index, image in zip(share, of_rank[:count].split([rows[index] for index in share])):
            encoded[index] = image
    if whole:
        return BaseModelOutputWithPooling(pooler_output=tuple(encoded))
    return BaseModelOutputWithPooling(last_hidden_state=torch.cat(encoded))


def image_costs(tower: nn.Module, grid: Sequence[Sequence[int]]) -> list[int]:
    """Multiplications that each image of `grid` (steps, rows, columns) takes.

    Those of its patches with the weights, and of the patches of a frame with each other.
    """
    matrices = sum(weight.numel() for weight in tower.parameters() if weight.ndim > 1)
    attentions = sum(getattr(module, "is_causal", None) is False for module in tower.modules())
    each_other = 2 * attentions * tower.config.hidden_size
    return [steps * rows * cols * (matrices + each_other * rows * cols) for steps, rows, cols in grid]


def images_by_rank(costs: list[int], ranks: int) -> list[list[int]]:
    """For each rank the images that it encodes, in order: the dearest first, each to the rank with least to do."""
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda image: (-costs[image], image)):
        rank = loads.index(min(loads))
        loads[rank] += costs[index]
        shares[rank].append(index)
    return [sorted(share) for share in shares]


class _Encoder(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def with_summed_gradients(self, pixel_values, grid_thw, group):
        """The rows of all images, (num_rows, width); gradients of the weights will be summed over `group`."""
        learning = {
            name: weight
            for name, weight in self.named_parameters()
            if weight.requires_grad and ".language_model." not in name
        }
        if not (torch.is_grad_enabled() and learning):
            return self(pixel_values, grid_thw)
        summed = _SumGradients.apply(group, *learning.values())
        return functional_call(self, dict(zip(learning, summed)), (pixel_values, grid_thw))


class _PatchStates(_Encoder):
    def forward(self, pixel_values, grid_thw):
        return self.part(pixel_values, grid_thw=grid_thw, return_dict=True).last_hidden_state

    def rows(self, steps, rows, cols):
        return steps * rows * cols


class _ImageFeatures(_Encoder):
    def forward(self, pixel_values, grid_thw):
        outputs = self.part.get_image_features(pixel_values, image_grid_thw=grid_thw, return_dict=True)
        return torch.cat(outputs.pooler_output)

    def rows(self, steps, rows, cols):
        vision = self.part.config.vision_config
        side = getattr(vision, "downsample_ratio", None) or vision.spatial_merge_size
        return steps * -(-rows // side) * -(-cols // side)


class _SumGradients(torch.autograd.Function):
    """The weights as they are; backward, their gradients summed over the ranks, all in one collective."""

    @staticmethod
    def forward(ctx, group, *weights):
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient).to(gradient.dtype) for part, gradient in zip(parts, gradients))


class _Gather(torch.autograd.Function):
    """(own rows, width) -> (ranks, most, width), each rank's rows filled up to `most`; backward takes back its own."""

    @staticmethod
    def forward(ctx, features, most, group):
        ctx.rank, ctx.rows = dist.get_rank(group), len(features)
        filled = torch.cat([features, features.new_zeros(most - len(features), features.shape[1])])
        gathered = filled.new_empty(dist.get_world_size(group) * most, features.shape[1])
        dist.all_gather_into_tensor(gathered, filled, group=group)
        return gathered.unflatten(0, (-1, most))

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.rank, : ctx.rows], None, None


def _refuse_reentrant(tower: nn.Module) -> None:
    for module in tower.modules():
        settings = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if module.training and getattr(module, "gradient_checkpointing", False) and settings.get("use_reentrant"):
            raise ValueError(
                "encode_data_parallel cannot sum gradients under reentrant checkpointing; call "
                'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
            )
