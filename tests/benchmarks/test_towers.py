"""The towers' and the processors' benchmarks compare what is the same, and count all bare products."""

import json
import math
import subprocess
import sys
from pathlib import Path

import processors
import pytest
import torch
import towers

SCRIPT = Path(towers.__file__)


def make_case(**values):
    fields = {
        "family": "lfm3_vl", "workload": "2x384", "mode": "forward", "layers": 2, "scale": 8, "dtype": "float32",
        "attention": "sdpa", "device": "cpu", "threads": 1,
    }  # fmt: skip
    return towers.Case(**(fields | values))


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("family", towers.FAMILIES)
def test_ratios_are_finite(family, mode):
    result = towers.compare(make_case(family=family, mode=mode, workload="128x64"), repeats=1, memory=False)
    assert result["patches"] == 2048
    ratios = [*result["over_bare"], *result.get("speedup", ())]
    assert all(math.isfinite(value) and value > 0 for value in ratios)
    assert ("speedup" in result) == (family != "deepseek_v4_vl")


@pytest.mark.parametrize("family", ["lfm3_vl", "pixtral"])
def test_two_different_towers_are_refused(family, monkeypatch):
    build = towers.build_tower

    def altered(case, side):
        tower = build(case, side)
        if side == "theirs":
            tower.load_state_dict = lambda state: None
        return tower.requires_grad_(False).apply(
            lambda module: (
                module.weight.mul_(1.1) if side == "theirs" and isinstance(module, torch.nn.Linear) else None
            )
        )

    monkeypatch.setattr(towers, "build_tower", altered)
    with pytest.raises(ValueError, match="the towers differ by"):
        towers.compare(make_case(family=family), repeats=1, memory=False)


@pytest.mark.parametrize(
    "family, layers, products",
    # patches; then by layer a convolution block (2) or attention (4, 3 or 2) and its attention call, and the feed-forward
    [("lfm3_vl", 2, 1 + (2 + 3) + (4 + 1 + 3)), ("pixtral", 1, 1 + 4 + 1 + 3), ("deepseek_v4_vl", 1, 1 + 2 + 1 + 2)],
)
def test_bare_products_are_all_of_a_tower_and_nothing_else(family, layers, products):
    case = make_case(family=family, layers=layers, workload="1x384")
    tower = towers.build_tower(case, "ours")
    with towers.BareProducts(tower.parameters()) as bare:
        towers.make_step(tower, towers.make_inputs(case)["ours"], "forward")()
    assert len(bare.calls) == products
    held = {weight.untyped_storage().data_ptr() for weight in tower.parameters()}
    weights = [
        tensor
        for _, args, _ in bare.calls
        for tensor in args
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in held
    ]
    matrices = sum(isinstance(module, torch.nn.Linear | towers.PixtralVisionModel) for module in tower.modules())
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights if tensor.ndim == 2}) == matrices
    bare.replay()


def test_both_sides_get_the_same_pixels():
    inputs = towers.make_inputs(make_case(family="pixtral", workload="32-mixed"))
    rows = inputs["ours"]["grid_thw"][:, 1] * 16
    assert rows.tolist() == [height for height, _ in inputs["theirs"]["image_sizes"]]
    assert inputs["ours"]["pixel_values"].square().sum() == pytest.approx(
        inputs["theirs"]["pixel_values"].square().sum().item(), rel=1e-4
    )


def test_the_script_writes_what_it_measured(tmp_path):
    arguments = ["--scale", "8", "--repeats", "1", "--threads", "1", "--workload", "1x384", "--family", "pixtral"]
    path = tmp_path / "towers.json"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json", str(path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (result,) = json.loads(path.read_text())["results"]
    assert result["difference"] <= towers.TOLERANCES["float32"]
    assert result["peak_bytes_per_patch"]["ours"] > 0 and result["memory_share"] > 0
    assert "pixtral" in run.stdout and "theirs/ours" in run.stdout


def test_impossible_settings_are_refused(capsys):
    with pytest.raises(SystemExit):
        towers.main(["--layers", "0"])
    assert "--layers is 0" in capsys.readouterr().err


@pytest.mark.parametrize("family", processors.FAMILIES)
def test_processors_give_the_same_pixels(family):
    images = processors.make_images([(64, 96), (200, 100), (64, 96)], "array")
    ratios = processors.compare(processors.FAMILIES[family], images, repeats=1)
    assert all(value > 0 for quartiles in ratios.values() for value in quartiles)


def test_processors_that_give_other_pixels_are_refused():
    family = processors.FAMILIES["lfm3_vl"]
    other = family._replace(ours=processors.Lfm3VlImageProcessor(image_mean=[0.4] * 3, image_std=[0.5] * 3))
    with pytest.raises(ValueError, match="mean and deviation|pixels differ"):
        processors.compare(other, processors.make_images([(64, 96)], "array"), repeats=1)
