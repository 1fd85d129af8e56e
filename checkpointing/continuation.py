"""What a saved model needs to go on as its samples were built: end tokens, and the start token of a text.

Training reads neither generation_config.json nor what the tokenizer adds by itself. Servers read both.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from tokenizers import processors
from torch import nn

from data.processors.tokenizer_loading import tokenizer_of
from policies.adapters.adapted_model import base_model, has_adapter
from policies.sharding import unwrap


class Continuation(NamedTuple):
    """How samples end, and whether they begin with a start token that was added."""

    end_ids: tuple[int, ...]
    adds_start: bool


def name_end_tokens(model: nn.Module, processor: Any, continuation: Continuation) -> list[str]:
    """Add the tokens that samples end with to those at which the model's generation stops.

    Returns:
        A line, if there are new ones.
    """
    inner: Any = unwrap(model)
    is_adapter, inner = has_adapter(inner), base_model(inner)
    if not inner.can_generate():
        return []
    there = as_list(inner.generation_config.eos_token_id)
    new = [token for token in continuation.end_ids if token not in there]
    if not new:
        if not set(continuation.end_ids).issubset(as_list(getattr(inner.config, "eos_token_id", None))):
            stop_at(inner, there)  # config.json names fewer than generation_config.json
        return []
    # The first is taken for the only one by tools that know one, so tokens that no sample ends with come last.
    used = [token for token in there if token in continuation.end_ids]
    stop_at(inner, [*used, *new, *(token for token in there if token not in used)])
    names = " and ".join(map(str, tokenizer_of(processor).convert_ids_to_tokens(new)))
    remedy = "give servers adapter/generation_config.json, or merge the adapter" if is_adapter else "the saved one does"
    return [f"answers end with {names}, which the model's generation_config.json does not name; {remedy}"]


def stop_at(model: Any, end_ids: Sequence[int]) -> None:
    """Let generation stop at these tokens, by generation_config.json and by config.json where it takes a list."""
    model.generation_config.eos_token_id = list(end_ids) if len(end_ids) > 1 else end_ids[0]
    if getattr(model.config, "is_encoder_decoder", False) or model.config.get_text_config() is not model.config:
        return
    try:
        model.config.eos_token_id = model.generation_config.eos_token_id
    except StrictDataclassError:  # a few families take one token there
        return


def as_list(end_ids: int | list[int] | None) -> list[int]:
    return end_ids if isinstance(end_ids, list) else [end_ids] if end_ids is not None else []


def continuing(processor: Any, continuation: Continuation) -> Any:
    """The tokenizer to save: one that begins a text with the start token, as samples do, and adds nothing else.

    A server tokenizes a plain prompt as its tokenizer says. Chat templates bring their own start token.
    """
    if not continuation.adds_start or not processor.is_fast or processor.bos_token_id is None:
        return processor
    plain = processor("a", add_special_tokens=False)["input_ids"]
    if processor("a")["input_ids"] == [processor.bos_token_id, *plain]:
        return processor
    saved, start = copy.deepcopy(processor), processor.bos_token
    backend = saved.backend_tokenizer
    adds_start = processors.TemplateProcessing(
        single=[start, "$A"], pair=[start, "$A", f"{start}:1", "$B:1"], special_tokens=[(start, saved.bos_token_id)]
    )
    backend.post_processor = processors.Sequence([*_byte_levels(backend), adds_start])
    return saved


def _byte_levels(backend: Any) -> list[processors.ByteLevel]:
    """The post-processors that place offsets, and add no token."""
    found = json.loads(backend.to_str())["post_processor"] or {}
    kept = [part for part in found.get("processors", [found]) if part.get("type") == "ByteLevel"]
    return [processors.ByteLevel(**{key: value for key, value in part.items() if key != "type"}) for part in kept]
