"""Saved folders carry the code that reads them, in the flat form of the hub."""

import ast

import pytest
from transformers import AutoConfig

from gridtower.configuration import flat_code as flat
from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig, Lfm3VlVisionConfig
from gridtower.configuration.flat_code import flat_code


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """A chain a -> b -> c of modules in two rooms, in place of the package's own."""
    front, back = tmp_path / "front", tmp_path / "back"
    front.mkdir()
    back.mkdir()
    (front / "a.py").write_text("from ..back.b import (\n    B,\n)\nfrom torch import nn\n")
    (back / "b.py").write_text("def B():\n    from .c import C\n\n    return C\n")
    (back / "c.py").write_text("from ..front.a import A as again\n\nC = 'from .b import B'\n")
    (back / "alone.py").write_text("import torch\n")
    monkeypatch.setattr(flat, "_PLACES", (front, back))


def test_a_chain_of_relative_imports_comes_along_in_the_flat_form(rooms):
    texts = flat_code(["a"])
    assert set(texts) == {"a.py", "b.py", "c.py"}
    assert texts["a.py"] == "from .b import (\n    B,\n)\nfrom torch import nn\n"
    assert texts["b.py"] == "def B():\n    from .c import C\n\n    return C\n"
    assert texts["c.py"].startswith("from .a import A as again")


def test_an_unknown_module_is_left_out(rooms):
    assert set(flat_code(["alone", "elsewhere"])) == {"alone.py"}


def relative_imports(text):
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("config_class", [Lfm3VlConfig, Lfm3VlVisionConfig])
def test_all_code_that_a_saved_configuration_names_lies_next_to_it(config_class, tmp_path):
    config_class().save_pretrained(tmp_path)
    files = {path.stem for path in tmp_path.glob("*.py")}
    assert {"configuration_lfm3_vl", "modeling_lfm3_vl"} <= files
    for path in tmp_path.glob("*.py"):
        for node in relative_imports(path.read_text()):
            assert node.level == 1 and node.module in files, f"{path.name} imports {node.module}"


def test_a_pushed_folder_carries_the_code_too(tmp_path):
    config = Lfm3VlVisionConfig()
    before = config._get_files_timestamps(tmp_path)
    config.save_pretrained(tmp_path)
    changed = set(config._get_files_timestamps(tmp_path)) - set(before)
    assert {"config.json", "modeling_lfm3_vl.py", "flat_code.py"} <= changed


def test_a_saved_configuration_loads_as_remote_code(tmp_path):
    Lfm3VlVisionConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules")
    assert type(loaded) is not Lfm3VlVisionConfig and loaded.layer_types == ["conv"]


def test_remote_code_saves_code_that_loads_again(tmp_path):
    Lfm3VlConfig().save_pretrained(tmp_path / "first")
    remote = AutoConfig.from_pretrained(tmp_path / "first", trust_remote_code=True)
    remote.save_pretrained(tmp_path / "second")
    written = {path.name: path.read_text() for path in (tmp_path / "second").glob("*.py")}
    assert "configuration_lfm3_vl.py" in written
    for name, text in written.items():
        assert text == (tmp_path / "first" / name).read_text()
    again = AutoConfig.from_pretrained(tmp_path / "second", trust_remote_code=True)
    assert again.to_diff_dict() == remote.to_diff_dict()
    assert type(again) is not type(remote)
