"""Rules for scaled rotary positions."""

from __future__ import annotations

from configs.other_values import NOT_HERE
from tools.translate.source import below
from tools.translate.translation import Translation

_KINDS = ("yarn", "linear", "llama3")
_NOT_HERE = NOT_HERE["rope_scaling"]


def kind(translation: Translation, key: str) -> None:
    """`yarn`, `linear` or `llama3`; the factor follows from the longest row, as here."""
    text = (translation.text(key) or "").lower()
    if text in _KINDS:
        translation.set(key, "rope_scaling", text)
    else:
        translation.missing(key, _NOT_HERE.get(text, f"{text} is no scaling here; {', '.join(_KINDS)} are"))


def group(translation: Translation, key: str) -> None:
    """A mapping as in config.json: `rope_type` (or `type`), `factor`, `original_max_position_embeddings`."""
    values = translation.mapping(key)
    name = next((name for name in ("rope_type", "type") if values.get(name)), "")
    of_kind = below(key, name)
    text = (translation.text(of_kind) or "").lower() if name else ""
    if text not in _KINDS:
        translation.missing(key, _NOT_HERE.get(text, "it names no scaling that is known here"))
        return
    kind(translation, of_kind)
    if values.get("factor") is not None:
        translation.set(below(key, "factor"), "rope_factor", translation.text(below(key, "factor")) or "")
        translation.notes.append(
            f"{below(key, 'factor')}: --rope_factor multiplies the factor that the model's config.json may have"
        )
    original = below(key, "original_max_position_embeddings")
    if values.get("original_max_position_embeddings") is not None:
        if text == "linear":
            translation.needless(original, "a linear factor needs none")
        else:
            translation.set(original, "rope_original_positions", translation.text(original) or "")
    for other in values.keys() - {name, "factor", "original_max_position_embeddings"}:
        translation.missing(below(key, other), "it is as in transformers, or as the model's config.json says")
