"""Rules for the optimizer, its schedule, and what happens every so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

from configs.names import find
from configs.other_values import OTHER_VALUES
from configs.run import SETTINGS
from configs.values import convert
from tools.translate.translation import Rule, Translation

CANNOT = "no schedule here falls so; cosine is set"
_EPSILON = 1e-8
_SCHEDULES = ("cosine", "linear", "constant")
_LONGEST_STEP = int(SETTINGS["train_config.step_timeout_seconds"].maximum or 0)


def optimizer(translation: Translation, key: str) -> None:
    """The optimizer's name, perhaps with its module."""
    optimizer_named(translation, key, (translation.text(key) or "").rpartition(".")[2])


def optimizer_named(translation: Translation, key: str, name: str) -> None:
    """The optimizer of this name. Paging moves an optimizer's states; those of an adapter are small."""
    others = OTHER_VALUES["optimizer"].get(name.lower())
    if others is not None:
        translation.set(key, "optimizer", others["optimizer"])
        if not translation.trains_adapter:
            for setting, value in others.items():
                translation.set(key, setting, value)
        return
    try:
        convert(name, SETTINGS[find("optimizer")[0]])
    except ValueError:
        translation.missing(key, f"{name} is no optimizer here; AdamW is set")
        translation.default("optimizer", "AdamW")
    else:
        translation.set(key, "optimizer", str(convert(name, SETTINGS[find("optimizer")[0]])))


def schedule(translation: Translation, key: str) -> None:
    """How the learning rate falls."""
    name = (translation.text(key) or "").lower()
    others: Mapping[str, str] = OTHER_VALUES["scheduler"].get(name, {"scheduler": name})
    if others["scheduler"] in _SCHEDULES:
        translation.set(key, "scheduler", others["scheduler"])
    else:
        translation.missing(key, f"{name}: {CANNOT}")
        translation.default("scheduler", "cosine")


def lowest_share(rate_key: str) -> Rule:
    """The lowest learning rate as a share of the highest one, which this key gives."""

    def rule(translation: Translation, key: str) -> None:
        share, rate = translation.number(key), translation.number(rate_key)
        if rate is None or share is None:
            translation.missing(key, "it is a share of a learning rate that the file does not give; --min_lr is a rate")
        else:
            translation.set(key, "min_lr", f"{share * rate:.6g}")

    return rule


def clipping(translation: Translation, key: str) -> None:
    """The largest norm of the gradients; 0 is none."""
    if translation.number(key):
        translation.set(key, "gradient_clipping", "True", ends=False)
        translation.set(key, "gradient_clipping_threshold", translation.text(key) or "")
    else:
        translation.set(key, "gradient_clipping", "False")


def betas(translation: Translation, key: str) -> None:
    """The two decays of Adam."""
    found = translation.names(key)
    if len(found) != 2:
        translation.refuse(key, "holds no two numbers; write [BETA1, BETA2]")
    translation.set(key, "adam_beta1", found[0])
    translation.set(key, "adam_beta2", found[1])


def epsilon(translation: Translation, key: str) -> None:
    """What Adam adds to the root of its second moments."""
    if translation.number(key) == _EPSILON:
        translation.needless(key, f"it is {_EPSILON:g}, PyTorch's own")
    else:
        translation.missing(key, f"AdamW has PyTorch's own, {_EPSILON:g}")


def all_steps(translation: Translation, key: str) -> None:
    """Optimizer steps of the run; -1 and 0 are no limit."""
    number = translation.number(key) or 0
    if number > 0:
        translation.set(key, "max_train_step", f"{number:.0f}")
    else:
        translation.needless(key, "no limit")


def all_epochs(translation: Translation, key: str) -> None:
    """Passes over the data. Those before the last one are whole."""
    number = float(translation.number(key) or 0)
    whole = max(1, math.ceil(number))
    translation.set(key, "num_epochs", str(whole))
    if whole != number:
        translation.notes.append(
            f"{key}: epochs are whole here, {whole} instead of {number:g}; --max_train_step ends a run"
        )


def timeout(translation: Translation, key: str) -> None:
    """Seconds without progress until the run ends."""
    seconds = translation.number(key) or 0
    translation.set(key, "step_timeout_seconds", f"{min(seconds, _LONGEST_STEP):.0f}")
    if seconds > _LONGEST_STEP:
        translation.notes.append(
            f"{key}: a step may take {_LONGEST_STEP} seconds at most; data is ready before ranks meet"
        )


def warmup(translation: Translation, key: str) -> None:
    """Steps of warm-up; below 1 it is a share of all steps."""
    number = translation.number(key) or 0
    if 0 < number < 1:
        translation.set(key, "warmup_ratio", translation.text(key) or "")
    else:
        translation.set(key, "warmup_steps", f"{number:.0f}")


def _epochs(translation: Translation) -> float | None:
    return translation.number("num_train_epochs") or translation.number("num_epochs")


def every(setting: str, off: str | None = None) -> Rule:
    """Steps between evaluations, checkpoints or lines; below 1 a share of all steps.

    Args:
        off: what 0 sets; None: nothing.
    """

    def rule(translation: Translation, key: str) -> None:
        number = translation.number(key) or 0
        if number >= 1:
            translation.set(key, setting, f"{number:.0f}")
        elif number > 0 and setting == "eval_every_steps" and (epochs := _epochs(translation)):
            translation.set(key, "evals_per_epoch", str(max(1, round(1 / number / epochs))))
        elif number > 0:
            translation.missing(key, f"it is a share of the run's steps; give --{setting} in steps")
        elif off is not None:
            translation.set(key, setting, off)
        else:
            translation.needless(key, "it is off, and so it is here")

    return rule


def per_epoch(translation: Translation, key: str) -> None:
    """Evaluations in each epoch."""
    number = translation.number(key) or 0
    if number >= 1:
        translation.set(key, "evals_per_epoch", f"{number:.0f}")
    else:
        translation.set(key, "run_validation", "False")


def saves_per_epoch(translation: Translation, key: str) -> None:
    """Checkpoints in each epoch."""
    number = translation.number(key) or 0
    if number == 1:
        translation.needless(key, "a checkpoint is written at the end of each epoch")
    elif number == 0:
        translation.set(key, "save_every_steps", "0")
    else:
        translation.missing(
            key, "checkpoints are written at the end of each epoch and every half an hour; give --save_every_steps"
        )
