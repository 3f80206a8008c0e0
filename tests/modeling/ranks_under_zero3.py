"""Run by torchrun on two ranks, with DeepSpeed: a model from a folder, in shards, whose ranks have unequal rows.

Writes what each rank measured to the folder that is named first, of the rows that are named next: {"loss",
"expected_loss", "written", "saved", "difference"}: that of the weights after a step of plain gradient descent, from those of
one process.
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers.integrations import HfDeepSpeedConfig

from tests.hub_cards.tiny_models import TINY_MODELS
from tests.modeling.ranks_with_unequal_rows import (
    generated,
    mean_gradients,
    with_images_and_without,
    with_videos_and_without,
)

RATE = 0.1
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    # No weight stays whole, however small.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


def same_tensors(*folders):
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    after.pop("lm_head.weight", None)  # where it is tied, it is a clone here
    before.pop("lm_head.weight", None)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def measure(rows, folder):
    model, processor = TINY_MODELS["lfm3_vl" if rows == "videos" else rows]()
    batches = (with_videos_and_without if rows == "videos" else with_images_and_without)(model, processor)
    batch = batches[dist.get_rank()]
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "model")
    dist.barrier()
    kept = HfDeepSpeedConfig(CONFIG)  # as long as it lives, models are loaded in shards
    sharded = type(model).from_pretrained(folder / "model")
    del kept
    with deepspeed.zero.GatheredParameters(list(sharded.parameters())):
        tensors = {name: tensor.clone() for name, tensor in sharded.state_dict().items()}
    if dist.get_rank() == 0:
        sharded.save_pretrained(folder / "saved", state_dict=tensors)
    dist.barrier()
    learning = [parameter for parameter in sharded.train().parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=sharded, optimizer=torch.optim.SGD(learning, RATE), config=CONFIG)
    written = generated(engine.module.eval(), batch) == generated(model, batch)
    for part in (engine, model):
        part.train()
    losses = [engine(**batch).loss, model(**batch).loss.item()]
    engine.backward(losses[0])
    engine.step()
    gradients = mean_gradients(model, batches)
    difference = 0
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([found := engine.module.get_parameter(name)]), torch.no_grad():
            stepped = parameter - RATE * gradients.get(name, 0)
            difference = max(difference, (found - stepped).abs().max().item())
    engine(**batch)  # what the first step left undone, the second trips over
    return {
        "loss": losses[0].item(),
        "expected_loss": losses[1],
        "written": written,
        "saved": same_tensors(folder / "model", folder / "saved"),
        "difference": difference,
    }


def main():
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    measured = measure(sys.argv[2], folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
