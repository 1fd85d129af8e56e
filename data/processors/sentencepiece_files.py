"""Tokenizers that are a sentencepiece model and no tokenizer.json, as T5's and Llama 2's folders may hold them.

transformers converts them, with two more packages. Without these it would take them for tiktoken's, and
without tokenizer_config.json it converts some in a general way, which splits words unlike the model that was trained.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import cached_file

from utils.errors import ConfigError, in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
TEKKEN = "tekken.json"
_PROBE = "Anna has 3 red apples, and Tom's are green."


def find_sentencepiece(name: str, flag: str) -> Path | None:
    """The sentencepiece model of a folder or of a model on the hub, if there is no tokenizer.json.

    Raises:
        ConfigError: if the package that reads it is missing, or there is a tekken.json alone.
    """
    if find_file(name, "tokenizer.json") is not None:
        return None
    files = (Path(file) for file_name in FILES if (file := find_file(name, file_name)) is not None)
    # Its first field is a list of pieces, in protobuf's numbering 0x0A; tiktoken's files are text.
    model = next((file for file in files if file.read_bytes()[:1] == b"\n"), None)
    if model is not None and not (_is_installed("sentencepiece") and _is_installed("google.protobuf")):
        raise ConfigError(
            f"{flag}: the tokenizer of {name!r} is {model.name}, a sentencepiece model, and the packages that read it "
            "are missing; pip install sentencepiece protobuf"
        )
    if model is None and find_file(name, TEKKEN) is not None:
        raise ConfigError(
            f"{flag}: the tokenizer of {name!r} is {TEKKEN}, which only mistral-common reads; copy the model's "
            "tokenizer.json and tokenizer_config.json there, or name a folder or hub name that has them with "
            "--tokenizer_name"
        )
    return model


def find_file(name: str, file_name: str) -> str | None:
    """The path of a file in a folder or of a model on the hub; None if there is none."""
    try:
        return cached_file(name, file_name, _raise_exceptions_for_missing_entries=False)
    except Exception:  # loading the tokenizer will say what is wrong
        return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # there is no google either
        return False


def check_conversion(tokenizer: PreTrainedTokenizerBase, model: Path, name: str, flag: str) -> None:
    """Check that the converted tokenizer splits a plain sentence as sentencepiece does.

    Raises:
        ConfigError: if not, or if sentencepiece cannot read its model.
    """
    sentencepiece = importlib.import_module("sentencepiece")
    try:
        own = sentencepiece.SentencePieceProcessor(str(model)).encode(_PROBE, out_type=str)
    except Exception as error:  # RuntimeError, OSError or whatever its C++ code raises
        raise ConfigError(
            f"{flag}: {model.name} of {name!r} is no sentencepiece model that can be read ({in_one_line(error)}); copy "
            "the file again"
        ) from error
    if tokenizer.tokenize(_PROBE) != own:
        missing = [file for file in ("tokenizer_config.json", "tokenizer.json") if find_file(name, file) is None]
        reason = "since it does not know whose it is" if len(missing) > 1 else "whatever tokenizer_config.json says"
        raise ConfigError(
            f"{flag}: transformers splits words unlike {model.name} of {name!r}, a sentencepiece model, {reason}; copy "
            f"the model's {' or '.join(missing)} there, too"
        )
