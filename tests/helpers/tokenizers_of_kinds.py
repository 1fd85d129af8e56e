"""Tokenizers of the kinds that models have, trained on a few lines: they differ in what happens at a seam."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

LINES = (
    "Summarize this dialog: Anna: Hi! Bob: Hello Anna, are you there?\n---\nSummary: Anna and Bob talk.",
    "What is the capital of France? Paris. And of Peru? Lima.\n\n  Ünïcode wörds, tabs\tand 🙂 smileys.",
    "def function(argument):\n    return argument + 1  # twice twice twice",
)
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def byte_level(trim_offsets: bool = False) -> Any:
    """GPT-2's and Llama-3's kind: a word holds the space before it; offsets may leave that space out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _wrapped(tokenizer, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL))


@cache
def metaspace() -> Any:
    """Llama-2's kind: spaces become a letter before anything else, unknown letters become bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    return _wrapped(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=special))


@cache
def unigram() -> Any:
    """T5's and Gemma-1's kind. Sums of its scores are exact: else a text's start would decide which of equally good
    tokens it has."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>")
    trained = _wrapped(tokenizer, trainer)
    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    scores = [(token, round(2**10 * score) / 2**10) for token, score in model["vocab"]]
    trained.backend_tokenizer.model = models.Unigram(scores, model["unk_id"])
    return trained


@cache
def written_in_python() -> Any:
    """One without offsets."""
    return ByT5Tokenizer()


def _wrapped(tokenizer: Tokenizer, trainer: Any) -> Any:
    trainer.show_progress = False
    tokenizer.train_from_iterator(LINES * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = {
    "byte-level": byte_level,
    "byte-level, trimmed": lambda: byte_level(trim_offsets=True),
    "metaspace": metaspace,
    "unigram": unigram,
    "python": written_in_python,
}
