"""Settings of the run's results: its folder, checkpoints and weights."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting

DEFAULT_KEEP_LAST = 2


@dataclass(frozen=True)
class ResultSettings:
    """Where results go, and what is kept."""

    output_dir: str | None = setting(
        None, "folder for the run's results", default_text="outputs/MODEL-DATASET-TIME", is_path=True
    )
    overwrite: bool = setting(False, "replace an earlier run in output_dir")
    resume: Literal[False] | str | None = setting(
        None,
        "continue an earlier run: auto (from the newest checkpoint in output_dir, if there is one), the path of a run "
        "or a checkpoint, or False",
        bare="auto",
        stands_for=False,
        default_text="False, but auto if torchrun or Slurm restarted the job",
        is_path=True,
    )
    resume_anyway: bool = setting(False, "resume even if settings that change the result have changed")
    save_every_steps: int | None = setting(
        None,
        "write a checkpoint every so many optimizer steps; 0: never",
        default_text="at the end of each epoch",
        unit="steps",
        minimum=0,
    )
    save_every_minutes: float = setting(
        30.0, "also write a checkpoint if the last one is older than this; 0: never", unit="minutes", minimum=0
    )
    keep_last: int | None = setting(
        None,
        "newest checkpoints to keep",
        unit="checkpoints",
        minimum=1,
        stands_for=DEFAULT_KEEP_LAST,
        default_text=f"{DEFAULT_KEEP_LAST}, or fewer if the disk is too full",
    )
    keep_best: bool = setting(
        False, "write a checkpoint after each evaluation that is the best so far, and keep the newest of them"
    )
    async_save: bool | None = setting(
        None,
        "write checkpoints while training goes on, from a copy in host memory",
        stands_for="auto",
        default_text="auto: on GPUs, if host memory has room",
    )
    save_model: bool = setting(True, "save the weights, or the adapter, in Hugging Face format")
    save_dtype: Literal["base", "fp32", "bf16", "fp16"] = setting(
        "base",
        "dtype of the weights in output_dir/model: that of the base's config.json if it is smaller than that of "
        "training (base), or this one; checkpoints and adapters keep that of training",
    )
    dist_checkpoint_root_folder: str | None = setting(
        None,
        "folder for checkpoints instead of output_dir/checkpoints, and for a copy of the final model",
        default_text="output_dir/checkpoints, and no copy",
        is_path=True,
    )
    dist_checkpoint_folder: str = setting(
        "fine-tuned",
        "subfolder of dist_checkpoint_root_folder for this run; the model's name is added: fine-tuned-MODEL",
        is_path=True,
    )
    save_optimizer: bool = setting(
        False, "save the optimizer states with the copy of the final model (checkpoints always hold them)"
    )
