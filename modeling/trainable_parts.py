"""Which parts of a vision-language model learn, how, and how fast: tower, projector and text, from one table.

LoRA (Hu et al., 2021) is PEFT's, which is imported only where a part uses it. No model file needs this one.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

PARTS = ("tower", "projector", "text")
# What each way of training reads of a part's fields.
_READ = {
    "full": {"learning_rate", "last_layers"},
    "lora": {"learning_rate", "last_layers", "rank", "alpha", "dropout"},
    "frozen": set(),
}


class _Place(NamedTuple):
    """Where a part stands in a model.

    `members`: its modules and the parameters that no module of it has; `layers`: the list of its layers; `behind`: its
    modules after the last layer, but for the language head; `lora_targets`: as the README documents them.
    """

    members: tuple[str, ...]
    lora_targets: str
    layers: str | None = None
    behind: tuple[str, ...] = ()


_PLACES = {
    "lfm3_vl": {
        "tower": _Place(
            ("model.vision_tower",),
            r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj|in_proj)",
            "model.vision_tower.layers",
        ),
        "projector": _Place(("model.multi_modal_projector",), r".*multi_modal_projector\.linear_[12]"),
        "text": _Place(
            ("model.language_model", "lm_head"),
            r".*language_model.*\.[qkv]_proj",
            "model.language_model.layers",
            ("model.language_model.embedding_norm",),
        ),
    },
    "pixtral": {
        "tower": _Place(
            ("model.vision_tower",), r".*vision_tower.*\.[qkvo]_proj", "model.vision_tower.transformer.layers"
        ),
        "projector": _Place(
            ("model.multi_modal_projector",), r".*multi_modal_projector.*\.(linear_[12]|merging_layer)"
        ),
        "text": _Place(
            ("model.language_model", "lm_head"),
            r".*language_model.*\.[qkvo]_proj",
            "model.language_model.layers",
            ("model.language_model.norm",),
        ),
    },
    "deepseek_v4_vl": {
        "tower": _Place(
            ("model.vision_tower",),
            r".*vision_tower.*\.(wqkv|wo)",
            "model.vision_tower.blocks",
            ("model.vision_tower.norm",),
        ),
        "projector": _Place(
            ("model.aligner", *(f"model.image_{mark}" for mark in ("start", "pad", "newline", "end"))),
            r".*aligner\.w[12]",
        ),
        "text": _Place(
            ("model.language_model", "lm_head"),
            r".*self_attn\.(q_a_proj|q_b_proj|kv_proj|o_b_proj)",
            "model.language_model.layers",
            ("model.language_model.hc_head", "model.language_model.norm"),
        ),
    },
}
_FAMILIES = {
    "Lfm3VlForConditionalGeneration": "lfm3_vl",
    "PixtralForConditionalGeneration": "pixtral",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4_vl",
}
# DeepSeek-V4's indexer chooses by top-k, which passes no gradient.
_NEVER_LEARNS = re.compile(r"\.indexer\.")

LORA_TARGETS = {
    family: {name: place.lora_targets for name, place in parts.items()} for family, parts in _PLACES.items()
}
"""PEFT's `target_modules` by family and part, as regular expressions: tower and text share names of layers."""

QUANTIZATION_SKIPS = [
    "lm_head",
    *(
        f"{prefix}{part}"
        for part in ("vision_tower", "multi_modal_projector", "aligner")
        for prefix in ("", "model.")  # a name is compared from its beginning, and has a prefix under a head
    ),
]
"""What a quantizer leaves as it is, in all families: `BitsAndBytesConfig(llm_int8_skip_modules=QUANTIZATION_SKIPS)`.

DeepSeek-V4's compressors are on transformers' own list, which quantizers add by themselves.
"""


