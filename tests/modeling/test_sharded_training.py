"""Training on two ranks of which one lacks a kind of media: nobody waits, and gradients are those of one process."""

from importlib.util import find_spec

import pytest

from ..hub_cards.tiny_models import TINY_MODELS
from .gloo_ranks import measured_by_ranks, run_on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks("ranks_with_unequal_rows.py", folder)
    return measured_by_ranks(folder)


@pytest.mark.parametrize("wrap", ["replicated", "sharded", "planned"])
@pytest.mark.parametrize("rows", [*TINY_MODELS, "videos"])
def test_ranks_with_and_without_media_train_and_evaluate_in_step(ranks, rows, wrap):
    for rank in ranks:
        measured = rank[f"{rows} {wrap}"]
        assert measured["loss"] == pytest.approx(measured["evaluated"], abs=1e-5)
        assert measured["difference"] < 1e-5 * max(1.0, measured["largest"])
        assert measured["written"]


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
@pytest.mark.parametrize("rows", [*TINY_MODELS, "videos"])
def test_ranks_with_and_without_media_stay_in_step_under_zero3(tmp_path, rows):
    run_on_ranks("ranks_under_zero3.py", tmp_path, rows)
    for measured in measured_by_ranks(tmp_path):
        assert measured["loss"] == pytest.approx(measured["expected_loss"], abs=1e-5)
        assert measured["written"] and measured["saved"]
        assert measured["difference"] < 1e-6
