"""What has broken elsewhere in the use of such models: kernels, precision, adapters, quantisation, generation."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.quantizers.base import get_keys_to_not_convert

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlVisionConfig
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlVisionModel
from gridtower.modeling.trainable_parts import LORA_TARGETS

from ..hub_cards.tiny_models import TINY_MODELS
from .lfm3_vl_cases import ATTENTION, tower_fields
from .test_modeling_pixtral import IMAGE_TOKEN, close, make_images, make_model, make_tower, pack, prompt
from .varlen_reference import NAME as VARLEN
from .varlen_reference import use_backend

families = pytest.mark.parametrize("family", TINY_MODELS)


# Pixtral under a variable-length kernel; tests/modeling/test_modeling_lfm3_vl.py has the same for LFM3-VL


@pytest.mark.parametrize("fields", [{}, {"hidden_size": 72, "num_attention_heads": 1}, {"spatial_merge_size": 2}])
def test_a_variable_length_kernel_gives_what_eager_attention_gives(fields):
    tower = make_tower(**fields)
    pixels, grid = pack(make_images(), merge=tower.config.spatial_merge_size)
    expected = tower(pixels, grid_thw=grid).last_hidden_state
    # The stand-in asserts that boundaries come as cu_seqlens, and refuses position ids.
    close(use_backend(tower, VARLEN)(pixels, grid_thw=grid).last_hidden_state, expected)


def test_a_variable_length_kernel_lets_no_patch_reach_another_image_or_frame():
    tower = use_backend(make_tower(), VARLEN)
    pixels, _ = pack(make_images([(8, 12)] * 4))
    grid = torch.tensor([[1, 2, 3], [3, 2, 3]])  # an image and a clip of three frames
    before = tower(pixels, grid_thw=grid).last_hidden_state
    for frame in range(4):
        changed = pixels.clone()
        changed[6 * frame + 5] += 1
        moved = (tower(changed, grid_thw=grid).last_hidden_state != before).any(-1)
        assert moved.view(4, 6).all(1).tolist() == moved.view(4, 6).any(1).tolist() == [f == frame for f in range(4)]


# Precision


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def pixtral_tower():
    tower = make_tower()
    assert tower.patch_conv.weight.ndim == 4  # stored as a convolution's kernel
    return tower, *pack(make_images())


def lfm3_vl_tower():
    tower = Lfm3VlVisionModel(Lfm3VlVisionConfig(**tower_fields([ATTENTION] * 2)))
    return tower, torch.randn(24, tower.config.patch_dim), torch.tensor([[1, 4, 6]])


@pytest.mark.parametrize("tower_and_inputs", [lfm3_vl_tower, pixtral_tower])
def test_patches_are_embedded_by_a_matrix_product(tower_and_inputs):
    tower, pixels, grid = tower_and_inputs()
    with torch.no_grad(), Operations() as seen:
        tower.bfloat16()(pixels, grid_thw=grid)
    assert not {name for name in seen.names if "conv" in name and "convert" not in name}
    assert seen.names & {"mm", "addmm", "linear"}


# Adapters and quantisation


@families
def test_documented_adapter_targets_hit_linear_layers_of_their_part_alone(family):
    model, _ = TINY_MODELS[family]()
    targets = LORA_TARGETS[family]  # the README's, as tests/modeling/test_trainable_parts.py compares
    projector = "aligner" if family == "deepseek_v4_vl" else "multi_modal_projector"
    parts = {"tower": "model.vision_tower.", "projector": f"model.{projector}.", "text": "model.language_model."}
    assert targets.keys() == parts.keys()
    for part, prefix in parts.items():
        hit = {name: module for name, module in model.named_modules() if re.fullmatch(targets[part], name)}
        assert hit and all(name.startswith(prefix) for name in hit)
        assert all(isinstance(module, torch.nn.Linear) for module in hit.values())
    in_text = [name for name, _ in model.named_modules() if re.fullmatch(targets["text"], name)]
    attention = ("q_b_proj", "kv_proj") if family == "deepseek_v4_vl" else ("q_proj", "k_proj", "v_proj")
    assert {name.rsplit(".", 1)[1] for name in in_text} >= {*attention}


@families
def test_quantisation_leaves_the_head_alone(family):
    model, _ = TINY_MODELS[family]()
    assert "lm_head" in get_keys_to_not_convert(model)


# Generation


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": 3},
        {"max_new_tokens": 3, "suppress_tokens": [8]},
        {"generation_config": GenerationConfig(max_new_tokens=3, suppress_tokens=[8])},
    ],
)
def test_pixtral_never_samples_its_placeholder_whatever_else_is_suppressed(asked):
    model = make_model()

    def prefer(module, arguments, logits):
        logits[..., IMAGE_TOKEN] += 1000
        logits[..., 8] += 500
        logits[..., 7] += 300

    model.lm_head.register_forward_hook(prefer)
    ids = prompt([(8, 16)])
    generated = model.generate(ids, pixel_values=make_images([(8, 16)]), do_sample=False, **asked)
    expected = 8 if "suppress_tokens" not in asked and "generation_config" not in asked else 7
    assert (generated[0, ids.shape[1] :] == expected).all()


def test_a_generation_config_may_come_second():
    ids = prompt([(8, 16)])
    generated = make_model().generate(ids, GenerationConfig(max_new_tokens=3), pixel_values=make_images([(8, 16)]))
    assert generated.shape[1] <= ids.shape[1] + 3
