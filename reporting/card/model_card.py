"""The README.md of a model's or adapter's folder: what the hub shows of it, and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from reporting.card.edits import marked
from reporting.card.facts import (
    Notes,
    base_of,
    by_chat_template,
    datasets_of,
    hub_datasets,
    section,
    settings_of,
    sizes_of,
)
from reporting.card.loss_table import loss_table
from reporting.card.names import hub_name, in_markdown, public_name
from reporting.events import Event, number

_LICENSE = "# license: yours to choose, within what the base model's allows; for example\n# license: apache-2.0"


class _Loading(NamedTuple):
    """How models of a task are loaded: the transformers class, and the hub's name of what they do."""

    auto_class: str
    pipeline: str


_LOADING = {
    "causal_lm": _Loading("AutoModelForCausalLM", "text-generation"),
    "seq2seq_lm": _Loading("AutoModelForSeq2SeqLM", "text2text-generation"),
    "image_text": _Loading("AutoModelForImageTextToText", "image-text-to-text"),
    "text_classification": _Loading("AutoModelForSequenceClassification", "text-classification"),
    "reward_model": _Loading("AutoModelForSequenceClassification", "text-classification"),
}
_UNLISTED = ("Mistral4ForCausalLM",)
"""Models of text that transformers' AutoModelForCausalLM does not list (`utils.compat.list_text_model`)."""
_ADAPTED = "model = PeftModel.from_pretrained(base, folder)"


def model_card(
    notes: Notes,
    train: Sequence[Event],
    evals: Sequence[Event],
    *,
    title: str,
    is_adapter: bool,
    step: int | None = None,
) -> str:
    """The card.

    Args:
        notes: run.yaml.
        train, evals: the run's events by step.
        title: a heading.
        is_adapter: the folder holds an adapter, not a whole model.
        step: after which the weights were saved.
    """
    base, kind = base_of(notes), _LOADING.get(str(section(notes, "resolved").get("task")))
    kind = kind or _LOADING["causal_lm"]
    if (architecture := section(notes, "model").get("architecture")) in _UNLISTED:
        kind = kind._replace(auto_class=str(architecture))
    text = [
        _about(notes, base, is_adapter=is_adapter, step=step),
        "## Use",
        _loading(
            kind,
            is_adapter=is_adapter,
            is_chat=by_chat_template(notes),
            rope=section(notes, "resolved", "rope") if is_adapter else {},
            labels=section(notes, "resolved", "labels") if is_adapter else {},
            has_new_tokens=bool(section(notes, "settings", "train_config").get("add_special_tokens")),
        ),
    ]
    if settings := settings_of(notes):
        rows = [f"| {name} | {in_markdown(value)} |" for name, value in settings.items()]
        text += ["## Training", "\n".join(["| | |", "|---|---|", *rows])]
    if losses := loss_table(train, evals):
        text += ["## Losses", _best(evals), "\n".join(losses)]
    body = "\n\n".join(part for part in text if part)
    return f"{_front_matter(notes, base, kind, is_adapter=is_adapter)}\n# {in_markdown(title)}\n\n{marked(body)}\n"


def _front_matter(notes: Notes, base: str | None, kind: _Loading, *, is_adapter: bool) -> str:
    """The YAML that the hub reads. It takes names on the hub alone, so a folder's name is left to the user."""
    on_hub = hub_name(base) if base else None
    values: dict[str, Any] = {}
    if on_hub:
        values |= {"base_model": on_hub, "base_model_relation": "adapter" if is_adapter else "finetune"}
    values |= {"library_name": "peft" if is_adapter else "transformers", "pipeline_tag": kind.pipeline}
    if is_adapter:
        values["tags"] = [str(section(notes, "settings", "train_config").get("peft_method") or "lora")]
    if datasets := hub_datasets(notes):
        values["datasets"] = datasets
    written = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if base and not on_hub:
        written += f"# base_model: OWNER/NAME of {public_name(base)}, if it is on the hub\n"
    return f"---\n{written}{_LICENSE}\n---\n"


