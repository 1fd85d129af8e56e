"""A model from a folder or the hub: built without values, read whole, or its files found. Training and export use it.

Refusals are the caller's, who knows the flag and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, cached_file
from transformers.utils.quantization_config import Mxfp4Config

from policies.config_overrides import override
from policies.generation_values import check_values
from policies.mxfp4 import is_mxfp4
from utils.compat import must_be_exact, no_draws_on_meta
from utils.errors import in_one_line
from utils.wording import plural


class MissingTensorsError(Exception):
    """The files lack tensors of the model."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"missing: {plural(len(names), 'tensor')}, {names[0]} first")
        self.names = names


def build_on_meta(
    auto_model: Any,
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    attention: dict[str, Any],
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model with its parameters on the meta device: they have shapes and a dtype, and no values yet.

    Buffers are real. Many of them are computed when the model is built and are in no file, so they could not be read
    later.

    Args:
        auto_model: the transformers class to build it with, an Auto class or the model's own.
        attention: see `policies.loading.attention_settings`.

    Raises:
        Exception: whatever transformers raises for a config that it cannot build.
    """
    with init_empty_weights(include_buffers=False), no_draws_on_meta():
        if hasattr(auto_model, "from_config"):
            model = auto_model.from_config(model_config, dtype=dtype, trust_remote_code=trust_remote_code, **attention)
        else:
            model = auto_model._from_config(model_config, dtype=dtype, **attention)
    model.tie_weights()  # accelerate makes a new parameter of each, which unties them
    _keep_exact_buffers(model)
    if model.can_generate():
        settings, _ = generation_settings(model_config._name_or_path)
        model.generation_config = settings or model.generation_config  # the one made from config.json
    return model


def generation_settings(name: str) -> tuple[GenerationConfig | None, str]:
    """The generation_config.json of a folder or of a model on the hub, and "" or a line that says why it is left out.

    A file that transformers cannot read is left out: next to saved weights it would keep them from loading. So is one
    with values that no text can be generated with.
    """
    try:
        file = cached_file(name, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False) if name else None
    except OSError:  # no folder, and the hub does not answer
        file = None
    if file is None:
        return None, ""
    try:
        settings = GenerationConfig.from_pretrained(name)
        check_values(settings)
        return settings, ""
    except Exception as error:
        return None, f"{GENERATION_CONFIG_NAME} of {name} is left out, since it cannot be read ({in_one_line(error)})"


def _keep_exact_buffers(model: PreTrainedModel) -> None:
    """Keep buffers in fp32 that the family must not round, as `from_pretrained` does.

    DeepSeek-V3's routers choose experts by biases that differ by less than bf16 resolves.
    """
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and must_be_exact(model, f"{module_name}.{name}"):
                setattr(module, name, buffer.float())


def read_whole(
    auto_model: Any,
    name: str,
    dtype: torch.dtype | str,
    *,
    attention: dict[str, Any],
    trust_remote_code: bool = False,
    rope: Mapping[str, Any] | None = None,
    config: PretrainedConfig | None = None,
    new_parts: Collection[str] = (),
) -> tuple[PreTrainedModel, list[str]]:
    """The model with its values on the CPU, read by transformers, which converts what files name or fuse differently.

    Args:
        rope: values of config.json to put in the place of its own (`policies.config_overrides`).
        config: in the place of its own, for another number of classes.
        new_parts: modules whose tensors the files need not have, or have in another shape; their values mean nothing.

    Returns:
        The model, and the tensors in the files that it has no place for.

    Raises:
        MissingTensorsError: if the files lack tensors, which transformers would draw at random.
        Exception: whatever transformers raises otherwise.
    """
    # Given, or transformers would refuse the model for a generation_config.json that it cannot read.
    more: dict[str, Any] = {"generation_config": GenerationConfig()} if generation_settings(name)[1] else {}
    # Else transformers keeps MXFP4 packed if it has kernels for it.
    own = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if config is not None:
        more["config"] = config
    if new_parts:
        more["ignore_mismatched_sizes"] = True
    config = config or own
    if is_mxfp4(config):
        more["quantization_config"] = Mxfp4Config(dequantize=True)
    if rope:
        override(config, rope)
        more["config"] = config
    model, report = auto_model.from_pretrained(
        name,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **attention,
        **more,
    )
    missing = [name for name in sorted(report.get("missing_keys", ())) if not is_of_parts(name, new_parts)]
    if missing:
        raise MissingTensorsError(missing)
    if is_mxfp4(own):
        # transformers would save its plain numbers as blocks: it reverts the conversion that it read them with.
        model._weight_conversions = None
    return model, sorted(report.get("unexpected_keys", ()))


def is_of_parts(name: str, parts: Collection[str]) -> bool:
    """Whether a tensor is of one of these modules, which are named as in the model, or by the end of that."""
    return any(f".{part}." in f".{name}" for part in parts)
