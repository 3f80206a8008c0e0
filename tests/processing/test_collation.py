"""Conversations become batches whose labels are exactly the assistant's turns, whatever spelling, template and family."""

import io
import json
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from gridtower.processing.collation import ConversationCollator, as_messages, labelled_text, read_conversations
from gridtower.processing.processing_pixtral import EARLY_CHAT_TEMPLATE

from ..hub_cards.tiny_models import TINY_MODELS, picture, trainer_settings

families = pytest.mark.parametrize("family", TINY_MODELS)
PARTS = (
    "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- elif part.type == 'video' -%}VIDEO{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
TEMPLATES = {
    "chatml": PARTS
    + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ show(message.content) }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "inst": PARTS + "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %} {{ show(message.content) }}{{ eos_token }}"
    "{% elif message.role == 'user' %}[INST] {{ show(message.content) }} [/INST]"
    "{% else %}[SYSTEM_PROMPT]{{ show(message.content) }}[/SYSTEM_PROMPT]{% endif %}{% endfor %}",
}
templates = pytest.mark.parametrize("template", TEMPLATES)
PLACES = {"lfm3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}


def make(family, template="chatml", **options):
    """A family's tiny model, and the collator of its processor with one of TEMPLATES."""
    model, processor = TINY_MODELS[family]()
    place = PLACES.get(family, processor.image_token)
    written = TEMPLATES[template].replace("IMAGE", place).replace("VIDEO", getattr(processor, "video_token", ""))
    processor.chat_template = written
    return model, ConversationCollator(processor, **options)


def user(*parts):
    return {"role": "user", "content": [as_part(part) for part in parts]}


def as_part(part):
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}


def answer(text):
    return {"role": "assistant", "content": text}


def clip(frames=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, 32, 32, 3), dtype=np.uint8)


ONE_IMAGE = {"messages": [user(picture(16, 8), "What?"), answer("A cat.")]}
TEXT_ALONE = {"messages": [user("Hello there"), answer("Hi!")]}
LONG = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        user("Look: ", picture(8, 8, 1), " and ", picture(16, 24, 2)),
        answer("First ä."),
        user(picture(8, 16, 3), "now?"),
        answer("Second, longer."),
        user("Last"),
        answer("Third"),
    ]
}
ROWS = [ONE_IMAGE, TEXT_ALONE, LONG]


def learned(collator, batch, row=0):
    ids, labels = batch["input_ids"][row], batch["labels"][row]
    kept = labels != -100
    assert torch.equal(labels[kept], ids[kept])
    return collator.processor.tokenizer.decode(ids[kept])


# Spellings

