"""Clips of any kind -> frames (frames, rows, cols, 3) and their `VideoMetadata`; decoded by torchcodec or PyAV.

Family-neutral. `choose` is always a function from `metadata=VideoMetadata` to the frame indices to keep, or `None`
for all of them. Metadata handed in is never changed.
"""

import dataclasses
import io
import os

import numpy as np
import torch
from transformers.utils import logging
from transformers.utils.import_utils import is_torchcodec_usable
from transformers.video_utils import VideoMetadata, read_video_torchcodec

from .media_loading import is_array, is_nest, local_path, open_image, rgb_pixels

logger = logging.get_logger(__name__)

ASSUMED_FPS = 24


def is_encoded(video):
    """Whether `video` is a file, a URL or its bytes, rather than frames."""
    return isinstance(video, (str, os.PathLike, bytes, bytearray, memoryview))


def clip_metadata(video_metadata, num_videos):
    """One fresh `VideoMetadata` (or `None`) for each clip.

    Args:
        video_metadata: `None`, one mapping, or a list of them, grouped by prompt or not.

    Raises:
        ValueError: their number is not `num_videos`.
    """
    if video_metadata is None:
        return [None] * num_videos
    groups = video_metadata if is_nest(video_metadata) else [video_metadata]
    flat = [entry for group in groups for entry in (group if is_nest(group) else [group])]
    if len(flat) != num_videos:
        raise ValueError(f"{len(flat)} entries of video_metadata for {num_videos} videos; pass one for each video")
    return [None if entry is None else VideoMetadata(**dict(entry)) for entry in flat]


def frame_rate(metadata):
    """Frames a second of a clip; where `metadata` does not say, 24 are assumed, noted there and warned of once."""
    if not metadata["fps"]:
        logger.warning_once(
            f"A video without a frame rate is taken to run at {ASSUMED_FPS} frames a second; pass `video_metadata` "
            "with `fps` for correct sampling and timestamps."
        )
        metadata["fps"] = ASSUMED_FPS
    return metadata["fps"]


def clip_frames(video, metadata, choose):
    """Frames of a clip that is an array (frames, …) or a list of images; sampled unless they are a sample already.

    Raises:
        ValueError: frames of different sizes, or metadata that contradicts their number.
    """
    if not is_array(video):
        frames = [rgb_pixels(open_image(frame)) for frame in video]
        if len(sizes := {tuple(frame.shape[-2:]) for frame in frames}) > 1:
            raise ValueError(f"frames of different sizes {sorted(sizes)}; a clip has one size")
        video = torch.stack(frames).permute(0, 2, 3, 1)
    count = len(video)
    metadata = metadata or VideoMetadata(total_num_frames=count)
    if metadata.frames_indices is not None and len(metadata.frames_indices) != count:
        raise ValueError(
            f"{count} frames but {len(metadata.frames_indices)} frames_indices in its metadata; pass the index of each frame"
        )
    if metadata.frames_indices is None and metadata.total_num_frames != count:
        raise ValueError(
            f"{count} frames of {metadata.total_num_frames} (total_num_frames); say which ones they are with "
            "frames_indices in its video_metadata"
        )
    everything = np.arange(count)
    known = everything if metadata.frames_indices is None else np.array(metadata.frames_indices)
    is_sample = metadata.total_num_frames != count or not np.array_equal(known, everything)
    if choose is None or is_sample:
        return video, dataclasses.replace(metadata, frames_indices=known)
    indices = np.asarray(choose(metadata=metadata))
    return video[indices], dataclasses.replace(metadata, frames_indices=indices)


def decode_video(source, metadata, choose):
    """Decodes the chosen frames of a video file (path, URL or bytes), upright.

    `fps` in `metadata` wins over the container's, and `frames_indices` in it over `choose`.

    Returns:
        uint8 (frames, rows, cols, 3), array or tensor, and its metadata.

    Raises:
        ValueError: the file holds no video that can be decoded.
        ImportError: neither torchcodec nor PyAV is installed.
    """
    source = source if isinstance(source, (bytes, bytearray, memoryview)) else local_path(source)

    def pick(metadata):
        metadata.fps = given.fps or metadata.fps
        if given.frames_indices is not None:
            return np.asarray(given.frames_indices)
        return np.arange(metadata.total_num_frames) if choose is None else np.asarray(choose(metadata=metadata))

    given = metadata or VideoMetadata(total_num_frames=0)
    if not is_torchcodec_usable(decode="video"):
        return decode_with_pyav(source, pick)
    frames, metadata = read_video_torchcodec(source, pick)
    return frames.permute(0, 2, 3, 1), metadata


def decode_with_pyav(source, pick):
    try:
        import av
    except ImportError as error:
        raise ImportError("reading video files needs torchcodec or PyAV: `pip install av`") from error
    shown = f"{len(source)} bytes" if isinstance(source, (bytes, bytearray, memoryview)) else repr(source)
    try:
        frames, metadata, decoded = read_chosen(av, source, pick)
        if len(frames) < len(set(metadata.frames_indices.tolist())):
            # The container announced more frames than it holds: choose again among those that exist.
            frames, metadata, decoded = read_chosen(av, source, pick, total=decoded)
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"no video that can be decoded in {shown}: {error}") from error
    if missing := [index for index in metadata.frames_indices.tolist() if index not in frames]:
        raise ValueError(
            f"no video that can be decoded in {shown}: frame {missing[0]} is not among its {decoded} frames"
        )
    return np.stack([frames[index] for index in metadata.frames_indices.tolist()]), metadata


def read_chosen(av, source, pick, total=None):
    """One pass over the file: the chosen frames by index, the metadata, and how many frames were decoded."""
    opened = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    with av.open(opened) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        if not (total := total or stream.frames):
            # Some containers (WebM, streams) do not say how many frames they hold.
            total = sum(packet.size > 0 for packet in container.demux(stream))
            container.seek(0)
        rate = stream.average_rate or stream.guessed_rate
        metadata = VideoMetadata(
            total_num_frames=total,
            fps=float(rate) if rate else None,
            width=stream.width,
            height=stream.height,
            duration=total / float(rate) if rate else None,
            video_backend="pyav",
        )
        metadata.frames_indices = pick(metadata)
        wanted, frames, decoded = set(metadata.frames_indices.tolist()), {}, 0
        for index, frame in enumerate(container.decode(stream)):
            decoded = index + 1
            if index in wanted:
                # The display matrix of a phone's clip, in degrees counter-clockwise; PyAV >= 14 reports it.
                turns = round(getattr(frame, "rotation", 0) / 90)
                frames[index] = np.rot90(frame.to_ndarray(format="rgb24"), turns)
            if len(frames) == len(wanted):
                break
    return frames, metadata, decoded
