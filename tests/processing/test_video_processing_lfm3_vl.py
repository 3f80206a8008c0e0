"""The video processor equals the published one, samples once, and reads real files."""

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata

from gridtower.processing.video_processing_lfm3_vl import Lfm3VlVideoProcessor


@pytest.fixture
def videos():
    return Lfm3VlVideoProcessor()


@pytest.mark.parametrize("shape", [(8, 60, 90), (40, 48, 64), (2, 2, 2), (6, 200, 7), (4, 480, 640), (120, 33, 65)])
@pytest.mark.parametrize("fps", [5, 30])
def test_clips_equal_the_published_processor(shape, fps, videos, published_videos, make_clip):
    clip = make_clip(*shape)
    options = {"video_metadata": {"total_num_frames": len(clip), "fps": fps}, "return_metadata": True}
    ours, theirs = (one(clip, return_tensors="pt", **options) for one in (videos, published_videos))
    if ours["video_metadata"][0]["frames_indices"].size % 2 == 0:
        assert torch.equal(ours["video_grid_thw"], theirs["video_grid_thw"])
        assert torch.equal(ours["pixel_values_videos"], theirs["pixel_values_videos"])
    np.testing.assert_array_equal(
        ours["video_metadata"][0]["frames_indices"], theirs["video_metadata"][0]["frames_indices"]
    )


@pytest.mark.parametrize("frames", [2, 8, 64])
# The last floor lies between two grids: 108,000 pixels are 8 x 11 cells of this aspect, 1.05 times as many 9 x 12.
@pytest.mark.parametrize("tokens, floor", [(4, 4096), (768, 4096), (4, 108000)])
def test_capped_clips_equal_the_published_processor(frames, tokens, floor, published_videos, make_clip):
    clip = make_clip(frames, 300, 400)
    settings = {"cap_pixels_per_frame": True, "do_sample_frames": False}
    settings["size"] = {"shortest_edge": floor, "longest_edge": 25165824}
    published_videos.max_video_tokens = tokens
    ours = Lfm3VlVideoProcessor(max_video_tokens=tokens)(clip, return_tensors="pt", **settings)
    theirs = published_videos(clip, return_tensors="pt", **settings)
    assert torch.equal(ours["video_grid_thw"], theirs["video_grid_thw"])
    assert torch.equal(ours["pixel_values_videos"], theirs["pixel_values_videos"])


def test_max_video_tokens_bounds_the_cells_of_a_frame_only_under_the_cap(videos, make_clip):
    clip = make_clip(4, 600, 800)
    free, capped = (
        videos(clip, max_video_tokens=100, cap_pixels_per_frame=cap, return_tensors="pt")["video_grid_thw"][0]
        for cap in (False, True)
    )
    assert capped[1:].prod() // 4 <= 100 < free[1:].prod() // 4


@pytest.mark.parametrize("frames, temporal, steps", [(1, 2, 1), (3, 2, 2), (5, 2, 3), (7, 2, 4), (18, 4, 5)])
def test_the_last_frame_is_repeated_to_whole_steps(frames, temporal, steps, videos, make_clip):
    clip = make_clip(frames, 32, 64)
    padded = np.concatenate([clip, clip[-1:].repeat(-frames % temporal, axis=0)])
    options = {"do_sample_frames": False, "temporal_patch_size": temporal, "return_tensors": "pt"}
    ours, whole = videos(clip, **options), videos(padded, **options)
    assert ours["video_grid_thw"][0, 0] == steps
    assert torch.equal(ours["video_grid_thw"], whole["video_grid_thw"])
    assert torch.equal(ours["pixel_values_videos"], whole["pixel_values_videos"])
    assert videos.get_num_of_video_patches(frames, 32, 64, options) == ours["video_grid_thw"].prod()


# Spread over the clip, its first frames, and from callers who count the frames of the sample.
@pytest.mark.parametrize(
    "total, indices",
    [(380, [0, 54, 108, 163, 217, 271, 325, 379]), (380, list(range(8))), (8, [0, 54, 108, 163, 217, 271, 325, 379])],
)
def test_a_sample_of_a_longer_clip_is_never_sampled_again(total, indices, videos, make_clip):
    metadata = {"total_num_frames": total, "fps": 30, "frames_indices": indices}
    features = videos(make_clip(8, 32, 32), video_metadata=metadata, return_metadata=True, return_tensors="pt")
    assert features["video_grid_thw"].tolist() == [[4, 2, 2]]
    assert features["video_metadata"][0].frames_indices.tolist() == indices


