"""Settings that have no meaning for labels of whole texts, or for labels of one kind."""

from __future__ import annotations

from configs.run import RunConfig
from configs.training import TrainConfig
from tasks.label_figures import FIGURES_OF_CLASSES, FIGURES_OF_NUMBERS
from tasks.labels import Labels
from utils.errors import ConfigError


def check_text_settings(config: RunConfig, task: str) -> None:
    """Check the settings that have no meaning for a text's label.

    Args:
        task: its name.

    Raises:
        ConfigError: for the first of them.
    """
    train = config.train_config
    refused = {
        "eval_generate": "nothing is generated",
        "neftune_noise_alpha": "noise is added for answers alone",
    }
    for name, why in refused.items():
        if getattr(train, name, False):
            raise ConfigError(f"--{name}: {why} with --task {task}; leave it out")
    if config.streams:
        raise ConfigError(f"--task: {task} reads all labels before the first step; leave --streaming out")
    if train.truncation == "split":
        raise ConfigError(
            "--truncation: split makes several samples of one text, and its label is of the whole; give right, "
            "left, drop or error"
        )
    if train.use_peft and train.peft_method != "lora":
        raise ConfigError(f"--peft_method: with --task {task} the head is trained, too, next to LoRA alone; give lora")
    if getattr(train, "loss_type", "cross_entropy") == "dft":
        raise ConfigError(f"--loss_type: dft weighs tokens, and --task {task} learns none; leave it out")


def check_settings_of_labels(train_config: TrainConfig, labels: Labels) -> None:
    """Check the settings that are for labels of one kind.

    Raises:
        ConfigError: if these are of another.
    """
    if train_config.label_smoothing and labels.problem_type != "single_label_classification":
        raise ConfigError(
            f"--label_smoothing: is for one class of each text, not for {labels.problem_type}; leave it out"
        )
    own = FIGURES_OF_CLASSES if labels.names else FIGURES_OF_NUMBERS
    if train_config.best_metric in {*FIGURES_OF_CLASSES, *FIGURES_OF_NUMBERS} - {*own}:
        kind = "classes" if labels.names else "numbers"
        raise ConfigError(
            f"--best_metric: the labels are {kind}, which have no {train_config.best_metric}; give "
            f"{' or '.join(own)}, or eval_loss"
        )
