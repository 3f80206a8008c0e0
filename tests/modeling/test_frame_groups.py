"""On a CPU a layer takes a few frames after the other: the same states, gradients and records as in one piece."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gridtower.modeling import vision_layers
from gridtower.modeling.patch_grids import frame_groups, packed_frames

from .test_packed_metadata import RAGGED, TOWERS


@pytest.fixture
def small_groups(monkeypatch):
    """Room for 30 patches in a group, whatever was asked for; a list of that."""
    asked = []

    def small(runs, room):
        asked.append(room)
        return frame_groups(runs, 30)

    monkeypatch.setattr(vision_layers, "frame_groups", small)
    return asked


@given(
    frames=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6),
    room=st.integers(1, 3000),
)
def test_groups_hold_all_frames_in_order_and_no_more_than_fits(frames, room):
    runs = packed_frames(tuple(frames), 1).runs
    groups = frame_groups(runs, room)
    listed = [run[1:] for group in groups for run in group.runs for _ in range(run.count)]
    assert listed == [run[1:] for run in runs for _ in range(run.count)]
    for group, after in zip(groups, [*groups[1:], None]):
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
    assert small_groups and len(frame_groups(packed_frames(tuple(map(tuple, RAGGED.tolist())), 2).runs, 30)) > 2
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


def test_narrower_numbers_leave_room_for_more_patches(small_groups):
    tower = TOWERS["pixtral"]().requires_grad_(False)
    for dtype in (torch.float32, torch.bfloat16):
        tower.to(dtype)(torch.zeros(int(RAGGED.prod(-1).sum()), tower.config.patch_dim), grid_thw=RAGGED)
    wide, *_, narrow = small_groups
    assert wide * tower.config.hidden_size * 4 == narrow * tower.config.hidden_size * 2 == 2**22
