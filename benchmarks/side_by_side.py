"""Measuring of two or more computations side by side: interleaved times, and peak memory in processes of their own."""

import argparse
import ctypes
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

# What `peak_memory` measures, in words for a report, by device.
MEASURED_MEMORY = {
    "cpu": "peak resident set of a process during a step, above its resident set before the step",
    "cuda": "peak of PyTorch's allocations on the GPU during a step, above those before the step",
}


def interleaved_seconds(
    steps: Mapping[str, Callable[[], object]], repeats: int, *, warm_up: int = 1, device: str = "cpu"
) -> dict[str, list[float]]:
    """Times of steps that take turns, so that whatever else the machine does meets all of them alike.

    Args:
        steps: by name, what to time; one round calls each once, in this order.
        repeats: rounds that count.
        warm_up: rounds before them that do not.
        device: "cuda" waits for the GPU before the clock is started and before it is read.

    Returns:
        seconds of each step in every round that counts; those of one round stand at the same index.

    Raises:
        ValueError: less than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give 1 or more.")
    seconds = {name: [] for name in steps}
    for turn in range(warm_up + repeats):
        for name, step in steps.items():
            _wait_for(device)
            start = time.perf_counter()
            step()
            _wait_for(device)
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio_quartiles(numerators: list[float], denominators: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratios of each round."""
    ratios = torch.tensor(numerators, dtype=torch.float64) / torch.tensor(denominators, dtype=torch.float64)
    return tuple(ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist())


def in_words(quartiles: tuple[float, float, float] | None) -> str:
    """Median [lower .. upper quartile], or a dash where there is none."""
    return "-" if quartiles is None else f"{quartiles[1]:.2f} [{quartiles[0]:.2f} .. {quartiles[2]:.2f}]"


def add_machine_options(parser: argparse.ArgumentParser, dtypes: Sequence[str]) -> None:
    """How models are run: threads, dtype, attention backend, device."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=dtypes, default="float32")
    parser.add_argument("--attention", choices=["eager", "sdpa", "flash_attention_2"], default="sdpa")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def refuse_impossible(
    parser: argparse.ArgumentParser, options: argparse.Namespace, counts: Sequence[str], memory: str | None
) -> None:
    """Ends the script with an error where options cannot be followed.

    Args:
        counts: names of the options that must be 1 or more.
        memory: what to do where memory on the CPU cannot be measured; None: it is not asked for.
    """
    for name in counts:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; give 1 or more")
    if options.device == "cpu" and memory is not None and sys.platform != "linux":
        parser.error(f"memory on the CPU is read from /proc; {memory}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here; leave the option out to measure on the CPU")


def peak_memory(
    prepare: Callable[..., Callable[[], object]], *arguments, device: str = "cpu", imports: Sequence[str] = ()
) -> int:
    """Bytes that a step needs at its peak, above what is there before it.

    A fresh process calls `step = prepare(*arguments)`, then `step()` once to warm up, and measures the second `step()`:
    what preparing left in use (weights, rows) and what the first step left (an optimizer's state) does not count.

    Args:
        prepare: makes the step. It and its arguments are pickled, so it must be a function of an importable module.
        device: "cpu" reads the kernel's mark of the highest resident set; "cuda" asks PyTorch's allocator.
        imports: names of slow modules that `prepare` needs; the first call imports them for all later ones.

    Raises:
        AttributeError, OSError: on the CPU, of a system that is not Linux with glibc or keeps processes from resetting the
            mark.
    """
    context = multiprocessing.get_context("forkserver")
    # The server from which the fresh processes are forked imports and does nothing else.
    context.set_forkserver_preload(["torch", *imports])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        return process.submit(_peak_of_second_step, prepare, arguments, device).result()


def _peak_of_second_step(prepare, arguments, device: str) -> int:
    step = prepare(*arguments)
    step()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Memory that was freed but not given back would be filled again by the step without showing.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    step()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