def test_the_callers_metadata_stays_as_it_was(videos, make_clip):
    metadata = VideoMetadata(total_num_frames=40, fps=None)
    videos(make_clip(40, 32, 32), video_metadata=[metadata])
    assert metadata == VideoMetadata(total_num_frames=40, fps=None)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"total_num_frames": 380, "fps": 30}, "video 0: 8 frames of 380.*frames_indices"),
        ({"total_num_frames": 380, "frames_indices": [0, 1]}, "video 0: 8 frames but 2 frames_indices"),
        ([{"total_num_frames": 8}, {"total_num_frames": 8}], "2 entries of video_metadata for 1 videos"),
    ],
)
def test_contradicting_metadata_is_refused(metadata, message, videos, make_clip):
    with pytest.raises(ValueError, match=message):
        videos(make_clip(8, 32, 32), video_metadata=metadata)


@given(total=st.integers(1, 3000), rate=st.sampled_from([1, 10, 23.976, 30, 60]), fps=st.sampled_from([0.5, 2.0, 8]))
@settings(max_examples=100, deadline=None)
def test_sampling_keeps_its_bounds_and_both_ends(total, rate, fps):
    indices = Lfm3VlVideoProcessor().sample_frames(VideoMetadata(total_num_frames=total, fps=rate), fps=fps)
    assert min(4, total) <= len(indices) <= min(384, total)
    assert indices[0] == 0 and (len(indices) == 1 or indices[-1] == total - 1)
    assert (np.diff(indices) > 0).all()


def test_a_count_in_the_call_replaces_the_configured_rate(videos, make_clip):
    clip, metadata = make_clip(60, 32, 32), {"total_num_frames": 60, "fps": 30}
    grid = videos(clip, num_frames=10, video_metadata=metadata, return_tensors="pt")["video_grid_thw"]
    assert grid[0, 0] == 5
    assert videos(clip, min_frames=12, video_metadata=metadata, return_tensors="pt")["video_grid_thw"][0, 0] == 6
    assert (
        videos(clip, fps=30, max_frames=20, video_metadata=metadata, return_tensors="pt")["video_grid_thw"][0, 0] == 10
    )
    with pytest.raises(ValueError, match="num_frames=10 and fps=4"):
        videos(clip, num_frames=10, fps=4, video_metadata=metadata)


@pytest.mark.parametrize("shape", [(6, 3, 40), (3, 32, 40), (4, 4, 40), (3, 3, 40)])
def test_channels_are_found_by_position_for_torch_like_numpy(shape, videos, make_clip):
    clip = make_clip(*shape)
    expected = videos([PIL.Image.fromarray(frame) for frame in clip], return_tensors="pt")
    forms = [clip, torch.from_numpy(clip), list(clip), torch.from_numpy(clip).permute(0, 3, 1, 2)]
    for form in forms:
        features = videos(form, return_tensors="pt")
        assert torch.equal(features["video_grid_thw"], expected["video_grid_thw"])
        assert torch.equal(features["pixel_values_videos"], expected["pixel_values_videos"])


def test_input_data_format_decides_for_clips(videos):
    clip = np.zeros((4, 3, 64, 3), dtype=np.uint8)
    last, first = (
        videos(clip, input_data_format=form, return_tensors="pt")["video_grid_thw"][0].tolist()
        for form in ("channels_last", "channels_first")
    )
    assert last[1:] == first[:0:-1] and last[1] < last[2]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm"])
def test_files_are_decoded_and_sampled_once(name, videos, clip_file):
    path = clip_file(frames=20, fps=10, name=name)
    for source in (str(path), path, path.as_uri(), path.read_bytes()):
        features = videos(source, return_metadata=True, return_tensors="pt", do_normalize=False, do_rescale=False)
        metadata = features["video_metadata"][0]
        assert metadata.frames_indices.tolist() == [0, 6, 13, 19]
        assert (metadata.total_num_frames, metadata.fps) == (20, 10)
        # (steps, patches, channels, temporal, pixels): the grey of a frame tells its number
        pixels = features["pixel_values_videos"].float().view(2, -1, 3, 2, 256).mean(dim=(1, 2, 4))
        assert (pixels.flatten() / 8 - torch.tensor([0, 6, 13, 19])).abs().max() < 0.5


