"""Rows of conversations with images and videos -> batches with labels, for transformers' `Trainer` and plain loops.

Family-neutral: a turn is what the chat template adds when it renders one message more, so any template will do whose
text only grows; the joint processor makes the tokens, as in inference.
"""

import json
import os
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from transformers.utils import logging

from .media_loading import flat_media, is_image, is_nest, is_video
from .processing_deepseek_v4_vl import NO_ROLE

logger = logging.get_logger(__name__)

IGNORED = -100
CONVERSATION_FIELDS = ("messages", "conversations")
NESTED_FIELDS = (*CONVERSATION_FIELDS, "content", "value")
MEDIA_FIELDS = ("image", "images", "image_url", "video", "videos", "video_url")
SOURCE_FIELDS = ("url", "path")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
KINDS = {"image": is_image, "video": is_video}
PART_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
MARK = re.compile(r"\n?<(image|video)>\n?")
LEARN_FROM = ("assistant", "last_turn", "all")
POLICIES = ("raise", "skip")
REASONS = ("too_long", "unreadable")
# What stands where a shorter row has no token; the id of the padding token comes from the tokenizer.
FILLS = {"input_ids": None, "attention_mask": 0, "labels": IGNORED, "image_token_roles": NO_ROLE}


def read_conversations(path, media_root=None):
    """Rows of a JSON file (a list of objects) or a JSONL file (an object a line); the media they name stay closed.

    Args:
        path: the file, in UTF-8.
        media_root: folder that relative paths of media start from; by default the file's own.

    Returns:
        `list[dict]`: the rows as written, but for relative paths of media, which become absolute.

    Raises:
        ValueError: no JSON, or no row; names the file, the line and the remedy.
    """
    root = os.path.abspath(Path(path).parent if media_root is None else media_root)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    if text.lstrip().startswith("["):
        numbered = [(f"entry {number}", row) for number, row in enumerate(parsed_json(text, path))]
    else:
        # Not `splitlines`: JSON may hold other line separators within a string.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        numbered = [(f"line {number}", parsed_json(line, path, number)) for number, line in lines]
    if not numbered:
        raise ValueError(f"{path} holds no row; write a list of JSON objects, or one JSON object a line")
    for place, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {place}: {type(row).__name__}; a row is a JSON object with its `messages`")
    return [with_media_under(root, row) for _, row in numbered]


def parsed_json(text, path, first_line=1):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {first_line + error.lineno - 1}: {error.msg} at column {error.colno}; write a list of JSON "
            "objects, or one whole JSON object a line"
        ) from error


def with_media_under(root, node):
    """`node` (a row, a message, a part or a list of them) with the relative paths of its media below `root`."""
    if isinstance(node, list):
        return [with_media_under(root, entry) for entry in node]
    if not isinstance(node, dict):
        return node
    changed = {key: with_media_under(root, node[key]) for key in NESTED_FIELDS if key in node}
    # Rows may have a `url` or `path` of another meaning; parts, which have a type, may not.
    sources = MEDIA_FIELDS + SOURCE_FIELDS * ("type" in node)
    return node | changed | {key: media_under(root, node[key]) for key in sources if key in node}


def media_under(root, media):
    if isinstance(media, list):
        return [media_under(root, entry) for entry in media]
    if isinstance(media, dict):
        return media | {key: media_under(root, media[key]) for key in SOURCE_FIELDS if key in media}
    if not isinstance(media, str) or "://" in media or media.startswith("data:"):
        return media
    joined = os.path.join(root, media)
    # Base64 text has no full stop, and most names of files have one.
    return joined if "." in media or os.path.isfile(joined) else media


