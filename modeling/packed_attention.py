"""Bidirectional attention inside the segments of a packed sequence, under any attention backend of transformers.

Backends with variable-length kernels get `cu_seqlens`; all others get one batched call for each stretch of segments of
equal length. Memory grows with the patches; no mask over the whole sequence exists.
"""

from functools import partial
from itertools import groupby

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import is_flash_attention_requested

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before PyTorch 2.10
    varlen_attn = None

# Flash kernels are built for head widths in steps of this.
_FLASH_HEAD_STEP = 16


def packed_attention(
    interface,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segments: tuple[tuple[int, int], ...] | None,
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
        segments: (number of segments, length) for every stretch of equal lengths, in order. None where only tensors
            may be looked at: `sdpa` and the flash backends then go by `cu_seqlens` alone, in a graph of tensors.
        cu_seqlens: the same boundaries for variable-length kernels, (num_segments + 1,), int32.
        max_seqlen: longest segment, where the caller knows it; variable-length kernels need it without `segments`.
        dropout: share of the attention weights dropped.
        kwargs: passed on to the backend.

    Returns:
        the attended values (num_patches, num_attention_heads * head_dim), and one map
        (1, num_attention_heads, length, length) for each segment, or `None` where the backend keeps none.
    """
    kwargs |= {"attention_mask": None, "scaling": query.shape[-1] ** -0.5, "dropout": dropout, "is_causal": False}
    if is_flash_attention_requested(module.config):
        max_seqlen = max(length for _, length in segments) if max_seqlen is None else int(max_seqlen)
        kwargs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        kwargs |= {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
        return _flash_attention(interface, module, query, key, value, kwargs), None
    if module.config._attn_implementation == "sdpa" and dropout == 0.0:
        ragged = segments is None or len(segments) > 1
        if ragged and max_seqlen is not None and has_varlen_kernel(query, query.shape[-1]):
            grouped = query.shape[1] != key.shape[1]
            bounds = (cu_seqlens, cu_seqlens, int(max_seqlen), int(max_seqlen))
            return varlen_attn(query, key, value, *bounds, enable_gqa=grouped).flatten(1), None
        if segments is None and torch.compiler.is_compiling():
            return _OPS.attend_segments(query, key, value, cu_seqlens).flatten(1), None
    if segments is None:
        segments = _stretches(cu_seqlens)

    return _attend_in_batches(partial(interface, module, **kwargs), query, key, value, segments)


def _attend_in_batches(attend, query, key, value, segments) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """One call of `attend` for each stretch of segments of equal length."""
    outputs, maps, start = [], [], 0
    for count, length in segments:
        stop = start + count * length
        batched = [
            # (count, num_heads, length, head_dim), a view
            heads[start:stop].unflatten(0, (count, length)).transpose(1, 2)
            for heads in (query, key, value)
        ]
        output, weights = attend(*batched)
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


def has_varlen_kernel(states: torch.Tensor, head_dim: int) -> bool:
    """Whether PyTorch's own variable-length attention takes heads like these: one call for segments of any lengths."""
    narrow = states.dtype in (torch.float16, torch.bfloat16)
    if varlen_attn is None or not (states.is_cuda and narrow and head_dim % 8 == 0):
        return False
    flash = torch.backends.cuda.is_flash_attention_available()
    return flash and torch.cuda.get_device_capability(states.device) >= (8, 0)


def goes_by_tensors_alone(config, states: torch.Tensor) -> bool:
    """Whether attention under `config`, on states like these, reads nothing back from the device."""
    flash = is_flash_attention_requested(config)
    varlen = config._attn_implementation == "sdpa" and has_varlen_kernel(states, config.head_dim)
    return states.is_cuda and (flash or varlen)


def _stretches(cu_seqlens: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(number of segments, length) for every stretch of equal lengths, read back from the device."""
    return tuple((len(list(run)), length) for length, run in groupby(cu_seqlens.diff().tolist()) if length > 0)


def _attend_segments(query, key, value, cu_seqlens):
    """Scaled dot product attention within the segments, whose lengths are read: the shape of `query`."""

    def attend(*batched):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(*batched, enable_gqa=grouped).transpose(1, 2), None

    attended, _ = _attend_in_batches(attend, query, key, value, _stretches(cu_seqlens))
    return attended.view_as(query)


def _register_operators():
    """`attend_segments`, whose lengths a traced graph need not know; backward attends again instead of keeping maps."""
    operators = torch.ops.gridtower
    if hasattr(operators, "attend_segments"):  # another copy of this file came first: one of a hub folder's code
        return operators

    @torch.library.custom_op("gridtower::attend_segments", mutates_args=())
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return _attend_segments(query, key, value, cu_seqlens)

    @torch.library.custom_op("gridtower::attend_segments_backward", mutates_args=())
    def attend_backward(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Inside an operator autograd is out of reach; functional derivatives are not.
        _, derivative = torch.func.vjp(partial(_attend_segments, cu_seqlens=cu_seqlens), query, key, value)
        return tuple(gradient.contiguous() for gradient in derivative(grad))

    def fake_attend(query, key, value, cu_seqlens):
        return query.new_empty(query.shape)

    def fake_attend_backward(grad, query, key, value, cu_seqlens):
        return tuple(heads.new_empty(heads.shape) for heads in (query, key, value))

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        return *operators.attend_segments_backward(grad, *ctx.saved_tensors), None

    attend.register_fake(fake_attend)
    attend_backward.register_fake(fake_attend_backward)
    attend.register_autograd(backward, setup_context=save)
    return operators


_OPS = _register_operators()


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention written out, with its map: the backend named `eager`. Softmax runs in float32."""
    groups = module.num_key_value_groups
    key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    weights = torch.softmax(query @ key.mT * scaling, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2), weights
