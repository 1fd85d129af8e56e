"""The model that a checkpoint's tensors make up: built without values, checked against the tensors, and filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from checkpointing.exporting.model_source import ModelSource
from checkpointing.exporting.stored_tensors import StoredTensors
from data.processors.processor_loading import has_processor, read_processor
from data.processors.tokenizer_loading import read_tokenizer
from policies.config_overrides import override
from policies.mxfp4 import forget_mxfp4
from policies.pretrained import MissingTensorsError, build_on_meta, read_whole
from policies.weights.fitting import check_dtypes, describe_left_over, left_over, untie_what_differs
from policies.weights.stored import SafetensorsTensors, weight_files
from policies.weights.tensor_names import find_stored, is_stored_as_named, names_in_files
from utils.compat import attention_of_capped_scores
from utils.errors import ConfigError
from utils.hub import check_on_hub, explain
from utils.processor_type import Processor
from utils.wording import plural


def read_model_config(settings: str) -> PretrainedConfig:
    """The config.json in a folder or on the hub.

    Raises:
        ConfigError: if none can be read without code that came with it, or it describes quantized weights.
    """
    if not Path(settings).expanduser().is_dir():
        check_on_hub("--base", settings, "model")
    try:
        config = AutoConfig.from_pretrained(settings, trust_remote_code=False)
    except Exception as error:
        raise describes_no_model(settings, error) from error
    forget_mxfp4(config)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{settings} describes quantized weights; give the full-precision model with --base")
    return config


def describes_no_model(settings: str, error: Exception) -> ConfigError:
    return ConfigError(f"{settings} describes no model ({explain(error)}); give its model with --base")


def build_blueprint(
    settings: str, auto_model: Any, *, num_rows: int | None = None, rope: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """The model that a config.json describes, its parameters in fp32 on the meta device and its buffers real.

    Args:
        settings: a folder or hub name.
        auto_model: the transformers class to build it with.
        num_rows: of the embeddings, if the checkpoint has another number of them.
        rope: values of config.json to put in the place of its own (`policies.config_overrides`).

    Raises:
        ConfigError: if there is none that can be built without code that came with it.
    """
    config = read_model_config(settings)
    override(config, rope or {})
    try:
        model = build_on_meta(auto_model, config, torch.float32, attention=attention_of_capped_scores(config))
    except Exception as error:
        raise describes_no_model(settings, error) from error
    if num_rows is not None and num_rows != model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(num_rows, mean_resizing=False)  # the checkpoint has values for the new rows
    return model


def blueprint_of(source: ModelSource, auto_model: Any) -> tuple[PreTrainedModel | None, list[str]]:
    """The model of a full checkpoint, with as many embeddings as the checkpoint has, and lines to print.

    The model is None for a folder in Hugging Face format whose files name or fuse tensors unlike the model: only
    `load_pretrained` reads such a folder.

    Raises:
        ConfigError: if the checkpoint's tensors are not this model's.
    """
    model = build_blueprint(source.settings, auto_model)
    if isinstance(source.tensors, SafetensorsTensors) and not is_stored_as_named(model):
        return None, []
    (embedding,) = [n for n, m in model.named_modules() if m is model.get_input_embeddings()]
    entry = source.tensors.index.get(f"{embedding}.weight")
    if entry and entry.shape[0] != model.get_input_embeddings().num_embeddings:
        model = build_blueprint(source.settings, auto_model, num_rows=entry.shape[0])
    return model, fit(model, source.tensors, str(source.path), source.settings)


def fill_blueprint(model: PreTrainedModel, tensors: StoredTensors, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Give a blueprint its values, for inference.

    Args:
        dtype: of floating-point tensors; None leaves each as it is stored.
    """
    stored_as = find_stored(model, tensors.index)
    for names in names_in_files(model).values():
        if names[0] not in stored_as:
            continue
        value = tensors.read(stored_as[names[0]])
        value = value.to(dtype) if dtype and value.is_floating_point() else value
        if isinstance(model.get_parameter_or_buffer(names[0]), nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        # Under all of its names, so that a tied weight stays one tensor.
        for name in names:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, value)
    return model.eval()


