"""Run by torchrun on two ranks: the first trains on rows with images, the second on text alone.

Of LFM3-VL also: the first on an image and a video, the second on an image. Writes what each rank measured to the folder
that is named first for every family and way of sharding: {"loss", "difference", "largest"}, gradients compared with the
mean of both rows' on one process, and "written": whether it generates what one process does.
"""

import copy
import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from tests.hub_cards.tiny_models import TINY_MODELS, LabelledPrompts
from tests.modeling.lfm3_vl_cases import prompts

ROWS = ([0, 1], [2])


def with_images_and_without(model, processor):
    labelled = LabelledPrompts(processor)
    return [labelled.collate([labelled[row] for row in rows]) for rows in ROWS]


def with_videos_and_without(model, processor):
    rows = ([[3, ("image", 2, 3), ("video", 2, 1, 2), 4]], [[2, ("image", 1, 2), 5]])
    batches = [prompts(model.config, row) for row in rows]
    return [batch | {"labels": batch["input_ids"]} for batch in batches]


def mean_gradients(model, batches):
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def replicated(model):
    return DistributedDataParallel(model)


def sharded(model):
    for name, part in model.named_modules():
        if type(part).__name__ in model._no_split_modules or name.endswith(("multi_modal_projector", "aligner")):
            fully_shard(part)
    # As a unit of its own, the tower gathers what its layers leave: a rank that never calls it is missed at once.
    fully_shard(model.model.vision_tower)
    return fully_shard(model)


def planned(model):
    """Sharded by transformers, as the plans of the configurations say."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return type(model).from_pretrained(folder[0], distributed_config=config).train()


def generated(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model.generate(**inputs, max_new_tokens=4, do_sample=False, synced_gpus=True).tolist()


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def measure(family, wrap, rank_batches=with_images_and_without):
    model, processor = TINY_MODELS[family]()
    model.train()
    batches = rank_batches(model, processor)
    batch = batches[dist.get_rank()]
    expected_text = generated(copy.deepcopy(model).eval(), batch)
    expected = mean_gradients(copy.deepcopy(model), batches)
    wrapped = wrap(model)
    with torch.no_grad():
        evaluated = wrapped(**batch).loss.item()
    for _ in range(2):  # what the first step leaves undone, the second trips over
        wrapped.zero_grad()
        loss = wrapped(**batch).loss
        loss.backward()
    found = {
        name.removeprefix("module."): whole(p.grad) for name, p in wrapped.named_parameters() if p.grad is not None
    }
    assert found.keys() == expected.keys()
    written = generated(getattr(wrapped, "module", wrapped).eval(), batch)
    return {
        "written": written == expected_text,
        "evaluated": evaluated,
        "loss": loss.item(),
        "difference": max((found[name] - gradient).abs().max().item() for name, gradient in expected.items()),
        "largest": max(gradient.abs().max().item() for gradient in expected.values()),
    }


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    torch.set_num_threads(1)
    results = {
        f"{family} {wrap.__name__}": measure(family, wrap)
        for family in TINY_MODELS
        for wrap in (replicated, sharded, planned)
    }
    for wrap in (replicated, sharded, planned):
        results[f"videos {wrap.__name__}"] = measure("lfm3_vl", wrap, with_videos_and_without)
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
