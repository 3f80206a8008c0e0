"""TRL's SFTTrainer and DPOTrainer on all families, as they are installed: several images a row or none, adapters or all."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.nn import functional as F
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from gridtower.processing.processing_pixtral import CHAT_TEMPLATE as PIXTRAL_TEMPLATE

from ..hub_cards.tiny_models import TINY_MODELS, picture, trainer_settings
from .test_field_cases import documented_targets

families = pytest.mark.parametrize("family", TINY_MODELS)
LFM3_VL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content[0].text }}{{ eos_token }}{% endgeneration %}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# DeepSeek-V4's processor brings its own.
TEMPLATES = {"lfm3_vl": LFM3_VL_TEMPLATE, "pixtral": PIXTRAL_TEMPLATE}
PICTURES = [[picture(16, 8), picture(8, 24)], [], [picture(12, 12)]]


def said(role, *parts):
    """A message; a part that is None is an image."""
    return {"role": role, "content": [{"type": "text", "text": p} if p else {"type": "image"} for p in parts]}


CONVERSATIONS = [
    [said("user", None, " and ", None, "?"), said("assistant", "Two of them.")],
    [said("user", "Nothing here."), said("assistant", "None!")],
    [said("user", "One: ", None), said("assistant", "First"), said("user", "More?"), said("assistant", "Second")],
]
ANSWERS = [["Two of them."], ["None!"], ["First", "Second"]]


def model_and_processor(family, generation_markers=True):
    model, processor = TINY_MODELS[family]()
    processor.chat_template = TEMPLATES.get(family, processor.chat_template)
    if not generation_markers:
        processor.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", processor.chat_template)
    return model, processor


def settings(kind, folder, **given):
    """TRL's own, but for a step of gradient descent with all rows on the CPU, in float32."""
    shared = {"per_device_train_batch_size": 3, "max_length": None, "bf16": False, "remove_unused_columns": True}
    return kind(**trainer_settings(folder, **shared | given))


def adapters(family):
    return LoraConfig(r=2, target_modules="|".join(documented_targets(family).values()))


def loss_by_hand(model, batch):
    """Cross-entropy of the labelled tokens, and what DeepSeek-V4 is configured to add for balanced experts."""
    balance = getattr(model.config, "router_aux_loss_coef", 0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        outputs = model(**inputs, **({"output_router_logits": True} if balance else {}))
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    return (loss + balance * outputs.aux_loss if balance else loss).item()


def copied(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model, before):
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def learned(processor, batch):
    """The text whose tokens have labels, row by row."""
    return [processor.tokenizer.decode(row[row != -100]) for row in batch["labels"]]


def trained(trainer):
    """The trainer after its step, with its batch, the loss by hand and the parameters of before."""
    batch = next(iter(trainer.get_train_dataloader()))
    before, expected = copied(trainer.model), loss_by_hand(trainer.model, batch)
    loss = trainer.train().training_loss
    return SimpleNamespace(trainer=trainer, batch=batch, before=before, expected=expected, loss=loss)


# Supervised fine-tuning


@pytest.fixture(scope="module", params=["whole", "whole, checkpointed", "adapters", "adapters, checkpointed"])
def way(request):
    return request.param


@pytest.fixture(scope="module", params=TINY_MODELS)
def run(request, way, tmp_path_factory):
    """One step on conversations; all parameters learn from the answers alone, adapters from everything."""
    family, whole = request.param, way.startswith("whole")
    model, processor = model_and_processor(family, generation_markers=whole)
    folder = tmp_path_factory.mktemp("run")
    arguments = settings(
        SFTConfig, folder, gradient_checkpointing="checkpointed" in way, assistant_only_loss=whole,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    rows = [{"messages": turns, "images": pictures} for turns, pictures in zip(CONVERSATIONS, PICTURES)]
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        peft_config=None if whole else adapters(family),
    )
    run = trained(trainer)
    run.family, run.whole, run.checkpoint = family, whole, folder / "checkpoint-1"
    return run


def test_the_loss_is_the_cross_entropy_of_the_labelled_tokens(run):
    assert len(run.batch["input_ids"]) == 3 and len(run.batch["image_grid_thw"]) == 3
    assert run.loss == pytest.approx(run.expected, abs=1e-5)


def test_answers_alone_are_learned_where_the_template_marks_them(run):
    if run.whole:
        eos = run.trainer.processing_class.tokenizer.eos_token
        expected = {"".join(f"{answer}{eos}" for answer in answers) for answers in ANSWERS}
        assert set(learned(run.trainer.processing_class, run.batch)) == expected
    else:
        assert torch.equal(run.batch["labels"] != -100, run.batch["attention_mask"] == 1)


def test_what_may_learn_moves_and_nothing_else(run):
    may_learn = {name for name, parameter in run.trainer.model.named_parameters() if parameter.requires_grad}
    if run.whole:
        assert moved(run.trainer.model, run.before) == may_learn
        return
    # The other matrix of an adapter gets its first gradient once this one is not zero.
    assert moved(run.trainer.model, run.before) == {name for name in may_learn if "lora_B" in name}
    projector = "aligner" if run.family == "deepseek_v4_vl" else "multi_modal_projector"
    for part in ("vision_tower", projector, "language_model"):
        assert any(part in name for name in may_learn)


def test_the_checkpoint_loads_again(run):
    model, processor = model_and_processor(run.family)
    if run.whole:
        loaded = type(model).from_pretrained(run.checkpoint)
        names = {path.name for path in run.checkpoint.iterdir()}
        assert any(name.startswith("modeling_") for name in names)
    else:
        assert not (run.checkpoint / "model.safetensors").exists()
        loaded = PeftModel.from_pretrained(model, run.checkpoint).eval()
    inputs = {name: value for name, value in run.batch.items() if name != "labels"}
    with torch.no_grad():
        expected = run.trainer.model.eval()(**inputs).logits
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=1e-5)
    again = type(processor).from_pretrained(run.checkpoint)
    assert again.chat_template == run.trainer.processing_class.chat_template


