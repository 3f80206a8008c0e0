"""transformers' common model tests on DeepSeek-V4 vision."""

import re
import unittest

from gridtower.configuration.configuration_deepseek_v4_vl import DeepseekV4VisionConfig, DeepseekV4VlConfig
from gridtower.modeling.modeling_deepseek_v4_vl import (
    DeepseekV4ForConditionalGeneration,
    DeepseekV4VisionModel,
    DeepseekV4VlModel,
)

from .packed_model_tester import PackedModelTests, PackedTowerTests

VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "patch_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "downsample_ratio": 2,
}
TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    # No sparse layer: its indexer chooses, and gets no gradient.
    "layer_types": ["sliding_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "hc_mult": 2,
    "sliding_window": 64,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


SKIPPED = {
    "test_can_set_attention_dynamically_composite_model": "the text model has one attention, eager, as in transformers; "
    "the tower's is set by itself",
    "test_hidden_states_output": "states of the text model are streams (batch, length, hc_mult, size), as in transformers",
    "test_keep_in_fp32_modules_exist": "names parts of sparse layers too; see the layer types",
    "test_inputs_embeds": "embeddings alone say neither where images stand nor how tokens are routed",
    "test_inputs_embeds_matches_input_ids": "as above; tests/modeling passes embeddings with ids",
    "test_model_rope_scaling_from_config": "draws random ids, the marks of images among them",
    "test_resize_tokens_embeddings": "the table of the hash layers and the ids of images belong to one vocabulary",
    "test_resize_embeddings_untied": "the table of the hash layers and the ids of images belong to one vocabulary",
}


class DeepseekV4CommonTest(PackedModelTests, unittest.TestCase):
    all_model_classes = (DeepseekV4VlModel, DeepseekV4ForConditionalGeneration)
    config_class = DeepseekV4VlConfig
    tower_attention_layers = 2
    fields = TEXT | {"vision_config": VISION, "image_start_token_id": 90}


class DeepseekV4VisionTowerCommonTest(PackedTowerTests, unittest.TestCase):
    all_model_classes = (DeepseekV4VisionModel,)
    config_class = DeepseekV4VisionConfig
    fields = VISION


for name in dir(DeepseekV4CommonTest):
    for skipped, reason in SKIPPED.items():
        # Parameterized tests have a number behind their name.
        if re.fullmatch(rf"{skipped}(_\d+_\w+)?", name):
            setattr(DeepseekV4CommonTest, name, unittest.skip(reason)(getattr(DeepseekV4CommonTest, name)))
