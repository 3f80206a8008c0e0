"""Tensor names of the published checkpoints, as transformers' conversion mapping: renamed on load, reversed on save."""

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

# transformers renamed these three. Whole words only, so that no longer name is caught; the assertions are a form that
# transformers can reverse.
LFM3_VL_VISION = [
    WeightRenaming(r"(?<!\w)patchifier(?!\w)", "patch_embed"),
    WeightRenaming(r"(?<!\w)q_layernorm(?!\w)", "q_norm"),
    WeightRenaming(r"(?<!\w)k_layernorm(?!\w)", "k_norm"),
]


def register_checkpoint_formats() -> None:
    """Make `from_pretrained` and `save_pretrained` of our classes speak the published names.

    transformers applies a mapping to remote code only where it was registered by hand.
    """
    register_checkpoint_conversion_mapping("lfm3_vl_vision", LFM3_VL_VISION, overwrite=True)
