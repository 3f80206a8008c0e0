"""Parts of a model that learn: whole, by LoRA or not at all, at their own rates, from one table."""

import copy
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import FineGrainedFP8Config, Trainer, TrainingArguments
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from gridtower.configuration.configuration_pixtral import PixtralConfig, PixtralLlavaConfig
from gridtower.modeling.modeling_pixtral import PixtralForConditionalGeneration
from gridtower.modeling.modeling_pixtral_types import PixtralLlavaForConditionalGeneration
from gridtower.modeling.trainable_parts import (
    LORA_TARGETS,
    QUANTIZATION_SKIPS,
    Part,
    parameter_groups,
    parts_summary,
    prepare_parts,
)

from ..hub_cards.tiny_models import TINY_MODELS, LabelledPrompts, trainer_settings
from ..processing.test_processing_pixtral import tiny_model

families = pytest.mark.parametrize("family", TINY_MODELS)
checkpointing = pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
README = Path(__file__).parents[2] / "README.md"
MEMBERS = {
    "tower": r"model\.vision_tower\..*",
    "projector": r"model\.(multi_modal_projector|aligner)\..*|model\.image_(start|pad|newline|end)",
    "text": r"(model\.language_model|lm_head)\..*",
}
FULL, LORA = r"(?!.*\.indexer\.)(?!.*\.lora_).*", r".*\.lora_[AB]\..*"
LAST = r".*\.(layers|blocks)\.LAST\..*|model\.(vision_tower\.norm|language_model\.(norm|embedding_norm|hc_head))\..*"
# A table, and for each part what of it learns, as a regular expression over names.
ALONE = {
    "projector": ({"projector": {"training": "full"}}, {"projector": FULL}),
    "all": ({"tower": {}, "projector": {}, "text": {}}, {"tower": FULL, "projector": FULL, "text": FULL}),
    "last layers": ({"tower": {"last_layers": 1}, "text": Part(last_layers=1)}, {"tower": LAST, "text": LAST}),
    "tower but its first layer": ({"tower": {"last_layers": 1}, "projector": {}}, {"tower": LAST, "projector": FULL}),
}
ADAPTED = {
    "LoRA everywhere": (
        {"tower": {"training": "lora", "rank": 2}, "projector": {"training": "lora"}, "text": {"training": "lora"}},
        {"tower": LORA, "projector": LORA, "text": LORA},
    ),
    "LoRA in the text, projector in full": (
        {"projector": {}, "text": {"training": "lora", "rank": 4, "alpha": 5}},
        {"projector": FULL, "text": LORA},
    ),
    "LoRA in the last layer of the tower, text in full": (
        {"tower": {"training": "lora", "last_layers": 1}, "text": {}},
        {"tower": rf"(?={LORA})({LAST})", "text": FULL},
    ),
    "LoRA in the projector, last layers in full": (
        {"tower": {"last_layers": 1}, "projector": {"training": "lora"}, "text": {"last_layers": 1}},
        {"tower": LAST, "projector": LORA, "text": LAST},
    ),
}
every_table = pytest.mark.parametrize("case", ALONE | ADAPTED)


def make(family):
    """A tiny model in training, and a batch of four rows with and without images."""
    model, processor = TINY_MODELS[family]()
    prompts = LabelledPrompts(processor)
    return model.train(), prompts.collate([prompts[row] for row in range(len(prompts))])


def tie(model):
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    return model


def base_of(model):
    return model.get_base_model() if isinstance(model, PeftModel) else model


def named(model):
    """What learns or could learn, by the names of the model without adapters."""
    return {
        name.replace(".modules_to_save.default", ""): parameter
        for name, parameter in base_of(model).named_parameters()
        if ".original_module." not in name
    }