def load_full(
    source: ModelSource, auto_model: Any, dtype: torch.dtype, say: Callable[[str], object]
) -> PreTrainedModel:
    """The model of a full checkpoint or of a folder in Hugging Face format, floating-point tensors in `dtype`.

    Args:
        say: called with lines to print.

    Raises:
        ConfigError: if the tensors are not this model's.
    """
    model, notes = blueprint_of(source, auto_model)
    for note in notes:
        say(note)
    if model is None:
        return load_pretrained(source.settings, auto_model, dtype).eval()
    return fill_blueprint(model, source.tensors, dtype)


def fit(model: PreTrainedModel, tensors: StoredTensors, path: str, settings: str) -> list[str]:
    """Check that the tensors are this model's. Weights that it ties and the files hold with other values are untied.

    Returns:
        Lines to print: also about tensors in such files that the model has no place for. A checkpoint has none.

    Raises:
        ConfigError: if one is missing, of another shape, of numbers that the model does not compute with, or too many.
    """
    remedy = f"is it a checkpoint of the model in {settings}? (--base names another)"
    try:
        notes = untie_what_differs(model, tensors)
        check_dtypes(model, tensors.index, converts=False)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    buffers = dict(model.named_buffers())
    for name, names in names_in_files(model).items():
        found = next((n for n in names if n in tensors.index), None)
        if found is None and name not in buffers:
            raise ConfigError(f"{path} lacks {name}; {remedy}")
        wanted = tuple(model.get_parameter_or_buffer(name).shape)
        if found and tensors.index[found].shape != wanted:
            shape = list(tensors.index[found].shape)
            raise ConfigError(f"{path}: {found} is {shape}, and should be {list(wanted)}; {remedy}")
    strangers = left_over(model, tensors.index)
    if strangers and not isinstance(tensors, SafetensorsTensors):
        raise ConfigError(f"{path} holds {strangers[0]} ({len(strangers)} such) that the model does not have; {remedy}")
    return [*notes, describe_left_over(strangers, model)] if strangers else notes


def open_base(name: str) -> SafetensorsTensors:
    """The safetensors files of a model, from a folder or the hub.

    Raises:
        ConfigError: if there are none.
    """
    if not Path(name).expanduser().is_dir():
        _check_is_no_lost_folder(name)
        check_on_hub("--base", name, "model")
    try:
        name = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        paths = weight_files(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the base model {name} cannot be read ({explain(error)}); name another by --base") from error
    if not paths:
        raise ConfigError(f"the base model {name} has no safetensors files; give one that has with --base")
    return SafetensorsTensors(paths)


def _check_is_no_lost_folder(name: str) -> None:
    """Refuse a path without a folder, which libraries would take for a name on the hub."""
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"the base model {name} is not there; give the folder where it is now with --base")


def load_tokenizer(settings: str) -> Processor:
    """The tokenizer in a folder or on the hub; the processor, if there is one for images.

    Raises:
        ConfigError: if none can be read without code that came with it.
    """
    if has_processor(settings):
        return read_processor(settings, settings)
    try:
        return read_tokenizer(settings)
    except Exception as error:
        raise ConfigError(f"no tokenizer can be read from {settings} ({explain(error)}); copy it there") from error


def load_pretrained(
    name: str,
    auto_model: Any,
    dtype: torch.dtype | str,
    rope: Mapping[str, Any] | None = None,
    new_parts: Collection[str] = (),
) -> PreTrainedModel:
    """A model from a Hugging Face folder or the hub, on the CPU.

    Args:
        rope: as of `build_blueprint`.
        new_parts: modules that an adapter has whole, so the files need not have them.

    Raises:
        ConfigError: if it cannot be loaded whole.
    """
    _check_is_no_lost_folder(name)
    try:
        attention = attention_of_capped_scores(AutoConfig.from_pretrained(name, trust_remote_code=False))
        return read_whole(auto_model, name, dtype, attention=attention, rope=rope, new_parts=new_parts)[0]
    except MissingTensorsError as error:
        raise ConfigError(
            f"the model {name} lacks {error.names[0]} ({plural(len(error.names), 'tensor')}); name another by --base"
        ) from error
    except Exception as error:
        raise ConfigError(f"the model {name} cannot be loaded ({explain(error)}); name another by --base") from error