def _about(notes: Notes, base: str | None, *, is_adapter: bool, step: int | None) -> str:
    named = f"[{on_hub}](https://huggingface.co/{on_hub})" if base and (on_hub := hub_name(base)) else None
    named = named or (f"`{public_name(base)}`" if base else "a base model")
    what = f"An adapter for {named}, trained" if is_adapter else f"{named}, fine-tuned"
    data = " and ".join(map(in_markdown, datasets_of(notes)))
    lines = [f"{what}{f' on {data}' if data else ''}."]
    if sizes := sizes_of(notes):
        lines.append(f"It had {sizes}.")
    if step is not None:
        lines.append(f"The weights are those after step {step}.")
    return " ".join(lines)


def _loading(
    kind: _Loading, *, is_adapter: bool, is_chat: bool, rope: Notes, labels: Notes, has_new_tokens: bool
) -> str:
    """How to load the folder, in Python.

    Args:
        rope, labels: values of config.json that the adapter's base needs in the place of its own.
        has_new_tokens: the adapter may hold rows that its base does not have.
    """
    processor = "AutoProcessor" if kind.pipeline == "image-text-to-text" else "AutoTokenizer"
    name = "processor" if processor == "AutoProcessor" else "tokenizer"
    if not is_adapter:
        imports = [f"from transformers import {kind.auto_class}, {processor}"]
        model = [f"model = {kind.auto_class}.from_pretrained(folder)"]
    elif rope or labels:
        imports = [
            "from peft import PeftConfig, PeftModel",
            f"from transformers import AutoConfig, {kind.auto_class}, {processor}",
        ]
        model = _base_with(rope, labels, kind)
    elif kind.pipeline == "image-text-to-text" or kind.auto_class in _UNLISTED:
        imports = ["from peft import PeftConfig, PeftModel"]
        imports += [f"from transformers import {', '.join(sorted((kind.auto_class, processor)))}"]
        base = f"{kind.auto_class}.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path)"
        model = [f"base = {base}", _ADAPTED]
    else:
        auto_class = kind.auto_class.replace("AutoModel", "AutoPeftModel")
        imports = [f"from peft import {auto_class}", f"from transformers import {processor}"]
        model = [f"model = {auto_class}.from_pretrained(folder)"]
    read = [f"{name} = {processor}.from_pretrained(folder)"]
    if has_new_tokens and model[-1] == _ADAPTED:  # peft's own auto classes make room by themselves
        tokenizer = name if name == "tokenizer" else f"{name}.tokenizer"
        rows = f"max(len({tokenizer}), base.get_input_embeddings().num_embeddings)"
        lines = [*model[:-1], *read, f"base.resize_token_embeddings({rows})  # for the new tokens", _ADAPTED]
    else:
        lines = [*model, *read]
    lines = [*imports, "", 'folder = "."  # this folder, or its name on the hub', *lines]
    if is_chat and kind.pipeline == "text-generation":
        lines += [
            "",
            'turns = [{"role": "user", "content": "Hello!"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
            "answer = model.generate(**inputs, max_new_tokens=200)[0, inputs.input_ids.shape[1] :]",
            "print(tokenizer.decode(answer, skip_special_tokens=True))",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _base_with(rope: Notes, labels: Notes, kind: _Loading) -> list[str]:
    """Lines that load an adapter on a base with other values of config.json."""
    parts = [name for name, value in rope.items() if name != "rope_parameters" and isinstance(value, dict)]
    place, values = (f"config.{parts[0]}", rope[parts[0]]) if parts else ("config", dict(rope))
    updates = [f"{place}.update({values!r})  # the positions that it was trained with"] if rope else []
    updates += [f"config.update({dict(labels)!r})  # the classes that it tells"] if labels else []
    return [
        "name = PeftConfig.from_pretrained(folder).base_model_name_or_path",
        "config = AutoConfig.from_pretrained(name)",
        *updates,
        f"base = {kind.auto_class}.from_pretrained(name, config=config)",
        _ADAPTED,
    ]


def _best(evals: Sequence[Event]) -> str:
    measured = [(loss, event["step"]) for event in evals if (loss := number(event.get("loss"))) is not None]
    if not measured:
        return ""
    loss, step = min(measured)
    return f"The best evaluation was that of step {step}: loss {loss:.4f}, from {measured[0][0]:.4f} at the first."
