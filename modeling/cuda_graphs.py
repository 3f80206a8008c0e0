"""Towers replayed from CUDA graphs: launching the kernels of a small batch takes longer than running them.

A graph repeats fixed kernels on fixed addresses, so one is captured for each budget of patches and frames, and a batch
is filled up to the smallest budget that holds it.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .packed_attention import goes_by_tensors_alone
from .packed_metadata import RunsFromMetadata


class Budget(NamedTuple):
    """What a graph has room for; frames include those that hold the filling, one for every `max_seqlen` patches."""

    patches: int
    frames: int


class GraphedTower:
    """Calls a tower by replaying graphs; for inference, without gradients.

    Where no graph can be had, the tower runs as it is: on a CPU, under an attention backend that must know the lengths of
    frames, and for a batch beyond every budget or with a frame longer than `max_seqlen`.

    Args:
        tower: one of ours, in evaluation mode, its weights where they will stay.
        budgets: (patches, frames) of each graph; a graph keeps a copy of all states of so many patches.
        max_seqlen: most patches of a frame.

    Raises:
        ValueError: no budget, or a number below 1.
    """

    def __init__(self, tower: RunsFromMetadata, budgets: list[tuple[int, int]], max_seqlen: int):
        self.budgets = sorted(Budget(*budget) for budget in budgets)
        if not self.budgets or min(max_seqlen, *(number for budget in self.budgets for number in budget)) < 1:
            raise ValueError(
                f"budgets is {budgets} and max_seqlen {max_seqlen}; give at least one budget, all from 1 up."
            )
        self.tower, self.max_seqlen = tower, max_seqlen
        self._graphs = {}

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """(num_patches, patch_dim) and (num_images, 3) -> (num_patches, hidden_size), a tensor of the caller's own."""
        self.tower.check_patches(pixel_values)
        metadata = self.tower.packed_metadata(grid_thw)
        floating = pixel_values.is_floating_point()  # raw uint8 patches stay as they are
        inputs = {"pixel_values": pixel_values.to(self.tower.device, self.tower.dtype if floating else None)}
        inputs |= {name: metadata[name] for name in self.tower.packed_inputs}
        budget = self.budget_for(inputs)
        if budget is None or not goes_by_tensors_alone(self.tower.config, inputs["pixel_values"]):
            return self.tower.forward_packed(**inputs)
        filled = filled_up(inputs, budget, self.max_seqlen)
        if (budget, floating) not in self._graphs:
            self._graphs[budget, floating] = self._capture(filled)
        graph, kept, output = self._graphs[budget, floating]
        for name, tensor in kept.items():
            tensor.copy_(filled[name])
        graph.replay()
        return output[: len(pixel_values)].clone()

    def budget_for(self, inputs: dict[str, torch.Tensor]) -> Budget | None:
        """The smallest that holds the inputs and their filling."""
        patches, frames = len(inputs["pixel_values"]), len(inputs["cu_seqlens"]) - 1
        if int(inputs["max_seqlen"]) > self.max_seqlen:
            return None
        for budget in self.budgets:
            spare = budget.patches - patches
            if spare >= 0 and frames + -(-spare // self.max_seqlen) <= budget.frames:
                return budget
        return None

    def _capture(self, inputs: dict[str, torch.Tensor]):
        kept = {name: tensor.clone() for name, tensor in inputs.items() if name != "max_seqlen"}
        call = {**kept, "max_seqlen": self.max_seqlen}
        # Kernels are chosen and buffers made on the first calls, which must not be part of the graph.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.tower.forward_packed(**call)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.tower.forward_packed(**call)
        return graph, kept, output


def filled_up(inputs: dict[str, torch.Tensor], budget: Budget, max_seqlen: int) -> dict[str, torch.Tensor]:
    """Inputs of `forward_packed` brought to the size of `budget`: more patches in frames of their own, then empty frames.

    Zeros pass through a tower without a division by zero, and no patch of another frame sees them.
    """
    patches, boundaries = len(inputs["pixel_values"]), inputs["cu_seqlens"]
    more = torch.arange(1, budget.frames + 2 - len(boundaries), device=boundaries.device) * max_seqlen
    filled = {
        name: F.pad(tensor, (0, 0, 0, budget.patches - patches))
        for name, tensor in inputs.items()
        if name not in ("cu_seqlens", "max_seqlen")
    }
    filled["cu_seqlens"] = torch.cat([boundaries, (patches + more).clamp(max=budget.patches).to(boundaries.dtype)])
    filled["max_seqlen"] = torch.tensor(max_seqlen, dtype=torch.int32)
    return filled
