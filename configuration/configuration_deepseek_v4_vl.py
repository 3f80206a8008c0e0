"""Configuration of the DeepSeek-V4 vision family: a tower and an aligner on transformers' DeepSeek-V4 text model.

DeepSeek-V4-Flash-Vision-Exp publishes one flat file: the text fields, `model_type` `deepseek_v4`, and the tower's fields
as `vision_*`. DeepSeek-V4.1-Flash nests them in a `vision_config`. Both are read; the flat form is written.
"""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import DeepseekV4Config, PreTrainedConfig

from .flat_code import SavesItsCode

# The published flat spelling of the tower's fields.
FLAT_FIELDS = {
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_n_layers": "num_hidden_layers",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}
TOKEN_LAYOUTS = ("interleaved", "reading_order")
_V41 = "deepseek_v41"


def vision_fields(fields: dict) -> dict | None:
    """The tower's fields in those of a composite file, in either spelling; None where it has no tower."""
    if fields.get("vision_config") is not None:
        vision = fields["vision_config"]
        vision = dict(vision) if isinstance(vision, dict) else vision.to_dict()
        if fields.get("model_type") == _V41:
            vision.setdefault("token_layout", "reading_order")
        return vision
    if not fields.get("vision_n_layers"):
        return None
    return {name: fields[flat] for flat, name in FLAT_FIELDS.items() if flat in fields}


@strict
class DeepseekV4VisionConfig(SavesItsCode, PreTrainedConfig):
    """Shape of the DeepSeek-V4 tower and of its aligner, and the limits by which images are resized for them.

    Args:
        hidden_size, intermediate_size: widths of the residual stream and of the gated feed-forward.
        num_hidden_layers, num_attention_heads: layers, and heads in each.
        patch_size: side of a patch, in pixels.
        rope_theta: base of the rotary frequencies, alike for rows and columns.
        downsample_ratio: side of the block of patches that the aligner joins into one token.
        max_image_tokens: most tokens that one image may take, alignment pads included.
        min_pixels: area in pixels up to which smaller images are enlarged.
        max_wh_ratio: widest aspect that keeps its shape; None: any.
        token_layout: "interleaved" (DeepSeek-V4: rows of tokens two by two, column by column, aligned to the compressed
            windows of the text model) or "reading_order" (DeepSeek-V4.1: row by row).

    Raises:
        ValueError: a value that no tower can be built from; the message says what would be accepted.
    """

    model_type = "deepseek_v4_vision"
    base_config_key = "vision_config"
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_deepseek_v4_vl.DeepseekV4VisionConfig",
        "AutoModel": "modeling_deepseek_v4_vl.DeepseekV4VisionModel",
    }
    base_model_tp_plan = {
        "blocks.*.attn.wqkv": "stacked_colwise_3",
        "blocks.*.attn.wo": "stacked_rowwise",
        "blocks.*.mlp.w1": "stacked_colwise_2",
        "blocks.*.mlp.w2": "stacked_rowwise",
    }
    base_model_fsdp_plan = {"blocks.*": "free_full_weight"}

    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    patch_size: int = 14
    rope_theta: float | int = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 384
    min_pixels: int = 147456
    max_wh_ratio: float | int | None = 8
    token_layout: str = "interleaved"
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "patch_size",
            "downsample_ratio",
            "max_image_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1.")
        if self.min_pixels < 0:
            raise ValueError(f"min_pixels is {self.min_pixels}; give 0 or more.")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}; heads must divide "
                "the width into multiples of 4 channels, because axial rotation turns pairs for rows and for columns."
            )
        if self.max_wh_ratio is not None and self.max_wh_ratio <= 0:
            raise ValueError(f"max_wh_ratio is {self.max_wh_ratio}; give a number above 0, or None for no limit.")
        if self.token_layout not in TOKEN_LAYOUTS:
            raise ValueError(f"token_layout is {self.token_layout!r}; give one of {TOKEN_LAYOUTS}.")

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch, ordered (channel, row, column)."""
        return 3 * self.patch_size**2

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As transformers'; of a composite file, in either spelling, the tower's part."""
        fields, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return vision_fields(fields) or fields, unused


