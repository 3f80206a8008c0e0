"""Mistral's own layout, judged by a forward pass written for that layout alone, with complex rotations."""

import copy
import hashlib
import json
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration, Mistral3ForConditionalGeneration

from gridtower.configuration.configuration_pixtral import PixtralConfig, PixtralMixedConfig
from gridtower.modeling import native_pixtral
from gridtower.modeling.modeling_pixtral import PixtralForConditionalGeneration, PixtralModel
from gridtower.modeling.native_pixtral import (
    halves_from_pairs,
    hf_to_native,
    native_to_hf,
    pairs_from_halves,
    read_native_config,
)

PARAMS = {
    "dim": 48, "n_layers": 2, "head_dim": 16, "hidden_dim": 64, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 1e6,
    "norm_eps": 1e-5, "vocab_size": 64, "max_position_embeddings": 256, "a_field_of_tomorrow": [1, None],
    "vision_encoder": {
        "hidden_size": 32, "num_channels": 3, "max_image_size": 64, "image_size": 64, "patch_size": 4,
        "rope_theta": 10000.0, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "adapter_bias": True, "image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13,
    },
}  # fmt: skip
NORM, MERGER = {"add_pre_mm_projector_layer_norm": True}, {"mm_projector_id": "patch_merge", "spatial_merge_size": 2}
SHAPES = {
    "pixtral": {},
    "mistral-small": NORM | MERGER | {"adapter_bias": False},
    "norm": NORM,
    "merger": MERGER,
}
PUBLISHED = {"pixtral": LlavaForConditionalGeneration, "mistral-small": Mistral3ForConditionalGeneration}
SIZES = [(24, 32), (8, 16)]


def native_params(shape):
    params = copy.deepcopy(PARAMS)
    params["vision_encoder"] |= SHAPES[shape]
    return params


def native_shapes(params):
    """Names and shapes as they lie in the published folders."""
    dim, head, hidden, vision = params["dim"], params["head_dim"], params["hidden_dim"], params["vision_encoder"]
    size, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    shapes = {
        "tok_embeddings.weight": (params["vocab_size"], dim),
        "norm.weight": (dim,),
        "output.weight": (params["vocab_size"], dim),
        "vision_encoder.patch_conv.weight": (size, vision["num_channels"], patch, patch),
        "vision_encoder.ln_pre.weight": (size,),
        "vision_language_adapter.w_in.weight": (dim, size),
        "vision_language_adapter.w_out.weight": (dim, dim),
    }
    if vision["adapter_bias"]:
        shapes |= {"vision_language_adapter.w_in.bias": (dim,), "vision_language_adapter.w_out.bias": (dim,)}
    if vision.get("add_pre_mm_projector_layer_norm"):
        shapes["pre_mm_projector_norm.weight"] = (size,)
    if vision.get("mm_projector_id") == "patch_merge":
        shapes["patch_merger.merging_layer.weight"] = (size, size * vision["spatial_merge_size"] ** 2)
    queries, keys = params["n_heads"] * head, params["n_kv_heads"] * head
    for stem, count, width, inner, q, k in (
        ("layers", params["n_layers"], dim, hidden, queries, keys),
        ("vision_encoder.transformer.layers", vision["num_hidden_layers"], size, wide, size, size),
    ):
        for index in range(count):
            leaves = {
                "attention.wq": (q, width), "attention.wk": (k, width), "attention.wv": (k, width),
                "attention.wo": (width, q), "feed_forward.w1": (inner, width), "feed_forward.w2": (width, inner),
                "feed_forward.w3": (inner, width), "attention_norm": (width,), "ffn_norm": (width,),
            }  # fmt: skip
            shapes |= {f"{stem}.{index}.{leaf}.weight": leaf_shape for leaf, leaf_shape in leaves.items()}
    return shapes


def native_folder(folder, shape="pixtral", shards=1, dtype=torch.float32, params=None):
    params = native_params(shape) if params is None else params
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(s, generator=generator) * (s[-1] ** -0.5 if len(s) > 1 else 1)).to(dtype)
        for name, s in native_shapes(params).items()
    }
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    for number in range(shards):
        name = (
            "consolidated.safetensors" if shards == 1 else f"consolidated-{number + 1:05}-of-{shards:05}.safetensors"
        )
        save_file({key: tensors[key] for key in names[number::shards]}, folder / name, metadata={"format": "pt"})
    (folder / "params.json").write_text(json.dumps(params, indent=3))
    (folder / "tekken.json").write_text('{"config": {}}')
    return tensors


# The layout's meaning, from its definition: heads are complex vectors, a position multiplies them by a unit number.


