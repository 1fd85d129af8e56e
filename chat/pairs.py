"""Two answers to one prompt, of which one is preferred: rows of `chosen` and `rejected`, as turns or as texts.

The forms are those of TRL (prompts apart, or as what both answers begin with) and of LLaMA-Factory, Axolotl and OpenAI
(`chat.preference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from chat.conversation import ChatSettings, Conversation, read_conversation
from chat.preference import LABELS, REJECTED, unfolded
from chat.samples import chat_samples
from data.tokens.spans import BadExample, ChatSamples, TextSpan
from data.tokens.special_text import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from chat.template import ChatTemplate


def pair_of_turns(
    example: Mapping[str, Any], config: ChatSettings, template: ChatTemplate, nested_columns: frozenset[str]
) -> ChatSamples:
    """The chosen and the rejected conversation of a row, each as one sample. Both learn nothing if they are the same.

    Raises:
        BadExample: if the row has no two answers, if their prompts differ, or if one cannot be used.
    """
    chosen_column, rejected_column = _columns(example)
    texts = example[chosen_column], example[rejected_column]
    conversations = [
        read_conversation(
            {**example, chosen_column: one, rejected_column: other},
            config,
            chat_template=template.tokenizer.chat_template,
            nested_columns=nested_columns,
        )
        for one, other in (texts, texts[::-1])
    ]
    _check_prompts(*conversations)
    samples = [chat_samples(conversation, template) for conversation in conversations]
    for side, found in zip((chosen_column, rejected_column), samples, strict=True):
        if len(found.spans) != 1:
            raise BadExample(
                f"its {side} turns make {len(found.spans)} samples, since the chat template rewrites earlier ones, and "
                f"an answer is one; {template.mark_it}, or give rows whose answers are one turn"
            )
    return ChatSamples(
        [found.spans[0] for found in samples],
        samples[0].way,
        sum(found.num_empty_answers for found in samples),
        tuple(sorted({key for found in samples for key in found.unread_keys})),
    )


def pair_of_texts(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    special: SpecialTokens | None,
    *,
    learns_empty_answers: bool = False,
) -> ChatSamples:
    """Both texts of a row as they are, between the tokenizer's start and end tokens.

    Without a prompt of its own, the prompt is what both texts begin with, without a space at its end, as in TRL.

    Args:
        special: tokens that stay text where the row spells them; None: they are tokens there, too.

    Raises:
        BadExample: if the row has no two texts.
    """
    columns = _columns(example)
    chosen, rejected = (_text(example, column) for column in columns)
    is_tie = chosen == rejected
    if example.get("prompt") is None:
        prompt = _shared_start(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = _text(example, "prompt")
    start, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
    as_text = special.as_text if special is not None else str
    empty = [not learns_empty_answers and not answer.strip() for answer in (chosen, rejected)]
    spans = [
        [
            TextSpan(start + as_text(prompt), False),
            TextSpan(as_text(answer), learned := not is_tie and not is_empty),
            TextSpan(end, learned),
        ]
        for answer, is_empty in zip((chosen, rejected), empty, strict=True)
    ]
    return ChatSamples(spans, None, sum(empty))


def _columns(example: Mapping[str, Any]) -> tuple[str, str]:
    """The columns of the chosen and the rejected answer.

    Raises:
        BadExample: if one is missing.
    """
    example = unfolded(example)
    chosen = next((name for name in REJECTED if example.get(name) is not None), None)
    if chosen is None and (labels := [name for name in LABELS if example.get(name) is not None]):
        raise BadExample(
            f"its one answer is labelled ({', '.join(labels)}), as for KTO, which is not here; give rows of chosen and "
            "rejected answers, or learn the good ones with --dataset chat_dataset --chat_dataset.preference chosen"
        )
    if chosen is None or example.get(REJECTED[chosen]) is None:
        missing = REJECTED[chosen] if chosen else " or ".join(REJECTED)
        raise BadExample(f"it has no {missing}; a pair has a chosen and a rejected answer")
    return chosen, REJECTED[chosen]


def _check_prompts(chosen: Conversation, rejected: Conversation) -> None:
    """Refuse answers to different prompts.

    Raises:
        BadExample: naming the turn.
    """
    if not (any(chosen.has_loss) and any(rejected.has_loss)):
        return  # they are the same, or one is empty: nothing is learned
    prompts = [conversation.messages[: conversation.has_loss.index(True)] for conversation in (chosen, rejected)]
    if prompts[0] != prompts[1]:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
        raise BadExample(
            f"its answers have different prompts, from turn {1 + sum(1 for _ in same)} on; answers are compared that "
            "follow the same turns"
        )


def _text(example: Mapping[str, Any], column: str) -> str:
    value = example[column]
    if not isinstance(value, str):
        raise BadExample(
            f"column {column} is not text but {type(value).__name__}; conversations are written by the chat template "
            "(leave --preference_dataset.as_chat False out)"
        )
    return value


def _shared_start(chosen: str, rejected: str) -> str:
    """What both texts begin with, without a space at its end."""
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    start = chosen[:num_same]
    return start[:-1] if start.endswith(" ") else start
