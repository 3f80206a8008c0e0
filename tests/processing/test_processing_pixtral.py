"""Prompts with images become the inputs that the published processor makes, and mistakes are named."""

import base64
import io
import json

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    LlavaForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    pipeline,
)

from gridtower.configuration.configuration_pixtral import PixtralConfig, PixtralLlavaConfig
from gridtower.modeling.modeling_pixtral import PixtralForConditionalGeneration
from gridtower.processing.image_processing_pixtral import PixtralImageProcessor, PixtralImageProcessorPil
from gridtower.processing.processing_pixtral import OLD_CONTROL_TOKENS, PixtralProcessor

from .conftest import run_without_torchvision

IMAGE = "[IMG]"
# Ids as in the published tokenizers: [IMG] 10, <pad> 11, [IMG_BREAK] 12, [IMG_END] 13.
CONTROL_TOKENS = OLD_CONTROL_TOKENS[:14]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[INST]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}[/INST]{% endfor %}"
)
PARAMS = {
    "dim": 48, "n_layers": 2, "head_dim": 16, "hidden_dim": 64, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 1e6,
    "norm_eps": 1e-5, "vocab_size": 300,
    "vision_encoder": {
        "hidden_size": 32, "num_channels": 3, "max_image_size": 64, "image_size": 48, "patch_size": 4,
        "rope_theta": 10000.0, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "adapter_bias": True, "image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13,
    },
}  # fmt: skip


def assert_equal_features(ours, theirs):
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def image_tokens(processor, features):
    """Image, break and end tokens in each row."""
    return torch.isin(features["input_ids"], torch.tensor(processor.image_token_ids)).sum(dim=1).tolist()