@dataclass(frozen=True)
class Part:
    """How one part of a model learns.

    Args:
        training: `"full"`, its own weights; `"lora"`, low-rank matrices beside them; `"frozen"`.
        learning_rate: in place of the run's.
        last_layers: so many of the last layers of tower or text learn; in full training with the norms behind them.
            Embeddings and language head do not.
        rank, alpha, dropout: of LoRA. `alpha` is twice the rank by default. PEFT knows one dropout for all parts.

    Raises:
        ValueError: a value out of range, or one that this way of training does not read.
    """

    training: str = "full"
    learning_rate: float | None = None
    last_layers: int | None = None
    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0

    def __post_init__(self):
        for name, right, wanted in (
            ("training", self.training in tuple(_READ), f"one of {', '.join(_READ)}"),
            (
                "learning_rate",
                self.learning_rate is None or (_is_number(self.learning_rate) and self.learning_rate > 0),
                "a number above 0; in YAML write 1.0e-4, since 1e-4 is read as text",
            ),
            ("last_layers", self.last_layers is None or _is_count(self.last_layers), "a whole number of at least 1"),
            ("rank", _is_count(self.rank), "a whole number of at least 1"),
            ("alpha", self.alpha is None or (_is_number(self.alpha) and self.alpha > 0), "a number above 0"),
            ("dropout", _is_number(self.dropout) and 0 <= self.dropout < 1, "a number from 0 to below 1"),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; give {wanted}.")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in _READ[self.training] and value != field.default:
                readers = " or ".join(repr(way) for way, names in _READ.items() if field.name in names)
                raise ValueError(
                    f"{field.name} is {value!r} and training {self.training!r}, which has no use for it; leave it out, or "
                    f"give training {readers}."
                )

    @property
    def lora_alpha(self) -> float:
        """`alpha`, or twice the rank."""
        return 2 * self.rank if self.alpha is None else self.alpha


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def prepare_parts(model: nn.Module, table: Mapping[str, Part | Mapping]) -> nn.Module:
    """Set what learns in `model`, and add the adapters.

    Args:
        model: a model with language head of one of the families, without adapters.
        table: `"tower"`, `"projector"`, `"text"` to a [`Part`] or its fields, as a YAML file gives them; a part that is
            not named is frozen. Token embeddings and language head belong to the text, DeepSeek-V4's four vectors that
            frame images to the projector.

    Returns:
        `model` itself, or a PEFT model around it where a part uses LoRA. What learns in full there is in the adapter's
        folder too, so that `PeftModel.from_pretrained(base, folder)` gives the trained model.

    Raises:
        ValueError: an unknown part or field, a value out of range, more layers than there are, quantized weights to be
            trained in full. Nothing is changed then.
    """
    parts, places = _read(table), _places(model)
    if hasattr(model, "get_base_model"):
        raise ValueError("The model has adapters already; give prepare_parts the model without them.")
    layers = {name: _learning_layers(model, name, parts[name], places[name]) for name in PARTS}
    learning = set()
    for part, name, parameter in _parameters(model):
        if parts[part].training == "full" and _learns_in_full(name, parts[part], places[part], layers[part]):
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{part} is to be trained in full, and {name} is quantized ({parameter.dtype}); train {part} by LoRA, "
                    "or load the model with it in full precision."
                )
            learning.add(parameter)
    targets = {
        name: _lora_targets(model, name, places[name], layers[name])
        for name in PARTS
        if parts[name].training == "lora"
    }
    dropouts = {name: parts[name].dropout for name in targets}
    if len(set(dropouts.values())) > 1:
        raise ValueError(f"dropout differs between the parts that use LoRA ({dropouts}); PEFT has one, give the same.")

    for parameter in model.parameters():
        parameter.requires_grad_(parameter in learning)
    return _with_adapters(model, parts, targets, learning) if targets else model


def parameter_groups(
    model: nn.Module, table: Mapping[str, Part | Mapping], learning_rate: float, weight_decay: float = 0.0
) -> list[dict]:
    """An optimizer's groups: every parameter that learns, at the learning rate of its part.

    Vectors (norms, biases) do not decay.

    Args:
        model: what [`prepare_parts`] returned.
        table: the table that it was given.
        learning_rate: of the parts that have none of their own.

    Returns:
        Groups of `params`, `lr`, `weight_decay` and, for logs, `part`.

    Raises:
        ValueError: the model was not prepared with this table.
    """
    parts = _read(table)
    groups = {}
    for part, _, parameter in _parameters(model):
        if parameter.requires_grad:
            decay = weight_decay if len(_shape(parameter)) > 1 else 0.0
            groups.setdefault((part, decay), []).append(parameter)
    learning = {part for part, _ in groups}
    for name in PARTS:
        if (parts[name].training != "frozen") != (name in learning):
            raise ValueError(
                f"training of the {name} is {parts[name].training!r} in the table, and in the model it "
                f"{'learns' if name in learning else 'does not learn'}; call prepare_parts with the same table first."
            )
    return [
        {"params": parameters, "lr": parts[part].learning_rate or learning_rate, "weight_decay": decay, "part": part}
        for (part, decay), parameters in groups.items()
    ]


