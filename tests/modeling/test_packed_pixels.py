"""nn.DataParallel, which would cut packed pixels like rows of a batch, is refused."""

import importlib

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from ..hub_cards.tiny_models import TINY_MODELS

families = pytest.mark.parametrize("family", TINY_MODELS)


@pytest.fixture
def replicate(monkeypatch):
    """torch's own replication for two devices; copying to them, which needs them, leaves tensors where they are."""
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(
        module, "_broadcast_coalesced_reshape", lambda tensors, devices, detach: [tensors] * len(devices)
    )
    return lambda network: module.replicate(network, [0, 1])


def test_other_modules_are_replicated(replicate):
    assert all(replica._is_replica for replica in replicate(nn.Sequential(nn.Linear(2, 2))))


@families
def test_a_model_and_its_tower_are_not_replicated(family, replicate):
    model, _ = TINY_MODELS[family]()
    for part in (model, model.model.vision_tower):
        with pytest.raises(ValueError, match=rf"{type(part).__name__} .*torchrun, .*CUDA_VISIBLE_DEVICES=0"):
            replicate(part)


@families
def test_a_model_with_adapters_is_not_replicated(family, replicate):
    model, _ = TINY_MODELS[family]()
    with pytest.raises(ValueError, match="nn.DataParallel"):
        replicate(get_peft_model(model, LoraConfig(target_modules=["lm_head"])))
