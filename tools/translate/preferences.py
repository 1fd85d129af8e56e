"""Training on pairs of answers: which loss other tools' names mean, and what they count per text and we per pair."""

from __future__ import annotations

from chat.preference import REJECTED
from configs.preference import PREFERENCE_LOSSES
from tools.translate.translation import Rule, Translation

_LOSSES = {"dpo": "dpo", "sigmoid": "dpo", "simpo": "simpo", "orpo": "orpo"}
PAIRS = "preference_dataset"


def set_loss(translation: Translation, key: str, name: str) -> None:
    """Set --loss_type by another tool's name of it.

    Raises:
        ConfigError: if there is no such loss here, as of KTO and IPO.
    """
    if name not in _LOSSES:
        translation.refuse(key, f"{name} is no loss here; of pairs of answers there are {', '.join(PREFERENCE_LOSSES)}")
    translation.set(key, "loss_type", _LOSSES[name])


def length_of_text(translation: Translation, key: str, prefers: bool) -> None:
    """A length of the longest text. A row here holds both texts of a pair."""
    number = translation.number(key)
    if prefers and number is not None:
        translation.set(key, "context_length", f"{2 * number:.0f}")
        translation.notes.append(
            f"{key}: it is of one text, and --context_length of both texts of a pair, twice as much"
        )
    else:
        translation.set(key, "context_length", f"{number or 0:.0f}")


def weight_of(loss_type: str | None) -> str:
    """The setting that other tools' one `beta` of all losses is."""
    return "orpo_weight" if loss_type == "orpo" else "beta"


def check_columns(translation: Translation, key: str, chosen: str, rejected: str) -> None:
    """Refuse names of columns that the preference_dataset does not find by itself."""
    if REJECTED.get(chosen) != rejected:
        translation.refuse(
            key, f"columns {chosen} and {rejected}: pairs are read from chosen and rejected; rename them in the data"
        )


def extra_loss(name: str) -> Rule:
    """A weight of another loss that is added."""

    def rule(translation: Translation, key: str) -> None:
        if translation.number(key):
            translation.missing(key, f"{name} is not added to the loss of a pair (--loss_type)")
        else:
            translation.needless(key, "it is off, and so it is here")

    return rule
