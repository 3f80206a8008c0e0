"""What images change in the DeepSeek-V4 text model: routing, the sliding window, and nothing for a prompt without one.

transformers' classes do all that stays; here stand the routers with a second bias, the mask in which an image's tokens see
each other, and compressed windows that count from a sequence's first token, so that padding and packing change none.
"""

from types import SimpleNamespace

import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACache,
    DeepseekV4CSACompressor,
    DeepseekV4HashRouter,
    DeepseekV4HCACache,
    DeepseekV4HCACompressor,
    DeepseekV4Model,
    DeepseekV4PreTrainedModel,
    DeepseekV4TopKRouter,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_deepseek_v4_vl import DeepseekV4VlConfig
from .checkpoint_formats import ReadsPublishedNames
from .packed_pixels import TakesPackedPixels
from .packed_text import is_packed
from .tensor_parallel import KeepsWholeWhatDoesNotDivide


def is_of_image(input_ids: torch.Tensor, config: DeepseekV4VlConfig) -> torch.Tensor:
    """Whether each token is one of the five that make up images."""
    return (input_ids >= config.image_start_token_id) & (input_ids <= config.image_end_token_id)


class RoutesImages:
    """First base of a router: tokens of images go to the experts of greatest score plus `bias_vl`."""

    def __init__(self, config: DeepseekV4VlConfig):
        super().__init__(config)
        self.config = config
        self.bias_vl = nn.Buffer(torch.zeros(self.num_experts, dtype=torch.float32))

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None):
        """Logits (tokens, experts), weights and indices (tokens, top_k); without `input_ids` every token is of text."""
        logits, weights, indices = self.route_text(hidden_states, input_ids)
        if input_ids is None:
            return logits, weights, indices
        scores = self.score_fn(logits)
        by_bias = torch.topk(scores + self.bias_vl, self.top_k, dim=-1, sorted=False).indices
        chosen = scores.gather(1, by_bias)
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * self.routed_scaling_factor
        image = is_of_image(input_ids, self.config).reshape(-1, 1).to(logits.device)
        return logits, torch.where(image, chosen, weights), torch.where(image, by_bias, indices)


class DeepseekV4VlTopKRouter(RoutesImages, DeepseekV4TopKRouter):
    """Top-k routing with a bias for text and one for images."""

    def route_text(self, hidden_states, input_ids):
        return DeepseekV4TopKRouter.forward(self, hidden_states)


class DeepseekV4VlHashRouter(RoutesImages, DeepseekV4HashRouter):
    """Text is routed by a table, images by top-k."""

    def __init__(self, config: DeepseekV4VlConfig):
        super().__init__(config)
        # In the checkpoint, and kept for it: a table needs no bias.
        self.e_score_correction_bias = nn.Buffer(torch.zeros(self.num_experts, dtype=torch.float32))

    def route_text(self, hidden_states, input_ids):
        if input_ids is None:
            raise ValueError("The first layers route by token: pass input_ids along with inputs_embeds.")
        return DeepseekV4HashRouter.forward(self, hidden_states, input_ids)


