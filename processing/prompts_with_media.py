"""What the joint processors of all families do alike: deal out media to prompts, refuse what makes no sense."""

from transformers import TokenizersBackend
from transformers.utils import is_torchvision_available

from .media_loading import flat_media, is_image, share_among_prompts


class PromptsWithMedia:
    """Base of every joint processor.

    `media_processors`: its image processor, and video processor if any, `{"image_processor": {backend: class}}`.
    """

    @classmethod
    def load_parts(cls, folder, backend=None, **kwargs):
        """Image processor, tokenizer and the like of a checkpoint, by name, with `kwargs` as settings.

        A part that is among `kwargs` already stands for the checkpoint's.
        """
        # transformers' own way asks the Auto classes, which want trust_remote_code again, or give others' classes.
        backend = backend or ("torchvision" if is_torchvision_available() else "pil")
        media = {part: classes[backend] for part, classes in cls.media_processors.items()}
        for_media = {setting for part in media.values() for setting in part.valid_kwargs.__annotations__}
        given = {part: kwargs.pop(part, None) for part in cls.get_attributes()}
        for_tokenizer = {name: value for name, value in kwargs.items() if name not in for_media}
        parts = {name: given[name] or part.from_pretrained(folder, **kwargs) for name, part in media.items()}
        return parts | {"tokenizer": given["tokenizer"] or cls.load_tokenizer(folder, **for_tokenizer)}

    @classmethod
    def load_tokenizer(cls, folder, **kwargs):
        """The tokenizer of a checkpoint."""
        return TokenizersBackend.from_pretrained(folder, **kwargs)

    @classmethod
    def _get_arguments_from_pretrained(cls, pretrained_model_name_or_path, processor_dict=None, **kwargs):
        # Asked by transformers 5.24, which wants the parts in the order of `__init__`.
        parts = cls.load_parts(pretrained_model_name_or_path, **kwargs)
        return [parts[name] for name in cls.get_attributes()]

    @classmethod
    def _resolve_subprocessors(cls, pretrained_model_name_or_path, processor_dict, **kwargs):
        # Asked by transformers from 5.25 on.
        parts = cls.load_parts(pretrained_model_name_or_path, **kwargs)
        return processor_dict | parts, {name: value for name, value in kwargs.items() if name not in parts}

    def check_prompts(self, text):
        """Raises `ValueError` where one of the prompts is no string."""
        if wrong := [number for number, prompt in enumerate(text) if not isinstance(prompt, str)]:
            raise ValueError(
                f"prompt {wrong[0]} is {type(text[wrong[0]]).__name__}; `text` is a string or a list of them"
            )

    def refuse_unknown_keywords(self, keywords):
        kinds = self.valid_processor_kwargs.__annotations__
        known = {*kinds, "common_kwargs", *kinds["text_kwargs"].__annotations__}
        for part in (self.image_processor, getattr(self, "video_processor", None)):
            known.update(part.valid_kwargs.__annotations__ if part is not None else ())
        if unknown := sorted(set(keywords) - known):
            raise ValueError(f"unknown keyword(s) {unknown}; accepted are {sorted(known)}")

    def _process_images(self, images, **kwargs):
        images = flat_media(images, is_image)
        features = self.image_processor(images, **kwargs)
        return features, [self.replace_image_token(features, index, **kwargs) for index in range(len(images))]


class PromptsWithImages(PromptsWithMedia):
    """Base of a joint processor that takes images alone.

    `family_name` is what an error calls the family.
    """

    def prepare_inputs_layout(self, images=None, text=None, videos=None, audio=None, **kwargs):
        for name, media in (("videos", videos), ("audio", audio)):
            if media is not None:
                raise ValueError(f"{self.family_name} takes images and text only; `{name}` is not accepted")
        images, text, *others = super().prepare_inputs_layout(images=images, text=text, **kwargs)
        # `images=[[], None]` for prompts of text alone means no images at all.
        return images if flat_media(images, is_image) else None, text, *others

    def validate_inputs(self, images=None, text=None, videos=None, audio=None, **kwargs):
        """Raises `ValueError` where placeholders and images do not match, or a keyword is unknown."""
        self.refuse_unknown_keywords(kwargs)
        if images is None and text is None:
            raise ValueError("nothing to process: pass text or images")
        if text is None:
            return
        self.check_prompts(text)
        share_among_prompts(images, self.placeholder_counts(text), is_image, "image")

    def placeholder_counts(self, text):
        """Images that each prompt asks for."""
        return [prompt.count(self.image_token) for prompt in text]