def parts_summary(model: nn.Module) -> str:
    """A table to print: parameters of each part, how many and what share of them learn, and their dtypes.

    Parameters shared by tying count once, quantized ones as they are stored. Adapters count to their part; the untrained
    copies that PEFT keeps of what learns beside them do not count.
    """
    rows = {name: ([], []) for name in (*PARTS, "total")}
    for part, name, parameter in _parameters(model):
        if ".original_module." in name:
            continue
        for everything, learning in (rows[part], rows["total"]):
            everything.append(parameter)
            if parameter.requires_grad:
                learning.append(parameter)
    lines = [f"{'part':<10}{'parameters':>16}{'trainable':>16}{'share':>9}  dtype"]
    for name, (everything, learning) in rows.items():
        size, trained = (sum(math.prod(_shape(parameter)) for parameter in group) for group in (everything, learning))
        dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in everything}))
        lines.append(f"{name:<10}{size:>16,}{trained:>16,}{trained / size:>9.2%}  {dtypes}")
    return "\n".join(lines)


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Also under ZeRO-3, which empties parameters while nobody uses them."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _read(table) -> dict[str, Part]:
    if not isinstance(table, Mapping):
        raise ValueError(f"The table of parts is {table!r}; give a mapping of {', '.join(PARTS)} to their fields.")
    if unknown := [name for name in table if name not in PARTS]:
        raise ValueError(f"The table of parts names {unknown}; the parts are {', '.join(PARTS)}.")
    parts = {name: Part("frozen") for name in PARTS} | {name: _read_part(name, part) for name, part in table.items()}
    if all(part.training == "frozen" for part in parts.values()):
        raise ValueError(f"In the table of parts {dict(table)} nothing learns; give a part training 'full' or 'lora'.")
    return parts


def _read_part(name: str, part) -> Part:
    if isinstance(part, Part):
        return part
    known = [field.name for field in fields(Part)]
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} is {part!r}; give a Part, or a mapping of {', '.join(known)}.")
    if unknown := [key for key in part if key not in known]:
        raise ValueError(f"{name} has {unknown}; a part has {', '.join(known)}.")
    try:
        return Part(**part)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _places(model: nn.Module) -> dict[str, _Place]:
    for kind in type(_base(model)).__mro__:
        if kind.__name__ in _FAMILIES:
            return _PLACES[_FAMILIES[kind.__name__]]
    raise ValueError(
        f"{type(_base(model)).__name__} is not a model whose parts are known; give one of {', '.join(_FAMILIES)}."
    )


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(part, name, parameter) of all of `model`, each once; names are those without PEFT's prefix."""
    places = _places(model)
    for name, parameter in _base(model).named_parameters():
        for part, place in places.items():
            if any(name == member or name.startswith(f"{member}.") for member in place.members):
                yield part, name, parameter
                break
        else:
            raise ValueError(f"{name} belongs to no part of a {type(_base(model)).__name__}.")


def _learning_layers(model: nn.Module, name: str, part: Part, place: _Place) -> range:
    """Indices of a part's layers that may learn."""
    if place.layers is None:
        if part.last_layers is not None:
            raise ValueError(f"{name}.last_layers is {part.last_layers}, and the {name} has no layers; leave it out.")
        return range(0)
    count = len(model.get_submodule(place.layers))
    if name == "tower" and hasattr(model.config, "feature_layers"):
        # Pixtral may read an earlier layer than the last: no gradient reaches what comes after it.
        count = max(map(model.config.vision_config.state_index, model.config.feature_layers))
    if part.last_layers is not None and part.last_layers > count:
        raise ValueError(
            f"{name}.last_layers is {part.last_layers}, and {count} layers are in use; give 1 to {count}."
        )
    return range(count - (part.last_layers or count), count)


def _learns_in_full(name: str, part: Part, place: _Place, layers: range) -> bool:
    if _NEVER_LEARNS.search(name):
        return False
    if place.layers is not None and name.startswith(f"{place.layers}."):
        return int(name[len(place.layers) + 1 :].split(".")[0]) in layers
    return part.last_layers is None or name.startswith(tuple(f"{module}." for module in place.behind))


