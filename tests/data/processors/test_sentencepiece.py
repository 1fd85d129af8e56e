"""Model folders whose tokenizer is a sentencepiece model alone."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.training import TrainConfig
from data.processors.tokenizer_loading import load_tokenizer
from tests.helpers import random_pairs
from tests.helpers.processes import ProcessGroup
from tests.helpers.seq2seq_models import make_model
from tools.make_tiny_model import DEFAULT_DATA, read_texts
from utils.errors import ConfigError

TEXT = "Olga: Is it 3? Tom can't come, sorry."
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("sentencepiece") is None, reason="sentencepiece is not installed: pip install it"
)


def unigram(file: Path) -> Any:
    """A sentencepiece model of the samples with T5's special tokens, written to `file`; its own reader."""
    return _train(file, "unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def bpe(file: Path) -> Any:
    """The same with Llama's."""
    return _train(file, "bpe", unk_id=0, bos_id=1, eos_id=2, pad_id=-1, byte_fallback=True)


def _train(file: Path, kind: str, **options: Any) -> Any:
    import sentencepiece

    texts = (text for text in read_texts(DEFAULT_DATA))
    prefix = str(file.with_suffix(""))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=prefix, vocab_size=500, model_type=kind, minloglevel=9, **options
    )
    Path(f"{prefix}.vocab").unlink()
    shutil.move(f"{prefix}.model", file)
    return sentencepiece.SentencePieceProcessor(str(file))


@pytest.mark.parametrize(
    ("name", "missing"), [("tokenizer.model", "sentencepiece"), ("spiece.model", "google.protobuf")]
)
def test_without_a_package_its_name_is_said(
    name: str, missing: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would take the model for tiktoken's and name that package."""
    (tmp_path / name).write_bytes(b"\n\x07\n\x05<unk>")  # how such a model begins: with its first piece
    shutil.copy(tiny_model / "config.json", tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(
        ConfigError, match=f"--model_name: .* is {name}, a sentencepiece model, .* pip install sentencepiece protobuf"
    ):
        load_tokenizer(TrainConfig(model_name=str(tmp_path)))


@pytest.mark.slow
@needs_package
def test_a_t5_with_its_spiece_model_alone_trains(tmp_path: Path, process_group: ProcessGroup) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    make_model("t5").save_pretrained(model)
    own = unigram(model / "spiece.model")
    tokenizer = load_tokenizer(TrainConfig(model_name=str(model)))
    assert tokenizer(TEXT)["input_ids"] == [*own.encode(TEXT), own.eos_id()]
    assert len(tokenizer) == own.vocab_size() + 100  # T5's sentinels
    flags = ["--model_name", str(model), "--output_dir", str(run), "--num_workers_dataloader", "0"]
    flags += ["--dataset", f"{random_pairs.__file__}:get_custom_dataset", "--run_validation", "False"]
    process_group.train([*flags, "--max_train_step", "1"], 1)
    assert AutoTokenizer.from_pretrained(run / "model")(TEXT)["input_ids"] == [*own.encode(TEXT), own.eos_id()]


@needs_package
def test_a_llama_needs_the_settings_that_say_how_its_model_is_read(tiny_model: Path, tmp_path: Path) -> None:
    """Without them transformers would put no space before the first word, and train on other tokens."""
    shutil.copy(tiny_model / "config.json", tmp_path)
    own = bpe(tmp_path / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"splits words unlike tokenizer\.model .*; copy .*tokenizer_config\.json"):
        load_tokenizer(TrainConfig(model_name=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"whatever tokenizer_config\.json says; copy the model's tokenizer\.json there"
    ):
        load_tokenizer(TrainConfig(model_name=str(tmp_path)))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(TrainConfig(model_name=str(tmp_path)))
    assert tokenizer(TEXT)["input_ids"] == [own.bos_id(), *own.encode(TEXT)]


@needs_package
@pytest.mark.parametrize("train", [unigram, bpe])
def test_a_damaged_model_is_refused(train: Callable[[Path], Any], tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    file = tmp_path / "tokenizer.model"
    train(file)
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ConfigError, match="--model_name: "):
        load_tokenizer(TrainConfig(model_name=str(tmp_path)))
