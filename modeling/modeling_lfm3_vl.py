"""LFM3-VL: a tower of gated 2-D convolutions and bidirectional attention over packed patches, and the model around it.

Architecture, names and numbers: the checkpoint LiquidAI/LFM3-VL-2B.
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
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from .checkpoint_formats import ReadsPublishedNames, register_checkpoint_formats
from .packed_attention import eager_attention, packed_attention
from .packed_metadata import RunsFromMetadata
from .packed_pixels import TakesPackedPixels
from .packed_text import is_packed, run_sequences_apart
from .patch_grids import PackedFrames, PatchGrids, UnseenFrames, checked_grid, neighbouring_patches
from .placeholders import MediaGenerationMixin, in_step_with_other_ranks, place_features
from .tensor_parallel import KeepsWholeWhatDoesNotDivide
from .vision_layers import RMSNorm, axial_rotary, group_by_group, learns, normalized, rotate

register_checkpoint_formats()


class Lfm3VlVisionAttention(nn.Module):
    """Grouped-query attention among the patches of one frame; each query and key head is normalised, then rotated."""

    is_causal = False

    def __init__(self, config: Lfm3VlVisionConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, cos, sin, cu_seqlens, frames: PackedFrames | UnseenFrames, **kwargs):
        # (num_patches, num_heads, head_dim)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotate(self.q_norm(query), cos, sin)
        key = rotate(self.k_norm(key), cos, sin)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        attended, weights = packed_attention(
            interface, self, query, key, value, segments=frames.segments, cu_seqlens=cu_seqlens, **kwargs
        )
        return self.out_proj(attended), weights


class Lfm3VlVisionConv(nn.Module):
    """Depthwise convolution over each frame's grid, gated before and after; zeros lie beyond a frame's border."""

    def __init__(self, config: Lfm3VlVisionConfig):
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel_size
        self.in_proj = nn.Linear(size, 3 * size, bias=False)
        self.spatial_conv = nn.Conv2d(size, size, kernel, padding=kernel // 2, groups=size, bias=False)
        self.out_proj = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states, frames: PackedFrames | UnseenFrames):
        gate_in, gate_out, values = self.in_proj(hidden_states).chunk(3, dim=-1)
        gated = gate_in * values
        mixed = self.over_grids(gated, frames) if frames.neighbours is None else self.gathered(gated, frames)
        return self.out_proj(gate_out * mixed)

    def over_grids(self, patches, frames: PackedFrames):
        """(num_patches, channels): one convolution for each stretch of frames of one shape."""
        convolved = []
        for (count, rows, cols), run in zip(frames.runs, patches.split([n * r * c for n, r, c in frames.runs])):
            # (count, channels, rows, cols), channels last in memory: a view of raster order
            grid = run.view(count, rows, cols, -1).permute(0, 3, 1, 2)
            convolved.append(self.spatial_conv(grid).permute(0, 2, 3, 1).reshape(count * rows * cols, -1))
        return convolved[0] if len(convolved) == 1 else torch.cat(convolved)

    def gathered(self, patches, frames: UnseenFrames):
        """The same as one expression of tensors, whatever the shapes: each place of the window picks its neighbours."""
        # Index 0 picks zeros.
        bordered = F.pad(patches, (0, 0, 1, 0))
        weights = self.spatial_conv.weight.flatten(1).unbind(1)
        places = frames.neighbours.unbind(1)
        return sum(bordered[place].float() * weight.float() for place, weight in zip(places, weights)).to(
            patches.dtype
        )


class Lfm3VlVisionMLP(nn.Module):
    """Gated feed-forward: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: Lfm3VlVisionConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        return self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states))


