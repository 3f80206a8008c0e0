"""A projector exported beside its tower."""

import pytest
import torch
from safetensors.torch import load_file

from gridtower import export

from .tiny_models import TINY_MODELS


@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_projector_beside_its_tower_is_a_state_dict(family, tmp_path):
    model, _ = TINY_MODELS[family]()
    model.save_pretrained(tmp_path / "model")
    out = export(tmp_path / "model", tmp_path / "out", tower_only=True, with_projector=True)
    projector = getattr(model.model, "aligner", None) or model.model.multi_modal_projector
    expected, found = projector.state_dict(), load_file(out / "projector.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="tower alone"):
        export(out, tmp_path / "again", tower_only=True, with_projector=True)
    assert not (tmp_path / "again").exists()


def test_a_projector_is_written_beside_a_tower_only(tmp_path):
    with pytest.raises(ValueError, match="tower_only"):
        export("default", tmp_path / "out", with_projector=True)
