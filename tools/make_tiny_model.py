"""Build a tiny Llama model and its tokenizer, both from scratch, from the sample dialogues.

    python -m tools.make_tiny_model --out DIR [--data datasets/samples/dialogue_summary]

Nothing is downloaded: the weights are random (seeded) and the tokenizer is trained on the samples. So the project can
be tried and tested on a machine without network and GPU. With the default sizes the model learns to summarize the
samples within two minutes on two CPU cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before the imports below, which take a while.
if __name__ == "__main__":
    from tools.beginning import begin_tool

    begin_tool()

import fire
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.ending import status_of
from utils.errors import ConfigError
from utils.umask import follow_umask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, UNK = "<s>", "</s>", "<unk>"
DEFAULT_DATA = Path(__file__).resolve().parent.parent / "datasets/samples/dialogue_summary"


def read_texts(data: Path) -> Iterator[str]:
    """The texts of the training samples, as prompts contain them.

    Raises:
        ConfigError: if there are none.
    """
    file = data / "train.jsonl"
    if not file.is_file():
        raise ConfigError(
            f"--data: {data} holds no train.jsonl; give a folder of dialogues and summaries, or leave it out"
        )
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            sample = json.loads(line)
            dialogue = sample["dialogue"]
            yield f"Summarize this dialog:\n{dialogue}\n---\nSummary:\n"
            yield sample["summary"]


def make_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`.

    To a byte-level tokenizer, "Anna" at the start of a line and " Anna" within a line are unrelated tokens. A model
    this small would have to learn for every name that the speaker and the person in the summary are the same. So every
    line gets a leading space, which decoding removes: a name is one token everywhere.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\n(?=\S)"), "\n ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace("\n ", "\n"), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[UNK, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    from transformers import PreTrainedTokenizerFast  # takes seconds; --help does not wait for it

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    out: Path | str,
    data: Path | str = DEFAULT_DATA,
    *,
    vocab_size: int = 2048,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    num_layers: int = 2,
    num_heads: int = 4,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int = 2048,
    rope_theta: float = 10000.0,
    tie_word_embeddings: bool = True,
    initializer_range: float = 0.05,
    seed: int = 0,
) -> Path:
    """Save the model and its tokenizer under `out`. The same arguments give the same weights.

    Args:
        num_key_value_heads: unset: as many as heads.

    Tied embeddings learn faster here: to copy a name from the dialogue, no map from input vectors to output vectors
    must be learned first.

    Raises:
        ConfigError: if the sizes do not fit each other, or there is no such data.
    """
    out = Path(out)
    heads, width = f"--num_heads {num_heads}", f"--hidden_size {hidden_size}"
    if hidden_size % (2 * num_heads):  # rotary embeddings turn pairs
        raise ConfigError(f"--num_heads: {width} must be an even multiple of {heads}")
    if num_heads % (num_key_value_heads or num_heads):
        raise ConfigError(f"--num_key_value_heads: {heads} must be a multiple of {num_key_value_heads}")
    import torch  # takes seconds; --help and refusals do not wait for it
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(read_texts(Path(data)), vocab_size)
    tokenizer.model_max_length = max_position_embeddings
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads or num_heads,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # docs/decisions.md, "A pad token is never added"
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    follow_umask(out)
    return out


if __name__ == "__main__":
    sys.exit(status_of(lambda: fire.Fire(make_tiny_model, serialize=str)))
