"""DeepSeek-V4 checkpoints: published names and dtypes, read, written, and read by transformers' own class."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM, set_seed

from gridtower.configuration.configuration_deepseek_v4_vl import DeepseekV4VlConfig
from gridtower.modeling.modeling_deepseek_v4_vl import (
    DeepseekV4ForConditionalGeneration,
    DeepseekV4VlModel,
)

LAYER_TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
# By part, with shapes in the widths below; numbers of layers and experts are put in.
OF_LAYER = {
    "attn_norm.weight": (32,),
    "ffn_norm.weight": (32,),
    **{f"hc_{part}_{name}": shape for part in ("attn", "ffn") for name, shape in (("fn", (8, 64)), ("base", (8,)), ("scale", (3,)))},
    "attn.attn_sink": (4,),
    "attn.wq_a.weight": (16, 32),
    "attn.q_norm.weight": (16,),
    "attn.wq_b.weight": (64, 16),
    "attn.wkv.weight": (16, 32),
    "attn.kv_norm.weight": (16,),
    "attn.wo_a.weight": (16, 32),
    "attn.wo_b.weight": (32, 16),
    "ffn.gate.weight": (4, 32),
    "ffn.gate.bias": (4,),
    "ffn.gate.bias_vl": (4,),
    **{f"ffn.experts.{expert}.{name}.weight": shape for expert in range(4) for name, shape in (("w1", (24, 32)), ("w2", (32, 24)), ("w3", (24, 32)))},
    **{f"ffn.shared_experts.{name}.weight": shape for name, shape in (("w1", (24, 32)), ("w2", (32, 24)), ("w3", (24, 32)))},
}  # fmt: skip
OF_SPARSE_LAYER = {
    "attn.compressor.ape": (4, 32),
    "attn.compressor.wkv.weight": (32, 32),
    "attn.compressor.wgate.weight": (32, 32),
    "attn.compressor.norm.weight": (16,),
    "attn.indexer.wq_b.weight": (16, 16),
    "attn.indexer.weights_proj.weight": (2, 32),
    "attn.indexer.compressor.ape": (4, 16),
    "attn.indexer.compressor.wkv.weight": (16, 32),
    "attn.indexer.compressor.wgate.weight": (16, 32),
    "attn.indexer.compressor.norm.weight": (8,),
}
OF_HEAVY_LAYER = {
    "attn.compressor.ape": (8, 16),
    "attn.compressor.wkv.weight": (16, 32),
    "attn.compressor.wgate.weight": (16, 32),
    "attn.compressor.norm.weight": (16,),
}
OF_BLOCK = {
    "norm1.weight": (32,),
    "norm2.weight": (32,),
    "attn.wqkv.weight": (96, 32),
    "attn.wqkv.bias": (96,),
    "attn.wo.weight": (32, 32),
    "attn.wo.bias": (32,),
    "mlp.w1.weight": (48, 32),
    "mlp.w2.weight": (32, 24),
}
PUBLISHED = {
    "embed.weight": (99, 32),
    "head.weight": (99, 32),
    "norm.weight": (32,),
    "hc_head_fn": (2, 64),
    "hc_head_base": (2,),
    "hc_head_scale": (1,),
    **{f"layers.{layer}.{name}": shape for layer in range(3) for name, shape in OF_LAYER.items()},
    **{f"layers.1.{name}": shape for name, shape in OF_SPARSE_LAYER.items()},
    **{f"layers.2.{name}": shape for name, shape in OF_HEAVY_LAYER.items()},
    "layers.0.ffn.gate.tid2eid": (99, 2),
    "vision.patch_embed.proj.weight": (32, 12),
    "vision.patch_embed.proj.bias": (32,),
    **{f"vision.blocks.{block}.{name}": shape for block in range(2) for name, shape in OF_BLOCK.items()},
    "vision.norm.weight": (32,),
    "aligner.w1.weight": (32, 288),
    "aligner.w1.bias": (32,),
    "aligner.w2.weight": (32, 32),
    "aligner.w2.bias": (32,),
    **{f"image_{mark}": (32,) for mark in ("start", "end", "newline", "pad")},
}
IN_FLOAT32 = re.compile(r"norm|image_|hc_|\.ape$|attn_sink|gate\.bias")
FIELDS = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 99,
    "image_start_token_id": 90,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "layer_types": LAYER_TYPES,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "num_hash_layers": 1,
    "hc_mult": 2,
    "sliding_window": 6,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "vision_dim": 32,
    "vision_n_heads": 4,
    "vision_n_layers": 2,
    "vision_inter_dim": 24,
    "vision_patch_size": 2,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 16,
    "vision_max_wh_ratio": 8,
}


def published_tensors() -> dict[str, torch.Tensor]:
    """Random tensors with the names, shapes (scaled down) and dtypes of DeepSeek-V4-Flash-Vision-Exp."""
    set_seed(0)
    tensors = {
        name: torch.randn(shape).to(torch.float32 if IN_FLOAT32.search(name) else torch.bfloat16) / 4
        for name, shape in PUBLISHED.items()
    }
    tensors["layers.0.ffn.gate.tid2eid"] = torch.randint(0, 4, (99, 2))
    return tensors


def write_checkpoint(folder, tensors: dict[str, torch.Tensor], **fields):
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("published"), published_tensors())


def loaded(model_class, folder, **kwargs):
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return model.eval(), info


def test_published_names_load_with_no_key_missing_or_left_over(published):
    _, info = loaded(DeepseekV4ForConditionalGeneration, published)
    assert not info["unexpected_keys"]


def test_saving_writes_the_published_names_and_values(published, tmp_path):
    model, _ = loaded(DeepseekV4ForConditionalGeneration, published, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    written, original = load_file(tmp_path / "model.safetensors"), published_tensors()
    assert written.keys() == original.keys()
    assert [name for name, tensor in original.items() if not torch.equal(written[name], tensor)] == []


def test_vectors_norms_and_biases_stay_float32_and_the_rest_of_the_tower_is_bfloat16(published):
    model, _ = loaded(DeepseekV4ForConditionalGeneration, published, dtype=torch.bfloat16)
    in_float32 = re.compile(r"norm[12]?\.weight|image_(start|end|newline|pad)|bias_vl|e_score_correction_bias")
    for name, tensor in model.model.state_dict().items():
        if in_float32.search(name):
            assert tensor.dtype == torch.float32, name
        elif name.startswith(("vision_tower", "aligner")):
            assert tensor.dtype == torch.bfloat16, name


def test_what_passes_no_gradient_asks_for_none_after_loading_either(published):
    model, _ = loaded(DeepseekV4ForConditionalGeneration, published)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if ".indexer." not in name}


def test_the_bias_of_images_is_not_taken_for_that_of_text(published):
    model, _ = loaded(DeepseekV4ForConditionalGeneration, published)
    tensors = published_tensors()
    for index, layer in enumerate(model.model.language_model.layers):
        gate = layer.mlp.gate
        assert torch.equal(gate.bias_vl, tensors[f"layers.{index}.ffn.gate.bias_vl"])
        assert torch.equal(gate.e_score_correction_bias, tensors[f"layers.{index}.ffn.gate.bias"])


def test_gate_and_value_of_every_expert_are_stacked_in_order(published):
    model, _ = loaded(DeepseekV4ForConditionalGeneration, published, dtype=torch.bfloat16)
    tensors = published_tensors()
    for index, layer in enumerate(model.model.language_model.layers):
        for expert, stacked in enumerate(layer.mlp.experts.gate_up_proj):
            parts = [tensors[f"layers.{index}.ffn.experts.{expert}.{name}.weight"] for name in ("w1", "w3")]
            assert torch.equal(stacked, torch.cat(parts))


def test_transformers_own_class_reads_the_text_model_of_a_saved_folder(published, tmp_path):
    model, _ = loaded(DeepseekV4ForConditionalGeneration, published, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    text, info = loaded(DeepseekV4ForCausalLM, tmp_path, dtype=torch.float32)
    # Of the text model it lacks what only images need, and the bias of the hash layer.
    left = {name for name in info["unexpected_keys"] if not name.startswith(("vision", "aligner", "image_"))}
    assert {name.rpartition(".")[2] for name in left} == {"bias_vl", "e_score_correction_bias"}
    input_ids = torch.randint(0, 90, (2, 19))
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, text(input_ids).logits)


def test_base_and_head_load_from_each_other(published, tmp_path):
    base, info = loaded(DeepseekV4VlModel, published)
    assert info["unexpected_keys"] == {"head.weight"}
    base.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == PUBLISHED.keys() - {"head.weight"}
    _, info = DeepseekV4ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"} and not info["unexpected_keys"]


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    tensors = published_tensors() | {"mtp.0.enorm.weight": torch.ones(32)}
    _, info = loaded(DeepseekV4ForConditionalGeneration, write_checkpoint(tmp_path, tensors))
    assert not info["unexpected_keys"]


def test_an_fp8_text_model_loads_beside_a_tower_in_bfloat16(tmp_path):
    quantized = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight|experts.*\.w[123]\.weight")
    tensors, expected = {}, published_tensors()
    for name, tensor in expected.items():
        tensors[name] = tensor
        if name.startswith("layers.") and quantized.search(name):
            scale = tensor.abs().max().float() / 448
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".scale")] = scale.view(1, 1)
            expected[name] = (tensors[name].float() * scale).to(torch.bfloat16)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = write_checkpoint(tmp_path, tensors, quantization_config=quantization, dtype="bfloat16")
    # Without a GPU, transformers turns the text weights back to bfloat16 as it loads them.
    model, info = loaded(DeepseekV4ForConditionalGeneration, folder, dtype=torch.bfloat16)
    assert not info["unexpected_keys"]
    language_model = model.model.language_model
    for name in ("wq_a", "wkv"):
        projection = getattr(language_model.layers[1].self_attn, {"wq_a": "q_a_proj", "wkv": "kv_proj"}[name])
        torch.testing.assert_close(projection.weight.data, expected[f"layers.1.attn.{name}.weight"])
    stacked = torch.cat([expected[f"layers.2.ffn.experts.3.{name}.weight"] for name in ("w1", "w3")])
    torch.testing.assert_close(language_model.layers[2].mlp.experts.gate_up_proj[3].data, stacked)
    for name, tensor in model.model.vision_tower.state_dict().items():
        assert torch.equal(tensor, tensors[f"vision.{name}"]), name


def test_quantizers_pass_over_tower_and_aligner(published):
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.auto import AutoHfQuantizer

    with torch.device("meta"):
        model = DeepseekV4ForConditionalGeneration(DeepseekV4VlConfig.from_pretrained(published))
    AutoHfQuantizer.from_config(FineGrainedFP8Config(), pre_quantized=True).preprocess_model(model)
    replaced = {name for name, module in model.named_modules() if type(module).__name__ == "FP8Linear"}
    assert "model.language_model.layers.0.self_attn.q_a_proj" in replaced
    assert not [name for name in replaced if "vision_tower" in name or "aligner" in name]


def test_the_published_geometry_has_the_published_shapes():
    text = {"num_hidden_layers": 3, "layer_types": LAYER_TYPES, "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    with torch.device("meta"):
        model = DeepseekV4ForConditionalGeneration(DeepseekV4VlConfig(**text))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.model.state_dict().items()}
    assert shapes["vision_tower.patch_embed.proj.weight"] == (1024, 588)
    assert shapes["vision_tower.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert shapes["vision_tower.blocks.31.mlp.w1.weight"] == (5632, 1024)
    assert shapes["aligner.w1.weight"] == (4096, 9216)
    assert shapes["image_newline"] == (4096,)
    assert shapes["language_model.layers.0.mlp.gate.bias_vl"] == (256,)
