"""LFM3-VL clips -> packed patches: frames sampled, resized and cut by the Qwen3-VL rule; decoded by torchcodec or PyAV."""

import numpy as np
import torch
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import VideosKwargs
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import group_videos_by_shape, reorder_videos

from ..configuration.flat_code import SavesItsCode
from .any_image import HALF, check_normalized_on_device
from .media_loading import flat_media, is_video, rgb_pixels
from .patch_geometry import finished_patches, padded_frames, patchify, pixel_bounds, video_sides
from .video_decoding import clip_frames, clip_metadata, decode_video, frame_rate, is_encoded


class Lfm3VlVideoProcessorKwargs(VideosKwargs, total=False):
    """What a call or a config may set besides the fields of `VideosKwargs`; meanings in `Lfm3VlVideoProcessor`."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool | None
    max_video_tokens: int
    normalize_on_device: bool


class Lfm3VlVideoProcessor(SavesItsCode, BaseVideoProcessor):
    """LFM3-VL video processor.

    Sampling: `fps` frames a second (`num_frames` instead, if given in the call), at least `min_frames`, at most
    `max_frames` and never more than there are, evenly from the first to the last. A clip whose metadata says that it
    holds chosen frames of a longer one is never sampled again. A frame rate that nobody states is taken as 24.

    Sizes: `size` bounds the pixels of the whole clip, all sampled frames together. Frames are first repeated up to a
    multiple of `temporal_patch_size`.

    `cap_pixels_per_frame` (default False): without it a short clip may spend the whole of `size["longest_edge"]` on
    its few frames. With it a frame gets at most min(max_video_tokens * (patch_size * merge_size)**2, its even share
    of `size["longest_edge"]`) pixels, but never less than 1.05 * `size["shortest_edge"]`.
    `max_video_tokens` (default 768): that ceiling, in merged cells of one frame; without the cap it has no effect.
    `normalize_on_device` (default False): leave the pixels uint8, as `Lfm3VlImageProcessor` does.
    """

    hub_classes = {"AutoVideoProcessor": "video_processing_lfm3_vl.Lfm3VlVideoProcessor"}

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size = {"shortest_edge": 4096, "longest_edge": 25165824}
    default_to_square = False
    do_rescale = True
    do_normalize = True
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    do_convert_rgb = True
    patch_size = 16
    temporal_patch_size = 2
    merge_size = 2
    do_sample_frames = True
    fps = 2.0
    num_frames = None
    min_frames = 4
    max_frames = 384
    cap_pixels_per_frame = False
    max_video_tokens = 768
    normalize_on_device = False
    valid_kwargs = Lfm3VlVideoProcessorKwargs
    model_input_names = ["pixel_values_videos", "video_grid_thw"]

    def preprocess(self, videos, **kwargs):
        """Turns clips into packed patches.

        Args:
            videos: one clip or a list (of lists) of them: paths, URLs, bytes, arrays (frames, …), lists of frames.
            kwargs: any attribute of the processor, for this call alone; `video_metadata`, one entry for each clip.

        Returns:
            `BatchFeature` with `pixel_values_videos` float32 (patches, channels * temporal_patch_size *
            patch_size**2), `video_grid_thw` int64 (clips, 3) and, with `return_metadata=True`, `video_metadata`.

        Raises:
            ValueError: an unreadable clip, or metadata that contradicts it; names the clip.
            ImportError: torchvision, or every decoder, is missing.
        """
        if not is_torchvision_available():
            raise ImportError("Lfm3VlVideoProcessor needs torchvision: `pip install torchvision`.")
        if kwargs.get("num_frames") is not None:
            # The configured rate gives way to a count asked for in the call; two wishes in one call are refused.
            kwargs.setdefault("fps", None)
        return super().preprocess(videos, **kwargs)

    def sample_frames(self, metadata, num_frames=None, fps=None, min_frames=None, max_frames=None, **kwargs):
        """Indices (int64 array) of the frames to keep out of `metadata.total_num_frames`.

        Raises:
            ValueError: `num_frames` and `fps` together.
        """
        if num_frames is not None and fps is not None:
            raise ValueError(
                f"num_frames={num_frames} and fps={fps} both say how many frames to keep; pass one of them"
            )
        total = metadata.total_num_frames
        low = self.min_frames if min_frames is None else min_frames
        high = self.max_frames if max_frames is None else max_frames
        if num_frames is None:
            wanted = total if fps is None else int(total / frame_rate(metadata) * fps)
            num_frames = min(max(wanted, low), high, total)
        return np.linspace(0, total - 1, num_frames).round().astype(np.int64)

    def _decode_and_sample_videos(self, videos, video_metadata=None, do_sample_frames=None, sample_indices_fn=None):
        videos = flat_media(videos, is_video)
        known = clip_metadata(video_metadata, len(videos))
        choose = sample_indices_fn if do_sample_frames else None
        clips, metadata = [], []
        for number, (video, given) in enumerate(zip(videos, known)):
            try:
                frames, described = (decode_video if is_encoded(video) else clip_frames)(video, given, choose)
            except ValueError as error:
                raise ValueError(f"video {number}: {error}") from error
            clips.append(frames)
            metadata.append(described)
        return clips, metadata

    def _prepare_input_videos(self, videos, do_convert_rgb=None, input_data_format=None, device=None):
        clips = [rgb_pixels(video, input_data_format) for video in videos]  # each (frames, 3, rows, cols)
        return clips if device is None else [clip.to(device) for clip in clips]

    def target_sides(self, num_frames, height, width, settings):
        """Sides of the frames after resizing. `settings` maps attributes to values; missing or `None` means ours."""
        size = pixel_bounds(settings.get("size"), self.size)
        patch_size, merge_size, temporal, cap, max_tokens = (
            getattr(self, name) if settings.get(name) is None else settings[name]
            for name in (
                "patch_size",
                "merge_size",
                "temporal_patch_size",
                "cap_pixels_per_frame",
                "max_video_tokens",
            )
        )
        factor = patch_size * merge_size
        most = size["longest_edge"]
        if cap:
            frames = padded_frames(num_frames, temporal)
            most = frames * max(min(max_tokens * factor**2, most // frames), int(1.05 * size["shortest_edge"]))
        return video_sides(num_frames, height, width, factor, temporal, size["shortest_edge"], most)

    def _preprocess(
        self,
        videos,
        do_resize,
        size,
        resample,
        do_rescale,
        rescale_factor,
        do_normalize,
        image_mean,
        image_std,
        patch_size,
        temporal_patch_size,
        merge_size,
        normalize_on_device,
        return_tensors=None,
        **kwargs,
    ):
        check_normalized_on_device(
            {
                "normalize_on_device": normalize_on_device,
                "do_rescale": do_rescale,
                "do_normalize": do_normalize,
                "image_mean": image_mean,
                "image_std": image_std,
            },
            HALF,
        )
        settings = {
            "size": size,
            "patch_size": patch_size,
            "merge_size": merge_size,
            "temporal_patch_size": temporal_patch_size,
            **kwargs,
        }
        groups, index = group_videos_by_shape(videos)
        patches, grids = {}, {}
        for shape, stack in groups.items():  # stack: (clips, frames, 3, rows, cols)
            rows, cols = stack.shape[-2:]
            if do_resize:
                rows, cols = self.target_sides(stack.shape[1], rows, cols, settings)
                stack = self.resize(stack, SizeDict(height=rows, width=cols), resample=resample)
            elif rows % (patch_size * merge_size) or cols % (patch_size * merge_size):
                raise ValueError(
                    f"frames of {rows} x {cols} pixels cannot be cut into cells of {patch_size * merge_size}; leave "
                    "do_resize on, or pass sides that are multiples"
                )
            patches[shape] = patchify(stack, patch_size, merge_size, temporal_patch_size)
            steps = padded_frames(stack.shape[1], temporal_patch_size) // temporal_patch_size
            grids[shape] = [[steps, rows // patch_size, cols // patch_size]] * len(stack)
        packed = torch.cat(reorder_videos(patches, index))

        def normalize(pixels):
            if normalize_on_device:
                return pixels
            return self.rescale_and_normalize(pixels, do_rescale, rescale_factor, do_normalize, image_mean, image_std)

        data = {
            "pixel_values_videos": finished_patches(packed, 3, normalize),
            "video_grid_thw": torch.tensor(reorder_videos(grids, index)).view(-1, 3),
        }
        return BatchFeature(data, tensor_type=return_tensors)

    def get_num_of_video_patches(self, num_frames, height, width, videos_kwargs=None):
        """Patches of a clip of `num_frames` sampled frames, under the overrides in `videos_kwargs`."""
        settings = videos_kwargs or {}
        patch_size = settings.get("patch_size") or self.patch_size
        temporal = settings.get("temporal_patch_size") or self.temporal_patch_size
        rows, cols = self.target_sides(num_frames, height, width, settings)
        return padded_frames(num_frames, temporal) // temporal * (rows // patch_size) * (cols // patch_size)
