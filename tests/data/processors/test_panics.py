"""A tokenizer.json that makes the tokenizer's Rust code panic is refused; `except Exception` lets a panic through."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.training import TrainConfig
from data.processors.tokenizer_loading import load_tokenizer
from data.tokens.long_texts import encode_texts
from data.tokens.loss_mask import encode_plainly
from data.tokens.special_text import SpecialTokens
from tests.helpers.refusals import Bench
from tests.helpers.tokenizers_of_kinds import byte_level
from utils.errors import ConfigError
from utils.rust_panics import RustPanicError

EMPTY = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "an empty pattern": ({"normalizer": EMPTY}, "the pattern that its normalizer replaces is empty"),
    "an empty expression": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, EMPTY | {"pattern": {"Regex": ""}}]}},
        "the pattern that its normalizer replaces is empty",
    ),
    "chunks of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "its Rust code panicked: chunk size must be non-zero",
    ),
    "no such special token": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "its Rust code panicked: no entry found",
    ),
    "a broken map": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "its Rust code panicked: Precompiled",
    ),
}


def change(source: Path, folder: Path, /, **parts: Any) -> Path:
    shutil.copytree(source, folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(settings | parts))
    return folder


@pytest.mark.parametrize("case", CHANGES)
def test_a_tokenizer_that_panics_is_refused(case: str, tiny_model: Path, tmp_path: Path) -> None:
    parts, reason = CHANGES[case]
    name = str(change(tiny_model, tmp_path / "model", **parts))
    with pytest.raises(ConfigError, match=rf"--model_name: no tokenizer could be loaded from .*{reason}"):
        load_tokenizer(TrainConfig(model_name=name))


def test_a_run_is_refused_in_one_line(bench: Bench, tmp_path: Path) -> None:
    model = change(bench.model, tmp_path / "model", normalizer=EMPTY)
    assert "the pattern that its normalizer replaces is empty" in bench.refused("--model_name", str(model))


def test_a_tokenizer_that_lacks_letters_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    """Such as one of DNA: it need not encode other texts."""
    model = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"A": 0, "C": 1, "<unk>": 2}}
    name = str(change(tiny_model, tmp_path / "model", model=model, pre_tokenizer={"type": "Whitespace"}))
    assert load_tokenizer(TrainConfig(model_name=name)).encode("A C A")[-3:] == [0, 1, 0]


def test_a_panic_while_data_is_tokenized_is_an_error() -> None:
    from tokenizers.normalizers import Replace

    tokenizer = copy.deepcopy(byte_level())
    tokenizer.backend_tokenizer.normalizer = Replace("", "x")
    special = SpecialTokens.of(tokenizer)
    with pytest.raises(RustPanicError, match="its Rust code panicked"):
        list(encode_texts(["some text"], tokenizer, special))
    with pytest.raises(RustPanicError, match="its Rust code panicked"):
        list(encode_texts([special.as_text(f"some {tokenizer.eos_token} text")], tokenizer, special))
    with pytest.raises(RustPanicError, match="its Rust code panicked"):
        encode_plainly(tokenizer, special, text=["some text"])
