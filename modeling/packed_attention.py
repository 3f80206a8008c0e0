"""Bidirectional attention inside the segments of a packed sequence, under any attention backend of transformers.

Backends with variable-length kernels get `cu_seqlens`; all others get one batched call for each stretch of segments of
equal length. Memory grows with the patches; no mask over the whole sequence exists.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import is_flash_attention_requested

# Flash kernels are built for head widths in steps of this.
_FLASH_HEAD_STEP = 16


def packed_attention(
    interface,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segments: tuple[tuple[int, int], ...],
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """Attend within each segment.

    Args:
        interface: a backend of transformers' `AttentionInterface`. The caller looks it up, because transformers lets a
            model change its backend only where it finds the lookup in the model's own file.
        module: carries `config`, `num_key_value_groups` and `is_causal = False`, as transformers' backends expect.
        query: (num_patches, num_attention_heads, head_dim).
        key, value: (num_patches, num_key_value_heads, head_dim).
        segments: (number of segments, length) for every stretch of equal lengths, in order.
        cu_seqlens: the same boundaries for variable-length kernels, (num_segments + 1,), int32.
        max_seqlen: longest segment, where the caller knows it.
        dropout: share of the attention weights dropped.
        kwargs: passed on to the backend.

    Returns:
        the attended values (num_patches, num_attention_heads * head_dim), and one map
        (1, num_attention_heads, length, length) for each segment, or `None` where the backend keeps none.
    """
    kwargs |= {"attention_mask": None, "scaling": query.shape[-1] ** -0.5, "dropout": dropout, "is_causal": False}
    if is_flash_attention_requested(module.config):
        max_seqlen = max(length for _, length in segments) if max_seqlen is None else max_seqlen
        kwargs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        kwargs |= {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
        return _flash_attention(interface, module, query, key, value, kwargs), None

    outputs, maps, start = [], [], 0
    for count, length in segments:
        stop = start + count * length
        batched = [
            # (count, num_heads, length, head_dim), a view
            heads[start:stop].unflatten(0, (count, length)).transpose(1, 2)
            for heads in (query, key, value)
        ]
        output, weights = interface(module, *batched, **kwargs)
        outputs.append(output.reshape(count * length, -1))
        maps += [None] if weights is None else weights.split(1)
        start = stop
    attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return attended, None if maps[0] is None else tuple(maps)


def _flash_attention(interface, module, query, key, value, kwargs) -> torch.Tensor:
    head_dim = query.shape[-1]
    padding = -head_dim % _FLASH_HEAD_STEP
    # Zeros add nothing to the scores, and the scale stays that of the true width.
    packed = [F.pad(heads, (0, padding)).transpose(0, 1).unsqueeze(0) for heads in (query, key, value)]
    output, _ = interface(module, *packed, **kwargs)
    return output.reshape(len(query), -1, head_dim + padding)[..., :head_dim].reshape(len(query), -1)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention written out, with its map: the backend named `eager`. Softmax runs in float32."""
    groups = module.num_key_value_groups
    key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    weights = torch.softmax(query @ key.mT * scaling, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2), weights
