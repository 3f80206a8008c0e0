"""transformers' Trainer over packed pixels: accumulation and evaluation, in all families."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from ..hub_cards.tiny_models import TINY_MODELS, LabelledPrompts, trainer_settings

families = pytest.mark.parametrize("family", TINY_MODELS)


def make_trainer(family, folder, **settings):
    model, processor = TINY_MODELS[family]()
    prompts = LabelledPrompts(processor)
    return Trainer(
        model,
        TrainingArguments(**trainer_settings(folder, **settings)),
        data_collator=prompts.collate,
        train_dataset=prompts,
        eval_dataset=prompts,
        processing_class=processor,
    )


@families
def test_four_accumulated_single_rows_equal_a_batch_of_four(family, tmp_path):
    updates, losses = [], []
    for batch_size, accumulated in ((4, 1), (1, 4)):
        trainer = make_trainer(
            family, tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulated
        )
        before = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}
        losses.append(trainer.train().training_loss)
        updates.append({name: tensor - before[name] for name, tensor in trainer.model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    whole, accumulated = updates
    learning = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    for name, update in whole.items():
        assert (update.abs().max() > 0) == (name in learning), name
        assert (accumulated[name] - update).abs().max() < 1e-3 * update.abs().max() + 1e-6, name


@families
def test_evaluation_gathers_the_logits_alone(family, tmp_path):
    trainer = make_trainer(family, tmp_path, per_device_eval_batch_size=2)
    prompts = trainer.eval_dataset
    output = trainer.predict(prompts)
    batches = [trainer.data_collator([prompts[index] for index in rows]) for rows in ((0, 1), (2, 3))]
    with torch.no_grad():
        expected = [trainer.model(**batch).logits.numpy() for batch in batches]
    assert output.predictions.shape == (4, max(logits.shape[1] for logits in expected), 300)
    for start, logits in zip((0, 2), expected):
        gathered = output.predictions[start : start + 2, : logits.shape[1]]
        assert abs(gathered - logits).max() < 1e-4
