"""state.json of a checkpoint: the types and limits of its fields. All are checked before any is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from checkpointing.marks import FORMAT
from configs.train_settings.evaluation import DIVERGENCE_STEPS
from policies.activations.checkpointing import MODES
from policies.loss_scaling import GROWTH_INTERVAL
from run_folder.checkpoint_folder import STATE, is_step_folder, step_of
from utils.small_files import read_json

_MOST_STEPS = 10**9
_MOST_RANKS = 2**20
_MOST_TOKENS = _MOST_WEIGHTS = 2**62
_MISSING = object()  # None would be a field that holds null


class StateError(ValueError):
    """state.json is not what a run writes; the message is a clause that names the field."""


class _Kind(NamedTuple):
    """The type and the limits of a field."""

    name: str
    holds: Callable[[Any], bool]


def _count(most: int, least: int = 0) -> _Kind:
    # By type(): to isinstance, true and false are whole numbers.
    return _Kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _is_number(value: Any) -> bool:
    # Whole numbers of 400 digits are JSON, too, and no float can hold them.
    return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.name}, or null", lambda value: value is None or kind.holds(value))


_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_TABLE = _Kind("a table of names", lambda value: isinstance(value, dict))
_NUMBER = _Kind("a finite number", _is_number)
_SECONDS = _Kind("a finite number, 0 or more", lambda value: _is_number(value) and value >= 0)
_NAMES = _Kind(
    "a text or a list of texts",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value)),
)
_LOSSES = _Kind(
    f"a list of finite numbers, at most {DIVERGENCE_STEPS}",
    lambda value: isinstance(value, list) and len(value) <= DIVERGENCE_STEPS and all(map(_is_number, value)),
)
_MODE = _Kind(f"one of {', '.join(MODES)}", lambda value: isinstance(value, str) and value in MODES)
_STEP, _TOKENS = _count(_MOST_STEPS), _count(_MOST_TOKENS)

SCHEMA: dict[tuple[str, ...], _Kind] = {
    # how far the run has come (checkpointing.train_state.TrainState)
    ("state", "step"): _STEP,
    ("state", "epoch"): _count(_MOST_STEPS + 1, least=1),
    ("state", "step_of_epoch"): _STEP,
    ("state", "eval_due"): _FLAG,
    ("state", "epoch_end_due"): _FLAG,
    ("state", "epoch_loss_sum"): _NUMBER,
    ("state", "epoch_label_tokens"): _TOKENS,
    ("state", "epoch_seconds"): _SECONDS,
    ("state", "num_tokens"): _TOKENS,
    ("state", "seconds"): _SECONDS,
    ("state", "best_eval_loss"): _or_null(_NUMBER),
    ("state", "best_step"): _STEP,
    # state besides the tensors
    ("scheduler", "last_epoch"): _STEP,
    ("optimizer_numbers",): _TABLE,
    ("has_optimizer",): _FLAG,
    ("world_size",): _count(_MOST_RANKS, least=1),
    # facts that a resumed run must have in common with this one (checkpointing.comparison)
    ("global_batch_size",): _count(_MOST_STEPS, least=1),
    ("num_steps",): _STEP,
    ("precision",): _TEXT,
    ("data_fingerprint",): _count(2**64),
    ("model_config",): _TABLE,
    ("base_fingerprint",): _or_null(_TEXT),
    ("settings", "train_config"): _TABLE,
    ("settings", "fsdp_config"): _TABLE,
    ("settings", "train_config", "freeze_layers"): _FLAG,
    ("settings", "train_config", "num_freeze_layers"): _STEP,
    ("settings", "fsdp_config", "pure_bf16"): _FLAG,
    ("settings", "fsdp_config", "optimizer"): _TEXT,
}
"""Every field that must be there, by its path."""

MAY_BE_MISSING: dict[tuple[str, ...], _Kind] = {
    ("format",): _Kind(f"{FORMAT}, or missing", lambda value: type(value) is int and value == FORMAT),  # see marks.py
    # How many steps epochs have (`checkpointing.epochs`); earlier versions did not say it.
    ("epochs",): _TABLE,
    ("epochs", "first"): _count(_MOST_STEPS + 1, least=1),
    ("epochs", "after_step"): _STEP,
    ("epochs", "steps"): _count(_MOST_STEPS, least=1),
    ("state", "best_rouge"): _or_null(_NUMBER),  # earlier versions wrote none
    ("state", "evals_since_best"): _STEP,
    ("state", "first_losses"): _LOSSES,
    ("loss_scaler",): _or_null(_TABLE),  # earlier versions wrote none
    ("loss_scaler", "scale"): _Kind("a finite number, 1 or more", lambda value: _is_number(value) and value >= 1),
    ("loss_scaler", "growth_tracker"): _count(GROWTH_INTERVAL),
    ("activation_checkpointing",): _or_null(_TABLE),  # see earlier_choice.py; earlier versions wrote none
    ("activation_checkpointing", "mode"): _MODE,
    ("activation_checkpointing", "first"): _MODE,
    ("activation_checkpointing", "num_first"): _count(_MOST_STEPS),
    ("activation_checkpointing", "card"): _TEXT,
    ("tile_tokens",): _count(_MOST_STEPS),  # the same, of tiles
    ("began_with",): _TABLE,  # earlier versions wrote none
    ("began_with", "world_size"): _count(_MOST_RANKS, least=1),
    ("began_with", "batch_size_training"): _count(_MOST_STEPS, least=1),
    ("began_with", "packed_length"): _or_null(_count(_MOST_STEPS, least=1)),
    ("shares_prompts",): _FLAG,  # earlier versions wrote none
    ("row_length",): _count(_MOST_STEPS, least=1),  # earlier versions wrote none
    ("packed_weights",): _or_null(_TABLE),  # see base_fingerprint.py; earlier versions wrote none
    ("packed_weights", "linear"): _count(_MOST_WEIGHTS),
    ("packed_weights", "experts"): _count(_MOST_WEIGHTS),
    ("settings", "train_config", "compile"): _or_null(_FLAG),
    ("settings", "lora_config", "target_modules"): _or_null(_NAMES),
}

WHOLE: dict[tuple[str, ...], set[str]] = {
    path: {name for *above, name in MAY_BE_MISSING if tuple(above) == path}
    for path in (("loss_scaler",), ("began_with",), ("epochs",), ("activation_checkpointing",), ("packed_weights",))
}
"""Tables that hold these names and no others, if they are there."""


def read_state(folder: Path) -> dict[str, Any]:
    """The values of a checkpoint's state.json.

    Raises:
        StateError: if a field is missing, or is not what a run writes.
    """
    try:
        values = read_json(folder / STATE)
    except (OSError, ValueError) as error:
        raise StateError(f"{STATE} cannot be read ({type(error).__name__})") from error
    check_state(values)
    step = values["state"]["step"]
    if is_step_folder(folder) and step_of(folder) != step:
        raise StateError(f"{STATE}: state.step is {step}, and the folder is of another step")
    return values


def check_state(values: Any) -> None:
    """Refuse values that are not those of a run.

    Raises:
        StateError: it names a field, its value and what it must be.
    """
    for path, kind in SCHEMA.items():
        _check(path, _at(values, path), kind)
    for path, kind in MAY_BE_MISSING.items():
        if (value := _at(values, path)) is not _MISSING:
            _check(path, value, kind)
    for path, names in WHOLE.items():
        if isinstance(table := _at(values, path), dict) and set(table) != names:
            wanted, found = " and ".join(sorted(names)), _shown(sorted(table))
            raise StateError(f"{STATE}: {'.'.join(path)} holds {found}, and must hold {wanted}")
    for name, section in values["settings"].items():
        _check(("settings", name), section, _TABLE)
    _check_optimizer_numbers(values["optimizer_numbers"], values["state"]["step"])
    _check_relations(values)


def _check_optimizer_numbers(numbers: Mapping[str, Any], step: int) -> None:
    """Each parameter has numbers by their names, `step` among them: how often it was updated."""
    updates = _count(step)
    for parameter, of_parameter in numbers.items():
        _check(("optimizer_numbers", parameter), of_parameter, _TABLE)
        for key, value in of_parameter.items():
            _check(("optimizer_numbers", parameter, key), value, updates if key == "step" else _NUMBER)


def _check_relations(values: Mapping[str, Any]) -> None:
    """Check fields against each other. An epoch has at least one step, and a step at least one token."""
    state = values["state"]
    step, of_epoch, epoch = state["step"], state["step_of_epoch"], state["epoch"]
    relations = {
        f"state.step_of_epoch is {of_epoch}, and state.step {step}": of_epoch <= step,
        f"state.epoch is {epoch}, and state.step {step}": epoch - 1 <= step - of_epoch,
        f"state.num_tokens is {state['num_tokens']}, and state.step {step}": state["num_tokens"] >= step,
        f"state.best_step is {state['best_step']}, and state.step {step}": state["best_step"] <= step,
        f"state.best_eval_loss is {state['best_eval_loss']}, and state.best_step {state['best_step']}": (
            state["best_eval_loss"] is None or state["best_step"] > 0
        ),
        f"state.epoch_end_due is true, and state.step_of_epoch {of_epoch}": of_epoch > 0 or not state["epoch_end_due"],
        f"scheduler.last_epoch is {values['scheduler']['last_epoch']}, and state.step {step}": (
            values["scheduler"]["last_epoch"] == step
        ),
    }
    if epochs := values.get("epochs"):
        steps = epochs["steps"]
        begun = epochs["after_step"] + (epoch - epochs["first"]) * steps
        place = f"state.step is {step}, state.epoch {epoch} and state.step_of_epoch {of_epoch}"
        is_there = epoch >= epochs["first"] and step == begun + of_epoch
        relations[f"{place}, with {steps} steps in an epoch"] = is_there
    for said, holds in relations.items():
        if not holds:
            raise StateError(f"{STATE}: {said}, which cannot both be")


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(values, dict) or name not in values:
            return _MISSING
        values = values[name]
    return values


def _check(path: tuple[str, ...], value: Any, kind: _Kind) -> None:
    if value is _MISSING:
        raise StateError(f"{STATE}: {'.'.join(path)} is missing, and must be {kind.name}")
    if not kind.holds(value):
        raise StateError(f"{STATE}: {'.'.join(path)} is {_shown(value)}, and must be {kind.name}")


def _shown(value: Any) -> str:
    """The value in short. A nested one is not walked through: it may be deep."""
    if isinstance(value, dict | list):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if type(value) is int and abs(value) >= 10**18:
        return f"about 10^{int(math.log10(abs(value)))}"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
