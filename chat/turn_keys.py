"""Which keys of a turn are read, under which names, and which would change what is learned if no one read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from data.tokens.spans import BadExample

# Keys that say whether a turn is learned: OpenAI's, Axolotl's, LLaMA-Factory's, ms-swift's. The details are Axolotl's.
WEIGHTS = ("weight", "train", "training", "loss_weight", "loss", "trainable", "loss_mask", "loss_scale", "learn")
DETAILS = ("train_detail", "training_detail")
THOUGHTS = (
    *("reasoning_content", "thinking", "reasoning", "thought", "thoughts", "thinking_content", "reasoning_text"),
    *("thinking_blocks", "reasoning_details"),
)
MEDIA_KEYS = ("images", "audios", "videos", "image", "audio", "video", "image_url", "input_audio")
IMAGES_OF_TURN = ("images", "image", "image_url")  # of those, what a model of image and text takes
TEXT_KEYS = ("text", "value", "content")
_KNOWN = frozenset(
    (
        *("role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id"),
        *(*WEIGHTS, *DETAILS, *THOUGHTS, *MEDIA_KEYS),
    )
)
PART_KEYS = frozenset(("type", *TEXT_KEYS, "refusal", "summary", *THOUGHTS, *WEIGHTS))

# Of the assistant's turns: the values that change nothing, and the remedy for all others.
_CHANGES_MEANING: Mapping[str, tuple[Collection[Any], str]] = {
    "channel": (("final",), "give thoughts as reasoning_content of the turn that answers, and calls as tool_calls"),
    "recipient": (("all", "user"), "give calls as tool_calls"),
    "prefix": ((False,), "give the whole answer, or weigh the turn 0"),
    "partial": ((False,), "give the whole answer, or weigh the turn 0"),
    "end_turn": ((True,), "give the whole answer, or weigh the turn 0"),
}
_ABOUT_LEARNING = frozenset(
    (
        *("loss", "mask", "masked", "train", "trained", "trainable", "training", "learn", "learned", "learnable"),
        *("weight", "weights", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "supervised", "backprop"),
    )
)
_ABOUT_QUALITY = frozenset(("label", "labels", "chosen", "rejected", "accepted", "good", "bad"))


def words_of(key: str) -> list[str]:
    """The words of a key in lower case: `lossMask`, `Loss-Mask` and `loss_mask` have the same."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\s.-]+", "_", key.strip()).lower().split("_")


def with_known_names(message: dict[str, Any]) -> dict[str, Any]:
    """The turn with the known keys as they are usually written: `weight` for `Weight`.

    Raises:
        BadExample: if it has one in two spellings with different values.
    """
    if message.keys() <= _KNOWN:
        return message
    found: dict[str, Any] = {}
    for key, value in message.items():
        name = "_".join(words_of(key)) if isinstance(key, str) and key not in _KNOWN else key
        name = name if name in _KNOWN else key
        if name in found and found[name] != value:
            raise BadExample(f"its {name} is given twice, in two spellings; leave one of them out")
        found[name] = value
    return found


def refuse_lost_meaning(key: str, value: Any) -> bool:
    """Whether a key of an assistant's turn that no one reads says something that is lost.

    Raises:
        BadExample: if it says how or whether the turn is learned.
    """
    if key in _CHANGES_MEANING:
        harmless, remedy = _CHANGES_MEANING[key]
        if value not in harmless:
            raise BadExample(
                f"its {key} is {value!r}, which the chat template does not write, so another turn would be learned "
                f"than is meant; {remedy}"
            )
        return False
    words = _ABOUT_LEARNING.intersection(words_of(key))
    if (words and _is_flag(value)) or (_ABOUT_QUALITY.intersection(words_of(key)) and _is_boolean(value)):
        raise BadExample(
            f"its {key} seems to say whether it is learned, and is not read; give weight 1 to learn it, or 0, and "
            f"leave {key} out"
        )
    return True


def _is_flag(value: Any) -> bool:
    """Whether a value can say yes or no: a boolean, a number, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_flag, value))
    return _is_boolean(value) or isinstance(value, int | float) or value in ("0", "1")


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"))
