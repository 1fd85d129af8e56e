"""The small files that make weights a Hugging Face model; every checkpoint carries them and so stands for itself."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from policies.adapters.adapted_model import has_adapter
from policies.config_overrides import write_config_overrides
from policies.sharding import own_class, unwrap
from run_folder.checkpoint_folder import HUGGINGFACE
from utils.disk_errors import disk_refusal
from utils.errors import ConfigError
from utils.processor_type import Processor


def huggingface_files(
    model: nn.Module, tokenizer: Processor, rope: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """config.json, generation_config.json, the tokenizer's files and adapter_config.json, by their paths.

    Args:
        rope: what an adapter's base needs besides its own config.json (`policies.config_overrides`).

    Raises:
        ConfigError: if the machine's folder for temporary files, where libraries write them first, does not take them.
    """
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            _write(model, tokenizer, folder)
            if has_adapter(unwrap(model)):
                write_config_overrides(folder, rope or {})
            return {
                # Further chat templates are in a folder of their own.
                f"{HUGGINGFACE}/{path.relative_to(folder).as_posix()}": path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
    except Exception as error:
        if (reason := disk_refusal(error)) is None:
            raise
        where = tempfile.tempdir or "the folder for temporary files"
        raise ConfigError(
            f"the model's config and tokenizer cannot be written in {where} ({reason}); make room there, or name "
            "another place with the variable TMPDIR"
        ) from error


def _write(model: nn.Module, tokenizer: Processor, folder: Path) -> None:
    inner: Any = unwrap(model)
    if has_adapter(inner):
        # A copy with inference_mode, as PeftModel.save_pretrained writes it; the model itself goes on training.
        settings = copy.copy(inner.peft_config[inner.active_adapter])
        settings.inference_mode = True
        settings.save_pretrained(str(folder))
        inner = inner.get_base_model()
    config = copy.deepcopy(inner.config)
    config.architectures = [own_class(inner).__name__]  # fully_shard gave the model another class
    config.dtype = inner.dtype
    config.save_pretrained(folder)
    if inner.can_generate():
        inner.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_config_values(files: dict[str, bytes]) -> dict[str, Any]:
    """The values of config.json that describe the model."""
    config = json.loads(files[f"{HUGGINGFACE}/config.json"])
    # Neither a moved folder nor a newer library is another model.
    return {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
