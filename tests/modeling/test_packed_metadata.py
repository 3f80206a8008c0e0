"""Towers from tensors alone: the same states, no graph break, few compilations, and filled up for a CUDA graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from gridtower import (
    DeepseekV4VisionConfig,
    DeepseekV4VisionModel,
    GraphedTower,
    Lfm3VlVisionConfig,
    Lfm3VlVisionModel,
    PixtralVisionConfig,
    PixtralVisionModel,
)
from gridtower.modeling.cuda_graphs import Budget, filled_up
from gridtower.modeling.patch_grids import neighbouring_patches

from .varlen_reference import NAME as VARLEN
from .varlen_reference import use_backend

SHAPE = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 2,
    "initializer_range": 0.1,
}  # fmt: skip


def lfm3_vl_tower(**fields):
    layers = ["conv", "full_attention"]
    return Lfm3VlVisionModel(
        Lfm3VlVisionConfig(**{**SHAPE, "num_key_value_heads": 1, "layer_types": layers, **fields})
    )


def pixtral_tower(**fields):
    return PixtralVisionModel(PixtralVisionConfig(**{**SHAPE, "image_size": 64, "spatial_merge_size": 2, **fields}))


def deepseek_v4_vl_tower(**fields):
    return DeepseekV4VisionModel(DeepseekV4VisionConfig(**{**SHAPE, "downsample_ratio": 2, **fields}))


TOWERS = {"lfm3_vl": lfm3_vl_tower, "pixtral": pixtral_tower, "deepseek_v4_vl": deepseek_v4_vl_tower}
RAGGED = torch.tensor([[1, 4, 6], [1, 2, 2], [2, 6, 4], [1, 4, 6], [1, 8, 2]])


@pytest.fixture(params=TOWERS)
def tower(request):
    torch.manual_seed(0)
    return TOWERS[request.param]().eval()


def inputs_of(tower, grid):
    metadata = tower.packed_metadata(grid)
    patches = torch.randn(int(grid.prod(-1).sum()), tower.config.patch_dim)
    return {"pixel_values": patches, **{name: metadata[name] for name in tower.packed_inputs}}


@pytest.mark.parametrize("backend", ["eager", "sdpa", VARLEN])
def test_tensors_alone_give_what_the_grids_give(tower, backend):
    inputs = inputs_of(tower, RAGGED)
    assert all(isinstance(tensor, torch.Tensor) for tensor in inputs.values())
    with torch.no_grad():
        expected = tower(inputs["pixel_values"], grid_thw=RAGGED).last_hidden_state
        found = use_backend(tower, backend).forward_packed(**inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_from_tensors_alone_are_those_from_the_grids(tower):
    inputs = inputs_of(tower, RAGGED)
    pixels = inputs["pixel_values"].requires_grad_()
    wanted = [pixels, *tower.parameters()]
    gradients = [
        torch.autograd.grad(states.square().mean(), wanted)
        for states in (tower(pixels, grid_thw=RAGGED).last_hidden_state, tower.forward_packed(**inputs))
    ]
    for found, expected in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("train", [False, True])
def test_one_graph_without_a_break_serves_grids_of_any_size(tower, train):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tower.forward_packed, fullgraph=True, dynamic=True, backend=counter)
    grids = [torch.tensor([[1, 2 * rows, 4], [1, 4, 2 * rows], [1, 6, 8]])[: 1 + rows % 3] for rows in range(1, 11)]
    with torch.set_grad_enabled(train):
        for grid in grids:
            inputs = inputs_of(tower, grid)
            found, expected = compiled(**inputs), tower.forward_packed(**inputs)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            if train:
                parameters = list(tower.parameters())
                gradients = [torch.autograd.grad(states.square().mean(), parameters) for states in (found, expected)]
                torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert counter.frame_count <= 2


def test_patches_of_the_wrong_size_are_refused(tower):
    inputs = inputs_of(tower, RAGGED)
    with pytest.raises(ValueError, match="pixel_values has shape"):
        tower.forward_packed(**{**inputs, "pixel_values": inputs["pixel_values"][:, 1:]})


@given(
    blocks=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    merge=st.sampled_from([1, 2, 3]),
    kernel=st.sampled_from([1, 3, 5]),
)
@settings(max_examples=25, deadline=None)
def test_neighbours_are_those_a_walk_over_the_grid_finds(blocks, merge, kernel):
    grid = tuple((steps, rows * merge, cols * merge) for steps, rows, cols in blocks)
    # One above the place of each patch in the input, and none beyond a border.
    numbers, count = {}, 0
    for item, (steps, rows, cols) in enumerate(grid):
        for step in range(steps):
            for block_row in range(0, rows, merge):
                for block_col in range(0, cols, merge):
                    for row in range(block_row, block_row + merge):
                        for col in range(block_col, block_col + merge):
                            count += 1
                            numbers[item, step, row, col] = count
    reach = range(-(kernel // 2), kernel // 2 + 1)
    expected = [
        [numbers.get((item, step, row + down, col + right), 0) for down in reach for right in reach]
        for item, step, row, col in numbers
    ]
    assert neighbouring_patches(grid, merge, kernel, torch.device("cpu")).tolist() == expected


@pytest.mark.parametrize("merge, kernel", [(1, 3), (2, 5), (3, 7), (2, 1)])
def test_gathered_convolutions_equal_those_over_grids(merge, kernel):
    torch.manual_seed(0)
    tower = lfm3_vl_tower(layer_types=["conv", "conv"], spatial_merge_size=merge, conv_kernel_size=kernel)
    inputs = inputs_of(tower, torch.tensor([[1, 2 * merge, merge], [2, merge, 3 * merge]]))
    with torch.no_grad():
        expected = tower(inputs["pixel_values"], grid_thw=torch.tensor([[1, 2 * merge, merge], [2, merge, 3 * merge]]))
        torch.testing.assert_close(tower.forward_packed(**inputs), expected.last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", VARLEN])
def test_filling_changes_no_patch(tower, backend):
    inputs = inputs_of(use_backend(tower, backend), RAGGED)
    patches = len(inputs["pixel_values"])
    filled = filled_up(inputs, Budget(patches + 61, 11), max_seqlen=24)
    assert filled["cu_seqlens"].tolist()[-6:] == [patches, *(patches + more for more in (24, 48, 61, 61, 61))]
    assert len(filled["cu_seqlens"]) == 12 and filled["cu_seqlens"].dtype == torch.int32
    with torch.no_grad():
        found = tower.forward_packed(**filled)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[:patches], tower.forward_packed(**inputs), rtol=1e-5, atol=1e-5)


def test_the_smallest_budget_that_holds_batch_and_filling_is_taken(tower):
    graphed = GraphedTower(tower, [(400, 40), (128, 6), (128, 8), (200, 9)], max_seqlen=24)
    inputs = inputs_of(tower, RAGGED)  # 116 patches in 6 frames
    assert graphed.budget_for(inputs) == (128, 8)
    assert GraphedTower(tower, [(115, 40), (400, 6)], 24).budget_for(inputs) is None
    assert GraphedTower(tower, [(128, 8)], 23).budget_for(inputs) is None


def test_without_a_gpu_a_graphed_tower_is_the_tower(tower):
    inputs = inputs_of(tower, RAGGED)
    found = GraphedTower(tower, [(128, 8)], 24)(inputs["pixel_values"], RAGGED)
    expected = tower(inputs["pixel_values"], grid_thw=RAGGED).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budgets, longest", [([], 4), ([(0, 1)], 4), ([(8, 1)], 0)])
def test_impossible_budgets_are_refused(tower, budgets, longest):
    with pytest.raises(ValueError, match="at least one budget"):
        GraphedTower(tower, budgets, longest)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs")
@pytest.mark.parametrize("head_dim", [16, 64])
def test_replayed_graphs_give_what_the_tower_gives(tower, head_dim):
    tower = TOWERS[tower.config.model_type.removesuffix("_vision").replace("deepseek_v4", "deepseek_v4_vl")](
        hidden_size=2 * head_dim
    )
    tower = tower.eval().to("cuda", torch.bfloat16)
    graphed = GraphedTower(tower, [(128, 8), (256, 16)], max_seqlen=64)
    for grid in (RAGGED, RAGGED[:2], RAGGED[1:], RAGGED.repeat(2, 1)):
        inputs = inputs_of(tower, grid)
        pixels = inputs["pixel_values"].to("cuda", torch.bfloat16)
        with torch.no_grad():
            expected = tower(pixels, grid_thw=grid).last_hidden_state
        torch.testing.assert_close(graphed(pixels, grid), expected, rtol=2e-2, atol=2e-2)
    assert graphed._graphs
