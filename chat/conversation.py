"""The conversation of an example: turns, tools and settings, in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chat.images import COLUMNS as IMAGE_COLUMNS
from chat.images import RowImages
from chat.lists_of_dicts import listed
from chat.preference import (
    BESIDE_PREFERENCES,
    LABELS,
    PREFERENCE_COLUMNS,
    chosen_turns,
    refuse_preferences,
    unfolded,
)
from chat.single_turns import COLUMNS as SINGLE_COLUMNS
from chat.single_turns import missing_part, with_turns
from chat.turn_parts import NOTHING, TurnPlaces
from chat.turns import Message, Turn, read_turn, role_of, says_nothing, without_nulls
from data.files.json_values import parse_json, refuse_unwritable
from data.splits.optional_columns import MEDIA_COLUMNS, refuse_media
from data.tokens.spans import BadExample

TURN_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", "completion")

_SYSTEM, _KWARGS, _MASK_HISTORY = "system", "chat_template_kwargs", "mask_history"
_FUNCTIONS = "functions"  # OpenAI's older name of the tools
_NULL_IS_A_VALUE = ("default", "const")  # in a tool's schema


class ChatSettings(Protocol):
    """The settings that conversations are read by (`ChatDataset` in datasets/chat.py)."""

    @property
    def messages_column(self) -> str | None: ...
    @property
    def tools_column(self) -> str: ...
    @property
    def preference(self) -> str | None: ...
    @property
    def learn(self) -> str: ...
    @property
    def learn_empty_answers(self) -> bool: ...
    @property
    def image_column(self) -> str | None: ...
    def role_names(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them; which of them count in the loss."""

    messages: list[Message]  # role, content (text), tool_calls, ...
    has_loss: tuple[bool, ...]  # of each message; only the assistant's may
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # of the template, besides messages and tools
    num_empty_answers: int = 0  # that have no loss because they are empty
    not_learned: dict[int, TurnPlaces] = field(default_factory=dict)  # by message: parts without a loss, if it has one
    images: tuple[Any, ...] = ()  # of the messages, in order: what names each in the data (`data.images.opening`)
    unread_keys: frozenset[str] = frozenset()  # of parts and calls: what they say is lost


def columns_to_read(config: ChatSettings, *, with_images: bool = False) -> tuple[str, ...]:
    """The columns that `read_conversation` looks for; `with_images`, if it takes images."""
    others = (config.tools_column, _FUNCTIONS, _SYSTEM, _KWARGS, _MASK_HISTORY, *MEDIA_COLUMNS)
    more = (*(BESIDE_PREFERENCES if config.preference else ()), *filter(None, [config.image_column]))
    more = (*more, *SINGLE_COLUMNS) if with_images else more
    return (*turn_columns(config), *PROMPT_COLUMNS, *PREFERENCE_COLUMNS, *others, *more)


def turn_columns(config: ChatSettings) -> tuple[str, ...]:
    """The columns that may hold the turns."""
    return (config.messages_column,) if config.messages_column else TURN_COLUMNS


