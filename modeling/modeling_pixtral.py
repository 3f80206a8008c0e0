"""Pixtral: a tower of bidirectional attention over packed patches, turned by row and column, and the model around it.

Architecture and numbers: the checkpoints Pixtral-12B and Mistral-Small-3.1; tensor names: transformers.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MultimodalBaseModelOutputWithPast,
    MultimodalCausalLMOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import accepts_precomputed_kwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs, selected_hidden_states

from ..configuration.configuration_pixtral import PixtralConfig, PixtralVisionConfig
from .checkpoint_formats import ReadsPublishedNames, register_checkpoint_formats
from .image_patches import patches_of_images
from .native_pixtral import ReadsNativeFolders
from .packed_attention import eager_attention, packed_attention
from .packed_metadata import RunsFromMetadata
from .packed_pixels import TakesPackedPixels
from .packed_text import is_packed
from .patch_grids import PackedFrames, PatchGrids, UnseenFrames
from .placeholders import MediaGenerationMixin, image_outputs, in_step_with_other_ranks, place_features
from .tensor_parallel import KeepsWholeWhatDoesNotDivide
from .vision_layers import RMSNorm, alternating_rotary, by_pixel, group_by_group, learns, normalized, rotate

register_checkpoint_formats()

_NORM_EPS = 1e-5  # of every norm in the tower; no configuration holds it


class PixtralPatchEmbedding(nn.Conv2d):
    """A convolution whose kernel covers one patch, computed as a matrix product over patches cut out beforehand.

    uint8 patches are normalised here, from 0..255. A float32 weight takes the colour statistics into itself; a narrower
    one would round their product, so there the pixels are normalised in float32 and rounded once, as a processor does.
    """

    def __init__(self, config: PixtralVisionConfig):
        super().__init__(
            config.num_channels, config.hidden_size, config.patch_size, stride=config.patch_size, bias=False
        )
        self.image_mean, self.image_std = list(config.image_mean), list(config.image_std)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(num_patches, num_channels * patch_size**2), float or uint8 -> (num_patches, hidden_size)."""
        kernel = self.weight.flatten(1)
        if patches.dtype != torch.uint8 or kernel.dtype != torch.float32:
            return F.linear(normalized(patches, self.image_mean, self.image_std, kernel.dtype), kernel)
        mean, std = (by_pixel(values, patches) for values in (self.image_mean, self.image_std))
        folded = kernel / std
        return F.linear(patches.float(), folded / 255, -(folded @ mean))


