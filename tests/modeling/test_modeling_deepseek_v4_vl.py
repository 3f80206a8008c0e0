"""The DeepSeek-V4 tower, aligner and text model with images beside naive references and transformers' text model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, DynamicCache

from gridtower.configuration.configuration_deepseek_v4_vl import DeepseekV4VisionConfig, DeepseekV4VlConfig
from gridtower.modeling.modeling_deepseek_v4_vl import (
    DeepseekV4Aligner,
    DeepseekV4ForConditionalGeneration,
    DeepseekV4VisionModel,
)

from . import deepseek_v4_reference as reference
from .varlen_reference import NAME as VARLEN
from .varlen_reference import use_backend

VISION = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 2,
    "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 16,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "q_lora_rank": 16, "num_experts_per_tok": 2, "n_routed_experts": 6, "partial_rotary_factor": 0.5,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "hc_mult": 2, "hc_sinkhorn_iters": 4, "sliding_window": 6, "o_groups": 2, "o_lora_rank": 8,
    # Few heads leave many entries with a score of exactly 0, and which of equals is chosen differs from call to call.
    "index_n_heads": 8,
    "index_head_dim": 16, "index_topk": 3, "vocab_size": 64, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNREAD = "flash_unread"
AttentionInterface.register(UNREAD, lambda module, query, *_, **kwargs: (query.transpose(1, 2), None))
BACKENDS = ["eager", "sdpa", VARLEN]
FIRST = 50  # of the five ids of image tokens
RATIO = VISION["downsample_ratio"]
PATCH_DIM = 3 * VISION["patch_size"] ** 2
ODD_TOWERS = [
    {},
    {"hidden_size": 20, "num_attention_heads": 5, "intermediate_size": 7},
    {"hidden_size": 24, "num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 1},
    {"rope_theta": 50.0, "patch_size": 3, "num_hidden_layers": 3},
    {"hidden_size": 72, "num_attention_heads": 1, "downsample_ratio": 2},
    {"downsample_ratio": 1},
]
RAGGED = [(5, 4), (1, 1), (2, 9), (4, 5), (5, 4)]
# Two images, whose blocks begin at different places of a compressed window; grids in patches.
GRIDS = [(7, 5), (3, 8)]
PROMPT = [1, 5, 9, 13, 7, (3, 2), 21, 22, (1, 3), 33, 17, 8]
LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def shake(model):
    """Every weight and bias off its initial value and large enough to matter, so that leaving one out shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "image_" in name or "embed_tokens" in name or name.endswith(("position_bias", "sinks")):
                parameter.normal_()
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), TEXT["n_routed_experts"]).argsort()[:, : buffer.shape[1]])
            elif name.endswith("bias"):
                buffer.normal_(std=0.3)
    return model.eval()


def make_tower(seed=0, implementation="eager", **fields):
    torch.manual_seed(seed)
    tower = shake(DeepseekV4VisionModel(DeepseekV4VisionConfig(**(VISION | fields))))
    tower.set_attn_implementation(implementation)
    return tower


def make_aligner(seed=0, **fields):
    torch.manual_seed(seed)
    return shake(DeepseekV4Aligner(DeepseekV4VisionConfig(**(VISION | fields)), TEXT["hidden_size"]))


def make_model(seed=0, vision=(), **fields):
    torch.manual_seed(seed)
    config = DeepseekV4VlConfig(**(TEXT | fields), vision_config=VISION | dict(vision), image_start_token_id=FIRST)
    return shake(DeepseekV4ForConditionalGeneration(config))


def one_layer(layer_type, mlp_type="moe", **fields):
    return make_model(num_hidden_layers=1, layer_types=[layer_type], mlp_layer_types=[mlp_type], **fields)


