"""Features of images and videos, put in the place of their placeholder tokens."""

from collections.abc import Callable

import torch
import torch.distributed
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import torch_compilable_check


def image_outputs(
    encode: Callable,
    pixel_values: torch.Tensor | None,
    geometry: dict,
    mm_encoder_outputs: dict | None,
    kwargs: dict,
) -> BaseModelOutputWithPooling | None:
    """What `encode` makes of the pixels, or made of them before; None where a prompt has neither.

    Args:
        encode: a model's `get_image_features`.
        geometry: its arguments that go with the pixels.
        mm_encoder_outputs: its outputs of before, under "image".
        kwargs: those of the model's call.

    Raises:
        ValueError: there are both.
    """
    before = (mm_encoder_outputs or {}).get("image")
    if pixel_values is None:
        return before
    if before is not None:
        raise ValueError('Pass either pixel_values or mm_encoder_outputs["image"], not both.')
    # A list of layers is one of text layers.
    kwargs = {name: v for name, v in kwargs.items() if name != "output_hidden_states" or isinstance(v, bool)}
    return encode(pixel_values, **geometry, return_dict=True, **kwargs)


class MediaGenerationMixin(GenerationMixin):
    """transformers' generation, for models that give their `placeholder_ids`."""

    def generate(self, inputs=None, generation_config=None, suppress_tokens=None, **kwargs):
        """transformers' `generate`, which never samples a placeholder: no pixels would stand behind it."""
        asked = suppress_tokens or (generation_config or self.generation_config).suppress_tokens or []
        suppressed = sorted({*asked, *self.placeholder_ids})
        return super().generate(inputs, generation_config, suppress_tokens=suppressed, **kwargs)

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs):
        """transformers' encoding before the first token, in which a rank takes part whose prompts hold nothing to encode."""
        model_kwargs = super()._prepare_multimodal_encoder_kwargs_for_generation(model_kwargs)
        if not model_kwargs["mm_encoder_outputs"] and other_ranks_wait(self.model.vision_tower):
            blank_features(self.model.vision_tower, self.model.get_image_features, self.device)
        return model_kwargs


def place_features(
    inputs_embeds: torch.Tensor,
    input_ids: torch.Tensor | None,
    features: list[torch.Tensor],
    token_id: int,
    embedding: nn.Module,
    media: str,
) -> torch.Tensor:
    """`inputs_embeds` (batch, length, size) with the embeddings of placeholders replaced by `features`, in order.

    Args:
        input_ids: (batch, length); None: placeholders are where `inputs_embeds` equals the embedding of `token_id`.
        features: a tensor (tokens, size) for each image or video.
        media: what to call them in the error.

    Raises:
        ValueError: there are more or fewer placeholders than features.
    """
    if input_ids is not None:
        mask = input_ids == token_id
    else:
        token = torch.full((), token_id, dtype=torch.long, device=inputs_embeds.device)
        mask = (inputs_embeds == embedding(token)).all(-1)
    features = torch.cat(list(features)).to(inputs_embeds.device, inputs_embeds.dtype)
    torch_compilable_check(
        mask.sum() == len(features),
        lambda: (
            f"The prompts hold {int(mask.sum())} {media} placeholders (token {token_id}) and the {media}s make "
            f"{len(features)} features; pass input_ids, pixels and grids or sizes that the processor returned together."
        ),
    )
    return inputs_embeds.masked_scatter(mask.to(inputs_embeds.device)[..., None], features)


def in_step_with_other_ranks(
    inputs_embeds: torch.Tensor, tower: nn.Module, encode: Callable, cache: Cache | None
) -> torch.Tensor:
    """`inputs_embeds`, to which the features of a blank image add nothing, where other ranks may encode real ones.

    DDP, FSDP and ZeRO-3 gather the tower's parameters and reduce their gradients on all ranks together: one whose rows
    hold no image would leave the others waiting.

    Args:
        tower: whose configuration tells `patch_dim`.
        encode: a model's `get_image_features`.
        cache: with tokens in it, no rank encodes any more.
    """
    if not other_ranks_wait(tower) or (cache is not None and cache.get_seq_length() > 0):
        return inputs_embeds
    return inputs_embeds + 0 * blank_features(tower, encode, inputs_embeds.device).sum().to(inputs_embeds)


def blank_features(tower: nn.Module, encode: Callable, device: torch.device) -> torch.Tensor:
    """What `encode` makes of the smallest image: (tokens, text width)."""
    side = getattr(tower, "spatial_merge_size", 1)
    blank = torch.zeros(side**2, tower.config.patch_dim, device=device)
    grid = torch.tensor([[1, side, side]], device=device)
    (features,) = encode(blank, image_grid_thw=grid, return_dict=True).pooler_output
    return features


def other_ranks_wait(module: nn.Module) -> bool:
    """Whether ranks wait for one another at `module`: for its gradients, or for shards of its parameters."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return False
    if torch.is_grad_enabled():
        return True
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    sharded = any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in module.modules())
    return sharded or any(hasattr(parameter, "ds_id") for parameter in module.parameters())
