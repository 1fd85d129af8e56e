"""Names of transformers' Trainer, which Axolotl, LLaMA-Factory and TRL share, and what they mean without a key."""

from __future__ import annotations

import json
import math

from tools.translate import steps, values
from tools.translate.layouts import LAYOUT_RULES
from tools.translate.translation import Rule, Translation


def bf16(translation: Translation, key: str) -> None:
    """`bf16`: compute in bf16. Weights stay in fp32, unless another key says otherwise."""
    text = (translation.text(key) or "").lower()
    if text in ("auto",):
        translation.needless(key, "bf16 is computed in if the device has it")
    elif translation.switch(key):
        if translation.given("pure_bf16") == "True" or translation.switch("pure_bf16"):
            translation.needless(key, "weights and all products are in bf16")
        else:
            translation.set(key, "mixed_precision", "True")
    elif translation.switch("fp16"):
        translation.needless(key, "fp16 is computed in")
    else:
        translation.set(key, "mixed_precision", "False")


def fp16(translation: Translation, key: str) -> None:
    """`fp16`: compute in fp16."""
    if (translation.text(key) or "").lower() != "auto" and translation.switch(key):
        translation.set(key, "use_fp16", "True")
    else:
        translation.needless(key, "fp16 is computed in only on GPUs without bf16")


def evaluates(translation: Translation, key: str) -> None:
    """`eval_strategy`: `no`, `epoch` or `steps`."""
    text = (translation.text(key) or "").lower()
    if text in ("no", "false"):
        translation.set(key, "run_validation", "False")
    elif text == "steps":
        translation.needless(key, "eval_steps says it")
        if translation.value("eval_steps") is None:
            steps = translation.number("logging_steps") or 500
            translation.set(key, "eval_every_steps", f"{max(1, steps):.0f}")
    else:
        translation.needless(key, "validation data is evaluated at the end of each epoch")


def eval_steps(translation: Translation, key: str) -> None:
    """`eval_steps`, which counts with `eval_strategy: steps` alone."""
    strategy = (translation.text("eval_strategy") or translation.text("evaluation_strategy") or "steps").lower()
    if strategy == "steps":
        steps.every("eval_every_steps")(translation, key)
    else:
        translation.needless(key, f"eval_strategy is {strategy}")


def saves(translation: Translation, key: str) -> None:
    """`save_strategy`: `no`, `epoch`, `steps` or `best`."""
    text = (translation.text(key) or "").lower()
    if text in ("no", "false"):
        translation.set(key, "save_every_steps", "0")
        translation.set(key, "save_every_minutes", "0")
    elif text == "best":
        translation.set(key, "keep_best", "True")
    else:
        why = "save_steps says it" if text == "steps" else "a checkpoint is written at the end of each epoch"
        translation.needless(key, why)


def save_steps(translation: Translation, key: str) -> None:
    """`save_steps`, which counts with `save_strategy: steps` alone."""
    strategy = (translation.text("save_strategy") or "steps").lower()
    if strategy == "steps":
        steps.every("save_every_steps", off="0")(translation, key)
    else:
        translation.needless(key, f"save_strategy is {strategy}")


def resumes(translation: Translation, key: str) -> None:
    """`resume_from_checkpoint`: a folder, or a switch."""
    text = translation.text(key) or ""
    if text.lower() in ("false", "no"):
        translation.needless(key, "a new run starts")
    else:
        translation.set(key, "resume", "auto" if text.lower() in ("true", "yes") else text)


def overwrites(translation: Translation, key: str) -> None:
    """`overwrite_output_dir`."""
    if translation.switch(key) and translation.value("resume_from_checkpoint") is None:
        translation.set(key, "overwrite", "True")
    else:
        translation.needless(key, "no earlier run is replaced")


def only_model_is_saved(translation: Translation, key: str) -> None:
    """`save_only_model`: without the optimizer, so nothing resumes."""
    if translation.switch(key):
        translation.missing(key, "checkpoints hold all that a resumed run needs; --save_every_steps 0 writes none")
    else:
        translation.needless(key, "checkpoints hold all that a resumed run needs")


def schedule_options(translation: Translation, key: str) -> None:
    """`lr_scheduler_kwargs`: a group, or one as JSON in a command line."""
    found = translation.value(key)
    if isinstance(found, str):
        try:
            options = json.loads(found)
            rate = float(options["min_lr_rate"]) * float(translation.text("learning_rate") or "nan")
        except (ValueError, TypeError, KeyError):
            translation.missing(key, "only min_lr_rate has a counterpart, --min_lr (a learning rate)")
        else:
            _set_lowest(translation, key, rate)


def _set_lowest(translation: Translation, key: str, rate: float) -> None:
    if math.isnan(rate):
        translation.missing(key, "it is a share of a learning rate that is not given; --min_lr is a rate")
    else:
        translation.set(key, "min_lr", f"{rate:.6g}")


TRAINER_RULES: dict[str, Rule] = {
    **LAYOUT_RULES,
    "bf16": bf16,
    "fp16": fp16,
    "eval_strategy": evaluates,
    "evaluation_strategy": evaluates,
    "do_eval": values.needless("validation data is evaluated if there is some"),
    "eval_steps": eval_steps,
    "save_strategy": saves,
    "save_steps": save_steps,
    "save_only_model": only_model_is_saved,
    "logging_steps": steps.every("log_every_steps"),
    "logging_strategy": values.needless("logging_steps says it"),
    "resume_from_checkpoint": resumes,
    "overwrite_output_dir": overwrites,
    "max_steps": steps.all_steps,
    "num_train_epochs": steps.all_epochs,
    "warmup_steps": steps.warmup,
    "adam_epsilon": steps.epsilon,
    "max_grad_norm": steps.clipping,
    "optim": steps.optimizer,
    "lr_scheduler_type": steps.schedule,
    "lr_scheduler_kwargs": schedule_options,
    "lr_scheduler_kwargs.min_lr_rate": steps.lowest_share("learning_rate"),
    "lr_scheduler_kwargs.min_lr": values.to("min_lr"),
    "gradient_checkpointing": values.recomputed,
    "gradient_checkpointing_kwargs": values.needless("PyTorch's non-reentrant checkpointing is used"),
    "ddp_timeout": steps.timeout,
    "report_to": values.trackers,
    "run_name": values.missing("--output_dir names the run, by its last part"),
    "wandb_project": values.wandb,
    "wandb_entity": values.wandb,
    "attn_implementation": values.attention,
    "group_by_length": values.if_on("batching_strategy", "padding"),
    "load_best_model_at_end": values.needless("model/ or adapter/ holds the weights of the best evaluation"),
    "metric_for_best_model": values.needless("the best evaluation is the one with the lowest loss (--best_metric)"),
    "greater_is_better": values.needless("a metric says itself which way is better"),
    "torch_compile": values.if_on("compile", "True", off="layers are compiled only if that is known to help"),
    "optim_args": values.missing("--optimizer has flags of its own: --adam_beta1, --adam_beta2, --weight_decay"),
}
"""By key. Keys whose values need no change are in configs/renamed.py."""


def add_trainer_defaults(translation: Translation) -> None:
    """What transformers' Trainer does without a key, where a run here does something else."""
    translation.default("scheduler", "linear")
    translation.default("lr", "5e-5")
    translation.default("batch_size_training", "8")
    if translation.given("gradient_clipping") is None:
        translation.default("gradient_clipping", "True")
        translation.default("gradient_clipping_threshold", "1.0")
    if float(str(translation.given("weight_decay") or 0)):
        translation.default("decay_norms_and_biases", "False")