class PixtralVisionAttention(nn.Module):
    """Attention among the patches of one image."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: PixtralVisionConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, cos, sin, cu_seqlens, frames: PackedFrames | UnseenFrames, **kwargs):
        # (num_patches, num_heads, head_dim)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        attended, weights = packed_attention(
            interface, self, query, key, value,
            segments=frames.segments, cu_seqlens=cu_seqlens, dropout=dropout, **kwargs,
        )  # fmt: skip
        return self.o_proj(attended), weights


class PixtralVisionMLP(nn.Module):
    """Gated feed-forward: down(act(gate x) * up x)."""

    def __init__(self, config: PixtralVisionConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class PixtralVisionLayer(GradientCheckpointingLayer):
    """Attention, then the feed-forward; each normalised before and added to its input."""

    def __init__(self, config: PixtralVisionConfig):
        super().__init__()
        self.config = config
        self.attention_norm = RMSNorm(config.hidden_size, _NORM_EPS)
        self.attention = PixtralVisionAttention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, _NORM_EPS)
        self.feed_forward = PixtralVisionMLP(config)

    @group_by_group
    def forward(self, hidden_states, cos, sin, cu_seqlens, frames: PackedFrames | UnseenFrames, **kwargs):
        attended, _ = self.attention(self.attention_norm(hidden_states), cos, sin, cu_seqlens, frames, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.feed_forward(self.ffn_norm(hidden_states))


class PixtralVisionTransformer(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: PixtralVisionConfig):
        super().__init__()
        self.layers = nn.ModuleList(PixtralVisionLayer(config) for _ in range(config.num_built_layers))

    def forward(self, hidden_states, *args, **kwargs):
        for layer in self.layers:
            hidden_states = layer(hidden_states, *args, **kwargs)
        return hidden_states


class PixtralPreTrainedModel(TakesPackedPixels, ReadsPublishedNames, KeepsWholeWhatDoesNotDivide, PreTrainedModel):
    config: PixtralConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["PixtralVisionLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True


class PixtralVisionModel(RunsFromMetadata, PixtralPreTrainedModel):
    """The Pixtral tower over any number of images of any size."""

    config: PixtralVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_conv"
    _can_record_outputs = {"hidden_states": PixtralVisionLayer, "attentions": PixtralVisionAttention}

    def __init__(self, config: PixtralVisionConfig):
        super().__init__(config)
        self.patch_size = config.patch_size
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_conv = PixtralPatchEmbedding(config)
        self.ln_pre = RMSNorm(config.hidden_size, _NORM_EPS)
        self.transformer = PixtralVisionTransformer(config)
        self.gradient_checkpointing = False
        left_out = range(config.num_built_layers, config.num_hidden_layers)
        self._keys_to_ignore_on_load_unexpected = [rf"transformer\.layers\.{index}\." for index in left_out]
        self.post_init()

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | list[torch.Tensor],
        grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | list[tuple[int, int]] | None = None,
        image_grid_thw: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images, given as packed patches or whole; both give the same features.

        Args:
            pixel_values: with `grid_thw`, packed patches (num_patches, num_channels * patch_size**2), each flattened in
                the order (channel, row, column), in merge-block order (raster order if `spatial_merge_size` is 1).
                Without, images: (num_images, num_channels, height, width) or a list of (num_channels, height, width).
                Normalised floats, cast to the embedding's dtype, or raw uint8.
            grid_thw: (num_images, 3), int64: steps, rows and columns of each, in patches; each step is a frame that
                attends to itself only.
            image_sizes: (num_images, 2): height and width of padded images, in pixels; not needed with `grid_thw`.
            image_grid_thw: `grid_thw` by the image processor's name, so that `tower(**image_processor(images))` works.
            kwargs: `output_hidden_states` (True, or the indices to keep), `output_attentions` (one map per image, under
                `eager`), and transformers' precomputed `position_ids` (num_patches, 2), `cu_seqlens`, `max_seqlen`.

        Returns:
            `last_hidden_state` (num_patches, hidden_size) in the order of the packed input; for images
            (1, num_patches, hidden_size) in raster order, as transformers' tower gives it.

        Raises:
            ValueError: shapes, sizes or grids that do not fit together, or that the merge size does not divide.
        """
        if image_grid_thw is not None:
            if grid_thw is not None:
                raise ValueError("Pass the grids once, as grid_thw: (num_images, 3), in patches.")
            grid_thw = image_grid_thw
        if grid_thw is not None:
            self.check_patches(pixel_values)
            return self._encode_packed(pixel_values, grid_thw, self.spatial_merge_size, **kwargs)
        patches, grid = patches_of_images(
            pixel_values, image_sizes, self.patch_size, self.config.num_channels, merge=1
        )
        outputs = self._encode_packed(patches, grid, merge=1, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state[None]
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(None if state is None else state[None] for state in outputs.hidden_states)
        return outputs

    def check_patches(self, pixel_values):
        shape = getattr(pixel_values, "shape", None)
        if shape is None or len(shape) != 2 or shape[1] != self.config.patch_dim:
            raise ValueError(
                f"pixel_values has shape {None if shape is None else tuple(shape)}; with grid_thw give "
                f"(num_patches, {self.config.patch_dim}), each row one patch of {self.config.num_channels} channels x "
                f"{self.patch_size} x {self.patch_size} pixels."
            )

    def _encode_packed(self, patches, grid_thw, merge: int, **kwargs):
        patches = self.on_this_device(patches)
        grids = PatchGrids(grid_thw, merge, len(patches), patches.device)
        cos, sin = self.rotary(grids.tower_positions(kwargs))
        cu_seqlens, max_seqlen = grids.tower_seqlens(kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns(self, patches)):
            layout = (cos, sin, cu_seqlens, grids.frames)
            outputs = self._encode(patches, *layout, entry=grids.entry, max_seqlen=max_seqlen, **kwargs)
        return grids.leave_outputs(outputs)

    def rotary(self, positions):
        return alternating_rotary(positions, self.config.rope_parameters["rope_theta"], self.config.head_dim)

    @capture_outputs
    def _encode(self, patches, *args, entry=slice(None), **kwargs):
        hidden_states = self.ln_pre(self.patch_conv(patches[entry]))
        return BaseModelOutputWithPooling(last_hidden_state=self.transformer(hidden_states, *args, **kwargs))


class PixtralPatchMerger(nn.Module):
    """Joins the patches of a block, channel by channel, and maps them to the width of one."""

    def __init__(self, config: PixtralConfig):
        super().__init__()
        self.block = config.spatial_merge_size**2
        size = config.vision_config.hidden_size * len(config.feature_layers)
        self.merging_layer = nn.Linear(size * self.block, size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(num_patches, size) in merge-block order -> (num_patches / spatial_merge_size**2, size)."""
        # (num_tokens, block, size) -> (num_tokens, size * block): the published weight has the channel outermost
        blocks = hidden_states.unflatten(0, (-1, self.block)).transpose(1, 2)
        return self.merging_layer(blocks.flatten(1))


class PixtralMultiModalProjector(nn.Module):
    """Norm and merger, where the checkpoint has them, then two layers to the text width."""

    def __init__(self, config: PixtralConfig):
        super().__init__()
        size, text_size = config.vision_config.hidden_size * len(config.feature_layers), config.text_config.hidden_size
        self.norm = RMSNorm(size, config.text_config.rms_norm_eps) if config.projector_norm else None
        self.patch_merger = PixtralPatchMerger(config) if config.projector_merger else None
        self.linear_1 = nn.Linear(size, text_size, bias=config.multimodal_projector_bias)
        self.act = ACT2FN[config.projector_hidden_act]
        self.linear_2 = nn.Linear(text_size, text_size, bias=config.multimodal_projector_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(num_patches, hidden_size * feature layers) in merge-block order -> (num_tokens, text width)."""
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        if self.patch_merger is not None:
            hidden_states = self.patch_merger(hidden_states)
        return self.linear_2(self.act(self.linear_1(hidden_states)))


class PixtralModel(ReadsNativeFolders, PixtralPreTrainedModel):
    """Tower, projector and text model, without the language head."""

    accepts_loss_kwargs = False

    def __init__(self, config: PixtralConfig):
        super().__init__(config)
        self.vision_tower = PixtralVisionModel(config.vision_config)
        self.multi_modal_projector = PixtralMultiModalProjector(config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    @accepts_precomputed_kwargs(modality="image")
    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor | list[torch.Tensor],
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | list[tuple[int, int]] | None = None,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """The tower's outputs for packed patches, and `pooler_output`: a tensor (tokens, text width) for each image.

        Args:
            pixel_values, image_grid_thw, image_sizes: packed patches or images, as [`PixtralVisionModel`] takes them;
                images are packed first.
            vision_feature_layer: another choice of as many layers as the configuration's.
            vision_feature_select_strategy: only "full"; Pixtral has no class token to drop.

        Raises:
            ValueError: as the tower; or a layer that it does not have, another number of layers, another strategy.
        """
        if vision_feature_select_strategy not in (None, "full"):
            raise ValueError(f'vision_feature_select_strategy is {vision_feature_select_strategy!r}; give "full".')
        layers = self.config.feature_layers if vision_feature_layer is None else vision_feature_layer
        layers = [layers] if isinstance(layers, int) else layers
        if len(layers) != len(self.config.feature_layers):
            raise ValueError(
                f"vision_feature_layer names {len(layers)} layers and the projector was built for "
                f"{len(self.config.feature_layers)}; name as many."
            )
        vision, merge = self.config.vision_config, self.config.spatial_merge_size
        indices = [vision.state_index(layer) for layer in layers]
        if image_grid_thw is None:
            pixel_values, image_grid_thw = patches_of_images(
                pixel_values, image_sizes, vision.patch_size, vision.num_channels, merge
            )
            image_sizes = None
        asked = kwargs.get("output_hidden_states")
        kept = [*indices, *map(vision.state_index, selected_hidden_states(asked) or [])]
        if asked is not True and kept != [vision.num_built_layers]:
            kwargs["output_hidden_states"] = kept
        outputs = self.vision_tower(pixel_values, image_grid_thw, image_sizes, return_dict=True, **kwargs)
        states = {index: outputs.hidden_states[index] for index in indices if index < vision.num_built_layers}
        states[vision.num_built_layers] = outputs.last_hidden_state
        features = self.multi_modal_projector(torch.cat([states[index] for index in indices], dim=-1))
        outputs.pooler_output = features.split((image_grid_thw.prod(-1) // merge**2).tolist())
        return outputs

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultimodalBaseModelOutputWithPast:
        """Text states, image features standing in the place of placeholders.

        Args:
            input_ids: (batch, length), int64; placeholders are `config.image_token_id`.
            attention_mask, position_ids, cache, inputs_embeds: as the text model takes them.
            pixel_values, image_grid_thw, image_sizes: the images of all rows, in order; see [`get_image_features`].
            mm_encoder_outputs: what `get_image_features` returned before, under "image", instead of pixels.
            kwargs: `output_hidden_states` may list the text layers whose states to keep (0: the embedding), for drafters
                that read a few of them: `hidden_states[index]` is then set there and None elsewhere.

        Raises:
            ValueError: both or neither of ids and embeddings, pixels and features together, or another number of
                placeholders than features.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        encoded = image_outputs(
            self.get_image_features,
            pixel_values,
            {"image_grid_thw": image_grid_thw, "image_sizes": image_sizes},
            mm_encoder_outputs,
            kwargs,
        )
        if encoded is not None:
            inputs_embeds = place_features(
                inputs_embeds,
                input_ids,
                encoded.pooler_output,
                self.config.image_token_id,
                self.get_input_embeddings(),
                "image",
            )
        if pixel_values is None and mm_encoder_outputs is None:
            inputs_embeds = in_step_with_other_ranks(inputs_embeds, self.vision_tower, self.get_image_features, cache)
        if is_packed(position_ids, attention_mask, cache, use_cache):
            use_cache = False

        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        return MultimodalBaseModelOutputWithPast(**outputs, image_outputs=encoded)


class PixtralForConditionalGeneration(ReadsNativeFolders, PixtralPreTrainedModel, MediaGenerationMixin):
    """Pixtral with its language head.

    LoRA targets for PEFT, as regular expressions over module names, since tower and text share leaf names: the tower's
    attention `.*vision_tower.*\\.[qkvo]_proj`, the projector `.*multi_modal_projector.*\\.(linear_[12]|merging_layer)`,
    the text model's attention `.*language_model.*\\.[qkvo]_proj`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: PixtralConfig):
        super().__init__(config)
        self.model = PixtralModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(
        self,
        pixel_values: torch.Tensor | list[torch.Tensor],
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | list[tuple[int, int]] | None = None,
        vision_feature_layer: int | list[int] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """See [`PixtralModel.get_image_features`]."""
        return self.model.get_image_features(
            pixel_values, image_grid_thw, image_sizes, vision_feature_layer=vision_feature_layer, **kwargs
        )

    @property
    def placeholder_ids(self):
        return (self.config.image_token_id,)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultimodalCausalLMOutputWithPast:
        """As [`PixtralModel`], plus logits and loss.

        Args:
            labels: (batch, length), int64, -100 where no loss is taken; shifted inside.
            logits_to_keep: compute logits for the last so many positions (0: all), or for these positions.
            kwargs: `num_items_in_batch` divides the summed loss under gradient accumulation.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            image_sizes=image_sizes,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            vocab_size = self.config.text_config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return MultimodalCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            image_outputs=outputs.image_outputs,
        )