def as_messages(row):
    """A row in any common spelling as messages for `processor.apply_chat_template`; its media stay closed.

    The conversation stands in `messages` or `conversations`, each message with `role` and `content` or with `from` and
    `value`. Content is a string, or a list of parts of the types text, image, image_url, video and video_url. In a string
    `<image>` and `<video>` mark where media go, and one newline between mark and text is dropped; the text of a part is
    taken as it is. Marks, and parts that name no source, take the media in `image` or `images`, `video` or `videos` of the
    row, in order. A source is a path, URL, data URL, base64 text, bytes, PIL image, array, for a video also a list of
    frames, or a dict that holds one of them as `url`, `bytes` or `path`.

    Args:
        row: dict, which is left as it is. Further entries of its messages go to the template.

    Returns:
        `(messages, images, videos)`: messages with the roles system, user and assistant, their content a string or a
        list of parts `{"type": "text", "text": …}`, `{"type": "image", "image": source}` and
        `{"type": "video", "video": source}` (a single part of text becomes its string); and the sources in order.

    Raises:
        ValueError: no conversation, an unknown role or part, or as many places as media do not; names the message.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is {type(row).__name__}; give a dict with its `messages` or `conversations`")
    turns = next((row[field] for field in CONVERSATION_FIELDS if row.get(field) is not None), None)
    if not is_nest(turns) or not turns:
        raise ValueError(
            f"no conversation in a row with the fields {sorted(map(str, row))}; give a list of messages as `messages` or "
            "`conversations` (and, with Trainer, remove_unused_columns=False)"
        )
    messages = [as_message(index, turn) for index, turn in enumerate(turns)]
    for kind, is_one in KINDS.items():
        sources = [source for field in (kind, f"{kind}s") for source in flat_media(row.get(field), is_one)]
        fill_places(messages, [media_source(source) for source in sources], kind)
    return messages, *(media_in(messages, kind) for kind in KINDS)


def as_message(index, turn):
    if not isinstance(turn, Mapping):
        raise ValueError(f"message {index} is {type(turn).__name__}; give a dict with `role` and `content`")
    role, content = (first_given(turn, names) for names in (("role", "from"), ("content", "value")))
    if role not in list(ROLES):
        raise ValueError(f"message {index} has the role {role!r}; give one of {', '.join(ROLES)}")
    if isinstance(content, str):
        pieces = MARK.split(content)  # text, kind of medium, text, …
        parts = [
            {"type": "text", "text": piece} if place % 2 == 0 else {"type": piece}
            for place, piece in enumerate(pieces)
        ]
        content = [part for part in parts if part.get("text") != ""] if len(parts) > 1 else content
    elif is_nest(content):
        content = [as_part(index, part) for part in content]
    else:
        raise ValueError(f"message {index} has {type(content).__name__} as content; give a string or a list of parts")
    if is_nest(content) and [part["type"] for part in content] == ["text"]:
        # Some templates take strings alone from the assistant.
        content = content[0]["text"]
    others = {name: value for name, value in turn.items() if name not in ("role", "from", "content", "value")}
    return others | {"role": ROLES[role], "content": content}


def as_part(index, part):
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in list(PART_KINDS):
        shown = repr(part) if len(repr(part)) <= 80 else f"one of type {kind!r}"
        raise ValueError(
            f"message {index} has the part {shown}; give {{'type': 'text', 'text': …}}, or a type of {', '.join(PART_KINDS)}"
        )
    kind = PART_KINDS[kind]
    source = media_source(first_given(part, (kind, f"{kind}_url", "url", "path", "base64")))
    return {"type": kind} if source is None else {"type": kind, kind: source}


def media_source(source):
    return first_given(source, ("url", "bytes", "path")) if isinstance(source, Mapping) else source


def first_given(mapping, names):
    """The first value under `names` that is not `None`: tables fill up with it what a row has not."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def fill_places(messages, media, kind):
    """Gives `media` in order to the parts of `kind` without a source."""
    places = [
        (index, part)
        for index, message in enumerate(messages)
        for part in parts_of(message)
        if part["type"] == kind and kind not in part
    ]
    if len(places) != len(media):
        where = f"in message(s) {sorted({index for index, _ in places})}" if places else "in any message"
        raise ValueError(
            f"{len(places)} place(s) for {kind}s {where}, and {len(media)} {kind}(s) in the row to fill them; write one "
            f"<{kind}>, or one part of type {kind}, for each. What only looks like a mark belongs in a part of type text"
        )
    for (_, part), source in zip(places, media):
        part[kind] = source


def parts_of(message):
    return message["content"] if is_nest(message["content"]) else []


def media_in(messages, kind):
    """Sources of the images or videos of `messages`, in order."""
    return [part[kind] for message in messages for part in parts_of(message) if part["type"] == kind]


class RowLeftOut(ValueError):
    """A row cannot go into a batch, for one of REASONS."""

    def __init__(self, reason, message):
        super().__init__(message)
        self.reason = reason


