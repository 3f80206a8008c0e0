"""DeepSeek-V4 vision written out naively: one image, one patch, one token at a time, from the published description.

Nothing here comes from the package. The text layers are transformers' own, given a mask, a router and embeddings that
were made here.
"""

import cmath
import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

START, PAD, IMAGE, NEW_LINE, END = range(5)


def rms_norm(row, weight):
    """float32 inside, rounded once."""
    row_32 = row.float()
    mean = sum(row_32 * row_32) / len(row)
    return (row_32 / torch.sqrt(mean + 1e-6) * weight.float()).to(row.dtype)


def turned(head, row, col, theta):
    """One head of one patch: channel i and channel i + half are a complex number, turned by row, then by column."""
    half, quarter = len(head) // 2, len(head) // 4
    pairs = torch.complex(head[:half].float(), head[half:].float())
    turns = [cmath.exp(1j * place * theta ** (-index / quarter)) for place in (row, col) for index in range(quarter)]
    pairs = pairs * torch.tensor(turns, dtype=torch.complex64)
    return torch.cat([pairs.real, pairs.imag]).to(head.dtype)


def attended(queries, keys, values):
    """Every query of one head over every key of its image, (patches, head_dim) each."""
    rows = []
    for query in queries:
        scores = torch.stack([query @ key for key in keys]).float() / math.sqrt(len(query))
        rows.append(sum(share * value for share, value in zip(scores.softmax(0).to(query.dtype), values)))
    return torch.stack(rows)