def test_a_file_cut_short_is_sampled_from_the_frames_it_holds(videos, clip_file):
    data = clip_file(frames=20, fps=10, name="clip.avi").read_bytes()
    start, end = data.index(b"movi"), data.index(b"idx1")  # the frames of an AVI file, whose header still counts 20
    features = videos(data[: start + (end - start) * 2 // 3], return_metadata=True, return_tensors="pt")
    metadata = features["video_metadata"][0]
    assert 4 <= metadata.total_num_frames < 20
    assert metadata.frames_indices[-1] == metadata.total_num_frames - 1


def test_metadata_of_a_file_may_choose_its_frames(videos, clip_file):
    given = {"total_num_frames": 20, "fps": 5, "frames_indices": [3, 9]}
    features = videos(clip_file(frames=20, fps=10), video_metadata=given, return_metadata=True, return_tensors="pt")
    assert features["video_grid_thw"][0, 0] == 1
    assert features["video_metadata"][0].timestamps == [3 / 5, 9 / 5]
    with pytest.raises(ValueError, match="video 0: .*frame 25 is not among its 20 frames"):
        videos(clip_file(frames=20), video_metadata=given | {"frames_indices": [3, 25]})


def test_impossible_bounds_are_refused(videos, make_clip):
    with pytest.raises(ValueError, match="shortest_edge"):
        videos(make_clip(4, 32, 32), size={"shortest_edge": 5000, "longest_edge": 4096})


def test_every_frame_of_a_file_is_kept_with_sampling_off(videos, clip_file):
    path = clip_file(frames=7)
    features = videos(path, do_sample_frames=False, return_metadata=True, return_tensors="pt")
    assert features["video_grid_thw"][0, 0] == 4
    assert features["video_metadata"][0].frames_indices.tolist() == list(range(7))


def test_a_phones_clip_is_turned_upright(videos, clip_file):
    path = clip_file(height=48, width=128)
    data = bytearray(path.read_bytes())
    # The display matrix of ISO 14496-12: 44 bytes into the body of the track header box; a quarter turn clockwise.
    start = data.index(b"tkhd") + 44
    turn = [0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30]
    data[start : start + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in turn)
    plain, turned = (
        videos(source, return_tensors="pt")["video_grid_thw"][0, 1:].tolist() for source in (path, bytes(data))
    )
    assert turned == plain[::-1]


def test_frames_given_as_image_files_make_one_clip(videos, tmp_path, make_picture):
    paths = []
    for number in range(4):
        paths.append(str(tmp_path / f"{number}.png"))
        make_picture(40, 60, number).save(paths[-1])
    expected = videos([PIL.Image.open(path) for path in paths], return_tensors="pt")["pixel_values_videos"]
    for form in (paths, [paths], [[paths]]):
        assert torch.equal(videos(form, return_tensors="pt")["pixel_values_videos"], expected)


@pytest.mark.parametrize("source", ["missing.mp4", b"no video"])
def test_unreadable_clip_is_named(source, videos, make_clip):
    with pytest.raises(ValueError, match="video 1: no video that can be decoded"):
        videos([make_clip(4, 32, 32), source])


def test_frames_of_different_sizes_are_refused(videos, make_picture):
    with pytest.raises(ValueError, match="video 0: frames of different sizes"):
        videos([make_picture(32, 32), make_picture(32, 64)])


def test_extreme_clips_give_a_merged_cell(videos, make_clip):
    for shape in ((2, 1, 1000), (2, 1000, 1), (1, 1, 1)):
        assert videos(make_clip(*shape), return_tensors="pt")["video_grid_thw"][0, 1:].min() >= 2


@given(frames=st.integers(1, 9), height=st.integers(1, 300), width=st.integers(1, 300), cap=st.booleans())
@settings(max_examples=25, deadline=None)
def test_patch_count_equals_the_grid(frames, height, width, cap):
    options = {"cap_pixels_per_frame": cap, "max_video_tokens": 20}
    processor = Lfm3VlVideoProcessor(do_sample_frames=False, **options)
    grid = processor(np.zeros((frames, height, width, 3), dtype=np.uint8), return_tensors="pt")["video_grid_thw"]
    assert processor.get_num_of_video_patches(frames, height, width) == grid.prod()
    assert Lfm3VlVideoProcessor().get_num_of_video_patches(frames, height, width, options) == grid.prod()


def test_clips_of_many_shapes_come_out_in_order(videos, make_clip):
    clips = [make_clip(4, 32, 64, 1), make_clip(6, 64, 32, 2), make_clip(4, 32, 64, 3)]
    together = videos(clips, return_tensors="pt")
    apart = [videos(clip, return_tensors="pt") for clip in clips]
    assert torch.equal(together["pixel_values_videos"], torch.cat([one["pixel_values_videos"] for one in apart]))
    assert torch.equal(together["video_grid_thw"], torch.cat([one["video_grid_thw"] for one in apart]))


def test_settings_survive_saving(tmp_path):
    Lfm3VlVideoProcessor(cap_pixels_per_frame=True, max_video_tokens=99, fps=1.0).save_pretrained(tmp_path)
    loaded = Lfm3VlVideoProcessor.from_pretrained(tmp_path)
    assert (loaded.cap_pixels_per_frame, loaded.max_video_tokens, loaded.fps) == (True, 99, 1.0)
    assert loaded.to_dict()["video_processor_type"] == "Lfm3VlVideoProcessor"
