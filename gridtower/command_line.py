"""The `gridtower` command: `describe` says what is in images and videos, `export` writes hub folders."""

import argparse
import json
import mimetypes
import sys
import time
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 1 when an input or an argument was refused."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"gridtower {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gridtower", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    describe = commands.add_parser("describe", help="print what a model says about images and videos")
    describe.add_argument("inputs", nargs="+", metavar="IMAGE_OR_VIDEO", help="files to describe, one after the other")
    describe.add_argument(
        "--model", default="default", help="model folder or hub repository (default: the bundled one)"
    )
    describe.add_argument("--prompt", default="What number is written here?", help="question asked about each input")
    describe.add_argument("--json", action="store_true", help="one JSON object a line, in the order of the inputs")
    describe.add_argument("--max-new-tokens", type=int, help="limit of the answer (default: the model's own)")
    describe.add_argument("--device", default="auto", help="where to run: auto, cpu, cuda, cuda:1, mps …")
    describe.set_defaults(run=_describe)

    export = commands.add_parser("export", help="write a folder that loads with trust_remote_code=True")
    export.add_argument("source", help='model folder, hub repository, or "default" for the bundled model')
    export.add_argument("out", help="folder to write; new or empty")
    export.add_argument("--tower-only", action="store_true", help="write the vision tower as a model of its own")
    export.add_argument(
        "--format", choices=("hf", "mistral"), default="hf", help="layout to write; mistral is Pixtral's own"
    )
    export.set_defaults(run=_export)
    return parser


def _export(options) -> int:
    from .hub_cards.export import export

    print(export(options.source, options.out, tower_only=options.tower_only, format=options.format))
    return 0


def _describe(options) -> int:
    kinds = [_media_kind(path) for path in options.inputs]
    import torch
    import transformers
    from tqdm import tqdm

    from . import register
    from .hub_cards.export import source_folder

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    register()
    model, processor = _load(source_folder(options.model))
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    several = len(options.inputs) > 1
    failed = False
    for path, kind in tqdm(list(zip(options.inputs, kinds)), unit="input", disable=None if several else True):
        try:
            answer = _answer(model, processor, path, kind, options, stream=not options.json and not several)
        except ValueError as error:
            failed = True
            answer = {"input": path, "error": str(error)}
        if options.json:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        elif "error" in answer:
            print(f"{path}: {answer['error']}", file=sys.stderr)
        elif several:
            print(f"{path}: {answer['text']}", flush=True)
    return int(failed)


def _load(folder: Path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from . import PixtralForConditionalGeneration, PixtralProcessor
    from .configuration.native_params_pixtral import is_native_folder

    if is_native_folder(folder):
        return PixtralForConditionalGeneration.from_pretrained(folder), PixtralProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    return model, AutoProcessor.from_pretrained(folder, trust_remote_code=False)


def _answer(model, processor, path: str, kind: str, options, stream: bool) -> dict:
    from transformers import TextStreamer

    placeholder = getattr(model.config, f"{kind}_token_id", None)
    if placeholder is None:
        raise ValueError(f"a model of type {model.config.model_type} takes no {kind}s; pass images.")
    started = time.perf_counter()
    content = [{"type": kind, "path": path}, {"type": "text", "text": options.prompt}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    processed = time.perf_counter()
    limits = {} if options.max_new_tokens is None else {"max_new_tokens": options.max_new_tokens}
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    tensors = {name: inputs[name].to(model.device) for name in inputs if hasattr(inputs[name], "to")}
    prompt_length = tensors["input_ids"].shape[1]
    generated = model.generate(**tensors, **limits, streamer=streamer)[0, prompt_length:]
    return {
        "input": path,
        "text": processor.decode(generated, skip_special_tokens=True),
        "grid_thw": tensors[f"{kind}_grid_thw"][0].tolist(),
        "prompt_tokens": prompt_length,
        "vision_tokens": int((tensors["input_ids"] == placeholder).sum()),
        "new_tokens": len(generated),
        "seconds": {
            "processing": round(processed - started, 4),
            "generation": round(time.perf_counter() - processed, 4),
        },
    }


def _media_kind(path: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file.")
    kind = (mimetypes.guess_type(path)[0] or "image/").split("/")[0]
    return "video" if kind == "video" else "image"


if __name__ == "__main__":
    sys.exit(main())
