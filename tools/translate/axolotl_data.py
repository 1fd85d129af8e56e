"""Axolotl's datasets: their types are formats here (https://docs.axolotl.ai/docs/dataset-formats)."""

from __future__ import annotations

from tools.translate import preferences
from tools.translate.data import is_hub_name, local_path, read_split, shown
from tools.translate.translation import DatasetPart, Options, Translation

_CHATS = ("chat_template", "sharegpt", "chat_template.argilla", "pygmalion", "jeopardy.chat")
_OWN_PROMPT = "the rows have Alpaca's prompt here; --dataset instruction_dataset with --prompt_template writes another"


def prefers(translation: Translation) -> bool:
    """Whether the file trains on pairs of answers."""
    return (translation.text("rl") or "false").lower() not in ("false", "no")


def datasets(translation: Translation, key: str) -> None:
    found = translation.value(key)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        translation.refuse(key, "is no list of datasets; write `- path: ...` below it")
    for index in range(len(found)):
        _dataset(translation, f"{key}[{index}]")


def _dataset(translation: Translation, key: str) -> None:
    """One dataset: its type is the format."""
    path = translation.text(f"{key}.path")
    if path is None:
        translation.refuse(key, "a dataset without a path; give it one")
    options: Options = {}
    place_key = f"{key}.path"
    if files := translation.names(f"{key}.data_files"):
        path = ",".join(_place(translation, file) for file in files)
        translation.needless(place_key, "data_files says the files")
        place_key = f"{key}.data_files"
    elif path in ("json", "csv", "parquet", "text"):
        translation.refuse(place_key, f"{path} names no file; give data_files")
    else:
        path = _place(translation, path)
    if translation.text(f"{key}.name") is not None:
        options["hub_config"] = (f"{key}.name", translation.text(f"{key}.name") or "")
    if translation.text(f"{key}.split") is not None:
        read_split(translation, f"{key}.split", options)
    dataset = _format(translation, key, options)
    translation.add(DatasetPart(place_key, dataset, path, options))


def _place(translation: Translation, path: str) -> str:
    found = local_path(translation.source, path) if not is_hub_name(path) else None
    return path if found is None else shown(found)


def _format(translation: Translation, key: str, options: Options) -> str:
    """The dataset that reads this type. Its columns become options."""
    type_key = f"{key}.type"
    type_ = translation.value(type_key)
    if prefers(translation):
        return _pairs(translation, key, options)
    if isinstance(type_, dict):
        return _own_type(translation, type_key, options)
    name, _, style = (type_ or "").partition(":")
    if name in _CHATS:
        translation.claim(type_key)
        options["type"] = (type_key, "chat_dataset")
        _chat_columns(translation, key, options)
        return _without_type("chat_dataset", translation, type_key, options)
    if name in ("completion", "pretrain", ""):
        if (column := translation.text(f"{key}.field")) is not None:
            options["text_column"] = (f"{key}.field", column)
        elif (column := translation.text(f"{key}.text_column")) is not None:
            options["text_column"] = (f"{key}.text_column", column)
        return _without_type("text_dataset", translation, type_key, options)
    if name == "input_output":
        return _without_type("segments_dataset", translation, type_key, options)
    if name.startswith("alpaca") or name in ("gpteacher", "instruct"):
        if style or name != "alpaca":
            translation.notes.append(f"{key}.type {type_}: {_OWN_PROMPT}")
        return _without_type("alpaca_dataset", translation, type_key, options)
    translation.refuse(
        type_key, f"{type_} is no format here; write the rows as chats, prompts or text (docs/datasets.md)"
    )


def _pairs(translation: Translation, key: str, options: Options) -> str:
    """Pairs of answers. What their type does to the prompt, the tokenizer's template does here."""
    found = translation.value(f"{key}.type")
    fields = found if isinstance(found, dict) else {}
    start = f"{key}.type." if fields else f"{key}."
    names = [translation.text(f"{start}field_{side}") for side in ("chosen", "rejected")]
    preferences.check_columns(translation, key, names[0] or "chosen", names[1] or "rejected")
    for leaf in translation.source.leaves(f"{key}.type") if found is not None else []:
        translation.needless(leaf, f"it is --dataset {preferences.PAIRS}, whose turns the chat template writes")
    for side in ("chosen", "rejected"):
        if translation.text(f"{key}.field_{side}") is not None:
            translation.needless(f"{key}.field_{side}", "the columns are found by their names")
    if translation.text(f"{key}.field_messages") is not None:
        translation.needless(
            f"{key}.field_messages", "turns before the answers are read from messages or conversations"
        )
    return preferences.PAIRS


