"""The model of a run as its config.json describes it, still without weights.

policies/weights/materialise.py reads those last, when every rank knows its part of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from configs.training import TrainConfig
from policies.mxfp4 import forget_mxfp4
from policies.pretrained import build_on_meta
from policies.rope_scaling import check_is_scaled
from policies.wrapping import num_known_ids
from utils.compat import attention_of_capped_scores, caps_scores, has_sinks
from utils.errors import ConfigError
from utils.hub import check_on_hub, explain

_NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
MOST_LAYERS = 10_000  # building more takes minutes, and no model has them
_PICKLED = ("*.bin", "*.pt", "*.pth")
_NO_WEIGHTS = re.compile(r"optimizer|scheduler|scaler|rng_state|training_args|recipe_state")  # of training elsewhere


def _where_a_model_is(folder: Path) -> str:
    """A remedy for a folder without a model, as a clause."""
    if (folder / "model" / "config.json").is_file():
        return f"it is a run's folder: give {folder / 'model'}"
    for adapter in (folder, folder / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            return f"to train its adapter on, give the base model, and --use_peft --from_peft_checkpoint {adapter}"
    if any(folder.glob("consolidated.*")):
        return "consolidated.* are Meta's or Mistral's own files; give a folder with the model's Hugging Face files"
    if any(folder.glob("*.gguf")):
        return "GGUF files are for inference; give a folder with the full-precision model's Hugging Face files"
    return "give the folder that save_pretrained wrote"


def load_model_config(train: TrainConfig, *, needs_weights: bool = True) -> PretrainedConfig:
    """The model's config.json, before any weight is read.

    Args:
        needs_weights: refuse a folder that has none. A plan needs none.

    Raises:
        ConfigError: if there is none, or its weights cannot be trained.
    """
    folder = Path(train.model_name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"--model_name: {folder} has no config.json; {_where_a_model_is(folder)}")
    if not folder.is_dir():
        check_on_hub("--model_name", train.model_name, "model")
    try:
        model_config = AutoConfig.from_pretrained(train.model_name, trust_remote_code=train.trust_remote_code)
    except Exception as error:
        raise ConfigError(f"--model_name: {train.model_name!r} cannot be read ({explain(error)})") from error
    forget_mxfp4(model_config)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(
            f"--model_name: the weights of {train.model_name} are stored quantized, and such weights cannot be "
            "trained; give the full-precision model (--quantization 4bit or 8bit stores it so)"
        )
    _check_values(train.model_name, model_config)
    model_config.return_dict = True  # outputs are asked for by name
    if folder.is_dir() and not train.random_weights:
        _check_weights(folder, model_config, needed=needs_weights)
    return model_config


def _check_values(model_name: str, model_config: PretrainedConfig) -> None:
    """Refuse numbers that torch would compute nonsense with, or refuse in the first forward pass.

    Raises:
        ConfigError: for the first of them.
    """
    # A text model's get_text_config() is the config itself.
    for config in {id(c): c for c in (model_config, model_config.get_text_config())}.values():
        for name, value in config.to_dict().items():
            wanted = _what_is_wanted(config, name, value)
            if wanted:
                shown = "null" if value is None else value
                raise ConfigError(
                    f"--model_name: config.json of {model_name} says {name} {shown}, and {wanted}; correct it there"
                )


def _what_is_wanted(config: PretrainedConfig, name: str, value: Any) -> str:
    """What a value of config.json has to be, as a clause; empty if it is."""
    # type() and not isinstance(): a bool is an int to Python.
    is_number = type(value) in (int, float)
    if "dropout" in name or name.endswith(("pdrop", "layerdrop")):
        if is_number and not 0 <= value < 1:
            return "the probability of dropping must be at least 0 and less than 1"
        # Where null is the family's default (classifier_dropout), it means another setting's value.
        if value is None and type(getattr(type(config)(), name, None)) in (int, float):
            return "a probability is a number"
    if name == "dtype" and value is not None and not _is_dtype_of_weights(config.dtype):
        return "it must name the dtype of weights, such as bfloat16"
    if is_number and name.endswith(("_eps", "_epsilon")) and not 0 <= value < 1:
        return "it must be at least 0 and less than 1"
    if name in _NUMBERS_OF_LAYERS and (type(value) is not int or not 1 <= value <= MOST_LAYERS):
        return f"it must be a whole number from 1 to {MOST_LAYERS:,}"
    return ""


def _is_dtype_of_weights(dtype: Any) -> bool:
    return dtype.is_floating_point if isinstance(dtype, torch.dtype) else isinstance(dtype, dict)  # one of each part


def _check_weights(folder: Path, model_config: PretrainedConfig, *, needed: bool) -> None:
    if any(folder.glob("*.safetensors")):
        return
    if pickled := [file for pattern in _PICKLED for file in sorted(folder.glob(pattern))]:
        files = [str(file) for file in pickled if not _NO_WEIGHTS.match(file.name)]
        model_class = (model_config.architectures or ["AutoModel"])[0]
        convert = (
            f"from transformers import {model_class} as M; M.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
        if not any(Path(file).match("pytorch_model*.bin") for file in files):  # the names that transformers looks for
            convert = (
                f"import torch, safetensors.torch as s; s.save_file({{n: t.clone() for f in {files} for n, t in "
                f"torch.load(f, 'cpu', weights_only=True).items()}}, '{folder}/model.safetensors', {{'format': 'pt'}})"
            )
        if files:
            raise ConfigError(
                f"--model_name: {folder} holds pickled weights only, which can run code when read; if you trust them, "
                f'convert them: python -c "{convert}"'
            )
    if needed:
        raise ConfigError(
            f"--model_name: {folder} has no *.safetensors weights; download or copy them whole "
            "(--random_weights trains from config.json alone)"
        )


def build_model(
    train: TrainConfig, model_config: PretrainedConfig, auto_model: Any, dtype: torch.dtype
) -> PreTrainedModel:
    """The model with its parameters, in `dtype`, on the meta device (see `policies.pretrained.build_on_meta`).

    Args:
        auto_model: the transformers class that builds such models, of the task.

    Raises:
        ConfigError: if the config does not describe a model that can be built.
    """
    attention = attention_settings(train, model_config)
    try:
        model = build_on_meta(
            auto_model, model_config, dtype, attention=attention, trust_remote_code=train.trust_remote_code
        )
    except Exception as error:
        raise explain_failed_load(train, error) from error
    model.name_or_path = model.config._name_or_path = train.model_name
    if train.rope_scaling is not None:
        check_is_scaled(model, train.model_name)
    return model


def attention_settings(train: TrainConfig, model_config: PretrainedConfig) -> dict[str, Any]:
    """The arguments about attention for `from_config` and `from_pretrained`.

    Raises:
        ConfigError: if SDPA is asked for and cannot compute this model's attention.
    """
    if not train.use_fast_kernels or has_sinks(model_config):  # SDPA has no sinks, and is replaced anyway
        return attention_of_capped_scores(model_config)
    if caps_scores(model_config):
        raise ConfigError(
            f"--use_fast_kernels: SDPA cannot soft-cap attention scores, as {train.model_name} does "
            "(attn_logit_softcapping); leave the flag out"
        )
    return {"attn_implementation": "sdpa"}


def explain_failed_load(train: TrainConfig, error: Exception) -> ConfigError:
    """The refusal for a library's error in building or reading the model."""
    flag = "--use_fast_kernels" if "attention" in str(error) and train.use_fast_kernels else "--model_name"
    return ConfigError(f"{flag}: {train.model_name} could not be loaded ({explain(error)})")


