"""DeepSeek-V4 prompts with images -> model inputs: every placeholder becomes its image's block of tokens.

The blocks are those of the reference implementations of DeepSeek-V4-Flash-Vision-Exp (rows interleaved two by two) and of
DeepSeek-V4.1-Flash (reading order).
"""

import numpy as np
from transformers.image_processing_utils import BatchFeature
from transformers.processing_utils import MultiModalData, ProcessorMixin

from ..configuration.flat_code import SavesItsCode
from .image_processing_deepseek_v4_vl import DeepseekV4ImageProcessor, DeepseekV4ImageProcessorPil, block_tokens
from .prompts_with_media import PromptsWithImages

IMAGE_PLACEHOLDER = "<｜deepseek_image｜>"
# Reserved tokens that no text contains; in this order their ids are consecutive.
START, PAD, IMAGE, NEWLINE, END = BLOCK_TOKENS = tuple(f"<|place_holder_mm_span_{n:04}|>" for n in range(431, 436))
# In reading order all tokens of an image are alike; these numbers tell what each is for.
START_ROLE, IMAGE_ROLE, NEWLINE_ROLE, END_ROLE = range(4)
NO_ROLE = -1
# The text model compresses windows of so many tokens; the token after an image's start begins one.
ALIGNMENT = 4
CHAT_TEMPLATE = (
    "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- elif part.type == 'image' -%}<｜deepseek_image｜>{%- else -%}"
    "{{ raise_exception('content of type ' ~ part.type ~ '; give text and image') }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{%- endmacro -%}"
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ show(message.content) }}"
    "{%- elif message.role == 'user' -%}<｜User｜>{{ show(message.content) }}"
    "{%- elif message.role == 'assistant' -%}<｜Assistant｜>"
    "{%- generation -%}{{ show(message.content) }}{{ eos_token }}{%- endgeneration -%}"
    "{%- else -%}{{ raise_exception('role ' ~ message.role ~ '; give system, user and assistant') }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<｜Assistant｜>{%- endif -%}"
)


