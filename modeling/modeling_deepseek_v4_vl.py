"""DeepSeek-V4 with images: a plain transformer tower, a 3 x 3 aligner, and transformers' DeepSeek-V4 text model.

Architecture, names and numbers: the checkpoint DeepSeek-V4-Flash-Vision-Exp. What images change in the text model is in
`deepseek_v4_text`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MultimodalMoeBaseModelOutputWithPast,
    MultimodalMoeCausalLMOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.deepseek_v4.modeling_deepseek_v4 import load_balancing_loss_func
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import accepts_precomputed_kwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_deepseek_v4_vl import DeepseekV4VisionConfig, DeepseekV4VlConfig
from .checkpoint_formats import register_checkpoint_formats
from .deepseek_v4_text import DeepseekV4VlPreTrainedModel, DeepseekV4VlTextModel
from .packed_attention import eager_attention, packed_attention
from .packed_metadata import RunsFromMetadata
from .packed_pixels import TakesPackedPixels
from .packed_text import is_packed
from .patch_grids import PackedFrames, PatchGrids, UnseenFrames, checked_grid, covering_blocks
from .placeholders import MediaGenerationMixin, image_outputs, in_step_with_other_ranks, place_features
from .tensor_parallel import KeepsWholeWhatDoesNotDivide
from .vision_layers import RMSNorm, axial_rotary, group_by_group, learns, normalized, rotate

register_checkpoint_formats()

_NORM_EPS = 1e-6  # of every norm in the tower; no configuration holds it


class DeepseekV4VisionPatchEmbedding(nn.Module):
    """One linear map of a patch's pixels."""

    def __init__(self, config: DeepseekV4VisionConfig):
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(num_patches, patch_dim), float or uint8 -> (num_patches, hidden_size), in the dtype of the weight."""
        half = [0.5] * 3  # mean and deviation of every channel
        return self.proj(normalized(patches, half, half, self.proj.weight.dtype))


class DeepseekV4VisionAttention(nn.Module):
    """Attention among the patches of one image."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: DeepseekV4VisionConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, cos, sin, cu_seqlens, frames: PackedFrames | UnseenFrames, **kwargs):
        # three of (num_patches, num_heads, head_dim)
        query, key, value = self.wqkv(hidden_states).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        attended, weights = packed_attention(
            interface, self, query, key, value, segments=frames.segments, cu_seqlens=cu_seqlens, **kwargs
        )
        return self.wo(attended), weights


class DeepseekV4VisionMLP(nn.Module):
    """Gated feed-forward; the gate's and the value's weights are stacked in one."""

    def __init__(self, config: DeepseekV4VisionConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        gate, value = self.w1(hidden_states).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class DeepseekV4VisionBlock(GradientCheckpointingLayer):
    """Attention, then the feed-forward; each normalised before and added to its input."""

    def __init__(self, config: DeepseekV4VisionConfig):
        super().__init__()
        self.config = config
        self.norm1 = RMSNorm(config.hidden_size, _NORM_EPS, torch.float32)
        self.attn = DeepseekV4VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, _NORM_EPS, torch.float32)
        self.mlp = DeepseekV4VisionMLP(config)

    @group_by_group
    def forward(self, hidden_states, cos, sin, cu_seqlens, frames: PackedFrames | UnseenFrames, **kwargs):
        attended, _ = self.attn(self.norm1(hidden_states), cos, sin, cu_seqlens, frames, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.norm2(hidden_states))


