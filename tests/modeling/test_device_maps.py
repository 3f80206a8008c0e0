"""Parts of one model on several devices, as accelerate places them: outputs of one device, layers that stay whole."""

import pytest
import torch

from ..hub_cards.tiny_models import TINY_MODELS, LabelledPrompts


@pytest.fixture(params=TINY_MODELS)
def saved(request, tmp_path):
    """A folder, the model that it holds, and a batch for it."""
    model, processor = TINY_MODELS[request.param]()
    model.save_pretrained(tmp_path / "model")
    prompts = LabelledPrompts(processor)
    batch = prompts.collate([prompts[row] for row in range(4)])
    return tmp_path / "model", type(model).from_pretrained(tmp_path / "model"), batch


def placed_by_hand(model, **elsewhere):
    """A map with everything on the CPU but what is named."""
    members = [name for name, _ in (*model.model.named_children(), *model.model.named_parameters(recurse=False))]
    return {f"model.{name}": "cpu" for name in members} | {"lm_head": "cpu"} | elsewhere


# The head may be tied to the embedding of the text model, and goes where that goes.
@pytest.mark.parametrize("on_disk", [["model.vision_tower"], ["model.language_model", "lm_head"]])
def test_a_part_on_disk_gives_the_same(saved, on_disk):
    folder, model, batch = saved
    device_map = placed_by_hand(model, **dict.fromkeys(on_disk, "disk"))
    placed = type(model).from_pretrained(folder, device_map=device_map, offload_folder=folder / "offload")
    assert all(parameter.is_meta for name in on_disk for parameter in placed.get_submodule(name).parameters())
    with torch.no_grad():
        torch.testing.assert_close(placed(**batch).logits, model(**batch).logits, atol=1e-6, rtol=1e-6)
        tokens = {name: value for name, value in batch.items() if name != "labels"}
        generated = [some.generate(**tokens, max_new_tokens=3, do_sample=False) for some in (placed, model)]
    assert torch.equal(*generated)


def test_an_automatic_map_keeps_layers_whole_and_gives_the_same(saved):
    folder, model, batch = saved
    half = sum(parameter.nbytes for parameter in model.parameters()) // 2
    placed = type(model).from_pretrained(
        folder, device_map="auto", max_memory={"cpu": half}, offload_folder=folder / "offload"
    )
    assert {"cpu", "disk"} <= set(map(str, placed.hf_device_map.values()))
    for name, layer in placed.named_modules():
        if type(layer).__name__ in placed._no_split_modules:
            assert len({parameter.is_meta for parameter in layer.parameters()}) == 1, name
    with torch.no_grad():
        torch.testing.assert_close(placed(**batch).logits, model(**batch).logits, atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_tower_and_text_on_different_devices_give_the_same(saved):
    folder, model, batch = saved
    device_map = {name: 0 for name in placed_by_hand(model)} | {"model.vision_tower": "cpu"}
    placed = type(model).from_pretrained(folder, device_map=device_map)
    with torch.no_grad():
        torch.testing.assert_close(placed(**batch).logits.cpu(), model(**batch).logits, atol=1e-4, rtol=1e-4)
