"""Raw uint8 patches go into every tower as they are: a quarter of the bytes, the same states."""

import pytest
import torch

from .test_packed_metadata import RAGGED, TOWERS

STATISTICS = {
    "lfm3_vl": ([0.5] * 3, [0.5] * 3),
    "pixtral": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "deepseek_v4_vl": ([0.5] * 3, [0.5] * 3),
}


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
def test_uint8_patches_equal_pixels_that_a_processor_normalised(family, dtype, bound):
    torch.manual_seed(0)
    tower = TOWERS[family]().eval().to(dtype)
    raw = torch.randint(0, 256, (int(RAGGED.prod(-1).sum()), tower.config.patch_dim), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1) for values in STATISTICS[family])
    pixels = ((raw.unflatten(1, (3, -1)) / 255 - mean) / std).flatten(1)
    with torch.no_grad():
        expected = tower(pixels.to(dtype), grid_thw=RAGGED).last_hidden_state
        found = tower(raw, grid_thw=RAGGED).last_hidden_state
    assert (found - expected).norm() <= bound * expected.norm()


def test_grey_stills_are_normalised_as_well():
    tower = TOWERS["lfm3_vl"](in_channels=1, temporal_patch_size=1)
    raw = torch.randint(0, 256, (int(RAGGED.prod(-1).sum()), 4), dtype=torch.uint8)
    with torch.no_grad():
        expected = tower(raw / 127.5 - 1, grid_thw=RAGGED).last_hidden_state
        torch.testing.assert_close(tower(raw, grid_thw=RAGGED).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