def _lora_targets(model: nn.Module, name: str, place: _Place, layers: range) -> str:
    targets = place.lora_targets
    if place.layers is not None and len(layers) < len(model.get_submodule(place.layers)):
        indices = "|".join(map(str, layers))
        targets = rf"(?={re.escape(place.layers)}\.(?:{indices})\.)(?:{targets})"
    if not any(re.fullmatch(targets, module) for module, _ in model.named_modules()):
        raise ValueError(
            f"LoRA finds none of the {name}'s modules {place.lora_targets} in layers {list(layers)}; give more last_layers."
        )
    return targets


def _with_adapters(model: nn.Module, parts: dict[str, Part], targets: dict[str, str], learning: set) -> nn.Module:
    from peft import LoraConfig

    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in learning]
    tied = _tied(model)
    copied = list(_whole_modules(model, "", learning, tied))
    inside = {parameter for name in copied for parameter in model.get_submodule(name).parameters()}
    first = parts[next(iter(targets))]
    config = LoraConfig(
        target_modules="|".join(f"(?:{pattern})" for pattern in targets.values()),
        r=first.rank,
        lora_alpha=first.lora_alpha,
        lora_dropout=first.dropout,
        rank_pattern={targets[name]: parts[name].rank for name in targets if parts[name].rank != first.rank},
        alpha_pattern={
            targets[name]: parts[name].lora_alpha for name in targets if parts[name].lora_alpha != first.lora_alpha
        },
        modules_to_save=copied or None,
        ensure_weight_tying=bool(tied & inside),
    )
    loose = [name for name in names if model.get_parameter(name) not in inside]
    adapted = _adapted_class()(model, config)
    adapted.loose = {f"base_model.model.{name}": model.get_parameter(name).detach().clone() for name in loose}
    for name in loose:
        model.get_parameter(name).requires_grad_()
    return adapted


def _tied(model: nn.Module) -> set:
    seen, tied = set(), set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if parameter in seen else seen).add(parameter)
    return tied


def _whole_modules(module: nn.Module, name: str, learning: set, tied: set) -> Iterator[str]:
    """Names of the largest modules of which all learns, and which PEFT can copy without untying what is tied."""
    parameters, children = set(module.parameters()), dict(module.named_children())
    if not parameters & learning:
        return
    if parameters <= learning and not isinstance(module, nn.ModuleList) and not (children and parameters & tied):
        yield name
        return
    for child, part in children.items():
        yield from _whole_modules(part, f"{name}.{child}" if name else child, learning, tied)


@cache
def _adapted_class() -> type:
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    class PeftModelOfParts(PeftModel):
        """PEFT copies and saves whole modules; this one minds parameters, too, whose module does not learn as a whole.

        `loose` has them by name, as they were before training. In the adapter's file they are under these names, where
        any `PeftModel.from_pretrained` finds them.
        """

        loose: dict[str, torch.Tensor] = {}

        def save_pretrained(
            self, save_directory: str | os.PathLike, safe_serialization: bool = True, **kwargs
        ) -> None:
            """As PEFT's.

            Raises:
                ValueError: `safe_serialization` is off, and there are such parameters.
            """
            if self.loose and not safe_serialization:
                raise ValueError(f"{list(self.loose)} are saved as safetensors only; leave safe_serialization on.")
            super().save_pretrained(save_directory, safe_serialization=safe_serialization, **kwargs)
            if not self.loose or not kwargs.get("is_main_process", True):
                return
            state = kwargs.get("state_dict") or self.state_dict()
            file = Path(save_directory, "adapter_model.safetensors")
            tensors = load_file(file) | {name: state[name].contiguous() for name in self.loose}
            save_file(tensors, file.with_suffix(".partial"), metadata={"format": "pt"})
            file.with_suffix(".partial").replace(file)

        @contextmanager
        def disable_adapter(self):
            """As PEFT's: inside, the model is what it was before training."""
            trained = {name: self.get_parameter(name).data for name in self.loose}
            with super().disable_adapter():
                self._put(self.loose)
                try:
                    yield
                finally:
                    self._put(trained)

        def _put(self, values: dict[str, torch.Tensor]) -> None:
            for name, value in values.items():
                parameter = self.get_parameter(name)
                # Not copied into it: a loss computed outside may still be waiting for its gradients.
                parameter.data = value.to(parameter.device)

    return PeftModelOfParts
