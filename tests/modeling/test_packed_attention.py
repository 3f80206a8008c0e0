"""Attention inside segments: the same under every backend, without a leak, and linear in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gridtower.configuration.configuration_lfm3_vl import Lfm3VlVisionConfig
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlVisionModel
from gridtower.modeling.packed_attention import eager_attention, packed_attention

from .varlen_reference import NAME as VARLEN
from .varlen_reference import use_backend, varlen_reference

BACKENDS = {"eager": eager_attention, "sdpa": sdpa_attention_forward, VARLEN: varlen_reference}
backends = pytest.mark.parametrize("backend", BACKENDS)


class Attention(nn.Module):
    """What a backend reads of a vision attention."""

    is_causal = False

    def __init__(self, backend, groups):
        super().__init__()
        self.config = PreTrainedConfig()
        self.config._attn_implementation = backend
        self.num_key_value_groups = groups


def attend(backend, query, key, value, lengths, **kwargs):
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    segments = []
    for length in lengths:
        if segments and segments[-1][1] == length:
            segments[-1] = (segments[-1][0] + 1, length)
        else:
            segments.append((1, length))
    module = Attention(backend, query.shape[1] // key.shape[1])
    return packed_attention(
        BACKENDS[backend], module, query, key, value, segments=tuple(segments), cu_seqlens=boundaries, **kwargs
    )


def random_heads(lengths, heads=4, groups=2, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, heads // groups, heads // groups)
    return [torch.randn(sum(lengths), size, head_dim, generator=generator) for size in sizes]


def spelled_out(query, key, value, lengths):
    """Softmax attention patch by patch, in float64."""
    query, key, value = (states.double() for states in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    rows, start = [], 0
    for length in lengths:
        own = slice(start, start + length)
        for patch in range(start, start + length):
            heads = []
            for head in range(query.shape[1]):
                scores = key[own, head // groups] @ query[patch, head] / query.shape[-1] ** 0.5
                heads.append(scores.softmax(0) @ value[own, head // groups])
            rows.append(torch.cat(heads))
        start += length
    return torch.stack(rows).float()


@backends
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5).map(sorted),
    groups=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 16, 20, 72]),
)
@settings(max_examples=15, deadline=None)
def test_every_backend_computes_attention_inside_segments(backend, lengths, groups, head_dim):
    states = random_heads(lengths, groups=groups, head_dim=head_dim)
    attended, _ = attend(backend, *states, lengths)
    torch.testing.assert_close(attended, spelled_out(*states, lengths), rtol=1e-5, atol=1e-5)


@backends
def test_heads_of_72_channels_keep_their_scale(backend):
    # a kernel that took the padded width for the scale would flatten the scores by a tenth
    states = [10 * heads for heads in random_heads([5, 5, 9], head_dim=72)]
    attended, _ = attend(backend, *states, [5, 5, 9])
    assert attended.shape == (19, 4 * 72)
    torch.testing.assert_close(attended, spelled_out(*states, [5, 5, 9]), rtol=1e-4, atol=1e-4)


@backends
def test_the_last_patch_reaches_the_first_of_its_own_segment_only(backend):
    lengths = [3, 4, 4, 6]
    query, key, value = random_heads(lengths)
    before, _ = attend(backend, query, key, value, lengths)
    last = 3 + 4 - 1
    key[last] += 1
    value[last] += 1
    after, _ = attend(backend, query, key, value, lengths)
    changed = (before != after).any(-1)
    assert changed.tolist() == [3 <= patch <= last for patch in range(sum(lengths))]


@backends
def test_gradients_agree_with_the_eager_ones(backend):
    lengths = [2, 5, 5]
    gradients = []
    for name in ("eager", backend):
        states = [heads.requires_grad_() for heads in random_heads(lengths, head_dim=20)]
        attended, _ = attend(name, *states, lengths)
        attended.square().sum().backward()
        gradients.append([heads.grad for heads in states])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_eager_keeps_one_map_for_each_segment():
    lengths = [2, 2, 5]
    _, maps = attend("eager", *random_heads(lengths), lengths)
    assert [tuple(weights.shape) for weights in maps] == [(1, 4, length, length) for length in lengths]
    for weights in maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("backend", ["sdpa", VARLEN])
def test_fused_backends_keep_no_map(backend):
    _, maps = attend(backend, *random_heads([2, 2, 5]), [2, 2, 5])
    assert maps is None


def test_the_longest_segment_can_be_given():
    states = random_heads([2, 3])
    known, _ = attend(VARLEN, *states, [2, 3], max_seqlen=64)
    found, _ = attend(VARLEN, *states, [2, 3])
    assert torch.equal(known, found)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that one operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return output


@backends
def test_memory_grows_with_the_number_of_images_and_not_with_its_square(backend):
    config = Lfm3VlVisionConfig(
        hidden_size=16, intermediate_size=16, patch_size=2, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    tower = use_backend(Lfm3VlVisionModel(config).requires_grad_(False), backend)
    largest = []
    for images in (64, 128):
        grid = torch.tensor([[1, 4, 4], [1, 2, 8]] * (images // 2))
        pixels = torch.randn(16 * images, config.patch_dim)
        with LargestTensor() as seen:
            tower(pixels, grid_thw=grid)
        largest.append(seen.elements)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] < (16 * 128) ** 2 / 10
