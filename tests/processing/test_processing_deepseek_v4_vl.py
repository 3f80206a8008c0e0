"""Prompts with images become the blocks that the reference writes, aligned wherever they stand, and mistakes are named."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoProcessor, PreTrainedTokenizerFast

from gridtower.configuration.configuration_deepseek_v4_vl import DeepseekV4VisionConfig, DeepseekV4VlConfig
from gridtower.processing.image_processing_deepseek_v4_vl import DeepseekV4ImageProcessor, DeepseekV4ImageProcessorPil
from gridtower.processing.processing_deepseek_v4_vl import (
    BLOCK_TOKENS,
    DeepseekV4Processor,
    interleaved_block,
    reading_order_roles,
)

from .conftest import run_without_torchvision

IMAGE = "<｜deepseek_image｜>"
CONTROL_TOKENS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"]
BOS, EOS, PADDING = CONTROL_TOKENS[:3]
PUBLISHED_IDS = {
    "<|place_holder_mm_span_0431|>": 129257,
    "<|place_holder_mm_span_0432|>": 129258,
    "<|place_holder_mm_span_0433|>": 129259,
    "<|place_holder_mm_span_0434|>": 129260,
    "<|place_holder_mm_span_0435|>": 129261,
    IMAGE: 129264,
}
START, PAD, CELL, NEWLINE, END = range(129257, 129262)
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("l", "l")]
# A picture of 8 x 8 pixels is one cell.
SMALL = {"patch_size": 4, "downsample_ratio": 2, "min_pixels": 0, "max_wh_ratio": None}


def make_tokenizer(image_ids=PUBLISHED_IDS, pad_token=PADDING, adds_bos=True, pre_tokenizer=None):
    """Bytes and a few merges behind the control tokens; the tokens of images have the ids in `image_ids`."""
    pieces = [*CONTROL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    # Where the ids leave room, everything else comes behind them.
    first = 0 if min(image_ids.values()) > len(pieces) else max(image_ids.values()) + 1
    vocab = {piece: first + number for number, piece in enumerate(pieces)} | image_ids
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.add_special_tokens([*CONTROL_TOKENS, *image_ids])
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=pad_token)


def make_processor(tokenizer=None, **rules):
    return DeepseekV4Processor(DeepseekV4ImageProcessor(**(SMALL | rules)), tokenizer or make_tokenizer())


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def processor(tokenizer):
    return make_processor(tokenizer)


@pytest.fixture
def reading_order(tokenizer):
    return make_processor(tokenizer, token_layout="reading_order")


def naive_block(rows, cols):
    """Ids of an image's block, told index by index."""
    pad_h = rows % 2
    length = cols + 1
    raster = []
    for row in range(rows + pad_h):
        for col in range(length):
            raster.append(PAD if row >= rows else NEWLINE if col == cols else CELL)
    block = [START]
    for pair in range((rows + pad_h) // 2):
        for col in range(length):
            for row in (2 * pair, 2 * pair + 1):
                block.append(raster[row * length + col])
    if ((rows + pad_h) // 2 * length) % 2 == 1:
        block += [PAD, PAD]
    return [*block, END]


def naive_ids(tokenizer, parts):
    """Ids of a prompt of `parts`, text or (rows, cols) of an image, each written where the last one ended."""
    ids = [tokenizer.bos_token_id]
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        else:
            ids += [PAD] * (3 - len(ids) % 4) + naive_block(*part)
    return ids


def prompt_of(parts):
    return "".join(part if isinstance(part, str) else IMAGE for part in parts)


def pictures_of(parts):
    """For each (rows, cols) in `parts` a picture of so many cells, the last ones partly empty."""
    grids = [part for part in parts if not isinstance(part, str)]
    return [np.zeros((8 * rows - 3, 8 * cols - 2, 3), dtype=np.uint8) for rows, cols in grids]


def real_rows(features):
    return [ids[mask.bool()].tolist() for ids, mask in zip(features["input_ids"], features["attention_mask"])]


def assert_equal_features(ours, theirs):
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def block_sizes(processor, features):
    """Tokens in each row that stand for parts of images."""
    return torch.isin(features["input_ids"], torch.tensor(processor.image_token_ids)).sum(dim=1).tolist()


# The block of an image


@given(rows=st.integers(1, 40), cols=st.integers(1, 40))
@settings(deadline=None)
def test_blocks_interleave_rows_two_by_two(rows, cols):
    block = [PUBLISHED_IDS[token] for token in interleaved_block(rows, cols)]
    assert block == naive_block(rows, cols)
    assert block.count(CELL) == rows * cols and block.count(NEWLINE) == rows
    # Two modulo four, on which the alignment of several images rests.
    assert len(block) % 4 == 2


def test_a_block_looks_like_this():
    start, pad, image, newline, end = BLOCK_TOKENS
    assert interleaved_block(1, 1) == [start, image, pad, newline, pad, end]
    assert interleaved_block(2, 2) == [start, image, image, image, image, newline, newline, pad, pad, end]
    two_rows = [start, *[image] * 6, newline, newline]
    assert interleaved_block(3, 3) == [*two_rows, image, pad, image, pad, image, pad, newline, pad, end]


def test_reading_order_is_row_by_row():
    assert reading_order_roles(2, 3) == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert reading_order_roles(1, 1) == [0, 1, 2, 3]


# Blocks in prompts

words = st.text(alphabet="the all\nØ｜<", max_size=7)
grids = st.tuples(st.integers(1, 4), st.integers(1, 4))
prompts = st.lists(st.one_of(words, grids), max_size=6)
once = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(batch=st.lists(prompts, min_size=1, max_size=3))
@once
def test_every_image_is_aligned_wherever_it_stands(processor, batch):
    # Neighbouring texts are one text.
    batch = [[part for part in parts if part != ""] for parts in batch]
    joined = [prompt_of(parts) for parts in batch]
    images = [picture for parts in batch for picture in pictures_of(parts)]
    features = processor(text=joined, images=images or None)
    for parts, ids in zip(batch, real_rows(features)):
        merged = []
        for part in parts:
            if merged and isinstance(part, str) and isinstance(merged[-1], str):
                merged[-1] += part
            else:
                merged.append(part)
        assert ids == naive_ids(processor.tokenizer, merged)
        starts = [place for place, token in enumerate(ids) if token == START]
        assert all(start % 4 == 3 for start in starts) and len(starts) == len(pictures_of(parts))


def test_neighbouring_images_and_the_token_for_the_start_of_a_text_count(processor):
    parts = [(1, 1), (2, 2), "a", (1, 2), (3, 1)]
    images = pictures_of(parts)
    (ids,) = real_rows(processor(text=prompt_of(parts), images=images))
    assert ids == naive_ids(processor.tokenizer, parts)
    assert [place for place, token in enumerate(ids) if token == START] == [3, 11, 23, 35]
    # Without <s> the first block needs a pad more.
    (bare,) = real_rows(processor(text=prompt_of(parts), images=images, add_special_tokens=False))
    assert bare[:4] == [PAD, PAD, PAD, START] and bare[4:] == ids[4:]
    (plain,) = real_rows(make_processor(make_tokenizer(adds_bos=False))(text=prompt_of(parts), images=images))
    assert plain == bare


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_of_a_padded_batch_is_what_it_is_alone(side, processor):
    batch = [["the", (1, 2)], ["no image at all, and long"], [(2, 2), "and", (1, 1), "!"], ["x"]]
    text, images = [prompt_of(parts) for parts in batch], [pictures_of(parts) for parts in batch]
    together = processor(text=text, images=images, padding_side=side)
    assert together["attention_mask"].sum(dim=1).unique().numel() == 4
    for row, ids in enumerate(real_rows(together)):
        assert ids == real_rows(processor(text=text[row], images=images[row] or None))[0]
        assert ids == naive_ids(processor.tokenizer, batch[row])
    long = processor(text=text, images=images, padding="max_length", max_length=100, pad_to_multiple_of=8)
    assert long["input_ids"].shape[1] == 104 and real_rows(long) == real_rows(together)


def test_batches_are_padded_on_the_left(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    for one in (processor, DeepseekV4Processor.from_pretrained(tmp_path)):
        assert one(text=["x", "yz"])["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
        assert one(text=["x", "yz"], padding_side="right")["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_a_tokenizer_need_not_know_the_placeholder(processor):
    ids = {token: token_id for token, token_id in PUBLISHED_IDS.items() if token != IMAGE}
    other = make_processor(make_tokenizer(ids))
    assert len(other.tokenizer(IMAGE)["input_ids"]) > 10
    inputs = {"text": [f"all the {IMAGE} the{IMAGE}", "the"], "images": pictures_of([(1, 2), (2, 1)])}
    assert_equal_features(processor(**inputs), other(**inputs))


def test_images_are_aligned_where_words_depend_on_what_stands_before_them():
    # Only the first word of a text gets a space in front: parts tokenized apart would count one token too many.
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(replacement="Ġ", prepend_scheme="first"), pre_tokenizers.Punctuation()]
    )
    processor = make_processor(make_tokenizer(adds_bos=False, pre_tokenizer=splitter))
    parts = ["ab", (1, 1), "ab", (1, 1)]
    (ids,) = real_rows(processor(text=prompt_of(parts), images=pictures_of(parts)))
    assert [place for place, token in enumerate(ids) if token == START] == [3, 11]
    assert ids[3:9] == naive_block(1, 1) and ids[9:11] == processor.tokenizer.convert_tokens_to_ids(["a", "b"])


def test_a_flat_list_is_shared_out_by_placeholders(processor):
    images = pictures_of([(1, 2), (2, 3)])
    flat = processor(text=[f"one {IMAGE}", f"two {IMAGE}"], images=images)
    assert [row.count(CELL) for row in real_rows(flat)] == [2, 6]
    nested = processor(text=[f"one {IMAGE}", f"two {IMAGE}"], images=[[images[0]], [images[1]]])
    assert_equal_features(flat, nested)


def test_one_string_and_a_list_of_one_agree(processor):
    images = pictures_of([(1, 2), (2, 3)])
    plain = processor(text=IMAGE * 2, images=images)
    for text, media in (([IMAGE * 2], images), ([IMAGE * 2], [images]), (IMAGE * 2, [images])):
        assert_equal_features(plain, processor(text=text, images=media))


def test_rows_without_images_are_accepted(processor):
    (picture,) = pictures_of([(2, 3)])
    for images in ([[picture], []], [[picture], None], [picture], picture):
        features = processor(text=[IMAGE, "words"], images=images)
        assert [row.count(CELL) for row in real_rows(features)] == [6, 0]
    for images in (None, [], [[], []], [None, None]):
        features = processor(text=["words", "more words"], images=images)
        assert set(features) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    "text, images, message",
    [
        ([IMAGE * 2], 1, r"prompt 0 has 2 image placeholder\(s\) but 1 image"),
        (["none"], 1, r"prompt 0 has 0 image placeholder\(s\) but 1 image"),
        (["none", IMAGE], 0, r"prompt 1 has 1 image placeholder\(s\) but 0 image"),
    ],
)
@pytest.mark.parametrize("layout", ["interleaved", "reading_order"])
def test_unequal_counts_are_refused(layout, text, images, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        make_processor(tokenizer, token_layout=layout)(text=text, images=pictures_of([(1, 1)] * images) or None)


@pytest.mark.parametrize("token", BLOCK_TOKENS)
def test_text_must_not_spell_parts_of_images(token, processor):
    (picture,) = pictures_of([(1, 1)])
    for text, images in (
        (["the", f"a{token}b"], None),
        ([IMAGE, f"a{token}b"], picture),
        (["the", f"{token}{IMAGE}"], picture),
    ):
        with pytest.raises(ValueError, match="prompt 1 spells a token that stands for a part of an image"):
            processor(text=text, images=images)


@pytest.mark.parametrize("layout", ["interleaved", "reading_order"])
def test_truncation_never_cuts_into_an_image(layout, tokenizer):
    processor = make_processor(tokenizer, token_layout=layout)
    parts = ["a", (2, 2), (3, 2), "words here"]
    inputs = {"text": ["short", prompt_of(parts)], "images": pictures_of(parts)}
    needed = processor(**inputs)["input_ids"].shape[1]
    # The last limit leaves all but the end of the second image.
    for limit in (2, 10, needed - len("words here") - 1):
        with pytest.raises(ValueError, match=f"prompt 1 needs {needed} tokens, and a limit of {limit} "):
            processor(**inputs, max_length=limit, truncation=True)
    kept = processor(**inputs, max_length=needed - len("words here"), truncation=True)
    assert real_rows(kept)[1] == real_rows(processor(**inputs))[1][: -len("words here")]


def test_cutting_the_start_of_a_prompt_keeps_images_aligned_or_is_refused(tokenizer):
    tokenizer.truncation_side = "left"
    processor = make_processor(tokenizer)
    parts = ["words before", (2, 2), "after"]
    inputs = {"text": prompt_of(parts), "images": pictures_of(parts)}
    needed = processor(**inputs)["input_ids"].shape[1]
    for limit in (needed - 1, needed - 2, needed - 3, needed - 5):
        with pytest.raises(ValueError, match="prompt 0 is cut at its start"):
            processor(**inputs, max_length=limit, truncation=True)
    (ids,) = real_rows(processor(**inputs, max_length=needed - 4, truncation=True))
    assert ids.index(START) % 4 == 3


# V4.1


@given(batch=st.lists(prompts, min_size=1, max_size=3))
@once
def test_in_reading_order_roles_travel_beside_the_placeholders_own_token(reading_order, batch):
    text = [prompt_of(parts) for parts in batch]
    images = [picture for parts in batch for picture in pictures_of(parts)]
    features = reading_order(text=text, images=images or None)
    assert features["image_token_roles"].dtype == torch.int64
    for row, parts in enumerate(batch):
        roles = []
        for part in parts:
            if not isinstance(part, str):
                roles.append(0)
                for _ in range(part[0]):
                    roles += [1] * part[1] + [2]
                roles.append(3)
        is_image = features["input_ids"][row] == 129264
        assert features["image_token_roles"][row][is_image].tolist() == roles
        assert (features["image_token_roles"][row][~is_image] == -1).all()
        # The text around stands as if every image were one token.
        ids, beside = features["input_ids"][row], features["image_token_roles"][row]
        short = ids[features["attention_mask"][row].bool() & (beside <= 0)].tolist()
        assert short == reading_order.tokenizer(text[row])["input_ids"]


def test_reading_order_needs_the_placeholder_and_no_reserved_tokens():
    processor = make_processor(make_tokenizer({IMAGE: 129264}), token_layout="reading_order")
    assert processor.image_token_id == 129264 and processor.image_token_ids == [129264]
    ids = {token: token_id for token, token_id in PUBLISHED_IDS.items() if token != IMAGE}
    with pytest.raises(ValueError, match="the tokenizer reads '<｜deepseek_image｜>' as .*published"):
        make_processor(make_tokenizer(ids), token_layout="reading_order")


def test_a_layout_may_be_chosen_for_a_call(processor, reading_order):
    inputs = {"text": f"the {IMAGE}", "images": pictures_of([(3, 2)])}
    assert_equal_features(processor(**inputs, token_layout="reading_order"), reading_order(**inputs))
    assert_equal_features(reading_order(**inputs, token_layout="interleaved"), processor(**inputs))


# The tokenizer


def test_the_ids_are_those_of_the_published_tokenizer(processor):
    assert processor.image_token_ids == [129257, 129258, 129259, 129260, 129261]
    config = DeepseekV4VlConfig()
    assert processor.image_token_ids[0] == config.image_start_token_id
    assert processor.image_token_id == config.image_token_id


@pytest.mark.parametrize("missing", BLOCK_TOKENS)
def test_a_tokenizer_without_one_of_the_five_tokens_is_refused(missing):
    ids = {token: token_id for token, token_id in PUBLISHED_IDS.items() if token != missing}
    with pytest.raises(ValueError, match=rf"reads '<\|{missing[2:-2]}\|>' as .*add it as a special token"):
        make_processor(make_tokenizer(ids))


def test_a_tokenizer_that_numbers_the_five_tokens_otherwise_is_refused():
    swapped = PUBLISHED_IDS | {BLOCK_TOKENS[2]: 129260, BLOCK_TOKENS[3]: 129259}
    with pytest.raises(ValueError, match="numbers '.*0433.*' 129260, and after '.*0431.*', 129257, it must be 129259"):
        make_processor(make_tokenizer(swapped))


def test_other_consecutive_ids_are_accepted():
    ids = {token: number for number, token in enumerate([*BLOCK_TOKENS, IMAGE])}
    processor = make_processor(make_tokenizer(ids))
    assert processor.image_token_ids == [0, 1, 2, 3, 4] and processor.image_token_id == 2
    (row,) = real_rows(processor(text=IMAGE, images=pictures_of([(1, 1)])))
    assert row[1:] == [1, 1, 0, 2, 1, 3, 1, 4]


def test_a_tokenizer_without_a_pad_token_takes_single_prompts():
    processor = make_processor(make_tokenizer(pad_token=None))
    assert processor(text=f"{IMAGE}b", images=pictures_of([(1, 1)]))["input_ids"].shape == (1, 10)
    with pytest.raises(ValueError, match="pad"):
        processor(text=["a", "bc"])


# Calls


def test_token_types_come_on_request_and_mark_all_that_an_image_becomes(processor, reading_order):
    inputs = {"text": [f"the {IMAGE}", "all the"], "images": pictures_of([(2, 2)])}
    assert "mm_token_type_ids" not in processor(**inputs)
    features = processor(**inputs, return_mm_token_type_ids=True)
    # <s>, two words, no pad, and the block.
    assert features["mm_token_type_ids"][0].tolist() == [0, 0, 0, *[1] * 10]
    assert features["mm_token_type_ids"][1].tolist() == [0] * 13
    features = processor(text=f"{IMAGE}.", images=inputs["images"], return_mm_token_type_ids=True)
    assert features["mm_token_type_ids"][0].tolist() == [0, 1, 1, *[1] * 10, 0]
    roles = reading_order(**inputs, return_mm_token_type_ids=True)
    assert torch.equal(roles["mm_token_type_ids"] == 1, roles["image_token_roles"] >= 0)


@pytest.mark.parametrize("layout", ["interleaved", "reading_order"])
def test_every_emitted_key_is_a_model_input(layout, tokenizer):
    processor = make_processor(tokenizer, token_layout=layout)
    features = processor(text=IMAGE, images=pictures_of([(1, 1)]), return_mm_token_type_ids=True)
    assert set(features) <= set(processor.model_input_names)
    assert features["pixel_values"].shape == (4, 48) and features["image_grid_thw"].tolist() == [[1, 2, 2]]


def test_placeholders_in_sanitized_user_text_are_text(processor):
    content = [
        {"type": "image", "image": pictures_of([(1, 1)])[0]},
        {"type": "text", "text": f"say {IMAGE} and {BLOCK_TOKENS[0]}"},
    ]
    features = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, sanitize_control_tokens=True
    )
    (ids,) = real_rows(features)
    assert ids.count(START) == ids.count(END) == ids.count(CELL) == 1 and ids.index(START) == 3
    assert f"say {IMAGE} and {BLOCK_TOKENS[0]}" in processor.decode(ids)


def test_images_may_come_from_any_source(processor, make_picture, tmp_path):
    picture = make_picture(16, 24)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(buffer.getvalue())
    text = base64.b64encode(buffer.getvalue()).decode()
    expected = processor(text=IMAGE, images=picture)
    array = np.array(picture)
    sources = [str(path), path, path.as_uri(), buffer.getvalue(), text, f"data:image/png;base64,{text}", array]
    for source in [*sources, torch.from_numpy(array), torch.from_numpy(array).permute(2, 0, 1), array[None]]:
        assert_equal_features(expected, processor(text=IMAGE, images=source))
    for key, value in (("image", picture), ("path", str(path)), ("url", path.as_uri()), ("base64", text)):
        chat = [[{"role": "user", "content": [{"type": "image", key: value}]}], [{"role": "user", "content": "words"}]]
        features = processor.apply_chat_template(chat, tokenize=True, return_dict=True)
        assert torch.equal(features["pixel_values"], expected["pixel_values"])
        assert [row.count(CELL) for row in real_rows(features)] == [6, 0]


@pytest.mark.parametrize("size", [(1, 1), (480, 640), (1, 1000), (332, 27), (10000, 10000), (10000, 1)])
@pytest.mark.parametrize("layout", ["interleaved", "reading_order"])
def test_token_counts_are_known_from_sizes_alone(layout, size, tokenizer, make_picture):
    processor = DeepseekV4Processor(DeepseekV4ImageProcessor(token_layout=layout), tokenizer)
    counts = processor._get_num_multimodal_tokens(image_sizes=[size])
    if max(size) < 10000:
        # <s> and two bytes: no pad is needed for alignment.
        features = processor(text=f"xy{IMAGE}", images=make_picture(*size))
        assert counts["num_image_tokens"] == block_sizes(processor, features)
        assert counts["num_image_patches"] == features["image_grid_thw"].prod(dim=1).tolist()
    assert 4 <= counts["num_image_tokens"][0] <= 384


def test_token_counts_and_blocks_honour_overrides(processor, make_picture):
    picture = make_picture(300, 200)
    for overrides in (
        {"max_image_tokens": 40},
        {"images_kwargs": {"patch_size": 14, "downsample_ratio": 3}},
        {"downsample_ratio": 4, "token_layout": "reading_order"},
        {"do_resize": False, "patch_size": 50, "downsample_ratio": 1},
    ):
        features = processor(text=f"xy{IMAGE}", images=picture, **overrides)
        counts = processor._get_num_multimodal_tokens(image_sizes=[(300, 200)], **overrides)
        found = torch.isin(features["input_ids"], torch.tensor([*range(129257, 129265)])).sum()
        assert counts["num_image_tokens"] == [found]
    assert "num_image_tokens" not in processor._get_num_multimodal_tokens()


def test_unknown_keywords_are_refused(processor):
    with pytest.raises(ValueError, match="max_pixels'"):
        processor(text="words", max_pixels=3)
    with pytest.raises(ValueError, match="max_pixels'"):
        processor._get_num_multimodal_tokens(image_sizes=[(3, 3)], max_pixels=3)


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


def test_media_without_text_and_numpy_output(processor, reading_order):
    images = pictures_of([(1, 1)])
    assert set(processor(images=images)) == {"pixel_values", "image_grid_thw"}
    for one in (processor, reading_order):
        features = one(text=[IMAGE, "the"], images=images, return_tensors="np", return_mm_token_type_ids=True)
        assert all(isinstance(value, np.ndarray) for value in features.values())
    ragged = reading_order(text=[IMAGE, "the"], images=images, padding=False, text_kwargs={"return_tensors": None})
    assert [len(roles) for roles in ragged["image_token_roles"]] == [len(ids) for ids in ragged["input_ids"]] == [5, 2]


def test_generated_ids_become_text(processor):
    ids = torch.tensor(processor.tokenizer(["42 cats", "7 dogs "])["input_ids"])
    assert processor.post_process_image_text_to_text(ids) == ["42 cats", "7 dogs "]


# Chats

CHAT = [
    {"role": "system", "content": "be brief"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "here"}],
    },
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]
RENDERED = f"{BOS}be brief<｜User｜>see {IMAGE}here<｜Assistant｜>yes{EOS}<｜User｜>why<｜Assistant｜>"