def read_conversation(
    example: Mapping[str, Any],
    config: ChatSettings,
    *,
    chat_template: Any = "",
    nested_columns: frozenset[str] = frozenset(),
    needs_answer: bool = True,
    takes_images: bool = False,
) -> Conversation:
    """The conversation of a row.

    Args:
        example: the row's columns, of those that `columns_to_read` names.
        chat_template: a developer's turn stays one if the template knows the role; otherwise it is the system's.
        nested_columns: of structs, where Arrow puts nulls for the keys of other calls and tools.
        takes_images: for a model of image and text; otherwise a row with images is refused.
        needs_answer: refuse a row without a turn of the assistant's, which nothing can be learned from.

    Raises:
        BadExample: if it is no conversation, or has no turn of the assistant's and needs one.
    """
    columns = example
    example = unfolded({name: value for name, value in example.items() if value is not None})
    names = config.role_names()
    if takes_images:
        example = with_turns(example, turn_columns(config))
    prompt, turns, is_good = _find_turns(example, config, names, takes_images)
    images = RowImages.of(columns, [*prompt, *turns], config.image_column) if takes_images else None
    drop_nulls = bool(nested_columns - {config.tools_column, _FUNCTIONS})
    read = [_read_turn(number, turn, names, drop_nulls, images) for number, turn in enumerate([*prompt, *turns], 1)]
    before = _with_parallel_calls(read[: len(prompt)], prompt, names)
    read = [*before, *_with_parallel_calls(read[len(prompt) :], turns, names)]
    messages = [turn.message for turn in read]
    if "developer" not in str(chat_template):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    in_order: tuple[Any, ...] = ()
    if images is None:
        refuse_media(example, [message["content"] for message in messages])
    else:
        taken = (config.image_column,) if config.image_column else IMAGE_COLUMNS
        others = {name: value for name, value in example.items() if name not in taken}
        refuse_media(others, (), trained_on="text and images alone")
        messages, in_order = images.placed(messages)
    is_answer = [message["role"] == "assistant" for message in messages]
    if needs_answer and not any(is_answer[len(before) :]):
        raise BadExample("it has no assistant turn, so there are no label tokens")
    last = max((number for number, answers in enumerate(is_answer) if answers), default=-1)
    only_last = config.learn == "last" or _mask_history(example)
    learned = [
        answers and number >= len(before) and turn.is_learned is not False and (number == last or not only_last)
        for number, (answers, turn) in enumerate(zip(is_answer, read, strict=True))
    ]
    if not is_good:
        learned = [False] * len(messages)
    is_empty = [
        learns and not config.learn_empty_answers and says_nothing(message)
        for learns, message in zip(learned, messages, strict=True)
    ]
    has_loss = [learns and not empty for learns, empty in zip(learned, is_empty, strict=True)]
    not_learned = [turn.not_learned for turn in read]
    if (system := _system_turn(example, messages)) is not None:
        messages, has_loss, not_learned = [system, *messages], [False, *has_loss], [NOTHING, *not_learned]
    tools, template_kwargs = _read_tools(example, config, nested_columns), _read_kwargs(example)
    _check_numbers(messages, tools, template_kwargs)
    return Conversation(
        messages,
        tuple(has_loss),
        tools=tools,
        template_kwargs=template_kwargs,
        num_empty_answers=sum(is_empty),
        images=in_order,
        unread_keys=frozenset[str]().union(*(turn.unread_keys for turn in read)),
        not_learned={number: places for number, places in enumerate(not_learned) if any(places) and has_loss[number]},
    )


def _check_numbers(messages: Sequence[Message], tools: list[Any] | None, template_kwargs: dict[str, Any]) -> None:
    calls = {f"turn {number}'s tool_calls": message.get("tool_calls") for number, message in enumerate(messages, 1)}
    for name, value in (calls | {"tools": tools, _KWARGS: template_kwargs}).items():
        try:
            refuse_unwritable(value)
        except ValueError as error:
            raise BadExample(f"its {name}: {error}") from error


def _find_turns(
    example: Mapping[str, Any], config: ChatSettings, names: Mapping[str, str], takes_images: bool
) -> tuple[Sequence[Any], Sequence[Any], bool]:
    """The turns without a loss that come first, such as a prompt's; the others; whether these are good to learn."""
    column = next((name for name in turn_columns(config) if name in example), None)
    if config.preference is None:
        columns = LABELS if config.messages_column else PREFERENCE_COLUMNS  # turns that are named are meant
        refuse_preferences(
            {name: example[name] for name in columns if name in example},
            "learn the good ones with --chat_dataset.preference chosen",
        )
    completes = column is None and config.messages_column is None and not _is_text(example.get("completion", ""))
    if completes:
        prompt, turns = _read_list("prompt", example.get("prompt")), _read_list("completion", example["completion"])
    elif column is not None:
        prompt, turns = [], _read_list(column, example[column])
    elif config.preference is None:
        of_text = missing_part(example) if takes_images else ""
        if "completion" in example:
            of_text = "; its completion is text, which --dataset instruction_dataset reads"
        raise BadExample(f"it has no {' or '.join(turn_columns(config))}{of_text}")
    else:
        prompt, turns = [], []
    if config.preference is None:
        return prompt, turns, True
    before, turns, is_good = chosen_turns(
        example, turns, _read_list, lambda turn: role_of(turn, names) in ("assistant", "function_call")
    )
    return before or prompt, turns, is_good


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.lstrip().startswith("[")


def _read_list(column: str, turns: Any) -> Sequence[Any]:
    if isinstance(turns, str):
        try:
            turns = parse_json(turns)
        except ValueError as error:
            raise BadExample(
                f"column {column} needs a list of turns, or its JSON, and is other text ({error})"
            ) from error
    turns = listed(turns)
    if isinstance(turns, Mapping) and turns.keys() & {"role", "from"}:
        return [turns]
    if not isinstance(turns, Sequence) or not turns:
        raise BadExample(f"column {column} needs a list of turns, each with role and content (or from and value)")
    return turns


def _read_turn(number: int, turn: Any, names: Mapping[str, str], drop_nulls: bool, images: RowImages | None) -> Turn:
    try:
        return read_turn(turn, names, drop_nulls=drop_nulls, images=images)
    except BadExample as error:
        role = (turn.get("role") or turn.get("from")) if isinstance(turn, Mapping) else None
        raise BadExample(f"turn {number}{f' ({role})' if role else ''}: {error}") from error


