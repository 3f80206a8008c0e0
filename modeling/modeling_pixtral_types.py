"""The Pixtral models under the other two `model_type`s: Auto classes want a model class for each configuration class."""

from ..configuration.configuration_pixtral import PixtralLlavaConfig, PixtralMixedConfig
from .modeling_pixtral import PixtralForConditionalGeneration, PixtralModel


class PixtralLlavaModel(PixtralModel):
    """[`PixtralModel`] of a `llava` checkpoint."""

    config: PixtralLlavaConfig


class PixtralLlavaForConditionalGeneration(PixtralForConditionalGeneration):
    """[`PixtralForConditionalGeneration`] of a `llava` checkpoint."""

    config: PixtralLlavaConfig


class PixtralMixedModel(PixtralModel):
    """[`PixtralModel`] with a norm or a merger alone."""

    config: PixtralMixedConfig


class PixtralMixedForConditionalGeneration(PixtralForConditionalGeneration):
    """[`PixtralForConditionalGeneration`] with a norm or a merger alone."""

    config: PixtralMixedConfig
