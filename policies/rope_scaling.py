"""Rotary positions stretched, so that a model takes longer rows than it was made for (--rope_scaling).

The formulas are transformers' own (modeling_rope_utils.py), which builds a model with what `rope_parameters` says.
YaRN: https://arxiv.org/abs/2309.00071. Linear: https://arxiv.org/abs/2306.15595. llama3: as in Llama 3.1's config.json.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

from transformers import PretrainedConfig, PreTrainedModel

from policies.config_overrides import override
from utils.errors import ConfigError
from utils.positions import positions_of, rope_sets, sets_of

RopeKind = Literal["yarn", "linear", "llama3"]  # of --rope_scaling

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Llama 3.1's own: wavelengths of more than all of its first positions are divided, those below a quarter stay."""

# Layers of a window never compare tokens that are farther apart than it is wide; OLMo 3 leaves these unscaled, too.
_OF_WINDOWS = ("sliding_attention", "hybrid_sliding", "chunked_attention")
_WITH_ORIGINAL = ("yarn", "llama3")


def kind_to_give(text_config: PretrainedConfig) -> RopeKind | None:
    """The kind of scaling that would make this model's rows longer: its own if it has one; None if none would."""
    kinds = {str(own.get("rope_type", "default")) for own in _named_sets(text_config).values()}
    if kinds == {"default"}:
        return "yarn" if _is_taken(text_config, "yarn") else None
    (kind,) = kinds if len(kinds) == 1 else (None,)
    for known in ("yarn", "linear", "llama3"):
        if kind == known:
            return known
    return None


def check_can_scale(model_config: PretrainedConfig, kind: RopeKind, original: int | None = None) -> None:
    """Refuse a model whose positions cannot be stretched so.

    Raises:
        ConfigError: with the kind that can be.
    """
    text = model_config.get_text_config()
    own = {str(one.get("rope_type", "default")) for one in _named_sets(text).values()}
    if not own or positions_of(text) is None or getattr(text, "alibi", False):
        raise ConfigError(
            f"--rope_scaling: {text.model_type} models have no rotary positions that config.json scales; leave it out"
        )
    can = kind_to_give(text)
    if own == {"default"} and not _is_taken(text, kind):
        raise ConfigError(f"--rope_scaling: transformers takes no {kind} of {text.model_type} models; leave it out")
    if own != {"default"} and can is None:
        raise ConfigError(
            f"--rope_scaling: this model's rope is {' and '.join(sorted(own))} already, whose factors are not "
            "stretched here; leave it out, or take a model without"
        )
    if own != {"default"} and can != kind:
        raise ConfigError(
            f"--rope_scaling: this model's rope is scaled by {can} already, and {kind} would change the positions that "
            f"it knows; give --rope_scaling {can}, whose factor is multiplied"
        )
    if original is not None and (kind not in _WITH_ORIGINAL or own != {"default"}):
        why = f"{kind} has none" if kind not in _WITH_ORIGINAL else "this model's config.json says them"
        raise ConfigError(f"--rope_original_positions: {why}; leave it out")
    if original is not None and original > (positions_of(text) or original):
        raise ConfigError(
            f"--rope_original_positions: {original:,} is more than the {positions_of(text):,} positions in this "
            "model's config.json; give fewer, or set max_position_embeddings there if it was cut"
        )


def describe(text_config: PretrainedConfig) -> str:
    """The scaling of a config, as in "yarn x4"."""
    return describe_parameters(text_config.rope_parameters)


def describe_parameters(rope_parameters: Mapping[str, Any] | None) -> str:
    """The same, of the value that config.json has."""
    scaled = [own for own in _to_scale(sets_of(rope_parameters)).values() if own.get("factor")]
    return " and ".join(dict.fromkeys(f"{own['rope_type']} x{own['factor']:g}" for own in scaled)) or "not scaled"


def factor_for(positions: int, length: int) -> int:
    """The smallest whole factor that gives a row of `length` tokens its positions; 1 if it has them."""
    return max(1, math.ceil(length / positions))


