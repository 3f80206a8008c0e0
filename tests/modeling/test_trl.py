"""TRL's trainers by their own vision paths, unmodified, on all families: supervised and preference tuning."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.nn import functional as F
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from gridtower.modeling.trainable_parts import LORA_TARGETS
from gridtower.processing import processing_deepseek_v4_vl, processing_pixtral

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


# Batches that mix several turns, several images and none


PICTURES = [[picture(16, 8), picture(8, 24)], [], [picture(12, 12)]]
ANSWERS = ["Two of them.", "None!", "One."]


def said(role, *parts):
    """A message; a part that is None is an image."""
    return {"role": role, "content": [{"type": "text", "text": p} if p else {"type": "image"} for p in parts]}


def mixed_conversations():
    turns = [
        [said("user", None, " and ", None, "?"), said("assistant", ANSWERS[0])],
        [said("user", "Nothing here."), said("assistant", ANSWERS[1])],
        [said("user", "One: ", None), said("assistant", ANSWERS[2]), said("user", "More?"), said("assistant", "No.")],
    ]
    return Dataset.from_list([{"messages": row, "images": images} for row, images in zip(turns, PICTURES)])


def mixed_settings(folder, **others):
    # A step so long that all that learns moves.
    return settings(folder, per_device_train_batch_size=3, remove_unused_columns=True, learning_rate=1.0) | others


def adapters(family):
    return LoraConfig(r=2, target_modules="|".join(LORA_TARGETS[family].values()))


def loss_by_hand(model, batch):
    """Cross-entropy of the labelled tokens, and what DeepSeek-V4 is configured to add for balanced experts."""
    balance = getattr(model.config, "router_aux_loss_coef", 0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        outputs = model(**inputs, **({"output_router_logits": True} if balance else {}))
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    return (loss + balance * outputs.aux_loss if balance else loss).item()


def learned(processor, batch):
    """The text whose tokens have labels, row by row; rows were shuffled."""
    return sorted(processor.tokenizer.decode(row[row != -100]) for row in batch["labels"])


def trained(trainer):
    """The trainer after its step, with its batch, the loss by hand and the parameters of before."""
    batch = next(iter(trainer.get_train_dataloader()))
    before, expected = values(trainer.model), loss_by_hand(trainer.model, batch)
    loss = trainer.train().training_loss
    return SimpleNamespace(trainer=trainer, batch=batch, before=before, expected=expected, loss=loss)


def parts_of(family):
    return ("vision_tower", "aligner" if family == "deepseek_v4_vl" else "multi_modal_projector", "language_model")


@pytest.fixture(scope="module", params=["whole", "adapters", "adapters, checkpointed"])
def way(request):
    return request.param


@pytest.fixture(scope="module", params=TINY_MODELS)
def run(request, way, tmp_path_factory):
    """One step; all parameters learn from the answers alone, adapters from all tokens, under a template without marks."""
    family, whole, folder = request.param, way == "whole", tmp_path_factory.mktemp("run")
    model, processor = make(family)
    if not whole:
        processor.chat_template = re.sub(r"\{%\s*(end)?generation\s*%\}", "", processor.chat_template)
    chosen = {"gradient_checkpointing": "checkpointed" in way, "assistant_only_loss": whole}
    trainer = SFTTrainer(
        model,
        SFTConfig(**mixed_settings(folder, save_strategy="steps", save_steps=1, **chosen)),
        train_dataset=mixed_conversations(),
        processing_class=processor,
        peft_config=None if whole else adapters(family),
    )
    run = trained(trainer)
    run.family, run.whole, run.checkpoint = family, whole, folder / "checkpoint-1"
    return run


def test_the_loss_of_mixed_rows_is_the_cross_entropy_of_their_labelled_tokens(run):
    assert len(run.batch["input_ids"]) == 3 and len(run.batch["image_grid_thw"]) == 3
    assert run.loss == pytest.approx(run.expected, abs=1e-5)
    if run.whole:
        eos = run.trainer.processing_class.tokenizer.eos_token
        answers = [f"{answer}{eos}" for answer in ANSWERS]
        assert learned(run.trainer.processing_class, run.batch) == sorted([*answers[:2], f"{answers[2]}No.{eos}"])
    else:
        assert torch.equal(run.batch["labels"] != -100, run.batch["attention_mask"] == 1)


def test_mixed_rows_move_what_may_learn_and_nothing_else(run):
    names = moved(run.trainer.model, run.before)
    # An adapter's other matrix gets its first gradient once `lora_B` is not zero.
    for name, parameter in run.trainer.model.named_parameters():
        assert (name in names) == (parameter.requires_grad and (run.whole or "lora_B" in name)), name
    assert all(any(part in name for name in names) for part in parts_of(run.family))


def test_the_checkpoint_of_a_run_loads_again(run):
    model, processor = make(run.family)
    files = {path.name for path in run.checkpoint.iterdir()}
    if run.whole:
        assert any(name.startswith("modeling_") for name in files)
        loaded = type(model).from_pretrained(run.checkpoint)
    else:
        assert "model.safetensors" not in files
        loaded = PeftModel.from_pretrained(model, run.checkpoint).eval()
    inputs = {name: value for name, value in run.batch.items() if name != "labels"}
    with torch.no_grad():
        expected = run.trainer.model.eval()(**inputs).logits
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=1e-5)
    again = type(processor).from_pretrained(run.checkpoint)
    assert again.chat_template == run.trainer.processing_class.chat_template


@families
def test_completions_alone_are_learned_under_autocast(family, tmp_path):
    model, processor = make(family)
    rows = [
        {"prompt": user("See."), "completion": answer(text), "images": images}
        for text, images in zip(ANSWERS, PICTURES)
    ]
    arguments = SFTConfig(**mixed_settings(tmp_path, bf16=True, gradient_checkpointing=True))
    run = trained(SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=processor))
    assert learned(processor, run.batch) == sorted(f"{text}{processor.tokenizer.eos_token}" for text in ANSWERS)
    assert run.loss == pytest.approx(run.expected, rel=1e-2)
    assert all(any(part in name for name in moved(model, run.before)) for part in parts_of(family))


@families
def test_rows_of_text_alone_train_with_the_processor(family, tmp_path):
    model, processor = make(family)
    turns = user("Nothing here.") + answer("None!")
    arguments = SFTConfig(**mixed_settings(tmp_path, assistant_only_loss=True))
    rows = Dataset.from_list([{"messages": turns}, {"messages": turns * 2}])
    run = trained(SFTTrainer(model, arguments, train_dataset=rows, processing_class=processor))
    assert "pixel_values" not in run.batch
    learnt = f"None!{processor.tokenizer.eos_token}"
    assert learned(processor, run.batch) == [learnt, learnt * 2]
    assert run.loss == pytest.approx(run.expected, abs=1e-5)


@pytest.mark.parametrize(
    "family, template",
    [
        ("deepseek_v4_vl", processing_deepseek_v4_vl.CHAT_TEMPLATE),
        ("pixtral", processing_pixtral.CHAT_TEMPLATE),
        ("pixtral", processing_pixtral.EARLY_CHAT_TEMPLATE),
    ],
)
def test_templates_that_come_with_a_processor_mark_the_answers(family, template):
    _, processor = make(family)
    collator = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True, chat_template=template)
    eos = processor.tokenizer.eos_token
    answers = [f"{text}{eos}" for text in (ANSWERS[0], ANSWERS[1], f"{ANSWERS[2]}{eos}No.")]
    assert learned(processor, collator(list(mixed_conversations()))) == sorted(answers)


@families
def test_a_limit_that_cuts_an_image_is_refused_with_the_row(family, tmp_path):
    model, processor = make(family)
    rows = mixed_conversations()
    arguments = SFTConfig(**mixed_settings(tmp_path, max_length=24))
    trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=processor)
    with pytest.raises(ValueError, match=r"prompt 0 needs \d+ tokens, and a limit of 24 would cut into its images"):
        trainer.data_collator(list(rows))


@families
def test_adapters_begin_where_their_base_is_and_every_answer_has_its_own_pixels(family, tmp_path):
    model, processor = make(family)
    rows = Dataset.from_list(
        [
            {
                "prompt": user("What is it?"),
                "chosen": answer(text),
                "rejected": answer("Three or more."),
                "images": images,
            }
            for text, images in zip(ANSWERS, PICTURES)
        ]
    )
    arguments = DPOConfig(**mixed_settings(tmp_path, router_aux_loss_coef=0.0, gradient_checkpointing=True))
    trainer = DPOTrainer(
        model, args=arguments, train_dataset=rows, processing_class=processor, peft_config=adapters(family)
    )
    batch = trainer.data_collator(list(rows))
    grids = processor.image_processor(sum(PICTURES, []), return_tensors="pt")["image_grid_thw"]
    assert len(batch["input_ids"]) == 6 and torch.equal(batch["image_grid_thw"], grids.repeat(2, 1))
    of_chosen, of_rejected = batch["pixel_values"].chunk(2)
    assert torch.equal(of_chosen, of_rejected) and len(of_chosen) == grids.prod(-1).sum()
    before = values(trainer.model)
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=1e-5)
    names = moved(trainer.model, before)
    assert all("lora_B" in name for name in names)
    assert all(any(part in name for name in names) for part in parts_of(family))