class ConversationCollator:
    """Makes batches with labels of rows of conversations (see `as_messages`): a `data_collator`, which can be pickled.

    Trainer needs `remove_unused_columns=False`, and rows whose media are still closed: they are opened here, in the
    workers of a DataLoader. Tokens are those of `processor.apply_chat_template(messages, tokenize=True)`. Rows are padded
    on the side that the processor pads prompts on: the left, unless its tokenizer says otherwise.

    A token is learned if it overlaps a turn to learn from, its end token included, but not what the template writes after
    that. Never learned: all that an image or video becomes, timestamps and the like included; padding; the first token of
    a row, which nothing comes before.

    A row is never cut. Rows left out are counted in `skipped`. Where none of a batch is left, the last row that was kept,
    in this process, takes its place, since a Trainer cannot take an empty batch. Workers that start after a call on a good
    row have that one from the beginning; without any, an empty batch is an error.

    Args:
        processor: a joint processor with a fast tokenizer and a chat template.
        learn_from: "assistant" (each of its messages), "last_turn" (the last of them) or "all" (all text).
        max_length: most tokens of a row, of each by itself under `packing` too; `None` for no limit.
        on_too_long, on_unreadable: "raise", or "skip" to leave out a row that is longer, or of which the image or video
            processor cannot take an image or video (no such file, broken, no connection, an impossible shape).
        packing: all rows of a batch one after the other in one row without padding, told apart by positions.

    Raises:
        ValueError: an unknown choice, or a processor that lacks what is needed.
    """

    def __init__(
        self,
        processor,
        learn_from="assistant",
        max_length=None,
        on_too_long="raise",
        on_unreadable="raise",
        packing=False,
    ):
        choices = (
            ("learn_from", learn_from, LEARN_FROM),
            ("on_too_long", on_too_long, POLICIES),
            ("on_unreadable", on_unreadable, POLICIES),
        )
        for name, given, allowed in choices:
            if given not in allowed:
                raise ValueError(f"{name} is {given!r}; give one of {', '.join(allowed)}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is {max_length}; give a number of tokens, or None for no limit")
        if not processor.tokenizer.is_fast:
            raise ValueError(f"{type(processor.tokenizer).__name__} tells no offsets; labels need a fast tokenizer")
        if processor.chat_template is None:
            raise ValueError(f"{type(processor).__name__} has no chat template; set its `chat_template`")
        self.processor = processor
        self.learn_from = learn_from
        self.max_length = max_length
        self.policies = {"too_long": on_too_long, "unreadable": on_unreadable}
        self.packing = packing
        self._added_tokens = tuple(str(token) for token in processor.tokenizer.added_tokens_decoder.values())
        # Shared with workers; every process counts in a row of its own, so that no two write to the same place.
        self._counts = torch.zeros(1024, len(REASONS), dtype=torch.int64).share_memory_()
        self._last_example = None

    @property
    def skipped(self):
        """`{"too_long": rows, "unreadable": rows}` left out so far by this process and its DataLoader workers."""
        return dict(zip(REASONS, self._counts.sum(0).tolist()))

    def __call__(self, rows):
        """A batch for a model.

        Args:
            rows: list of dicts, see `as_messages`.

        Returns:
            dict of tensors: `input_ids` and `labels` int64 (rows, length), with -100 for what is not learned,
            `attention_mask`, and what the processor makes of images and videos, in order; no pixels for text alone. With
            `packing` (1, tokens of all rows) each, `position_ids` int64, which begin at 0 with each row, and `seq_idx`
            int32, the number of the row, in the place of `attention_mask`.

        Raises:
            ValueError: names the row by its index in the batch, what is wrong with it, and the remedy.
        """
        examples = self._kept(rows, self._example)
        if not examples and self._last_example is None:
            raise ValueError(
                f"none of {len(rows)} row(s) is left, and none was kept before; skipped so far: {self.skipped}. Raise "
                "max_length, mend the data, or call the collator on a good row before training"
            )
        examples = examples or [self._last_example]
        self._last_example = examples[-1]
        return packed(examples) if self.packing else self._padded(examples, self._pads_left())

    def prompts(self, rows):
        """Prompts for generation, up to the last message, which is the assistant's, and what it answers.

        Args:
            rows: as in a call; `max_length` bounds the prompt.

        Returns:
            `(inputs, references)`: a batch without labels, padded on the left, and `list[str]`. Rows may be left out of
            both; `({}, [])` where none is left.

        Raises:
            ValueError: as a call, and where the last message is not the assistant's.
        """
        kept = self._kept(rows, self._prompt)
        if not kept:
            return {}, []
        inputs, references = zip(*kept)
        return self._padded(inputs, at_the_left=True), list(references)

    def _kept(self, rows, prepare):
        """What `prepare` makes of each row that need not be left out."""
        kept = []
        for index, row in enumerate(rows):
            try:
                kept.append(prepare(row))
            except ValueError as error:
                name = f", id {row['id']!r}" if isinstance(row, Mapping) and "id" in row else ""
                reason = getattr(error, "reason", None)
                if self.policies.get(reason) != "skip":
                    raise ValueError(f"row {index} of the batch{name}: {error}") from error
                self._counts[os.getpid() % len(self._counts), REASONS.index(reason)] += 1
                logger.info(f"row {index} of a batch{name} is left out: {error}")
        return kept

    def _example(self, row):
        messages, *_ = as_messages(row)
        text = self._rendered(messages)
        turns = self._turns(messages, text)
        inputs, offsets, places = self._encoded(text, messages)
        learned = overlapping(offsets, [[shifted(place, places) for place in turn] for turn in turns])
        learned &= ~overlapping(offsets, [place["new_span"] for place in places])
        learned[0] = False
        if not learned.any():
            raise ValueError(
                f"nothing to learn with learn_from={self.learn_from!r}: all text there is empty; leave it out"
            )
        return inputs | {"labels": inputs["input_ids"].masked_fill(~learned, IGNORED)}

    def _prompt(self, row):
        *asked, answer = as_messages(row)[0]
        if answer["role"] != "assistant":
            raise ValueError(
                f"the last message is the {answer['role']}'s; evaluation needs an answer of the assistant's"
            )
        inputs, *_ = self._encoded(self._rendered(asked, add_generation_prompt=True), asked)
        texts = [part.get("text", "") for part in parts_of(answer)]
        return inputs, "".join(texts) if is_nest(answer["content"]) else answer["content"]

    def _rendered(self, messages, add_generation_prompt=False):
        try:
            # In a list, so that no message at all is a conversation too.
            (text,) = self.processor.apply_chat_template([messages], add_generation_prompt=add_generation_prompt)
        except Exception as error:  # A template may raise anything.
            raise ValueError(
                f"the chat template refuses the first {len(messages)} message(s), of the roles "
                f"{[message['role'] for message in messages]}: {error}; give what it takes, or another template"
            ) from error
        return text

    def _turns(self, messages, text):
        """(start, end) in `text`, the messages as rendered, of each turn to learn from."""
        if self.learn_from == "all":
            # With room for what the tokenizer adds, whose offsets are (0, 0).
            return [(-1, len(text) + 1)]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("no message of the assistant's to learn from; add one, or pass learn_from='all'")
        return [self._turn(messages, index, text) for index in answers[-1 if self.learn_from == "last_turn" else 0 :]]

    def _turn(self, messages, index, text):
        before = self._rendered(messages[:index], add_generation_prompt=True)
        through = text if index + 1 == len(messages) else self._rendered(messages[: index + 1])
        if not text.startswith(through):
            raise ValueError(
                f"the chat template rewrites the first {index + 1} messages once more follow, so that the turn of message "
                f"{index} cannot be told; pass learn_from='last_turn' or 'all', split the row into one for each answer, or "
                "take a template whose text only grows"
            )
        if not through.startswith(before):
            raise ValueError(
                f"the chat template asks for message {index} otherwise than it writes it down, so that its turn cannot be "
                f"told: {before[-40:]!r} ends the prompt; take a template that writes this before every answer too"
            )
        ended = through.rstrip()
        return len(before), len(ended if ended.endswith(self._added_tokens) else through)

    def _encoded(self, text, messages):
        """Inputs of one row, its tokens (1, length); their offsets (length, 2) in characters; the places of its media."""
        media = {f"{kind}s": [sources] for kind in KINDS if (sources := media_in(messages, kind))}
        bos = self.processor.tokenizer.bos_token
        # As in `apply_chat_template`: no second beginning where the template writes one.
        special = {"add_special_tokens": False} if bos is not None and text.startswith(bos) else {}
        wanted = {"padding": False, "return_offsets_mapping": True, "return_text_replacement_offsets": True}
        try:
            inputs = dict(self.processor(text=[text], **media, **special, **wanted, return_tensors="pt"))
        except Exception as error:  # So may a decoder or a connection.
            if (said := self._unreadable(media)) is not None:
                raise RowLeftOut("unreadable", said) from error
            raise
        (offsets,), (places,) = inputs.pop("offset_mapping"), inputs.pop("text_replacement_offsets")
        inputs.pop("mm_token_type_ids", None)
        needed = len(offsets)
        if self.max_length is not None and needed > self.max_length:
            raise RowLeftOut(
                "too_long",
                f"it needs {needed} tokens, and max_length is {self.max_length}; no row is cut: raise max_length to "
                f"{needed}, let its images take fewer pixels, or pass on_too_long='skip'",
            )
        return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}, offsets, places

    def _unreadable(self, media):
        """What its processor says of the first image or video that it cannot take, or `None`."""
        for kind in KINDS:
            read = getattr(self.processor, f"{kind}_processor", None)
            for number, source in enumerate(media.get(f"{kind}s", [[]])[0] if read else []):
                try:
                    read([source])
                except (ImportError, MemoryError):
                    raise
                except Exception as error:
                    url = f", {source}," if isinstance(source, str) and "://" in source else ""
                    return f"{kind} {number}{url} cannot be read: {str(error).removeprefix(f'{kind} 0: ')}"
        return None

    def _pads_left(self):
        tokenizer = self.processor.tokenizer
        # A tokenizer that was told has the last word, in the processor too.
        own = {} if "padding_side" in tokenizer.init_kwargs else self.processor.text_kwargs
        return own.get("padding_side", tokenizer.padding_side) == "left"

    def _padded(self, examples, at_the_left):
        pad_token_id = self.processor.tokenizer.pad_token_id
        if pad_token_id is None and len({example["input_ids"].shape for example in examples}) > 1:
            raise ValueError("rows of different lengths, and the tokenizer has no padding token; set its `pad_token`")
        fills = FILLS | {"input_ids": pad_token_id or 0}
        return {
            name: joined(tensors, fills.get(name, 0), at_the_left and name in fills)
            for name, tensors in by_name(examples).items()
        }


