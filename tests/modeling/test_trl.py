"""TRL's trainers by their own vision paths, unmodified, on all families: supervised and preference tuning."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from gridtower.modeling.trainable_parts import LORA_TARGETS

from ..hub_cards.tiny_models import TINY_MODELS, picture, trainer_settings
from ..processing.test_collation import PLACES

families = pytest.mark.parametrize("family", TINY_MODELS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}@CONTENT@{{ eos_token }}{% endgeneration %}"
    "{% else %}@CONTENT@{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTENT = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}@IMAGE@{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def make(family):
    model, processor = TINY_MODELS[family]()
    place = PLACES.get(family, processor.image_token)
    processor.chat_template = TEMPLATE.replace("@CONTENT@", CONTENT).replace("@IMAGE@", place)
    return model, processor


def user(text):
    return [{"role": "user", "content": text}]


def answer(text):
    return [{"role": "assistant", "content": text}]


def settings(folder, **others):
    shared = trainer_settings(folder, max_length=None, per_device_train_batch_size=2, bf16=False)
    return shared | {"gradient_checkpointing": False} | others


def conversations():
    images = [[picture(16, 8)], [picture(8, 24), picture(8, 8)]]
    messages = [user("what is it") + answer("a cat"), user("and these") + answer("no words")]
    return Dataset.from_list([{"messages": one, "images": two} for one, two in zip(messages, images)])


def moved(model, before):
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@families
@pytest.mark.parametrize("checkpointing", [False, True])
def test_supervised_tuning_learns_the_answers_alone(family, checkpointing, tmp_path):
    model, processor = make(family)
    arguments = SFTConfig(**settings(tmp_path, assistant_only_loss=True, gradient_checkpointing=checkpointing))
    trainer = SFTTrainer(model, arguments, train_dataset=conversations(), processing_class=processor)
    batch = trainer.data_collator(list(conversations()))
    learned = [processor.tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    assert learned == [text + processor.tokenizer.eos_token for text in ("a cat", "no words")]
    with torch.no_grad():
        expected = model(**batch).loss.item()
    before = values(model)
    assert trainer.train().training_loss == pytest.approx(expected, abs=1e-5)
    assert moved(model, before) == {name for name, p in model.named_parameters() if p.requires_grad}


@families
def test_supervised_tuning_through_peft_moves_the_adapters_alone(family, tmp_path):
    model, processor = make(family)
    targets = LORA_TARGETS[family]
    adapter = LoraConfig(r=2, target_modules=f"({targets['tower']})|({targets['text']})")
    trainer = SFTTrainer(
        model,
        SFTConfig(**settings(tmp_path)),
        train_dataset=conversations(),
        processing_class=processor,
        peft_config=adapter,
    )
    before = values(trainer.model)
    trainer.train()
    names = moved(trainer.model, before)
    assert names == {name for name in before if "lora_B" in name}
    assert any("vision_tower" in name for name in names) and any("language_model" in name for name in names)


@families
def test_preference_tuning_begins_at_the_logarithm_of_two_and_moves_the_policy(family, tmp_path):
    model, processor = make(family)
    rows = [
        {
            "prompt": user("what is it"),
            "chosen": answer("a cat"),
            "rejected": answer("no"),
            "images": [picture(16, 8)],
        },
        {
            "prompt": user("and these"),
            "chosen": answer("words"),
            "rejected": answer("a a"),
            "images": [picture(8, 24), picture(8, 8)],
        },
    ]
    # Experts would add their balancing loss.
    arguments = DPOConfig(**settings(tmp_path, router_aux_loss_coef=0.0 if family == "deepseek_v4_vl" else None))
    # Left to itself, TRL would load the reference anew by the class name in its configuration: transformers' own.
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )
    before = values(model)
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=1e-5)
    assert moved(model, before)