def tokens_of(features, merge=1):
    """Tokens that each image needs."""
    return [(rows // merge) * (cols // merge + 1) for _, rows, cols in features["image_grid_thw"].tolist()]


def make_tokenizer(pad_token="<pad>"):
    """Bytes as the whole vocabulary, control tokens in front of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*CONTROL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(CONTROL_TOKENS)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": pad_token}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def processor(tokenizer):
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def small_processor(tokenizer):
    """Few tokens for an image, so that runs can be counted by eye."""
    images = PixtralImageProcessor(size={"longest_edge": 32}, patch_size=4)
    return PixtralProcessor(images, tokenizer, spatial_merge_size=2, chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("patch, merge, edge", [(16, 1, 1024), (14, 2, 1540)], ids=["llava", "mistral3"])
def test_prompts_equal_the_published_processor(patch, merge, edge, tokenizer, photographs, make_picture):
    sizes = {"patch_size": patch, "spatial_merge_size": merge}
    ours = PixtralProcessor(PixtralImageProcessor(size={"longest_edge": edge}), tokenizer, **sizes)
    published_images = transformers.PixtralImageProcessor(size={"longest_edge": edge}, patch_size=patch)
    published = transformers.PixtralProcessor(published_images, tokenizer, **sizes)
    inputs = {
        "text": ["[INST]a [IMG] b[IMG][/INST]", "[IMG]!", "only words"],
        "images": [photographs[0].resize((320, 200)), make_picture(100, 50), photographs[1].crop((0, 0, 90, 64))],
    }
    options = {"padding": True, "padding_side": "left", "return_mm_token_type_ids": True}
    theirs = published(**inputs, **options)
    assert_equal_features(ours(**inputs, layout="padded", **options), theirs)
    packed = ours(**inputs, return_mm_token_type_ids=True)
    assert set(packed) == {"input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        assert torch.equal(packed[name], theirs[name])


@pytest.mark.parametrize("backend", [PixtralImageProcessor, PixtralImageProcessorPil])
def test_an_image_is_rows_of_tokens_with_breaks_and_an_end(backend, tokenizer, make_picture):
    processor = PixtralProcessor(backend(patch_size=4), tokenizer, spatial_merge_size=2)
    features = processor(text=f"a{IMAGE}b", images=make_picture(9, 20))
    row = "[IMG]" * 3
    expected = f"a{row}[IMG_BREAK]{row}[IMG_END]b"
    assert processor.decode(features["input_ids"][0]) == expected
    padded = processor(text=f"a{IMAGE}b", images=make_picture(9, 20), layout="padded")
    assert torch.equal(padded["input_ids"], features["input_ids"])
    assert padded["image_sizes"].tolist() == [[16, 24]] and padded["pixel_values"].shape == (1, 3, 16, 24)


def test_a_large_photograph_is_975_tokens(tokenizer, make_picture):
    images = PixtralImageProcessor(size={"longest_edge": 1540})
    processor = PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)
    features = processor(text=IMAGE, images=PIL.Image.new("RGB", (675, 1080)))
    assert (features["input_ids"] == processor.image_token_id).sum() == 975


def test_the_joint_sizes_are_those_of_the_image_processor(tokenizer, make_picture, tmp_path):
    processor = PixtralProcessor(PixtralImageProcessor(), tokenizer)
    assert (processor.patch_size, processor.spatial_merge_size) == (16, 1)
    assert processor.image_processor.patch_size == {"height": 16, "width": 16}
    processor.patch_size, processor.spatial_merge_size = 14, 2
    assert (processor.image_processor.patch_size, processor.image_processor.spatial_merge_size) == (14, 2)
    assert processor(images=make_picture(60, 60))["image_grid_thw"].tolist() == [[1, 6, 6]]
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert (saved["patch_size"], saved["spatial_merge_size"], saved["image_token"]) == (14, 2, "[IMG]")
    loaded = transformers.PixtralProcessor.from_pretrained(tmp_path)
    assert (loaded.patch_size, loaded.spatial_merge_size) == (14, 2)


def test_a_flat_list_is_shared_out_by_placeholders(small_processor, make_picture):
    images = [make_picture(16, 24), make_picture(8, 8)]
    flat = small_processor(text=[f"one {IMAGE}", f"two {IMAGE}"], images=images)
    assert image_tokens(small_processor, flat) == tokens_of(flat, merge=2) == [8, 2]
    nested = small_processor(text=[f"one {IMAGE}", f"two {IMAGE}"], images=[[images[0]], [images[1]]])
    assert_equal_features(flat, nested)


def test_one_string_and_a_list_of_one_agree(small_processor, make_picture):
    images = [make_picture(16, 24), make_picture(8, 8)]
    plain = small_processor(text=IMAGE * 2, images=images)
    for text, media in (([IMAGE * 2], images), ([IMAGE * 2], [images]), (IMAGE * 2, [images])):
        assert_equal_features(plain, small_processor(text=text, images=media))


def test_rows_without_images_are_accepted(small_processor, make_picture):
    picture = make_picture(16, 24)
    for images in ([[picture], []], [[picture], None], [picture], picture):
        features = small_processor(text=[IMAGE, "words"], images=images)
        assert image_tokens(small_processor, features) == [8, 0]
    for images in (None, [], [[], []], [None, None]):
        features = small_processor(text=["words", "more words"], images=images)
        assert set(features) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    "text, images, message",
    [
        ([IMAGE * 2], 1, r"prompt 0 has 2 image placeholder\(s\) but 1 image"),
        (["none [IMG_BREAK]"], 1, r"prompt 0 has 0 image placeholder\(s\) but 1 image"),
        (["none", IMAGE], 0, r"prompt 1 has 1 image placeholder\(s\) but 0 image"),
    ],
)
def test_unequal_counts_are_refused(text, images, message, small_processor, make_picture):
    with pytest.raises(ValueError, match=message):
        small_processor(text=text, images=[make_picture(32, 32)] * images or None)


def test_truncation_never_cuts_into_an_image(small_processor, make_picture):
    pictures = [make_picture(32, 32)] * 2
    text = ["short", f"{IMAGE}{IMAGE} words after"]
    needed = len(small_processor(text=text[1], images=pictures)["input_ids"][0])
    # The last limit leaves all but the end token of the second image.
    for limit in (10, 30, needed - 13):
        with pytest.raises(ValueError, match=f"prompt 1 needs {needed} tokens, and a limit of {limit} "):
            small_processor(text=text, images=pictures, max_length=limit, truncation=True)
    kept = small_processor(text=text, images=pictures, max_length=needed - 12, truncation=True)
    assert kept["input_ids"].shape[1] == needed - 12


def test_batches_are_padded_on_the_left(small_processor, make_picture, tmp_path):
    small_processor.save_pretrained(tmp_path)
    for processor in (small_processor, PixtralProcessor.from_pretrained(tmp_path)):
        features = processor(text=["a", f"{IMAGE}b"], images=make_picture(8, 8))
        assert features["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
        right = processor(text=["a", "bc"], padding_side="right")
        assert right["attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_a_tokenizer_without_a_pad_token_takes_single_prompts(make_picture):
    processor = PixtralProcessor(PixtralImageProcessor(), make_tokenizer(pad_token=None))
    assert processor(text=f"{IMAGE}b", images=make_picture(8, 8))["input_ids"].shape == (1, 3)
    with pytest.raises(ValueError, match="pad"):
        processor(text=["a", "bc"])


def test_token_types_come_on_request_and_mark_all_that_an_image_becomes(small_processor, make_picture):
    inputs = {"text": [f"<image> {IMAGE}", "IMG"], "images": make_picture(16, 16)}
    assert "mm_token_type_ids" not in small_processor(**inputs)
    features = small_processor(**inputs, return_mm_token_type_ids=True)
    assert features["mm_token_type_ids"].sum(dim=1).tolist() == [6, 0] == image_tokens(small_processor, features)


def test_placeholders_in_sanitized_user_text_are_text(small_processor, make_picture):
    content = [{"type": "image", "image": make_picture(16, 16)}, {"type": "text", "text": "say [IMG] and [IMG_END]"}]
    features = small_processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, sanitize_control_tokens=True
    )
    assert image_tokens(small_processor, features) == [6]
    assert "say [IMG] and [IMG_END]" in small_processor.decode(features["input_ids"][0])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_emitted_key_is_a_model_input(layout, small_processor, make_picture):
    features = small_processor(text=IMAGE, images=make_picture(32, 32), layout=layout, return_mm_token_type_ids=True)
    assert set(features) <= set(small_processor.model_input_names)


def test_images_may_come_from_any_source(small_processor, make_picture, tmp_path):
    picture = make_picture(16, 24)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(buffer.getvalue())
    text = base64.b64encode(buffer.getvalue()).decode()
    expected = small_processor(text=IMAGE, images=picture)
    array = np.array(picture)
    sources = [str(path), path, path.as_uri(), buffer.getvalue(), text, f"data:image/png;base64,{text}", array]
    for source in [*sources, torch.from_numpy(array), torch.from_numpy(array).permute(2, 0, 1), array[None]]:
        assert_equal_features(expected, small_processor(text=IMAGE, images=source))
    for key, value in (("image", picture), ("path", str(path)), ("url", path.as_uri()), ("base64", text)):
        chat = [[{"role": "user", "content": [{"type": "image", key: value}]}], [{"role": "user", "content": "words"}]]
        features = small_processor.apply_chat_template(chat, tokenize=True, return_dict=True)
        assert torch.equal(features["pixel_values"], expected["pixel_values"])
        assert image_tokens(small_processor, features) == [8, 0]


@pytest.mark.parametrize("size", [(1, 1), (480, 640), (1, 1000), (332, 27), (10000, 10000), (10000, 1)])
def test_token_counts_are_known_from_sizes_alone(size, processor, make_picture):
    counts = processor._get_num_multimodal_tokens(image_sizes=[size])
    if max(size) < 10000:
        features = processor(text=IMAGE, images=make_picture(*size))
        assert counts["num_image_tokens"] == image_tokens(processor, features) == tokens_of(features)
        assert counts["num_image_patches"] == features["image_grid_thw"].prod(dim=1).tolist()
    assert 2 <= counts["num_image_tokens"][0] <= 64 * 65
    assert processor._get_num_multimodal_tokens(image_sizes=[size], layout="padded")["num_image_patches"] == [1]


def test_token_counts_and_runs_honour_overrides(processor, make_picture):
    picture = make_picture(300, 200)
    for overrides in (
        {"size": {"longest_edge": 100}},
        {"images_kwargs": {"patch_size": 14, "spatial_merge_size": 2}},
        {"patch_size": 20, "layout": "padded"},
        {"do_resize": False, "patch_size": 10, "spatial_merge_size": 2},
    ):
        features = processor(text=IMAGE, images=picture, **overrides)
        counts = processor._get_num_multimodal_tokens(image_sizes=[(300, 200)], **overrides)
        assert counts["num_image_tokens"] == image_tokens(processor, features)
    assert "num_image_tokens" not in processor._get_num_multimodal_tokens()


def test_unknown_keywords_are_refused(processor):
    with pytest.raises(ValueError, match="longest_edge'"):
        processor(text="words", longest_edge=3)
    with pytest.raises(ValueError, match="longest_edge'"):
        processor._get_num_multimodal_tokens(image_sizes=[(3, 3)], longest_edge=3)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({}, "nothing to process"),
        ({"text": ["a", 3]}, "prompt 1 is int"),
        ({"text": "words", "videos": [np.zeros((2, 8, 8, 3))]}, "videos"),
        ({"text": "words", "audio": [np.zeros(10)]}, "audio"),
    ],
)
def test_missing_or_wrong_inputs_are_refused(inputs, message, processor):
    with pytest.raises(ValueError, match=message):
        processor(**inputs)


def test_a_tokenizer_without_the_image_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no '<image>'.*image_break_token"):
        PixtralProcessor(PixtralImageProcessor(), tokenizer, image_break_token="<image>")


def test_generated_ids_become_text(processor):
    ids = torch.tensor(processor.tokenizer(["42 cats", "7 dogs "])["input_ids"])
    assert processor.post_process_image_text_to_text(ids) == ["42 cats", "7 dogs "]


def test_saving_and_loading_changes_nothing(tokenizer, make_picture, tmp_path):
    images = PixtralImageProcessor(size={"longest_edge": 90}, layout="padded")
    processor = PixtralProcessor(images, tokenizer, 14, 2, CHAT_TEMPLATE, image_end_token="[TOOL_CALLS]")
    processor.save_pretrained(tmp_path)
    loaded = PixtralProcessor.from_pretrained(tmp_path)
    inputs = {"text": f"a{IMAGE}", "images": make_picture(300, 500)}
    assert_equal_features(processor(**inputs), loaded(**inputs))
    assert loaded.chat_template == processor.chat_template
    assert loaded.image_processor.size == images.size
    published = transformers.PixtralProcessor.from_pretrained(tmp_path)
    assert_equal_features(processor(**inputs), published(**inputs))
    remote = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")
    assert_equal_features(processor(**inputs), remote(**inputs))


def test_settings_given_while_loading_reach_their_processor(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    given = {"size": {"longest_edge": 100}, "normalize_on_device": True, "spatial_merge_size": 2}
    loaded = PixtralProcessor.from_pretrained(tmp_path, backend="pil", **given)
    assert isinstance(loaded.image_processor, PixtralImageProcessorPil)
    assert loaded.image_processor.size.longest_edge == 100 and loaded.image_processor.normalize_on_device
    assert loaded.spatial_merge_size == 2
    assert not set(given) & set(loaded.tokenizer.init_kwargs)
    assert loaded._get_num_multimodal_tokens(image_sizes=[(2000, 2000)])["num_image_tokens"] == [4 * 5]


def test_media_without_text_and_numpy_output(processor, make_picture):
    assert set(processor(images=make_picture(32, 32))) == {"pixel_values", "image_grid_thw"}
    features = processor(text=IMAGE, images=make_picture(32, 32), return_tensors="np")
    assert all(isinstance(value, np.ndarray) for value in features.values())


# A folder in Mistral's own layout


def write_native_folder(folder, version="v3", control_tokens=CONTROL_TOKENS, **vision):
    """`params.json` and a `tekken.json` of all bytes and one merge; `control_tokens=None` is the older form."""
    folder.mkdir(exist_ok=True)
    words = [bytes([byte]) for byte in range(256)] + [b"he"]
    tekken = {
        "config": {
            "pattern": r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+",
            "num_vocab_tokens": 257,
            "default_vocab_size": 24 + 257,
            "default_num_special_tokens": 24,
            "version": version,
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)],
    }
    if control_tokens is not None:
        tekken["special_tokens"] = [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(control_tokens)
        ]
    (folder / "tekken.json").write_text(json.dumps(tekken))
    params = PARAMS | {"vision_encoder": PARAMS["vision_encoder"] | vision}
    (folder / "params.json").write_text(json.dumps(params))
    return folder


MERGER = {"mm_projector_id": "patch_merge", "spatial_merge_size": 2, "add_pre_mm_projector_layer_norm": True}
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "here"}]},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]


@pytest.mark.parametrize("control_tokens", [CONTROL_TOKENS, None], ids=["listed", "older form"])
def test_a_native_folder_needs_nothing_else(control_tokens, tmp_path, make_picture):
    folder = write_native_folder(tmp_path / "native", control_tokens=control_tokens)
    processor = PixtralProcessor.from_pretrained(folder)
    features = processor(text=f"he{IMAGE}", images=make_picture(8, 500))
    # 64 is max_image_size: 8 x 500 shrinks to 1 x 64, one row of 16 patches of 4 pixels.
    assert features["image_grid_thw"].tolist() == [[1, 1, 16]]
    assert features["input_ids"].tolist() == [[24 + 256, *[10] * 16, 13]]
    assert processor(text=["a", "bcd"])["input_ids"][0].tolist() == [11, 11, 24 + ord("a")]
    assert processor.tokenizer.name_or_path == str(folder)
    processor.save_pretrained(tmp_path / "ours")
    for kind in (PixtralProcessor, transformers.PixtralProcessor):
        loaded = kind.from_pretrained(tmp_path / "ours")
        text = loaded.apply_chat_template(CHAT)
        assert text == processor.apply_chat_template(CHAT)
        assert loaded.tokenizer(text)["input_ids"] == processor.tokenizer(text)["input_ids"]


def test_a_native_folder_with_a_merger_merges(tmp_path, make_picture):
    processor = PixtralProcessor.from_pretrained(write_native_folder(tmp_path, **MERGER), size={"longest_edge": 16})
    features = processor(text=IMAGE, images=make_picture(16, 32))
    assert features["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert features["input_ids"].tolist() == [[10, 10, 13]]


def test_a_converted_folder_gives_what_the_native_one_gave(tmp_path):
    native = PixtralProcessor.from_pretrained(write_native_folder(tmp_path, **MERGER, image_break_token_id=9))
    PixtralConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "params.json").unlink()
    converted = PixtralProcessor.from_pretrained(tmp_path)
    assert converted.image_break_token == "[TOOL_CALLS]"
    settings = [one.image_processor.to_dict() for one in (native, converted)]
    assert settings[0] == settings[1] and settings[0]["spatial_merge_size"] == 2


def test_a_tokenizer_json_goes_before_a_tekken_json(tmp_path):
    write_native_folder(tmp_path)
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[OURS]"]})
    PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template="ours").save_pretrained(tmp_path)
    loaded = PixtralProcessor.from_pretrained(tmp_path)
    assert "[OURS]" in loaded.tokenizer.get_vocab() and loaded.tokenizer.pad_token is None
    assert loaded.chat_template == "ours" and loaded.patch_size == 16


def test_image_tokens_of_a_native_folder_have_the_ids_in_its_params(tmp_path, make_picture):
    tokens = [*CONTROL_TOKENS[:14], "[PICTURE]"]
    folder = write_native_folder(tmp_path, control_tokens=tokens, image_token_id=14, image_end_token_id=12)
    processor = PixtralProcessor.from_pretrained(folder)
    assert processor.image_token == "[PICTURE]" and processor.image_token_ids == [14, 12, 12]
    assert "[PICTURE]here" in processor.apply_chat_template(CHAT)
    write_native_folder(tmp_path, image_break_token_id=40)
    with pytest.raises(ValueError, match="image_break_token_id is 40"):
        PixtralProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "version, control_tokens, expected",
    [
        ("v3", None, "<s>[INST][IMG]here[/INST]yes</s>[INST]be brief\n\nwhy[/INST]"),
        ("v7", None, "<s>[SYSTEM_PROMPT]be brief[/SYSTEM_PROMPT][INST][IMG]here[/INST]yes</s>[INST]why[/INST]"),
        (
            "v11",
            OLD_CONTROL_TOKENS,
            "<s>[SYSTEM_PROMPT]be brief[/SYSTEM_PROMPT][INST][IMG]here[/INST]yes</s>[INST]why[/INST]",
        ),
    ],
)
def test_chats_of_a_native_folder_follow_its_version(version, control_tokens, expected, tmp_path):
    processor = PixtralProcessor.from_pretrained(write_native_folder(tmp_path, version, control_tokens))
    text = processor.apply_chat_template(CHAT, add_generation_prompt=True)
    assert text == expected
    ids = processor.tokenizer(text)["input_ids"]
    assert ids[0] == processor.tokenizer.bos_token_id == 1 and ids.count(2) == 1 and ids.count(3) == 2
    assert (ids.count(17), ids.count(18)) == ((0, 0) if version == "v3" else (1, 1))


def test_chats_that_the_template_cannot_tell_are_refused(tmp_path):
    processor = PixtralProcessor.from_pretrained(write_native_folder(tmp_path))
    for turn in ({"role": "tool", "content": "3"}, {"role": "user", "content": [{"type": "video"}]}):
        with pytest.raises(Exception, match="tool|video"):
            processor.apply_chat_template([turn])


# Together with the model

KINDS = {PixtralLlavaConfig: (1, LlavaForConditionalGeneration), PixtralConfig: (2, Mistral3ForConditionalGeneration)}


def tiny_model(kind):
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 64,
    }  # fmt: skip
    text = {
        "model_type": "mistral", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "sliding_window": None,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11,
    }  # fmt: skip
    torch.manual_seed(0)
    model = PixtralForConditionalGeneration(
        kind(vision_config=vision, text_config=text, image_token_index=10, tie_word_embeddings=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights that matter, so that a wrong order of patches shows.
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_and_published_agree_through_the_model(kind, tokenizer, photographs, make_picture, tmp_path):
    merge, published_class = KINDS[kind]
    ours = tiny_model(kind)
    ours.save_pretrained(tmp_path)
    theirs = published_class.from_pretrained(tmp_path).eval()
    sizes = {"patch_size": 4, "spatial_merge_size": merge}
    processor = PixtralProcessor(PixtralImageProcessor(size={"longest_edge": 48}), tokenizer, **sizes)
    published = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(size={"longest_edge": 48}, patch_size=4), tokenizer, **sizes
    )
    inputs = {
        "text": [f"{IMAGE}what?{IMAGE}", "only words", f"this {IMAGE}"],
        "images": [photographs[0], make_picture(20, 9), photographs[1].crop((0, 0, 150, 400))],
    }
    expected = theirs(**published(**inputs, padding=True, padding_side="left")).logits
    real = processor(**inputs)["attention_mask"].bool()
    packed = ours(**processor(**inputs)).logits[real]
    assert torch.allclose(packed, expected[real], atol=1e-4, rtol=1e-4)
    assert torch.allclose(ours(**processor(**inputs, layout="padded")).logits[real], packed, atol=1e-4, rtol=1e-4)
    for layout in ("packed", "padded"):
        raw = processor(**inputs, layout=layout, normalize_on_device=True)
        assert raw["pixel_values"].dtype == torch.uint8
        assert torch.allclose(ours(**raw).logits[real], packed, atol=1e-3, rtol=1e-3)
    # The order of patches matters: another one gives another answer.
    turned = processor(**inputs)
    turned["pixel_values"] = turned["pixel_values"].flip(0)
    assert not torch.allclose(ours(**turned).logits[real], packed, atol=1e-2)


def test_batches_generate_with_differing_numbers_of_images(small_processor, make_picture):
    model = tiny_model(PixtralConfig)
    text = [f"{IMAGE}{IMAGE}?", "words", f"{IMAGE}!"]
    pictures = [make_picture(16, 24, seed) for seed in range(3)]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 11}
    together = model.generate(**small_processor(text=text, images=pictures), **options)
    assert small_processor.image_token_id not in together[:, -4:]
    for row, (prompt, share) in enumerate(zip(text, (pictures[:2], None, pictures[2:]))):
        alone = model.generate(**small_processor(text=prompt, images=share), **options)
        assert torch.equal(alone[0, -4:], together[row, -4:])


def test_the_pipeline_reads_chats_and_plain_prompts(small_processor, make_picture, tmp_path):
    path = tmp_path / "picture.png"
    make_picture(16, 24).save(path)
    model = tiny_model(PixtralConfig)
    answer = pipeline("image-text-to-text", model=model, processor=small_processor, max_new_tokens=3)
    chat = [
        {"role": "user", "content": [{"type": "image", "path": str(path)}, {"type": "text", "text": "?"}]},
    ]
    from_chat = answer(text=chat, return_full_text=False)
    assert isinstance(from_chat[0]["generated_text"], str)
    prompt = small_processor.apply_chat_template(chat, add_generation_prompt=True)
    from_prompt = answer(images=[str(path)], text=prompt, return_full_text=False)
    assert from_prompt[0]["generated_text"] == from_chat[0]["generated_text"]


WITHOUT_TORCHVISION = """
import PIL.Image
from gridtower.processing.image_processing_pixtral import PixtralImageProcessor
from gridtower.processing.processing_pixtral import PixtralProcessor
processor = PixtralProcessor.from_pretrained(sys.argv[1])
print(type(processor.image_processor).__name__)
print(processor(text="[IMG]", images=PIL.Image.new("RGB", (40, 50)))["image_grid_thw"].tolist())
try:
    PixtralImageProcessor()
except ImportError as error:
    print(error)
"""


def test_without_torchvision_images_go_through_pil_and_the_rest_says_what_to_install(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    backend, grid, error = run_without_torchvision(WITHOUT_TORCHVISION, tmp_path)
    assert (backend, grid) == ("PixtralImageProcessorPil", "[[1, 4, 3]]")
    assert "pip install torchvision" in error