def grow_embeddings(
    model: PreTrainedModel, needed: int, *, use_peft: bool, new_tokens: Sequence[int] = ()
) -> list[str]:
    """Give the model embeddings for tokens that it does not have. It never shrinks.

    Args:
        needed: rows that the tokenizer needs (`data.processors.tokenizer_loading.num_rows_needed`).
        new_tokens: the ids of the tokens of --add_special_tokens, whose embeddings an adapter trains.

    Returns:
        Lines to print.

    Raises:
        ConfigError: for new tokens that the head lacks though there are embeddings for them, with an adapter that would
            not hold the new rows, and for embeddings of two tables.
    """
    rows = num_known_ids(model)
    head: Any = model.get_output_embeddings()
    if head is not None and any(head.weight.shape[0] <= token < rows for token in new_tokens):
        raise ConfigError(
            f"--add_special_tokens: the head of {model.config.model_type} models knows {head.weight.shape[0]} tokens, "
            f"fewer than their {rows} embeddings, so it could not predict more; leave it out"
        )
    if needed <= rows:
        return []
    if use_peft and not set(range(rows, needed)) <= set(new_tokens):
        raise ConfigError(
            f"--tokenizer_name: the tokenizer has {needed} tokens, the model {rows}, and an adapter holds the "
            "embeddings of --add_special_tokens alone; name them there, or train without --use_peft"
        )
    if getattr(model.config, "additional_vocab_size", 0):
        raise ConfigError(
            f"--tokenizer_name: the tokenizer has {needed} tokens, the model {rows}, and embeddings of two tables "
            f"(additional_vocab_size of {model.config.model_type} models) are not grown; give the model's own tokenizer"
        )
    model.resize_token_embeddings(needed, mean_resizing=False)  # shapes only; policies.weights.materialise gives values
    return [f"embeddings grown from {rows} to {needed} rows: the tokenizer has more tokens than the model"]