def pack(grids, patch_dim=PATCH_DIM, seed=0):
    """Patches of images of these grids and `grid_thw`."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(rows * cols for rows, cols in grids)
    return torch.randn(count, patch_dim, generator=generator), torch.tensor([[1, *grid] for grid in grids])


def by_image(packed, grids):
    return packed.split([rows * cols for rows, cols in grids])


def cells(grid, ratio=RATIO):
    return tuple(-(-side // ratio) for side in grid)


def reference_tower(tower, pixels, grids):
    config, weights = tower.config, dict(tower.named_parameters())
    return torch.cat(
        [
            reference.tower(weights, patches, *grid, config.num_attention_heads, config.rope_theta)
            for patches, grid in zip(by_image(pixels, grids), grids, strict=True)
        ]
    )


def reference_aligner(aligner, hidden, grids, ratio=RATIO):
    weights = dict(aligner.named_parameters())
    return torch.cat(
        [
            reference.aligner(weights, image, *grid, ratio)
            for image, grid in zip(by_image(hidden, grids), grids, strict=True)
        ]
    )


def prompt(parts=PROMPT):
    return torch.tensor([reference.prompt_ids(parts, FIRST)])


def with_images(parts=PROMPT, grids=GRIDS, seed=0):
    pixels, grid = pack(grids, seed=seed)
    return {"input_ids": prompt(parts), "pixel_values": pixels, "image_grid_thw": grid}


def left_padded(rows):
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=0) for row in rows])
    lengths = torch.tensor([row.shape[1] for row in rows])
    return ids, (torch.arange(longest) >= longest - lengths[:, None]).long()


def vectors(model):
    inner = model.model
    return {
        reference.START: inner.image_start,
        reference.PAD: inner.image_pad,
        reference.NEW_LINE: inner.image_newline,
        reference.END: inner.image_end,
    }


def reference_embeddings(model, ids, pixels, grids):
    """Through the reference tower and aligner to the embeddings of a prompt: (length, hidden_size)."""
    inner = model.model
    hidden = reference_tower(inner.vision_tower, pixels, grids)
    rows = reference_aligner(inner.aligner, hidden, grids)
    sizes = [cells(grid) for grid in grids]
    features = list(zip(rows.split([n_h * n_w for n_h, n_w in sizes]), sizes, strict=True))
    return reference.embedded(ids, inner.language_model.embed_tokens.weight, features, vectors(model), FIRST)


def close(ours, theirs, bound=1e-5):
    """Equal to `bound` of the greatest value."""
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, atol=bound, rtol=0)


# The tower and the aligner


@pytest.mark.parametrize("fields", ODD_TOWERS)
def test_the_tower_equals_the_reference_on_ragged_images_under_every_backend(fields):
    tower = make_tower(**fields)
    pixels, grid = pack(RAGGED, tower.config.patch_dim)
    with torch.no_grad():
        expected = reference_tower(tower, pixels, RAGGED)
        for backend in BACKENDS:
            close(use_backend(tower, backend)(pixels, grid_thw=grid).last_hidden_state, expected)


@pytest.mark.parametrize("fields", ODD_TOWERS)
def test_the_aligner_equals_pad_and_unfold_on_ragged_images(fields):
    aligner = make_aligner(**fields)
    grid = pack(RAGGED)[1]
    hidden = torch.randn(
        int(grid.prod(-1).sum()), aligner.w1.in_features // fields.get("downsample_ratio", RATIO) ** 2
    )
    with torch.no_grad():
        expected = reference_aligner(aligner, hidden, RAGGED, fields.get("downsample_ratio", RATIO))
        close(aligner(hidden, grid), expected)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_tower_and_aligner_equal_the_references_on_any_grids(grids, ratio):
    tower, aligner = make_tower(num_hidden_layers=1), make_aligner(downsample_ratio=ratio)
    pixels, grid = pack(grids)
    with torch.no_grad():
        hidden = tower(pixels, grid_thw=grid).last_hidden_state
        close(hidden, reference_tower(tower, pixels, grids))
        features = aligner(hidden, grid)
        assert len(features) == sum(n_h * n_w for n_h, n_w in (cells(g, ratio) for g in grids))
        close(features, reference_aligner(aligner, hidden, grids, ratio))


def test_gradients_of_tower_and_aligner_equal_those_of_the_references():
    tower, aligner = make_tower(), make_aligner()
    grids = [(4, 5), (2, 3)]
    pixels, grid = pack(grids)
    parameters = {**dict(tower.named_parameters()), **dict(aligner.named_parameters(prefix="aligner"))}
    gradients = []
    for features in (
        aligner(tower(pixels, grid_thw=grid).last_hidden_state, grid),
        reference_aligner(aligner, reference_tower(tower, pixels, grids), grids),
    ):
        gradients.append(torch.autograd.grad(features.square().mean(), parameters.values()))
    for name, ours, theirs in zip(parameters, *gradients, strict=True):
        assert theirs.abs().max() > 0, name
        close(ours, theirs)


def test_in_bfloat16_tower_and_aligner_are_as_near_to_float32_as_the_references():
    tower, aligner = make_tower().to(torch.bfloat16), make_aligner().to(torch.bfloat16)
    pixels, grid = pack(RAGGED)
    pixels = pixels.bfloat16()
    with torch.no_grad():
        ours = aligner(tower(pixels, grid_thw=grid).last_hidden_state, grid).float()
        theirs = reference_aligner(aligner, reference_tower(tower, pixels, RAGGED), RAGGED).float()
        hidden = reference_tower(tower.float(), pixels.float(), RAGGED)
        exact = reference_aligner(aligner.float(), hidden, RAGGED)
    error = (ours - exact).norm() / exact.norm()
    assert error <= 1.1 * (theirs - exact).norm() / exact.norm()
    assert error <= 0.02


def test_norms_keep_float32_weights_and_round_once_in_a_bfloat16_tower():
    tower = make_tower()
    pixels, grid = pack(RAGGED)
    exact = tower(pixels, grid_thw=grid).last_hidden_state
    for name, parameter in tower.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.bfloat16()
    outputs = tower(pixels, grid_thw=grid).last_hidden_state
    assert outputs.dtype == torch.bfloat16
    assert (outputs.float() - exact).norm() / exact.norm() < 0.02
    rows = pixels.bfloat16().repeat(1, 3)[:, : VISION["hidden_size"]]
    expected = torch.stack([reference.rms_norm(row, tower.norm.weight) for row in rows])
    # Sums in another order fall on the other side of a rounding now and then.
    assert (tower.norm(rows) == expected).float().mean() > 0.995


@pytest.mark.parametrize("backend", BACKENDS)
def test_precomputed_tensors_give_what_the_grids_give(backend):
    tower, aligner = make_tower(), make_aligner()
    pixels, grid = pack(RAGGED)
    with torch.no_grad():
        hidden = tower(pixels, grid_thw=grid).last_hidden_state
        features = aligner(hidden, grid)
        use_backend(tower, backend)
        made = tower.packed_metadata(grid)
        assert all(isinstance(tensor, torch.Tensor) for tensor in made.values())
        tables = {name: made[name] for name in ("cos", "sin", "cu_seqlens", "max_seqlen")}
        packed = tower.forward_packed(pixels, **tables)
        close(packed, hidden)
        close(aligner.forward_packed(packed, made["merge_index"], made["merge_mask"]), features)


def test_under_a_flash_backend_precomputed_tensors_are_never_read_back():
    # A tensor on the meta device has no values, so whatever reads one fails.
    tower = use_backend(make_tower(), UNREAD)
    pixels, grid = pack(RAGGED)
    made = {name: t if name == "max_seqlen" else t.to("meta") for name, t in tower.packed_metadata(grid).items()}
    index, mask = made.pop("merge_index"), made.pop("merge_mask")
    hidden = tower.to("meta").forward_packed(pixels.to("meta"), **made)
    assert make_aligner().to("meta").forward_packed(hidden, index, mask).shape == (16, TEXT["hidden_size"])


def test_each_frame_of_several_steps_is_an_image_of_its_own():
    tower, aligner = make_tower(), make_aligner()
    pixels, images = pack([(4, 5), (4, 5), (2, 3)])
    clip = torch.tensor([[2, 4, 5], [1, 2, 3]])
    with torch.no_grad():
        hidden = tower(pixels, grid_thw=clip).last_hidden_state
        close(hidden, tower(pixels, grid_thw=images).last_hidden_state, 1e-6)
        close(aligner(hidden, clip), aligner(hidden, images), 1e-6)


def test_boundaries_are_those_of_the_images():
    made = make_tower().packed_metadata(torch.tensor([[1, 2, 3], [1, 4, 1]]))
    assert made["cu_seqlens"].tolist() == [0, 6, 10] and made["cu_seqlens"].dtype == torch.int32
    assert int(made["max_seqlen"]) == 6
    assert made["cos"].dtype == made["sin"].dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_patch_reaches_every_patch_of_its_image_and_none_of_another(backend):
    tower = use_backend(make_tower(), backend)
    pixels, grid = pack(RAGGED)
    changed = pixels.clone()
    changed[19] += 1  # the last patch of the first image, which has 5 x 4
    with torch.no_grad():
        before, after = (tower(p, grid_thw=grid).last_hidden_state for p in (pixels, changed))
    assert ((before - after)[:20].abs().amax(-1) > 0).all()
    assert torch.equal(before[20:], after[20:])


def test_the_image_processors_name_for_grids_is_taken():
    tower = make_tower()
    pixels, grid = pack(RAGGED)
    named = tower(pixel_values=pixels, image_grid_thw=grid).last_hidden_state
    assert torch.equal(named, tower(pixels, grid_thw=grid).last_hidden_state)


def test_float32_pixels_enter_a_bfloat16_tower():
    pixels, grid = pack(RAGGED)
    assert make_tower().to(torch.bfloat16)(pixels, grid_thw=grid).last_hidden_state.dtype == torch.bfloat16


def test_names_in_the_state_dicts_are_the_published_ones():
    expected = {"patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight"}
    for index in range(2):
        leaves = ["norm1.weight", "norm2.weight", "mlp.w1.weight", "mlp.w2.weight"]
        leaves += [f"attn.{leaf}.{kind}" for leaf in ("wqkv", "wo") for kind in ("weight", "bias")]
        expected |= {f"blocks.{index}.{leaf}" for leaf in leaves}
    assert set(make_tower().state_dict()) == expected
    assert set(make_aligner().state_dict()) == {"w1.weight", "w1.bias", "w2.weight", "w2.bias"}


@pytest.mark.parametrize(
    ("pixels", "grid", "message"),
    [
        (torch.zeros(4, 11), [[1, 2, 2]], r"\(4, 11\).*\(num_patches, 12\)"),
        (torch.zeros(4, 3, 2, 2), [[1, 2, 2]], r"\(4, 3, 2, 2\).*\(num_patches, 12\)"),
        (torch.zeros(4, 12), [[1, 2, 3]], "describes 6 patches.*holds 4"),
        (torch.zeros(4, 12), [[1, 2, 2], [1, 0, 2]], r"grid_thw\[1\] is \[1, 0, 2\].*at least 1"),
        (torch.zeros(4, 12), [[2, 2]], r"shape \(1, 2\).*give"),
        (torch.zeros(4, 12), [[1.0, 2.0, 2.0]], "float32.*int64"),
    ],
)
def test_inputs_that_the_tower_cannot_take_are_refused(pixels, grid, message):
    with pytest.raises(ValueError, match=message):
        make_tower()(pixels, grid_thw=torch.tensor(grid))


def test_grids_are_passed_once():
    pixels, grid = pack(RAGGED)
    with pytest.raises(ValueError, match="grids once"):
        make_tower()(pixels)
    with pytest.raises(ValueError, match="grids once"):
        make_tower()(pixels, grid_thw=grid, image_grid_thw=grid)


@pytest.mark.parametrize(
    ("hidden", "grid", "message"),
    [
        (torch.zeros(4, 32), [[1, 2, 3]], "describes 6 patches.* 4"),
        (torch.zeros(4, 32), [[1, 2, 2], [1, 2, 0]], r"grid_thw\[1\] is \[1, 2, 0\]"),
        (torch.zeros(4, 31), [[1, 2, 2]], r"\(4, 31\).*give \(num_patches, 32\)"),
    ],
)
def test_inputs_that_the_aligner_cannot_take_are_refused(hidden, grid, message):
    with pytest.raises(ValueError, match=message):
        make_aligner()(hidden, torch.tensor(grid))


# Text alone


def texts(rows=2, length=27, seed=0):
    return torch.randint(3, FIRST, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("dtype", "index_topk"), [(torch.float32, 2), (torch.float32, 512), (torch.bfloat16, 2)])
def test_text_alone_gives_the_very_logits_of_transformers(dtype, index_topk, use_cache):
    ours = make_model(index_topk=index_topk)
    theirs, _ = reference.text_model(ours.state_dict(), TEXT | {"index_topk": index_topk})
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    ids = texts()
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids)):
            actual, expected = (
                model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=use_cache) for model in (ours, theirs)
            )
            assert torch.equal(actual.logits, expected.logits)
            assert torch.equal(actual.loss, expected.loss)


def test_text_alone_records_what_transformers_records():
    ours = make_model()
    theirs, _ = reference.text_model(ours.state_dict(), TEXT)
    ids = texts()
    asked = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    with torch.no_grad():
        actual, expected = (model(input_ids=ids, labels=ids, **asked) for model in (ours, theirs))
    assert torch.equal(actual.loss, expected.loss) and torch.equal(actual.aux_loss, expected.aux_loss)
    for name in ("hidden_states", "attentions", "router_logits"):
        for ours_, theirs_ in zip(getattr(actual, name), getattr(expected, name), strict=True):
            assert torch.equal(ours_, theirs_)


def test_text_embeddings_alone_give_what_their_ids_give():
    hashless = {"mlp_layer_types": ["moe"] * 4}
    model, ids = make_model(**hashless), texts()
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeddings).logits, model(input_ids=ids).logits)
        with pytest.raises(ValueError, match="pass input_ids along"):
            make_model()(inputs_embeds=embeddings)


def test_text_alone_step_by_step_gives_the_very_logits_of_transformers():
    ours = make_model()
    theirs, _ = reference.text_model(ours.state_dict(), TEXT)
    ids = texts()
    caches = [DynamicCache(config=model.config) for model in (ours, theirs)]
    with torch.no_grad():
        for chunk in ids.split([9, 1, 1, 6, 1, 1, 8], dim=1):
            actual, expected = (
                model(input_ids=chunk, cache=cache, use_cache=True).logits
                for model, cache in zip((ours, theirs), caches)
            )
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_text_alone_generates_what_transformers_generates(options):
    ours = make_model()
    theirs, _ = reference.text_model(ours.state_dict(), TEXT)
    ids = texts()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    sentinels = list(range(FIRST, FIRST + 5))  # never sampled by ours
    mask = torch.ones_like(ids)
    expected = theirs.generate(ids, attention_mask=mask, suppress_tokens=sentinels, **options)
    assert torch.equal(ours.generate(input_ids=ids, attention_mask=mask, **options), expected)


# Text with images


@pytest.mark.parametrize(("start", "index_topk"), [(0, 3), (1, 512), (2, 3), (3, 2)])
def test_logits_with_images_equal_transformers_layers_under_the_reference_mask_and_routing(start, index_topk):
    model = make_model(index_topk=index_topk)
    parts = [1, 5, 9, 13, 7, 11, 12, 14][: 5 + start] + PROMPT[5:]
    inputs = with_images(parts)
    ids = inputs["input_ids"][0].tolist()
    with torch.no_grad():
        embeddings = reference_embeddings(model, ids, inputs["pixel_values"], GRIDS)
        fields = TEXT | {"index_topk": index_topk}
        expected = reference.logits(model.state_dict(), fields, ids, embeddings, FIRST, VISION["max_image_tokens"])
        for use_cache in (True, False):
            close(model(**inputs, use_cache=use_cache).logits[0], expected)


def entering(model, **inputs):
    """What enters the first text layer: (batch, length, hidden_size), the streams being alike."""
    seen = []

    def note(module, args, kwargs):
        seen.append((args[0] if args else kwargs["hidden_states"])[:, :, 0])

    hook = model.model.language_model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0]


def test_features_and_vectors_stand_where_the_layout_puts_them():
    model = make_model()
    inputs = with_images()
    ids = inputs["input_ids"][0].tolist()
    with torch.no_grad():
        expected = reference_embeddings(model, ids, inputs["pixel_values"], GRIDS)
    actual = entering(model, **inputs)[0]
    close(actual, expected)
    for kind, vector in vectors(model).items():
        places = [position for position, token in enumerate(ids) if token == FIRST + kind]
        assert places and all(torch.equal(actual[place], vector) for place in places)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_features_of_an_image_come_in_the_order_of_its_tokens(grids):
    model = make_model(num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"])
    pixels, grid = pack(grids)
    with torch.no_grad():
        features = model.get_image_features(pixels, grid).pooler_output
        raster = model.model.aligner(model.model.vision_tower(pixels, grid_thw=grid).last_hidden_state, grid)
    assert len(features) == len(grids)
    sizes = [cells(g) for g in grids]
    for ours, rows, size in zip(features, raster.split([h * w for h, w in sizes]), sizes, strict=True):
        order = [index for index in reference.image_block(*size, 0)[1] if index is not None]
        close(ours, rows[order], 1e-6)


def moved_by_each(model, inputs):
    """moved[x, y]: whether the state at x changes when the embedding at y does."""
    noise = 5 * torch.randn(
        inputs["input_ids"].shape[1], TEXT["hidden_size"], generator=torch.Generator().manual_seed(0)
    )
    embeddings = entering(model, **inputs)[0]
    # A batch of all changes, after the unchanged prompt.
    changed = embeddings.repeat(1 + len(noise), 1, 1)
    for position, push in enumerate(noise):
        changed[1 + position, position] += push
    ids = inputs["input_ids"].expand(len(changed), -1)
    with torch.no_grad():
        text_model = model.model.language_model
        states = text_model(input_ids=ids, inputs_embeds=changed, use_cache=False).last_hidden_state
    return ((states[1:] - states[0]).abs().amax(-1) > 2e-5).T


def visible_from(layer_type, ids):
    visible = reference.sliding_visibility(ids, FIRST, TEXT["sliding_window"], VISION["max_image_tokens"])
    if layer_type == "sliding_attention":
        return visible
    ratio = TEXT["compress_rates"][layer_type]
    return visible | reference.compressed_visibility(len(ids), ratio, layer_type == "compressed_sparse_attention")


@pytest.mark.parametrize("layer_type", LAYERS)
def test_a_token_moves_those_that_see_it_and_no_others(layer_type):
    model = one_layer(layer_type, index_topk=512)
    inputs = with_images()
    ids = inputs["input_ids"][0].tolist()
    visible = visible_from(layer_type, ids)
    assert torch.equal(moved_by_each(model, inputs), visible)


def test_a_token_moves_no_others_where_few_compressed_entries_are_chosen():
    model = one_layer("compressed_sparse_attention", index_topk=1)
    inputs = with_images()
    ids = inputs["input_ids"][0].tolist()
    sliding = visible_from("sliding_attention", ids)
    either = visible_from("compressed_sparse_attention", ids)
    moved = moved_by_each(model, inputs)
    assert not (moved & ~either).any() and not (sliding & ~moved).any()
    assert (either & ~moved).any()


@pytest.mark.parametrize("layer_type", LAYERS)
def test_text_sees_a_causal_window_and_image_tokens_their_whole_block(layer_type):
    # The same statement read off the attention maps.
    model = one_layer(layer_type, index_topk=512)
    inputs = with_images()
    ids = inputs["input_ids"][0].tolist()
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True, use_cache=False).attentions[0][0]
    length = len(ids)
    expected = reference.sliding_visibility(ids, FIRST, TEXT["sliding_window"], VISION["max_image_tokens"])
    assert torch.equal((weights[..., :length] > 0).all(0), expected)
    assert torch.equal((weights[..., :length] > 0).any(0), expected)  # by all heads alike
    entries = weights.shape[-1] - length
    if layer_type == "sliding_attention":
        assert entries == 0
        return
    ratio = TEXT["compress_rates"][layer_type]
    assert entries == length // ratio
    for x in range(length):
        assert (weights[0, x, length:] > 0).tolist() == [entry < (x + 1) // ratio for entry in range(entries)]


PARTS = st.one_of(st.integers(3, FIRST - 1), st.tuples(st.integers(1, 4), st.integers(1, 4)))


@settings(max_examples=15, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=8), st.integers(7, 40))
def test_images_anywhere_are_seen_as_the_reference_says(parts, max_image_tokens):
    # Also next to each other, and longer than what a token may see to either side.
    model = one_layer("sliding_attention", vision={"max_image_tokens": max_image_tokens})
    ids = prompt(parts)
    grids = [(n_h * RATIO, n_w * RATIO - 1) for n_h, n_w in (part for part in parts if not isinstance(part, int))]
    inputs = with_images(parts, grids) if grids else {"input_ids": ids}
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True, use_cache=False).attentions[0][0]
    expected = reference.sliding_visibility(ids[0].tolist(), FIRST, TEXT["sliding_window"], max_image_tokens)
    assert torch.equal((weights > 0).all(0), expected) and torch.equal((weights > 0).any(0), expected)


def chosen_experts(model, **inputs):
    """Experts of every token by layer: (length, experts per token) each, for a prompt of one row."""
    chosen, hooks = [], []
    for layer in model.model.language_model.layers:
        hooks.append(
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, args, kwargs: chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"]),
                with_kwargs=True,
            )
        )
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return chosen


def test_biases_send_image_tokens_and_text_to_their_own_experts_in_every_layer():
    model = make_model()
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            gate = layer.mlp.gate
            gate.bias_vl.zero_()[[4, 5]] = 100.0
            if hasattr(gate, "tid2eid"):
                gate.tid2eid.copy_(torch.tensor([1, 2]))
            if hasattr(gate, "e_score_correction_bias"):  # hash layers carry one too, unused
                used = [0, 3] if not hasattr(gate, "tid2eid") else [4, 5]
                gate.e_score_correction_bias.zero_()[used] = 100.0
    inputs = with_images()
    of_image = torch.tensor([token - FIRST in range(5) for token in inputs["input_ids"][0].tolist()])
    assert of_image.any() and not of_image.all()
    for kind, experts in zip(TEXT["mlp_layer_types"], chosen_experts(model, **inputs), strict=True):
        counts = torch.nn.functional.one_hot(experts, 6).sum(1)
        text, images = counts[~of_image].sum(0).tolist(), counts[of_image].sum(0).tolist()
        n_text, n_images = int((~of_image).sum()), int(of_image.sum())
        expected = [0, n_text, n_text, 0, 0, 0] if kind == "hash_moe" else [n_text, 0, 0, n_text, 0, 0]
        assert text == expected
        assert images == [0, 0, 0, 0, n_images, n_images]


def test_decoded_text_is_routed_as_text():
    model = make_model()
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.mlp.gate.bias_vl.zero_()[[4, 5]] = 100.0
            if hasattr(layer.mlp.gate, "tid2eid"):
                layer.mlp.gate.tid2eid.copy_(torch.tensor([1, 2]))
            else:
                layer.mlp.gate.e_score_correction_bias.zero_()[[1, 2]] = 100.0
        cache = model(**with_images(), use_cache=True).cache
    for experts in chosen_experts(model, input_ids=torch.tensor([[9]]), cache=cache, use_cache=True):
        assert sorted(experts[0].tolist()) == [1, 2]


# Generation

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def uncached(model, ids, inputs):
    with torch.no_grad():
        return model(**(inputs | {"input_ids": ids}), use_cache=False).logits


@pytest.mark.parametrize("index_topk", [2, 512])
@pytest.mark.parametrize("parts", [PROMPT, [1, (3, 2), (1, 3), 5], [1, 2, 3, 4, (3, 2), (1, 3)]])
def test_generation_equals_the_uncached_model_at_every_step(parts, index_topk):
    model = make_model(index_topk=index_topk)
    inputs = with_images(parts)
    made = model.generate(**inputs, **OPTIONS, max_new_tokens=14, output_logits=True, return_dict_in_generate=True)
    prefix = inputs["input_ids"].shape[1]
    logits = uncached(model, made.sequences, inputs)[0]
    for step, ours in enumerate(made.logits):
        close(ours[0], logits[prefix - 1 + step])


def other_prompts():
    """Prompts with two images, none, and one."""
    return [
        (PROMPT, GRIDS),
        ([1, 44, 3, 6, 30, 9], []),
        ([1, 4, (2, 2), 6], [(5, 4)]),
    ]


def batch_of(prompts):
    rows = [prompt(parts) for parts, _ in prompts]
    ids, mask = left_padded(rows)
    media = [pack(grids, seed=7 + index) for index, (_, grids) in enumerate(prompts) if grids]
    together = {"pixel_values": torch.cat([p for p, _ in media]), "image_grid_thw": torch.cat([g for _, g in media])}
    singles, media = [], iter(media)
    for row, (_, grids) in zip(rows, prompts):
        single = {"input_ids": row}
        if grids:
            single["pixel_values"], single["image_grid_thw"] = next(media)
        singles.append(single)
    return {"input_ids": ids, "attention_mask": mask, **together}, singles


def test_a_left_padded_batch_may_be_prefilled_in_chunks():
    # The first chunk is padding in the shorter rows; the image of the last row comes in the second.
    model = make_model()
    prompts = [([*range(3, 30)], []), ([*range(30, 45)], []), ([1, 4, (2, 2), 6], [(5, 4)])]
    batch, _ = batch_of(prompts)
    ids, mask = batch.pop("input_ids"), batch.pop("attention_mask")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, **batch).logits
        first = model(input_ids=ids[:, :10], attention_mask=mask[:, :10], cache=cache, use_cache=True).logits
        rest = model(input_ids=ids[:, 10:], attention_mask=mask, cache=cache, use_cache=True, **batch).logits
    for ours, theirs, real in zip(torch.cat([first, rest], 1), expected, mask.bool()):
        close(ours[real], theirs[real])


@pytest.mark.parametrize("use_cache", [True, False])
def test_each_row_of_a_left_padded_batch_gives_the_logits_that_it_gives_alone(use_cache):
    model = make_model()
    batch, singles = batch_of(other_prompts())
    with torch.no_grad():
        together = model(**batch, use_cache=use_cache).logits
        for row, single in zip(together, singles, strict=True):
            alone = model(**single, use_cache=use_cache).logits[0]
            close(row[-len(alone) :], alone)


def test_rows_padded_at_either_side_give_the_logits_that_they_give_alone():
    model = make_model()
    batch, singles = batch_of(other_prompts())
    rows = [single["input_ids"] for single in singles]
    width = max(row.shape[1] for row in rows) + 5
    lefts = [2, 0, width - rows[2].shape[1]]
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for index, (row, left) in enumerate(zip(rows, lefts)):
        ids[index, left : left + row.shape[1]] = row[0]
        mask[index, left : left + row.shape[1]] = 1
    with torch.no_grad():
        together = model(**(batch | {"input_ids": ids, "attention_mask": mask})).logits
        for row, left, single in zip(together, lefts, singles):
            alone = model(**single).logits[0]
            close(row[left : left + len(alone)], alone)


def test_each_row_of_a_left_padded_batch_generates_what_it_generates_alone():
    model = make_model()
    batch, singles = batch_of(other_prompts())
    asked = {**OPTIONS, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    together = model.generate(**batch, **asked)
    new = together.sequences[:, batch["input_ids"].shape[1] :]
    for row, single in enumerate(singles):
        alone = model.generate(**single, **asked)
        assert torch.equal(new[row], alone.sequences[0, single["input_ids"].shape[1] :])
        for ours, theirs in zip(together.logits, alone.logits, strict=True):
            close(ours[row], theirs[0])


def test_beams_of_several_prompts_keep_their_images_and_their_caches():
    model = make_model()
    batch, singles = batch_of(other_prompts())
    asked = {**OPTIONS, "max_new_tokens": 8, "num_beams": 2, "num_return_sequences": 2}
    asked |= {"length_penalty": 0.0, "output_scores": True, "return_dict_in_generate": True}
    made = model.generate(**batch, **asked)
    sequences, scores = made.sequences.view(3, 2, -1), made.sequences_scores.view(3, 2)
    greedy = model.generate(**batch, **OPTIONS, max_new_tokens=8)
    assert not torch.equal(sequences[:, 0], greedy)  # or no beam was ever left
    width = batch["input_ids"].shape[1]
    for row, single in enumerate(singles):
        prefix = single["input_ids"].shape[1]
        for sequence, score in zip(sequences[row], scores[row]):
            new = sequence[width:]
            ids = torch.cat([single["input_ids"][0], new])[None]
            log_probs = uncached(model, ids, single)[0, prefix - 1 : -1].log_softmax(-1)
            torch.testing.assert_close(log_probs.gather(1, new[:, None]).sum(), score, atol=1e-3, rtol=1e-5)


def test_several_sequences_of_several_prompts_keep_their_images():
    model = make_model()
    batch, _ = batch_of(other_prompts())
    expected = model.generate(**batch, **OPTIONS, max_new_tokens=6)
    sampled = model.generate(
        **batch, **(OPTIONS | {"do_sample": True}), top_k=1, num_return_sequences=3, max_new_tokens=6
    )
    assert torch.equal(sampled, expected.repeat_interleave(3, 0))


def test_image_tokens_are_never_sampled():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[FIRST : FIRST + 5] = 1e3 * torch.randn(5, TEXT["hidden_size"])
    made = model.generate(**with_images(), **OPTIONS, max_new_tokens=6)
    new = made[0, with_images()["input_ids"].shape[1] :]
    assert not ((new >= FIRST) & (new < FIRST + 5)).any()


def test_a_conversation_goes_on_from_its_cache_with_another_image():
    model = make_model()
    inputs, cache = with_images(), DynamicCache(config=model.config)
    answered = model.generate(**inputs, **OPTIONS, max_new_tokens=5, cache=cache)
    ids = prompt([*answered[0].tolist(), 9, 8, (2, 2), 5])
    pixels, grid = pack([(5, 4)], seed=3)
    going_on = model.generate(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grid, **OPTIONS, max_new_tokens=6, cache=cache
    )
    every = {
        "pixel_values": torch.cat([inputs["pixel_values"], pixels]),
        "image_grid_thw": torch.cat([inputs["image_grid_thw"], grid]),
    }
    assert torch.equal(going_on, model.generate(input_ids=ids, **every, **OPTIONS, max_new_tokens=6))


# Prefill in chunks


def chunked(model, inputs, border):
    """Logits of the second chunk, the first holding the images."""
    cache = DynamicCache(config=model.config)
    ids = inputs["input_ids"]
    with torch.no_grad():
        model(**(inputs | {"input_ids": ids[:, :border]}), cache=cache, use_cache=True)
        return model(input_ids=ids[:, border:], cache=cache, use_cache=True).logits


def test_a_border_between_a_block_and_text_changes_nothing():
    model = make_model()
    inputs = with_images()
    ids = inputs["input_ids"][0].tolist()
    expected = uncached(model, inputs["input_ids"], inputs)
    border = reference.image_spans(ids, FIRST)[-1][1] + 1
    close(chunked(model, inputs, border), expected[:, border:])


@pytest.mark.parametrize("border", range(5, 9))
def test_a_border_before_a_block_changes_nothing(border):
    model = make_model()
    parts = [1, *range(3, 2 + border), (3, 2), 7, 8]
    inputs = with_images(parts, GRIDS[:1])
    ids = inputs["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :border], cache=cache, use_cache=True)
        ours = model(**(inputs | {"input_ids": ids[:, border:]}), cache=cache, use_cache=True).logits
    close(ours, uncached(model, ids, inputs)[:, border:])


def test_a_block_that_a_chunk_border_splits_is_refused():
    model = make_model()
    parts = [1, 5, 9, 13, (3, 2), 21]  # three alignment pads first
    inputs = with_images(parts, GRIDS[:1])
    ids = inputs["input_ids"]
    ((first, last),) = reference.image_spans(ids[0].tolist(), FIRST)
    text_only = {"input_ids": ids}
    for border in range(first + 1, last + 1):
        left = inputs if (ids[0, :border] == FIRST + reference.IMAGE).any() else text_only
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), pytest.raises(ValueError):
            model(**(left | {"input_ids": ids[:, :border]}), cache=cache, use_cache=True)
        assert cache.get_seq_length() == 0
    # All of its IMAGE tokens and their features are there; what lacks is the end.
    with torch.no_grad(), pytest.raises(ValueError, match="Row 0 .* part of an image.* in one call"):
        model(**(inputs | {"input_ids": ids[:, :last]}), use_cache=True)


@pytest.mark.parametrize(
    "kinds",
    [
        [reference.END, None],
        [reference.NEW_LINE, None],
        [reference.PAD, None],
        [reference.START],
        [reference.END],
        [reference.START, reference.START, reference.END],
    ],
)
def test_parts_of_a_block_are_refused(kinds):
    model = make_model()
    cache = DynamicCache(config=model.config)
    part = torch.tensor([[7 if kind is None else FIRST + kind for kind in kinds]])
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 5, 9]]), cache=cache, use_cache=True)
        with pytest.raises(ValueError, match="part of an image"):
            model(input_ids=part, cache=cache, use_cache=True)


def test_pixels_without_their_grid_are_refused():
    inputs = with_images([1, 5, (3, 2), 21], GRIDS[:1])
    del inputs["image_grid_thw"]
    with pytest.raises(ValueError, match="without their grid"):
        make_model()(**inputs)


# What the model takes and gives


@pytest.mark.parametrize(("grids", "made"), [(GRIDS[:1], 6), ([*GRIDS, (4, 4)], 13)])
def test_the_number_of_image_tokens_must_be_that_of_features(grids, made):
    model = make_model()
    pixels, grid = pack(grids)
    with pytest.raises(ValueError, match=f"hold 9 image placeholders .* make {made} features"):
        model(input_ids=prompt(), pixel_values=pixels, image_grid_thw=grid)


def test_images_have_one_temporal_step():
    pixels, _ = pack([(4, 5), (4, 5)])
    with pytest.raises(ValueError, match=r"image_grid_thw\[0\] is \[2, 4, 5\].*give 1"):
        make_model().get_image_features(pixels, torch.tensor([[2, 4, 5]]))


def test_embeddings_with_their_ids_give_what_pixels_give():
    model = make_model()
    inputs = with_images()
    with torch.no_grad():
        actual = model(input_ids=inputs["input_ids"], inputs_embeds=entering(model, **inputs)).logits
        assert torch.equal(actual, model(**inputs).logits)


def test_features_computed_before_give_what_pixels_give():
    model = make_model()
    inputs = with_images()
    with torch.no_grad():
        outputs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        expected = model(**inputs).logits
        actual = model(input_ids=inputs["input_ids"], mm_encoder_outputs={"image": outputs}).logits
    assert torch.equal(actual, expected)


def test_logits_come_for_the_positions_asked_for():
    model = make_model()
    with torch.no_grad():
        every, last = model(**with_images()).logits, model(**with_images(), logits_to_keep=2).logits
    close(last, every[:, -2:], 1e-6)


def test_losses_and_gradients_of_the_rows_of_a_padded_batch_add_up():
    model = make_model()
    batch, singles = batch_of(other_prompts())
    items = int(batch["attention_mask"].sum()) - len(singles)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 0] = -100  # what a row begins with is predicted by nothing, or by padding
    labels = torch.where(batch["attention_mask"].cumsum(-1) == 1, -100, labels)
    whole = model(**batch, labels=labels, num_items_in_batch=items, use_cache=False).loss
    parts = sum(model(**s, labels=s["input_ids"], num_items_in_batch=items, use_cache=False).loss for s in singles)
    close(whole, parts)
    learned = {name: p for name, p in model.named_parameters() if ".indexer." not in name}
    gradients = (torch.autograd.grad(loss, learned.values(), allow_unused=True) for loss in (whole, parts))
    for name, ours, theirs in zip(learned, *gradients, strict=True):
        assert theirs.abs().max() > 0, name
        close(ours, theirs, 1e-4)


def test_gradients_reach_every_part():
    model = make_model()
    inputs = with_images()
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] >= FIRST, -100)
    model(**inputs, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        # The indexer chooses, and the biases of the routers choose: no gradient passes a choice.
        if ".indexer." in name or name.endswith("bias_vl"):
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        assert getattr(model.model, name).grad.abs().max() > 0
    # Sentinel rows of the table are always overwritten.
    assert not model.get_input_embeddings().weight.grad[FIRST : FIRST + 5].any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_same_under_checkpointing(reentrant):
    model, inputs = make_model().train(), with_images()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_a_frozen_tower_builds_no_graph_under_checkpointing_either():
    # For which transformers makes the output of every input embedding require gradients.
    model = make_model()
    model.model.vision_tower.requires_grad_(False)
    model.enable_input_require_grads()
    pixels, grid = pack(RAGGED)
    assert not model.model.vision_tower(pixels, grid_thw=grid).last_hidden_state.requires_grad
