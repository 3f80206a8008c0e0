"""Features of many images: those of each alone, every image once, also after a kill."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter

import numpy as np
import pytest
import torch

from gridtower import embed, export, read_features
from gridtower.embedding import batches_within
from gridtower.image_encoder import DecodedImage

from ..hub_cards.tiny_models import TINY_MODELS, picture

SIZES = [(16, 8), (8, 24), (12, 12), (16, 8), (30, 20), (8, 8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model and its processor, for each family."""
    folder = tmp_path_factory.mktemp("models")
    for family, make in TINY_MODELS.items():
        for part in make():
            part.save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate(SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    return folder


def found_in(out):
    found = list(read_features(out))
    assert len({image.key for image in found}) == len(found)
    return {image.key: image for image in found}


@torch.no_grad()
def alone(family, folder, size, seed):
    """Tower states and projector features of one picture, by the whole model."""
    model, processor = TINY_MODELS[family]()
    model = type(model).from_pretrained(folder).eval()
    inputs = processor.image_processor(picture(*size, seed=seed), return_tensors="pt")
    outputs = model.get_image_features(
        inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"], return_dict=True
    )
    return outputs.last_hidden_state, outputs.pooler_output[0]


@pytest.mark.parametrize("format", ["safetensors", "parquet"])
@pytest.mark.parametrize("family", TINY_MODELS)
def test_features_are_those_of_each_image_alone(family, format, models, pictures, tmp_path):
    for features in ("tower", "projector", "pooled"):
        out = tmp_path / features
        done = embed(
            [pictures], models / family, out, features=features, format=format, patches=40, workers=0, shard_size=4096
        )
        assert done == (len(SIZES), 0, 0)
        found = found_in(out)
        for number, size in enumerate(SIZES):
            states, tokens = alone(family, models / family, size, number)
            expected = {"tower": states, "projector": tokens, "pooled": states.mean(0, keepdim=True)}[features]
            image = found[f"{pictures}/{number}.png"]
            torch.testing.assert_close(image.features, expected, atol=1e-5, rtol=1e-5)
            assert image.grid_thw.prod() == len(states)


def test_a_folder_with_a_tower_alone_gives_the_same_states(models, pictures, tmp_path):
    export(models / "lfm3_vl", tmp_path / "tower", tower_only=True)
    embed([pictures], models / "lfm3_vl", tmp_path / "a", workers=0)
    embed([pictures], tmp_path / "tower", tmp_path / "b", workers=0)
    whole, tower = found_in(tmp_path / "a"), found_in(tmp_path / "b")
    assert all(torch.equal(whole[key].features, tower[key].features) for key in whole)
    with pytest.raises(ValueError, match="tower alone"):
        embed([pictures], tmp_path / "tower", tmp_path / "c", features="projector", workers=0)
    assert not (tmp_path / "c").exists()


def test_batches_keep_to_the_budget_and_put_equal_images_together():
    generator = np.random.default_rng(0)
    counts = [int(n) for n in generator.integers(1, 40, 300)] + [500]
    images = [DecodedImage(str(number), np.empty((n, 1)), (1, 1, n)) for number, n in enumerate(counts)]
    batches = list(batches_within(images, 100))
    sizes = [sum(len(image.patches) for image in batch) for batch in batches]
    assert Counter(image.key for batch in batches for image in batch) == Counter(image.key for image in images)
    assert [size for size in sizes if size > 100] == [500]
    assert np.mean(sizes) > 70
    shapes = [len({image.grid for image in batch}) for batch in batches]
    assert np.mean(shapes) < np.mean([len(batch) for batch in batches])


def test_what_cannot_be_read_is_noted_with_its_reason_and_passed_over(models, pictures, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes((pictures / "0.png").read_bytes()[:40])
    arguments = ([pictures, broken], models / "pixtral", tmp_path / "out")
    assert embed(*arguments, workers=2) == (len(SIZES), 1, 0)
    (failure,) = map(json.loads, (tmp_path / "out" / "failed.jsonl").read_text().splitlines())
    assert failure["key"] == str(broken) and failure["reason"]
    assert embed(*arguments, workers=0) == (0, 0, len(SIZES) + 1)
    broken.write_bytes((pictures / "0.png").read_bytes())
    assert embed(*arguments, workers=0, retry_failed=True) == (1, 0, len(SIZES))
    assert len(found_in(tmp_path / "out")) == len(SIZES) + 1


def test_another_model_or_other_settings_are_refused(models, pictures, tmp_path):
    embed([pictures], models / "pixtral", tmp_path / "out", workers=0)
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    for changed in ({"features": "pooled"}, {"dtype": "bfloat16"}, {"format": "parquet"}):
        with pytest.raises(ValueError, match=f"{next(iter(changed))} is"):
            embed([pictures], models / "pixtral", tmp_path / "out", workers=0, **changed)
    with pytest.raises(ValueError, match="model_type is"):
        embed([pictures], models / "lfm3_vl", tmp_path / "out", workers=0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"features": "text"}, "features is 'text'"),
        ({"patches": 0}, "patches is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"actors": 2}, "actors=2"),
        ({"shard_size": 0}, "shard_size is 0"),
    ],
)
def test_impossible_arguments_are_refused_with_nothing_written(wrong, message, models, pictures, tmp_path):
    with pytest.raises(ValueError, match=message):
        embed([pictures], models / "pixtral", tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def many_pictures(path, count):
    """A tar of small pictures, of which one in a hundred cannot be read."""
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            stream = io.BytesIO()
            picture(8 + number % 5, 8 + number % 3, seed=number).save(stream, "PNG")
            content = stream.getvalue() if number % 100 != 7 else b"nothing"
            member = tarfile.TarInfo(f"{number:05d}.png")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_after_kills_nothing_is_lost_and_nothing_twice(models, tmp_path):
    count = 400
    tar = many_pictures(tmp_path / "many.tar", count)
    out = tmp_path / "out"
    arguments = [str(tar), "--model", str(models / "pixtral"), "--out", str(out)]
    command = [
        sys.executable,
        "-m",
        "gridtower.command_line",
        "embed",
        *arguments,
        "--patches",
        "64",
        "--workers",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for shards in (2, 5):
        run = subprocess.Popen(
            [*command, "--shard-size", "8KB"], env=environment, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while len(list(out.glob("features-*"))) < shards and run.poll() is None:
            time.sleep(0.002)
        assert run.poll() is None, "the run was over before it could be killed"
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    done = len(found_in(out))
    assert 0 < done < count
    embedded, failed, before = embed([tar], models / "pixtral", out, patches=64, workers=1, shard_size="8KB")
    assert embedded + failed + before == count and before >= done
    failures = [json.loads(line)["key"] for line in (out / "failed.jsonl").read_text().splitlines()]
    found = found_in(out)
    assert Counter([*found, *failures]) == Counter(f"{tar}::{number:05d}" for number in range(count))
    assert len(failures) == count // 100
    for number in (0, 1, 200, count - 1):
        expected, _ = alone("pixtral", models / "pixtral", (8 + number % 5, 8 + number % 3), number)
        torch.testing.assert_close(found[f"{tar}::{number:05d}"].features, expected, atol=1e-5, rtol=1e-5)
    in_manifest = [key for line in (out / "manifest.jsonl").open() for key in json.loads(line)["keys"]]
    assert Counter(in_manifest) == Counter(list(found))
    assert not list(out.glob(".unfinished*"))


def test_ray_gives_the_same_features(models, pictures, tmp_path):
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "gridtower[ray]"')
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        arguments = ([pictures], models / "lfm3_vl")
        assert embed(*arguments, tmp_path / "ray", engine="ray", actors=2, workers=0) == (len(SIZES), 0, 0)
        assert embed(*arguments, tmp_path / "ray", engine="ray", actors=2, workers=0) == (0, 0, len(SIZES))
    finally:
        ray.shutdown()
    embed(*arguments, tmp_path / "local", workers=0)
    shared, local = found_in(tmp_path / "ray"), found_in(tmp_path / "local")
    assert shared.keys() == local.keys()
    for key in local:
        torch.testing.assert_close(shared[key].features, local[key].features, atol=1e-5, rtol=1e-5)
