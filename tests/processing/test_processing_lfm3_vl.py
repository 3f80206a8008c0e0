"""Prompts with images and videos become the inputs that the published processor makes, and mistakes are named."""

import base64
import io

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoProcessor, Lfm3VlConfig, Lfm3VlForConditionalGeneration, pipeline

from gridtower.processing.image_processing_lfm3_vl import Lfm3VlImageProcessor, Lfm3VlImageProcessorPil
from gridtower.processing.processing_lfm3_vl import Lfm3VlProcessor, step_timestamps
from gridtower.processing.video_processing_lfm3_vl import Lfm3VlVideoProcessor

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|video_pad|>"


def assert_equal_features(ours, theirs):
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def image_tokens(processor, features):
    """Image tokens in each row."""
    return (features["input_ids"] == processor.image_token_id).sum(dim=1).tolist()


def cells(features):
    """Merged cells of each image."""
    return (features["image_grid_thw"].prod(dim=1) // 4).tolist()


def test_images_videos_and_text_equal_the_published_processor(
    processor, published_processor, photographs, make_picture, make_clip
):
    clips = [make_clip(40, 64, 96, 1), make_clip(12, 33, 65, 2)]
    metadata = [{"total_num_frames": 40, "fps": 10}, {"total_num_frames": 12, "fps": 1}]
    inputs = {
        "text": [f"a {IMAGE} b {VIDEO} c {IMAGE}", f"{VIDEO}{IMAGE}!", "only words"],
        "images": [photographs[0].resize((320, 200)), make_picture(100, 50), photographs[1].resize((64, 64))],
        "videos": clips,
    }
    options = {"padding": True, "padding_side": "left", "return_mm_token_type_ids": True, "return_tensors": "pt"}
    ours, theirs = (one(**inputs, video_metadata=metadata, **options) for one in (processor, published_processor))
    assert_equal_features(ours, theirs)


def test_chat_with_files_equals_the_published_processor(
    processor, published_processor, tmp_path, clip_file, make_picture
):
    picture, clip = tmp_path / "picture.png", clip_file()
    make_picture(90, 120).save(picture)
    frames = [PIL.Image.fromarray(np.full((48, 64, 3), 8 * number, dtype=np.uint8)) for number in range(20)]

    def chat(video):
        content = [
            {"type": "video", "video": video},
            {"type": "image", "path": str(picture)},
            {"type": "text", "text": "?"},
        ]
        return [{"role": "user", "content": content}]

    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    metadata = {"video_metadata": [{"total_num_frames": 20, "fps": 10}]}
    theirs = published_processor.apply_chat_template(chat(frames), processor_kwargs=metadata, **options)
    ours = processor.apply_chat_template(chat(frames), processor_kwargs=metadata, **options)
    assert_equal_features(ours, theirs)
    # The file holds the same frames, but for the loss of its codec.
    decoded = processor.apply_chat_template(chat(str(clip)), **options)
    assert torch.equal(decoded["input_ids"], theirs["input_ids"])
    assert torch.equal(decoded["video_grid_thw"], theirs["video_grid_thw"])
    assert (decoded["pixel_values_videos"] - theirs["pixel_values_videos"]).abs().max() < 0.05


def test_a_video_expands_into_timestamps_and_runs(processor, make_clip):
    metadata = {"total_num_frames": 380, "fps": 30, "frames_indices": [0, 54, 108, 163, 217]}
    features = processor(text=VIDEO, videos=make_clip(5, 32, 32), video_metadata=metadata, return_tensors="pt")
    run = "<|vision_start|>" + "<|video_pad|>" + "<|vision_end|>"
    expected = f"<0.9 seconds>{run}<4.5 seconds>{run}<7.2 seconds>{run}"
    assert processor.tokenizer.decode(features["input_ids"][0]) == expected


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("temporal", [1, 2, 4])
def test_timestamps_are_means_of_each_step(count, temporal):
    indices = [3 * number for number in range(count)]
    padded = indices + [indices[-1]] * (-count % temporal)
    expected = [(padded[i] + padded[i + temporal - 1]) / 2 / 30 for i in range(0, len(padded), temporal)]
    assert step_timestamps(indices, 30, temporal) == pytest.approx(expected)


def test_two_videos_of_one_prompt_keep_their_own_frame_rates(processor, make_clip):
    clip = make_clip(4, 32, 32)
    metadata = [{"total_num_frames": 4, "fps": fps, "frames_indices": [0, 1, 2, 3]} for fps in (1, 30)]
    text = processor.tokenizer.decode(
        processor(text=VIDEO * 2, videos=[clip, clip], video_metadata=metadata, do_sample_frames=False)["input_ids"][0]
    )
    assert [part.split(" ")[0] for part in text.split("<")[1:] if "seconds" in part] == ["0.5", "2.5", "0.0", "0.1"]


def test_a_flat_list_is_shared_out_by_placeholders(small_processor, make_picture):
    images = [make_picture(64, 96), make_picture(32, 32)]
    flat = small_processor(text=[f"one {IMAGE}", f"two {IMAGE}"], images=images, return_tensors="pt")
    assert image_tokens(small_processor, flat) == cells(flat) == [6, 1]
    nested = small_processor(
        text=[f"one {IMAGE}", f"two {IMAGE}"], images=[[images[0]], [images[1]]], return_tensors="pt"
    )
    assert_equal_features(flat, nested)


def test_one_string_and_a_list_of_one_agree(small_processor, make_picture):
    images = [make_picture(64, 96), make_picture(32, 32)]
    plain = small_processor(text=IMAGE * 2, images=images, return_tensors="pt")
    for text, media in (([IMAGE * 2], images), ([IMAGE * 2], [images]), (IMAGE * 2, [images])):
        assert_equal_features(plain, small_processor(text=text, images=media, return_tensors="pt"))


def test_rows_without_images_are_accepted(small_processor, make_picture):
    picture = make_picture(64, 96)
    for images in ([[picture], []], [[picture], None], [picture], picture):
        features = small_processor(text=[IMAGE, "words"], images=images, return_tensors="pt")
        assert image_tokens(small_processor, features) == [6, 0]
    for images in (None, [], [[], []], [None, None]):
        features = small_processor(text=["words", "more words"], images=images, return_tensors="pt")
        assert set(features) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    "text, images, message",
    [
        ([IMAGE * 2], 1, r"prompt 0 has 2 image placeholder\(s\) but 1 image"),
        (["none"], 1, r"prompt 0 has 0 image placeholder\(s\) but 1 image"),
        (["none", IMAGE], 0, r"prompt 1 has 1 image placeholder\(s\) but 0 image"),
        ([IMAGE, VIDEO], 1, r"prompt 1 has 1 video placeholder\(s\) but 0 video"),
    ],
)
def test_unequal_counts_are_refused(text, images, message, small_processor, make_picture):
    with pytest.raises(ValueError, match=message):
        small_processor(text=text, images=[make_picture(32, 32)] * images or None)


