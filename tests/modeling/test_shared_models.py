"""One model on several ranks, by its tensors, by the images of its tower, or both: outputs and gradients of one process."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from gridtower.modeling.data_parallel import encode_data_parallel, image_costs, images_by_rank

from ..hub_cards.tiny_models import TINY_MODELS
from .gloo_ranks import measured_by_ranks, run_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and what two ranks measured of them."""
    folder = tmp_path_factory.mktemp("ranks")
    for family, make in TINY_MODELS.items():
        make()[0].save_pretrained(folder / family)
    run_on_ranks("ranks_sharing_one_model.py", folder)
    return folder


@pytest.fixture(scope="module")
def four_ranks(folder):
    """What four ranks measured that share images alone: two groups of heads would leave them nothing else."""
    inputs = folder / "four"
    inputs.mkdir()
    for family in TINY_MODELS:
        (inputs / family).symlink_to(folder / family)
    run_on_ranks("ranks_sharing_one_model.py", inputs, "by images", "towers", ranks=4)
    return measured_by_ranks(inputs)


@pytest.fixture(params=TINY_MODELS)
def measured(folder, request):
    """Of each rank."""
    return [rank[request.param] for rank in measured_by_ranks(folder)]


@pytest.mark.parametrize("shared", ["by tensors", "by images", "by both"])
def test_shared_models_give_the_logits_and_gradients_of_one_process(measured, shared):
    for rank in measured:
        found = rank[shared]
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-5 * max(1.0, found["largest"])


def test_shared_tensors_give_the_same_without_gradients_from_metadata_and_in_generation(measured):
    for rank in measured:
        found = rank["by tensors"]
        assert found["without gradients"] < 1e-5
        assert found["from metadata"] < 1e-5
        assert found["generated"] == found["generated alone"]


def test_matrices_of_tower_projector_and_text_are_shared(measured):
    sharded = measured[0]["by tensors"]["sharded"]
    for part in ("vision_tower", "language_model"):
        assert [name for name in sharded if f".{part}." in name]
    assert [name for name in sharded if ".multi_modal_projector." in name or ".aligner." in name]


def test_a_tower_whose_images_are_shared_gives_the_states_of_one_process_also_where_a_rank_has_none(measured):
    for rank in measured:
        assert max(rank["towers"]) < 1e-5


@pytest.mark.parametrize("family", TINY_MODELS)
def test_four_ranks_share_images_as_two_do(four_ranks, family):
    assert len(four_ranks) == 4
    for rank in four_ranks:
        found = rank[family]["by images"]
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-5 * max(1.0, found["largest"])
        assert max(rank[family]["towers"]) < 1e-5


@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_model_in_shards_saves_what_it_was_loaded_from(folder, family):
    before, after = (load_file(folder / name / "model.safetensors") for name in (family, f"{family} saved"))
    if family == "lfm3_vl":  # transformers gathers a tied head by itself, and then takes it for another tensor
        assert torch.equal(after.pop("lm_head.weight"), before["model.language_model.embed_tokens.weight"])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "distributed_config" not in json.loads((folder / f"{family} saved" / "config.json").read_text())


@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_tower_whose_heads_do_not_divide_stays_whole_with_one_warning(family, caplog):
    model, _ = TINY_MODELS[family]()
    tower = model.model.vision_tower
    logging.warning_once.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=3))
    assert not [name for name in plan if ".vision_tower." in name]
    warnings = [record.message for record in caplog.records if "3 ranks" in record.message]
    assert sum(message.startswith(type(tower).__name__) for message in warnings) == 1
    assert "lm_head" in plan


@pytest.mark.parametrize("family", TINY_MODELS)
def test_no_rule_of_a_plan_names_what_the_model_has_not(family, caplog):
    model, _ = TINY_MODELS[family]()
    with caplog.at_level("WARNING"):
        tensors, _, shards = model._resolve_parallel_plans(DistributedConfig(tp_size=2, fsdp_size=2))
    assert not [record.message for record in caplog.records if "match nothing" in record.message]
    assert [name for name in tensors if ".vision_tower." in name]
    assert [name for name in shards if ".vision_tower." in name]


def test_the_dearest_images_are_dealt_out_first():
    assert images_by_rank([1, 9, 4, 5], 2) == [[0, 1], [2, 3]]
    assert images_by_rank([7], 3) == [[0], [], []]


def test_attention_makes_one_large_image_dearer_than_its_patches_in_many_frames():
    tower = TINY_MODELS["pixtral"]()[0].model.vision_tower
    one_large, many_frames, one_small = image_costs(tower, [(1, 32, 32), (16, 8, 8), (1, 4, 4)])
    assert one_large > many_frames > 16 * one_small


@pytest.mark.parametrize("family", TINY_MODELS)
def test_reentrant_checkpointing_is_refused_before_any_rank_waits(family):
    model, _ = TINY_MODELS[family]()
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    tower = model.model.vision_tower
    with pytest.raises(ValueError, match="use_reentrant"):
        encode_data_parallel(tower, torch.zeros(4, tower.config.patch_dim), torch.tensor([[1, 2, 2]]))
