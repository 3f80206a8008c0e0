"""Write pictures of handwritten numbers, as conversations for `finetune.py`: `train.jsonl` and `validation.jsonl`.

Usage: `python examples/write_conversations.py DIR --turn 30`. Training and validation pictures share no scan.
"""

import argparse
import json
from pathlib import Path

import PIL.Image
from handwritten_numbers import QUESTIONS, HandwrittenNumbers


def write(folder: Path, split: str, numbers: HandwrittenNumbers, degrees: float) -> Path:
    """Writes the pictures and a JSON line for each; returns the path of the file of lines."""
    (folder / split).mkdir(parents=True)
    lines = []
    for index in range(len(numbers)):
        picture, digits = numbers[index]
        # What the turn uncovers is paper, as bright as the corner of the picture.
        paper = picture.getpixel((0, 0))
        turned = picture.rotate(degrees, PIL.Image.Resampling.BICUBIC, expand=True, fillcolor=paper)
        name = f"{split}/{index:05}.png"
        turned.save(folder / name)
        question = [{"type": "image", "path": name}, {"type": "text", "text": QUESTIONS[0]}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": digits}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path = folder / f"{split}.jsonl"
    path.write_text("".join(lines))
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--validation-rows", type=int, default=200)
    parser.add_argument(
        "--turn", type=float, default=0.0, metavar="DEGREES", help="of the pictures, against the clock"
    )
    parser.add_argument("--digits", type=int, nargs="+", default=[1, 2, 3], help="in a number")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already; name a new folder")
    for split, scans, rows in (("train", "train", options.rows), ("validation", "test", options.validation_rows)):
        numbers = HandwrittenNumbers(rows, tuple(options.digits), scans, seed=2026)
        print(write(options.folder, split, numbers, options.turn))


if __name__ == "__main__":
    main()
