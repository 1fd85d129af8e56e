"""Mistral's folders, which hold tekken.json next to tokenizer.json or alone."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpointing.exporting.blueprint import load_tokenizer as load_exported
from configs.training import TrainConfig
from data.processors.tokenizer_loading import load_tokenizer, num_rows_needed
from utils.errors import ConfigError

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("mistral_common") is None, reason="mistral-common is not installed: pip install it"
)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model's folder as Mistral lays it out, with mistral-common's own tekken.json if that is installed."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, tmp_path)
    config = json.loads((tiny_model / "config.json").read_text()) | {"model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = importlib.util.find_spec("mistral_common")
    place = Path(str(found.origin)).parent / "data" if found else None
    tekken = next(place.glob("tekken*.json"), None) if place else None
    (tmp_path / "tekken.json").write_bytes(tekken.read_bytes() if tekken else b"{}")
    return tmp_path


def test_tokenizer_json_is_read_where_it_is(folder: Path, tiny_model: Path) -> None:
    tokenizer, wanted = load_tokenizer(TrainConfig(model_name=str(folder))), AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer("Anna has 3 red apples.")["input_ids"] == wanted("Anna has 3 red apples.")["input_ids"]
    assert num_rows_needed(tokenizer) == num_rows_needed(wanted)
    assert load_exported(str(folder)).vocab_size == wanted.vocab_size


@needs_package
def test_mistral_common_would_have_been_taken_instead(folder: Path) -> None:
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "MistralCommonBackend"


def test_tekken_json_alone_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"is tekken\.json, which only mistral-common reads; copy .* tokenizer\.json"):
        load_tokenizer(TrainConfig(model_name=str(folder)))


def test_a_line_tells_of_a_pattern_that_splits_words_unlike_mistrals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers warns of it, where no one sees it in a run's lines."""
    words = {"</s>": 0, "<unk>": 1} | {f"w{number}": number for number in range(2, 100_002)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "transformers_version": "4.50.0"}))
    load_tokenizer(TrainConfig(model_name=str(tmp_path)))
    assert "splits words by a pattern that transformers calls wrong" in capsys.readouterr().out
    mended = AutoTokenizer.from_pretrained(tmp_path, mistral_format=False, fix_mistral_regex=True)
    mended.save_pretrained(tmp_path / "mended")
    shutil.copy(tmp_path / "config.json", tmp_path / "mended")
    load_tokenizer(TrainConfig(model_name=str(tmp_path / "mended")))
    assert "splits words" not in capsys.readouterr().out
