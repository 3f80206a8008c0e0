"""Benchmarks measure what they say: turns taken, memory seen, the same computation on both sides."""

import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import train
from side_by_side import interleaved_seconds, peak_memory, ratio_quartiles

SCRIPT = Path(train.__file__)


def make_case(**values):
    fields = {
        "family": "lfm3_vl", "workload": "text", "train": "all", "size": "tiny", "dtype": "float32", "attention": "sdpa",
        "device": "cpu", "threads": 1,
    }  # fmt: skip
    return train.Case(**(fields | values))


def test_steps_take_turns():
    calls = []
    steps = {name: partial(calls.append, name) for name in ("ours", "theirs")}
    seconds = interleaved_seconds(steps, repeats=3, warm_up=2)
    assert calls == ["ours", "theirs"] * 5
    assert {name: len(times) for name, times in seconds.items()} == {"ours": 3, "theirs": 3}


def test_times_stand_under_the_name_of_their_step():
    seconds = interleaved_seconds({"ours": lambda: None, "theirs": partial(time.sleep, 0.01)}, repeats=2)
    assert min(seconds["theirs"]) >= 0.01 > max(seconds["ours"])


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="repeats is 0"):
        interleaved_seconds({}, repeats=0)


def test_quartiles_are_those_of_the_ratio_of_each_round():
    assert ratio_quartiles([1.0, 4.0, 9.0, 16.0, 25.0], [1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_peak_memory_sees_a_tensor_of_known_size():
    numbers = 2**24
    peak = peak_memory(partial, torch.ones, numbers)
    assert 0.95 * 4 * numbers < peak < 1.1 * 4 * numbers


def test_memory_in_use_before_the_step_does_not_count():
    assert peak_memory(partial, len, bytes(2**26)) < 2**22


@pytest.mark.parametrize("family", train.FAMILIES)
@pytest.mark.parametrize("part", [*train.PARTS, "lora"])
def test_both_sides_compute_the_same(family, part):
    case = make_case(family=family, train=part)
    agreement = train.check_agreement(train.build_pair(case), train.make_inputs(case), train.TOLERANCES[case.dtype])
    assert math.isfinite(agreement["loss"])


@pytest.mark.parametrize("family", train.FAMILIES)
def test_two_different_computations_are_refused(family):
    case = make_case(family=family)
    models = train.build_pair(case)
    with torch.no_grad():
        models["ours"].model.multi_modal_projector.linear_2.weight.mul_(1.01)
    with pytest.raises(ValueError, match="compute different things"):
        train.check_agreement(models, train.make_inputs(case), train.TOLERANCES[case.dtype])


@pytest.mark.parametrize("family", train.FAMILIES)
@pytest.mark.parametrize("workload", train.workloads(train.SIZES["tiny"]))
def test_both_sides_get_the_same_rows(family, workload):
    ours, theirs = train.make_inputs(make_case(family=family, workload=workload)).values()
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(ours[name], theirs[name])
    placeholders = (ours["input_ids"] == train.SIZES["tiny"].image_token).sum()
    assert placeholders * train.MERGE**2 == ours["image_grid_thw"].prod(-1).sum()
    assert (ours["labels"][ours["attention_mask"] == 0] == -100).all()


def run_script(*arguments):
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--repeats", "1", "--threads", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_script_prints_finite_ratios():
    run = run_script("--workload", "mixed", "--json")
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert [result["family"] for result in printed["results"]] == list(train.FAMILIES)
    assert "deepseek_v4_vl" in printed["left_out"]
    for result in printed["results"]:
        assert result["loss_difference"] <= train.TOLERANCES["float32"].loss
        for ratio in (result["time_ratio"], *result["time_ratio_quartiles"], result["memory_ratio"]):
            assert math.isfinite(ratio) and ratio > 0


@pytest.mark.parametrize(
    "arguments, message", [(["--repeats", "0"], "--repeats is 0"), (["--threads", "0"], "--threads is 0")]
)
def test_impossible_settings_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train.main(arguments)
    assert message in capsys.readouterr().err
