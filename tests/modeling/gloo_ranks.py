"""Starts the scripts that run on several gloo ranks, and reads what they measured."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_on_ranks(script: str, folder: Path, *arguments: str, ranks: int = 2) -> None:
    """torchrun of a script beside this file, which takes `folder` and `arguments`."""
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path.parents[2])}
    run = subprocess.run(
        [*command, str(path), str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]


def measured_by_ranks(folder: Path) -> list[dict]:
    """What each rank wrote to `folder`."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