@strict
class DeepseekV4VlConfig(SavesItsCode, DeepseekV4Config):
    """[`~transformers.DeepseekV4Config`], whose fields describe the text model, with a tower.

    Args:
        vision_config: a [`DeepseekV4VisionConfig`] or its fields; the published `vision_*` fields are read as well.
        image_start_token_id: first of the five ids that mark the tokens of an image, in the order start, pad, image,
            newline, end. The default is that of the reserved tokens `<|place_holder_mm_span_0431|>` to `_0435|>`.

    Raises:
        ValueError: parts that do not fit together; the message says what would be accepted.
    """

    keys_to_ignore_at_inference = ["cache", "image_outputs"]  # a Trainer would gather them for every evaluated row
    sub_configs_defaults = {"vision_config": DeepseekV4VisionConfig}
    # What else balances experts (TRL's trainers) asks for their number by the name that most families have.
    attribute_map = DeepseekV4Config.attribute_map | {"num_experts": "n_routed_experts"}
    # transformers' plans are for the text model, which is one part of this model: the classes hold theirs.
    base_model_tp_plan = base_model_ep_plan = base_model_pp_plan = base_model_fsdp_plan = None
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_deepseek_v4_vl.DeepseekV4VlConfig",
        "AutoModel": "modeling_deepseek_v4_vl.DeepseekV4VlModel",
        "AutoModelForImageTextToText": "modeling_deepseek_v4_vl.DeepseekV4ForConditionalGeneration",
    }

    vision_config: dict | PreTrainedConfig | None = None
    image_start_token_id: int = 129257

    def __post_init__(self, **kwargs):
        flat = {name: kwargs.pop(name) for name in FLAT_FIELDS if name in kwargs}
        if self.vision_config is None:
            self.vision_config = vision_fields(flat)
        super().__post_init__(**kwargs)
        if self.vision_config.token_layout != "interleaved":
            raise ValueError(
                f"vision_config.token_layout is {self.vision_config.token_layout!r}; the DeepSeek-V4 text model takes only "
                '"interleaved" images. DeepSeek-V4.1 loads as DeepseekV4VisionModel.'
            )
        if not 0 <= self.image_start_token_id <= self.vocab_size - 5:
            raise ValueError(
                f"image_start_token_id is {self.image_start_token_id} and vocab_size {self.vocab_size}; the five ids from it "
                f"on must be in the vocabulary, give 0 to {self.vocab_size - 5}."
            )

    @property
    def image_pad_token_id(self) -> int:
        """Fills the padding row and aligns the block; its embedding is `image_pad`."""
        return self.image_start_token_id + 1

    @property
    def image_token_id(self) -> int:
        """The placeholder that an aligner row replaces."""
        return self.image_start_token_id + 2

    @property
    def image_newline_token_id(self) -> int:
        """Ends a row of an image."""
        return self.image_start_token_id + 3

    @property
    def image_end_token_id(self) -> int:
        """Ends an image."""
        return self.image_start_token_id + 4

    def to_dict(self):
        """As transformers', in the published form: flat `vision_*` fields, and the text class as architecture."""
        fields = super().to_dict()
        vision = fields.pop("vision_config")
        fields |= {flat: vision[name] for flat, name in FLAT_FIELDS.items()}
        if fields.get("architectures"):
            fields["architectures"] = ["DeepseekV4ForCausalLM"]
        return fields

    def to_diff_dict(self):
        """As transformers', what is saved; layers that route by token are counted, as published, where they stand first.

        A Trainer that resumes reads the file as any model's and would refuse the names of these layers.
        """
        fields = super().to_diff_dict()
        hashed = self.mlp_layer_types.count("hash_moe")
        if "hash_moe" not in self.mlp_layer_types[hashed:]:
            fields |= {"num_hash_layers": hashed}
            fields.pop("mlp_layer_types", None)
        return fields

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As transformers'; a file without a tower becomes transformers' own configuration.

        Raises:
            ValueError: the file is one of DeepSeek-V4.1, whose text model transformers does not have.
        """
        if config_dict.get("model_type") == _V41:
            raise ValueError(
                f'model_type is "{_V41}", whose text model transformers does not have; its tower and aligner load as '
                "DeepseekV4VisionModel and DeepseekV4Aligner, or export them with --tower-only."
            )
        if "model_type" in config_dict and vision_fields(config_dict) is None:
            # Where this class is registered for `deepseek_v4`, it is asked for every text model too.
            return DeepseekV4Config.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)