def by_name(examples):
    """Tensors of each name in order: a row of text alone has no pixels."""
    names = dict.fromkeys(name for example in examples for name in example)
    return {name: [example[name] for example in examples if name in example] for name in names}


def joined(tensors, fill, at_the_left):
    """`tensors` along their first axis; on the others `fill` makes up for what a tensor lacks."""
    sides = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors))]
    filled = []
    for tensor in tensors:
        gaps = [side - own for side, own in zip(sides, tensor.shape[1:])]
        # From the last axis to the first, before and behind each.
        margins = [margin for gap in reversed(gaps) for margin in ((gap, 0) if at_the_left else (0, gap))]
        filled.append(torch.nn.functional.pad(tensor, margins, value=fill) if any(gaps) else tensor)
    return torch.cat(filled)


def packed(examples):
    """Rows one after the other as one, for models that attend within sequences by their positions."""
    batch = {
        name: torch.cat(tensors, dim=1 if name in FILLS else 0)
        for name, tensors in by_name(examples).items()
        if name != "attention_mask"
    }
    lengths = [example["input_ids"].shape[1] for example in examples]
    positions = torch.cat([torch.arange(length) for length in lengths])
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return batch | {"position_ids": positions[None], "seq_idx": numbers[None]}


def shifted(position, places):
    """Where `position` in a text comes to lie once its placeholders have become what `places` say."""
    return position + sum(
        len(place["replacement"]) - len(place["text"]) for place in places if place["span"][1] <= position
    )


