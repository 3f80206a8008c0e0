"""What transformers' common model tests ask of a family whose pixels are packed and described by `grid_thw`.

A family joins with two test classes of a few lines: its full models under `PackedModelTests`, its tower under
`PackedTowerTests`.
"""

import unittest
import unittest.mock

import torch
from transformers import PreTrainedConfig

from .transformers_suite import load_common_tests

common_tests = load_common_tests()
BATCH_SIZE = 2
# One image for each row of the batch, all of one shape, so that the tests can cut the batch.
GRID = (1, 4, 6)
PATCHES_PER_IMAGE = GRID[0] * GRID[1] * GRID[2]


def packed_images(vision_config: PreTrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pixels of one image for each row, as a tower takes them, and their grids."""
    pixel_values = torch.rand(BATCH_SIZE * PATCHES_PER_IMAGE, vision_config.patch_dim)
    return pixel_values, torch.tensor([GRID] * BATCH_SIZE)


def image_block(config: PreTrainedConfig) -> list[int]:
    """The tokens that an image of `GRID` becomes in a prompt."""
    merge = getattr(config.vision_config, "spatial_merge_size", None) or config.vision_config.downsample_ratio
    rows, cols = GRID[1] // merge, GRID[2] // merge
    if not hasattr(config, "image_start_token_id"):
        return [config.image_token_id] * (GRID[0] * rows * cols)
    # Two rows column by column, each ended by a newline.
    pairs = [config.image_token_id] * (rows * cols) + [config.image_newline_token_id] * rows
    return [config.image_pad_token_id, config.image_start_token_id, *pairs, config.image_end_token_id]


class PackedModelTester:
    """Makes the tiny configuration and the inputs: rows of text with one image in each."""

    batch_size = BATCH_SIZE
    is_training = True

    def __init__(self, config_class: type[PreTrainedConfig], fields: dict):
        self.config_class, self.fields = config_class, fields
        # A family whose configuration is that of its text model has the text fields beside `vision_config`.
        self.vision_config, self.text_config = fields["vision_config"], fields.get("text_config", fields)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            setattr(self, name, self.text_config[name])
        config = self.get_config()
        self.image_tokens = image_block(config)
        self.seq_length = len(self.image_tokens) + 4

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        pixel_values, grid = packed_images(config.vision_config)
        # Up to 90: above are the ids of one family's marks.
        input_ids = torch.randint(8, 90, (self.batch_size, self.seq_length))
        input_ids[:, 2 : 2 + len(self.image_tokens)] = torch.tensor(self.image_tokens)
        return config, {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "pixel_values": pixel_values,
            "image_grid_thw": grid,
        }


class PackedTowerTester:
    """Makes the tiny configuration of a tower and its inputs."""

    batch_size = BATCH_SIZE
    is_training = True

    def __init__(self, config_class: type[PreTrainedConfig], fields: dict):
        self.config_class, self.fields = config_class, fields
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            setattr(self, name, fields[name])
        self.seq_length = BATCH_SIZE * PATCHES_PER_IMAGE

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        pixel_values, grid = packed_images(config)
        return config, {"pixel_values": pixel_values, "grid_thw": grid}


class PackedModelTests(common_tests.ModelTesterMixin, common_tests.GenerationTesterMixin):
    """The common tests for full models. `fields` holds dicts `vision_config` and `text_config`.

    `all_model_classes` are the base and the model with a head.
    Ids 0 to 4 are the tests' padding, 5 to 7 the placeholders and marks; attention layers of the text model:
    all, of the tower: `tower_attention_layers`.
    """

    config_class: type[PreTrainedConfig]
    fields: dict
    tower_attention_layers: int
    _is_composite = True
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = PackedModelTester(self.config_class, self.fields)
        # The tests tell bases from models with a head, which take labels, by the class names that transformers lists.
        lists = (common_tests.MODEL_MAPPING_NAMES, common_tests.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        for names, model_class in zip(lists, self.all_model_classes):
            listed = unittest.mock.patch.dict(names, {model_class.__name__: model_class.__name__})
            listed.start()
            self.addCleanup(listed.stop)

    def _image_features_get_expected_num_attentions(self, model_tester=None):
        return self.tower_attention_layers

    def _image_features_get_expected_num_hidden_states(self, model_tester=None):
        return self.model_tester.vision_config["num_hidden_layers"] + 1

    _video_features_get_expected_num_attentions = _image_features_get_expected_num_attentions
    _video_features_get_expected_num_hidden_states = _image_features_get_expected_num_hidden_states


class PackedTowerTests(common_tests.ModelTesterMixin):
    """The common tests for towers, without those that take packed patches for a batch of rows or of words."""

    config_class: type[PreTrainedConfig]
    fields: dict
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = PackedTowerTester(self.config_class, self.fields)
        # By this the tests know that there is no loss to train by.
        names = {model_class.__name__: model_class.__name__ for model_class in self.all_model_classes}
        listed = unittest.mock.patch.dict(common_tests.MODEL_MAPPING_NAMES, names)
        listed.start()
        self.addCleanup(listed.stop)


NOT_FOR_TOWERS = {
    "test_attention_outputs": "a tower returns one map for each frame; tests/modeling compares them with transformers'",
    "test_retain_grad_hidden_states_attentions": "a tower returns one map for each frame, not one tensor",
    "test_eager_matches_sdpa_inference": "cuts the batch to seven rows, and seven patches fill no grid; "
    "tests/modeling compares the backends",
    "test_model_get_set_embeddings": "the input embedding of a tower is linear, not a table of words",
    "test_resize_tokens_embeddings": "a tower has no vocabulary",
    "test_resize_embeddings_untied": "a tower has no vocabulary",
}
for name in dir(PackedTowerTests):
    for prefix, reason in NOT_FOR_TOWERS.items():
        if name.startswith(prefix) and getattr(PackedTowerTests, name) is not None:
            setattr(PackedTowerTests, name, unittest.skip(reason)(getattr(PackedTowerTests, name)))