def _without_type(dataset: str, translation: Translation, type_key: str, options: Options) -> str:
    options.pop("type", None)
    translation.needless(type_key, f"it is --dataset {dataset}")
    return dataset


def _chat_columns(translation: Translation, key: str, options: Options) -> None:
    for name, field in (("field_messages", "messages_column"), ("field_tools", "tools_column")):
        if (column := translation.text(f"{key}.{name}")) is not None:
            options[field] = (f"{key}.{name}", column)
    roles = [
        f"{own}={role}"
        for role in translation.mapping(f"{key}.roles")
        for own in translation.names(f"{key}.roles.{role}")
        if own != role
    ]
    if roles:
        for leaf in translation.source.leaves(f"{key}.roles"):
            options["roles"] = (leaf, roles)
            translation.claim(leaf)
    for leaf in translation.source.leaves(f"{key}.roles"):
        translation.needless(leaf, "roles are known by these names" if not roles else "--chat_dataset.roles names them")
    for name in ("message_property_mappings", "message_field_role", "message_field_content"):
        known = ("role", "from", "content", "value", "user", "tool_calls", "name")
        for leaf in translation.source.leaves(f"{key}.{name}") if translation.value(f"{key}.{name}") else []:
            column = translation.text(leaf)
            if column in known:
                translation.needless(leaf, "turns are read with role and content, or with from and value")
            else:
                translation.missing(
                    leaf, f"turns have role and content, or from and value; rename {column} in the data"
                )


def _own_type(translation: Translation, key: str, options: Options) -> str:
    """A type with columns and a prompt of its own."""
    fields = {"field_instruction": "prompt_column", "field_input": "input_column", "field_output": "completion_column"}
    fields |= {"field_system": "system_column"}
    for name, field in fields.items():
        if column := translation.text(f"{key}.{name}"):
            options[field] = (f"{key}.{name}", column)
    if text := translation.text(f"{key}.format"):
        written = text.replace("{instruction}", "{prompt}").replace("{{", "{").replace("}}", "}")
        if "{prompt}" in written:
            options["prompt_template"] = (f"{key}.format", written.replace("\n", "\\n"))
        else:
            translation.missing(f"{key}.format", "a prompt's text has {instruction}")
    for name in ("no_input_format", "system_format", "system_prompt"):
        if translation.value(f"{key}.{name}") is not None:
            translation.missing(f"{key}.{name}", "all rows have one prompt, --instruction_dataset.prompt_template")
    return "instruction_dataset"


def pretraining(translation: Translation, key: str) -> None:
    found = translation.value(key)
    if isinstance(found, str):
        translation.add(DatasetPart(key, "text_dataset", found, {"streaming": (key, "True")}))
        return
    for index in range(len(found)):
        one = f"{key}[{index}]"
        options: Options = {"streaming": (f"{one}.path", "True")}
        if translation.text(f"{one}.split") is not None:
            read_split(translation, f"{one}.split", options)
        for name, field in (("name", "hub_config"), ("text_column", "text_column")):
            if translation.text(f"{one}.{name}") is not None:
                options[field] = (f"{one}.{name}", translation.text(f"{one}.{name}") or "")
        if translation.value(f"{one}.type") is not None:
            translation.needless(f"{one}.type", "it is --dataset text_dataset")
        translation.add(DatasetPart(f"{one}.path", "text_dataset", translation.text(f"{one}.path") or "", options))


def test_datasets(translation: Translation, key: str) -> None:
    for leaf in translation.source.leaves(key):
        translation.missing(
            leaf, "validation data stands with training data, in a folder, or as a split (--NAME.test_split)"
        )
