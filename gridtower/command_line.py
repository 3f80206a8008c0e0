"""The `gridtower` command: `describe` says what is in images and videos, `embed` writes features, `export` hub folders;
`plan` says how much memory a model needs.
"""

import argparse
import json
import mimetypes
import re
import sys
import time
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 1 when an input or an argument was refused, or a plan does not fit."""
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
    export.add_argument("--with-projector", action="store_true", help="beside the tower, its projector's state dict")
    export.add_argument(
        "--format", choices=("hf", "mistral"), default="hf", help="layout to write; mistral is Pixtral's own"
    )
    export.set_defaults(run=_export)

    _add_embed(commands)
    _add_plan(commands)
    return parser


def _add_embed(commands) -> None:
    embed = commands.add_parser("embed", help="write features of many images as shards; a killed run goes on")
    embed.add_argument("inputs", nargs="+", metavar="INPUT", help="images, folders, parquet files, tars, JSONL files")
    embed.add_argument("--model", required=True, help="folder of a model or of a tower, or hub repository")
    embed.add_argument("--out", required=True, help="folder to write; new, or that of the same command before")
    embed.add_argument("--features", default="tower", help="tower (default), projector, or pooled: one vector each")
    embed.add_argument("--format", default="safetensors", help="safetensors (default) or parquet")
    embed.add_argument("--patches", type=int, default=16384, help="patches in a batch (default: 16384)")
    embed.add_argument("--workers", type=int, help="processes that decode (default: the cores that are left)")
    embed.add_argument("--shard-size", default="256MB", help="bytes of features in a shard (default: 256MB)")
    embed.add_argument("--device", default="auto", help="where to run: auto, cpu, cuda, cuda:1, mps …")
    embed.add_argument("--dtype", default="auto", help="float32, bfloat16, float16, or auto: the checkpoint's")
    embed.add_argument("--engine", default="local", help="local (default), or ray for many machines")
    embed.add_argument("--actors", type=int, default=1, help="with ray: copies of the model (default: 1)")
    embed.add_argument("--retry-failed", action="store_true", help="try again what could not be read before")
    embed.set_defaults(run=_embed)


def _add_plan(commands) -> None:
    plan = commands.add_parser("plan", help="print how much memory a model needs, and on how many devices it fits")
    plan.add_argument("--model", default="default", help="model folder, its config.json is enough, or hub repository")
    plan.add_argument("--gpus", type=int, default=1, help="devices to place the model on (default: 1)")
    plan.add_argument("--memory", type=float, metavar="GB", help="gigabytes of each; exit status 1 where nothing fits")
    plan.add_argument(
        "--image-size", nargs="+", default=["1024x1024"], metavar="WxH", help="images of a row, in pixels"
    )
    plan.add_argument("--images", type=int, default=1, help="how many of each size a row has; 0: text alone")
    plan.add_argument("--batch", type=int, default=1, help="rows (default: 1)")
    plan.add_argument("--context", type=int, metavar="TOKENS", help="of a row (default: its images' and 1024 more)")
    plan.add_argument("--dtype", help="bfloat16, float16 or float32 (default: the configuration's, or bfloat16)")
    plan.add_argument("--device", default="cuda", help="cuda (default; none is needed here), or cpu")
    plan.add_argument("--json", action="store_true", help="one JSON object, in bytes")
    plan.set_defaults(run=_plan)


def _export(options) -> int:
    from .hub_cards.export import export

    names = ("tower_only", "format", "with_projector")
    print(export(options.source, options.out, **{name: getattr(options, name) for name in names}))
    return 0


def _embed(options) -> int:
    import transformers

    from .embedding import embed

    transformers.utils.logging.disable_progress_bar()
    arguments = {name: value for name, value in vars(options).items() if name not in ("command", "run")}
    done = embed(**arguments)
    failed = f"{done.failed} could not be read (see failed.jsonl)" if done.failed else "none failed"
    print(f"{options.out}: {done.embedded} images embedded, {failed}, {done.done_before} were done before")
    return 0


def _plan(options) -> int:
    sizes = []
    for size in options.image_size:
        if not re.fullmatch(r"\d+x\d+", size):
            raise ValueError(f"--image-size has {size!r}; give width and height in pixels, such as 1024x768.")
        sizes.append(tuple(map(int, size.split("x"))))
    from .sizing import plan_memory

    names = ("gpus", "memory", "images", "batch", "context", "dtype", "device")
    plan = plan_memory(options.model, image_sizes=sizes, **{name: getattr(options, name) for name in names})
    print(json.dumps(plan.to_dict()) if options.json else plan.table())
    return int(plan.fits is False)


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
