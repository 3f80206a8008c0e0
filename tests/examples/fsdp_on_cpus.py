"""Run by accelerate in the place of a script, which follows with its arguments: accelerate then shards on CPUs too."""

import runpy
import sys
from pathlib import Path

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

_init = AcceleratorState.__init__


def init(self, *arguments, fsdp_plugin=None, **keywords):
    _init(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
    # accelerate says so for GPUs alone, and takes it back with every new instance.
    self.distributed_type = DistributedType.FSDP
    if getattr(self, "fsdp_plugin", None) is None:
        self.fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin()


AcceleratorState.__init__ = init
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
