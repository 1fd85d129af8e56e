"""A run's base model, data and settings as a card tells them: by names, without paths of this machine or secrets.

run.yaml may be of another version or changed by hand, so whatever is not there is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from configs.datasets import split_paths
from configs.preference import TAKEN_BY
from reporting.card.names import hub_name, public_name
from utils.wording import plural

Notes = Mapping[str, Any]  # run.yaml


def section(notes: Notes, *names: str) -> dict[str, Any]:
    """A part of run.yaml; empty if it is not there."""
    found: Any = notes
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def base_of(notes: Notes) -> str | None:
    """The model that training started from, as the run was told it."""
    name = section(notes, "settings", "train_config").get("model_name")
    return name if isinstance(name, str) and name else None


def datasets_of(notes: Notes) -> list[str]:
    """A line for each dataset: its files' names or its name on the hub, and its format."""
    return [f"{_origin(values) or 'data'} ({name})" for name, values in _datasets(notes)]


def hub_datasets(notes: Notes) -> list[str]:
    """The datasets that are on the hub."""
    paths = [str(values.get("data_path") or "") for _, values in _datasets(notes)]
    return [name for path in paths for part in split_paths(path) if (name := hub_name(part))]


def by_chat_template(notes: Notes) -> bool:
    """Whether the tokenizer's chat template wrote the samples."""
    return any(name == "chat_dataset" or values.get("as_chat") for name, values in _datasets(notes))


def sizes_of(notes: Notes) -> str:
    """The samples and label tokens of training and validation; empty if unknown."""
    parts = []
    for split, name in (("train", "training"), ("validation", "validation")):
        counts = section(notes, "data", split)
        if isinstance(samples := counts.get("num_samples"), int):
            tokens = counts.get("num_label_tokens")
            learned = (
                f" with {tokens:,} label tokens" if isinstance(tokens, int) and tokens and split == "train" else ""
            )
            parts.append(f"{plural(samples, 'sample')}{learned} for {name}")
    return ", ".join(parts)


def settings_of(notes: Notes) -> dict[str, str]:
    """The settings that somebody would need to train the same, by their names in a table."""
    train, fsdp = section(notes, "settings", "train_config"), section(notes, "settings", "fsdp_config")
    resolved = section(notes, "resolved")
    precision = "pure bf16" if fsdp.get("pure_bf16") else resolved.get("precision")
    software = section(notes, "versions")
    rows = {
        "trained": _trained(notes, train),
        "loss": _loss(train, section(notes, "settings", "preference_config")),
        "base stored in": _quantization(section(notes, "settings", "quantization_config")),
        "learning rate": _schedule(train, resolved),
        "optimizer": fsdp.get("optimizer"),
        "epochs": train.get("num_epochs"),
        "global batch": _batch(resolved, train),
        "precision": precision,
        "seed": train.get("seed"),
        "hardware": _hardware(notes),
        "software": ", ".join(
            f"{name} {software[name]}" for name in ("torch", "transformers", "peft") if name in software
        ),
        "started": notes.get("started"),
    }
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def _datasets(notes: Notes) -> Iterator[tuple[str, dict[str, Any]]]:
    settings = section(notes, "settings")
    for name in str(section(settings, "train_config").get("dataset") or "").split(","):
        if name.strip():
            yield name.strip(), section(settings, name.strip())


def _origin(values: Mapping[str, Any]) -> str:
    path = values.get("data_path") or values.get("file")
    return ", ".join(public_name(part) for part in split_paths(path)) if isinstance(path, str) else ""


def _trained(notes: Notes, train: Mapping[str, Any]) -> str | None:
    if "use_peft" not in train:
        return None
    if not train["use_peft"]:
        return "all weights"
    if train.get("peft_method") != "lora":
        return f"adapter ({train.get('peft_method')})"
    lora = section(notes, "settings", "lora_config")
    kinds = [kind for kind, name in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if lora.get(name)]
    targets = lora.get("target_modules")
    on = ", ".join(map(str, targets)) if isinstance(targets, list) else targets
    return (
        f"{', '.join(kinds) or 'LoRA'}, r {lora.get('r')}, alpha {lora.get('lora_alpha')}, "
        f"dropout {lora.get('lora_dropout')}, on {on}"
    )


def _loss(train: Mapping[str, Any], preferences: Mapping[str, Any]) -> str | None:
    """The loss with its settings, unless it is cross-entropy."""
    name = train.get("loss_type")
    if name in (None, "cross_entropy"):
        return None
    given = [f"{field} {preferences.get(field)}" for field, losses in TAKEN_BY.items() if name in losses]
    return ", ".join([str(name), *(text for text in given if not text.endswith(" None"))])


def _hardware(notes: Notes) -> str | None:
    devices, ranks = notes.get("devices"), notes.get("world_size")
    if not isinstance(devices, list) or not isinstance(ranks, int):
        return None
    kinds = dict.fromkeys(str(device.get("device")) for device in devices if isinstance(device, Mapping))
    return f"{plural(ranks, 'rank')} on {', '.join(kinds)}" if kinds else None


def _quantization(values: Mapping[str, Any]) -> str | None:
    bits = values.get("quantization")
    return f"{bits} ({values.get('quant_type')})" if bits == "4bit" else bits


def _schedule(train: Mapping[str, Any], resolved: Mapping[str, Any]) -> str | None:
    rate = resolved.get("lr", train.get("lr"))
    if rate is None:
        return None
    warmup = train.get("warmup_steps")
    falls = f", times {train.get('gamma')} after each epoch" if train.get("scheduler") == "step" else ""
    return f"{rate}, {train.get('scheduler')}{falls}" + (
        f", warm-up {plural(warmup, 'step')}" if isinstance(warmup, int) and warmup else ""
    )


def _batch(resolved: Mapping[str, Any], train: Mapping[str, Any]) -> str | None:
    rows, length = resolved.get("global_batch_size"), resolved.get("context_length")
    if not isinstance(rows, int):
        return None
    packed = ", packed" if train.get("batching_strategy") == "packing" and length else ""
    return plural(rows, "row") + (f" of up to {length:,} tokens{packed}" if isinstance(length, int) else "")
