"""Memory of a computation that is run on shapes alone: PyTorch's fake tensors, and a count of the bytes that they would hold.

What follows from weights and pixels is fake. Small tensors that follow from none of them (ids, positions, grids, masks) are
real, because the models read them to decide what to do.
"""

import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# Elements up to which a tensor that is not fake is computed.
_MOST_REAL = 2**24
_GROUPED_MM = getattr(torch.ops.aten, "_grouped_mm", None)


class TracedMemory(TorchDispatchMode):
    """Counts the bytes that the tensors made inside hold, by their storages: `live` now, and `peak` at most so far.

    Fake tensors say that they are on the CPU. Scratch space inside a kernel is not seen.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages = WeakIdKeyDictionary()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like one on the meta device, and counted."""
        fake = FakeTensor(self._fake, tensor, torch.device("cpu"))
        self._count(fake)
        return fake

    def adopt(self, model: nn.Module) -> None:
        """Put fake tensors in the place of the parameters and buffers of a model on the meta device; they do not count."""
        fakes = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if tensor not in fakes:
                        fake = FakeTensor(self._fake, tensor.detach(), torch.device("cpu"))
                        self._storages[fake.untyped_storage()] = 0
                        is_parameter = isinstance(tensor, nn.Parameter)
                        fakes[tensor] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
                    table[name] = fakes[tensor]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = self._computed(func, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _computed(self, func, args, kwargs):
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return self._on_shapes(func, args, kwargs)
        if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            result = self._on_shapes(func, args, kwargs)
            if (
                max((leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)), default=0)
                > _MOST_REAL
            ):
                return result
        return func(*args, **kwargs)

    def _on_shapes(self, func, args, kwargs):
        with self._fake:
            if _GROUPED_MM is not None and func is _GROUPED_MM.default and args[1].ndim == 3:
                # PyTorch's own rule for shapes refuses what its kernel for CPUs takes, float32.
                return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
            return func(*args, **kwargs)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        size = self._storages[storage] = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size


def held_bytes(*values) -> int:
    """Bytes of the storages behind all tensors in `values`: tensors, or objects and containers that hold some."""
    storages = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            waiting += vars(value).values()
    return sum(storages.values())
