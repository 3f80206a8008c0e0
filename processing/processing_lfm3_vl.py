"""LFM3-VL prompts with images and videos -> model inputs: every placeholder becomes as many tokens as its media need."""

import numpy as np
from transformers import AutoTokenizer
from transformers.processing_utils import MultiModalData, ProcessorMixin

from ..configuration.flat_code import SavesItsCode
from .image_processing_lfm3_vl import Lfm3VlImageProcessor, Lfm3VlImageProcessorPil
from .media_loading import flat_media, is_image, is_video, share_among_prompts
from .prompts_with_media import PromptsWithMedia
from .video_decoding import frame_rate
from .video_processing_lfm3_vl import Lfm3VlVideoProcessor


class Lfm3VlProcessor(SavesItsCode, PromptsWithMedia, ProcessorMixin):
    """Joins tokenizer, image processor and video processor.

    An image placeholder becomes one image token for each merged cell. A video placeholder becomes, for each temporal
    step, `<{t:.1f} seconds>`, vision start, one video token for each merged cell, vision end, where t is the mean of
    the first and last timestamp of the step's frames. Images and videos are dealt out to the prompts in order, by
    their placeholders. Batches are padded on the left, unless the tokenizer or the call says otherwise.
    """

    hub_classes = {"AutoProcessor": "processing_lfm3_vl.Lfm3VlProcessor"}
    media_processors = {
        "image_processor": {"torchvision": Lfm3VlImageProcessor, "pil": Lfm3VlImageProcessorPil},
        "video_processor": dict.fromkeys(("torchvision", "pil"), Lfm3VlVideoProcessor),
    }
    text_kwargs = {"return_token_type_ids": False, "padding": True, "padding_side": "left"}
    videos_kwargs = {"return_metadata": True}
    return_mm_token_type_ids = False

    def __init__(self, image_processor=None, tokenizer=None, video_processor=None, chat_template=None):
        for name, default in (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>"),
        ):
            token = getattr(tokenizer, f"{name}_token", None) or default
            token_id = tokenizer.convert_tokens_to_ids(token)
            if token_id is None or token_id == tokenizer.unk_token_id:
                raise ValueError(
                    f"the tokenizer has no {token!r}; add it as a special token, or name the one it has as "
                    f"`{name}_token` in the tokenizer's extra_special_tokens"
                )
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", token_id)
        super().__init__(image_processor, tokenizer, video_processor, chat_template=chat_template)

    @classmethod
    def load_tokenizer(cls, folder, **kwargs):
        """The tokenizer of a checkpoint, of the class that its files name."""
        return AutoTokenizer.from_pretrained(folder, **kwargs)

    def check_argument_for_proper_class(self, argument_name, argument):
        # The inherited check looks video processors up in a table that does not exist without torchvision.
        if isinstance(argument, Lfm3VlVideoProcessor):
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)

    @property
    def model_input_names(self):
        return [*super().model_input_names, "mm_token_type_ids"]

    def prepare_inputs_layout(self, images=None, text=None, videos=None, audio=None, **kwargs):
        if audio is not None:
            raise ValueError("LFM3-VL hears nothing: `audio` is not accepted, pass images, videos and text")
        images, text, videos, audio = super().prepare_inputs_layout(images=images, text=text, videos=videos, **kwargs)
        # `images=[[], None]` for prompts of text alone means no images at all.
        images = images if flat_media(images, is_image) else None
        videos = videos if flat_media(videos, is_video) else None
        return images, text, videos, audio

    def validate_inputs(self, images=None, text=None, videos=None, audio=None, **kwargs):
        """Raises `ValueError` where placeholders and media do not match, or a keyword is unknown."""
        self.refuse_unknown_keywords(kwargs)
        if images is None and text is None and videos is None:
            raise ValueError("nothing to process: pass text, images or videos")
        if text is None:
            return
        self.check_prompts(text)
        share_among_prompts(images, [prompt.count(self.image_token) for prompt in text], is_image, "image")
        share_among_prompts(videos, [prompt.count(self.video_token) for prompt in text], is_video, "video")

    def _process_videos(self, videos, **kwargs):
        videos = flat_media(videos, is_video)
        features = self.video_processor(videos, **kwargs)
        return features, [self.replace_video_token(features, index, **kwargs) for index in range(len(videos))]

    def replace_image_token(self, image_inputs, image_idx, merge_size=None, **kwargs):
        """The image tokens of image `image_idx`; vision start and end stand in the chat template."""
        merge_size = merge_size or self.image_processor.merge_size
        return self.image_token * (int(np.prod(image_inputs["image_grid_thw"][image_idx].tolist())) // merge_size**2)

    def replace_video_token(self, video_inputs, video_idx, merge_size=None, temporal_patch_size=None, **kwargs):
        """Timestamps and video tokens of video `video_idx`, one run for each temporal step.

        Raises:
            ValueError: `video_inputs` came without the metadata that holds the timestamps.
        """
        if "video_metadata" not in video_inputs:
            raise ValueError("timestamps need the video's metadata; do not pass return_metadata=False")
        merge_size = merge_size or self.video_processor.merge_size
        temporal_patch_size = temporal_patch_size or self.video_processor.temporal_patch_size
        steps, rows, cols = video_inputs["video_grid_thw"][video_idx].tolist()
        run = self.vision_start_token + self.video_token * (rows * cols // merge_size**2) + self.vision_end_token
        metadata = video_inputs["video_metadata"][video_idx]
        times = step_timestamps(metadata["frames_indices"], frame_rate(metadata), temporal_patch_size)
        return "".join(f"<{time:.1f} seconds>{run}" for time in times[:steps])

    def _check_special_mm_tokens(self, text, text_inputs, modalities):
        try:
            super()._check_special_mm_tokens(text, text_inputs, modalities)
        except ValueError as mismatch:
            for row, (prompt, ids) in enumerate(zip(text, text_inputs["input_ids"])):
                needed = len(self.tokenizer(prompt)["input_ids"])
                if needed > len(ids):
                    raise ValueError(
                        f"prompt {row} needs {needed} tokens, and a limit of {len(ids)} would cut into its images or "
                        f"videos; raise max_length to {needed}, or lower max_pixels"
                    ) from mismatch
            raise

    def _get_num_multimodal_tokens(self, image_sizes=None, video_sizes=None, **kwargs):
        """Placeholder tokens and patches for images and videos that are known by their sizes alone.

        Args:
            image_sizes: list of (height, width).
            video_sizes: list of (frames after sampling, height, width).
            kwargs: overrides as in a call.

        Returns:
            `MultiModalData` with `num_image_tokens`, `num_image_patches`, `num_video_tokens`, as far as asked for.
        """
        self.refuse_unknown_keywords(kwargs)
        overrides = self._merge_kwargs(**kwargs)
        counts = {}
        if image_sizes is not None:
            given = overrides["images_kwargs"]
            cell = (given.get("merge_size") or self.image_processor.merge_size) ** 2
            patches = [self.image_processor.get_number_of_image_patches(*size, given) for size in image_sizes]
            counts = {"num_image_tokens": [count // cell for count in patches], "num_image_patches": patches}
        if video_sizes is not None:
            given = overrides["videos_kwargs"]
            cell = (given.get("merge_size") or self.video_processor.merge_size) ** 2
            patches = [self.video_processor.get_num_of_video_patches(*size, given) for size in video_sizes]
            counts["num_video_tokens"] = [count // cell for count in patches]
        return MultiModalData(**counts)


def step_timestamps(frames_indices, fps, temporal_patch_size):
    """Seconds of each temporal step: the mean of its first and last frame's, the clip's last frame being repeated."""
    seconds = np.asarray(frames_indices) / fps
    seconds = np.pad(seconds, (0, -len(seconds) % temporal_patch_size), mode="edge")
    steps = seconds.reshape(-1, temporal_patch_size)
    return ((steps[:, 0] + steps[:, -1]) / 2).tolist()