URL = "https://example.com/a.png"
MESSAGES = [
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": "A cat."},
]
SPELLINGS = {
    "parts with their sources": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ]
    },
    "columns filled up with None": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "text": None, "image_url": {"url": "a.png", "detail": None}},
                    {"type": "text", "text": "What?", "image_url": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A cat.", "image_url": None}]},
        ],
        "images": None,
    },
    "sources aside": {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A cat."},
        ],
        "images": [{"bytes": None, "path": "a.png"}],
    },
    "marks": {
        "messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}],
        "images": ["a.png"],
    },
    "LLaVA": {
        "id": 7,
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
    },
    "ShareGPT": {
        "conversations": [{"role": "human", "content": "<image>\nWhat?"}, {"role": "gpt", "content": "A cat."}],
        "images": ["a.png"],
        "videos": [],
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_conversation(spelling):
    assert as_messages(SPELLINGS[spelling]) == (MESSAGES, ["a.png"], [])


def test_an_image_url_may_be_a_string_or_an_object():
    for given in (URL, {"url": URL}):
        row = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": given}]}]}
        assert as_messages(row)[1] == [URL]


def test_a_column_of_undecoded_images_gives_bytes_before_names():
    row = {"messages": [{"role": "user", "content": "<image><image>"}]}
    images = [{"bytes": b"encoded", "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    assert as_messages(row | {"images": images})[1] == [b"encoded", "b.png"]


def test_marks_stand_anywhere_and_take_one_newline_with_them():
    value = "Before\n<image>\n<video>\n\nbetween <image> after\n"
    row = {"conversations": [{"from": "human", "value": value}], "images": ["a.png", "b.png"], "video": "c.mp4"}
    messages, images, videos = as_messages(row)
    assert messages[0]["content"] == [
        {"type": "text", "text": "Before"},
        {"type": "image", "image": "a.png"},
        {"type": "video", "video": "c.mp4"},
        {"type": "text", "text": "\nbetween "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": " after\n"},
    ]
    assert images == ["a.png", "b.png"] and videos == ["c.mp4"]


def test_a_mark_in_a_part_of_text_is_text():
    row = {"messages": [user("Write <image> in HTML"), answer("No.")]}
    assert as_messages(row)[0][0]["content"] == "Write <image> in HTML"


def test_frames_are_one_clip_and_files_are_several():
    content = "<video><video><video>"
    frames = ["a.png", "b.png"]
    row = {"messages": [{"role": "user", "content": content}], "videos": [frames, "c.mp4", clip()]}
    videos = as_messages(row)[2]
    assert videos[:2] == [frames, "c.mp4"] and videos[2].shape == (4, 32, 32, 3)
    assert as_messages({"messages": [{"role": "user", "content": "<video>"}], "video": frames})[2] == [frames]


def test_the_row_is_left_as_it_is():
    row = SPELLINGS["sources aside"]
    before = pickle.dumps(row)
    as_messages(row)
    assert pickle.dumps(row) == before


MISTAKES = {
    r"no conversation.*\['text'\].*`messages`": {"text": "Hello"},
    r"no conversation.*remove_unused_columns=False": {},
    r"a row is str.*dict": "Hello",
    r"message 1 has the role 'bot'.*human": {"messages": [answer("a"), {"role": "bot", "content": "b"}]},
    r"message 0 has the role None": {"messages": [{"content": "a"}]},
    r"message 0 is str.*dict": {"messages": ["Hello"]},
    r"message 0 has NoneType as content.*string": {"messages": [{"role": "user", "content": None}]},
    r"message 0 has the part \{'type': 'audio'\}.*video_url": {
        "messages": [{"role": "user", "content": [{"type": "audio"}]}]
    },
    r"message 0 has the part 'words'": {"messages": [{"role": "user", "content": ["words"]}]},
    r"2 place\(s\) for images in message\(s\) \[0, 2\], and 1 image\(s\).*one <image>": {
        "conversations": [
            {"from": "human", "value": "<image>\na"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": "<image>\nc"},
        ],
        "image": "a.png",
    },
    r"0 place\(s\) for videos in any message, and 1 video": {"messages": [user("a")], "videos": ["a.mp4"]},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_is_no_conversation_is_named(message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        as_messages(MISTAKES[message])


# Files


def write(path, *rows, lines=True):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) if lines else json.dumps(rows, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("lines", [True, False], ids=["jsonl", "json"])
def test_relative_paths_start_from_the_file_or_from_the_root_given(lines, tmp_path):
    data = "data:image/png;base64,AAAA.AAAA"
    rows = [
        SPELLINGS["LLaVA"] | {"path": "b.png", "image": ["a.png", "/abs.png"]},
        SPELLINGS["parts with their sources"],
        SPELLINGS["columns filled up with None"] | {"images": [URL, data, {"path": "deep/a.png"}, "iVBORw0KGgo"]},
        {"messages": [{"role": "user", "content": "a line end\u2028 and a path, b.png"}]},
    ]
    path = write(tmp_path / "rows.json", *rows, lines=lines)
    for root, options in ((tmp_path, {}), (tmp_path / "media", {"media_root": tmp_path / "media"})):
        read = read_conversations(path, **options)
        assert read[0] == rows[0] | {"image": [f"{root}/a.png", "/abs.png"]}
        assert read[1]["messages"][0]["content"][0] == {"type": "image", "path": f"{root}/a.png"}
        assert read[2]["messages"][0]["content"][0]["image_url"]["url"] == f"{root}/a.png"
        assert read[2]["images"] == [URL, data, {"path": f"{root}/deep/a.png"}, "iVBORw0KGgo"]
        assert read[3] == rows[3]


def test_a_name_without_a_full_stop_is_a_path_where_there_is_such_a_file(tmp_path):
    (tmp_path / "picture").touch()
    path = write(tmp_path / "rows.jsonl", {"image": "picture"}, {"image": "nothing"})
    assert [row["image"] for row in read_conversations(path)] == [f"{tmp_path}/picture", "nothing"]


BROKEN_FILES = {
    r"rows, line 3: .*column.*one whole JSON object a line": '{"a": 1}\n\n{"a": \n',
    r"rows, line 2: .*column": '[{"a": 1},\n {"a" 2}]',
    r"rows, line 2: int; a row is a JSON object": '{"a": 1}\n2\n',
    r"rows, entry 1: str; a row is a JSON object": '[{"a": 1}, "b"]',
    r"rows holds no row": "\n",
    r"rows is not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("message", BROKEN_FILES)
def test_a_broken_file_is_named_with_its_line(message, tmp_path):
    content = BROKEN_FILES[message]
    (tmp_path / "rows").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_conversations(tmp_path / "rows")


# Tokens and labels


@families
@templates
@pytest.mark.parametrize("learn_from", ["assistant", "last_turn", "all"])
def test_the_inputs_are_those_of_inference(family, template, learn_from):
    _, collator = make(family, template, learn_from=learn_from)
    for row in ROWS:
        batch = collator([row])
        expected = collator.processor.apply_chat_template(
            as_messages(row)[0], tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert set(batch) == {*expected, "labels"}
        for name, value in expected.items():
            assert torch.equal(batch[name], value), name
        assert batch["labels"].dtype == torch.int64 and batch["labels"].shape == batch["input_ids"].shape


@pytest.mark.parametrize("template", ["chatml", "inst"])
def test_a_text_begins_once_whether_the_template_or_the_tokenizer_writes_it(template):
    _, collator = make("deepseek_v4_vl", template)
    ids = collator([ONE_IMAGE])["input_ids"][0]
    assert (ids == collator.processor.tokenizer.bos_token_id).sum() == 1


ANSWERS = ["First ä.", "Second, longer.", "Third"]


@families
@templates
@pytest.mark.parametrize("learn_from, answers", [("assistant", ANSWERS), ("last_turn", ANSWERS[-1:])])
def test_answers_and_their_ends_are_learned_and_nothing_else(family, template, learn_from, answers):
    _, collator = make(family, template, learn_from=learn_from)
    opening = " " if template == "inst" else ""
    end = collator.processor.tokenizer.eos_token
    expected = "".join(f"{opening}{text}{end}" for text in answers)
    assert learned(collator, collator([LONG])) == expected
    # Padding moves them, and does not change them.
    batch = collator([LONG, TEXT_ALONE])
    assert learned(collator, batch) == expected and learned(collator, batch, 1) == f"{opening}Hi!{end}"


@families
def test_turns_of_the_assistant_may_open_the_conversation_follow_each_other_and_hold_images(family):
    _, collator = make(family)
    shown = {"role": "assistant", "content": [as_part("See "), as_part(picture(8, 8)), as_part("there")]}
    row = {"messages": [answer("Welcome"), user("Show"), shown, answer("Well?"), user("Thanks")]}
    _, end = collator.processor.tokenizer, collator.processor.tokenizer.eos_token
    around = PLACES.get(family, collator.processor.image_token).split(collator.processor.image_token)
    assert learned(collator, collator([row])) == f"Welcome{end}See {''.join(around)}there{end}Well?{end}"


@families
def test_turns_that_touch_images_end_and_begin_with_them(family):
    _, collator = make(family)
    processor = collator.processor
    processor.chat_template = PARTS.replace("IMAGE", processor.image_token) + (
        "{% for message in messages %}{{ show(message.content) }}{% endfor %}"
    )
    shown = {"role": "assistant", "content": [as_part(picture(8, 8)), as_part("that")]}
    row = {"messages": [user("Show", picture(16, 8)), answer("this"), user("and", picture(8, 8)), shown]}
    assert learned(collator, collator([row])) == "thisthat"


@families
@templates
def test_all_text_is_learned_but_its_first_token(family, template):
    _, collator = make(family, template, learn_from="all")
    batch = collator([ONE_IMAGE, LONG])
    inputs = collator.processor(
        text=[collator.processor.apply_chat_template(as_messages(row)[0]) for row in (ONE_IMAGE, LONG)],
        images=[as_messages(row)[1] for row in (ONE_IMAGE, LONG)],
        return_mm_token_type_ids=True,
        return_tensors="pt",
        **({"add_special_tokens": False} if template == "inst" else {}),
    )
    assert torch.equal(batch["input_ids"], inputs["input_ids"])
    text = (inputs["attention_mask"] == 1) & (inputs["mm_token_type_ids"] == 0)
    text &= inputs["attention_mask"].cumsum(-1) > 1
    assert torch.equal(batch["labels"] != -100, text)


def test_nothing_that_a_video_becomes_is_learned():
    _, collator = make("lfm3_vl", learn_from="all")
    row = {"messages": [user("See ", "this"), answer("Yes.")]}
    row["messages"][0]["content"].insert(1, {"type": "video", "video": clip(8)})
    batch = collator([row])
    assert len(batch["video_grid_thw"]) == 1 and "image_grid_thw" not in batch
    text = collator.processor.tokenizer.decode(batch["input_ids"][0])
    assert text.count("seconds>") == batch["video_grid_thw"][0, 0] > 1
    assert learned(collator, batch) == "|im_start|>user\nSee this</s>\n<|im_start|>assistant\nYes.</s>\n"


def test_a_template_that_rewrites_earlier_turns_is_refused_and_its_last_turn_learned():
    _, collator = make("pixtral")
    # The system prompt opens the last of the user's turns, so every turn moves it.
    collator.processor.chat_template = EARLY_CHAT_TEMPLATE
    with pytest.raises(
        ValueError, match=r"row 0 of the batch: the chat template rewrites the first 3 messages .*'last_turn'"
    ):
        collator([LONG])
    last = ConversationCollator(collator.processor, learn_from="last_turn")
    assert learned(last, last([LONG])) == "Third</s>"
    assert learned(collator, collator([ONE_IMAGE])) == "A cat.</s>"


def test_a_template_that_asks_otherwise_than_it_writes_is_refused():
    _, collator = make("pixtral")
    collator.processor.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(ValueError, match=r"asks for message 1 otherwise .*assistant\\n<think>' ends the prompt"):
        collator([ONE_IMAGE])


def test_a_template_that_refuses_a_message_is_quoted():
    _, collator = make("pixtral")
    collator.processor.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"row 0 .*refuses the first 2 message.*user.*roles must alternate"):
        collator([ONE_IMAGE])


def test_what_follows_a_turn_is_learned_where_no_token_ends_it():
    _, collator = make("pixtral")
    collator.processor.chat_template = TEMPLATES["chatml"].replace("{{ eos_token }}", "")
    assert learned(collator, collator([TEXT_ALONE])) == "Hi!\n"


@pytest.mark.parametrize("learn_from", ["assistant", "last_turn"])
def test_a_row_without_an_answer_is_refused(learn_from):
    _, collator = make("pixtral", learn_from=learn_from)
    with pytest.raises(ValueError, match=r"row 1 of the batch, id 'x': no message of the assistant's.*'all'"):
        collator([ONE_IMAGE, {"id": "x", "messages": [user("Hello")]}])


# Rows that cannot go in


def with_image(source):
    question = [as_part(picture(8, 8)), {"type": "image", "image": source}]
    return {"id": "bad", "messages": [{"role": "user", "content": question}, answer("b")]}


TRUNCATED = io.BytesIO()
picture(40, 40).save(TRUNCATED, "PNG")
UNREADABLE = {
    "missing": "nowhere/a.png",
    "truncated": TRUNCATED.getvalue()[:200],
    "no picture": b"words",
    "empty": np.zeros((0, 4, 3), dtype=np.uint8),
}


@families
def test_a_row_is_never_cut(family):
    _, collator = make(family)
    needed = collator([LONG])["input_ids"].shape[1]
    _, fits = make(family, max_length=needed)
    assert fits([LONG, TEXT_ALONE])["input_ids"].shape == (2, needed)
    _, short = make(family, max_length=needed - 1)
    with pytest.raises(ValueError, match=f"row 1 .*needs {needed} tokens, and max_length is {needed - 1}.*'skip'"):
        short([TEXT_ALONE, LONG])
    _, skipping = make(family, max_length=needed - 1, on_too_long="skip")
    expected = skipping([TEXT_ALONE, ONE_IMAGE])
    batch = skipping([TEXT_ALONE, LONG, ONE_IMAGE, LONG])
    assert all(torch.equal(batch[name], value) for name, value in expected.items())
    assert skipping.skipped == {"too_long": 2, "unreadable": 0}


@families
@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_image_is_named_or_its_row_left_out(family, kind):
    _, strict = make(family)
    with pytest.raises(ValueError, match=r"row 1 of the batch, id 'bad': image 1 cannot be read: "):
        strict([TEXT_ALONE, with_image(UNREADABLE[kind])])
    _, skipping = make(family, on_unreadable="skip")
    batch = skipping([with_image(UNREADABLE[kind]), TEXT_ALONE])
    assert torch.equal(batch["input_ids"], strict([TEXT_ALONE])["input_ids"])
    assert skipping.skipped == {"too_long": 0, "unreadable": 1}


def test_an_unreadable_video_is_named_or_its_row_left_out(clip_file, tmp_path):
    (tmp_path / "cut.mp4").write_bytes(clip_file().read_bytes()[:100])
    video = {"type": "video", "path": str(tmp_path / "cut.mp4")}
    row = {"messages": [{"role": "user", "content": [video]}, answer("b")]}
    _, strict = make("lfm3_vl")
    with pytest.raises(ValueError, match=r"row 0 .*video 0 cannot be read: .*cut\.mp4"):
        strict([row])
    _, skipping = make("lfm3_vl", on_unreadable="skip")
    assert len(skipping([TEXT_ALONE, row])["input_ids"]) == 1
    assert skipping.skipped["unreadable"] == 1


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_other_mistakes_are_never_skipped(policy):
    _, collator = make("pixtral", on_unreadable=policy, on_too_long=policy)
    for row, message in (
        ({"messages": [user("a [IMG]"), answer("b")]}, "row 1 .*placeholder"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "row 1 .*role 'bot'"),
    ):
        with pytest.raises(ValueError, match=message):
            collator([TEXT_ALONE, row])


@pytest.mark.parametrize("family", ["deepseek_v4_vl", "pixtral"])
def test_a_family_without_videos_says_so(family):
    _, collator = make(family, on_unreadable="skip")
    row = {"messages": [{"role": "user", "content": "<video>"}, answer("b")], "videos": [clip()]}
    with pytest.raises(ValueError, match="row 0 .*takes images and text only"):
        collator([row])


def test_the_last_good_row_stands_in_for_a_batch_of_which_nothing_is_left():
    _, collator = make("pixtral", on_unreadable="skip")
    bad = with_image("nowhere.png")
    with pytest.raises(ValueError, match=r"none of 2 row\(s\) is left.*'unreadable': 2"):
        collator([bad, bad])
    expected = collator([TEXT_ALONE, ONE_IMAGE])
    batch = collator([bad])
    alone = make("pixtral")[1]([ONE_IMAGE])
    assert set(batch) == set(alone) and all(torch.equal(batch[name], alone[name]) for name in alone)
    assert len(expected["input_ids"]) == 2 and collator.skipped["unreadable"] == 3


def collator_with_a_row_seen():
    _, collator = make("pixtral", on_unreadable="skip", on_too_long="skip", max_length=200)
    collator([TEXT_ALONE])
    return collator


def test_rows_that_workers_leave_out_are_counted():
    collator = collator_with_a_row_seen()
    too_long = {"messages": [user("a" * 300), answer("b")]}
    rows = [TEXT_ALONE, with_image("nowhere.png"), too_long, ONE_IMAGE, with_image("nowhere.png"), TEXT_ALONE]
    batches = list(DataLoader(rows, collate_fn=collator, num_workers=2, multiprocessing_context="fork"))
    # A worker that has kept no row yet falls back on the one from before it started.
    assert len(batches) == 6 and all((batch["labels"] != -100).any() for batch in batches)
    assert collator.skipped == {"too_long": 1, "unreadable": 2}


def test_what_is_sent_to_a_worker_that_starts_afresh_counts_in_the_same_memory():
    collator = collator_with_a_row_seen()
    sent = pickle.loads(ForkingPickler.dumps(collator))
    assert sent([with_image("nowhere.png")])["labels"].ne(-100).any()
    assert collator.skipped == {"too_long": 0, "unreadable": 1}


@families
def test_a_pickled_collator_makes_the_same_batches(family):
    _, collator = make(family, max_length=500, on_too_long="skip")
    again = pickle.loads(pickle.dumps(collator))
    batch, same = collator(ROWS), again(ROWS)
    assert set(batch) == set(same) and all(torch.equal(batch[name], same[name]) for name in batch)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"learn_from": "user"}, "learn_from is 'user'; give one of assistant, last_turn, all"),
        ({"on_too_long": "cut"}, "on_too_long is 'cut'; give one of raise, skip"),
        ({"on_unreadable": None}, "on_unreadable is None"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_unknown_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make("pixtral", **options)


def test_a_processor_without_a_template_is_refused():
    processor = TINY_MODELS["pixtral"]()[1]
    with pytest.raises(ValueError, match="no chat template; set its `chat_template`"):
        ConversationCollator(processor)


def test_rows_of_different_lengths_need_a_padding_token():
    _, collator = make("pixtral")
    collator.processor.tokenizer.pad_token = None
    assert len(collator([TEXT_ALONE, TEXT_ALONE])["input_ids"]) == 2
    with pytest.raises(ValueError, match="no padding token; set its `pad_token`"):
        collator([TEXT_ALONE, ONE_IMAGE])


# Batches


@families
def test_text_alone_has_no_pixels(family):
    _, collator = make(family)
    batch = collator([TEXT_ALONE, TEXT_ALONE])
    roles = {"image_token_roles"} & set(batch)
    assert set(batch) == {"input_ids", "attention_mask", "labels", *roles}


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_its_rows_with_padding_on_one_side(family, side):
    _, collator = make(family)
    if side == "right":
        # Left is the processor's own choice, which a tokenizer that was told overrules.
        collator.processor.tokenizer.init_kwargs["padding_side"] = collator.processor.tokenizer.padding_side = side
    batch = collator(ROWS)
    alone = [collator([row]) for row in ROWS]
    length = max(one["input_ids"].shape[1] for one in alone)
    for row, one in enumerate(alone):
        own = one["input_ids"].shape[1]
        kept = slice(length - own, None) if side == "left" else slice(0, own)
        rest = torch.ones(length, dtype=torch.bool)
        rest[kept] = False
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(batch[name][row, kept], one[name][0])
        assert (batch["input_ids"][row, rest] == collator.processor.tokenizer.pad_token_id).all()
        assert (batch["attention_mask"][row, rest] == 0).all() and (batch["labels"][row, rest] == -100).all()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(batch[name], torch.cat([one[name] for one in alone if name in one]))


def test_a_batch_is_what_the_processor_makes_of_its_rows_together():
    for family, options in (("pixtral", {"layout": "padded"}), ("deepseek_v4_vl", {"token_layout": "reading_order"})):
        _, collator = make(family)
        for name, value in options.items():
            setattr(collator.processor.image_processor, name, value)
        batch = collator(ROWS)
        messages = [as_messages(row)[0] for row in ROWS]
        expected = collator.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert set(batch) == {*expected, "labels"}
        for name, value in expected.items():
            assert torch.equal(batch[name], value), name


def film(frames=4):
    messages = [{"role": "user", "content": "<video>\n<image>\nSame?"}, answer("No.")]
    return {"messages": messages, "videos": [clip(frames)], "images": [picture(8, 8)]}


def test_images_videos_and_text_go_into_one_batch():
    _, collator = make("lfm3_vl")
    batch = collator([ONE_IMAGE, film(), TEXT_ALONE])
    assert len(batch["image_grid_thw"]) == 2 and len(batch["video_grid_thw"]) == 1
    assert len(batch["pixel_values"]) == batch["image_grid_thw"].prod(-1).sum()
    assert len(batch["pixel_values_videos"]) == batch["video_grid_thw"].prod(-1).sum()
    assert [learned(collator, batch, row) for row in range(3)] == ["A cat.</s>", "No.</s>", "Hi!</s>"]


@families
def test_packed_rows_follow_each_other_without_padding(family):
    _, collator = make(family, learn_from="all", packing=True)
    _, apart = make(family, learn_from="all")
    batch, alone = collator(ROWS), [apart([row]) for row in ROWS]
    lengths = [one["input_ids"].shape[1] for one in alone]
    for name in ("input_ids", "labels"):
        assert torch.equal(batch[name], torch.cat([one[name] for one in alone], dim=1))
    assert batch["position_ids"].tolist() == [[place for length in lengths for place in range(length)]]
    assert batch["seq_idx"].tolist() == [[row for row, length in enumerate(lengths) for _ in range(length)]]
    assert batch["position_ids"].dtype == torch.int64 and batch["seq_idx"].dtype == torch.int32
    assert (batch["labels"][batch["position_ids"] == 0] == -100).all()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(batch[name], torch.cat([one[name] for one in alone if name in one]))
    assert "attention_mask" not in batch


def test_max_length_bounds_each_of_the_packed_rows():
    _, collator = make("pixtral")
    length = collator([LONG])["input_ids"].shape[1]
    _, packing = make("pixtral", packing=True, max_length=length)
    assert packing([LONG, LONG])["input_ids"].shape == (1, 2 * length)


@families
@templates
def test_prompts_end_where_the_last_answer_begins(family, template):
    _, collator = make(family, template)
    collator.processor.tokenizer.init_kwargs["padding_side"] = collator.processor.tokenizer.padding_side = "right"
    inputs, references = collator.prompts([LONG, ONE_IMAGE])
    assert references == ["Third", "A cat."] and "labels" not in inputs
    for row, (asked, reference) in enumerate(zip([LONG, ONE_IMAGE], references)):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row] == 1]
        whole = collator([asked])["input_ids"][0]
        assert torch.equal(ids, whole[: len(ids)])
        rest = collator.processor.tokenizer.decode(whole[len(ids) :])
        assert rest.strip() == reference + collator.processor.tokenizer.eos_token
        # Generation goes on at the right.
        assert inputs["attention_mask"][row, -1] == 1
    assert len(inputs["image_grid_thw"]) == 4


def test_prompts_need_an_answer_and_leave_rows_out_with_their_references():
    _, collator = make("pixtral", on_unreadable="skip")
    with pytest.raises(ValueError, match="row 1 .*the last message is the user's"):
        collator.prompts([ONE_IMAGE, {"messages": [user("a")]}])
    inputs, references = collator.prompts([with_image("nowhere.png"), TEXT_ALONE])
    assert references == ["Hi!"] and len(inputs["input_ids"]) == 1
    assert collator.prompts([with_image("nowhere.png")]) == ({}, [])
    assert collator.skipped["unreadable"] == 2


# For people


@families
def test_a_row_is_shown_with_its_media_counted(family):
    _, collator = make(family)
    processor = collator.processor
    batch = collator([ONE_IMAGE, LONG])
    runs = labelled_text(batch["input_ids"][0], batch["labels"][0], processor)
    end = processor.tokenizer.eos_token
    assert [text for text, is_learned in runs if is_learned] == [f"A cat.{end}"]
    assert [is_learned for _, is_learned in runs] == [False, True, False]
    before, after = runs[0][0], runs[2][0]
    padding = (batch["attention_mask"][0] == 0).sum()
    assert before.startswith(f"{processor.tokenizer.pad_token} x {padding}") and after == "\n"
    tokens = torch.isin(batch["input_ids"][0], torch.tensor(processor.image_token_ids)).sum()
    assert f"{processor.image_token} x {tokens}" in before and before.count(processor.image_token) == 1
    assert before.endswith(f"What?{end}\n<|im_start|>assistant\n")


# Models


@families
@templates
def test_the_loss_is_that_of_labels_made_by_hand(family, template):
    model, collator = make(family, template)
    processor, end = collator.processor, collator.processor.tokenizer.eos_token
    messages = as_messages(ONE_IMAGE)[0]
    special = {"add_special_tokens": False} if template == "inst" else {}
    prompt = processor.apply_chat_template(messages[:1], add_generation_prompt=True)
    inputs = processor(
        text=prompt, images=ONE_IMAGE["messages"][0]["content"][0]["image"], return_tensors="pt", **special
    )
    asked = inputs["input_ids"][0].tolist()
    pieces = {"chatml": (f"A cat.{end}", "\n"), "inst": (f" A cat.{end}", "")}[template]
    said, rest = (processor.tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
    ids = torch.tensor([asked + said + rest])
    labels = torch.tensor([[-100] * len(asked) + said + [-100] * len(rest)])
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        expected = model(input_ids=ids, labels=labels, **pixels).loss
        loss = model(**collator([ONE_IMAGE])).loss
    assert loss.isfinite() and torch.equal(loss, expected)


@families
def test_the_loss_of_a_mixed_batch_is_the_mean_over_the_tokens_of_its_rows(family):
    model, collator = make(family)
    batch = collator(ROWS)
    counts = (batch["labels"] != -100).sum(-1)
    with torch.no_grad():
        alone = torch.stack([model(**collator([row])).loss for row in ROWS])
        assert model(**batch).loss.item() == pytest.approx(((alone * counts).sum() / counts.sum()).item(), abs=1e-4)


@families
def test_packed_rows_have_the_loss_of_a_padded_batch(family):
    model, padded = make(family)
    _, packing = make(family, packing=True)
    with torch.no_grad():
        assert model(**packing(ROWS)).loss.item() == pytest.approx(model(**padded(ROWS)).loss.item(), abs=1e-4)


def test_packed_rows_with_videos_have_the_loss_of_a_padded_batch():
    model, padded = make("lfm3_vl")
    _, packing = make("lfm3_vl", packing=True)
    rows = [film(), TEXT_ALONE, film(8), ONE_IMAGE]
    batch = packing(rows)
    assert len(batch["video_grid_thw"]) == 2 and len(batch["input_ids"]) == 1
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(model(**padded(rows)).loss.item(), abs=1e-4)


@families
def test_trainer_takes_the_collator(family, tmp_path):
    model, collator = make(family)
    trainer = Trainer(
        model,
        TrainingArguments(**trainer_settings(tmp_path, per_device_train_batch_size=3)),
        data_collator=collator,
        train_dataset=ROWS,
        eval_dataset=ROWS,
    )
    with torch.no_grad():
        expected = model(**collator(ROWS)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
    assert trainer.train().training_loss == pytest.approx(expected, abs=1e-4)
