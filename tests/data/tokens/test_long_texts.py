"""Long texts: the tokens of windows are those of the whole, and host memory stays bounded."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.tokens import long_texts
from data.tokens.long_texts import encode_texts
from data.tokens.loss_mask import encode_plainly, tokenize_spans
from data.tokens.spans import TextSpan
from data.tokens.special_text import SpecialTokens
from tests.helpers.processes import ProcessGroup
from tests.helpers.tokenizers_of_kinds import KINDS, LINES, byte_level
from utils.host_memory import peak_resident

WORDS = [*sorted({word for line in LINES for word in line.split()}), "🙂🙂", "naïve", "twicetwice", "a" * 70, "9" * 30]


def random_text(seed: int, num_words: int) -> str:
    draw = random.Random(seed)
    return "".join(
        draw.choice(WORDS) + draw.choice([" ", " ", " ", "  ", "\n", "\n\n", "\t", ""]) for _ in range(num_words)
    )


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "CALL_CHARACTERS", 1800)
    monkeypatch.setattr(long_texts, "WINDOW_CHARACTERS", 900)
    monkeypatch.setattr(long_texts, "OVERLAP_CHARACTERS", 300)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_windows_are_those_of_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    # A tokenizer that writes a space before every text cuts a run of one letter elsewhere, if it fills a call.
    runs = [] if kind == "metaspace" else ["a" * 5000, " " * 3000]
    texts = ["", "Short.", *(random_text(seed, 800) for seed in range(12)), *runs, "Short."]
    for text, encoded in zip(texts, encode_texts(texts, tokenizer, SpecialTokens.of(tokenizer)), strict=True):
        assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_longer_than_the_overlap_gets_no_tokens_of_its_windows(kind: str) -> None:
    """Where windows did not agree, a tokenizer that writes a space before every text wrote one into the run."""
    tokenizer, draw = KINDS[kind](), random.Random(0)
    for letter in [" ", "\n", "-", "a", "9", "字"]:
        runs = [letter * draw.randrange(350, 700) for _ in range(8)]
        text = "".join(run + random_text(seed, 60) for seed, run in enumerate(runs))
        ((ids, *_),) = encode_texts([text], tokenizer, SpecialTokens.of(tokenizer))
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"], repr(letter)


def test_windows_that_see_parts_of_a_run_add_no_token_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pairs and one odd letter Unigram may write that one anywhere: one window before the join, the next behind."""
    for name, size in (("CALL", 3600), ("WINDOW", 900), ("OVERLAP", 300)):
        monkeypatch.setattr(long_texts, f"{name}_CHARACTERS", size)
    letters = [letter for letter in sorted(set("▁".join(WORDS))) if letter != "-"]
    for seed in range(40):
        draw = random.Random(seed)
        scores = [("<unk>", 0.0), *((letter, draw.uniform(-6, -5)) for letter in letters)]
        scores += [(run, draw.uniform(-5.3, -5.2)) for run in ("-", "--")]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(scores, 0)), unk_token="<unk>")
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        text = "".join("-" * draw.randrange(350, 700) + random_text(number, 60) for number in range(8))
        ((ids, *_),) = encode_texts([text], tokenizer, SpecialTokens.of(tokenizer))
        assert sorted(ids.tolist()) == sorted(tokenizer(text, add_special_tokens=False)["input_ids"]), seed


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
def test_the_labels_of_a_long_text_are_those_of_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [TextSpan(random_text(seed, 300), bool(seed % 2)) for seed in range(6)]
    in_windows = tokenize_spans([parts], KINDS[kind]())
    monkeypatch.setattr(long_texts, "CALL_CHARACTERS", 10**6)
    whole = tokenize_spans([parts], KINDS[kind]())
    assert np.array_equal(in_windows.input_ids, whole.input_ids)
    assert np.array_equal(in_windows.labels, whole.labels)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_a_long_source_of_an_encoder_decoder_goes_in_windows_too(kind: str) -> None:
    tokenizer, texts = KINDS[kind](), ["Short.", random_text(3, 800), random_text(4, 700)]
    wanted = tokenizer(texts)["input_ids"]
    assert [ids.tolist() for ids in encode_plainly(tokenizer, text=texts)] == wanted


def test_windows_go_to_the_tokenizer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they took one core: a row of 10 MB took 11 s, and a stream of it 38."""
    calls, call = list[int](), long_texts._call

    def counted(texts: list[str], tokenizer: object) -> object:
        calls.append(len(texts))
        return call(texts, tokenizer)

    monkeypatch.setattr(long_texts, "_call", counted)
    tokenizer, text = byte_level(), " ".join(LINES) * 3000
    (encoded,) = encode_texts([text], tokenizer, SpecialTokens.of(tokenizer))
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert calls[0] == 8
    assert len(calls) <= 2 + len(text) // 2**18


def tokenize_long_row(num_characters: int, limit_mib: int) -> None:
    text = (" ".join(LINES) * (num_characters // 200))[:num_characters]
    before = peak_resident()
    tokenize_spans([[TextSpan(text, True)]], byte_level())
    used_mib = (peak_resident() - before) / 2**20
    assert used_mib < limit_mib, f"{used_mib:.0f} MiB"


def test_a_long_row_takes_little_memory(process_group: ProcessGroup) -> None:
    """Two million characters took 330 MiB in one call."""
    process_group.train(partial(tokenize_long_row, 2_000_000, 150), world_size=1)
