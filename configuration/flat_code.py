"""Makes every saved folder carry the code that reads it.

The hub's remote code is flat: all modules of a folder lie side by side and import each other as `from .module import …`.
The package keeps its modules in rooms. Here the one form becomes the other, whenever a configuration or a processor of
ours is saved: by `save_pretrained`, by every Trainer checkpoint, by `push_to_hub`, by `gridtower export`.
"""

import json
import re
from pathlib import Path

from transformers import PreTrainedConfig

_HERE = Path(__file__).resolve().parent
# In the package the sibling rooms hold the other modules; in a hub folder's cache everything lies in one directory.
_PLACES = (_HERE, _HERE.parent / "modeling", _HERE.parent / "processing")
_RELATIVE_IMPORT = re.compile(r"^([ \t]*from )\.{1,2}(?:\w+\.)?(\w+)( import\b)", re.MULTILINE)


def flat_code(modules: list[str]) -> dict[str, str]:
    """Source text of `modules` and of all that they import relatively, keyed by file name, imports in the flat form.

    Modules that are not on this machine are left out: a folder loaded with `AutoConfig` alone has fetched only the
    configuration's own files.
    """
    texts: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        path = next((place / name for place in _PLACES if (place / name).is_file()), None)
        if name in texts or path is None:
            continue
        text = path.read_text(encoding="utf-8")
        waiting += [match[2] for match in _RELATIVE_IMPORT.finditer(text)]
        texts[name] = _RELATIVE_IMPORT.sub(r"\1.\2\3", text)
    return texts


def write_code(folder: Path, parts: list) -> None:
    """Write into `folder` the flat code that the `hub_classes` of `parts` need, and what its `config.json` names.

    While a Trainer trains it pushes a folder into which it copied a checkpoint's `config.json` and saved the processor.
    """
    references = [reference for part in parts for reference in part.hub_classes.values()]
    if (folder / "config.json").is_file():
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        references += [named for named in (fields.get("auto_map") or {}).values() if isinstance(named, str)]
    modules = {reference.split(".")[0] for reference in references}
    for name, text in flat_code([module for module in modules if module.isidentifier()]).items():
        (folder / name).write_text(text, encoding="utf-8")


class SavesItsCode:
    """First base of our configurations and processors: what they save loads with `trust_remote_code=True`.

    `hub_classes` maps each Auto class to `"module.Class"`; it is written as `auto_map`, and the modules it names are
    written, flattened, next to the JSON file. A sub-configuration inside a composite one gets no `auto_map` of its own.
    """

    hub_classes = {}

    def to_json_file(self, json_file_path, **kwargs):
        # All three bases (configuration, image or video processor, joint processor) write their JSON through this
        # method, after `save_pretrained` has noted which files a push to the hub is to skip.
        parts = [self]
        inner = [value for value in vars(self).values() if isinstance(value, SavesItsCode)]
        if isinstance(self, PreTrainedConfig):
            for config in inner:
                vars(config).pop("auto_map", None)  # from a folder of its own
        else:
            parts += inner
        for part in parts:
            part.auto_map = dict(part.hub_classes)
        super().to_json_file(json_file_path, **kwargs)
        write_code(Path(json_file_path).parent, parts)
