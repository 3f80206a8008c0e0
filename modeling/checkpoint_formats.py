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

# Published Pixtral checkpoints keep the text model and its head under one name, and the parts without a common one.
PIXTRAL = [
    WeightRenaming(r"^language_model\.lm_head", "lm_head"),
    WeightRenaming(r"^language_model", "model.language_model"),
    WeightRenaming(r"^vision_tower", "model.vision_tower"),
    WeightRenaming(r"^multi_modal_projector", "model.multi_modal_projector"),
]
PIXTRAL_WITHOUT_HEAD = [WeightRenaming(r"^language_model\.model", "language_model")]


def register_checkpoint_formats() -> None:
    """Make `from_pretrained` and `save_pretrained` of our classes speak the published names.

    transformers applies a mapping to remote code only where it was registered by hand.
    """
    register_checkpoint_conversion_mapping("lfm3_vl_vision", LFM3_VL_VISION, overwrite=True)
    # By class: two of the model types belong to transformers' classes as well.
    for family in ("Pixtral", "PixtralLlava", "PixtralMixed"):
        register_checkpoint_conversion_mapping(f"{family}ForConditionalGeneration", PIXTRAL, overwrite=True)
        register_checkpoint_conversion_mapping(f"{family}Model", PIXTRAL_WITHOUT_HEAD, overwrite=True)
