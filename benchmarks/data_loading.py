"""How fast sequences as long as SAMSum's are read, packed and loaded, without a model.

    python -m benchmarks.data_loading
    python -m benchmarks.data_loading --documents 50000 --row-length 4096 --workers 0 2 --seconds 10

The sequences are already tokenized, in the Arrow columns of a Hugging Face dataset. Each line of the table is the
loader of one rank: the tokens/s that the training loop can take from it, without the first step, which starts the
workers. Nothing else should run on the machine. A rank needs one core, and each of its workers another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import torch

from benchmarks.runs.random_rows import samsum_like_lengths
from data.batches.layout import BatchLayout
from data.batches.padding import PaddedWidth
from data.batches.rows import make_rows
from data.batches.step_loader import StepLoader
from data.sequences.causal import build_sequences
from reporting.data_preview import row_figures
from tasks.causal_batches import Collator
from utils.units import GIB


def samsum_like(num_documents: int) -> datasets.Dataset:
    """Random tokens in sequences of lognormal length with median 150; the last fifth of each are label tokens."""
    generator = np.random.default_rng(0)
    lengths = samsum_like_lengths(generator, num_documents, longest=2048)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = generator.integers(3, 32000, offsets[-1], dtype=np.int32)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    labels = np.where(place >= np.repeat(lengths * 4 // 5, lengths), ids, -100).astype(np.int32)
    columns = {"input_ids": ids, "labels": labels}
    return datasets.Dataset(
        pa.table({name: pa.LargeListArray.from_arrays(offsets, values) for name, values in columns.items()})
    )


def timed(what: str, function: Callable[[], Any]) -> Any:
    """Call `function`; print the seconds that it took and the process's memory after it."""
    started = time.perf_counter()
    result = function()
    seconds, resident = time.perf_counter() - started, psutil.Process().memory_info().rss / GIB
    print(f"{what}: {seconds:.2f} s, resident memory {resident:.2f} GiB", flush=True)
    return result


def tokens_per_second(loader: StepLoader, seconds: float) -> float:
    """Tokens per second without padding, over an epoch or the given number of seconds."""
    steps = loader.epoch(0)
    next(steps)
    num_tokens, started = 0, time.perf_counter()
    for step in steps:
        num_tokens += sum(batch.num_tokens for batch in step)
        if time.perf_counter() - started > seconds:
            break
    return num_tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--row-length", type=int, default=2048, help="context_length, tokens")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8], help="rows")
    parser.add_argument("--seconds", type=float, default=5, help="how long each loader is read")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    dataset = samsum_like(arguments.documents)
    length = arguments.row_length
    examples = timed("read", lambda: build_sequences(dataset, name="benchmark", context_length=length))
    print(f"{len(examples):,} sequences, {len(examples.input_ids):,} tokens")
    width = PaddedWidth(8, length)
    for strategy in ("packing", "padding"):
        rows = timed(strategy, partial(make_rows, examples, batching_strategy=strategy, context_length=length))
        for micro_batch in arguments.micro_batches:
            layout = BatchLayout(micro_batch, 1, 1)
            ((name, share),) = row_figures(rows, layout, width, seed=0).items()
            print(f"{strategy}, micro-batches of {micro_batch} rows, {name} {100 * share:.1f} %:", end="", flush=True)
            for num_workers in arguments.workers:
                collate = Collator(packing=rows.packed, padding_id=0, width=width)
                loader = StepLoader(rows, layout, rank=0, seed=0, collate=collate, num_workers=num_workers)
                rate = tokens_per_second(loader, arguments.seconds)
                print(f"  {num_workers} workers {rate:,.0f} tokens/s", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