def tower(weights, patches, rows, cols, heads, theta):
    """The features of one image, (rows * cols, hidden_size), from its patches in raster order and published names."""
    hidden = [weights["patch_embed.proj.weight"] @ p + weights["patch_embed.proj.bias"] for p in patches]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    for layer in range(layers):
        block = {
            name.removeprefix(f"blocks.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        split = [[] for _ in range(heads)]  # by head, then by patch: query, key, value
        for place, state in enumerate(hidden):
            joined = block["attn.wqkv.weight"] @ rms_norm(state, block["norm1.weight"]) + block["attn.wqkv.bias"]
            query, key, value = joined.split(len(state))
            width = len(state) // heads
            for head in range(heads):
                channels = slice(head * width, (head + 1) * width)
                row, col = place // cols, place % cols
                split[head].append(
                    (turned(query[channels], row, col, theta), turned(key[channels], row, col, theta), value[channels])
                )
        mixed = [attended(*(torch.stack(part) for part in zip(*patches_of))) for patches_of in split]
        for place, state in enumerate(hidden):
            output = torch.cat([head[place] for head in mixed])
            state = state + block["attn.wo.weight"] @ output + block["attn.wo.bias"]
            gate, up = (block["mlp.w1.weight"] @ rms_norm(state, block["norm2.weight"])).chunk(2)
            hidden[place] = state + block["mlp.w2.weight"] @ (gate * torch.sigmoid(gate) * up)
    assert len(hidden) == rows * cols
    return torch.stack([rms_norm(state, weights["norm.weight"]) for state in hidden])


def aligner(weights, hidden, rows, cols, ratio):
    """The tokens of one image, raster order: zeros on the right and at the bottom, unfolded, two layers."""
    grid = hidden.view(rows, cols, -1).permute(2, 0, 1)
    padded = F.pad(grid, (0, -cols % ratio, 0, -rows % ratio))
    cells = F.unfold(padded[None], ratio, stride=ratio)[0].T
    inner = cells @ weights["w1.weight"].T + weights["w1.bias"]
    return F.gelu(inner) @ weights["w2.weight"].T + weights["w2.bias"]


def image_block(n_h, n_w, position):
    """The block of an image of n_h x n_w tokens whose first token lands at `position` of the final prompt.

    Returns the types of its tokens, and for each of them the raster index of its aligner row, or None.
    """
    table = []
    for row in range(n_h):
        table.append([(IMAGE, row * n_w + col) for col in range(n_w)] + [(NEW_LINE, None)])
    if n_h % 2 == 1:
        table.append([(PAD, None)] * (n_w + 1))
    block = [(PAD, None)] * (3 - position % 4) + [(START, None)]
    for upper in range(0, len(table), 2):
        for col in range(n_w + 1):
            block += [table[upper][col], table[upper + 1][col]]
    if len(table) // 2 * (n_w + 1) % 2 == 1:
        block += [(PAD, None)] * 2
    block.append((END, None))
    return [kind for kind, _ in block], [index for _, index in block]


def prompt_ids(parts, first_id):
    """Token ids of a prompt whose parts are ids and grids (n_h, n_w)."""
    ids = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [first_id + kind for kind in image_block(*part, len(ids))[0]]
    return ids


def image_spans(ids, first_id):
    """(first, last) position of every block, its alignment pads included."""
    spans, first = [], None
    for position, token in enumerate(ids):
        kind = token - first_id
        if kind not in range(5):
            assert first is None, f"the block that starts at {first} has no end"
            continue
        first = position if first is None else first
        if kind == END:
            spans.append((first, position))
            first = None
    assert first is None
    return spans


def sliding_visibility(ids, first_id, window, max_image_tokens):
    """visible[x][y]: the token at x sees the key at y in the sliding-window branch."""
    spans = image_spans(ids, first_id)
    visible = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for x in range(len(ids)):
        left, right = x - window + 1, x
        for first, last in spans:
            if first <= x <= last:
                left = max(min(left, first), x - (max_image_tokens - 1))
                right = min(last, x + max_image_tokens)
        for y in range(max(left, 0), right + 1):
            visible[x, y] = True
    return visible


def compressed_visibility(length, ratio, overlapping):
    """visible[x][y]: the token at y is part of a compressed entry that the token at x may see.

    Overlapping entries also hold the window before their own.
    """
    visible = torch.zeros(length, length, dtype=torch.bool)
    for x in range(length):
        for entry in range((x + 1) // ratio):
            for y in range((entry - overlapping) * ratio, (entry + 1) * ratio):
                if y >= 0:
                    visible[x, y] = True
    return visible


def routed(state, token, layer, first_id, top_k, scale):
    """Chosen experts of one token, and their weights.

    `layer` holds `weight`, `bias_vl`, and `bias` or `table`: what the layer goes by for text.
    """
    scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in (layer["weight"] @ state).tolist()]
    of_image = token - first_id in range(5)
    if not of_image and "table" in layer:
        chosen = layer["table"][token].tolist()
    else:
        bias = layer["bias_vl" if of_image else "bias"].tolist()
        chosen = sorted(range(len(scores)), key=lambda expert: -(scores[expert] + bias[expert]))[:top_k]
    total = sum(scores[expert] for expert in chosen)
    return chosen, [scores[expert] / total * scale for expert in chosen]


class Router(nn.Module):
    """Stands in the place of a router of transformers, and goes by `routed`."""

    def __init__(self, ids, layer, first_id, top_k, scale):
        super().__init__()
        self.routing = (ids, layer, first_id, top_k, scale)

    def forward(self, hidden_states, input_ids=None):
        ids, *rest = self.routing
        answers = [routed(state, token, *rest) for state, token in zip(hidden_states[0], ids, strict=True)]
        experts, weights = (torch.tensor(column) for column in zip(*answers))
        return None, weights, experts


def text_model(state, fields):
    """transformers' own model with the text weights of a full one, and its routers' weights and biases by layer."""
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields)).eval()
    text = {name.replace("model.language_model.", "model."): tensor for name, tensor in state.items()}
    missing, unexpected = model.load_state_dict(text, strict=False)
    own = ("model.vision_tower.", "model.aligner.", "model.image_")
    unexpected = [name for name in unexpected if not name.startswith(own) and not name.endswith(".bias_vl")]
    hashed = [f".{index}.mlp" for index, kind in enumerate(model.config.mlp_layer_types) if kind == "hash_moe"]
    unexpected = [name for name in unexpected if not any(part in name for part in hashed)]
    assert not missing and not unexpected, (missing, unexpected)
    layers = []
    for index in range(model.config.num_hidden_layers):
        gate = f"model.layers.{index}.mlp.gate."
        layer = {"weight": text[gate + "weight"], "bias_vl": text[gate + "bias_vl"]}
        if model.config.mlp_layer_types[index] == "hash_moe":
            layer["table"] = text[gate + "tid2eid"]
        else:
            layer["bias"] = text[gate + "e_score_correction_bias"]
        layers.append(layer)
    return model, layers


def embedded(ids, table, features, vectors, first_id):
    """The embeddings of one prompt: (length, hidden_size).

    Args:
        table: the text embeddings.
        features: aligner rows of each image, raster order.
        vectors: by type, the learned vector of START, PAD, NEW_LINE and END.
    """
    rows = [table[token] for token in ids]
    for (first, last), image, (n_h, n_w) in zip(image_spans(ids, first_id), *zip(*features), strict=True):
        kinds, indices = image_block(n_h, n_w, first)
        assert [ids[position] - first_id for position in range(first, last + 1)] == kinds
        for position, kind, index in zip(range(first, last + 1), kinds, indices):
            rows[position] = vectors[kind] if index is None else image[index]
    return torch.stack(rows)


def logits(state, fields, ids, embeddings, first_id, max_image_tokens):
    """Logits of one prompt, (length, vocabulary): transformers' layers, our mask and routing, no cache."""
    model, layers = text_model(state, fields)
    config = model.config
    for layer, decoder in zip(layers, model.model.layers):
        decoder.mlp.gate = Router(ids, layer, first_id, config.num_experts_per_tok, config.routed_scaling_factor)
    visible = sliding_visibility(ids, first_id, config.sliding_window, max_image_tokens)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return model(inputs_embeds=embeddings[None], attention_mask={"every": mask}, use_cache=False).logits[0]