def test_truncation_never_cuts_into_an_image(small_processor, make_picture):
    pictures = [make_picture(128, 128)] * 2
    text = ["short", f"{IMAGE}{IMAGE} words after"]
    needed = len(small_processor(text=text[1], images=pictures)["input_ids"][0])
    options = {"truncation": True, "return_tensors": "pt"}
    for limit in (20, 30, needed - 14):
        with pytest.raises(ValueError, match=f"prompt 1 needs {needed} tokens, and a limit of {limit} "):
            small_processor(text=text, images=pictures, max_length=limit, **options)
    assert (
        small_processor(text=text, images=pictures, max_length=needed - 5, **options)["input_ids"].shape[1]
        == needed - 5
    )


def test_batches_are_padded_on_the_left(small_processor, make_picture, tmp_path):
    small_processor.save_pretrained(tmp_path)
    loaded = Lfm3VlProcessor.from_pretrained(tmp_path)
    for processor in (small_processor, loaded):
        features = processor(text=["a", f"{IMAGE}b"], images=make_picture(32, 32), return_tensors="pt")
        assert features["attention_mask"].tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]
        right = processor(text=["a", "bc"], padding_side="right", return_tensors="pt")
        assert right["attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_token_types_come_on_request_and_mark_placeholders_only(small_processor, make_picture, make_clip):
    inputs = {
        "text": [f"<image> {IMAGE}{VIDEO}", "image_pad"],
        "images": make_picture(64, 64),
        "videos": make_clip(4, 32, 32),
    }
    assert "mm_token_type_ids" not in small_processor(**inputs)
    features = small_processor(**inputs, return_mm_token_type_ids=True, return_tensors="pt")
    kinds, ids = features["mm_token_type_ids"], features["input_ids"]
    assert torch.equal(kinds == 1, ids == small_processor.image_token_id)
    assert torch.equal(kinds == 2, ids == small_processor.video_token_id)
    assert (kinds == 0).sum() == kinds.numel() - 4 - features["video_grid_thw"].prod() // 4
    assert kinds[1].unique().tolist() == [0]


def test_placeholders_in_sanitized_user_text_are_text(small_processor, make_picture):
    picture = make_picture(64, 64)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "say <|image_pad|> and <|video_pad|>"}]
    features = small_processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        sanitize_control_tokens=True,
        processor_kwargs={"return_mm_token_type_ids": True},
    )
    assert image_tokens(small_processor, features) == [4]
    assert features["mm_token_type_ids"].sum() == 4
    assert "say <|image_pad|> and <|video_pad|>" in small_processor.decode(features["input_ids"][0])