def overlapping(offsets, spans):
    """Mask of the tokens whose `offsets`, int64 (tokens, 2), share a character with one of the (start, end) in `spans`."""
    starts, ends = offsets.unbind(-1)
    mask = torch.zeros(len(offsets), dtype=torch.bool)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def labelled_text(input_ids, labels, processor):
    """A row of a batch as text, for people to see what is learned.

    Args:
        input_ids, labels: int64 (length,).
        processor: the joint processor, which knows what its images and videos become.

    Returns:
        `list[tuple[str, bool]]`: runs of text and whether they are learned. Each run of padding, or of what an image or
        video becomes, is shown by its placeholder and the number of its tokens, for instance `<|image_pad|> x 196`.
    """
    tokenizer = processor.tokenizer
    names = {tokenizer.pad_token_id: tokenizer.pad_token}
    for kind in KINDS:
        if placeholder := getattr(processor, f"{kind}_token", None):
            names |= dict.fromkeys(getattr(processor, f"{kind}_token_ids"), placeholder)
    tokens = [(token_id, label != IGNORED) for token_id, label in zip(input_ids.tolist(), labels.tolist())]
    runs = []
    for (name, learned), run in groupby(tokens, key=lambda token: (names.get(token[0]), token[1])):
        ids = [token_id for token_id, _ in run]
        text = tokenizer.decode(ids) if name is None or len(ids) == 1 else f"{name} x {len(ids)}"
        if runs and runs[-1][1] == learned:
            text = runs.pop()[0] + text
        runs.append((text, learned))
    return runs