def scaled_values(
    model_config: PretrainedConfig, kind: RopeKind, factor: float, original: int | None = None
) -> dict[str, Any]:
    """The values of config.json that give the model `factor` times its positions, nested as they stand there.

    Args:
        original: the positions that the model was made with, if config.json says another number of them.

    Raises:
        ConfigError: if its positions cannot be stretched so.
    """
    check_can_scale(model_config, kind, original)
    text = model_config.get_text_config()
    values = _values_of(text, kind, factor, original)
    return values if text is model_config else {_text_section(model_config, text): values}


def _values_of(text: PretrainedConfig, kind: RopeKind, factor: float, original: int | None = None) -> dict[str, Any]:
    """The values of `scaled_values`, of the text's own config."""
    positions = original or positions_of(text)
    assert positions is not None
    sets = {name: _scaled(own, kind, factor, positions) for name, own in _named_sets(text).items()}
    nested = set(sets) != {""}
    values: dict[str, Any] = {"rope_parameters": dict(text.rope_parameters) | sets if nested else sets[""]}
    # transformers documents it as the unscaled number under a linear factor, and servers multiply it by that. If
    # layers differ in their rope, as Gemma 3's do, servers take it as it is.
    if kind != "linear" or nested:
        values["max_position_embeddings"] = int(positions * factor)
    if kind in _WITH_ORIGINAL and hasattr(text, "original_max_position_embeddings"):  # it would win over the set's own
        values["original_max_position_embeddings"] = _original_of(next(iter(sets.values())))
    if getattr(text, "head_dim", 0) is None:  # Mixtral's, which transformers' formulas then do not derive
        values["head_dim"] = text.hidden_size // text.num_attention_heads
    return values


def _is_taken(text: PretrainedConfig, kind: RopeKind) -> bool:
    """Whether transformers takes such values: it saves and reads no Phi-3 with other scaling than its own, longrope."""
    if positions_of(text) is None:
        return False
    trial = copy.deepcopy(text)
    override(trial, _values_of(text, kind, 2.0))
    try:
        trial.validate_rope()
    except (TypeError, ValueError, KeyError):
        return False
    return True


def check_is_scaled(model: PreTrainedModel, model_name: str) -> None:
    """Refuse a model whose code does not compute its positions as its config says.

    Raises:
        ConfigError: if no module does.
    """
    wanted = {str(own.get("rope_type", "default")) for own in _named_sets(model.config.get_text_config()).values()}
    found = [module.rope_type for module in model.modules() if hasattr(module, "rope_type")]
    if not any(wanted <= set(own.values() if isinstance(own, dict) else [own]) for own in found):
        raise ConfigError(
            f"--rope_scaling: the code of {model_name} does not scale its rotary positions, whatever config.json says; "
            "leave it out, with a --context_length that the model has positions for"
        )


def _scaled(own: Mapping[str, Any], kind: RopeKind, factor: float, positions: int) -> dict[str, Any]:
    """One set of rope parameters, stretched."""
    old = _own_factor(own, positions)
    kept = {name: value for name, value in own.items() if name != "type"}  # the name of rope_type in older files
    scaled: dict[str, Any] = kept | {"rope_type": kind, "factor": float(old * factor)}
    if kind in _WITH_ORIGINAL:
        scaled.setdefault("original_max_position_embeddings", positions)
    if kind == "llama3":
        scaled = LLAMA3 | scaled
    # YaRN scales attention by a function of the factor. Some files state its value: it belongs to their own factor.
    stated = own.get("attention_factor")
    if stated is not None and math.isclose(stated, 0.1 * math.log(old) + 1, rel_tol=1e-3):
        del scaled["attention_factor"]
    return scaled


def _own_factor(own: Mapping[str, Any], positions: int) -> float:
    if own.get("rope_type", "default") == "default":
        return 1.0
    return float(own.get("factor") or positions / _original_of(own))


def _original_of(own: Mapping[str, Any]) -> int:
    return int(own["original_max_position_embeddings"])


def _named_sets(text: PretrainedConfig) -> dict[str, Mapping[str, Any]]:
    """The sets to scale by the layers' kind; of a config with one set for all layers that, by ""."""
    return _to_scale(rope_sets(text))


def _to_scale(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: own for name, own in sets.items() if name not in _OF_WINDOWS}


def _text_section(model_config: PretrainedConfig, text: PretrainedConfig) -> str:
    return next(name for name in model_config.sub_configs if getattr(model_config, name, None) is text)
