"""Train a small model from scratch to read handwritten numbers, with transformers' `Trainer`, on two CPU cores.

Writes the folder that `from_pretrained` loads, and prints how many whole numbers it reads right that are written with
scans no training picture shows. Usage: `torchrun --nproc-per-node 2 examples/train_digits.py --output DIR`.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed
from handwritten_numbers import LARGEST_MARGIN, QUESTIONS, HandwrittenNumbers, small_tokenizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import ConcatDataset, DataLoader
from transformers import (
    GenerationConfig,
    Lfm3Config,
    MistralConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from gridtower import (
    DeepseekV4ForConditionalGeneration,
    DeepseekV4ImageProcessor,
    DeepseekV4Processor,
    DeepseekV4VisionConfig,
    DeepseekV4VlConfig,
    Lfm3VlConfig,
    Lfm3VlForConditionalGeneration,
    Lfm3VlImageProcessor,
    Lfm3VlProcessor,
    Lfm3VlVideoProcessor,
    Lfm3VlVisionConfig,
    PixtralConfig,
    PixtralForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
)
from gridtower.processing.processing_deepseek_v4_vl import BLOCK_TOKENS, IMAGE_PLACEHOLDER

TEST_LENGTHS = (1, 2, 3, 4, 5, 6)


class Stage(NamedTuple):
    """A stretch of the training, as a share of its steps, and the pictures that it shows."""

    share: float
    lengths: tuple[int, ...]
    coloured: float
    largest_margin: int
    largest_area: int | None  # in pixels


# First what a digit is, then that ink may be dark or light, then the order of reading, then where on the paper.
# Among wide margins, an untrained reader takes six times as many steps to find the first digit.
# Small pictures cost little; the fine strokes of small digits come last, at the size that the trained model reads.
CURRICULUM = (
    Stage(0.04, (1,), 0.0, 0, 112**2),
    Stage(0.06, (1,), 0.7, 0, 112**2),
    Stage(0.08, (1, 2), 1.0, 20, 112**2),
    Stage(0.20, (1, 2, 3, 4), 1.0, 40, 112**2),
    Stage(0.24, (1, 2, 3, 4, 5, 6), 1.0, LARGEST_MARGIN, 112**2),
    # Long numbers show more digits for hardly more patches.
    Stage(0.38, (1, 2, 3, 4, 4, 5, 5, 6, 6), 1.0, LARGEST_MARGIN, None),
)
LONGEST_ANSWER = 32
# About one over the root of the width. The usual 0.02 is made for wide models: here it would leave the gated
# convolutions, products of three small numbers, without a signal to learn from.
INITIALIZER_RANGE = 0.1


def lfm3_vl_processor():
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    # Larger pictures are scaled down to these areas, which leaves six digits about 35 pixels each.
    images = Lfm3VlImageProcessor(size={"shortest_edge": 32**2, "longest_edge": 144**2}, **patches)
    videos = Lfm3VlVideoProcessor(size={"shortest_edge": 32**2, "longest_edge": 448**2}, max_frames=32, **patches)
    tokenizer = small_tokenizer()
    return Lfm3VlProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)


def lfm3_vl_model(processor):
    tokenizer = processor.tokenizer
    vision = Lfm3VlVisionConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        patch_size=processor.image_processor.patch_size,
        temporal_patch_size=processor.image_processor.temporal_patch_size,
        spatial_merge_size=processor.image_processor.merge_size,
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0},
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        initializer_range=INITIALIZER_RANGE,
    )
    text = Lfm3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        conv_L_cache=4,
        max_position_embeddings=8192,
        layer_types=["full_attention", "conv", "full_attention"],
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = Lfm3VlConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=processor.vision_start_token_id,
        vision_end_token_id=processor.vision_end_token_id,
        projector_hidden_size=192,
        initializer_range=INITIALIZER_RANGE,
    )
    return Lfm3VlForConditionalGeneration(config)


def pixtral_processor():
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["[IMG_BREAK]", "[IMG_END]"], special_tokens=True)
    # A longest edge leaves six digits about 30 pixels each.
    images = PixtralImageProcessor(size={"longest_edge": 208}, patch_size=8, spatial_merge_size=2)
    return PixtralProcessor(
        images,
        tokenizer,
        patch_size=8,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
        image_token=tokenizer.image_token,
    )


def pixtral_model(processor):
    tokenizer = processor.tokenizer
    vision = PixtralVisionConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        patch_size=8,
        image_size=208,
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0},
        initializer_range=INITIALIZER_RANGE,
    )
    text = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=8192,
        sliding_window=None,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    image_token_id = tokenizer.convert_tokens_to_ids(processor.image_token)
    config = PixtralConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token_id,
        spatial_merge_size=2,
        initializer_range=INITIALIZER_RANGE,
    )
    return PixtralForConditionalGeneration(config)


def deepseek_v4_vl_processor():
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([IMAGE_PLACEHOLDER, *BLOCK_TOKENS], special_tokens=True)
    # As large as those of the other families, about 144 x 144 pixels.
    images = DeepseekV4ImageProcessor(
        patch_size=8, downsample_ratio=2, max_image_tokens=112, min_pixels=32**2, max_wh_ratio=None
    )
    template = tokenizer.chat_template.replace(tokenizer.image_token, IMAGE_PLACEHOLDER)
    return DeepseekV4Processor(images, tokenizer, chat_template=template)


def deepseek_v4_vl_model(processor):
    tokenizer, images = processor.tokenizer, processor.image_processor
    vision = DeepseekV4VisionConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        rope_theta=100.0,
        patch_size=images.patch_size,
        downsample_ratio=images.downsample_ratio,
        max_image_tokens=images.max_image_tokens,
        min_pixels=images.min_pixels,
        max_wh_ratio=images.max_wh_ratio,
        initializer_range=INITIALIZER_RANGE,
    )
    config = DeepseekV4VlConfig(
        vision_config=vision,
        image_start_token_id=processor.image_token_ids[0],
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=160,
        num_attention_heads=4,
        head_dim=24,
        partial_rotary_factor=0.5,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=48,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=32,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        moe_intermediate_size=96,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        max_position_embeddings=8192,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = DeepseekV4ForConditionalGeneration(config)
    # Checkpoints bring the table that says which experts a token goes to; here they take turns.
    table = model.model.language_model.layers[0].mlp.gate.tid2eid
    table.copy_((torch.arange(len(table))[:, None] + torch.arange(2)) % config.n_routed_experts)
    return model


@dataclass(frozen=True)
class Family:
    """How to make an untrained reader: first the processor, then the model that its token ids fit."""

    make_processor: Callable
    make_model: Callable


FAMILIES = {
    "deepseek_v4_vl": Family(deepseek_v4_vl_processor, deepseek_v4_vl_model),
    "lfm3_vl": Family(lfm3_vl_processor, lfm3_vl_model),
    "pixtral": Family(pixtral_processor, pixtral_model),
}


def prompt_for(processor, question: str) -> str:
    content = [{"type": "image"}] + [{"type": "text", "text": question}] * bool(question)
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


@dataclass
class ReadingCollator:
    """(picture, digits) pairs -> one packed batch whose loss counts the digits and the end of the answer alone."""

    processor: object
    seed: int = 0

    def __post_init__(self):
        self.prompts = [prompt_for(self.processor, question) for question in QUESTIONS]
        self.rng = np.random.default_rng(self.seed)

    def __call__(self, pairs):
        pictures, answers = zip(*pairs)
        end = self.processor.tokenizer.eos_token
        texts = [self.prompts[self.rng.integers(len(self.prompts))] + answer + end for answer in answers]
        batch = self.processor(images=list(pictures), text=texts, padding=True, return_tensors="pt")
        labels = torch.full_like(batch["input_ids"], -100)
        # Padding is on the left, so every answer ends with its row; each digit is one byte, the end one token.
        for row, answer in enumerate(answers):
            labels[row, -len(answer) - 1 :] = batch["input_ids"][row, -len(answer) - 1 :]
        return {**batch, "labels": labels}


def training_pictures(size: int, seed: int, curriculum) -> ConcatDataset:
    """`size` pictures in the order of the curriculum."""
    whole = sum(stage.share for stage in curriculum)
    stages = [
        HandwrittenNumbers(
            round(size * stage.share / whole),
            stage.lengths,
            "train",
            seed * len(CURRICULUM) + number,
            stage.coloured,
            stage.largest_margin,
            stage.largest_area,
        )
        for number, stage in enumerate(curriculum)
    ]
    return ConcatDataset(stages)


class TimeLimit(TrainerCallback):
    """Ends the training after `minutes`, whatever step it has reached; tells how much of it is over."""

    def __init__(self, steps: int, minutes: float):
        if steps < 1 or minutes <= 0:
            raise ValueError(f"steps is {steps} and minutes {minutes}; give at least 1 step and more than 0 minutes")
        self.steps = steps
        self.seconds = 60 * minutes
        self.start = time.monotonic()
        self.time_passed = 0.0

    def progress(self, step: int) -> float:
        return min(1.0, max(step / self.steps, self.time_passed))

    def on_step_begin(self, args, state, control, **kwargs):
        passed = torch.tensor((time.monotonic() - self.start) / self.seconds)
        if torch.distributed.is_initialized():
            # All processes take the same rate, and stop at the same step.
            torch.distributed.broadcast(passed, 0)
        self.time_passed = passed.item()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self.progress(state.global_step) >= 1.0


class Muon(torch.optim.AdamW):
    """AdamW; groups with `orthogonal=True` instead take a step of equal size in every direction of their momentum.

    Muon (Jordan et al., 2024): the momentum's singular values are all brought near 1. `torch.optim.Muon` does so in
    bfloat16, which takes a CPU longer than the rest of the training, and leaves vectors to a second optimizer.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group.get("orthogonal"):
                self.step_orthogonally(group["params"], group["lr"], group["weight_decay"])
        return super().step(closure)

    def step_orthogonally(self, matrices: list[torch.Tensor], learning_rate: float, weight_decay: float):
        by_shape = defaultdict(list)
        for matrix in matrices:
            if matrix.grad is not None:
                by_shape[matrix.shape].append(matrix)
        for shape, group in by_shape.items():
            momenta = [self.state[matrix].setdefault("momentum", torch.zeros_like(matrix)) for matrix in group]
            for matrix, momentum in zip(group, momenta):
                momentum.lerp_(matrix.grad, 0.05)
            ahead = torch.stack([matrix.grad.lerp(momentum, 0.95) for matrix, momentum in zip(group, momenta)])
            # The factor gives the entries of an update the size that Adam's have.
            for matrix, update in zip(group, near_orthogonal(ahead) * 0.2 * max(shape) ** 0.5):
                matrix.mul_(1 - learning_rate * weight_decay).sub_(update, alpha=learning_rate)
                matrix.grad = None  # done; what has no gradient, AdamW leaves alone