def _with_parallel_calls(read: Sequence[Turn], turns: Sequence[Any], names: Mapping[str, str]) -> list[Turn]:
    """The turns, those of ShareGPT's calls that follow each other as one, since a model makes them in one turn.

    One by one, the first would be learned to end where the next call should come.

    Args:
        turns: as the data has them.
    """
    found: list[Turn] = []
    last_role = None
    for turn, said in zip(turns, read, strict=True):
        role = role_of(turn, names)
        is_call_alone = said.message.keys() == {"role", "content", "tool_calls"}  # without thoughts, or a name
        if role == last_role == "function_call" and is_call_alone and said.is_learned == found[-1].is_learned:
            message, unread_keys = found[-1].message, found[-1].unread_keys | said.unread_keys
            calls = [*message["tool_calls"], *said.message["tool_calls"]]
            found[-1] = found[-1]._replace(message={**message, "tool_calls": calls}, unread_keys=unread_keys)
        else:
            found.append(said)
        last_role = role
    return found


def _mask_history(example: Mapping[str, Any]) -> bool:
    value = example.get(_MASK_HISTORY, False)
    if value not in (0, 1):
        raise BadExample(f"column {_MASK_HISTORY} is {value!r}; give true or false")
    return bool(value)


def _system_turn(example: Mapping[str, Any], messages: Sequence[Message]) -> Message | None:
    """The turn of the column `system`; None without one, or if it is the first of the turns already.

    Raises:
        BadExample: if the turns begin with another.
    """
    text = example.get(_SYSTEM) or ""
    if not isinstance(text, str):
        raise BadExample(f"column {_SYSTEM} is not text but {type(text).__name__}")
    if not text.strip():
        return None
    if messages[0]["role"] not in ("system", "developer"):
        return {"role": "system", "content": text}
    if messages[0]["content"].strip() != text.strip():
        raise BadExample(f"column {_SYSTEM} and its first turn, which is the system's, differ; leave one of them out")
    return None


def _read_kwargs(example: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = example.get(_KWARGS, {})
    try:
        kwargs = parse_json(kwargs) if isinstance(kwargs, str) and kwargs.strip() else kwargs or {}
    except ValueError as error:
        raise BadExample(f"its {_KWARGS} are no JSON ({error})") from error
    if not isinstance(kwargs, Mapping):
        raise BadExample(f"its {_KWARGS} are not a dict but {type(kwargs).__name__}")
    if taken := {"messages", "tools", "add_generation_prompt", "chat_template"} & kwargs.keys():
        raise BadExample(f"its {_KWARGS} hold {', '.join(sorted(taken))}, which the row itself gives; leave it out")
    return without_nulls(kwargs)


def _read_tools(example: Mapping[str, Any], config: ChatSettings, nested_columns: frozenset[str]) -> list[Any] | None:
    """The tools that a template takes: functions with their JSON schema, each in `{"type": "function", ...}`."""
    columns = [column for column in (config.tools_column, _FUNCTIONS) if example.get(column)]
    given = {column: tools for column in columns if (tools := _parse_tools(column, example[column]))}
    if len(given) > 1:
        raise BadExample(f"it has both {config.tools_column} and {_FUNCTIONS}; leave one of them out")
    for column, tools in given.items():
        is_nested = bool({column, "input"} & nested_columns) and not isinstance(example[column], str)
        return [_read_tool(tool, () if is_nested else _NULL_IS_A_VALUE) for tool in tools]
    return None


def _parse_tools(column: str, tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.strip() else []
        except ValueError as error:
            raise BadExample(f"its {column} are no JSON ({error})") from error
    tools = listed(tools)
    if not isinstance(tools, list | None):
        raise BadExample(f"its {column} are not a list but {type(tools).__name__}")
    return tools or []


def _read_tool(tool: Any, kept: tuple[str, ...]) -> Any:
    """A tool in the form of Hugging Face's templates; LLaMA-Factory and OpenAI's older API leave its frame out.

    Args:
        kept: keys that keep a null.
    """
    if isinstance(tool, str):
        tool, kept = _parse_tools("tools", f"[{tool}]")[0], _NULL_IS_A_VALUE
    tool = without_nulls(tool, kept)
    if not isinstance(tool, Mapping):
        raise BadExample(f"one of its tools is not a dict but {type(tool).__name__}")
    if "name" in tool and "function" not in tool:
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
        (parameters,) = _parse_tools("tools' parameters", f"[{function['parameters'] or '{}'}]")
        tool = {**tool, "function": {**function, "parameters": without_nulls(parameters, _NULL_IS_A_VALUE)}}
    return tool
