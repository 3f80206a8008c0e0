"""Features of images and videos, put in the place of their placeholder tokens."""

import torch
from torch import nn
from transformers.utils import torch_compilable_check


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