def near_orthogonal(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """(count, rows, columns), singular values near 1: an odd polynomial drives them there, matrix products alone."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    matrices = matrices.mT if tall else matrices
    matrices = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = matrices @ matrices.mT
        matrices = 3.4445 * matrices + (2.0315 * square @ square - 4.7750 * square) @ matrices
    return matrices.mT if tall else matrices


def learning_rate_factor(progress: float, warmup: float = 0.04) -> float:
    """Linear warm-up, then half a cosine down to one hundredth."""
    if progress < warmup:
        return progress / warmup + 1e-3
    return 0.01 + 0.99 * (1 + np.cos(np.pi * (progress - warmup) / (1 - warmup))) / 2


def train(
    model,
    processor,
    *,
    steps: int,
    minutes: float,
    batch_size: int,
    learning_rate: float,
    seed: int,
    output,
    curriculum,
):
    """Trains in place; the schedule ends after `steps` or `minutes`, whichever comes first. Returns the steps taken."""
    limit = TimeLimit(steps, minutes)
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    groups = [
        {"params": matrices, "weight_decay": 0.05, "orthogonal": True},
        {"params": others, "lr": learning_rate / 2, "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, lr=learning_rate, betas=(0.9, 0.98))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=batch_size // processes,
        max_steps=steps,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=1,  # draws numbers while the process learns from others
        dataloader_prefetch_factor=8,
        seed=seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=training_pictures(steps * batch_size, seed, curriculum),
        data_collator=ReadingCollator(processor, seed + arguments.process_index),
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor(limit.progress(step)))),
        callbacks=[limit],
    )
    trainer.train()
    return trainer.state.global_step


@torch.inference_mode()
def reading_accuracy(model, processor, pictures: HandwrittenNumbers, batch_size: int = 64) -> float:
    """Share of `pictures` whose whole number `generate` reads right."""
    model.eval()
    prompt = prompt_for(processor, QUESTIONS[0])
    right = 0
    for pairs in DataLoader(pictures, batch_size=batch_size, collate_fn=list):
        images, answers = zip(*pairs)
        inputs = processor(images=list(images), text=[prompt] * len(pairs), padding=True, return_tensors="pt")
        written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        texts = processor.batch_decode(written, skip_special_tokens=True)
        right += sum(text == answer for text, answer in zip(texts, answers))
    return right / len(pictures)


def answering(processor) -> GenerationConfig:
    """Greedy; never a placeholder, for which there would be no picture."""
    tokenizer = processor.tokenizer
    marks = ("pad_token", "bos_token", "image_token", "video_token", "vision_start_token", "vision_end_token")
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=LONGEST_ANSWER,
        suppress_tokens=[tokenizer.convert_tokens_to_ids(getattr(tokenizer, mark)) for mark in marks],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the trained model to")
    parser.add_argument(
        "--start-from", type=Path, help="a folder written before: train it on, by the last stage alone"
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), default="lfm3_vl")
    parser.add_argument("--minutes", type=float, default=28.0, help="longest training; evaluation comes on top")
    parser.add_argument(
        "--steps", type=int, default=4300, help="fewer where the time ends before: the last of them matter most"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="pictures a step, of all processes")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--test-pictures", type=int, default=500, help="held-out pictures for each number of digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of each process that trains")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    set_seed(options.seed)
    family = FAMILIES[options.family]
    processor = family.make_processor()
    model = family.make_model(processor)
    if options.start_from is not None:
        model = type(model).from_pretrained(options.start_from, dtype=torch.float32)
    model.generation_config = answering(processor)
    start = time.monotonic()
    steps = train(
        model,
        processor,
        steps=options.steps,
        minutes=options.minutes,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
        output=options.output,
        curriculum=CURRICULUM if options.start_from is None else CURRICULUM[-1:],
    )
    trained = time.monotonic()
    if int(os.environ.get("RANK", 0)) > 0:
        return
    print(f"{model.num_parameters():,} parameters, {steps} steps of {options.batch_size}, {trained - start:.0f} s")

    model.to(torch.bfloat16).save_pretrained(options.output)
    processor.save_pretrained(options.output)
    model = type(model).from_pretrained(options.output, dtype=torch.float32)
    report = {
        "parameters": model.num_parameters(),
        "steps": steps,
        "minutes": round((trained - start) / 60),
        "held_out_per_length": options.test_pictures,
        "exact_match": {},
    }
    for length in TEST_LENGTHS:
        pictures = HandwrittenNumbers(options.test_pictures, (length,), "test", seed=length)
        accuracy = reading_accuracy(model, processor, pictures)
        report["exact_match"][length] = accuracy
        print(f"{length} digits: {accuracy:.1%} of {len(pictures)} whole numbers right", flush=True)
    print(f"evaluation {time.monotonic() - trained:.0f} s")
    (options.output / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
