"""A stand-in for the flash kernels, which need a GPU: same calling convention, same limits, computed segment by segment."""

import torch
from transformers import AttentionInterface

NAME = "flash_varlen_reference"


def varlen_reference(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, **kwargs):
    """Attends within the segments of `cu_seq_lens`; refuses what a kernel would refuse, or would have to guess."""
    assert attention_mask is None and kwargs["is_causal"] is False
    assert "position_ids" not in kwargs and "cu_seqlens" not in kwargs
    _, heads, length, head_dim = query.shape
    assert query.shape[0] == 1 and head_dim % 16 == 0 and key.shape == value.shape
    boundaries, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    assert torch.equal(boundaries, kwargs["cu_seq_lens_k"]) and longest == kwargs["max_length_k"]
    assert boundaries.dtype == torch.int32 and boundaries[0] == 0 and boundaries[-1] == length
    assert isinstance(longest, int) and longest >= int(boundaries.diff().max())
    key, value = (states.repeat_interleave(heads // key.shape[1], dim=1) for states in (key, value))
    outputs = []
    for start, stop in zip(boundaries[:-1].tolist(), boundaries[1:].tolist()):
        scores = query[:, :, start:stop] @ key[:, :, start:stop].mT * scaling
        outputs.append(scores.float().softmax(-1).to(query.dtype) @ value[:, :, start:stop])
    # (1, length, heads, head_dim), as the kernels return it
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, varlen_reference)


def use_backend(model, backend: str):
    """Change a tower's backend. By its configuration, as transformers looks for a kernel behind every "flash" name."""
    model.config._attn_implementation = backend
    return model
