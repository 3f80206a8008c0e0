"""Configuration of the Pixtral family, for every shape in which its checkpoints are published.

One architecture, three shapes: Pixtral-12B says `model_type` `llava`, Mistral-Small-3.1 and its successors `mistral3`,
and Mistral's own folders hold a `params.json`. The published fields and `model_type` stay as they are.
"""

import re
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlavaConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .flat_code import SavesItsCode
from .native_params_pixtral import config_fields, is_native_folder, read_params

# What the text models of Pixtral-12B and of Mistral-Small-3.1 have in common.
_TEXT = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131_072,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
}
_HUB_KEYWORDS = {
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code",
    "_from_auto", "_from_pipeline",
}  # fmt: skip


@strict
class PixtralVisionConfig(SavesItsCode, PreTrainedConfig):
    """Shape of the Pixtral tower: plain attention over the patches of each image, rotated by row and column.

    Args:
        hidden_size, intermediate_size: widths of the residual stream and of the gated feed-forward.
        num_hidden_layers: layers of the checkpoint; negative layer numbers count back from here.
        num_hidden_layers_override: build only so many of them; the others are left out of the checkpoint when it loads.
        num_attention_heads, head_dim: heads, and channels of each (always `hidden_size / num_attention_heads`).
        num_channels: colour channels of a patch.
        image_size: longest side that the checkpoint was trained on, in pixels; no limit to the tower.
        patch_size: side of a patch, in pixels.
        spatial_merge_size: side of the blocks in which packed patches come; 1 is plain raster order. A composite
            configuration sets it.
        hidden_act: activation of the feed-forward's gate.
        attention_dropout: share of the attention weights dropped in training.
        image_mean, image_std: colour statistics, in 0 to 1, by which the tower normalises uint8 pixels.
        rope_parameters: `{"rope_type": "axial", "rope_theta": 1e4}` by default.

    Raises:
        ValueError: a value that no tower can be built from, or `require_post_norm=True`; the message says what would be
            accepted.
    """

    model_type = "pixtral"
    base_config_key = "vision_config"
    default_rope_type = "axial"
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_pixtral.PixtralVisionConfig",
        "AutoModel": "modeling_pixtral.PixtralVisionModel",
    }
    base_model_tp_plan = {
        "transformer.layers.*.attention.q_proj": "colwise",
        "transformer.layers.*.attention.k_proj": "colwise",
        "transformer.layers.*.attention.v_proj": "colwise",
        "transformer.layers.*.attention.o_proj": "rowwise",
        "transformer.layers.*.feed_forward.gate_proj": "colwise",
        "transformer.layers.*.feed_forward.up_proj": "colwise",
        "transformer.layers.*.feed_forward.down_proj": "rowwise",
    }
    base_model_fsdp_plan = {"transformer.layers.*": "free_full_weight"}

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_hidden_layers_override: int | None = None
    num_attention_heads: int = 16
    head_dim: int | None = None
    num_channels: int = 3
    image_size: int | list[int] | tuple[int, ...] = 1024
    patch_size: int = 16
    spatial_merge_size: int = 1
    hidden_act: str = "gelu"
    attention_dropout: float | int = 0.0
    image_mean: list[float] | tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: list[float] | tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rope_parameters: dict | None = None
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        if kwargs.pop("require_post_norm", None):
            raise ValueError(
                "require_post_norm is True, and Pixtral has no norm after its last layer; leave it out, or take a layer's "
                "states by vision_feature_layer."
            )
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_channels", "patch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1.")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        self._check()

    @property
    def num_built_layers(self) -> int:
        """Layers that the tower has."""
        override = self.num_hidden_layers_override
        return self.num_hidden_layers if override is None else override

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch, ordered (channel, row, column)."""
        return self.num_channels * self.patch_size**2

    def state_index(self, layer: int) -> int:
        """Place of a layer's output among the tower's hidden states, 0 being the embedding; `layer` may be negative.

        Raises:
            ValueError: the checkpoint has no such layer, or the tower does not build it.
        """
        index = layer + self.num_hidden_layers + 1 if layer < 0 else layer
        if not 0 <= index <= self.num_built_layers:
            raise ValueError(
                f"vision_feature_layer {layer} is hidden state {index}, and the tower builds {self.num_built_layers} of "
                f"{self.num_hidden_layers} layers; give 0 (the embedding) to {self.num_built_layers}, or raise "
                "num_hidden_layers_override."
            )
        return index

    def _check(self):
        if self.spatial_merge_size < 1:
            raise ValueError(f"spatial_merge_size is {self.spatial_merge_size}; give a whole number of at least 1.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}; give 0 or more.")
        if not 0 <= self.num_built_layers <= self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_layers_override is {self.num_hidden_layers_override}; give 0 to {self.num_hidden_layers}, "
                "the number of layers in the checkpoint."
            )
        if self.head_dim * self.num_attention_heads != self.hidden_size or self.head_dim % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads} and head_dim "
                f"{self.head_dim} do not fit: head_dim must be hidden_size / num_attention_heads, and a multiple of 4 "
                "because axial rotation turns pairs for rows and pairs for columns."
            )
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != self.num_channels:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} values; give one for each of {self.num_channels} channels."
                )
        rope_type = self.rope_parameters["rope_type"]
        if rope_type != "axial":
            raise ValueError(f'rope_parameters["rope_type"] is {rope_type!r}; the tower knows only "axial".')


@strict
class PixtralConfig(SavesItsCode, PreTrainedConfig):
    """The tower, a projector and a text model, as `mistral3` checkpoints have them: normalised, then merged, patches.

    `from_pretrained` and `from_dict` read all three published shapes and return the class whose `model_type` it is:
    this one, [`PixtralLlavaConfig`] or [`PixtralMixedConfig`].

    Args:
        vision_config: a [`PixtralVisionConfig`] or its fields.
        text_config: any text configuration, or its fields; `model_type` is `"mistral"` where none is given.
        image_token_index: the placeholder that features replace; also readable as `image_token_id`.
        projector_hidden_act: activation between the projector's two layers.
        vision_feature_layer: hidden state of the tower that the projector reads (0 the embedding, -1 the last); several
            are joined on the channel axis.
        vision_feature_select_strategy: only `"full"`; Pixtral has no class token to drop.
        multimodal_projector_bias: whether the projector's two layers have biases.
        spatial_merge_size: side of the block of patches that becomes one text token.
        projector_norm, projector_merger: whether patches are normalised, and merged by a learned layer, first.
        native_params: text of the `params.json` that this configuration was read from, kept for the way back.

    Raises:
        ValueError: parts that do not fit together; the message says what would be accepted.
    """

    model_type = "mistral3"
    keys_to_ignore_at_inference = ["cache", "image_outputs"]  # a Trainer would gather them for every evaluated row
    published_prefix: ClassVar[str] = "Mistral3"
    attribute_map = {"image_token_id": "image_token_index"}
    sub_configs_defaults = {
        "vision_config": SubConfigSpec(PixtralVisionConfig, init_kwargs={"patch_size": 14, "image_size": 1540}),
        "text_config": SubConfigSpec(
            AutoConfig, model_type="mistral", init_kwargs=_TEXT | {"intermediate_size": 32768}
        ),
    }
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_pixtral.PixtralConfig",
        "AutoModel": "modeling_pixtral.PixtralModel",
        "AutoModelForImageTextToText": "modeling_pixtral.PixtralForConditionalGeneration",
    }
    base_model_tp_plan = {"multi_modal_projector.linear_1": "colwise", "multi_modal_projector.linear_2": "rowwise"}
    base_model_fsdp_plan = {"vision_tower": "free_full_weight", "multi_modal_projector": "free_full_weight"}

    vision_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    image_token_index: int = 10
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: str = "full"
    multimodal_projector_bias: bool = False
    spatial_merge_size: int = 2
    projector_norm: bool = True
    projector_merger: bool = True
    tie_word_embeddings: bool = True
    native_params: str | None = None

    def __post_init__(self, **kwargs):
        vision = self.vision_config
        if isinstance(vision, dict) and vision.get("model_type", "pixtral") != "pixtral":
            raise ValueError(
                f'vision_config has model_type {vision["model_type"]!r}; this family has the tower "pixtral". Load the '
                "checkpoint with transformers' own classes."
            )
        if isinstance(vision, PreTrainedConfig) and not isinstance(vision, PixtralVisionConfig):
            self.vision_config = vision.to_dict()
        super().__post_init__(**kwargs)
        self._check()
        self.vision_config.spatial_merge_size = self.spatial_merge_size

    @property
    def feature_layers(self) -> list[int]:
        """`vision_feature_layer` as a list."""
        layer = self.vision_feature_layer
        return [layer] if isinstance(layer, int) else list(layer)

    def to_dict(self):
        """As transformers', `architectures` being the published names: servers without our code go by them."""
        fields = super().to_dict()
        if fields.get("architectures"):
            ours = re.compile(r"^Pixtral(Llava|Mixed)?(?=Model$|ForConditionalGeneration$)")
            fields["architectures"] = [ours.sub(self.published_prefix, name) for name in fields["architectures"]]
        return fields

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As transformers', and for a native folder the fields that its `params.json` stands for."""
        if is_native_folder(pretrained_model_name_or_path):
            unused = {name: value for name, value in kwargs.items() if name not in _HUB_KEYWORDS}
            return config_fields(read_params(pretrained_model_name_or_path)), unused
        return super().get_config_dict(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As transformers', for a folder of any of the three shapes; see the class."""
        # The reader warns where a folder's `model_type` is not that of the class, so the class is found first.
        fields, _ = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        return super(PixtralConfig, cls._published_as(fields)).from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As transformers'; `model_type` picks the class."""
        return super(PixtralConfig, cls._published_as(config_dict)).from_dict(config_dict, **kwargs)

    @classmethod
    def _published_as(cls, fields: dict) -> type["PixtralConfig"]:
        published = (PixtralConfig, PixtralLlavaConfig, PixtralMixedConfig)
        return {kind.model_type: kind for kind in published}.get(fields.get("model_type"), cls)

    def _check(self):
        if self.vision_feature_select_strategy != "full":
            raise ValueError(
                f"vision_feature_select_strategy is {self.vision_feature_select_strategy!r}; Pixtral has no class token to "
                'drop, give "full".'
            )
        if not self.feature_layers:
            raise ValueError(
                "vision_feature_layer is an empty list; name at least one layer, such as -1 for the last."
            )
        for layer in self.feature_layers:
            self.vision_config.state_index(layer)
        if self.spatial_merge_size < 1:
            raise ValueError(f"spatial_merge_size is {self.spatial_merge_size}; give a whole number of at least 1.")
        if self.spatial_merge_size > 1 and not self.projector_merger:
            raise ValueError(
                f"spatial_merge_size is {self.spatial_merge_size} and projector_merger is False; without a merger every "
                "patch is a token, give 1."
            )
        self._check_projector()

    def _check_projector(self):
        if not (self.projector_norm and self.projector_merger):
            raise ValueError(
                f'projector_norm is {self.projector_norm} and projector_merger {self.projector_merger}; a "mistral3" '
                "projector has both. Use PixtralLlavaConfig for neither, PixtralMixedConfig for one of them."
            )


@strict
class PixtralLlavaConfig(PixtralConfig):
    """Pixtral-12B's shape, `llava`: every patch is one token, and the projector has neither norm nor merger.

    Arguments are those of [`PixtralConfig`], and `image_seq_length`, which transformers keeps in such files.
    """

    model_type = "llava"
    sub_configs_defaults = {
        "vision_config": PixtralVisionConfig,
        "text_config": SubConfigSpec(AutoConfig, model_type="mistral", init_kwargs=_TEXT),
    }
    published_prefix: ClassVar[str] = "Llava"
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_pixtral.PixtralLlavaConfig",
        "AutoModel": "modeling_pixtral_types.PixtralLlavaModel",
        "AutoModelForImageTextToText": "modeling_pixtral_types.PixtralLlavaForConditionalGeneration",
    }

    image_seq_length: int = 1
    multimodal_projector_bias: bool = True
    spatial_merge_size: int = 1
    projector_norm: bool = False
    projector_merger: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # As in transformers: files of this type note it in the text part only.
        self.tie_word_embeddings = self.tie_word_embeddings or self.text_config.tie_word_embeddings

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As [`PixtralConfig.from_dict`]; a `llava` file with another tower becomes transformers' own configuration."""
        vision = config_dict.get("vision_config")
        if isinstance(vision, dict) and vision.get("model_type", "pixtral") != "pixtral":
            # Where this class is registered for `llava`, it is asked for every LLaVA model.
            return LlavaConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)

    def _check_projector(self):
        if self.projector_norm or self.projector_merger:
            raise ValueError(
                f'projector_norm is {self.projector_norm} and projector_merger {self.projector_merger}; a "llava" projector '
                "has neither. Use PixtralConfig for both, PixtralMixedConfig for one of them."
            )


@strict
class PixtralMixedConfig(PixtralConfig):
    """A native folder with a norm but no merger, or a merger but no norm.

    No class of transformers computes it, so its `model_type` is one that transformers refuses to load with its own.
    """

    model_type = "pixtral_mixed"
    published_prefix: ClassVar[str] = "PixtralMixed"
    hub_classes: ClassVar[dict] = {
        "AutoConfig": "configuration_pixtral.PixtralMixedConfig",
        "AutoModel": "modeling_pixtral_types.PixtralMixedModel",
        "AutoModelForImageTextToText": "modeling_pixtral_types.PixtralMixedForConditionalGeneration",
    }

    def _check_projector(self):
        """Both are free here."""
