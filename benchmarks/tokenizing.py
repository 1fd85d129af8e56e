"""Time and memory for tokenizing: examples like SAMSum's through samsum_dataset's own function, or as conversations.

    python -m benchmarks.tokenizing [--rows 200000] [--vocab_size 8192] [--chat]

The examples are the sample dialogues, each with an added word that makes it unique; the tokenizer is trained on the
samples. With `--chat` each is a conversation of four turns under ChatML, for chat_dataset. Prints the seconds to read
and tokenize, also of CPU time over all threads (compare these on a machine that does other work, too), the seconds of a
second time with the cache, and the peak memory.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import fire

from tools.make_tiny_model import DEFAULT_DATA, make_tokenizer, read_texts
from utils.host_memory import peak_resident
from utils.units import GIB

CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_rows(file: Path, num_rows: int, *, chat: bool) -> None:
    """Write the sample dialogues repeatedly, no two the same."""
    samples = [json.loads(line) for line in (DEFAULT_DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    with open(file, "w", encoding="utf-8") as lines:
        for number in range(num_rows):
            sample = samples[number % len(samples)]
            dialogue, summary = f"{sample['dialogue']}\nAnna: {number}", sample["summary"]
            turns = [("user", dialogue), ("assistant", summary), ("user", "And who said so?"), ("assistant", "Anna.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            row = {"messages": messages} if chat else {"dialogue": dialogue, "summary": summary}
            lines.write(json.dumps(row) + "\n")


def main(rows: int = 200_000, vocab_size: int = 8192, chat: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # set before the import, so that the cache is empty and temporary
        from configs.formats import DATASETS
        from data.dataset_functions.importing import find_dataset_function

        file = Path(folder) / "train.jsonl"
        write_rows(file, rows, chat=chat)
        tokenizer = make_tokenizer(read_texts(DEFAULT_DATA), vocab_size)
        if chat:
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
        name = "chat_dataset" if chat else "samsum_dataset"
        config = DATASETS[name](str(file))
        get_dataset = find_dataset_function(name, config)
        for what in ("read and tokenized", "found in the cache"):
            started, started_cpu = time.perf_counter(), time.process_time()
            data = get_dataset(config, tokenizer, "train")
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
            print(f"{rows:,} rows {what} in {seconds:.1f} s, {cpu_seconds:.1f} s of CPU time", flush=True)
        peak_gib = peak_resident() / GIB
        num_tokens = sum(len(ids) for batch in data.with_format("arrow").iter(10_000) for ids in batch["input_ids"])
        print(f"{num_tokens:,} tokens, {num_tokens / rows:.0f} a row; peak of resident memory {peak_gib:.2f} GiB")


if __name__ == "__main__":
    fire.Fire(main)
