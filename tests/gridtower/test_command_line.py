"""The command as a user types it, with the bundled model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest

from gridtower.hub_cards.export import export

from ..hub_cards.test_export_deepseek_v4_vl import write_published_folder
from ..hub_cards.tiny_models import tiny_deepseek_v4_vl
from ..modeling.test_native_pixtral import native_folder
from ..processing.test_processing_pixtral import write_native_folder

PICTURE = Path(__file__).parents[2] / "examples" / "handwritten_2026.png"


def gridtower(*arguments, **options):
    command = [sys.executable, "-m", "gridtower.command_line", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, **options
    )


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    picture = PIL.Image.open(PICTURE).convert("RGB").resize((128, 64))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 128, 64, "yuv420p"
        for _ in range(6):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")))
        container.mux(stream.encode())
    return path


def test_describe_prints_what_is_written_in_the_bundled_picture():
    done = gridtower("describe", PICTURE)
    assert (done.returncode, done.stdout.strip()) == (0, "2026"), done.stderr


def test_json_gives_one_object_a_line_in_the_order_of_the_inputs(clip, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    done = gridtower("describe", clip, broken, PICTURE, "--json", "--max-new-tokens", "6")
    video, error, image = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert [video["input"], error["input"], image["input"]] == [str(clip), str(broken), str(PICTURE)]
    assert "text" not in error and error["error"]
    assert image["text"] == "2026"
    assert image["grid_thw"][0] == 1 and video["grid_thw"][0] == 3
    for answer in (video, image):
        assert answer["vision_tokens"] == np.prod(answer["grid_thw"]) // 4 < answer["prompt_tokens"]
        assert 1 <= answer["new_tokens"] <= 6
        assert answer["seconds"]["generation"] > 0


def test_a_missing_file_is_named_before_the_model_loads():
    done = gridtower("describe", PICTURE, "nowhere.png")
    assert done.returncode == 1
    assert done.stderr.strip() == "gridtower describe: nowhere.png is not a file."
    assert done.stdout == ""


def test_export_prints_the_folder_and_refuses_to_write_into_a_full_one(tmp_path):
    first = gridtower("export", "default", "model", cwd=tmp_path)
    assert (first.returncode, first.stdout.strip()) == (0, "model"), first.stderr
    second = gridtower("export", "default", "model", cwd=tmp_path)
    assert second.returncode == 1
    assert "model exists and is not an empty folder" in second.stderr


def test_describe_takes_a_folder_in_mistrals_own_layout(clip, tmp_path):
    folder = write_native_folder(tmp_path / "native")
    tekken = (folder / "tekken.json").read_bytes()
    native_folder(folder, params=json.loads((folder / "params.json").read_text()))
    (folder / "tekken.json").write_bytes(tekken)
    done = gridtower("describe", PICTURE, clip, "--model", folder, "--json", "--max-new-tokens", "2")
    image, video = map(json.loads, done.stdout.splitlines())
    assert image["vision_tokens"] == np.prod(image["grid_thw"]) and image["new_tokens"] == 2
    assert video["error"] == "a model of type llava takes no videos; pass images."


def test_describe_takes_a_deepseek_v4_folder_as_published_and_as_exported(clip, tmp_path):
    model, processor = tiny_deepseek_v4_vl()
    published = write_published_folder(tmp_path / "published", model, processor.tokenizer)
    hub = export(published, tmp_path / "hub")
    done = gridtower("describe", PICTURE, clip, "--model", hub, "--json", "--max-new-tokens", "2")
    image, video = map(json.loads, done.stdout.splitlines())
    _, rows, cols = image["grid_thw"]
    assert image["vision_tokens"] == -(-rows // 2) * -(-cols // 2) < image["prompt_tokens"]
    assert image["new_tokens"] == 2
    assert video["error"] == "a model of type deepseek_v4 takes no videos; pass images."
    done = gridtower("describe", PICTURE, "--model", published, "--max-new-tokens", "2")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip() == image["text"].strip()