class DeepseekV4VisionModel(RunsFromMetadata, TakesPackedPixels, KeepsWholeWhatDoesNotDivide, PreTrainedModel):
    """The DeepSeek-V4 tower over any number of images of any size."""

    config: DeepseekV4VisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _input_embed_layer = "patch_embed"
    _no_split_modules = ["DeepseekV4VisionBlock"]
    _keep_in_fp32_modules_strict = ["norm1", "norm2", "norm"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DeepseekV4VisionBlock, "attentions": DeepseekV4VisionAttention}

    def __init__(self, config: DeepseekV4VisionConfig):
        super().__init__(config)
        self.patch_embed = DeepseekV4VisionPatchEmbedding(config)
        self.blocks = nn.ModuleList(DeepseekV4VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, _NORM_EPS, torch.float32)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        grid_thw: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode packed images.

        Args:
            pixel_values: (num_patches, 3 * patch_size**2), each row ordered (channel, row, column), the patches of an
                image in raster order. Normalised floats, cast to the embedding's dtype, or raw uint8, which are normalised
                here with a mean and a deviation of 0.5.
            grid_thw: (num_images, 3), int64: steps, rows and columns of each, in patches; each step is a frame that
                attends to itself only. Sides need not divide by the aligner's ratio.
            image_grid_thw: `grid_thw` by the image processor's name, so that `tower(**image_processor(images))` works.
            kwargs: `output_hidden_states`, `output_attentions` (one map per image, under `eager`), and transformers'
                precomputed `position_ids` (num_patches, 2), `cu_seqlens`, `max_seqlen`.

        Returns:
            `last_hidden_state` (num_patches, hidden_size), in the order of the input.

        Raises:
            ValueError: shapes or grids that do not fit together.
        """
        if (grid_thw is None) == (image_grid_thw is None):
            raise ValueError("Pass the grids once, as grid_thw: (num_images, 3), in patches.")
        grid_thw = image_grid_thw if grid_thw is None else grid_thw
        self.check_patches(pixel_values)
        patches = self.on_this_device(pixel_values)
        grids = PatchGrids(grid_thw, 1, len(patches), patches.device)
        cos, sin = self.rotary(grids.tower_positions(kwargs))
        cu_seqlens, max_seqlen = grids.tower_seqlens(kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns(self, patches)):
            layout = (cos, sin, cu_seqlens, grids.frames)
            outputs = self._encode(patches, *layout, entry=grids.entry, max_seqlen=max_seqlen, **kwargs)
        return grids.leave_outputs(outputs)

    def rotary(self, positions):
        return axial_rotary(positions, self.config.rope_theta, self.config.head_dim)

    def more_metadata(self, grid, device):
        index, mask = covering_blocks(grid, self.config.downsample_ratio, device)
        return {"merge_index": index, "merge_mask": mask}

    def check_patches(self, pixel_values):
        if pixel_values.ndim != 2 or pixel_values.shape[1] != self.config.patch_dim:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; give (num_patches, {self.config.patch_dim}), each row "
                f"one patch of 3 channels x {self.config.patch_size} x {self.config.patch_size} pixels."
            )

    @capture_outputs
    def _encode(self, patches, *args, entry=slice(None), **kwargs):
        hidden_states = self.patch_embed(patches[entry])
        for block in self.blocks:
            hidden_states = block(hidden_states, *args, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=self.norm(hidden_states))


class DeepseekV4Aligner(nn.Module):
    """Joins the patches of a block, channel by channel, and maps them to the text width.

    Blocks that reach over an image's right or bottom edge are filled with zeros.
    """

    def __init__(self, config: DeepseekV4VisionConfig, text_hidden_size: int):
        super().__init__()
        self.downsample_ratio = config.downsample_ratio
        self.w1 = nn.Linear(config.hidden_size * config.downsample_ratio**2, text_hidden_size)
        self.w2 = nn.Linear(text_hidden_size, text_hidden_size)

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """(num_patches, hidden_size) of images (num_images, 3) -> (num_tokens, text_hidden_size), in raster order.

        Raises:
            ValueError: the grids are malformed, or describe another number of patches.
        """
        grid = checked_grid(grid_thw, 1, len(hidden_states))
        width = self.w1.in_features // self.downsample_ratio**2
        if hidden_states.shape[1:] != (width,):
            raise ValueError(
                f"hidden_states has shape {tuple(hidden_states.shape)}; give (num_patches, {width}), as the tower does."
            )
        return self.forward_packed(hidden_states, *covering_blocks(grid, self.downsample_ratio, hidden_states.device))

    def forward_packed(
        self, hidden_states: torch.Tensor, merge_index: torch.Tensor, merge_mask: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, from the tensors of [`DeepseekV4VisionModel.packed_metadata`] alone."""
        # (num_tokens, ratio**2, size) -> (num_tokens, size * ratio**2): the published weight has the channel outermost
        blocks = hidden_states[merge_index] * merge_mask[..., None].to(hidden_states.dtype)
        return self.w2(F.gelu(self.w1(blocks.transpose(1, 2).flatten(1))))


def interleaved_order(rows: int, cols: int) -> torch.Tensor:
    """Raster places of an image's tokens in the order in which the text model reads them: (rows * cols,), int64.

    Rows are taken two by two, and column by column within the two; the last of an odd number has no partner.
    """
    places = torch.arange(rows * cols).view(rows, cols)
    pairs = F.pad(places, (0, 0, 0, rows % 2), value=-1).view(-1, 2, cols).transpose(1, 2).flatten()
    return pairs[pairs >= 0]


