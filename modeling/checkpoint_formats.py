"""Tensor names of the published checkpoints, as transformers' conversion mapping: renamed on load, reversed on save."""

from copy import deepcopy

from transformers.conversion_mapping import get_model_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

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

# Published DeepSeek-V4 checkpoints have no common prefix.
DEEPSEEK_V4_HEAD = [
    *(WeightRenaming(rf"^{part}\.", f"model.{part}.") for part in ("vision", "aligner", "embed", "layers", "norm")),
    *(WeightRenaming(rf"^image_{mark}", f"model.image_{mark}") for mark in ("start", "pad", "newline", "end")),
    WeightRenaming(r"^hc_head_", "model.hc_head_"),
    WeightRenaming(r"^head\.", "lm_head."),
]
DEEPSEEK_V4_PARTS = [
    WeightRenaming(r"^vision\.", "vision_tower."),
    *(WeightRenaming(rf"^{part}\.", f"language_model.{part}.") for part in ("embed", "layers", "norm")),
    WeightRenaming(r"^hc_head_", "language_model.hc_head_"),
]
# Of the text model alone, so that no name of the tower is caught. Renamings apply in this order on load, and in the
# opposite one on save: a name that contains another stands before it where it is read, behind it where it is written.
DEEPSEEK_V4_TEXT = [
    *(
        WeightRenaming(published, ours)
        for published, ours in (
            (r"^embed\.", "embed_tokens."),
            (r"^hc_head_", "hc_head.hc_"),
            (r"\.attn\.", ".self_attn."),
            (r"\.ffn\.", ".mlp."),
            (r"\.attn_norm\.", ".input_layernorm."),
            (r"\.ffn_norm\.", ".post_attention_layernorm."),
            (r"\.hc_attn_", ".attn_hc."),
            (r"\.hc_ffn_", ".ffn_hc."),
            (r"\.attn_sink", ".sinks"),
            (r"\.indexer\.compressor\.", ".compressor.indexer."),
            (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
            (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
            (r"\.indexer\.norm\.", ".indexer.kv_norm."),
            (r"\.compressor\.norm\.", ".compressor.kv_norm."),
            (r"\.ape", ".position_bias"),
            (r"\.wq_a\.", ".q_a_proj."),
            (r"\.q_norm\.", ".q_a_norm."),
            (r"\.self_attn\.wq_b\.", ".self_attn.q_b_proj."),
            (r"\.wkv\.", ".kv_proj."),
            (r"\.wgate\.", ".gate_proj."),
            (r"\.wo_a\.", ".o_a_proj."),
            (r"\.wo_b\.", ".o_b_proj."),
            # transformers ends a pattern with the name: `bias_vl`, another tensor, is not caught.
            (r"\.gate\.bias", ".gate.e_score_correction_bias"),
            (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
            (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
            (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
        )
    ),
    WeightConverter(
        [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
        r"\.experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(r"\.experts.*.w2.weight", r"\.experts.down_proj", operations=[MergeModulelist(dim=0)]),
]


class ReadsPublishedNames:
    """First base of our models: `load_state_dict` takes what `save_pretrained` wrote, which is what was loaded.

    `Trainer` loads this way, without any mapping and not strictly, where it resumes and where it takes the best model back;
    under the published names it would load nothing and say so in a warning alone.
    """

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """torch's, for tensors under our names or the published ones; those of one expert list must come together."""
        own = self.state_dict()
        if not state_dict.keys() <= own.keys():
            state_dict = self._under_own_names(state_dict, own)
        return super().load_state_dict(state_dict, strict, assign)

    def save_pretrained(self, *arguments, **keywords):
        """transformers', by the entries that renamed something on loading: under ZeRO-3 it would reverse the others too."""
        if getattr(self, "_weight_conversions", None):
            self._weight_conversions = [entry for entry in self._weight_conversions if entry.was_used()]
        return super().save_pretrained(*arguments, **keywords)

    def _under_own_names(self, state_dict, own):
        mapping = get_model_conversion_mapping(self)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamed, collected = {}, {}
        # In natural order, because lists of experts are stacked as they come.
        for name in sorted(state_dict, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, self.base_model_prefix, own)
            if pattern is None:
                renamed[name if name in own and target not in own else target] = state_dict[name]
                continue
            converter = next(entry for entry in converters if pattern in entry.source_patterns)
            collected.setdefault(target, deepcopy(converter)).add_tensor(target, name, pattern, state_dict[name])
        for target, converter in collected.items():
            renamed |= converter.convert(target, model=self, config=self.config)
        return renamed


def register_checkpoint_formats() -> None:
    """Make `from_pretrained` and `save_pretrained` of our classes speak the published names.

    transformers applies a mapping to remote code only where it was registered by hand.
    """
    register_checkpoint_conversion_mapping("lfm3_vl_vision", LFM3_VL_VISION, overwrite=True)
    # By class: two of the model types belong to transformers' classes as well.
    for family in ("Pixtral", "PixtralLlava", "PixtralMixed"):
        register_checkpoint_conversion_mapping(f"{family}ForConditionalGeneration", PIXTRAL, overwrite=True)
        register_checkpoint_conversion_mapping(f"{family}Model", PIXTRAL_WITHOUT_HEAD, overwrite=True)
    register_checkpoint_conversion_mapping("DeepseekV4ForConditionalGeneration", DEEPSEEK_V4_HEAD, overwrite=True)
    register_checkpoint_conversion_mapping("DeepseekV4VlModel", DEEPSEEK_V4_PARTS, overwrite=True)
    register_checkpoint_conversion_mapping("DeepseekV4VlTextModel", DEEPSEEK_V4_TEXT, overwrite=True)