class DeepseekV4Processor(SavesItsCode, PromptsWithImages, ProcessorMixin):
    """Joins tokenizer and image processor, whose `token_layout` says what becomes of an image placeholder.

    "interleaved": a block of five kinds of tokens, see `interleaved_block`, after 0 to 3 pads, so that its start stands
    at 3 modulo 4. Positions count from the first real token of the row, `<s>` and the like included, so that padding
    changes nothing. They are found by tokenizing each prompt with a start and an end for every image: both are tokens by
    themselves, so the text around them is split as in the final prompt, whether or not the tokenizer knows the
    placeholder; and all blocks are as long as these two, modulo 4.

    "reading_order": a run of the placeholder's own token, which the tokenizer must have. `image_token_roles` int64 (batch,
    length) comes along: START_ROLE, for each row IMAGE_ROLE a cell and NEWLINE_ROLE, END_ROLE; text has NO_ROLE.

    Images are dealt out to the prompts in order, by their placeholders. Batches are padded on the left, unless the
    tokenizer or the call says otherwise. `return_mm_token_type_ids=True` marks with 1 all that an image becomes, pads that
    align it included, so that labels can leave it out.

    Args:
        chat_template: `None` takes the tokenizer's, or CHAT_TEMPLATE where it has none.

    Raises:
        ValueError: the tokenizer lacks a token of the layout, or numbers them in another order.
    """

    hub_classes = {"AutoProcessor": "processing_deepseek_v4_vl.DeepseekV4Processor"}
    family_name = "DeepSeek-V4"
    media_processors = {
        "image_processor": {"torchvision": DeepseekV4ImageProcessor, "pil": DeepseekV4ImageProcessorPil}
    }
    text_kwargs = {"return_token_type_ids": False, "padding": True, "padding_side": "left", "return_tensors": "pt"}
    images_kwargs = {"return_tensors": "pt"}
    return_mm_token_type_ids = False
    image_token = IMAGE_PLACEHOLDER

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        if tokenizer.pad_token is None:
            # Prompts alone need none; a batch is refused by the tokenizer, which says what to do.
            self.text_kwargs = self.text_kwargs | {"padding": False}
        template = chat_template or tokenizer.chat_template or CHAT_TEMPLATE
        super().__init__(image_processor, tokenizer, chat_template=template)
        layout_token_ids(tokenizer, image_processor.token_layout)

    @property
    def image_token_ids(self):
        """Ids of all that an image becomes: start, pad, image, newline and end, or the placeholder's alone."""
        return layout_token_ids(self.tokenizer, self.image_processor.token_layout)

    @property
    def image_token_id(self):
        """Id of the tokens that a cell of an image becomes."""
        ids = self.image_token_ids
        return ids[BLOCK_TOKENS.index(IMAGE)] if len(ids) > 1 else ids[0]

    @property
    def model_input_names(self):
        return [*super().model_input_names, "mm_token_type_ids", "image_token_roles"]

    def __call__(self, images=None, text=None, videos=None, audio=None, **kwargs):
        """Turns prompts and images into model inputs.

        Args:
            images: `None`, one image, a flat list (dealt out by placeholders), or one list (or `None`) for each prompt.
            text: a prompt or a list of them, with one placeholder for each image.
            videos, audio: not accepted.
            kwargs: settings of tokenizer and image processor for this call.

        Returns:
            `BatchFeature` with what the tokenizer and the image processor return, and what the class describes.

        Raises:
            ValueError: placeholders and images that do not match, tokens of images in the text, an unknown keyword, or a
            limit that would cut into an image or move it out of alignment.
        """
        images, text, *_ = self.prepare_inputs_layout(images=images, text=text, videos=videos, audio=audio, **kwargs)
        self.validate_inputs(images=images, text=text, **kwargs)
        settings = self._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        data, blocks = {}, []
        if images is not None:
            data, blocks = self._process_images(images, **settings["images_kwargs"])
        if text is not None:
            data = {**self.tokenized(text, data, blocks, settings), **data}
        return BatchFeature(
            data,
            tensor_type=settings["text_kwargs"].get("return_tensors"),
            skip_tensor_conversion=self.skip_tensor_conversion,
        )

    def placeholder_counts(self, text):
        # Found as they will be replaced: not in text that was marked as a user's.
        most = sum(prompt.count(self.image_token) for prompt in text)
        _, places = self.get_text_with_replacements(list(text), [self.image_token] * most)
        return [len(row) for row in places]

    def replace_image_token(self, image_inputs, image_idx, downsample_ratio=None, token_layout=None, **kwargs):
        """The tokens of image `image_idx`, whose grid `image_inputs` holds; pads that align it depend on its place."""
        rows, cols = self.cells(image_inputs["image_grid_thw"][image_idx], downsample_ratio)
        if (token_layout or self.image_processor.token_layout) == "reading_order":
            return self.image_token * block_tokens(rows, cols, "reading_order")
        return "".join(interleaved_block(rows, cols))

    def cells(self, grid, downsample_ratio=None):
        """(rows, columns) of image tokens of an image with the patches of `grid` (1, rows, columns)."""
        ratio = downsample_ratio or self.image_processor.downsample_ratio
        return tuple(-(-int(side) // ratio) for side in grid[1:])

    def tokenized(self, text, features, blocks, settings):
        """The tokenizer's outputs for `text` with `blocks` in the place of its placeholders, and what was asked for."""
        text_settings, image_settings = dict(settings["text_kwargs"]), settings["images_kwargs"]
        wants_types, wants_offsets = (
            text_settings.pop(name, settings[name])
            for name in ("return_mm_token_type_ids", "return_text_replacement_offsets")
        )
        interleaved = (image_settings.get("token_layout") or self.image_processor.token_layout) == "interleaved"
        token_ids = layout_token_ids(self.tokenizer, "interleaved" if interleaved else "reading_order")
        # What else may be set only shapes the batch, not the tokens of a prompt.
        encoding = {
            name: text_settings[name]
            for name in ("add_special_tokens", "sanitize_control_tokens")
            if name in text_settings
        }
        if interleaved and blocks:
            blocks = self.aligned(text, blocks, token_ids, encoding)
        text, places = self.get_text_with_replacements(list(text), blocks)
        inputs = self.tokenizer(text, **text_settings)
        self.check_blocks(text, places, inputs, token_ids, encoding)
        if wants_offsets:
            inputs["text_replacement_offsets"] = places
        is_block = [np.isin(np.asarray(ids), token_ids) for ids in inputs["input_ids"]]
        if wants_types:
            inputs["mm_token_type_ids"] = [mask.astype(int).tolist() for mask in is_block]
        if not interleaved:
            grids = iter(features.get("image_grid_thw", ()))
            ratio = image_settings.get("downsample_ratio")
            shares = [
                [role for _ in row for role in reading_order_roles(*self.cells(next(grids), ratio))] for row in places
            ]
            inputs["image_token_roles"] = [placed_roles(*row) for row in zip(is_block, shares)]
        return inputs

    def aligned(self, text, blocks, token_ids, encoding):
        """`blocks` with the pads before each that bring its start to 3 modulo 4."""
        short, places = self.get_text_with_replacements(list(text), [START + END] * len(blocks))
        start_id, waiting, padded = token_ids[0], iter(blocks), []
        for row, ids in enumerate(self.tokenizer(short, verbose=False, **encoding)["input_ids"]):
            if np.isin(ids, token_ids).sum() != 2 * len(places[row]):
                raise stray_tokens(row)
            pads_before = 0
            for start in np.flatnonzero(np.equal(ids, start_id)).tolist():
                pads = ALIGNMENT - 1 - (start + pads_before) % ALIGNMENT
                pads_before += pads
                padded.append(PAD * pads + next(waiting))
        return padded

    def check_blocks(self, text, places, inputs, token_ids, encoding):
        """Raises `ValueError` where a row has not just the tokens of its images, or has them in the wrong place."""
        names = BLOCK_TOKENS if len(token_ids) > 1 else (self.image_token,)
        for row, (prompt, ids) in enumerate(zip(text, inputs["input_ids"])):
            ids = np.asarray(ids)
            expected = sum(place["replacement"].count(name) for place in places[row] for name in names)
            found = np.isin(ids, token_ids).sum()
            if found > expected:
                raise stray_tokens(row)
            if found < expected:
                needed = len(self.tokenizer(prompt, verbose=False, **encoding)["input_ids"])
                raise ValueError(
                    f"prompt {row} needs {needed} tokens, and a limit of {len(ids)} would cut into its images; raise "
                    f"max_length to {needed}, or lower max_image_tokens"
                )
            if expected and len(token_ids) > 1 and "attention_mask" in inputs:
                positions = np.cumsum(np.asarray(inputs["attention_mask"][row]))[ids == token_ids[0]] - 1
                if (positions % ALIGNMENT != ALIGNMENT - 1).any():
                    raise ValueError(
                        f"prompt {row} is cut at its start, which moves its images out of alignment with the windows of "
                        f"{ALIGNMENT} tokens; set the tokenizer's truncation_side to 'right', or raise max_length"
                    )

    def _get_num_multimodal_tokens(self, image_sizes=None, **kwargs):
        """Tokens and patches of images that are known by their sizes alone.

        Args:
            image_sizes: list of (height, width).
            kwargs: overrides as in a call.

        Returns:
            `MultiModalData` with `num_image_tokens`, all of a block but the pads that align it, and `num_image_patches`.
        """
        self.refuse_unknown_keywords(kwargs)
        if image_sizes is None:
            return MultiModalData()
        given = self._merge_kwargs(**kwargs)["images_kwargs"]
        layout = given.get("token_layout") or self.image_processor.token_layout
        return MultiModalData(
            num_image_tokens=[
                block_tokens(*self.image_processor.aligner_grid(*size, given), layout) for size in image_sizes
            ],
            num_image_patches=[self.image_processor.get_number_of_image_patches(*size, given) for size in image_sizes],
        )


def layout_token_ids(tokenizer, token_layout):
    """Ids of the tokens that images become in `token_layout`, in the order of BLOCK_TOKENS.

    Raises:
        ValueError: one is not a token by itself, or the ids are not consecutive.
    """
    names = BLOCK_TOKENS if token_layout == "interleaved" else (IMAGE_PLACEHOLDER,)
    found = [tokenizer(name, add_special_tokens=False)["input_ids"] for name in names]
    for name, ids in zip(names, found):
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            raise ValueError(
                f"the tokenizer reads {name!r} as {tokenizer.convert_ids_to_tokens(ids)}, and images need it as one token; "
                "take the tokenizer that was published with the model, or add it as a special token"
            )
    token_ids = [ids[0] for ids in found]
    for name, token_id, expected in zip(names, token_ids, range(token_ids[0], token_ids[0] + len(names))):
        if token_id != expected:
            raise ValueError(
                f"the tokenizer numbers {name!r} {token_id}, and after {names[0]!r}, {token_ids[0]}, it must be {expected}; "
                "take the tokenizer that was published with the model, or add the five tokens together, in order"
            )
    return token_ids


def stray_tokens(row):
    return ValueError(
        f"prompt {row} spells a token that stands for a part of an image ({START} to {END}); write {IMAGE_PLACEHOLDER} and "
        "pass the image, or take it out"
    )


def interleaved_block(rows, cols):
    """Tokens of an image of `rows` x `cols` cells: a start, rows two by two and column by column, an end.

    Each row ends in a newline; a row of pads makes their number even, two pads the number of all a multiple of 4.
    """
    lines = [[IMAGE] * cols + [NEWLINE]] * rows + [[PAD] * (cols + 1)] * (rows % 2)
    body = [token for pair in zip(lines[::2], lines[1::2]) for column in zip(*pair) for token in column]
    return [START, *body, *[PAD] * (-len(body) % ALIGNMENT), END]


def reading_order_roles(rows, cols):
    """Roles of the tokens of an image of `rows` x `cols` cells, row by row."""
    return [START_ROLE, *([IMAGE_ROLE] * cols + [NEWLINE_ROLE]) * rows, END_ROLE]


def placed_roles(is_block, roles):
    """`roles` where `is_block`, a mask over a row's tokens, is set, NO_ROLE elsewhere; a list of the row's length."""
    placed = np.full(len(is_block), NO_ROLE)
    placed[is_block] = roles
    return placed.tolist()
