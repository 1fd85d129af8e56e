"""What a checkpoint's tensors make up: the model without values, and the names under which files hold it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from checkpointing.exporting.sources import Source
from checkpointing.exporting.stored import SafetensorsTensors, StoredTensors
from policies.weights import weight_files
from utils.compat import attention_of_capped_scores
from utils.errors import ConfigError
from utils.hub import check_on_hub, explain


def build_blueprint(settings: str, *, num_rows: int | None = None) -> Any:
    """The model that a config.json describes, its parameters in fp32 on the meta device and its buffers real.

    Args:
        settings: a folder or hub name. num_rows: of the embeddings, where the checkpoint has another number of them.

    Raises:
        ConfigError: where there is none that can be built without code that came with it.
    """
    if not Path(settings).expanduser().is_dir():
        check_on_hub("--base", settings, "model")
    try:
        config = AutoConfig.from_pretrained(settings, trust_remote_code=False)
        auto_model: Any = AutoModelForCausalLM
        if type(config) not in AutoModelForCausalLM._model_mapping:
            auto_model = getattr(transformers, config.architectures[0])
        with init_empty_weights(include_buffers=False):
            build = getattr(auto_model, "from_config", None) or auto_model._from_config
            model = build(config, dtype=torch.float32, **attention_of_capped_scores(config))
    except Exception as error:
        raise ConfigError(f"{settings} describes no model ({explain(error)}); give its model with --base") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{settings} describes quantized weights; give the full-precision model with --base")
    if num_rows is not None and num_rows != model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    model.tie_weights()  # accelerate makes a new parameter of every one, and so unties them
    if model.can_generate():
        with suppress(OSError):  # without generation_config.json, the one made from config.json stays
            model.generation_config = GenerationConfig.from_pretrained(settings)
    return model


def blueprint_of(source: Source) -> Any:
    """The model of a full checkpoint, with as many embeddings as the checkpoint has, if only it knows.

    None for a folder in Hugging Face format whose files name or fuse tensors unlike the model: `load_pretrained` alone
    reads that.

    Raises:
        ConfigError: where the checkpoint's tensors are not this model's.
    """
    model = build_blueprint(source.settings)
    if isinstance(source.tensors, SafetensorsTensors) and not is_stored_as_named(model):
        return None
    (embedding,) = [n for n, m in model.named_modules() if m is model.get_input_embeddings()]
    entry = source.tensors.index.get(f"{embedding}.weight")
    if entry and entry.shape[0] != model.get_input_embeddings().num_embeddings:
        model = build_blueprint(source.settings, num_rows=entry.shape[0])
    check_fit(model, source.tensors, str(source.path), source.settings)
    return model


def aliases(model: Any) -> dict[str, list[str]]:
    """Every parameter and persistent buffer once, by the name that files have for it, with all its names."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    kept = {next((n for n in names if n not in tied), names[0]): names for names in names_of.values()}
    known = {name for names in kept.values() for name in names}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    buffers = {name: [name] for name in model.state_dict() if name not in known}
    return {name: names for name, names in (kept | buffers).items() if name not in ignored}


def find_stored(model: Any, tensors: StoredTensors) -> dict[str, str]:
    """For each of the model's names, the name under which its tensor is stored: of a shared one, any of its names."""
    stored_as: dict[str, str] = {}
    for names in aliases(model).values():
        stored = next((name for name in names if name in tensors.index), None)
        if stored is not None:
            stored_as |= dict.fromkeys(names, stored)
    return stored_as


def load_whole(model: Any, tensors: StoredTensors, dtype: torch.dtype | None = None) -> Any:
    """Give a blueprint its values; `dtype` is that of floating-point tensors, None leaves each as it is stored."""
    stored_as = find_stored(model, tensors)
    for names in aliases(model).values():
        if names[0] not in stored_as:
            continue
        value = tensors.read(stored_as[names[0]])
        value = value.to(dtype) if dtype and value.is_floating_point() else value
        if isinstance(model.get_parameter_or_buffer(names[0]), nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, value)
    return model.eval()