class DeepseekV4VlModel(DeepseekV4VlPreTrainedModel):
    """Tower, aligner and text model, without the language head."""

    accepts_loss_kwargs = False
    _tp_plan = {"aligner.w1": "colwise", "aligner.w2": "rowwise"}
    _fsdp_plan = {"vision_tower": "free_full_weight", "aligner": "free_full_weight"}

    def __init__(self, config: DeepseekV4VlConfig):
        super().__init__(config)
        self.vision_tower = DeepseekV4VisionModel(config.vision_config)
        self.aligner = DeepseekV4Aligner(config.vision_config, config.hidden_size)
        self.language_model = DeepseekV4VlTextModel(config)
        for name in ("image_start", "image_pad", "image_newline", "image_end"):
            setattr(self, name, nn.Parameter(torch.empty(config.hidden_size, dtype=torch.float32)))
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            for vector in (self.image_start, self.image_pad, self.image_newline, self.image_end):
                init.normal_(vector, mean=0.0, std=self.config.initializer_range)

    @accepts_precomputed_kwargs(modality="image")
    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_grid_thw: torch.Tensor,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """The tower's outputs, and `pooler_output`: a tensor (tokens, text width) for each image.

        Its tokens are in the order of their placeholders, which is not raster order: see [`interleaved_order`].

        Args:
            pixel_values, image_grid_thw: packed images, as [`DeepseekV4VisionModel`] takes them.

        Raises:
            ValueError: as the tower, or a grid of more than one temporal step.
        """
        grid = checked_grid(image_grid_thw, 1)
        for index, (steps, rows, cols) in enumerate(grid):
            if steps != 1:
                raise ValueError(
                    f"image_grid_thw[{index}] is {[steps, rows, cols]}; DeepSeek-V4 reads images only, give 1 temporal step."
                )
        outputs = self.vision_tower(pixel_values, image_grid_thw, return_dict=True, **kwargs)
        features = self.aligner(outputs.last_hidden_state, image_grid_thw)
        ratio = self.config.vision_config.downsample_ratio
        sides = [(-(-rows // ratio), -(-cols // ratio)) for _, rows, cols in grid]
        outputs.pooler_output = tuple(
            image[interleaved_order(*shape).to(image.device)]
            for shape, image in zip(sides, features.split([rows * cols for rows, cols in sides]))
        )
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
        use_cache: bool | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultimodalMoeBaseModelOutputWithPast:
        """Text states, images standing in the place of their tokens.

        Args:
            input_ids: (batch, length), int64; an image is a block of the five ids from `config.image_start_token_id` on.
            attention_mask, position_ids, cache: as the text model takes them.
            inputs_embeds: (batch, length, size), instead of the embeddings of `input_ids`, which then say where images stand
                and how tokens are routed; without `input_ids` there can be neither images nor layers that route by token.
            pixel_values, image_grid_thw: the images of all rows, in order; see [`get_image_features`].
            mm_encoder_outputs: what `get_image_features` returned before, under "image", instead of pixels.

        Raises:
            ValueError: neither ids nor embeddings, pixels and features together, images without ids, another number of
                placeholders than features, or an image that is not whole.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("Pass input_ids, or inputs_embeds, or both.")
        images = pixel_values is not None or (mm_encoder_outputs or {}).get("image") is not None
        if images and input_ids is None:
            raise ValueError("Images came without input_ids, which say where they stand; pass both.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        # After the embeddings, as where there is no image: ranks gather their shards in one order.
        encoded = image_outputs(
            self.get_image_features, pixel_values, {"image_grid_thw": image_grid_thw}, mm_encoder_outputs, kwargs
        )
        if input_ids is not None:
            inputs_embeds = self._place_marks(inputs_embeds, input_ids)
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
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        return MultimodalMoeBaseModelOutputWithPast(**outputs, image_outputs=encoded)

    def _place_marks(self, inputs_embeds, input_ids):
        """The four vectors in the place of the tokens that frame and fill an image."""
        kinds = (input_ids - self.config.image_start_token_id).to(inputs_embeds.device)
        marks = torch.stack(
            # The middle one is never read: its tokens are the placeholders of features.
            (self.image_start, self.image_pad, self.image_pad, self.image_newline, self.image_end)
        ).to(inputs_embeds)
        placed = (kinds >= 0) & (kinds < len(marks)) & (input_ids != self.config.image_token_id).to(kinds.device)
        return torch.where(placed[..., None], marks[kinds.clamp(0, len(marks) - 1)], inputs_embeds)


class DeepseekV4ForConditionalGeneration(DeepseekV4VlPreTrainedModel, MediaGenerationMixin):
    """DeepSeek-V4 with images and its language head.

    LoRA targets for PEFT, as regular expressions over module names: the tower's attention
    `.*vision_tower.*\\.(wqkv|wo)`, the aligner `.*aligner\\.w[12]`, the text model's attention
    `.*self_attn\\.(q_a_proj|q_b_proj|kv_proj|o_b_proj)`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: DeepseekV4VlConfig):
        super().__init__(config)
        self.model = DeepseekV4VlModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """See [`DeepseekV4VlModel.get_image_features`]."""
        return self.model.get_image_features(pixel_values, image_grid_thw, **kwargs)

    @property
    def placeholder_ids(self):
        return range(self.config.image_start_token_id, self.config.image_end_token_id + 1)

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
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultimodalMoeCausalLMOutputWithPast:
        """As [`DeepseekV4VlModel`], plus logits and loss.

        Args:
            labels: (batch, length), int64, -100 where no loss is taken; shifted inside.
            output_router_logits: return the routers' scores, and add their balancing loss to `loss`.
            logits_to_keep: compute logits for the last so many positions (0: all), or for these positions.
            kwargs: `num_items_in_batch` divides the summed loss under gradient accumulation.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            output_router_logits=output_router_logits,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if output_router_logits:
            aux_loss = load_balancing_loss_func(
                outputs.router_logits, self.config.n_routed_experts, self.config.num_experts_per_tok, attention_mask
            )
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MultimodalMoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            image_outputs=outputs.image_outputs,
        )
