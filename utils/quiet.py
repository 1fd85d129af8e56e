"""Quiets other libraries: rank 0 prints their warnings, and in a terminal their bars; other ranks their errors."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from utils.launcher_rank import launcher_rank
from utils.progress import shows_bars


def quiet_imports() -> None:
    """Let libraries log errors alone while they are imported. For the start of a script."""
    # peft imports bitsandbytes if it is installed; on some CPUs that advertises a faster kernel on the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # transformers imports torchao if it is installed; that warns of its own kernels that this torch cannot load.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    if launcher_rank():
        # torch's store reports its end with forty lines of C++ frames. The run prints a line of its own instead.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def quiet_tool() -> None:
    """Let libraries print errors alone, for a tool that prints lines of its own."""
    import transformers

    _ignore_warnings_of_peft()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _ignore_warnings_of_peft() -> None:
    # peft 0.21 uses an old name of transformers. The user could not change it.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    # The run says in a line of its own what an adapter on a tied embedding means (policies/adapters/targets.py).
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")


def quiet_libraries() -> None:
    """Let rank 0 alone print lines of libraries, and none print bars into files."""
    import datasets
    import huggingface_hub
    import transformers

    if not shows_bars():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()

    _ignore_warnings_of_peft()
    # Under fp16 the first steps may make no update; the learning rate follows the steps all the same.
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before", category=UserWarning)
    # flash-attn-4 hands its compiler an argument that is no tensor, once for each kernel. The user could not change it.
    warnings.filterwarnings("ignore", message=r"Argument \w+ .*cannot be converted to a JitArgument")
    # Readers of files log what they also raise; the refusal says it with file and line.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    if launcher_rank():
        transformers.utils.logging.set_verbosity_error()


@contextmanager
def quiet_generation() -> Iterator[None]:
    """A context in which transformers prints errors alone; it would repeat generation_config.json at every batch."""
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)
