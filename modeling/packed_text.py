"""Rows of text that hold several sequences one after the other, without padding.

transformers keeps them apart in attention, by their positions and where there is no cache, and in short convolutions by a
CUDA kernel alone. For convolutions, blank tokens between the sequences do it here, as many as they look back: exact, on
any device.
"""

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def is_packed(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, cache, use_cache: bool | None = None
) -> bool:
    """Whether positions (batch, length) begin again inside a row, where nothing but positions tells sequences apart.

    Raises:
        ValueError: they do, and a cache is asked for: with one, transformers lets every token see the sequences before.
    """
    if position_ids is None or attention_mask is not None or cache is not None or position_ids.ndim != 2:
        return False
    packed = bool((position_ids[:, 1:] == 0).any())
    if packed and use_cache:
        raise ValueError(
            "Rows that hold several sequences can't be cached; pass use_cache=False, or a sequence a row."
        )
    return packed


def run_sequences_apart(text_model, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, **kwargs):
    """The text model's outputs for packed rows, each sequence as if it were alone.

    Args:
        inputs_embeds: (batch, length, size).
        position_ids: (batch or 1, length); each 0 begins a sequence, and so does each row.
        kwargs: passed on, but what else would tell sequences apart (`seq_idx`, boundaries for kernels).

    Raises:
        ValueError: the convolutions have biases, which blank tokens would carry over.
    """
    config = text_model.config
    if config.conv_bias:
        raise ValueError("Packed rows need text convolutions without bias (conv_bias is True); pad the rows instead.")
    kwargs = {
        name: value for name, value in kwargs.items() if name != "seq_idx" and not name.startswith("cu_seq_lens")
    }
    batch_size, length, size = inputs_embeds.shape
    positions = position_ids.expand(batch_size, -1).reshape(-1)
    begins = (positions == 0).view(batch_size, length)
    begins[:, 0] = True
    begins = begins.view(-1).long()
    gap = config.conv_L_cache - 1
    places = torch.arange(batch_size * length, device=positions.device) + gap * begins.cumsum(0)
    total = int(places[-1]) + 1

    embeds = inputs_embeds.new_zeros(total, size).index_copy(0, places, inputs_embeds.reshape(-1, size))[None]
    # Blank tokens are sequences of one: nobody sees them.
    spread = positions.new_zeros(total).index_copy(0, places, positions)[None]
    real = positions.new_zeros(total).index_fill(0, places, 1)[None]
    mask = {"config": config, "inputs_embeds": embeds, "attention_mask": None, "cache": None, "position_ids": spread}
    masks = {kind: real if kind == "conv" else _MASKS[kind](**mask) for kind in set(config.layer_types)}
    outputs = text_model(
        inputs_embeds=embeds, attention_mask=masks, position_ids=spread, use_cache=False, return_dict=True, **kwargs
    )

    def rows(states):
        return states[0, places].view(batch_size, length, -1)

    return BaseModelOutputWithPast(
        last_hidden_state=rows(outputs.last_hidden_state),
        hidden_states=outputs.hidden_states and tuple(map(rows, outputs.hidden_states)),
    )
