"""Configuration of LFM3-VL; the defaults are those of the checkpoint LiquidAI/LFM3-VL-2B."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.configuration_utils import SubConfigSpec

from .flat_code import SavesItsCode

LAYER_TYPES = ("conv", "full_attention")
# What layers of the tower and of the text model share in parallel; transformers has no plan for those of the latter.
# Outputs of attention, and the convolution itself, have names of their own in each.
SHARDED_LAYERS = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.conv": "reads_conv",
    "layers.*.conv.in_proj": "stacked_colwise_3",
    "layers.*.conv.out_proj": "stacked_rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
}


@strict
class Lfm3VlVisionConfig(SavesItsCode, PreTrainedConfig):
    """Shape of the LFM3-VL tower: gated 2-D convolutions and grouped-query attention over the patches of each frame.

    Args:
        hidden_size, intermediate_size: widths of the residual stream and of the gated feed-forward.
        in_channels: colour channels of a patch.
        patch_size: side of a patch, in pixels.
        spatial_merge_size: side of the block of patches that becomes one text token.
        temporal_patch_size: video frames that share one patch; an image repeats itself that often.
        num_hidden_layers: number of layers.
        num_attention_heads, num_key_value_heads: query heads, and the key-value heads that they share in equal groups.
        layer_types: `"conv"` or `"full_attention"` for each layer. Default: convolution in the first two layers and in
            every odd one.
        conv_kernel_size: side of the depthwise convolution, in patches; odd.
        norm_eps: added to the mean square in every RMSNorm.
        rope_parameters: `{"rope_type": "axial", "rope_theta": 1e6}` by default.

    Raises:
        ValueError: a value that no tower can be built from; the message says what would be accepted.
    """

    model_type = "lfm3_vl_vision"
    base_config_key = "vision_config"
    default_rope_type = "axial"
    default_theta = 1_000_000.0
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_lfm3_vl.Lfm3VlVisionConfig",
        "AutoModel": "modeling_lfm3_vl.Lfm3VlVisionModel",
    }
    base_model_tp_plan = SHARDED_LAYERS | {
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.conv.spatial_conv": "channelwise_conv",
    }
    base_model_fsdp_plan = {"layers.*": "free_full_weight"}

    hidden_size: int = 1024
    intermediate_size: int = 2560
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    num_hidden_layers: int = 14
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    layer_types: list[str] | None = None
    conv_kernel_size: int = 3
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    rope_parameters: dict | None = None

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["conv" if i < 2 or i % 2 else "full_attention" for i in range(self.num_hidden_layers)]
        # transformers takes "default" for this class's own type, and would check any other one by its own rules first
        rope_type = (self.rope_parameters or {}).get("rope_type", "axial")
        if rope_type not in ("axial", "default"):
            raise ValueError(f'rope_parameters["rope_type"] is {rope_type!r}; the tower knows only "axial".')
        super().__post_init__(**kwargs)
        self._check()

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch, ordered (channel, temporal, row, column)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def _check(self):
        positive = (
            "hidden_size", "intermediate_size", "in_channels", "patch_size", "spatial_merge_size",
            "temporal_patch_size", "num_attention_heads", "num_key_value_heads", "conv_kernel_size",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}; give 0 or more.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide by num_attention_heads {self.num_attention_heads}; "
                f"give a multiple of {self.num_attention_heads}, such as "
                f"{(self.hidden_size // self.num_attention_heads + 1) * self.num_attention_heads}."
            )
        if self.head_dim % 4:
            raise ValueError(
                f"Each head has {self.head_dim} channels (hidden_size {self.hidden_size} / num_attention_heads "
                f"{self.num_attention_heads}); axial rotation turns pairs for rows and pairs for columns, so the "
                "channels of a head must be a multiple of 4."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            accepted = [n for n in range(1, self.num_attention_heads + 1) if self.num_attention_heads % n == 0]
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads "
                f"{self.num_attention_heads}; give one of {accepted}."
            )
        if self.conv_kernel_size % 2 == 0:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}; an even kernel has no centre patch, give an odd size "
                f"such as {self.conv_kernel_size + 1}."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers and num_hidden_layers is {self.num_hidden_layers}; "
                "give one type for each layer."
            )
        for index, layer_type in enumerate(self.layer_types):
            if layer_type not in LAYER_TYPES:
                raise ValueError(f"layer_types[{index}] is {layer_type!r}; give one of {list(LAYER_TYPES)}.")
        theta = self.rope_parameters["rope_theta"]
        for name, value in (("norm_eps", self.norm_eps), ('rope_parameters["rope_theta"]', theta)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; give a number above 0.")


@strict
class Lfm3VlConfig(SavesItsCode, PreTrainedConfig):
    """LFM3-VL: the tower, a two-layer projector and the LFM3 text model.

    Args:
        vision_config: a [`Lfm3VlVisionConfig`] or its fields.
        text_config: any text configuration, or its fields; `model_type` is `"lfm3"` where none is given. A rotation
            labelled `"default"` with a `partial_rotary_factor` other than 1, as released configurations write it, is
            relabelled `"proportional"`: transformers reads `"default"` as a rotation of the whole head, which is not
            what those weights were trained with.
        image_token_id, video_token_id: the placeholders that features replace.
        vision_start_token_id, vision_end_token_id: the marks around each run of placeholders.
        projector_hidden_act, projector_hidden_size, projector_bias: the projector's activation, width and biases.

    Raises:
        ValueError: image and video share one placeholder, the projector's width or activation is impossible, or a
            sub-configuration is.
    """

    model_type = "lfm3_vl"
    keys_to_ignore_at_inference = [
        "cache",
        "image_outputs",
        "video_outputs",
    ]  # else a Trainer gathers them when evaluating
    sub_configs_defaults = {
        "vision_config": Lfm3VlVisionConfig,
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="lfm3"),
    }
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_lfm3_vl.Lfm3VlConfig",
        "AutoModel": "modeling_lfm3_vl.Lfm3VlModel",
        "AutoModelForImageTextToText": "modeling_lfm3_vl.Lfm3VlForConditionalGeneration",
    }
    base_model_tp_plan = {
        "multi_modal_projector.linear_1": "colwise",
        "multi_modal_projector.linear_2": "rowwise",
        **{f"language_model.{rule}": style for rule, style in SHARDED_LAYERS.items()},
        "language_model.layers.*.self_attn.g_proj": "colwise",
        "language_model.layers.*.self_attn.o_proj": "rowwise",
        "language_model.layers.*.conv.conv": "channelwise_conv",
    }
    base_model_pp_plan = {
        "language_model.embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "language_model.layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "language_model.embedding_norm": (["hidden_states"], ["hidden_states"]),
    }
    base_model_fsdp_plan = {"vision_tower": "free_full_weight", "multi_modal_projector": "free_full_weight"}

    vision_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 125_030
    video_token_id: int = 125_029
    vision_start_token_id: int = 125_009
    vision_end_token_id: int = 125_010
    projector_hidden_act: str = "gelu"
    projector_hidden_size: int = 4096
    projector_bias: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        _keep_partial_rotation(self.text_config)
        if self.image_token_id == self.video_token_id:
            raise ValueError(
                f"image_token_id and video_token_id are both {self.image_token_id}; features are placed by their own "
                "placeholder, give two different ids."
            )
        if self.projector_hidden_size < 1:
            raise ValueError(f"projector_hidden_size is {self.projector_hidden_size}; give at least 1.")
        if self.projector_hidden_act not in ACT2FN:
            raise ValueError(f"projector_hidden_act is {self.projector_hidden_act!r}; give one of {sorted(ACT2FN)}.")


def _keep_partial_rotation(text_config: PreTrainedConfig) -> None:
    if text_config.model_type != "lfm3":
        return
    for rope in (text_config.rope_parameters or {}).values():
        if isinstance(rope, dict) and rope.get("rope_type") == "default" and rope.get("partial_rotary_factor", 1) != 1:
            rope["rope_type"] = "proportional"
