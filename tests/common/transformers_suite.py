"""The common model tests of the installed transformers.

They come from its source distribution, fetched with pip from the package index into a folder that git ignores. Two
modules that they import are not distributed; empty mixins stand in for them.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path

import pytest
import transformers

CACHE = Path(__file__).parent / ".cache"
PACKAGE = f"transformers_{transformers.__version__.replace('.', '_')}_tests"
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def load_common_tests():
    """The module `test_modeling_common` of the installed transformers.

    Skips the calling test module, saying why, where the package index does not answer.
    """
    if not (CACHE / PACKAGE).is_dir():
        _fetch()
    if str(CACHE) not in sys.path:
        sys.path.append(str(CACHE))
    with warnings.catch_warnings():
        # marks that only transformers' own configuration of pytest knows
        warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)
        return importlib.import_module(f"{PACKAGE}.test_modeling_common")


def _fetch() -> None:
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        source = f"transformers=={transformers.__version__}"
        download = subprocess.run(
            [sys.executable, "-m", "pip", "download", source, "--no-deps", "--no-binary", ":all:", "--dest", scratch],
            capture_output=True,
            text=True,
        )
        if download.returncode:
            reason = (download.stderr.strip() or "pip said nothing").splitlines()[-1]
            pytest.skip(f"the source distribution of {source} could not be fetched: {reason}", allow_module_level=True)
        package = Path(scratch) / PACKAGE
        package.mkdir()
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
            for member in archive:
                path = Path(member.name)
                if path.parts[1:-1] == ("tests",) and path.suffix == ".py":
                    (package / path.name).write_bytes(archive.extractfile(member).read())
        for name, text in STAND_INS.items():
            (package / name).parent.mkdir()
            (package / name).write_text(text)
        try:
            os.replace(package, CACHE / PACKAGE)
        except OSError:  # another run of the tests was faster
            if not (CACHE / PACKAGE).is_dir():
                raise
