"""Several conversations in one row without padding: each token sees its own conversation alone."""

import pytest
import torch

from gridtower.processing.collation import packed

from ..hub_cards.tiny_models import TINY_MODELS, LabelledPrompts


def single_rows(processor):
    prompts = LabelledPrompts(processor)
    return [prompts.collate([prompts[index]]) for index in range(len(prompts))]


@pytest.mark.parametrize("family", TINY_MODELS)
def test_packed_rows_give_the_logits_losses_and_gradients_of_the_rows_alone(family):
    model, processor = TINY_MODELS[family]()
    model.train()
    rows = single_rows(processor)
    batch, lengths = packed(rows), [row["input_ids"].shape[1] for row in rows]
    count = (batch["labels"] != -100).sum()

    alone = [model(**row, num_items_in_batch=count) for row in rows]
    sum(output.loss for output in alone).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    together = model(**batch, num_items_in_batch=count)
    together.loss.backward()
    torch.testing.assert_close(together.loss, sum(output.loss for output in alone), rtol=1e-5, atol=1e-5)
    for output, logits in zip(alone, together.logits.split(lengths, dim=1)):
        torch.testing.assert_close(logits, output.logits, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_packed_rows_are_never_cached(family):
    model, processor = TINY_MODELS[family]()
    batch = packed(single_rows(processor))
    assert model(**batch).cache is None
    with pytest.raises(ValueError, match="can't be cached; pass use_cache=False"):
        model(**batch, use_cache=True)