def test_chats_have_their_images_where_they_stand(processor):
    assert processor.apply_chat_template(CHAT, add_generation_prompt=True) == RENDERED
    (picture,) = pictures_of([(2, 1)])
    chat = [CHAT[0], {"role": "user", "content": [CHAT[1]["content"][0], {"type": "image", "image": picture}]}]
    features = processor.apply_chat_template(chat, tokenize=True, return_dict=True)
    # <s> comes from the template, and once.
    assert real_rows(features) == [naive_ids(processor.tokenizer, ["be brief<｜User｜>see ", (2, 1)])]


def test_a_tokenizers_own_template_comes_first(tokenizer):
    tokenizer.chat_template = "{{ 'own' }}"
    assert make_processor(tokenizer).apply_chat_template(CHAT) == "own"
    given_one = DeepseekV4Processor(DeepseekV4ImageProcessor(), tokenizer, chat_template="{{ 'given' }}")
    assert given_one.apply_chat_template(CHAT) == "given"


def test_chats_that_the_template_cannot_tell_are_refused(processor):
    for turn in ({"role": "tool", "content": "3"}, {"role": "user", "content": [{"type": "video"}]}):
        with pytest.raises(Exception, match="tool|video"):
            processor.apply_chat_template([turn])


def test_the_mask_of_the_assistants_tokens_is_not_moved_by_images(processor):
    (picture,) = pictures_of([(3, 2)])
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}]}, *CHAT[2:]]
    features = processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    mask = torch.as_tensor(features["assistant_masks"])[0].bool()
    assert processor.decode(features["input_ids"][0][mask], skip_special_tokens=False) == f"yes{EOS}"


