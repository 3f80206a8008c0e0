"""On a CPU a layer takes a few frames after the other: the same states, gradients and records as in one piece."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gridtower.modeling import patch_grids
from gridtower.modeling.patch_grids import packed_frames

from .test_packed_metadata import RAGGED, TOWERS


@pytest.fixture
def small_groups(monkeypatch):
    """Room for 30 patches in a group; grids of other tests are forgotten."""
    monkeypatch.setattr(patch_grids, "packed_frames", packed_frames.__wrapped__)
    monkeypatch.setattr(patch_grids, "_PATCHES_OF_A_GROUP", 30)


@given(
    frames=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6),
)
def test_groups_hold_all_frames_in_order_and_no_more_than_fits(frames):
    packed = packed_frames(tuple(frames), 1)
    room = patch_grids._PATCHES_OF_A_GROUP
    listed = [run[1:] for group in packed.groups for run in group.runs for _ in range(run.count)]
    assert listed == [run[1:] for run in packed.runs for _ in range(run.count)]
    for group, after in zip(packed.groups, [*packed.groups[1:], None]):
        assert sum(group.lengths) <= room or len(group.lengths) == 1
        if after is not None:
            assert sum(group.lengths) + after.lengths[0] > room


@pytest.mark.parametrize("family", TOWERS)
def test_groups_change_neither_states_nor_gradients(family, small_groups):
    torch.manual_seed(0)
    tower = TOWERS[family]()
    pixels = torch.randn(int(RAGGED.prod(-1).sum()), tower.config.patch_dim)
    results = []
    for backend in ("eager", "sdpa"):  # the first is never cut into groups
        tower.config._attn_implementation = backend
        outputs = tower(pixels, grid_thw=RAGGED, output_hidden_states=True)
        outputs.last_hidden_state.square().mean().backward()
        results.append((outputs.hidden_states, [parameter.grad for parameter in tower.parameters()]))
        tower.zero_grad()
    assert len(patch_grids.packed_frames(tuple(map(tuple, RAGGED.tolist())), 2).groups) > 2
    for whole, grouped in zip(*results):
        torch.testing.assert_close(grouped, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", TOWERS)
def test_a_layer_sees_no_more_than_a_group(family, small_groups):
    tower = TOWERS[family]().requires_grad_(False)
    attention = next(
        module for name, module in tower.named_modules() if name.endswith(("self_attn", "attention", "attn"))
    )
    seen = []
    attention.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    tower(torch.randn(int(RAGGED.prod(-1).sum()), tower.config.patch_dim), grid_thw=RAGGED)
    assert len(seen) > 2 and max(seen) <= 30 and sum(seen) == int(RAGGED.prod(-1).sum())
