"""Odd LFM3-VL shapes, ragged inputs for them, and pairs of models (ours, transformers' own) with the same weights."""

import torch
from transformers.models.lfm3_vl import modeling_lfm3_vl as published
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlConfig as PublishedConfig
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlVisionConfig as PublishedVisionConfig

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlForConditionalGeneration, Lfm3VlVisionModel

PUBLISHED_CLASSES = {
    Lfm3VlVisionConfig: (PublishedVisionConfig, Lfm3VlVisionModel, published.Lfm3VlVisionModel),
    Lfm3VlConfig: (PublishedConfig, Lfm3VlForConditionalGeneration, published.Lfm3VlForConditionalGeneration),
}
IMAGE, VIDEO, VOCABULARY = 90, 91, 97
CONV, ATTENTION = "conv", "full_attention"


def tower_fields(layers=(CONV, ATTENTION), heads=4, groups=2, head_dim=8, **fields):
    return {
        "hidden_size": heads * head_dim,
        "intermediate_size": 40,
        "patch_size": 2,
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "initializer_range": 0.1,
        **fields,
    }


TOWERS = {
    "published pattern": tower_fields([CONV, CONV, ATTENTION, CONV, ATTENTION]),
    "one key-value head": tower_fields(groups=4, conv_kernel_size=5),
    "no groups, three heads, merge 3": tower_fields(heads=3, groups=1, head_dim=12, spatial_merge_size=3),
    "only convolutions": tower_fields([CONV, CONV, CONV], spatial_merge_size=1),
    "only attention": tower_fields([ATTENTION, ATTENTION, ATTENTION], spatial_merge_size=1),
    "kernel beyond every frame": tower_fields([CONV, CONV], conv_kernel_size=7, spatial_merge_size=1),
    "kernel 7, merge 3": tower_fields([CONV, ATTENTION, CONV], conv_kernel_size=7, spatial_merge_size=3),
    "grey stills": tower_fields(in_channels=1, temporal_patch_size=1, patch_size=3),
    "single frames": tower_fields(temporal_patch_size=1),
    "grey, merge 3, kernel 5": tower_fields(in_channels=1, spatial_merge_size=3, conv_kernel_size=5),
    "one head of four channels": tower_fields(heads=1, groups=1, head_dim=4),
    "heads of 72 channels": tower_fields(heads=2, groups=2, head_dim=72),
    "kernel 1, short rotation": tower_fields(
        conv_kernel_size=1, rope_parameters={"rope_type": "axial", "rope_theta": 50.0}
    ),
    "no layers": tower_fields([]),
}
# Temporal steps, rows and columns in merge blocks: stills, equal shapes apart, equal lengths of unequal shape, one
# block alone, strips, clips.
IMAGE_BLOCKS = [(1, 2, 3), (1, 3, 2), (1, 1, 1), (1, 2, 3), (1, 1, 5), (1, 4, 4)]
VIDEO_BLOCKS = [(3, 2, 3), (2, 1, 1), (1, 4, 2)]


def ragged_grid(config, blocks=(*IMAGE_BLOCKS, *VIDEO_BLOCKS)):
    merge = config.spatial_merge_size
    return torch.tensor([(steps, rows * merge, cols * merge) for steps, rows, cols in blocks])


def random_pixels(config, grid, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(-1).sum()), config.patch_dim, generator=generator)


def pair_of_models(config_class, fields, attn_implementation="sdpa"):
    """Our model and transformers' own, with the same random weights; norms away from one, biases from zero."""
    published_config_class, our_class, published_class = PUBLISHED_CLASSES[config_class]
    torch.manual_seed(0)
    theirs = published_class._from_config(published_config_class(**fields), attn_implementation=attn_implementation)
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    ours = our_class._from_config(config_class(**fields), attn_implementation=attn_implementation)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


def model_fields(tower=None, **fields):
    return {
        "vision_config": tower or tower_fields(),
        "text_config": {
            "model_type": "lfm3",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
        "projector_hidden_size": 24,
        **fields,
    }


def prompts(config, rows, seed=0):
    """Inputs of a full model, left padded.

    `rows` holds for each row of the batch its parts in order: a number of words, `("image", rows, cols)` or
    `("video", steps, rows, cols)`, sizes in merge blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    placeholders = {"image": config.image_token_id, "video": config.video_token_id}
    texts, blocks = [], {"image": [], "video": []}
    for parts in rows:
        text = []
        for part in parts:
            if isinstance(part, int):
                text += torch.randint(3, IMAGE, (part,), generator=generator).tolist()
                continue
            media, size = part[0], (*part[1:],) if part[0] == "video" else (1, *part[1:])
            blocks[media].append(size)
            text += [placeholders[media]] * (size[0] * size[1] * size[2])
        texts.append(text)
    length = max(map(len, texts))
    inputs = {
        "input_ids": torch.tensor([[0] * (length - len(text)) + text for text in texts]),
        "attention_mask": torch.tensor([[0] * (length - len(text)) + [1] * len(text) for text in texts]),
    }
    for media, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if blocks[media]:
            grid = ragged_grid(config.vision_config, blocks[media])
            inputs[name] = random_pixels(config.vision_config, grid, seed=seed + len(name))
            inputs[f"{media}_grid_thw"] = grid
    return inputs


MIXED = [
    [3, ("image", 2, 3), 2, ("video", 2, 1, 2), 4],
    [2, ("image", 1, 1), ("image", 3, 2), 5],
    [6],
]


def assert_close(actual, expected, relative=1e-5):
    """Equal up to `relative` of the greatest value."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return
    error = (actual - expected).abs().max()
    assert error <= relative * expected.abs().max(), f"off by {error:.2e}, of {expected.abs().max():.2e}"
