"""Which images are found in folders, files, tars, tables and JSON lines, and by which keys."""

import base64
import io
import json
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gridtower.media_rows import media_rows
from gridtower.processing.media_loading import open_image, rgb_pixels

from ..hub_cards.tiny_models import picture


def png(seed):
    buffer = io.BytesIO()
    picture(4 + seed, 6, seed).save(buffer, "PNG")
    return buffer.getvalue()


def write_png(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(seed))
    return path


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_parquet(path, images, kind=None, row_group_size=None):
    column = pyarrow.array(images, kind)
    table = pyarrow.table({"label": list(range(len(images))), "image": column})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def write_lines(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def assert_pictures(rows, seeds):
    """`rows` hold the pictures of `seeds`, in this order."""
    assert len(rows) == len(seeds)
    for row, seed in zip(rows, seeds):
        found = rgb_pixels(open_image(row.source.read())).permute(1, 2, 0).numpy()
        assert np.array_equal(found, np.asarray(picture(4 + seed, 6, seed))), row.key


def keys_below(rows, folder):
    return [row.key.removeprefix(f"{folder}/") for row in rows]


def test_a_folder_is_searched_at_any_depth_in_the_order_of_names(tmp_path):
    for seed, name in enumerate(["a/2.png", "a/b/1.PNG", "a/b/c/0.png", "z.png"]):
        write_png(tmp_path / name, seed)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    write_png(tmp_path / ".hidden" / "5.png", 5)
    write_png(tmp_path / "a" / "._2.png", 5)
    rows = media_rows([tmp_path])
    assert keys_below(rows, tmp_path) == ["z.png", "a/2.png", "a/b/1.PNG", "a/b/c/0.png"]
    assert_pictures(rows, [3, 0, 1, 2])


def test_keys_begin_with_the_input_as_given_and_sources_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    write_png(tmp_path / "pictures" / "1.png", 1)
    monkeypatch.chdir(tmp_path)
    rows = media_rows(["pictures"])
    assert [row.key for row in rows] == ["pictures/1.png"]
    monkeypatch.chdir("/")
    assert_pictures(rows, [1])


def test_an_image_that_two_inputs_name_is_taken_once(tmp_path):
    path = write_png(tmp_path / "1.png", 1)
    (tmp_path / "link.png").symlink_to(path)
    assert len(media_rows([path, tmp_path, path])) == 1


def test_members_of_a_tar_are_named_without_extension_and_told_apart_where_that_is_not_enough(tmp_path):
    members = [
        ("x/0.png", png(0)),
        ("x/0.json", b"{}"),
        ("x/0.webp", png(1)),
        ("x/0.png", png(2)),
        ("1.a.png", png(3)),
    ]
    rows = media_rows([write_tar(tmp_path / "shard.tar", members)])
    first, second, third, fourth = (key.removeprefix("shard.tar::") for key in keys_below(rows, tmp_path))
    assert (first, second, fourth) == ("x/0", "x/0.webp", "1.a")
    assert third == "x/0.png"
    assert_pictures(rows, [0, 1, 2, 3])


def test_a_tar_that_was_cut_off_gives_what_is_whole_and_says_that_it_was(tmp_path):
    path = write_tar(tmp_path / "shard.tar", [("0.png", png(0)), ("1.png", bytes(5000)), ("2.png", png(2))])
    path.write_bytes(path.read_bytes()[:3000])
    rows = media_rows([path])
    assert_pictures(rows[:1], [0])
    assert rows[-1].key == str(path)
    with pytest.raises(ValueError, match="unexpected end of data"):
        rows[-1].source.read()


@pytest.mark.parametrize("kind", ["bytes", "struct", "struct of paths", "paths"])
def test_a_parquet_column_may_hold_bytes_or_paths_or_both_in_several_row_groups(kind, tmp_path):
    for seed in range(5):
        write_png(tmp_path / "pictures" / f"{seed}.png", seed)
    path = {seed: f"pictures/{seed}.png" for seed in range(5)}
    make = {
        "bytes": png,
        "struct": lambda seed: {"bytes": png(seed), "path": "elsewhere.png"},
        "struct of paths": lambda seed: {"bytes": None, "path": path[seed]},
        "paths": path.get,
    }[kind]
    fields = [("bytes", pyarrow.binary()), ("path", pyarrow.string())]
    column = pyarrow.struct(fields) if kind.startswith("struct") else None
    rows = media_rows([write_parquet(tmp_path / "table.parquet", list(map(make, range(5))), column, 2)])
    assert keys_below(rows, tmp_path) == [f"table.parquet::{row}" for row in range(5)]
    assert_pictures(rows, range(5))


def test_an_empty_parquet_cell_says_so_when_it_is_read(tmp_path):
    rows = media_rows([write_parquet(tmp_path / "table.parquet", [png(0), None])])
    assert_pictures(rows[:1], [0])
    with pytest.raises(ValueError, match="empty in this row"):
        rows[1].source.read()


def test_json_lines_hold_paths_data_urls_lists_and_conversations_with_paths_from_their_own_folder(tmp_path):
    for seed in range(6):
        write_png(tmp_path / "pictures" / f"{seed}.png", seed)
    url = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    content = [{"type": "image", "image": "pictures/4.png"}, {"type": "text", "text": "é"}]
    path = write_lines(
        tmp_path / "rows.jsonl",
        [
            {"image": "pictures/0.png", "path": "other.png"},
            {"image": {"url": url}},
            "\n",
            {"images": ["pictures/2.png", str(tmp_path / "pictures" / "3.png")]},
            {"messages": [{"role": "user", "content": content}]},
            {"messages": [{"role": "user", "content": "no image"}]},
            {"path": "pictures/5.png"},
        ],
    )
    rows = media_rows([path])
    assert [row.key.removeprefix(f"{path}::") for row in rows] == ["0", "1", "2.0", "2.1", "3", "5"]
    assert_pictures(rows, range(6))


def test_a_line_that_is_no_json_stands_for_itself_and_the_others_are_read(tmp_path):
    write_png(tmp_path / "0.png", 0)
    path = write_lines(tmp_path / "rows.jsonl", ['{"image": \n', {"image": "0.png"}, "[1]\n"])
    broken, image, listed = media_rows([path])
    assert (broken.key, listed.key) == (f"{path}::0", f"{path}::2")
    assert_pictures([image], [0])
    for row, reason in ((broken, "Expecting value"), (listed, "a row is a JSON object")):
        with pytest.raises(ValueError, match=reason):
            row.source.read()


def test_a_name_that_is_no_text_gets_a_key_that_is(tmp_path):
    name = b"caf\xe9.png"
    with open(bytes(tmp_path) + b"/" + name, "wb") as file:
        file.write(png(1))
    rows = media_rows([tmp_path])
    assert keys_below(rows, tmp_path) == ["caf\\xe9.png"]
    assert_pictures(rows, [1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "nowhere does not exist"),
        (lambda folder: folder / "empty", "empty holds no image"),
        (lambda folder: write_tar(folder / "no.tar", [("a.txt", b"a")]), "no.tar holds no image"),
        (lambda folder: write_lines(folder / "no.jsonl", [{"text": "a"}]), "no.jsonl holds no image"),
        (lambda folder: write_lines(folder / "a.csv", ["a"]), "a.csv is not an input"),
        (lambda folder: write_lines(folder / "bad.tar", ["a"]), "nothing can be read .*bad.tar.*not a whole"),
        (lambda folder: write_lines(folder / "bad.parquet", ["a"]), "nothing can be read .*bad.parquet.*not a whole"),
    ],
)
def test_an_input_without_images_is_named(make, message, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        media_rows([make(tmp_path)])


def test_a_table_without_the_column_is_refused_with_the_columns_that_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"jpg": [b"a"]}), tmp_path / "table.parquet")
    with pytest.raises(ValueError, match=r"table.parquet has no column 'image' but \['jpg'\]"):
        media_rows([tmp_path / "table.parquet"])


def test_no_inputs_are_refused():
    with pytest.raises(ValueError, match="no inputs"):
        media_rows([])
