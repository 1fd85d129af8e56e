"""One turn of a conversation, from the forms in which data holds it to the one that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from chat.images import IMAGE, RowImages, is_image_part
from chat.images import PART_KEYS as IMAGE_KEYS
from chat.lists_of_dicts import listed
from chat.turn_keys import (
    DETAILS,
    IMAGES_OF_TURN,
    MEDIA_KEYS,
    PART_KEYS,
    TEXT_KEYS,
    THOUGHTS,
    WEIGHTS,
    refuse_lost_meaning,
    with_known_names,
)
from chat.turn_parts import NOTHING, Parts, TurnPlaces, is_learned, parts_of, places_not_learned
from data.files.json_values import parse_json
from data.splits.optional_columns import MEDIA
from data.tokens.spans import BadExample

Message = dict[str, Any]

# Names of roles, in lower case, as the roles that templates know. A function_call turn is the assistant's.
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatgpt", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", None)
_ARGUMENTS = ("arguments", "parameters", "input")
_HIDDEN_THOUGHTS = ("reasoning.encrypted", "redacted_thinking")  # which only their author can read
_CALL_PARTS = ("tool_call", "tool_use", "function_call")


class Turn(NamedTuple):
    """A turn, and whether its data says that it is learned; None if it says nothing."""

    message: Message
    is_learned: bool | None
    not_learned: TurnPlaces = NOTHING  # though the turn is
    unread_keys: frozenset[str] = frozenset()  # of its parts and calls; those of the turn itself stay in the message


class _Content(NamedTuple):
    """The text of a content, or of thoughts that are a list of parts."""

    text: str | None  # None if there is none
    calls: list[Any]
    text_parts: Parts
    thoughts: Parts


def read_turn(
    turn: Any, names: Mapping[str, str], *, drop_nulls: bool = False, images: RowImages | None = None
) -> Turn:
    """A turn as templates take it: `role`, `content` (text), `tool_calls`, `reasoning_content`, and what else it has.

    Args:
        turn: a dict with `role` and `content`, or ShareGPT's `from` and `value`.
        names: roles by the names that the data has for them, besides the usual ones.
        drop_nulls: inside the arguments of calls, too, where Arrow puts them for the keys of other calls.
        images: of the row, to which those of the turn are added; None: a turn with images is refused.

    Raises:
        BadExample: if it is none, or holds what a template would not print.
    """
    if not isinstance(turn, Mapping):
        raise BadExample(f"it is not a dict with role and content but {type(turn).__name__}")
    message = with_known_names({key: value for key, value in turn.items() if value is not None})
    unread: set[str] = set()
    role = _role(message, names)
    if message.keys() == {"content"} and isinstance(message["content"], str) and role != "function_call":
        text = images.in_text(message["content"]) if images is not None else message["content"]
        return Turn({"role": role, "content": text}, None)  # most turns; the rest would take as long again
    own_images = _images_of_turn(message, images)
    weights = {is_learned(key, message.pop(key)) for key in WEIGHTS if key in message}
    if len(weights) > 1:
        raise BadExample("its weights differ; leave one of them out")
    details = [(key, message.pop(key)) for key in DETAILS if message.get(key)]
    content = _only_one(message, ("content", "value"))
    thoughts = _read_thoughts(message, unread)
    calls = listed(_parse(message.pop("tool_calls", None) or [], "tool_calls"))
    if not isinstance(calls, list):
        raise BadExample("its tool_calls are not a list")
    if function := message.pop("function_call", None):  # OpenAI's older form of one call
        if calls:
            raise BadExample("it has both tool_calls and function_call; leave one of them out")
        calls = [function]
    if role == "function_call" and (content or not calls):
        calls, content = [*calls, *_calls_in_text(content)], ""
    if role == "tool" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if own_images is not None and images is not None:
        content = images.of_turn(own_images, content if isinstance(content, str) else "")
        said = _Content(content, [], [(content, None)], [])
    else:
        said = _read_parts(content, unread, images)
    calls, all_thoughts = [*calls, *said.calls], [*thoughts, *said.thoughts]
    if said.text is None and not calls and not all_thoughts:
        raise BadExample("it has no text in content")
    if all_thoughts:  # templates call them by either name
        text = "".join(part for part, _ in all_thoughts)
        message |= dict.fromkeys(("reasoning_content", "thinking"), text)
    if calls:
        message["tool_calls"] = [_read_call(call, unread, drop_nulls=drop_nulls) for call in calls]
    role = "assistant" if role == "function_call" else role
    if details and any(learned is not None for _, learned in said.text_parts):
        raise BadExample(f"its {details[0][0]} and its parts both say what is learned; leave one of them out")
    text_parts = parts_of(said.text or "", *details[0]) if details else said.text_parts
    parts = [*text_parts, *all_thoughts]
    if role != "assistant" and (True in weights or any(learned for _, learned in parts)):
        raise BadExample("it is to be learned, and only the assistant's turns are; leave its weight out, or give 0")
    learns = next(iter(weights), None)
    said_of_parts = {learned for text, learned in parts if text.strip()}
    if said_of_parts == {False} and not calls:
        learns = False
    not_learned = TurnPlaces(places_not_learned(text_parts), places_not_learned(all_thoughts))
    return Turn({"role": role, "content": said.text or "", **message}, learns, not_learned, frozenset(unread))


def role_of(turn: Any, names: Mapping[str, str]) -> str | None:
    """The role of a turn as it stands in the data; None if it is unknown."""
    speaker = (turn.get("role") or turn.get("from")) if isinstance(turn, Mapping) else None
    return (names.get(speaker) or ROLES.get(speaker.lower())) if isinstance(speaker, str) else None


def says_nothing(message: Message) -> bool:
    """Whether a turn has no text, no call and no thoughts."""
    return not (
        message["content"].replace(IMAGE, "").strip()
        or message.get("tool_calls")
        or message.get("reasoning_content", "").strip()
    )


def without_nulls(value: Any, but: Collection[str] = ()) -> Any:
    """The value without keys that are null: Arrow gives each dict of a column the keys of all of them.

    Raises:
        BadExample: if it is nested too deeply.
    """
    try:
        return _without_nulls(value, but)
    except RecursionError as error:
        raise BadExample("it holds a value that is nested too deeply") from error


def _without_nulls(value: Any, but: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item, but) for key, item in value.items() if item is not None or key in but}
    return [_without_nulls(item, but) for item in value] if isinstance(value, list) else value


def _role(message: Message, names: Mapping[str, str]) -> str:
    speaker = _only_one(message, ("role", "from"))
    if not isinstance(speaker, str):
        raise BadExample("it has no role")
    role = names.get(speaker) or ROLES.get(speaker.lower())
    if role is None:
        raise BadExample(
            f"its role {speaker!r} is unknown; name it with --chat_dataset.roles {speaker}=user (or =assistant, "
            f"=system, =tool; {speaker}={speaker} if the chat template knows it)"
        )
    return role


def _only_one(message: Message, keys: Collection[str]) -> Any:
    """The value under the first of these keys that is there, taken out."""
    found = {key: message.pop(key) for key in keys if key in message}
    first = next(iter(found.values()), None)
    if any(value != first for value in found.values()):
        raise BadExample(f"its {' and '.join(found)} differ; leave one of them out")
    return first


def _read_thoughts(message: Message, unread: set[str]) -> Parts:
    """The thoughts under any of their names, which are taken out of the message."""
    found = {key: _thoughts_in(message.pop(key), unread) for key in THOUGHTS if key in message}
    said = {key: parts for key, parts in found.items() if any(text.strip() for text, _ in parts)}
    if len({"".join(text for text, _ in parts) for parts in said.values()}) > 1:
        raise BadExample(f"its {' and '.join(said)} differ; leave one of them out")
    return next(iter(said.values() or found.values()), [])


def _thoughts_in(thoughts: Any, unread: set[str]) -> Parts:
    thoughts = listed(thoughts)
    if isinstance(thoughts, list):
        said = _read_parts(thoughts, unread)
        if said.calls or (said.text_parts and said.thoughts):
            raise BadExample("its thoughts hold parts of several kinds; give parts of text alone")
        return said.text_parts or said.thoughts
    if thoughts and not isinstance(thoughts, str):
        raise BadExample(f"its thoughts are neither text nor a list of parts but {type(thoughts).__name__}")
    return [(thoughts, None)] if thoughts else []


def _images_of_turn(message: Message, images: RowImages | None) -> Any:
    """The images that a turn has next to its content, taken out; None if there are none.

    Raises:
        BadExample: if it has other media, or no one reads images.
    """
    found = {key: message.pop(key) for key in MEDIA_KEYS if message.get(key)}
    for key in found:
        if images is None or key not in IMAGES_OF_TURN or len(found) > 1:
            raise BadExample(f"its {key} would be lost{' by a run on text alone' if images is None else ''}")
    return next(iter(found.values()), None)


def _read_parts(content: Any, unread: set[str], images: RowImages | None = None) -> _Content:
    content = listed(content)
    if isinstance(content, str) and images is not None:
        content = images.in_text(content)
    if content is None or isinstance(content, str):
        return _Content(content, [], [(content, None)] if content else [], [])
    if not isinstance(content, list):
        raise BadExample(f"its content is neither text nor a list of parts but {type(content).__name__}")
    texts, thoughts, calls = Parts(), Parts(), list[Any]()
    for part in content:
        if isinstance(part, str):
            texts.append((images.in_text(part) if images is not None else part, None))
            continue
        if not isinstance(part, Mapping):
            raise BadExample(f"a part of its content is neither text nor a dict but {type(part).__name__}")
        part = {key: value for key, value in part.items() if value is not None}
        part, kind = with_known_names(part), part.get("type")
        if images is not None and is_image_part(part):
            texts.append((images.of_part(part), None))
            unread |= {f"{key} (part)" for key in part.keys() - PART_KEYS - IMAGE_KEYS}
            continue
        weights = {is_learned(key, part[key]) for key in WEIGHTS if key in part}
        if len(weights) > 1:
            raise BadExample("the weights of a part of its content differ; leave one of them out")
        learned = next(iter(weights), None)
        if kind in _CALL_PARTS:
            if learned is False:
                raise BadExample("a call in its content is not to be learned; weigh the turn as a whole")
            call = {key: value for key, value in part.items() if key not in WEIGHTS}
            calls += _calls_in_text(part["value"]) if isinstance(part.get("value"), str) else [call]
            continue
        if kind in _HIDDEN_THOUGHTS:
            unread.add(f"{kind} (part)")
            continue
        _note_unread_of_part(part, unread)
        if kind in THOUGHTS or str(kind).startswith("reasoning.") or part.get("thought") is True:
            thoughts.append((_text_of_part(part, (*THOUGHTS, *TEXT_KEYS, "summary")), learned))
        elif kind in _TEXT_PARTS:
            text = _text_of_part(part, (*TEXT_KEYS, "refusal"))
            texts.append((images.in_text(text) if images is not None else text, learned))
        elif any(medium in str(kind) for medium in MEDIA):
            read = "text alone" if images is None else "text and images alone"
            raise BadExample(f"a part of its content is of type {kind}, and this run reads {read}")
        else:
            raise BadExample(f"a part of its content is of type {kind!r}, which is unknown; write it as text")
    return _Content("".join(text for text, _ in texts), calls, texts, thoughts)


def _note_unread_of_part(part: Mapping[str, Any], unread: set[str]) -> None:
    """Note the keys of a part that no one reads.

    Raises:
        BadExample: if one seems to say whether the part is learned.
    """
    for key in part.keys() - PART_KEYS:
        if part[key] not in ("", [], {}):
            unread |= {f"{key} (part)"} if refuse_lost_meaning(key, part[key]) else set()


def _text_of_part(part: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    text = next((part[key] for key in keys if isinstance(part.get(key), str)), None)
    if text is None:
        raise BadExample(f"a part of its content has no text: {', '.join(part)}")
    return text


def _calls_in_text(text: Any) -> list[Any]:
    """ShareGPT's call turn: the JSON of a call's name and arguments, or of a list of them."""
    try:
        calls = parse_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise BadExample(
            f"it is a call that is no JSON ({error}); write it as JSON with name and arguments, or learn it as text "
            "with --chat_dataset.roles function_call=assistant"
        ) from error
    return calls if isinstance(calls, list) else [calls]


def _read_call(call: Any, unread: set[str], *, drop_nulls: bool) -> dict[str, Any]:
    """A call as templates take it: its arguments are a dict."""
    is_text = isinstance(call, str)
    call = _parse(call, "call")
    function = call.get("function") if isinstance(call, Mapping) else None
    function = _parse(function, "call") if isinstance(function, str) and function.strip()[:1] == "{" else function
    said = function if isinstance(function, Mapping) else call
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        raise BadExample("it has a call without a name")
    given: dict[str, Any] = {key: _parse(said[key], "arguments") for key in _ARGUMENTS if said.get(key) is not None}
    arguments: Any = next(iter(given.values()), {}) or {}
    if any((other or {}) != arguments for other in given.values()):
        raise BadExample(f"{' and '.join(given)} of its call of {said['name']} differ; leave one of them out")
    if not isinstance(arguments, Mapping):
        raise BadExample(f"the arguments of its call of {said['name']} are not a JSON object; write them as one")
    whole = call if said is not call else {key: call[key] for key in ("id",) if key in call}
    more = {key: value for key, value in whole.items() if value is not None and key not in ("function", "type")}
    for key in said.keys() - {"name", "type", "function", "id", *_ARGUMENTS}:
        if said[key] not in (None, "", [], {}):
            unread |= {f"tool_calls.{key} (assistant)"} if refuse_lost_meaning(key, said[key]) else set()
    is_text = is_text or isinstance(call.get("function"), str) or any(isinstance(said[key], str) for key in given)
    arguments = without_nulls(arguments) if drop_nulls and not is_text else dict(arguments)
    return {"type": "function", **more, "function": {"name": said["name"], "arguments": arguments}}


def _parse(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else {}
    except ValueError as error:
        raise BadExample(f"its {what} {value[:40]!r} are no JSON ({error}); mend them") from error
