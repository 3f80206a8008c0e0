"""Training on two ranks of which one has no image: nobody waits, and gradients are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..hub_cards.tiny_models import TINY_MODELS

SCRIPT = Path(__file__).with_name("ranks_with_unequal_rows.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    run = subprocess.run(
        [*command, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("wrap", ["replicated", "sharded", "planned"])
@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_rank_of_text_alone_trains_and_evaluates_in_step_with_one_that_has_images(ranks, family, wrap):
    for rank in ranks:
        measured = rank[f"{family} {wrap}"]
        assert measured["loss"] == pytest.approx(measured["evaluated"], abs=1e-5)
        assert measured["difference"] < 1e-5 * max(1.0, measured["largest"])