class Lfm3VlVisionLayer(GradientCheckpointingLayer):
    """A convolution or attention operator, then the feed-forward; each normalised before and added to its input."""

    _z3_leaf = True  # DeepSpeed gathers a layer as a whole: how often its parts run depends on the shapes of a rank

    def __init__(self, config: Lfm3VlVisionConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.operator_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if config.layer_types[layer_idx] == "full_attention":
            self.self_attn = Lfm3VlVisionAttention(config)
        else:
            self.conv = Lfm3VlVisionConv(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = Lfm3VlVisionMLP(config)

    @group_by_group
    def forward(self, hidden_states, cos, sin, cu_seqlens, frames: PackedFrames | UnseenFrames, **kwargs):
        normed = self.operator_norm(hidden_states)
        if hasattr(self, "self_attn"):
            mixed, _ = self.self_attn(normed, cos, sin, cu_seqlens, frames, **kwargs)
        else:
            mixed = self.conv(normed, frames)
        hidden_states = hidden_states + mixed
        return hidden_states + self.feed_forward(self.ffn_norm(hidden_states))


class Lfm3VlPreTrainedModel(TakesPackedPixels, ReadsPublishedNames, KeepsWholeWhatDoesNotDivide, PreTrainedModel):
    config: Lfm3VlConfig
    base_model_prefix = "model"
    input_modalities = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["Lfm3VlVisionLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True


class Lfm3VlVisionModel(RunsFromMetadata, Lfm3VlPreTrainedModel):
    """The LFM3-VL tower over the packed patches of any number of images and videos of any size."""

    config: Lfm3VlVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image", "video")
    packed_inputs = (*RunsFromMetadata.packed_inputs, "neighbours")
    _input_embed_layer = "patch_embed"
    _can_record_outputs = {"hidden_states": Lfm3VlVisionLayer, "attentions": Lfm3VlVisionAttention}

    def __init__(self, config: Lfm3VlVisionConfig):
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(Lfm3VlVisionLayer(config, index) for index in range(config.num_hidden_layers))
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
        """Encode patches.

        Args:
            pixel_values: (num_patches, in_channels * temporal_patch_size * patch_size**2); each patch flattened in the
                order (channel, temporal, row, column), patches in merge-block order. Normalised floats, cast to the
                embedding's dtype, or raw uint8, which are normalised here with a mean and a deviation of 0.5.
            grid_thw: (num_images_or_videos, 3), int64: temporal steps, rows and columns of each, in patches.
            image_grid_thw: the same by the image processor's name, so that `tower(**image_processor(images))` works.
            kwargs: `output_hidden_states`, `output_attentions` (one map per temporal step, under `eager`), and
                transformers' precomputed `position_ids` (num_patches, 2), `cu_seqlens`, `max_seqlen`.

        Returns:
            `last_hidden_state` (num_patches, hidden_size) in the order of the input.

        Raises:
            ValueError: shapes or grids that do not fit together, or that the merge size does not divide.
        """
        self.check_patches(pixel_values)
        if (grid_thw is None) == (image_grid_thw is None):
            raise ValueError("Pass the grids once, as grid_thw: (number of images or videos, 3), in patches.")
        grid_thw = image_grid_thw if grid_thw is None else grid_thw
        pixel_values = self.on_this_device(pixel_values)
        grids = PatchGrids(grid_thw, self.spatial_merge_size, len(pixel_values), pixel_values.device)
        cos, sin = self.rotary(grids.tower_positions(kwargs))
        cu_seqlens, max_seqlen = grids.tower_seqlens(kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns(self, pixel_values)):
            layout = (cos, sin, cu_seqlens, grids.frames)
            outputs = self._encode(pixel_values, *layout, entry=grids.entry, max_seqlen=max_seqlen, **kwargs)
        return grids.leave_outputs(outputs)

    def rotary(self, positions):
        return axial_rotary(positions, self.config.rope_parameters["rope_theta"], self.config.head_dim)

    def more_metadata(self, grid, device):
        kernel = self.config.conv_kernel_size
        return {"neighbours": neighbouring_patches(grid, self.spatial_merge_size, kernel, device)}

    def check_patches(self, pixel_values):
        if pixel_values.ndim != 2 or pixel_values.shape[1] != self.config.patch_dim:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; give (num_patches, {self.config.patch_dim}), each "
                f"row one patch of {self.config.in_channels} channels x {self.config.temporal_patch_size} frames x "
                f"{self.config.patch_size} x {self.config.patch_size} pixels."
            )

    def normalized(self, pixel_values, dtype):
        half = [0.5] * self.config.in_channels  # mean and deviation of every channel
        return normalized(pixel_values, half, half, dtype)

    @capture_outputs
    def _encode(self, pixel_values, *args, entry=slice(None), **kwargs):
        pixel_values = self.normalized(pixel_values[entry], self.patch_embed.weight.dtype)
        hidden_states = self.embedding_norm(self.patch_embed(pixel_values))
        del pixel_values
        for layer in self.layers:
            hidden_states = layer(hidden_states, *args, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states)


class Lfm3VlMultiModalProjector(nn.Module):
    """Normalises each patch, joins the patches of a merge block, and maps the block to the text width."""

    def __init__(self, config: Lfm3VlConfig):
        super().__init__()
        vision = config.vision_config
        self.merged_size = vision.hidden_size * vision.spatial_merge_size**2
        self.layer_norm = nn.LayerNorm(vision.hidden_size, eps=1e-6)
        self.linear_1 = nn.Linear(self.merged_size, config.projector_hidden_size, bias=config.projector_bias)
        self.act = ACT2FN[config.projector_hidden_act]
        self.linear_2 = nn.Linear(
            config.projector_hidden_size, config.text_config.hidden_size, bias=config.projector_bias
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(num_patches, hidden_size) in merge-block order -> (num_patches / spatial_merge_size**2, text width)."""
        merged = self.layer_norm(hidden_states).reshape(-1, self.merged_size)
        return self.linear_2(self.act(self.linear_1(merged)))


class Lfm3VlModel(Lfm3VlPreTrainedModel):
    """Tower, projector and text model, without the language head."""

    accepts_loss_kwargs = False

    def __init__(self, config: Lfm3VlConfig):
        super().__init__(config)
        self.vision_tower = Lfm3VlVisionModel(config.vision_config)
        self.multi_modal_projector = Lfm3VlMultiModalProjector(config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    @accepts_precomputed_kwargs(modality="image")
    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """The tower's outputs, with `pooler_output` one tensor (tokens of that image, text width) per image."""
        outputs = self.vision_tower(pixel_values, grid_thw=image_grid_thw, return_dict=True, **kwargs)
        features = self.multi_modal_projector(outputs.last_hidden_state)
        tokens = image_grid_thw.prod(-1) // self.vision_tower.spatial_merge_size**2
        outputs.pooler_output = features.split(tokens.tolist())
        return outputs

    @accepts_precomputed_kwargs(modality="video")
    @can_return_tuple
    def get_video_features(
        self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """The same for videos: one tensor per video, its temporal steps one after the other."""
        return self.get_image_features(pixel_values_videos, video_grid_thw, return_dict=True, **kwargs)

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
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultimodalBaseModelOutputWithPast:
        """Put the features of images and videos in place of their placeholders, then run the text model.

        Args:
            input_ids (batch, length) or inputs_embeds (batch, length, text width): exactly one.
            pixel_values, pixel_values_videos: packed patches, as the tower takes them.
            image_grid_thw, video_grid_thw: (n, 3), in the order of the placeholders.
            mm_encoder_outputs: what `get_image_features` ("image") and `get_video_features` ("video") returned before,
                instead of pixels.

        Raises:
            ValueError: both or neither of ids and embeddings, pixels and features of one kind together, features of
                an unknown kind, pixels without their grid, or another number of placeholders than features.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        media = {"image": (pixel_values, image_grid_thw), "video": (pixel_values_videos, video_grid_thw)}
        features = self._features(media, mm_encoder_outputs or {}, kwargs)
        for kind, token_id in (("image", self.config.image_token_id), ("video", self.config.video_token_id)):
            if features.get(kind) is not None:
                inputs_embeds = place_features(
                    inputs_embeds, input_ids, features[kind].pooler_output, token_id, self.get_input_embeddings(), kind
                )
        if pixel_values is None and pixel_values_videos is None and mm_encoder_outputs is None:
            inputs_embeds = in_step_with_other_ranks(inputs_embeds, self.vision_tower, self.get_image_features, cache)

        packed = is_packed(position_ids, attention_mask, cache, use_cache)
        if packed and "conv" in getattr(self.config.text_config, "layer_types", ()):
            outputs = run_sequences_apart(self.language_model, inputs_embeds, position_ids, **kwargs)
        else:
            outputs = self.language_model(
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=False if packed else use_cache,
                **kwargs,
            )
        return MultimodalBaseModelOutputWithPast(
            **outputs, image_outputs=features.get("image"), video_outputs=features.get("video")
        )

    def _features(self, media, given, kwargs):
        """Outputs for images and for videos, by kind: as `given`, or of the pixels and grids in `media`."""
        if unknown := given.keys() - media.keys():
            raise ValueError(f"mm_encoder_outputs holds {sorted(unknown)}; give features under {list(media)}.")
        pixels = {kind: inputs for kind, inputs in media.items() if inputs[0] is not None}
        for kind, (_, grid) in pixels.items():
            if given.get(kind) is not None:
                raise ValueError(f"Pass either {kind} pixels or mm_encoder_outputs[{kind!r}], not both.")
            if grid is None:
                raise ValueError(f"The {kind} pixels came without {kind}_grid_thw; pass what the processor returned.")
        precomputed = any(name.startswith(("image_", "video_")) for name in kwargs)  # for one kind alone
        if len(pixels) == len(media) and not precomputed:
            return self._features_together(media, kwargs)
        encoders = {"image": self.get_image_features, "video": self.get_video_features}
        encoded = {kind: encoders[kind](*inputs, return_dict=True, **kwargs) for kind, inputs in pixels.items()}
        return {**given, **encoded}

    def _features_together(self, media, kwargs):
        """As `_features`, for images and videos in one pass: ranks with either and with both gather shards equally often."""
        tower, patches = self.vision_tower, []
        for pixels, grid in media.values():
            tower.check_patches(pixels)
            checked_grid(grid, tower.spatial_merge_size, len(pixels))
            patches.append(tower.on_this_device(pixels))
        if len({pixels.dtype for pixels in patches}) > 1:
            # uint8 is not normalised yet; joined to floats it would pass for them.
            patches = [tower.normalized(pixels, torch.float32) for pixels in patches]
        grids = [grid for _, grid in media.values()]
        outputs = self.get_image_features(torch.cat(patches), torch.cat(grids), return_dict=True, **kwargs)
        ends = (len(patches[0]), int(grids[0][:, 0].sum()), len(grids[0]))
        before, after = [slice(end) for end in ends], [slice(end, None) for end in ends]
        return {"image": part_of(outputs, *before), "video": part_of(outputs, *after)}


def part_of(outputs, patches: slice, frames: slice, media: slice) -> BaseModelOutputWithPooling:
    """What `get_image_features` found for some of the images or videos."""

    def cut(layers, index):
        return layers and tuple(None if layer is None else layer[index] for layer in layers)

    return BaseModelOutputWithPooling(
        last_hidden_state=outputs.last_hidden_state[patches],
        pooler_output=outputs.pooler_output[media],
        hidden_states=cut(outputs.hidden_states, patches),
        attentions=cut(outputs.attentions, frames),
    )


class Lfm3VlForConditionalGeneration(Lfm3VlPreTrainedModel, MediaGenerationMixin):
    """LFM3-VL with its language head."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: Lfm3VlConfig):
        super().__init__(config)
        self.model = Lfm3VlModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """See [`Lfm3VlModel.get_image_features`]."""
        return self.model.get_image_features(pixel_values, image_grid_thw, **kwargs)

    def get_video_features(
        self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """See [`Lfm3VlModel.get_video_features`]."""
        return self.model.get_video_features(pixel_values_videos, video_grid_thw, **kwargs)

    @property
    def placeholder_ids(self):
        return self.config.image_token_id, self.config.video_token_id

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs):
        """As its base, with images and videos in one pass."""
        names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
        media = {kind: [model_kwargs.pop(name, None) for name in pair] for kind, pair in names.items()}
        given = model_kwargs.get("mm_encoder_outputs") or {}
        model_kwargs["mm_encoder_outputs"] = self.model._features(media, given, {})
        return super()._prepare_multimodal_encoder_kwargs_for_generation(model_kwargs)

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
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultimodalCausalLMOutputWithPast:
        """As [`Lfm3VlModel`], plus logits and loss.

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
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
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
            video_outputs=outputs.video_outputs,
        )
