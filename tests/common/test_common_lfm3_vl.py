"""transformers' common model tests on LFM3-VL."""

import unittest

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlForConditionalGeneration, Lfm3VlModel, Lfm3VlVisionModel

from .packed_model_tester import PackedModelTests, PackedTowerTests

VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "patch_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention"],
}
TEXT = {
    "model_type": "lfm3",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "layer_types": ["full_attention", "sliding_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Lfm3VlCommonTest(PackedModelTests, unittest.TestCase):
    all_model_classes = (Lfm3VlModel, Lfm3VlForConditionalGeneration)
    config_class = Lfm3VlConfig
    tower_attention_layers = 1
    fields = {
        "vision_config": VISION,
        "text_config": TEXT,
        "image_token_id": 6,
        "video_token_id": 7,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
        "projector_hidden_size": 24,
    }


class Lfm3VlVisionTowerCommonTest(PackedTowerTests, unittest.TestCase):
    all_model_classes = (Lfm3VlVisionModel,)
    config_class = Lfm3VlVisionConfig
    fields = VISION