def load_full(source: Source, dtype: torch.dtype) -> Any:
    """The model of a full checkpoint, or of a folder in Hugging Face format; `dtype` as in `load_whole`.

    Raises:
        ConfigError: where the tensors are not this model's.
    """
    model = blueprint_of(source)
    if model is None:
        return load_pretrained(source.settings, dtype).eval()
    return load_whole(model, source.tensors, dtype)


def check_fit(model: Any, tensors: StoredTensors, path: str, settings: str) -> None:
    """Refuse tensors that are not this model's.

    Raises:
        ConfigError: for one that is missing, of another shape, or too many.
    """
    buffers = dict(model.named_buffers())
    known = set(buffers)
    remedy = f"is it a checkpoint of the model in {settings}? (--base names another)"
    for name, names in aliases(model).items():
        known |= set(names)
        found = next((n for n in names if n in tensors.index), None)
        if found is None and name not in buffers:
            raise ConfigError(f"{path} lacks {name}; {remedy}")
        wanted = tuple(model.get_parameter_or_buffer(name).shape)
        if found and tensors.index[found].shape != wanted:
            shape = list(tensors.index[found].shape)
            raise ConfigError(f"{path}: {found} is {shape}, and should be {list(wanted)}; {remedy}")
    # Older versions of transformers kept what is computed, such as rotary frequencies, and kept it elsewhere.
    computed = {name.rpartition(".")[2] for name in buffers} | {"inv_freq", "masked_bias"}
    strangers = [name for name in sorted(set(tensors.index) - known) if name.rpartition(".")[2] not in computed]
    if strangers:
        raise ConfigError(f"{path} holds {strangers[0]} ({len(strangers)} such) that the model does not have; {remedy}")


def is_stored_as_named(model: Any) -> bool:
    """Whether files hold this model's tensors as the model has them; of some families transformers renames or fuses."""
    state = model.state_dict()
    stored = revert_weight_conversion(model, dict(state))
    return set(stored) == set(state) and all(stored[name] is state[name] for name in state)


def open_base(name: str) -> SafetensorsTensors:
    """The safetensors files of a model, from a folder or the hub.

    Raises:
        ConfigError: where there are none.
    """
    if not Path(name).expanduser().is_dir():
        if name.startswith(("/", "./", "../", "~")):
            raise ConfigError(f"the base model {name} is not there; give the folder where it is now with --base")
        check_on_hub("--base", name, "model")
    try:
        name = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        paths = weight_files(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the base model {name} cannot be read ({explain(error)}); name another by --base") from error
    if not paths:
        raise ConfigError(f"the base model {name} has no safetensors files; give one that has with --base")
    return SafetensorsTensors(paths)


def load_tokenizer(settings: str) -> Any:
    """The tokenizer in a folder, or on the hub.

    Raises:
        ConfigError: where there is none that can be read without code that came with it.
    """
    try:
        return AutoTokenizer.from_pretrained(settings, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"no tokenizer can be read from {settings} ({explain(error)}); copy it there") from error


def load_pretrained(name: str, dtype: torch.dtype | str) -> Any:
    """A model from a Hugging Face folder or the hub, on the CPU.

    Raises:
        ConfigError: where it cannot be loaded whole.
    """
    try:
        auto_model: Any = AutoModelForCausalLM
        model, report = auto_model.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **attention_of_capped_scores(AutoConfig.from_pretrained(name, trust_remote_code=False)),
        )
    except Exception as error:
        raise ConfigError(f"the model {name} cannot be loaded ({explain(error)}); name another by --base") from error
    if missing := sorted(report.get("missing_keys", ())):
        raise ConfigError(f"the model {name} lacks {missing[0]} ({len(missing)} tensors); name another by --base")
    return model
