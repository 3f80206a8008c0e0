"""Pixtral prompts with images -> model inputs; a tokenizer may come as `tokenizer.json` or as Mistral's `tekken.json`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import TokenizersBackend
from transformers.processing_utils import MultiModalData, ProcessorMixin

from ..configuration.configuration_pixtral import PixtralConfig
from ..configuration.flat_code import SavesItsCode
from .image_processing_pixtral import PixtralImageProcessor, PixtralImageProcessorPil, patch_side
from .prompts_with_media import PromptsWithImages

# Control tokens by id in tekken.json files up to version 7 that do not list them.
OLD_CONTROL_TOKENS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
    "<pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
# Up to here a system prompt opens the last user turn; afterwards it is a turn of its own.
VERSIONS_WITHOUT_SYSTEM_TURN = ("v1", "v2", "v3")
_TURNS = (
    "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- elif part.type == 'image' -%}[IMG]{%- else -%}"
    "{{ raise_exception('content of type ' ~ part.type ~ '; give text and image') }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{%- endmacro -%}"
    "{%- set systems = messages | selectattr('role', 'equalto', 'system') | list -%}"
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}@SYSTEM_TURN@"
    "{%- elif message.role == 'user' -%}[INST]@OPENING@{{ show(message.content) }}[/INST]"
    "{%- elif message.role == 'assistant' -%}"
    "{%- generation -%}{{ show(message.content) }}{{ eos_token }}{%- endgeneration -%}"
    "{%- else -%}{{ raise_exception('role ' ~ message.role ~ '; give system, user and assistant') }}{%- endif -%}"
    "{%- endfor -%}"
)
CHAT_TEMPLATE = _TURNS.replace("@SYSTEM_TURN@", "[SYSTEM_PROMPT]{{ show(message.content) }}[/SYSTEM_PROMPT]").replace(
    "@OPENING@", ""
)
EARLY_CHAT_TEMPLATE = _TURNS.replace("@SYSTEM_TURN@", "").replace(
    "@OPENING@",
    "{%- if message is sameas users[-1] -%}{%- for system in systems -%}{{ show(system.content) ~ '\\n\\n' }}"
    "{%- endfor -%}{%- endif -%}",
)


class PixtralProcessor(SavesItsCode, PromptsWithImages, ProcessorMixin):
    """Joins tokenizer and image processor.

    An image placeholder becomes, for each row of merged cells, one image token a cell and a break token, the last break
    being an end token. Images are dealt out to the prompts in order, by their placeholders. Batches are padded on the
    left, unless the tokenizer or the call says otherwise.

    Args:
        patch_size, spatial_merge_size: of the image processor, which is set to them; `None` leaves it as it is.
        chat_template: `None` takes the tokenizer's.
        image_token, image_break_token, image_end_token: `None` takes the tokenizer's own of that name, or `[IMG]`,
            `[IMG_BREAK]` and `[IMG_END]`.

    Raises:
        ValueError: the tokenizer has no such token.
    """

    hub_classes = {"AutoProcessor": "processing_pixtral.PixtralProcessor"}
    family_name = "Pixtral"
    media_processors = {"image_processor": {"torchvision": PixtralImageProcessor, "pil": PixtralImageProcessorPil}}
    text_kwargs = {"return_token_type_ids": False, "padding": True, "padding_side": "left", "return_tensors": "pt"}
    images_kwargs = {"return_tensors": "pt"}
    return_mm_token_type_ids = False

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        patch_size=None,
        spatial_merge_size=None,
        chat_template=None,
        image_token=None,
        image_break_token=None,
        image_end_token=None,
    ):
        for name, given, default in (
            ("image_token", image_token, "[IMG]"),
            ("image_break_token", image_break_token, "[IMG_BREAK]"),
            ("image_end_token", image_end_token, "[IMG_END]"),
        ):
            token = given or getattr(tokenizer, name, None) or default
            token_id = tokenizer.convert_tokens_to_ids(token)
            if token_id is None or token_id == tokenizer.unk_token_id:
                raise ValueError(
                    f"the tokenizer has no {token!r}; add it as a special token, or name the one it has as `{name}`"
                )
            setattr(self, name, token)
            setattr(self, f"{name}_id", token_id)
        if tokenizer.pad_token is None:
            # Prompts alone need none; a batch is refused by the tokenizer, which says what to do.
            self.text_kwargs = self.text_kwargs | {"padding": False}
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template)
        self.patch_size = patch_size or self.patch_size
        self.spatial_merge_size = spatial_merge_size or self.spatial_merge_size

    # Both live in the image processor, so that the two never disagree.
    @property
    def patch_size(self):
        return patch_side(self.image_processor.patch_size)

    @patch_size.setter
    def patch_size(self, side):
        if side != self.patch_size:
            self.image_processor.patch_size = side

    @property
    def spatial_merge_size(self):
        return self.image_processor.spatial_merge_size

    @spatial_merge_size.setter
    def spatial_merge_size(self, size):
        self.image_processor.spatial_merge_size = size

    def to_dict(self):
        sizes = {"patch_size": self.patch_size, "spatial_merge_size": self.spatial_merge_size}
        return super().to_dict() | sizes

    @classmethod
    def load_tokenizer(cls, folder, **kwargs):
        return load_tokenizer(folder, **kwargs)

    @property
    def image_token_ids(self):
        """Ids of all that an image becomes: image, break and end token."""
        return [self.image_token_id, self.image_break_token_id, self.image_end_token_id]

    @property
    def model_input_names(self):
        return [*super().model_input_names, "mm_token_type_ids"]

    def replace_image_token(self, image_inputs, image_idx, patch_size=None, spatial_merge_size=None, **kwargs):
        """The tokens of image `image_idx`, whose grid or size `image_inputs` holds, in either layout."""
        merge_size = spatial_merge_size or self.spatial_merge_size
        if "image_grid_thw" in image_inputs:
            _, rows, cols = image_inputs["image_grid_thw"][image_idx]
        else:
            side = patch_side(patch_size or self.patch_size)
            rows, cols = (pixels // side for pixels in image_inputs["image_sizes"][image_idx])
        row = self.image_token * (int(cols) // merge_size)
        return self.image_break_token.join([row] * (int(rows) // merge_size)) + self.image_end_token

    def _check_special_mm_tokens(self, text, text_inputs, modalities):
        try:
            # The inherited check looks at the tokens of these names; an image loses its end token first.
            super()._check_special_mm_tokens(text, text_inputs, ["image", "image_break", "image_end"])
        except ValueError as mismatch:
            for row, (prompt, ids) in enumerate(zip(text, text_inputs["input_ids"])):
                needed = len(self.tokenizer(prompt)["input_ids"])
                if needed > len(ids):
                    raise ValueError(
                        f"prompt {row} needs {needed} tokens, and a limit of {len(ids)} would cut into its images; raise "
                        f"max_length to {needed}, or lower size['longest_edge']"
                    ) from mismatch
            raise

    def _get_num_multimodal_tokens(self, image_sizes=None, **kwargs):
        """Tokens (break and end tokens too) and entries of `pixel_values` for images that are known by their sizes alone.

        Args:
            image_sizes: list of (height, width).
            kwargs: overrides as in a call.

        Returns:
            `MultiModalData` with `num_image_tokens` and `num_image_patches`: patches, or 1 in the layout "padded".
        """
        self.refuse_unknown_keywords(kwargs)
        if image_sizes is None:
            return MultiModalData()
        given = self._merge_kwargs(**kwargs)["images_kwargs"]
        merge_size = given.get("spatial_merge_size") or self.spatial_merge_size
        padded = (given.get("layout") or self.image_processor.layout) == "padded"
        grids = [self.image_processor.image_grid(*size, given) for size in image_sizes]
        return MultiModalData(
            num_image_tokens=[rows // merge_size * (cols // merge_size + 1) for rows, cols in grids],
            num_image_patches=[1 if padded else rows * cols for rows, cols in grids],
        )


def load_tokenizer(folder, **kwargs):
    """The tokenizer of a checkpoint, from `tekken.json` where there is no `tokenizer.json`; without mistral-common.

    One from `tekken.json` takes the names of its image tokens from the ids in `params.json`, gets a chat template, which
    such folders lack, and puts no `<s>` in front of a text: the template does.

    Raises:
        ValueError: `tekken.json` has no token for an id in `params.json`.
    """
    tekken = Path(folder, "tekken.json")
    if not tekken.is_file() or Path(folder, "tokenizer.json").is_file():
        return TokenizersBackend.from_pretrained(folder, **kwargs)
    fields = json.loads(tekken.read_text(encoding="utf-8"))
    is_early = fields["config"].get("version") in VERSIONS_WITHOUT_SYSTEM_TURN
    with TemporaryDirectory() as scratch:
        source = folder
        if "special_tokens" not in fields:
            fields["special_tokens"] = [
                {"rank": rank, "token_str": name} for rank, name in enumerate(OLD_CONTROL_TOKENS)
            ]
            source = scratch
            Path(scratch, "tekken.json").write_text(json.dumps(fields), encoding="utf-8")
        tokens = image_token_names(folder, fields["special_tokens"])
        template = EARLY_CHAT_TEMPLATE if is_early else CHAT_TEMPLATE
        settings = {
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "extra_special_tokens": tokens,
            "chat_template": template.replace("[IMG]", tokens["image_token"]),
        }
        tokenizer = TokenizersBackend.from_pretrained(source, **(settings | kwargs))
    tokenizer.name_or_path = str(folder)
    return tokenizer


def image_token_names(folder, special_tokens):
    """`{"image_token": name, …}` by the ids in the folder's `params.json`, or in the configuration converted from it."""
    params = json.loads(PixtralConfig.from_pretrained(folder).native_params or "{}").get("vision_encoder", {})
    names = {token["rank"]: token["token_str"] for token in special_tokens}
    tokens = {}
    for name, usual in (("image_token", 10), ("image_break_token", 12), ("image_end_token", 13)):
        token_id = params.get(f"{name}_id", usual)
        if token_id not in names:
            raise ValueError(
                f"{name}_id is {token_id} in params.json, and tekken.json in {folder} has no special token of that rank"
            )
        tokens[name] = names[token_id]
    return tokens
