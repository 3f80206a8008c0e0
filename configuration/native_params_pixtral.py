"""Mistral's own `params.json`, read into the fields of a configuration and written back.

Field names: the public mistral-inference package and the published folders.
"""

import json
from pathlib import Path
from typing import Any

# params.json name -> configuration name
_TEXT = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_VISION = {
    "hidden_size": "hidden_size",
    "num_channels": "num_channels",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
}
_UNREADABLE = {
    "quantization": "its weights are quantised; take the folder in bfloat16",
    "moe": "it has expert layers, which no Pixtral has",
    "lora": "it is an adapter; merge it into its base first",
}


def is_native_folder(folder) -> bool:
    """Whether `folder` holds a `params.json` and no `config.json`."""
    folder = Path(folder)
    return (folder / "params.json").is_file() and not (folder / "config.json").is_file()


def read_params(folder) -> str:
    """The text of the `params.json` in a native folder."""
    return (Path(folder) / "params.json").read_text(encoding="utf-8")


def config_fields(params_text: str) -> dict[str, Any]:
    """Fields of a configuration from the text of a `params.json`; `model_type` and `native_params` are among them.

    Raises:
        ValueError: a field that is needed is missing, or the checkpoint is of a kind that cannot be read.
    """
    params, where = json.loads(params_text), "params.json"
    for name, reason in _UNREADABLE.items():
        if params.get(name):
            raise ValueError(f"{where} has {name!r}: {reason}.")
    for name in ("vision_encoder", *_TEXT):
        if params.get(name) is None:
            raise ValueError(f"{where} has no {name!r}; is it the folder of a Pixtral checkpoint?")
    vision = params["vision_encoder"]
    for name in _VISION:
        if name not in ("num_channels",) and vision.get(name) is None:
            raise ValueError(f'{where} has no "vision_encoder.{name}".')

    merger = vision.get("mm_projector_id", "") == "patch_merge"
    norm = bool(vision.get("add_pre_mm_projector_layer_norm", False))
    tied = bool(params.get("tied_embeddings", False))
    return {
        "model_type": {(True, True): "mistral3", (False, False): "llava"}.get((norm, merger), "pixtral_mixed"),
        "architectures": ["PixtralForConditionalGeneration"],
        "projector_norm": norm,
        "projector_merger": merger,
        "spatial_merge_size": vision.get("spatial_merge_size", 1) if merger else 1,
        "multimodal_projector_bias": vision.get("adapter_bias", True),
        "image_token_index": vision.get("image_token_id", 10),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": tied,
        "vision_config": _vision_fields(vision),
        "text_config": _text_fields(params) | {"tie_word_embeddings": tied},
        "native_params": params_text,
    }


def _vision_fields(vision: dict[str, Any]) -> dict[str, Any]:
    fields = {ours: vision[name] for name, ours in _VISION.items() if name in vision}
    rope = {"rope_type": "axial", "rope_theta": float(vision.get("rope_theta", 10_000.0))}
    # Mistral's feed-forward is w2(silu(w1 x) * w3 x) in tower and text; the file does not say so.
    return fields | {"model_type": "pixtral", "hidden_act": "silu", "rope_parameters": rope}


def _text_fields(params: dict[str, Any]) -> dict[str, Any]:
    fields = {ours: params[name] for name, ours in _TEXT.items()}
    fields |= {"hidden_act": "silu", "sliding_window": params.get("sliding_window")}
    length = params.get("max_position_embeddings") or params.get("max_seq_len")
    if length:
        fields["max_position_embeddings"] = length
    theta, yarn = float(params.get("rope_theta", 10_000.0)), params.get("yarn")
    if not yarn:
        return fields | {"model_type": "mistral", "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(yarn["factor"]),
        "original_max_position_embeddings": yarn["original_max_position_embeddings"],
        "beta_fast": float(yarn.get("beta", 32)),
        "beta_slow": float(yarn.get("alpha", 1)),
        "llama_4_scaling_beta": float((params.get("llama_4_scaling") or {}).get("beta", 0.0)),
    }
    if not yarn.get("apply_scale", True):
        # The two cancel: attention keeps its scale.
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return fields | {"model_type": "ministral3", "rope_parameters": rope}


def params_from_config(config) -> str:
    """Text of the `params.json` of a [`PixtralConfig`]: the one it was read from, while that describes the model.

    Where it no longer does, fields that are not understood here stay.

    Raises:
        ValueError: the native layout has no field for something in this configuration.
    """
    described, kept = _described(config), {}
    if config.native_params is not None:
        if _described(type(config).from_dict(config_fields(config.native_params))) == described:
            return config.native_params
        kept = json.loads(config.native_params)
    encoder = kept.get("vision_encoder", {}) | described["vision_encoder"]
    return json.dumps(kept | described | {"vision_encoder": encoder}, indent=4)


def _described(config) -> dict[str, Any]:
    text, vision = config.text_config, config.vision_config
    _check_expressible(config)
    rope = text.rope_parameters
    params = {name: getattr(text, ours) for name, ours in _TEXT.items()}
    params |= {"rope_theta": rope["rope_theta"], "max_position_embeddings": text.max_position_embeddings}
    params["tied_embeddings"] = config.tie_word_embeddings
    if text.sliding_window is not None:
        params["sliding_window"] = text.sliding_window
    if rope["rope_type"] == "yarn":
        params["yarn"] = {
            "factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope.get("beta_fast", 32.0),
            "alpha": rope.get("beta_slow", 1.0),
            "apply_scale": rope.get("mscale") is None,
        }
    if rope.get("llama_4_scaling_beta"):
        params["llama_4_scaling"] = {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
    encoder = {name: getattr(vision, ours) for name, ours in _VISION.items()}
    encoder |= {
        "rope_theta": vision.rope_parameters["rope_theta"],
        "image_token_id": config.image_token_id,
        "adapter_bias": config.multimodal_projector_bias,
        "max_image_size": vision.image_size,
        "spatial_merge_size": config.spatial_merge_size,
        "mm_projector_id": "patch_merge" if config.projector_merger else "",
        "add_pre_mm_projector_layer_norm": config.projector_norm,
    }
    return params | {"vision_encoder": encoder}


def _check_expressible(config) -> None:
    text, vision = config.text_config, config.vision_config
    rope_type = text.rope_parameters.get("rope_type", "default")
    expected = {
        "text_config.model_type": (text.model_type, ("mistral", "ministral3")),
        "text_config.rope_parameters.rope_type": (rope_type, ("default", "yarn")),
        "text_config.hidden_act": (text.hidden_act, ("silu",)),
        "vision_config.hidden_act": (vision.hidden_act, ("silu",)),
        "projector_hidden_act": (config.projector_hidden_act, ("gelu",)),
        "vision_feature_layer": (
            [vision.state_index(layer) for layer in config.feature_layers],
            ([vision.num_hidden_layers],),
        ),
    }
    for name, (value, accepted) in expected.items():
        if value not in accepted:
            raise ValueError(
                f"{name} is {value!r}; Mistral's own layout has no field for it and means {' or '.join(map(str, accepted))}."
            )
