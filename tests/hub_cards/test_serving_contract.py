"""What vLLM's transformers backend asks of a folder, checked without vLLM.

To try it where vLLM runs: `vllm serve DIR --model-impl transformers --trust-remote-code`.
"""

import pytest
from transformers import AutoConfig, AutoModel, AutoProcessor, PreTrainedModel

from gridtower import export

from .tiny_models import TINY_MODELS, picture


@pytest.fixture(scope="module", params=TINY_MODELS)
def served(request, tmp_path_factory):
    """Model without head and processor, as a server makes them of an exported folder."""
    folder = tmp_path_factory.mktemp(request.param)
    for part in TINY_MODELS[request.param]():
        part.save_pretrained(folder / "model")
    out = export(folder / "model", folder / "served")
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    model = AutoModel.from_config(config, trust_remote_code=True)
    return model, AutoProcessor.from_pretrained(out, trust_remote_code=True)


def test_every_part_takes_another_attention_backend(served):
    model, _ = served
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    text = [part for part in parts if part is model.language_model]
    assert all(part._supports_attention_backend for part in parts if part not in text)
    # DeepSeek-V4's text model has one attention of its own, in transformers as well.
    assert text[0]._supports_attention_backend or model.config.model_type == "deepseek_v4"


def test_tower_and_text_model_are_found_by_name_and_have_plans(served):
    model, _ = served
    assert model.vision_tower.config is model.config.vision_config
    assert [rule for rule in model.tp_plan if rule.startswith("vision_tower.")]
    assert [rule for rule in model.tp_plan if rule.startswith("language_model.")]
    # One list of layers is cut into stages; the tower stays with the first.
    assert [name for name in model.pp_plan if name.endswith("layers")] == ["language_model.layers"]
    assert model.pp_plan.keys() <= {name for name, _ in model.named_modules()}


def test_tokens_are_counted_for_sizes_of_1_to_10_000(served):
    _, processor = served
    sizes = [(1, 1), (1, 10_000), (10_000, 1), (10_000, 10_000), (64, 48)]
    counts = processor._get_num_multimodal_tokens(image_sizes=sizes)
    assert len(counts["num_image_tokens"]) == len(counts["num_image_patches"]) == len(sizes)
    assert min(counts["num_image_tokens"]) > 0
    inputs = processor(text=processor.image_token, images=picture(64, 48), return_tensors="pt")
    assert counts["num_image_patches"][-1] == len(inputs["pixel_values"])


def test_all_that_a_processor_emits_is_named_beforehand(served):
    _, processor = served
    inputs = processor(text=processor.image_token, images=picture(64, 48), return_tensors="pt")
    of_parts = {name for part in (processor.image_processor, processor.tokenizer) for name in part.model_input_names}
    assert set(inputs) <= of_parts
    assert hasattr(processor, "replace_image_token")