# Folders


@pytest.mark.parametrize("layout", ["interleaved", "reading_order"])
def test_saving_and_loading_changes_nothing(layout, tokenizer, tmp_path):
    processor = make_processor(tokenizer, token_layout=layout, max_image_tokens=50)
    processor.save_pretrained(tmp_path)
    loaded = DeepseekV4Processor.from_pretrained(tmp_path)
    inputs = {"text": f"a{IMAGE} the", "images": pictures_of([(3, 9)])}
    assert_equal_features(processor(**inputs), loaded(**inputs))
    assert loaded.chat_template == processor.chat_template
    assert loaded.image_processor.max_image_tokens == 50 and loaded.image_processor.max_wh_ratio is None
    remote = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")
    assert_equal_features(processor(**inputs), remote(**inputs))


def test_settings_given_while_loading_reach_their_processor(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    settings_given = {"max_image_tokens": 30, "min_pixels": 7, "patch_size": 2}
    loaded = DeepseekV4Processor.from_pretrained(tmp_path, backend="pil", **settings_given)
    assert isinstance(loaded.image_processor, DeepseekV4ImageProcessorPil)
    assert (loaded.image_processor.max_image_tokens, loaded.image_processor.patch_size) == (30, 2)
    assert not set(settings_given) & set(loaded.tokenizer.init_kwargs)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41"])
def test_a_published_folder_needs_nothing_but_its_config_and_tokenizer(model_type, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    if model_type == "deepseek_v4":
        fields = DeepseekV4VlConfig(vision_config=DeepseekV4VisionConfig(min_pixels=0)).to_dict()
    else:
        vision = {"max_image_tokens": 1024, "min_pixels": 0, "max_wh_ratio": None}
        fields = {"model_type": model_type, "vision_config": vision, "image_token_id": 129264}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    processor = DeepseekV4Processor.from_pretrained(tmp_path)
    features = processor(text=f"the{IMAGE}", images=np.zeros((42, 84, 3), dtype=np.uint8))
    assert features["image_grid_thw"].tolist() == [[1, 3, 6]]
    expected = naive_ids(tokenizer, ["the", (1, 2)])
    if model_type == "deepseek_v41":
        expected = [*naive_ids(tokenizer, ["the"]), *[129264] * 5]
    assert real_rows(features) == [expected]
    assert processor.apply_chat_template(CHAT, add_generation_prompt=True) == RENDERED


WITHOUT_TORCHVISION = """
import PIL.Image
from gridtower.processing.image_processing_deepseek_v4_vl import DeepseekV4ImageProcessor
from gridtower.processing.processing_deepseek_v4_vl import DeepseekV4Processor
processor = DeepseekV4Processor.from_pretrained(sys.argv[1])
print(type(processor.image_processor).__name__)
print(processor(text="<｜deepseek_image｜>", images=PIL.Image.new("RGB", (40, 50)))["image_grid_thw"].tolist())
try:
    DeepseekV4ImageProcessor()
except ImportError as error:
    print(error)
"""


def test_without_torchvision_images_go_through_pil_and_the_rest_says_what_to_install(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    backend, grid, error = run_without_torchvision(WITHOUT_TORCHVISION, tmp_path)
    assert (backend, grid) == ("DeepseekV4ImageProcessorPil", "[[1, 13, 10]]")
    assert "pip install torchvision" in error
