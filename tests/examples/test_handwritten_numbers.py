"""Pictures of handwritten numbers: whose scans, what sizes, which colours, and the tokenizer that goes with them."""

import io

import numpy as np
import pytest
from handwritten_numbers import (
    BUNDLED_PICTURE,
    LARGEST_DIGIT,
    LEAST_CONTRAST,
    SMALLEST_DIGIT,
    HandwrittenNumbers,
    draw_colours,
    sample_picture,
    scans_of_digits,
    small_tokenizer,
    split_scans,
    write_number,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import pre_tokenizers


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def test_every_scan_is_in_one_split_alone():
    splits = split_scans()
    assert not set(splits["train"]) & set(splits["test"])
    assert sorted([*splits["train"], *splits["test"]]) == list(range(len(load_digits().target)))


def test_both_splits_hold_scans_of_every_digit():
    for split, indices in split_scans().items():
        by_digit = scans_of_digits(split)
        assert [len(scans) for scans in by_digit] == np.bincount(load_digits().target[indices], minlength=10).tolist()
        assert all(by_digit)


def test_scans_keep_the_ink_of_their_source():
    index = split_scans()["test"][0]
    source = load_digits().images[index]
    first = scans_of_digits("test")[load_digits().target[index]][0]
    assert np.asarray(first).sum() == (source * (255 / 16)).astype(np.uint8).sum()


def test_the_same_index_gives_the_same_picture():
    first, second = (HandwrittenNumbers(10, seed=7) for _ in range(2))
    assert first[3][1] == second[3][1]
    assert np.array_equal(first[3][0], second[3][0])


@pytest.mark.parametrize("other", [{"seed": 8}, {"seed": 7, "split": "train"}])
def test_another_seed_or_split_gives_another_picture(other):
    picture, _ = HandwrittenNumbers(10, seed=7)[3]
    assert not np.array_equal(picture, HandwrittenNumbers(10, **other)[3][0])


def test_an_index_beyond_the_end_is_refused():
    with pytest.raises(IndexError, match="index is 10; this set holds 0 to 9"):
        HandwrittenNumbers(10)[10]


@given(st.text("0123456789", min_size=1, max_size=12), st.integers(0, 2**32), st.sampled_from(["train", "test"]))
@settings(max_examples=60, deadline=None)
def test_digits_lie_inside_the_picture_in_order_and_are_20_to_64_pixels_tall(digits, seed, split):
    picture, boxes = write_number(digits, np.random.default_rng(seed), split)
    assert len(boxes) == len(digits)
    for left, top, right, bottom in boxes:
        assert SMALLEST_DIGIT <= bottom - top <= LARGEST_DIGIT
        assert 0 <= left < right <= picture.width and 0 <= top < bottom <= picture.height
    assert all(before[2] <= after[0] for before, after in zip(boxes, boxes[1:]))


@pytest.mark.parametrize("seed", range(20))
def test_ink_stands_where_the_boxes_say(seed):
    picture, boxes = write_number("8", np.random.default_rng(seed))
    pixels = np.asarray(picture, dtype=float).mean(-1)
    (left, top, right, bottom) = boxes[0]
    inside = pixels[top:bottom, left:right]
    # Paper is what fills the picture's rim; an 8 puts ink on a good part of its box.
    paper = np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]))
    assert np.mean(abs(inside - paper) > LEAST_CONTRAST / 4) > 0.2


def test_sizes_gaps_and_margins_vary_over_their_range():
    layouts = [write_number("35", np.random.default_rng(seed)) for seed in range(200)]
    heights = [box[3] - box[1] for _, boxes in layouts for box in boxes]
    gaps = [(boxes[1][0] - boxes[0][2]) / (boxes[0][3] - boxes[0][1]) for _, boxes in layouts]
    margins = [boxes[0][0] for _, boxes in layouts]
    assert min(heights) <= 22 and max(heights) >= 60
    assert min(gaps) == 0 and max(gaps) > 0.9
    assert min(margins) == 0 and max(margins) > 60


@pytest.mark.parametrize("digits", ["", "12a", "-1", "²"])
def test_anything_but_digits_is_refused(digits):
    with pytest.raises(ValueError, match="characters 0 to 9"):
        write_number(digits, np.random.default_rng(0))


def test_dark_on_light_and_light_on_dark_both_occur_and_stay_readable():
    rng = np.random.default_rng(0)
    differences = np.array([paper.mean() - ink.mean() for ink, paper in (draw_colours(rng) for _ in range(400))])
    assert 0.4 < np.mean(differences > 0) < 0.6
    assert abs(differences).min() > LEAST_CONTRAST / 2


def test_numbers_of_every_length_asked_for_occur():
    answers = [answer for _, answer in map(HandwrittenNumbers(60, (1, 3, 6)).__getitem__, range(60))]
    assert {len(answer) for answer in answers} == {1, 3, 6}


def test_the_bundled_picture_is_the_one_the_script_makes_and_small():
    with io.BytesIO() as file:
        sample_picture().save(file, format="PNG", optimize=True)
        assert len(file.getvalue()) < 30_000
    assert np.array_equal(Image.open(BUNDLED_PICTURE), sample_picture())


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back_from_its_tokens(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) <= len(text.encode())


@given(st.text("0123456789", min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_every_digit_is_one_token(tokenizer, digits):
    assert tokenizer.convert_ids_to_tokens(tokenizer(digits)["input_ids"]) == list(digits)


def test_every_byte_and_every_mark_is_one_token_of_a_small_vocabulary(tokenizer):
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokenizer.get_vocab())
    marks = "<|im_start|><|vision_start|><|image|><|video|><|vision_end|><|im_end|><|pad|>"
    assert len(set(tokenizer(marks)["input_ids"])) == 7
    assert len(tokenizer) <= 512 + 7


def test_the_tokenizer_is_the_same_each_time(tokenizer):
    assert tokenizer.get_vocab() == small_tokenizer().get_vocab()


def test_the_chat_template_writes_an_image_between_its_marks_and_a_video_bare(tokenizer):
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Read."}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>user\n<|vision_start|><|image|><|vision_end|><|video|>Read.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_chat_template_takes_plain_strings_and_many_turns(tokenizer):
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False)
    assert prompt == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"


def test_pictures_not_coloured_are_black_on_white():
    pixels = np.asarray(write_number("17", np.random.default_rng(0), coloured=0.0)[0]).mean(-1)
    assert np.median(pixels) > 220
    assert pixels.min() < 60