def test_every_emitted_key_is_a_model_input(small_processor, make_picture, make_clip):
    features = small_processor(
        text=IMAGE + VIDEO, images=make_picture(32, 32), videos=make_clip(4, 32, 32), return_mm_token_type_ids=True
    )
    assert set(features) <= set(small_processor.model_input_names)


def test_images_may_come_from_any_source(small_processor, make_picture, tmp_path):
    picture = make_picture(64, 96)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(buffer.getvalue())
    text = base64.b64encode(buffer.getvalue()).decode()
    expected = small_processor(text=IMAGE, images=picture, return_tensors="pt")
    array = np.array(picture)
    sources = [str(path), path, path.as_uri(), buffer.getvalue(), text, f"data:image/png;base64,{text}", array]
    for source in [*sources, torch.from_numpy(array), array[None]]:
        assert_equal_features(expected, small_processor(text=IMAGE, images=source, return_tensors="pt"))
    for key, value in (("image", picture), ("path", str(path)), ("url", path.as_uri()), ("base64", text)):
        chat = [[{"role": "user", "content": [{"type": "image", key: value}]}], [{"role": "user", "content": "words"}]]
        features = small_processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        assert torch.equal(features["pixel_values"], expected["pixel_values"])
        assert image_tokens(small_processor, features) == [6, 0]