@families
def test_prompts_and_completions_train_as_trl_is_set_up(family, tmp_path):
    """Completions alone are learned, under bfloat16 autocast and gradient checkpointing."""
    model, processor = model_and_processor(family, generation_markers=False)
    rows = [
        {"prompt": [{"role": "user", "content": "See."}], "completion": [{"role": "assistant", "content": answer}]}
        for answer in ("Two of them.", "None!", "One")
    ]
    rows = Dataset.from_list([row | {"images": pictures} for row, pictures in zip(rows, PICTURES)])
    arguments = settings(SFTConfig, tmp_path, bf16=True)
    assert arguments.gradient_checkpointing
    run = trained(SFTTrainer(model, arguments, train_dataset=rows, processing_class=processor))
    eos = processor.tokenizer.eos_token
    assert set(learned(processor, run.batch)) == {f"{answer}{eos}" for answer in ("Two of them.", "None!", "One")}
    assert run.loss == pytest.approx(run.expected, rel=1e-2)
    assert moved(model, run.before)


@families
def test_rows_of_text_alone_train_with_the_processor(family, tmp_path):
    model, processor = model_and_processor(family)
    rows = Dataset.from_list([{"messages": turns} for turns in ([*CONVERSATIONS[1]], [*CONVERSATIONS[1]] * 2)])
    arguments = settings(SFTConfig, tmp_path, assistant_only_loss=True)
    run = trained(SFTTrainer(model, arguments, train_dataset=rows, processing_class=processor))
    assert "pixel_values" not in run.batch
    eos = processor.tokenizer.eos_token
    assert set(learned(processor, run.batch)) == {f"None!{eos}", f"None!{eos}None!{eos}"}
    assert run.loss == pytest.approx(run.expected, abs=1e-5)


@families
def test_a_limit_that_cuts_an_image_is_refused_with_the_row(family, tmp_path):
    model, processor = model_and_processor(family)
    rows = [{"messages": turns, "images": pictures} for turns, pictures in zip(CONVERSATIONS, PICTURES)]
    arguments = settings(SFTConfig, tmp_path, max_length=12)
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=processor)
    with pytest.raises(ValueError, match=r"prompt 0 needs \d+ tokens, and a limit of 12 would cut into its images"):
        trainer.data_collator(rows)


# Preferences

PREFERENCES = Dataset.from_list(
    [
        {
            "prompt": [said("user", *[None] * len(pictures), "What is it?")],
            "chosen": [said("assistant", "Two.")],
            "rejected": [said("assistant", "Three or more.")],
            "images": pictures,
        }
        for pictures in PICTURES
    ]
)


def preference_trainer(family, folder, **given):
    model, processor = model_and_processor(family)
    arguments = settings(DPOConfig, folder)
    return DPOTrainer(model, args=arguments, train_dataset=PREFERENCES, processing_class=processor, **given)


@families
def test_chosen_and_rejected_rows_have_their_own_pixels_and_grids(family, tmp_path):
    trainer = preference_trainer(family, tmp_path, peft_config=adapters(family))
    batch = trainer.data_collator([PREFERENCES[index] for index in range(3)])
    assert len(batch["input_ids"]) == 6
    for name in ("pixel_values", "image_grid_thw"):
        chosen, rejected = batch[name].chunk(2)
        assert torch.equal(chosen, rejected)
    grids = trainer.processing_class.image_processor(sum(PICTURES, []), return_tensors="pt")["image_grid_thw"]
    assert torch.equal(batch["image_grid_thw"], grids.repeat(2, 1))


@families
@pytest.mark.parametrize("reference", ["given", "without adapters"])
def test_preferences_are_learned_from_where_policy_and_reference_agree(family, reference, tmp_path):
    options = {
        "given": {"ref_model": TINY_MODELS[family]()[0]},
        "without adapters": {"peft_config": adapters(family)},
    }[reference]
    trainer = preference_trainer(family, tmp_path, **options)
    before = copied(trainer.model)
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=1e-5)
    names = moved(trainer.model, before)
    projector = "aligner" if family == "deepseek_v4_vl" else "multi_modal_projector"
    for part in ("vision_tower", projector, "language_model"):
        assert any(part in name for name in names), part
    if reference == "without adapters":
        assert all("lora_B" in name for name in names)
