"""Time and memory for tokenising: examples like SAMSum's through samsum_dataset's own function.

    python -m benchmarks.tokenizing [--rows 200000] [--vocab_size 8192]

The examples are the sample dialogues, each with an added word that makes it unique; the tokenizer is trained on the
samples. Prints the seconds to read and tokenise, the seconds of a second time with the cache, and the peak memory.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from pathlib import Path

import fire

from tools.make_tiny_model import DEFAULT_DATA, make_tokenizer, read_texts


def write_rows(file: Path, num_rows: int) -> None:
    """Write the sample dialogues repeatedly, no two the same."""
    samples = [json.loads(line) for line in (DEFAULT_DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    with open(file, "w", encoding="utf-8") as lines:
        for number in range(num_rows):
            sample = samples[number % len(samples)]
            dialogue = f"{sample['dialogue']}\nAnna: {number}"
            lines.write(json.dumps({"dialogue": dialogue, "summary": sample["summary"]}) + "\n")


def main(rows: int = 200_000, vocab_size: int = 8192) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # set before the import, so that the cache is empty and temporary
        from configs.datasets import SamsumDataset
        from data.dataset_functions import BUILT_IN_FOLDER, load_dataset_file

        file = Path(folder) / "train.jsonl"
        write_rows(file, rows)
        tokenizer = make_tokenizer(read_texts(DEFAULT_DATA), vocab_size)
        get_dataset = load_dataset_file(BUILT_IN_FOLDER / "samsum.py").get_samsum_dataset
        for what in ("read and tokenized", "found in the cache"):
            started = time.perf_counter()
            data = get_dataset(SamsumDataset(data_path=str(file)), tokenizer, "train")
            print(f"{rows:,} rows {what} in {time.perf_counter() - started:.1f} s")
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        num_tokens = sum(len(ids) for batch in data.with_format("arrow").iter(10_000) for ids in batch["input_ids"])
        print(f"{num_tokens:,} tokens, {num_tokens / rows:.0f} a row; peak of resident memory {peak_gib:.2f} GiB")


if __name__ == "__main__":
    fire.Fire(main)