def native_norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def native_turn(x, angles):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def native_layer(tensors, stem, x, angles, mask, eps):
    def w(leaf):
        return tensors[f"{stem}.{leaf}.weight"]

    head_dim = 2 * angles.shape[-1]
    normed = native_norm(x, w("attention_norm"), eps)
    query, key, value = ((normed @ w(f"attention.w{n}").T).unflatten(-1, (-1, head_dim)) for n in "qkv")
    query, key = native_turn(query, angles), native_turn(key, angles)
    out = []
    for head in range(query.shape[1]):
        shared = head * key.shape[1] // query.shape[1]
        scores = query[:, head] @ key[:, shared].T / head_dim**0.5
        out.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value[:, shared])
    x = x + torch.cat(out, -1) @ w("attention.wo").T
    normed = native_norm(x, w("ffn_norm"), eps)
    return x + (F.silu(normed @ w("feed_forward.w1").T) * (normed @ w("feed_forward.w3").T)) @ w("feed_forward.w2").T


def native_features(tensors, params, image):
    vision = params["vision_encoder"]
    embedded = F.conv2d(image[None], tensors["vision_encoder.patch_conv.weight"], stride=vision["patch_size"])[0]
    _, rows, cols = embedded.shape
    x = native_norm(embedded.flatten(1).T, tensors["vision_encoder.ln_pre.weight"])
    head_dim = vision["hidden_size"] // vision["num_attention_heads"]
    frequencies = vision["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.stack([
        torch.cat([row * frequencies[0::2], col * frequencies[1::2]]) for row in range(rows) for col in range(cols)
    ])  # fmt: skip
    for index in range(vision["num_hidden_layers"]):
        stem = f"vision_encoder.transformer.layers.{index}"
        x = native_layer(tensors, stem, x, angles, torch.ones(rows * cols, rows * cols, dtype=torch.bool), 1e-5)
    if "pre_mm_projector_norm.weight" in tensors:
        x = native_norm(x, tensors["pre_mm_projector_norm.weight"])
    if "patch_merger.merging_layer.weight" in tensors:
        side = vision["spatial_merge_size"]
        grid = x.T.reshape(1, -1, rows, cols)
        x = F.unfold(grid, side, stride=side)[0].T @ tensors["patch_merger.merging_layer.weight"].T
    for leaf in ("w_in", "w_out"):
        bias = tensors.get(f"vision_language_adapter.{leaf}.bias")
        x = F.linear(x if leaf == "w_in" else F.gelu(x), tensors[f"vision_language_adapter.{leaf}.weight"], bias)
    return x


def native_logits(tensors, params, ids, images):
    x = tensors["tok_embeddings.weight"][ids].clone()
    features = torch.cat([native_features(tensors, params, image) for image in images])
    x[ids == params["vision_encoder"]["image_token_id"]] = features
    frequencies = params["rope_theta"] ** -(torch.arange(0, params["head_dim"], 2) / params["head_dim"])
    angles = torch.arange(len(ids))[:, None] * frequencies
    mask = torch.ones(len(ids), len(ids)).tril().bool()
    for index in range(params["n_layers"]):
        x = native_layer(tensors, f"layers.{index}", x, angles, mask, params["norm_eps"])
    return native_norm(x, tensors["norm.weight"], params["norm_eps"]) @ tensors["output.weight"].T


