"""Fine-tune a vision-language model on conversations with images and videos, as a YAML file says.

`python examples/finetune.py --config examples/finetune.yaml --dry-run` shows what would be learned, and what it takes;
without `--dry-run` the training follows. `accelerate launch` or `torchrun` in the place of `python` uses several devices.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
import yaml
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig, Trainer, TrainingArguments

import gridtower
from gridtower import (
    QUANTIZATION_SKIPS,
    ConversationCollator,
    labelled_text,
    parameter_groups,
    parts_summary,
    prepare_parts,
    read_conversations,
)

SECTIONS = {
    "model": {"path", "dtype", "attn_implementation", "quantization"},
    "data": {"train", "validation", "media_root"},
    "collation": {"learn_from", "max_length", "on_too_long", "on_unreadable", "packing"},
    "parts": {"tower", "projector", "text"},
    "generation": {"rows", "batch_size", "max_new_tokens"},
    "training": None,  # any field of TrainingArguments
}
LEARNED, PLAIN = "\033[32m", "\033[0m"


def read_settings(path: Path, overrides: list[str]) -> dict:
    """The YAML file's sections, with `section.key=value` put over them.

    Raises:
        ValueError: a section or key that there is not, or one that is missing.
    """
    settings = yaml.safe_load(path.read_text()) or {}
    for override in overrides:
        place, separator, value = override.partition("=")
        if not separator:
            raise ValueError(f"{override!r} overrides nothing; write section.key=value")
        *path_to, last = place.split(".")
        holder = settings
        for step in path_to:
            holder = holder.setdefault(step, {})
        holder[last] = yaml.safe_load(value)
    if unknown := settings.keys() - SECTIONS.keys():
        raise ValueError(f"unknown section(s) {sorted(unknown)}; there are {sorted(SECTIONS)}")
    for section, keys in SECTIONS.items():
        settings.setdefault(section, {})
        if keys is not None and (unknown := settings[section].keys() - keys):
            raise ValueError(f"unknown key(s) {sorted(unknown)} in {section!r}; there are {sorted(keys)}")
    for section, key in (("model", "path"), ("data", "train"), ("training", "output_dir")):
        if key not in settings[section]:
            raise ValueError(f"{section}.{key} is missing; give it in {path.name}, or as {section}.{key}=…")
    return settings


def load(path, dtype="auto", attn_implementation=None, quantization=None):
    """Model and processor; `quantization` holds fields of `BitsAndBytesConfig`."""
    gridtower.register()
    if quantization is not None:
        quantization = BitsAndBytesConfig(llm_int8_skip_modules=QUANTIZATION_SKIPS, **quantization)
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, quantization_config=quantization
    )
    return model, AutoProcessor.from_pretrained(path)


class Finetuner(Trainer):
    """Trainer with a learning rate for each part, which also evaluates by what the model writes."""

    def __init__(self, *arguments, parts: dict, generation: dict, **keywords):
        super().__init__(*arguments, **keywords)
        self.parts, self.generation = parts, generation

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            model = self.model if model is None else model
            optimizer, keywords = self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = parameter_groups(model, self.parts, self.args.learning_rate, self.args.weight_decay)
            self.optimizer = optimizer(groups, **keywords)
        return self.optimizer

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        rows = (self.eval_dataset if eval_dataset is None else eval_dataset)[: self.generation.get("rows", 64)]
        if rows:
            written = self.written_metrics(rows, metric_key_prefix)
            self.log(written)
            metrics |= written
        return metrics

    @torch.no_grad()
    def written_metrics(self, rows: list[dict], prefix: str) -> dict[str, float]:
        """Exact match and character error rate of what `generate` writes where the last answer stands."""
        self.model.eval()
        processes, own = self.args.world_size, self.args.process_index
        size = self.generation.get("batch_size", 8)
        # As many calls on each rank, for sharded parameters are gathered by all; what is dealt out twice counts once.
        rounds = -(-len(rows) // (processes * size))
        sums = torch.zeros(4, dtype=torch.float64, device=self.args.device)  # rows, exact, edits, characters
        for number in tqdm(range(rounds), desc="Writing", disable=self.args.disable_tqdm or own > 0, leave=False):
            first = (number * processes + own) * size
            texts, references = self.write(rows[first : first + size] or rows[:1])
            for text, reference in zip(texts, references) if first < len(rows) else ():
                edits = edit_distance(text, reference)
                sums += torch.tensor([1, text == reference, edits, len(reference)]).to(sums)
        count, exact, edits, characters = self.accelerator.reduce(sums).tolist()
        return {
            f"{prefix}_exact_match": exact / max(count, 1),
            f"{prefix}_character_error_rate": edits / max(characters, 1),
        }

    def write(self, rows):
        inputs, references = self.data_collator.prompts(rows)
        if not references:  # all were left out
            return [], []
        inputs = self._prepare_inputs(inputs)
        length = inputs["input_ids"].shape[1]
        options = {"max_new_tokens": self.generation.get("max_new_tokens", 64), "do_sample": False}
        written = self.model.generate(**inputs, **options, synced_gpus=self.args.world_size > 1)
        return self.processing_class.batch_decode(written[:, length:], skip_special_tokens=True), references


def edit_distance(one: str, other: str) -> int:
    """Fewest insertions, deletions and exchanges of a character that make `other` of `one` (Levenshtein)."""
    previous = list(range(len(other) + 1))
    for row, left in enumerate(one, start=1):
        current = [row]
        for column, right in enumerate(other):
            current.append(min(previous[column + 1] + 1, current[-1] + 1, previous[column] + (left != right)))
        previous = current
    return previous[-1]


def show_row(collator, row):
    """Prints a row as the model gets it: what it learns to write in green."""
    batch = collator([row])
    runs = labelled_text(batch["input_ids"][0], batch["labels"][0], collator.processor)
    green, plain = ("[", "]") if "NO_COLOR" in os.environ else (LEARNED, PLAIN)
    print("".join(f"{green}{text}{plain}" if learned else text for text, learned in runs))


def counts_of(collator, row) -> tuple[int, int, int]:
    """Tokens of a row, those of them that are learned, and patches."""
    batch = collator([row])
    patches = sum(len(batch[name]) for name in ("pixel_values", "pixel_values_videos") if name in batch)
    return batch["input_ids"].shape[1], (batch["labels"] != -100).sum().item(), patches


def token_statistics(counts: list[tuple[int, int, int]]) -> str:
    """Lengths of rows, and the shares of tokens that are learned."""
    lengths, learned, patches = zip(*counts)
    quantiles = statistics.quantiles(lengths, n=20) if len(lengths) > 1 else lengths * 19
    return (
        f"{min(lengths)} to {max(lengths)} tokens, median {quantiles[9]:.0f}, "
        f"95 % up to {quantiles[18]:.0f}; {sum(learned) / sum(lengths):.1%} learned; "
        f"{sum(patches) / len(lengths):.0f} patches a row"
    )


def memory_estimate(model, batch, states_per_parameter: int = 2) -> dict[str, int]:
    """Bytes that a training step holds: measured by one forward pass over `batch`, without gradients' own buffers.

    Args:
        states_per_parameter: tensors that the optimizer keeps for each parameter that learns; two for Adam.
    """
    learning = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    weights = {t.untyped_storage().data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(**batch).loss  # as long as the loss lives, so does what was kept
    del loss
    return {
        "weights": sum(weights.values()),
        "gradients": learning,
        "optimizer": states_per_parameter * learning,
        "activations": sum(kept.values()),
    }


def dry_run(model, collator, rows, batch_size: int):
    show_row(collator, rows[0])
    sample = rows[:: max(1, len(rows) // 256)]
    counts = [counts_of(collator, row) for row in sample]
    print(f"\n{len(sample)} of {len(rows)} rows: {token_statistics(counts)}; left out: {collator.skipped}")
    by_length = sorted(range(len(sample)), key=lambda index: counts[index])
    longest = [sample[index] for index in by_length[-batch_size:]]
    batch = {
        name: value.to(model.device) if torch.is_tensor(value) else value for name, value in collator(longest).items()
    }
    sizes = memory_estimate(model, batch)
    print(
        f"Memory of a step over the {len(longest)} longest rows, on one device, {sum(sizes.values()) / 2**30:.2f} GiB:"
    )
    print(", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file; examples/finetune.yaml explains the keys"
    )
    parser.add_argument("--dry-run", action="store_true", help="show a row, token counts and memory, then stop")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in training.output_dir")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="put over what the file says")
    options = parser.parse_intermixed_args()

    settings = read_settings(options.config, options.overrides)
    arguments = TrainingArguments(
        **{"remove_unused_columns": False, "report_to": ["tensorboard"]} | settings["training"]
    )
    model, processor = load(**settings["model"])
    train, validation = (
        read_conversations(settings["data"][name], settings["data"].get("media_root"))
        if name in settings["data"]
        else []
        for name in ("train", "validation")
    )
    model = prepare_parts(model, settings["parts"])
    collator = ConversationCollator(processor, **settings["collation"])
    if arguments.process_index == 0:
        print(parts_summary(model), "\n")
    if options.dry_run:
        return dry_run(model, collator, train, arguments.per_device_train_batch_size)
    trainer = Finetuner(
        model,
        arguments,
        data_collator=collator,
        train_dataset=train,
        eval_dataset=validation or None,
        processing_class=processor,
        parts=settings["parts"],
        generation=settings["generation"],
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    if validation:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        print(json.dumps(metrics, indent=2))
    if any(collator.skipped.values()):
        print("rows left out:", collator.skipped)
    if arguments.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
