"""Real photographs, a tiny tokenizer with the vision tokens, and our processors beside transformers' own."""

import subprocess
import sys

import av
import numpy as np
import PIL.Image
import pytest
from sklearn.datasets import load_sample_images
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLVideoProcessor
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor as PublishedProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from gridtower.processing.image_processing_lfm3_vl import Lfm3VlImageProcessor, Lfm3VlImageProcessorPil
from gridtower.processing.processing_lfm3_vl import Lfm3VlProcessor
from gridtower.processing.video_processing_lfm3_vl import Lfm3VlVideoProcessor

VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|video_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PUBLISHED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
PUBLISHED_IMAGES = {**PUBLISHED, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
PUBLISHED_VIDEOS = {
    **PUBLISHED,
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    "max_frames": 384,
    "cap_pixels_per_frame": False,
}


@pytest.fixture
def tokenizer():
    """Bytes as the whole vocabulary: nothing is unknown, and every text comes back as it was."""
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=VISION_TOKENS,
    )


@pytest.fixture
def make_picture():
    def random_picture(height, width, seed=0):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return PIL.Image.fromarray(pixels)

    return random_picture


@pytest.fixture
def make_clip():
    def random_clip(frames, height, width, seed=0):
        return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)

    return random_clip


@pytest.fixture
def clip_file(tmp_path):
    """Writes a real video file whose frame i is a grey of 8 * i, and returns its path."""

    def write(frames=20, fps=10, name="clip.mp4", height=48, width=64):
        path = tmp_path / name
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libvpx" if name.endswith(".webm") else "mpeg4", rate=fps)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for number in range(frames):
                grey = np.full((height, width, 3), 8 * number, dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture(scope="session")
def photographs():
    return [PIL.Image.fromarray(pixels) for pixels in load_sample_images().images]


@pytest.fixture
def processor(tokenizer):
    return Lfm3VlProcessor(Lfm3VlImageProcessor(), tokenizer, Lfm3VlVideoProcessor(), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def small_processor(tokenizer):
    """Images of any size below 128 x 128 pixels become few tokens, so that runs can be counted by eye."""
    images = Lfm3VlImageProcessor(min_pixels=1024, max_pixels=16384)
    return Lfm3VlProcessor(images, tokenizer, Lfm3VlVideoProcessor(), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def published_images():
    return {
        Lfm3VlImageProcessor: Qwen2VLImageProcessor(**PUBLISHED_IMAGES),
        Lfm3VlImageProcessorPil: Qwen2VLImageProcessorPil(**PUBLISHED_IMAGES),
    }


@pytest.fixture
def published_videos():
    return Qwen3VLVideoProcessor(**PUBLISHED_VIDEOS)


@pytest.fixture
def published_processor(tokenizer, published_images, published_videos):
    images = published_images[Lfm3VlImageProcessor]
    return PublishedProcessor(images, tokenizer, published_videos, chat_template=CHAT_TEMPLATE)


def run_without_torchvision(program: str, *arguments) -> list[str]:
    """The lines that `program` prints in a process that has no torchvision."""
    hidden = """
import sys
sys.modules["torchvision"] = None
from transformers.utils import is_torchvision_available
assert not is_torchvision_available()
"""
    run = subprocess.run([sys.executable, "-c", hidden + program, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