def inputs(params):
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(3, *size, generator=generator) for size in SIZES]
    side = params["vision_encoder"]["patch_size"] * params["vision_encoder"].get("spatial_merge_size", 1)
    ids = [1]
    for height, width in SIZES:
        ids += [10] * (height * width // side**2) + [20, 30]
    return torch.tensor(ids), images


def file_hashes(folder, pattern):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["directly", "converted"])
def test_a_native_folder_computes_what_its_layout_means(shape, way, tmp_path):
    tensors = native_folder(tmp_path / "native", shape)
    params = native_params(shape)
    folder = tmp_path / "native" if way == "directly" else native_to_hf(tmp_path / "native", tmp_path / "hf")
    model, loading = PixtralForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    ids, images = inputs(params)
    expected = native_logits(tensors, params, ids, images)
    actual = model.eval()(input_ids=ids[None], pixel_values=images).logits[0]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    for ours, image in zip(model.get_image_features(images).pooler_output, images, strict=True):
        torch.testing.assert_close(ours, native_features(tensors, params, image), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_converted_folder_loads_in_transformers_own_classes(shape, shards, tmp_path):
    tensors = native_folder(tmp_path / "native", shape, shards)
    folder = native_to_hf(tmp_path / "native", tmp_path / "hf")
    model, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model) is PUBLISHED[shape] and not any(loading.values()), loading
    params = native_params(shape)
    ids, images = inputs(params)
    padded = torch.zeros(2, 3, 24, 32)
    for row, image in zip(padded, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    actual = model(input_ids=ids[None], pixel_values=padded, image_sizes=torch.tensor(SIZES)).logits[0]
    torch.testing.assert_close(actual, native_logits(tensors, params, ids, images), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("shards", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
def test_native_to_hf_to_native_gives_the_same_files_bit_for_bit(shape, shards, dtype, tmp_path):
    native_folder(tmp_path / "native", shape, shards, dtype)
    hf_to_native(native_to_hf(tmp_path / "native", tmp_path / "hf"), tmp_path / "again")
    expected = file_hashes(tmp_path / "native", "*")
    assert expected.keys() >= {"params.json", "tekken.json"}
    actual = file_hashes(tmp_path / "again", "*")
    actual.pop("consolidated.safetensors.index.json", None)
    assert actual == expected


def test_a_conversion_changes_nothing_but_names_and_the_order_of_rows(tmp_path):
    tensors = native_folder(tmp_path / "native", dtype=torch.bfloat16)
    converted = load_file(native_to_hf(tmp_path / "native", tmp_path / "hf") / "model.safetensors")
    assert len(converted) == len(tensors)
    layer = "language_model.model.layers.1.self_attn"
    assert torch.equal(converted[f"{layer}.v_proj.weight"], tensors["layers.1.attention.wv.weight"])
    assert torch.equal(converted[f"{layer}.o_proj.weight"], tensors["layers.1.attention.wo.weight"])
    # Two key heads of 16: the second head's rows 16, 18, 20, … come first, then 17, 19, 21, …
    order = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    rows = order + [16 + row for row in order]
    assert torch.equal(converted[f"{layer}.k_proj.weight"], tensors["layers.1.attention.wk.weight"][rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_converted_folder_loads_as_remote_code_and_saves_the_same_names(shape, tmp_path):
    native_folder(tmp_path / "native", shape)
    folder = native_to_hf(tmp_path / "native", tmp_path / "My.Model-v1.0")
    architecture = json.loads((folder / "config.json").read_text())["architectures"]
    model, loading = AutoModelForImageTextToText.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert type(model).__module__.startswith("transformers_modules") and not any(loading.values()), loading
    model.save_pretrained(tmp_path / "again")
    saved, source = (load_file(f / "model.safetensors") for f in (tmp_path / "again", folder))
    assert saved.keys() == source.keys()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == architecture
    if shape in PUBLISHED:
        assert architecture == [PUBLISHED[shape].__name__]


def test_shards_mirror_the_source_and_have_an_index(tmp_path):
    native_folder(tmp_path / "native", shards=3)
    folder = native_to_hf(tmp_path / "native", tmp_path / "hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("model-*.safetensors")}
    assert sorted(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())


@pytest.mark.parametrize("shape", PUBLISHED)
def test_a_model_saved_by_ours_or_by_transformers_goes_native(shape, tmp_path):
    native_folder(tmp_path / "native", shape, dtype=torch.bfloat16)
    PixtralForConditionalGeneration.from_pretrained(tmp_path / "native").save_pretrained(tmp_path / "ours")
    PUBLISHED[shape].from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "native" / "consolidated.safetensors")
    for folder in ("ours", "theirs"):
        out = hf_to_native(tmp_path / folder, tmp_path / f"{folder}-native")
        actual = load_file(out / "consolidated.safetensors")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert (out / "params.json").read_text() == (tmp_path / "native" / "params.json").read_text()


def test_names_of_a_model_in_memory_go_native_too(tmp_path):
    native_folder(tmp_path / "native")
    model = PixtralForConditionalGeneration.from_pretrained(tmp_path / "native")
    model.config.save_pretrained(tmp_path / "hf")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "hf" / "model.safetensors")
    out = hf_to_native(tmp_path / "hf", tmp_path / "again")
    expected, actual = (load_file(f / "consolidated.safetensors") for f in (tmp_path / "native", out))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in expected)


def test_a_native_folder_loads_in_its_own_dtype_and_in_another(tmp_path):
    native_folder(tmp_path, dtype=torch.bfloat16, shards=2)
    model = PixtralForConditionalGeneration.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and model.name_or_path == str(tmp_path)
    assert PixtralForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_the_model_without_a_head_loads_from_a_native_folder(tmp_path):
    native_folder(tmp_path)
    model, loading = PixtralModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and len(loading["unexpected_keys"]) == 1
    whole = PixtralForConditionalGeneration.from_pretrained(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())


def test_tied_embeddings_need_no_head(tmp_path):
    params = native_params("mistral-small") | {"tied_embeddings": True}
    tensors = native_folder(tmp_path / "native", params=params)
    del tensors["output.weight"]
    save_file(tensors, tmp_path / "native" / "consolidated.safetensors", metadata={"format": "pt"})
    model, loading = PixtralForConditionalGeneration.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.lm_head.weight is model.get_input_embeddings().weight
    again = hf_to_native(native_to_hf(tmp_path / "native", tmp_path / "hf"), tmp_path / "again")
    assert file_hashes(again, "*") == file_hashes(tmp_path / "native", "*")


def test_a_conversion_holds_no_more_than_one_tensor_and_its_reordering(tmp_path, monkeypatch):
    tensors = native_folder(tmp_path / "native", shards=2)
    live = {"now": 0, "most": 0}
    read = native_pixtral.StoredTensor.__getitem__

    def counted(self, index):
        tensor = read(self, index)
        size = tensor.nbytes
        live["now"] += size
        live["most"] = max(live["most"], live["now"])
        weakref.finalize(tensor, lambda: live.update(now=live["now"] - size))
        return tensor

    monkeypatch.setattr(native_pixtral.StoredTensor, "__getitem__", counted)
    native_to_hf(tmp_path / "native", tmp_path / "hf")
    assert live["now"] == 0
    assert live["most"] == max(tensor.nbytes for tensor in tensors.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 3))
def test_reordering_rows_has_an_inverse_and_keeps_pairs(heads, half, width):
    rows = torch.arange(heads * half * 2 * width).view(-1, width)
    halves = halves_from_pairs(rows, heads)
    assert torch.equal(pairs_from_halves(halves, heads), rows)
    split = halves.view(heads, 2, half, width)
    assert torch.equal(split[:, 0], rows.view(heads, half, 2, width)[:, :, 0])
    assert torch.equal(split[:, 1], rows.view(heads, half, 2, width)[:, :, 1])


PIXTRAL_12B = {
    "dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
    "rope_theta": 1000000000.0, "norm_eps": 1e-05, "vocab_size": 131072,
    "vision_encoder": {
        "hidden_size": 1024, "num_channels": 3, "image_size": 1024, "patch_size": 16, "rope_theta": 10000.0,
        "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "adapter_bias": True,
        "image_token_id": 10,
    },
}  # fmt: skip


def test_every_tensor_of_the_native_pixtral_12b_has_its_place(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(PIXTRAL_12B))
    config = read_native_config(tmp_path)
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in PixtralForConditionalGeneration(config).state_dict().items()}
    names = native_pixtral.native_names(config)
    stems = {name: name.rpartition(".") for name in shapes}
    assert {f"{names[stem][0]}.{leaf}": shapes[name] for name, (stem, _, leaf) in stems.items()} == native_shapes(
        PIXTRAL_12B
    )


def test_heads_are_counted_apart_for_queries_keys_and_tower(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(PIXTRAL_12B))
    heads = {module.native: module.heads for module in native_pixtral.modules(read_native_config(tmp_path))}
    stem = "vision_encoder.transformer.layers.0.attention"
    assert (heads["layers.0.attention.wq"], heads["layers.0.attention.wk"]) == (32, 8)
    assert (heads[f"{stem}.wq"], heads[f"{stem}.wk"]) == (16, 16)
    assert heads["layers.0.attention.wv"] is heads["layers.0.attention.wo"] is heads[f"{stem}.wv"] is None


def test_a_mixed_projector_is_not_passed_off_as_a_published_one(tmp_path):
    native_folder(tmp_path / "native", "norm")
    folder = native_to_hf(tmp_path / "native", tmp_path / "hf")
    assert type(PixtralConfig.from_pretrained(folder)) is PixtralMixedConfig
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "params.json").unlink(), "no params.json"),
        (lambda folder: (folder / "consolidated.safetensors").unlink(), "neither consolidated.safetensors nor"),
        (
            lambda folder: save_file({"layers.7.norm.weight": torch.ones(1)}, folder / "consolidated.safetensors"),
            "1 tensors that a Pixtral checkpoint does not have",
        ),
        (
            lambda folder: save_file(
                {"norm.weight": torch.ones(1, dtype=torch.float8_e4m3fn)}, folder / "consolidated.safetensors"
            ),
            "before quantisation",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(change, message, tmp_path):
    native_folder(tmp_path / "native")
    change(tmp_path / "native")
    with pytest.raises(ValueError, match=message):
        native_to_hf(tmp_path / "native", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