def expected_names(model, wanted):
    """Of `named(model)`, what `wanted` says."""
    expected = set()
    for part, pattern in wanted.items():
        own = [name for name in named(model) if re.fullmatch(MEMBERS[part], name)]
        last = max(
            (int(index) for name in own for index in re.findall(r"\.(?:layers|blocks)\.(\d+)\.", name)), default=0
        )
        expected |= {name for name in own if re.fullmatch(pattern.replace("LAST", str(last)), name)}
    return expected


def step(model, table, batch, learning_rate=0.1):
    """One step of gradient descent, away from the adapters' zeros, where half of them have no gradient."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    before = {name: parameter.detach().clone() for name, parameter in named(model).items()}
    optimizer = torch.optim.SGD(parameter_groups(model, table, learning_rate))
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name for name, parameter in named(model).items() if not torch.equal(parameter, before[name])}


@torch.no_grad()
def logits(model, batch):
    return model.eval()(**batch).logits


# What learns


@families
@every_table
def test_a_step_changes_what_the_table_says_and_nothing_else(family, case):
    table, wanted = (ALONE | ADAPTED)[case]
    model, batch = make(family)
    model = prepare_parts(model, table)
    expected = expected_names(model, wanted)
    assert {name for name, parameter in named(model).items() if parameter.requires_grad} == expected
    # Far enough that the smallest gradient is not lost in rounding.
    assert step(model, table, batch, learning_rate=1e3) == expected


@families
def test_without_adapters_the_model_stays_itself_and_a_second_table_replaces_the_first(family):
    model, _ = make(family)
    assert prepare_parts(model, {"text": {}}) is model
    prepare_parts(model, {"projector": {}})
    assert {name for name, p in model.named_parameters() if p.requires_grad} == expected_names(
        model, {"projector": FULL}
    )


@families
def test_each_part_has_its_own_rank_and_scale(family):
    table = {"tower": {"training": "lora", "rank": 2}, "text": {"training": "lora", "rank": 6, "alpha": 3}}
    model = prepare_parts(make(family)[0], table)
    found = {}
    for name, module in base_of(model).named_modules():
        if hasattr(module, "lora_A"):
            found.setdefault(name.split(".")[1], set()).add((module.r["default"], module.scaling["default"]))
    assert found == {"vision_tower": {(2, 2.0)}, "language_model": {(6, 0.5)}}


def pixtral_reading_layer(layer, **table):
    config = tiny_model(PixtralLlavaConfig).config
    config.vision_feature_layer = layer
    return prepare_parts(PixtralLlavaForConditionalGeneration(config), table)


def test_layers_behind_the_one_that_pixtral_reads_never_learn():
    model = pixtral_reading_layer(-2, tower={})
    learning = [name for name, p in model.model.vision_tower.named_parameters() if p.requires_grad]
    assert any(".layers.0." in name for name in learning) and not any(".layers.1." in name for name in learning)
    adapted = pixtral_reading_layer(-2, tower={"training": "lora", "last_layers": 1})
    assert all(".layers.0." in name for name, p in adapted.named_parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="last_layers is 2, and 1 layers"):
        pixtral_reading_layer(-2, tower={"last_layers": 2})


@families
@pytest.mark.parametrize(
    "table", [{"text": {}}, {"tower": {"training": "lora"}, "text": {}}], ids=["full", "beside LoRA"]
)
def test_tied_weights_stay_tied(family, table):
    model, batch = make(family)
    model = prepare_parts(tie(model), table)
    step(model, table, batch)
    merged = model.merge_and_unload() if isinstance(model, PeftModel) else model
    assert merged.lm_head.weight is merged.get_input_embeddings().weight
    assert merged.config.tie_word_embeddings


# Learning rates


@families
def test_groups_hold_all_that_learns_once(family):
    table = {"tower": {"last_layers": 1}, "projector": {}, "text": {"training": "lora"}}
    model = prepare_parts(make(family)[0], table)
    grouped = [parameter for group in parameter_groups(model, table, 1e-3, 0.1) for parameter in group["params"]]
    learning = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert len(grouped) == len(learning) and set(grouped) == learning


@families
def test_groups_have_the_rate_of_their_part_and_vectors_do_not_decay(family):
    table = {"tower": {"learning_rate": 1e-5}, "projector": {"learning_rate": 2}, "text": {"training": "lora"}}
    model = prepare_parts(make(family)[0], table)
    groups = torch.optim.AdamW(parameter_groups(model, table, 1e-3, 0.1)).param_groups
    assert {(group["part"], group["lr"]) for group in groups} == {("tower", 1e-5), ("projector", 2), ("text", 1e-3)}
    parts = {id(p): part for part in MEMBERS for name, p in named(model).items() if re.fullmatch(MEMBERS[part], name)}
    for group in groups:
        for parameter in group["params"]:
            assert parts[id(parameter)] == group["part"]
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)


def test_groups_of_another_table_are_refused():
    model = prepare_parts(make("pixtral")[0], {"projector": {}})
    with pytest.raises(ValueError, match="training of the tower is 'full' in the table.*does not learn"):
        parameter_groups(model, {"tower": {}, "projector": {}}, 1e-3)
    with pytest.raises(ValueError, match="training of the projector is 'frozen' in the table.*it learns"):
        parameter_groups(model, {"text": {}}, 1e-3)


# The summary


def rows(summary):
    cells = [re.split(r" {2,}", line.strip()) for line in summary.splitlines()[1:]]
    return {
        name: (int(size.replace(",", "")), int(trained.replace(",", "")), *rest)
        for name, size, trained, *rest in cells
    }


@families
@pytest.mark.parametrize("table", [{"projector": {}}, {"projector": {}, "text": {"training": "lora"}}])
def test_the_summary_counts_every_parameter_once(family, table):
    model = tie(make(family)[0])
    size = sum(parameter.numel() for parameter in model.parameters())
    projector = sum(p.numel() for name, p in model.named_parameters() if re.fullmatch(MEMBERS["projector"], name))
    model = prepare_parts(model, table)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    found = rows(parts_summary(model))
    assert found["projector"] == (projector, projector, "100.00%", "float32")
    assert found["tower"][1] == 0 and found["text"][1] == adapters
    assert found["total"][:2] == (size + adapters, projector + adapters)
    assert sum(found[part][0] for part in MEMBERS) == found["total"][0]


def test_the_summary_tells_dtypes_apart():
    model = make("deepseek_v4_vl")[0].bfloat16()
    model.model.vision_tower.norm.float()
    found = rows(parts_summary(model))
    assert found["tower"][3] == "bfloat16, float32" and found["text"][3] == "bfloat16"


def test_parameters_that_zero3_has_emptied_count_and_decay_as_before():
    table = {"projector": {}, "text": {}}
    model = prepare_parts(make("lfm3_vl")[0], table)

    def told():
        groups = parameter_groups(model, table, 1e-3, 0.1)
        return parts_summary(model), [(group["weight_decay"], len(group["params"])) for group in groups]

    before = told()
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert told() == before


# Adapters on disk


class Adapted(NamedTuple):
    """A model trained for a step beside its base, and their logits on `batch`."""

    untrained: nn.Module
    before: torch.Tensor
    trained: PeftModel
    after: torch.Tensor
    batch: dict


def train_adapted(untrained, table, batch):
    before = logits(untrained, batch)
    model = prepare_parts(copy.deepcopy(untrained).train(), table)
    step(model, table, batch)
    return Adapted(untrained, before, model, logits(model, batch), batch)


@pytest.fixture(scope="module", params=[(family, case) for family in TINY_MODELS for case in ADAPTED], ids=" ".join)
def adapted(request):
    family, case = request.param
    untrained, batch = make(family)
    return train_adapted(untrained, ADAPTED[case][0], batch)


def test_an_adapter_folder_holds_all_that_has_learned(adapted, tmp_path):
    assert (adapted.after - adapted.before).abs().max() > 1e-3
    adapted.trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(adapted.untrained), tmp_path)
    torch.testing.assert_close(logits(loaded, adapted.batch), adapted.after)


def test_without_its_adapter_a_trained_model_is_the_one_before(adapted):
    with adapted.trained.disable_adapter():
        torch.testing.assert_close(logits(adapted.trained, adapted.batch), adapted.before)
    torch.testing.assert_close(logits(adapted.trained, adapted.batch), adapted.after)


def test_merging_leaves_the_base_class_with_the_same_logits(adapted):
    merged = copy.deepcopy(adapted.trained).merge_and_unload()
    assert type(merged) is type(adapted.untrained)
    assert set(merged.state_dict()) == set(adapted.untrained.state_dict())
    torch.testing.assert_close(logits(merged, adapted.batch), adapted.after, atol=1e-4, rtol=1e-4)


@families
def test_an_adapter_folder_of_tied_weights_gives_tied_weights(family, tmp_path):
    untrained, batch = make(family)
    adapted = train_adapted(tie(untrained), {"tower": {"training": "lora"}, "text": {}}, batch)
    adapted.trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(untrained, tmp_path)
    torch.testing.assert_close(logits(loaded, batch), adapted.after)
    merged = loaded.merge_and_unload()
    assert merged.lm_head.weight is merged.get_input_embeddings().weight


@families
def test_from_pretrained_takes_an_adapter_folder_for_a_model(family, tmp_path):
    model, batch = make(family)
    model.save_pretrained(tmp_path / "base")
    untrained = type(model).from_pretrained(tmp_path / "base")
    adapted = train_adapted(untrained, {"projector": {}, "text": {"training": "lora"}}, batch)
    adapted.trained.save_pretrained(tmp_path / "adapter")
    loaded = type(model).from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, batch), adapted.after)


@families
def test_a_trainer_checkpoint_of_parts_goes_on_where_it_stopped(family, tmp_path):
    table = {"projector": {"learning_rate": 0.05}, "text": {"training": "lora", "rank": 4}}
    model, processor = TINY_MODELS[family]()
    prompts = LabelledPrompts(processor)
    untrained = copy.deepcopy(model)

    def make_trainer(model, steps):
        settings = trainer_settings(tmp_path, max_steps=steps, save_strategy="steps", save_steps=1)
        optimizer = torch.optim.AdamW(parameter_groups(model, table, 0.01))
        return Trainer(model, TrainingArguments(**settings), prompts.collate, prompts, optimizers=(optimizer, None))

    trainer = make_trainer(prepare_parts(model, table), 2)
    trainer.train()
    resumed = make_trainer(prepare_parts(copy.deepcopy(untrained), table), 2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    batch = prompts.collate([prompts[row] for row in range(4)])
    expected = logits(trainer.model, batch)
    torch.testing.assert_close(logits(resumed.model, batch), expected)
    loaded = PeftModel.from_pretrained(untrained, tmp_path / "checkpoint-2")
    torch.testing.assert_close(logits(loaded, batch), expected)


def test_parameters_without_a_module_of_their_own_are_saved_as_safetensors_only(tmp_path):
    model, _ = make("deepseek_v4_vl")
    model = prepare_parts(model, {"projector": {}, "text": {"training": "lora"}})
    with pytest.raises(ValueError, match="image_start.*leave safe_serialization on"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)
    assert "base_model.model.model.image_start" in load_file(tmp_path / "adapter_model.safetensors")


# Graphs


def checkpoint(model, reentrant):
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()


def gradients(model):
    return {name: p.grad.clone() for name, p in named(model).items() if p.grad is not None}


@families
@checkpointing
@pytest.mark.parametrize("table", [{"projector": {}}, {"projector": {}, "text": {"training": "lora"}}])
def test_a_frozen_tower_builds_no_graph(family, reentrant, table):
    model, batch = make(family)
    model = prepare_parts(model, table)
    checkpoint(base_of(model), reentrant)
    outputs = base_of(model).get_image_features(batch["pixel_values"], batch["image_grid_thw"])
    assert not outputs.last_hidden_state.requires_grad
    assert all(features.requires_grad for features in outputs.pooler_output)
    model(**batch).loss.backward()
    found = {name for name, gradient in gradients(model).items() if gradient.abs().max() > 0}
    projector = expected_names(model, {"projector": FULL})
    assert found >= projector and not {name for name in found - projector if "lora_" not in name}


@families
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_adapters_of_the_tower_learn_the_same_under_checkpointing(family, reentrant):
    model, batch = make(family)
    model = prepare_parts(model, {"tower": {"training": "lora", "rank": 2}})
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model(**batch).loss.backward()
    expected = gradients(model)
    assert expected.keys() == expected_names(model, {"tower": LORA})
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    model.zero_grad()
    checkpoint(base_of(model), reentrant)
    model(**batch).loss.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4)


# Documented names


def test_the_readme_documents_the_patterns():
    columns = {}
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][1:-1]
        if cells[:1] in (["part"], ["tower"], ["projector"], ["text"]) and len(cells) == 4:
            columns[cells[0]] = [cell.strip("`").replace(r"\|", "|") for cell in cells[1:]]
    names = {"LFM3-VL": "lfm3_vl", "Pixtral": "pixtral", "DeepSeek-V4": "deepseek_v4_vl"}
    documented = {names[title]: {} for title in columns.pop("part")}
    for part, patterns in columns.items():
        for family, pattern in zip(documented, patterns):
            documented[family][part] = pattern
    assert documented == LORA_TARGETS


@families
def test_the_patterns_are_what_the_table_uses(family):
    ours = prepare_parts(make(family)[0], {part: {"training": "lora", "rank": 2} for part in MEMBERS})
    plain = LoraConfig(r=2, target_modules="|".join(f"({pattern})" for pattern in LORA_TARGETS[family].values()))
    assert set(ours.state_dict()) == set(get_peft_model(make(family)[0], plain).state_dict())


# Quantization


def is_linear(module):
    return type(module) is nn.Linear


@families
@pytest.mark.parametrize("part_of", [lambda model: model, lambda model: model.model], ids=["with head", "without"])
def test_quantizers_skip_all_but_the_text_model(family, part_of):
    model = part_of(make(family)[0])
    for name, module in model.named_modules():
        if is_linear(module):
            assert should_convert_module(name, QUANTIZATION_SKIPS) == ("language_model" in name), name


@families
def test_quantizers_skip_at_least_what_they_would_by_themselves(family):
    model = make(family)[0]
    for name in get_keys_to_not_convert(model):
        module = model.get_submodule(name)
        assert not is_linear(module) or not should_convert_module(name, QUANTIZATION_SKIPS)


@families
def test_a_quantizer_that_is_given_the_list_leaves_tower_projector_and_head(family):
    model = make(family)[0].to("meta")
    quantization = FineGrainedFP8Config(modules_to_not_convert=QUANTIZATION_SKIPS)
    AutoHfQuantizer.from_config(quantization, pre_quantized=True).preprocess_model(model)
    replaced = {name for name, module in model.named_modules() if type(module).__name__ == "FP8Linear"}
    assert replaced and all(name.startswith("model.language_model.") for name in replaced)


def test_quantized_weights_are_not_trained_in_full():
    model, _ = make("pixtral")
    layer = model.model.language_model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"text is to be trained in full, and .*q_proj.weight is quantized.*by LoRA"):
        prepare_parts(model, {"text": {}})
    prepare_parts(model, {"projector": {}})


# Mistakes


@pytest.mark.parametrize(
    "table, message",
    [
        ({"vision": {}}, r"names \['vision'\]; the parts are tower, projector, text"),
        ("tower", "'tower'; give a mapping"),
        ({}, "nothing learns"),
        ({"tower": {"training": "frozen"}}, "nothing learns"),
        ({"tower": None}, "tower is None; give a Part, or a mapping"),
        ({"tower": {"lr": 1.0}}, r"tower has \['lr'\]; a part has training, learning_rate"),
        ({"tower": {"training": "LoRA"}}, "tower: training is 'LoRA'; give one of full, lora, frozen"),
        ({"text": {"training": "lora", "rank": 0}}, "text: rank is 0; give a whole number of at least 1"),
        ({"text": {"training": "lora", "rank": True}}, "text: rank is True"),
        ({"text": {"training": "lora", "alpha": 0}}, "text: alpha is 0; give a number above 0"),
        ({"text": {"training": "lora", "dropout": 1}}, "text: dropout is 1; give a number from 0 to below 1"),
        ({"text": {"learning_rate": 0}}, "text: learning_rate is 0; give a number above 0"),
        ({"text": {"learning_rate": float("nan")}}, "text: learning_rate is nan"),
        ({"text": {"last_layers": 0}}, "text: last_layers is 0; give a whole number"),
        (
            {"text": {}, "tower": {"training": "frozen", "learning_rate": 1.0}},
            "tower: learning_rate is 1.0 and training",
        ),
        ({"text": {}, "tower": {"training": "frozen", "last_layers": 1}}, "last_layers is 1 and training 'frozen'"),
        ({"text": {"rank": 8}}, "text: rank is 8 and training 'full', .*leave it out, or give training 'lora'"),
        (
            {"projector": {"last_layers": 1}},
            "projector.last_layers is 1, and the projector has no layers; leave it out",
        ),
        ({"text": {"last_layers": 3}}, "text.last_layers is 3, and 2 layers are in use; give 1 to 2"),
        (
            {"text": {"training": "lora"}, "tower": {"training": "lora", "dropout": 0.1}},
            r"dropout differs .*'tower': 0.1, 'text': 0.0.*give the same",
        ),
    ],
)
def test_a_wrong_table_changes_nothing(table, message):
    model, _ = make("pixtral")
    with pytest.raises(ValueError, match=message):
        prepare_parts(model, table)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_number_that_yaml_reads_as_text_is_explained():
    table = yaml.safe_load("projector: {training: full, learning_rate: 1e-4}")
    with pytest.raises(ValueError, match="projector: learning_rate is '1e-4'; .*in YAML write 1.0e-4"):
        prepare_parts(make("pixtral")[0], table)


def test_lora_that_hits_no_module_is_refused():
    model, _ = make("lfm3_vl")
    layers = model.model.language_model.layers
    layers[0], layers[2] = layers[2], layers[0]  # the last is a convolution now
    with pytest.raises(
        ValueError, match=r"none of the text's modules .*\[qkv\]_proj in layers \[2\]; give more last_layers"
    ):
        prepare_parts(model, {"text": {"training": "lora", "last_layers": 1}})
    prepare_parts(model, {"text": {"training": "lora", "last_layers": 2}})


def test_a_model_of_unknown_parts_and_one_with_adapters_are_refused():
    model = prepare_parts(make("pixtral")[0], {"text": {"training": "lora"}})
    with pytest.raises(ValueError, match="has adapters already"):
        prepare_parts(model, {"text": {}})
    with pytest.raises(ValueError, match="PixtralModel is not a model whose parts are known.*PixtralForCond"):
        prepare_parts(make("pixtral")[0].model, {"text": {}})


def test_a_parameter_of_no_part_is_named():
    class Longer(PixtralForConditionalGeneration):
        def __init__(self, config):
            super().__init__(config)
            self.more = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="more.weight belongs to no part of a Longer"):
        prepare_parts(Longer(tiny_model(PixtralConfig).config), {"text": {}})
