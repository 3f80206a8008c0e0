"""Run by torchrun: ranks that share one model, by its tensors or by the images of its tower, against one that has it alone.

Reads `FOLDER/<family>`, writes what each rank measured to `FOLDER/rank<N>.json`; in the ways that are named after it, or in
all of them.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from gridtower.modeling.data_parallel import encode_data_parallel
from tests.hub_cards.tiny_models import TINY_MODELS, LabelledPrompts
from tests.modeling.ranks_with_unequal_rows import generated, whole


def step(model, batch):
    """Loss, logits, and gradients by name, whole ones."""
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.item(), outputs.logits.detach(), gradients


def differences(found, expected):
    (_, logits, gradients), (_, expected_logits, expected_gradients) = found, expected
    assert gradients.keys() == expected_gradients.keys(), gradients.keys() ^ expected_gradients.keys()
    return {
        "logits": (logits - expected_logits).abs().max().item(),
        "gradients": max((gradients[name] - right).abs().max().item() for name, right in expected_gradients.items()),
        "largest": max(gradient.abs().max().item() for gradient in expected_gradients.values()),
    }


@torch.no_grad()
def from_metadata(model, batch):
    tower = model.model.vision_tower
    metadata = tower.packed_metadata(batch["image_grid_thw"])
    return tower.forward_packed(batch["pixel_values"], **{name: metadata[name] for name in tower.packed_inputs})


def by_tensors(alone, folder, batch, expected):
    model = load_shared(alone, folder)
    measured = differences(step(model, batch), expected)
    measured["sharded"] = sorted(name for name, p in model.named_parameters() if isinstance(p, DTensor))
    with torch.no_grad():
        measured["without gradients"] = (model(**batch).logits - expected[1]).abs().max().item()
    measured["from metadata"] = (from_metadata(model, batch) - from_metadata(alone, batch)).abs().max().item()
    measured["generated"], measured["generated alone"] = generated(model, batch), generated(alone, batch)
    model.save_pretrained(folder.with_name(f"{folder.name} saved"))
    return measured


def load_shared(alone, folder, **plan):
    config = DistributedConfig(tp_size=dist.get_world_size(), **plan)
    return type(alone).from_pretrained(folder, distributed_config=config).train()


def by_images(model, batch, expected):
    rest = {name: value for name, value in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    model.zero_grad()
    features = encode_data_parallel(model, batch["pixel_values"], batch["image_grid_thw"])
    outputs = model(**rest, mm_encoder_outputs={"image": features})
    outputs.loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return differences((outputs.loss.item(), outputs.logits.detach(), gradients), expected)


def by_both(alone, folder, batch, expected):
    """The text model by its tensors, the tower by the images."""
    vision = (".vision_tower.", ".multi_modal_projector.", ".aligner.")
    plan = {rule: "replicate" for rule in alone.tp_plan if any(part in rule for part in vision)}
    model = load_shared(alone, folder, tp_plan=plan)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    assert sharded and not [name for name in sharded if any(part in name for part in vision)]
    return by_images(model, batch, expected)


@torch.no_grad()
def towers(tower, grids):
    """Largest difference of the states of a tower whose images are shared, for each batch of images."""
    found = []
    for grid in map(torch.tensor, grids):
        pixels = torch.randn(int(grid.prod(-1).sum()), tower.config.patch_dim)
        shared = encode_data_parallel(tower, pixels, grid).last_hidden_state
        found.append((shared - tower(pixels, grid_thw=grid).last_hidden_state).abs().max().item())
    return found


def measure(family, folder, ways):
    model, processor = TINY_MODELS[family]()
    model = type(model).from_pretrained(folder).train()
    prompts = LabelledPrompts(processor)
    batch = dict(prompts.collate([prompts[row] for row in range(4)]))
    expected = step(model, batch)
    # Many unequal images; one image, so that a rank has nothing to do.
    grids = [[[1, 2, 6], [1, 8, 8], [1, 4, 2], [1, 4, 2], [1, 2, 2]], [[1, 6, 4]]]
    measures = {
        "by tensors": lambda: by_tensors(model, folder, batch, expected),
        "by images": lambda: by_images(model, batch, expected),
        "by both": lambda: by_both(model, folder, batch, expected),
        "towers": lambda: towers(model.model.vision_tower, grids),
    }
    return {way: measures[way]() for way in ways or measures}


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    results = {family: measure(family, folder / family, sys.argv[2:]) for family in TINY_MODELS}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
