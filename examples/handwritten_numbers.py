"""Pictures of handwritten numbers, composed from the scans of real handwriting that scikit-learn ships.

Scans: the UCI Optical Recognition of Handwritten Digits set as `sklearn.datasets.load_digits` holds it, 8 x 8 pixels.
Training and test pictures never share a scan. The tokenizer and chat template of a model that reads them are here too.
"""

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

SMALLEST_DIGIT, LARGEST_DIGIT = 20, 64  # pixels from top to bottom
NUM_TEST_SCANS = 360
LARGEST_MARGIN = 80
LEAST_CONTRAST = 80  # grey levels between ink and paper
DISTORTED = 2 / 3  # of the training scans; who never sees one as it was written reads the test scans worse
BUNDLED_PICTURE = Path(__file__).resolve().parent / "handwritten_2026.png"
QUESTIONS = (
    "What number is written here?",
    "What number is written here?",
    "What number is this?",
    "Read the number.",
    "Read the digits in this image.",
    "Describe this image.",
    "",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image|><|vision_end|>"
    # The processor puts the vision marks around each temporal step of a video.
    "{% elif part.type == 'video' %}<|video|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def split_scans() -> dict[str, np.ndarray]:
    """Indices into the 1797 scans, `"train"` and `"test"`: disjoint, together all, the same on every machine."""
    shuffled = np.random.default_rng(2026).permutation(len(load_digits().target))
    return {"train": np.sort(shuffled[NUM_TEST_SCANS:]), "test": np.sort(shuffled[:NUM_TEST_SCANS])}


@cache
def scans_of_digits(split: str) -> tuple[tuple[Image.Image, ...], ...]:
    """The scans of `split` by digit, 0 to 9: 8-bit grey, white ink on black, blank columns cut off, a rim of one pixel.

    The rim lets the bicubic enlargement fade out instead of ending a stroke in a hard edge.
    """
    digits = load_digits()
    by_digit = [[] for _ in range(10)]
    for index in split_scans()[split]:
        ink = digits.images[index]
        inked = np.flatnonzero(ink.any(axis=0))
        ink = ink[:, inked[0] : inked[-1] + 1]
        scan = Image.fromarray((np.pad(ink, 1) * (255 / 16)).astype(np.uint8))
        by_digit[digits.target[index]].append(scan)
    return tuple(map(tuple, by_digit))


def distort(scan: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A slant, turn and change of weight, for training: what another hand might have done to the same digit."""
    sheet = ImageOps.expand(scan, 4)
    fine = sheet.resize([4 * side for side in sheet.size], Image.Resampling.BICUBIC)
    turn, slant = rng.normal(0, 0.10), rng.normal(0, 0.15)
    matrix = np.array([[np.cos(turn), np.sin(turn) + slant], [-np.sin(turn), np.cos(turn)]])
    matrix *= np.exp(rng.normal(0, 0.08, (2, 1)))
    centre = np.array(fine.size) / 2
    shift = centre - matrix @ (centre + rng.uniform(-2, 2, 2))
    where = [*matrix[0], shift[0], *matrix[1], shift[1]]
    fine = fine.transform(fine.size, Image.Transform.AFFINE, where, Image.Resampling.BILINEAR)
    weight = np.exp(rng.normal(0, 0.25))
    coarse = np.asarray(fine.resize(sheet.size, Image.Resampling.BOX)) / np.float32(255)
    coarse = (255 * coarse**weight).astype(np.uint8)
    inked = coarse > 12
    rows, columns = np.flatnonzero(inked.any(1)), np.flatnonzero(inked.any(0))
    return Image.fromarray(coarse[rows[0] - 1 : rows[-1] + 2, columns[0] - 1 : columns[-1] + 2])


def enlarge(scan: Image.Image, height: int, width_factor: float) -> Image.Image:
    """The scan with the rows inside its rim on `height` pixels; the rim is enlarged along with them."""
    columns, rows = scan.size
    scale = height / (rows - 2)
    size = round(columns * scale * width_factor), round(rows * scale)
    return scan.resize(size, Image.Resampling.BICUBIC)


def draw_colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ink and paper, RGB: dark on light or light on dark alike often, grey or coloured, always readable."""
    contrast = rng.uniform(LEAST_CONTRAST, 255)
    dark = rng.uniform(0, 255 - contrast)
    # Tints shift no colour by more than a quarter of the contrast, so that the order of dark and light holds.
    tints = rng.uniform(-contrast / 4, contrast / 4, (2, 3)) * rng.integers(0, 2)
    shades = np.array([[dark], [dark + contrast]]) + tints
    ink, paper = np.clip(shades, 0, 255)[:: rng.choice([1, -1])]
    return ink, paper


def write_number(
    digits: str,
    rng: np.random.Generator,
    split: str = "test",
    coloured: float = 1.0,
    largest_margin: int = LARGEST_MARGIN,
) -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
    """Write `digits` by hand, on a sheet just as large as its margins say.

    Args:
        digits: any number of the characters 0 to 9.
        rng: decides scans, sizes, gaps, margins, colours and the grain of the paper.
        split: whose scans, `"train"` (most of them distorted) or `"test"` (as they were written).
        coloured: share of pictures with colours of their own; the others are black on white.
        largest_margin: most pixels of paper beyond the digits, on each side.

    Returns:
        the RGB picture, and (left, top, right, bottom) of each digit in pixels.

    Raises:
        ValueError: `digits` is empty or holds another character.
    """
    if not digits or not set(digits) <= set("0123456789"):
        raise ValueError(f"digits is {digits!r}; give at least one of the characters 0 to 9 and nothing else")
    size = np.exp(rng.uniform(np.log(SMALLEST_DIGIT), np.log(LARGEST_DIGIT)))
    gap = size * rng.uniform(0, 1) ** 2
    left, top, right, bottom = (largest_margin * rng.uniform(0, 1, 4) ** 2).astype(int)
    wander = size * rng.uniform(0, 0.25)

    glyphs, boxes, pen = [], [], left
    for digit in digits:
        scans = scans_of_digits(split)[int(digit)]
        scan = scans[rng.integers(len(scans))]
        if split == "train" and rng.random() < DISTORTED:
            scan = distort(scan, rng)
        height = int(np.clip(round(size * rng.uniform(0.85, 1.15)), SMALLEST_DIGIT, LARGEST_DIGIT))
        glyph = enlarge(scan, height, rng.uniform(0.8, 1.2))
        rim_x, rim_y = round(glyph.width / scan.width), (glyph.height - height) // 2
        upper = top + int(rng.uniform(0, wander))
        box = (pen, upper, pen + glyph.width - 2 * rim_x, upper + height)
        glyphs.append((glyph, (box[0] - rim_x, box[1] - rim_y)))
        boxes.append(box)
        pen = box[2] + round(gap * rng.uniform(0.5, 1.5))

    sheet = Image.new("L", (boxes[-1][2] + right, max(box[3] for box in boxes) + bottom))
    for glyph, corner in glyphs:
        # Where neighbours touch, ink lies over ink.
        sheet.paste(255, corner, glyph)
    ink, paper = draw_colours(rng) if rng.random() < coloured else (np.zeros(3), np.full(3, 255.0))
    return colour(sheet, ink, paper, rng), boxes


def colour(sheet: Image.Image, ink: np.ndarray, paper: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """Coverage by ink (8-bit grey) -> RGB picture on grainy paper."""
    coverage = np.asarray(sheet, dtype=np.float32)[..., None] / 255
    pixels = paper.astype(np.float32) + coverage * (ink - paper).astype(np.float32)
    grain = rng.uniform(0, 6) * rng.standard_normal((*coverage.shape[:2], 1), dtype=np.float32)
    # (rows, columns, 3)
    return Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))


class HandwrittenNumbers(Dataset):
    """(picture, digits) pairs; item `index` is the same picture whenever and wherever it is drawn.

    Args:
        size: number of pictures.
        lengths: numbers of digits, each alike often.
        split: `"train"` or `"test"`: whose scans.
        seed: another seed, other pictures.
        coloured: share of pictures that are not plain black on white.
        largest_margin: most pixels of paper beyond the digits, on each side.
        largest_area: in pixels; larger pictures are shrunk to it. None: as they were written.
    """

    def __init__(
        self,
        size: int,
        lengths: tuple[int, ...] = (1, 2, 3, 4),
        split: str = "test",
        seed: int = 0,
        coloured: float = 1.0,
        largest_margin: int = LARGEST_MARGIN,
        largest_area: int | None = None,
    ):
        self.size = size
        self.lengths = lengths
        self.split = split
        self.seed = seed
        self.coloured = coloured
        self.largest_margin = largest_margin
        self.largest_area = largest_area

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        if not 0 <= index < self.size:
            raise IndexError(f"index is {index}; this set holds 0 to {self.size - 1}")
        rng = np.random.default_rng([self.seed, index, self.split == "train"])
        digits = "".join(str(digit) for digit in rng.integers(0, 10, rng.choice(self.lengths)))
        picture, _ = write_number(digits, rng, self.split, self.coloured, self.largest_margin)
        if self.largest_area is not None:
            factor = (self.largest_area / (picture.width * picture.height)) ** 0.5
            picture.thumbnail([max(1, int(side * factor)) for side in picture.size])
        return picture, digits


def sample_picture(seed: int = 24) -> Image.Image:
    """The number 2026 in handwriting that no training picture shows."""
    return write_number("2026", np.random.default_rng(seed), "test")[0]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: the words of `QUESTIONS`, single digits, and every byte for any other text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*QUESTIONS, "user\n", "assistant\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens={
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )


if __name__ == "__main__":
    sample_picture().save(BUNDLED_PICTURE, optimize=True)
