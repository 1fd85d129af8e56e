"""The model that answers: of a run, a checkpoint, an exported folder, or an adapter on its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.exporting.blueprint import load_tokenizer
from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.verify import load_model
from data.images.opening import open_image
from data.processors.tokenizer_loading import tokenizer_of
from data.tokens.spans import BadExample
from policies.pretrained import generation_settings
from run_folder.other_runs import run_folder_of
from run_folder.run_yaml import first_date
from tasks.task import Task
from tools.model_class import task_of
from utils.cudnn_attention import leave_out_cudnn
from utils.errors import ConfigError
from utils.printing import print_line


class LoadedModel(NamedTuple):
    """A model on the device where it answers, and what goes with it."""

    model: Any
    processor: Any  # a tokenizer, if the model reads no images
    task: Task
    path: Path  # of its weights: of a run, the checkpoint that was taken


def load(path: Path, base: str | None, image: Path | None = None) -> LoadedModel:
    """The model that a path holds.

    Raises:
        ConfigError: if there is none, it is not whole, or it does not write about images as it is asked to.
    """
    leave_out_cudnn()  # texts and answers have all lengths
    source = open_source(path, base)
    source.check(lambda num_bytes: None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    task = task_of(source)
    if (image is not None) != task.READS_IMAGES:
        if task.READS_IMAGES:  # other tools have no such flag
            asking = f"python -m tools.generate {path} --image FILE"
            raise ConfigError(f"{path}: this model writes about an image; ask by {asking}")
        raise ConfigError(f"--image: the model of {path} reads text alone; leave it out")
    if image is not None:
        check_image_file(image)
    tokenizer = load_tokenizer(source.tokenizer)
    tokenizer_of(tokenizer).template_date = first_date(run_folder_of(path))  # as in training; elsewhere today's
    # Of the base, since peft's model generates with its settings.
    if left_out := generation_settings(source.base if source.is_adapter and source.base else source.settings)[1]:
        print_line(left_out, to_stderr=True)
    model = load_model(source, task.AUTO_MODEL, dtype, say=lambda line: print_line(line, to_stderr=True))
    return LoadedModel(model.to(device), tokenizer, task, source.path)


def check_image_file(image: Path) -> None:
    """Refuse a file that is not an image.

    Raises:
        ConfigError: if it is not there, or cannot be decoded.
    """
    try:
        open_image(image.expanduser())
    except BadExample as error:
        raise ConfigError(f"--image: {error}; give an image file") from error