@pytest.mark.parametrize("size", [(1, 1), (480, 640), (1, 1000), (10000, 10000), (10000, 1)])
def test_token_counts_are_known_from_sizes_alone(size, processor, make_picture):
    counts = processor._get_num_multimodal_tokens(image_sizes=[size], video_sizes=[(5, *size)])
    if max(size) < 10000:
        features = processor(text=IMAGE, images=make_picture(*size), return_tensors="pt")
        assert counts["num_image_tokens"] == image_tokens(processor, features)
        assert counts["num_image_patches"] == features["image_grid_thw"].prod(dim=1).tolist()
        clip = np.zeros((5, *size, 3), dtype=np.uint8)
        grid = processor(text=VIDEO, videos=clip, do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
        assert counts["num_video_tokens"] == (grid.prod(dim=1) // 4).tolist()
    assert 1 <= counts["num_image_tokens"][0] <= 16384 and counts["num_video_tokens"][0] >= 3


def test_token_counts_honour_overrides(processor, make_picture):
    for overrides in ({"max_pixels": 401408}, {"images_kwargs": {"merge_size": 1, "max_pixels": 200000}}):
        features = processor(text=IMAGE, images=make_picture(1080, 1920), return_tensors="pt", **overrides)
        counts = processor._get_num_multimodal_tokens(image_sizes=[(1080, 1920)], **overrides)
        assert counts["num_image_tokens"] == image_tokens(processor, features)


def test_unknown_keywords_are_refused(processor):
    with pytest.raises(ValueError, match="max_pixel'"):
        processor(text="words", max_pixel=3)
    with pytest.raises(ValueError, match="max_pixel'"):
        processor._get_num_multimodal_tokens(image_sizes=[(3, 3)], max_pixel=3)


@pytest.mark.parametrize("inputs, message", [({}, "nothing to process"), ({"text": ["a", 3]}, "prompt 1 is int")])
def test_missing_or_wrong_text_is_refused(inputs, message, processor):
    with pytest.raises(ValueError, match=message):
        processor(**inputs)


def test_audio_is_refused(processor):
    with pytest.raises(ValueError, match="audio"):
        processor(text="words", audio=[np.zeros(10)])


def test_a_tokenizer_without_the_vision_tokens_is_refused(tokenizer):
    tokenizer.image_token = "<none>"
    with pytest.raises(ValueError, match="no '<none>'"):
        Lfm3VlProcessor(Lfm3VlImageProcessor(), tokenizer, Lfm3VlVideoProcessor())


def test_generated_ids_become_text(processor, published_processor):
    ids = torch.tensor(processor.tokenizer(["42 cats", "7 dogs "])["input_ids"])
    assert processor.post_process_image_text_to_text(ids) == ["42 cats", "7 dogs "]
    assert published_processor.post_process_image_text_to_text(ids) == ["42 cats", "7 dogs "]


def test_saving_and_loading_changes_nothing(processor, make_picture, make_clip, tmp_path):
    processor.image_processor = Lfm3VlImageProcessor(max_pixels=90000)
    processor.save_pretrained(tmp_path)
    loaded = Lfm3VlProcessor.from_pretrained(tmp_path)
    inputs = {"text": IMAGE + VIDEO, "images": make_picture(300, 500), "videos": make_clip(9, 40, 40)}
    assert_equal_features(processor(**inputs, return_tensors="pt"), loaded(**inputs, return_tensors="pt"))
    assert loaded.chat_template == processor.chat_template
    assert loaded.image_processor.max_pixels == 90000
    remote = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")
    assert_equal_features(processor(**inputs, return_tensors="pt"), remote(**inputs, return_tensors="pt"))


def test_settings_given_while_loading_reach_their_processor(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    loaded = Lfm3VlProcessor.from_pretrained(tmp_path, max_pixels=401408, max_frames=8, backend="pil")
    assert isinstance(loaded.image_processor, Lfm3VlImageProcessorPil)
    assert loaded.image_processor.max_pixels == 401408
    assert loaded.video_processor.max_frames == 8
    assert "max_pixels" not in loaded.tokenizer.init_kwargs
    counts = loaded._get_num_multimodal_tokens(image_sizes=[(2000, 2000)])
    assert counts["num_image_tokens"][0] * 32**2 <= 401408


@pytest.fixture(scope="module")
def tiny_model():
    text = {
        "model_type": "lfm3",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    text |= {"pad_token_id": 257, "bos_token_id": 256, "eos_token_id": 256}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"image_token_id": 258, "video_token_id": 259, "vision_start_token_id": 260, "vision_end_token_id": 261}
    vision |= {"num_key_value_heads": 1}
    config = Lfm3VlConfig(text_config=text, vision_config=vision, projector_hidden_size=32, **tokens)
    return Lfm3VlForConditionalGeneration(config).eval()


def test_the_pipeline_reads_chats_and_plain_prompts(small_processor, tiny_model, make_picture, tmp_path):
    path = tmp_path / "picture.png"
    make_picture(64, 96).save(path)
    names = ("image", "video", "vision_start", "vision_end")
    for name in names:
        assert getattr(tiny_model.config, f"{name}_token_id") == getattr(small_processor, f"{name}_token_id")
    answer = pipeline("image-text-to-text", model=tiny_model, processor=small_processor, max_new_tokens=3)
    content = [{"type": "image", "path": str(path)}, {"type": "text", "text": "?"}]
    chat = [{"role": "user", "content": content}]
    from_chat = answer(text=chat, return_full_text=False)
    assert isinstance(from_chat[0]["generated_text"], str)
    prompt = small_processor.apply_chat_template(chat, add_generation_prompt=True)
    from_prompt = answer(images=[str(path)], text=prompt, return_full_text=False)
    assert from_prompt[0]["generated_text"] == from_chat[0]["generated_text"]


def test_media_without_text_and_numpy_output(processor, make_picture):
    assert set(processor(images=make_picture(32, 32))) == {"pixel_values", "image_grid_thw"}
    features = processor(text=IMAGE, images=make_picture(32, 32), return_tensors="np")
    assert all(isinstance(value, np.ndarray) for value in features.values())