class DeepseekV4VlMoeBlock(nn.Module):
    """The experts of a layer, behind a router that tells images from text."""

    def __init__(self, config: DeepseekV4VlConfig, block: nn.Module):
        super().__init__()
        self.gate = DeepseekV4VlHashRouter(config) if block.is_hash else DeepseekV4VlTopKRouter(config)
        self.experts, self.shared_experts = block.experts, block.shared_experts

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, length, size), (batch, length) -> (batch, length, size)."""
        _, weights, indices = self.gate(hidden_states, input_ids)
        routed = self.experts(hidden_states.flatten(0, 1), indices, weights)
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class CompressesSequencesApart:
    """First base of a compressor: sequences that do not fill their row from its beginning are compressed one by one.

    A compressed entry stands for a window of tokens counted from the beginning. Left padding would shift the windows and
    make entries of itself, which no mask hides; several sequences in one row would share them.
    """

    def forward(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        """As transformers'; padding has negative `position_ids`, and a 0 begins a sequence."""
        entries, bias = self._compressed(hidden_states, q_residual, position_ids, cache, layer_idx)
        if entries.shape[2] == 0 and torch.is_grad_enabled():
            # No sequence fills a window. This adds nothing, to nothing, but DDP waits for a gradient of every parameter.
            entries = entries + sum(parameter.sum() for parameter in self.parameters() if parameter.requires_grad)
        return entries, bias

    def _compressed(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        states = getattr(cache.layers[layer_idx], "row_states", None) if cache is not None else None
        # One value, for each is read back from the device.
        if states is None and not ((position_ids[:, 0] < 0).any() | (position_ids[:, 1:] == 0).any()):
            return super().forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        position_ids = position_ids.expand(len(hidden_states), -1)
        parts = []
        for row, start, stop in sequences(position_ids):
            part = slice(row, row + 1), slice(start, stop)
            row_cache = None if states is None else SimpleNamespace(layers={layer_idx: states[row]})
            compressed = super().forward(
                hidden_states[part], q_residual[part], position_ids[part], row_cache, layer_idx
            )
            parts.append((row, slice(start, stop), *compressed))
        return self._side_by_side(parts, hidden_states)

    def _side_by_side(self, parts, hidden_states):
        batch_size, length, _ = hidden_states.shape
        taken = [0] * batch_size
        for row, _, entries, _ in parts:
            taken[row] += entries.shape[2]
        most = max(taken)
        # (batch, 1, entries, head_dim) and (batch, 1, length, entries)
        compressed = hidden_states.new_zeros(batch_size, 1, most, self.head_dim)
        bias = hidden_states.new_full((batch_size, 1, length, most), float("-inf"))
        taken = [0] * batch_size
        for row, tokens, entries, visible in parts:
            own = slice(taken[row], taken[row] + entries.shape[2])
            compressed[row, :, own] = entries[0]
            bias[row, :, tokens, own] = 0.0 if visible is None else visible[0]
            taken[row] = own.stop
        return compressed, bias


def sequences(position_ids: torch.Tensor):
    """(row, start, stop) of each sequence in `position_ids` (batch, length): it begins with a 0, or continues a row."""
    begins = position_ids == 0
    begins[:, 0] |= position_ids[:, 0] > 0
    for row, flags in enumerate(begins.tolist()):
        starts = [place for place, flag in enumerate(flags) if flag]
        yield from ((row, start, stop) for start, stop in zip(starts, [*starts[1:], len(flags)]))


class DeepseekV4VlHCACompressor(CompressesSequencesApart, DeepseekV4HCACompressor):
    """Heavy compression of each sequence by itself."""


class DeepseekV4VlCSACompressor(CompressesSequencesApart, DeepseekV4CSACompressor):
    """Sparse compression of each sequence by itself."""


class KeepsRowsApart:
    """First base of a layer of the cache: compressed states of each row in a state of its own, `row_states`."""

    _layer_type = None  # or transformers would make every cache of these

    def __init__(self, config: DeepseekV4VlConfig, batch_size: int):
        super().__init__(config)
        self.row_states = [self.one_row(config) for _ in range(batch_size)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.row_states = [self._copied(self.row_states[row]) for row in beam_idx.tolist()]

    def _copied(self, state):
        # The tensors are replaced, never written to, so that copies may share them.
        copied = object.__new__(type(state))
        vars(copied).update({name: dict(v) if isinstance(v, dict) else v for name, v in vars(state).items()})
        return copied


class RowwiseHCACache(KeepsRowsApart, DeepseekV4HCACache):
    one_row = DeepseekV4HCACache


class RowwiseCSACache(KeepsRowsApart, DeepseekV4CSACache):
    one_row = DeepseekV4CSACache


COMPRESSORS = {
    "heavily_compressed_attention": DeepseekV4VlHCACompressor,
    "compressed_sparse_attention": DeepseekV4VlCSACompressor,
}
ROWWISE_CACHES = {
    "heavily_compressed_attention": RowwiseHCACache,
    "compressed_sparse_attention": RowwiseCSACache,
}


class DeepseekV4VlPreTrainedModel(
    TakesPackedPixels, ReadsPublishedNames, KeepsWholeWhatDoesNotDivide, DeepseekV4PreTrainedModel
):
    config: DeepseekV4VlConfig
    input_modalities = ("image", "text")
    _no_split_modules = ["DeepseekV4DecoderLayer", "DeepseekV4VisionBlock"]
    _keep_in_fp32_modules_strict = [
        *DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict,
        *("bias_vl", "norm1", "norm2", "image_start", "image_pad", "image_newline", "image_end"),
    ]
    # Quantizers pass over what is listed here, and the published tower and aligner are not quantized. Of the dtype this
    # changes nothing but for float16, which is too narrow for them.
    # They compare from the beginning of a name, which has a prefix under a head.
    _keep_in_fp32_modules = [
        *DeepseekV4PreTrainedModel._keep_in_fp32_modules,
        *("vision_tower", "aligner", "model.vision_tower", "model.aligner"),
    ]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for the experts' class in the model's own file; this one's is in its own.
        return True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, RoutesImages):
            init.zeros_(module.bias_vl)
            init.zeros_(module.e_score_correction_bias)


class DeepseekV4VlTextModel(DeepseekV4VlPreTrainedModel, DeepseekV4Model):
    """transformers' DeepSeek-V4 text model, for prompts that may hold images."""

    input_modalities = ("text",)
    _tp_plan = DeepseekV4Config.base_model_tp_plan
    _ep_plan = DeepseekV4Config.base_model_ep_plan
    _pp_plan = DeepseekV4Config.base_model_pp_plan
    _fsdp_plan = DeepseekV4Config.base_model_fsdp_plan

    def __init__(self, config: DeepseekV4VlConfig):
        super().__init__(config)
        for layer in self.layers:
            # DeepSpeed gathers a layer as a whole: which of its parts run depends on the lengths of a rank's rows.
            layer._z3_leaf = True
            layer.mlp = DeepseekV4VlMoeBlock(config, layer.mlp)
            if layer.self_attn.compressor is not None:
                layer.self_attn.compressor = COMPRESSORS[layer.self_attn.layer_type](config)
        self.post_init()
        self.train()

    def train(self, mode: bool = True):
        """As torch's. The indexers choose by top-k, which passes no gradient: they ask for none, or DDP would wait for one.

        Loading makes every weight learn again, and ends with `eval()`; trainers begin with `train()`.
        """
        for layer in self.layers:
            if hasattr(layer.self_attn.compressor, "indexer"):
                layer.self_attn.compressor.indexer.requires_grad_(False)
        return super().train(mode)

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        """Hidden states of every token.

        Args:
            input_ids: (batch, length), int64: say how tokens are routed and which see each other; may go with
                `inputs_embeds`, unlike in transformers' model.
            attention_mask: (batch, cached + length), 0 for padding, or a mask made beforehand.
            position_ids: (batch, length); counted from the first real token of each row by default. Without a cache and a
                mask, several sequences may share a row: each begins where the positions begin again at 0.

        Raises:
            ValueError: neither ids nor embeddings, or an image whose tokens are not all here.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        seen = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and not attention_mask[:, 0].all():
            # Rows have padding at their left: -1 for it, then counted from the first real token.
            positions = (attention_mask.cumsum(-1) > 0).cumsum(-1) - 1
            position_ids = positions[:, -position_ids.shape[1] :]
            if cache is not None and seen == 0:
                self._keep_rows_apart(cache, len(attention_mask))
        mask = self._visible(input_ids, inputs_embeds, attention_mask, position_ids, cache, seen)

        # (batch, length, streams, hidden_size)
        hidden_states = inputs_embeds.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        rotary = {kind: self.rotary_emb(inputs_embeds, position_ids, kind) for kind in ("main", "compress")}
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                input_ids=input_ids,
                position_embeddings=rotary,
                position_ids=position_ids,
                attention_mask=mask,
                cache=cache,
                **kwargs,
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(self.hc_head(hidden_states)), cache=cache)

    def _keep_rows_apart(self, cache, batch_size):
        for index, layer_type in enumerate(self.config.layer_types):
            if layer_type in ROWWISE_CACHES:
                cache.layers[index] = ROWWISE_CACHES[layer_type](self.config, batch_size)

    def _visible(self, input_ids, inputs_embeds, attention_mask, position_ids, cache, seen):
        """The mask of the sliding window, in which the tokens of an image also see each other."""
        if isinstance(attention_mask, dict):
            return next(iter(attention_mask.values()))
        same_image = None if input_ids is None else self._same_image(input_ids, seen)
        packed = same_image and is_packed(position_ids, attention_mask, cache)
        mask = create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
            or_mask_function=None if packed else same_image,
        )
        if not packed:
            return mask
        # transformers would call the function with positions, which the sequences of a row share.
        tokens = torch.arange(inputs_embeds.shape[1], device=mask.device)
        rows = torch.arange(len(inputs_embeds), device=mask.device)[:, None, None]
        visible = same_image(rows, None, tokens[:, None], tokens)
        # (batch, 1, length, length)
        return mask.masked_fill(visible[:, None], 0.0 if mask.is_floating_point() else True)

    def _same_image(self, input_ids, seen):
        """Mask function: whether query and key belong to one image and are within its reach; None without images."""
        image = is_of_image(input_ids, self.config)
        if not image.any():
            return None
        ends = (input_ids == self.config.image_end_token_id).long()
        starts = (input_ids == self.config.image_start_token_id).long()
        opened = starts.cumsum(-1) - ends.cumsum(-1)
        pads = input_ids == self.config.image_pad_token_id
        inside = image & ~pads & (ends == 0)
        # Outside, pads stand before a start alone.
        leads_on = pads[:, :-1] & (opened[:, :-1] == 0) & ~(pads | (starts == 1))[:, 1:]
        broken = ((opened < 0) | (opened > 1) | (inside & (opened != 1))).any(-1)
        broken |= leads_on.any(-1) | (image[:, -1] & (ends[:, -1] == 0))
        if broken.any():
            row = int(broken.nonzero()[0])
            raise ValueError(
                f"Row {row} holds a part of an image: {int(starts[row].sum())} start tokens, {int(ends[row].sum())} end "
                "tokens. Pass all tokens of an image in one call; do not cut a prompt inside one."
            )
        # Padding before a start belongs to the image that it aligns: images are told apart by the ends before them.
        number = torch.where(image, ends.cumsum(-1) - ends, -1)
        length, reach = input_ids.shape[1], self.config.vision_config.max_image_tokens

        def same_image(batch_idx, head_idx, q_idx, kv_idx):
            query, key = q_idx - seen, kv_idx - seen
            of_key = torch.where(key >= 0, number[batch_idx, key.clamp(0, length - 1)], -1)
            near = (key - query <= reach) & (query - key < reach)
            return (of_key >= 0) & (number[batch_idx, query.clamp(0, length - 1)] == of_key) & near

        return same_image
