"""Tensor parallelism of what transformers' styles do not cover: stacked projections, and depthwise convolutions.

Which style goes where stands in the configurations, as `base_model_tp_plan` (Megatron's scheme, Shoeybi et al., 2019).
A server that does not know the styles named here leaves these modules whole, all those of a block together.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import (
    ALL_PARALLEL_STYLES,
    _use_local_dtensor_params,
    replace_layer_number_by_wildcard,
)
from transformers.distributed.tensor_parallel import PackedColwiseParallel, RowwiseParallel, TensorParallelLayer
from transformers.distributed.utils import _warning_once_on_rank_zero


class StackedColwiseParallel(PackedColwiseParallel):
    """Linear maps stacked in one weight, and in one bias: every rank holds its part of each of them."""

    # `context`: configuration and meshes, which transformers passes from 5.25 on.
    def shard_param(self, module, param, mesh, **context):
        from torch.distributed.tensor.placement_types import _StridedShard

        _distribute(module, param, mesh, _StridedShard(dim=0, split_factor=self.split_factor))


class ChannelwiseConvParallel(TensorParallelLayer):
    """A depthwise convolution: every rank holds the kernels of its channels."""

    def should_use_local_tensors(self, module):
        return True

    def shard_param(self, module, param, mesh, **context):
        from torch.distributed.tensor import Shard

        _distribute(module, param, mesh, Shard(0))

    def install_forward(self, module, mesh, **context):
        module.groups //= mesh.size()
        return super().install_forward(module, mesh, **context)


class ReadsConvParallel(TensorParallelLayer):
    """A block that reads the kernels of its convolution itself, instead of calling it."""

    def context_around_forward(self, module, mesh):
        return _use_local_dtensor_params(next(part for part in module.children() if hasattr(part, "kernel_size")))


def _distribute(module: nn.Module, param: str, mesh, placement) -> None:
    """Put the shard of this rank in the place of a parameter, if the module has it."""
    from torch.distributed.tensor import distribute_tensor

    whole = module._parameters.get(param)
    if whole is not None:
        sharded = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module._parameters[param] = nn.Parameter(sharded, requires_grad=whole.requires_grad)


if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register("stacked_colwise_2", StackedColwiseParallel(split_factor=2))
    ALL_PARALLEL_STYLES.register("stacked_colwise_3", StackedColwiseParallel(split_factor=3))
    ALL_PARALLEL_STYLES.register("stacked_rowwise", RowwiseParallel())
    ALL_PARALLEL_STYLES.register("channelwise_conv", ChannelwiseConvParallel())
    ALL_PARALLEL_STYLES.register("reads_conv", ReadsConvParallel())


class KeepsWholeWhatDoesNotDivide:
    """Base of towers and whole models: a tower or text model whose heads the ranks cannot share equally stays whole."""

    def init_parallel_plans(self) -> None:
        """As transformers', without the rules for parts that this model does not have: one plan serves a whole family."""
        super().init_parallel_plans()
        present = {name for name, _ in (*self.named_modules(), *self.named_parameters())}
        present = {replace_layer_number_by_wildcard(name) for name in present}
        for plan in ("_tp_plan", "_fsdp_plan"):
            setattr(self, plan, {rule: style for rule, style in getattr(self, plan).items() if rule in present})

    def _resolve_parallel_plans(self, distributed_config):
        parts = {
            name: part for name, part in self.named_modules() if name.endswith(("vision_tower", "language_model"))
        }
        for name, part in (parts or {"": self}).items():
            self._keep_whole(f"{name}." if name else "", part, distributed_config.tp_size)
        return super()._resolve_parallel_plans(distributed_config)

    def _keep_whole(self, prefix: str, part: PreTrainedModel, ranks: int) -> None:
        rules = {rule for rule in self._tp_plan if rule.startswith(prefix)}
        by_heads = any(rule.endswith((".k_proj", ".wqkv")) for rule in rules)
        heads = part.config.num_attention_heads
        groups = getattr(part.config, "num_key_value_heads", None) or heads
        if not by_heads or not (heads % ranks or groups % ranks):
            return
        self._tp_plan = {rule: style for rule, style in self._tp_plan.items() if rule not in rules}
        _warning_once_on_rank_zero(
            f"{type(part).__name__} has {heads} heads in {groups} groups, which {ranks} ranks cannot share equally: every "
            f"rank keeps all of it. Give a tp_size that divides {groups} to shard it."
        )
