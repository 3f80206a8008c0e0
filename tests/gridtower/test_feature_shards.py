"""Shards appear whole or not at all, wherever the process that writes them is stopped."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import count

import pytest
import torch
from safetensors import SafetensorError

from gridtower.feature_shards import (
    FORMATS,
    Failure,
    ImageFeatures,
    ShardWriter,
    open_feature_folder,
    read_features,
)

KEYS = [f"images/é-{number}.png" for number in range(40)]
# Embeds KEYS as far as they are missing, each fifth unreadable, four to a shard; killed at the call of the given number
# that makes, moves or removes something on disk, or a line of text.
KILLED = """
import os, signal, sys
from pathlib import Path
import gridtower.feature_shards as shards
from tests.gridtower.test_feature_shards import run

left = None

def counted(call):
    def wrapper(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments, **options)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapper

for owner, name in ((os, "fsync"), (os, "replace"), (shards.shutil, "rmtree"), (Path, "rename"), (Path, "mkdir"),
                    (Path, "write_text"), (shards, "save_file"), (shards, "_append")):
    setattr(owner, name, counted(getattr(owner, name)))

kills = 0
for attempt in range(1, 200):
    child = os.fork()
    if child == 0:
        left = attempt
        run(Path(sys.argv[1]))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    kills += 1
print(kills)
"""


def settings(format="safetensors", features="tower"):
    return {"model": "anywhere", "format": format, "features": features}


def image(key, dtype=torch.float32):
    number = int(key.split("-")[1].split(".")[0])
    values = torch.full((1 + number % 3, 4), float(number), dtype=dtype)
    return ImageFeatures(key, torch.tensor([1, 1, 1 + number % 3]), values)


def run(out, format="safetensors", dtype=torch.float32, retry_failed=False):
    with open_feature_folder(out, settings(format), retry_failed) as folder:
        writer = ShardWriter(out, folder.unfinished, format, 4 * 4 * 4 * 2, folder.stems())
        for key in KEYS:
            if key in folder.done:
                continue
            if KEYS.index(key) % 5 == 0:
                folder.take(Failure(key, "broken"))
                continue
            for event in writer.add([image(key, dtype)]):
                folder.take(event)
        for event in writer.finish():
            folder.take(event)
        return folder


def failed(out):
    return [json.loads(line)["key"] for line in (out / "failed.jsonl").read_text().splitlines()]


def assert_complete(out, dtype=torch.float32):
    found = list(read_features(out))
    assert Counter([image.key for image in found] + failed(out)) == Counter(KEYS)
    for key, grid, features in found:
        expected = image(key, dtype)
        assert torch.equal(features, expected.features) and torch.equal(grid, expected.grid_thw)
    listed = map(json.loads, (out / "manifest.jsonl").read_text().splitlines())
    held = {shard["shard"]: shard["keys"] for shard in listed}
    assert Counter(key for keys in held.values() for key in keys) == Counter(image.key for image in found)
    assert set(held) == {path.name for path in out.glob("features-*")}
    assert [path.name for path in out.iterdir() if path.name.startswith(".") and path.name != ".lock"] == []


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_come_back_as_they_were(format, dtype, tmp_path):
    run(tmp_path, format, dtype)
    # Arrow has no bfloat16.
    widened = format == "parquet" and dtype == torch.bfloat16
    assert_complete(tmp_path, torch.float32 if widened else dtype)
    assert len(list(tmp_path.glob(f"features-*.{format}"))) > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_whenever_it_is_killed_the_next_run_goes_on_and_in_the_end_every_image_is_there_once(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15
    assert_complete(tmp_path / "out")


def test_lines_that_were_torn_and_files_that_were_not_finished_do_no_harm(tmp_path):
    run(tmp_path)
    with open(tmp_path / "failed.jsonl", "r+") as file:
        file.truncate(len(file.read()) - 5)
    with open(tmp_path / "manifest.jsonl", "a") as file:
        file.write('{"shard": "features-0')
    (tmp_path / ".unfinished-1").mkdir()
    (tmp_path / ".unfinished-1" / "features-00001.safetensors").write_bytes(b"half a shard")
    assert KEYS[35] not in run(tmp_path).done
    assert_complete(tmp_path)


def test_a_shard_that_was_lost_is_written_again_under_a_new_name(tmp_path):
    run(tmp_path)
    (tmp_path / "features-00001.safetensors").unlink()
    run(tmp_path)
    assert_complete(tmp_path)
    assert not (tmp_path / "features-00001.safetensors").exists()


def test_a_process_of_an_earlier_run_can_put_nothing_in_place_once_the_next_has_begun(tmp_path):
    with open_feature_folder(tmp_path / "out", settings(), False) as folder:
        unfinished = folder.unfinished
    unfinished.mkdir()  # as a kill leaves it
    stems = (f"features-late-{number}" for number in count())
    late = ShardWriter(tmp_path / "out", unfinished, "safetensors", 1000, stems)
    list(late.add([image(KEYS[1])]))
    run(tmp_path / "out")
    with pytest.raises(SafetensorError, match="No such file"):
        list(late.finish())
    assert_complete(tmp_path / "out")


def test_failures_are_remembered_until_they_are_to_be_retried(tmp_path):
    run(tmp_path)
    before = failed(tmp_path)
    assert KEYS[0] in run(tmp_path).done and failed(tmp_path) == before
    assert KEYS[0] not in run(tmp_path, retry_failed=True).done
    assert_complete(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path):
    with open_feature_folder(tmp_path, settings(), False):
        with pytest.raises(ValueError, match="another process is embedding into"):
            run(tmp_path)
    run(tmp_path)
    assert_complete(tmp_path)


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.txt").write_text("text")
    with pytest.raises(ValueError, match="holds thesis.txt and no embedding.json"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="no embedding.json"):
        next(read_features(tmp_path))


def test_changed_settings_are_refused_by_name_and_a_model_that_was_moved_is_not(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="features is 'pooled' and was 'tower'"):
        with open_feature_folder(tmp_path, settings(features="pooled"), False):
            pass
    with open_feature_folder(tmp_path, settings() | {"model": "elsewhere"}, False) as folder:
        assert folder.done == set(KEYS)
