"""How fast the ranks of one machine read, tokenize and pack a stream that they share.

    python -m benchmarks.streaming_speed [--ranks 1,2] [--megabytes 30] [--tokenizer FOLDER_OR_NAME]
    python -m benchmarks.streaming_speed --resume_at 0.9

Each rank is a process bound to one core, which reads the stream in steps as a run does. Tokens of all rows count once.
On a machine that does other work, too, compare the CPU time. With `--resume_at`: CPU time to the first step of a run
that goes on after this share of a pass, with the state of the stream and without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.streaming_memory import TINY, write_dialogues
from configs.flags import parse_flags
from data.pipeline import load_data
from data.processors.tokenizer_loading import load_tokenizer
from data.sequences.causal import build_sequences
from data.streaming.block_share import BlockShare
from data.streaming.sources import Stream
from data.streaming.steps import StreamSteps
from tools.make_tiny_model import make_tiny_model


def read(stream: Stream, share: BlockShare | None, core: int, ready: Any, results: Any) -> None:
    """One rank: read one pass, and tell how many tokens it had and how long that took."""
    os.sched_setaffinity(0, {core})
    # Its own rows, as in a rank: forks of one process would share the epoch that datasets keeps in shared memory.
    stream = replace(stream, sources=tuple(replace(source, kept=None) for source in stream.sources))
    ready.wait()
    started, started_cpu, num_tokens = time.perf_counter(), time.process_time(), 0
    for rows, lines in StreamSteps(stream.shared(share), 8):
        if lines:
            break
        num_tokens += sum(len(ids) for row in rows for ids, _, _ in row)
    results.put((num_tokens, time.perf_counter() - started, time.process_time() - started_cpu))


def measure(stream: Stream, num_ranks: int) -> tuple[float, float]:
    """Tokens per second that every rank gets, and tokens per second of CPU time of the rank that computes longest."""
    context, folder = get_context("fork"), Path(tempfile.mkdtemp())
    ready, results = context.Barrier(num_ranks), context.Queue()
    cores = sorted(os.sched_getaffinity(0))
    for place in range(num_ranks):
        (folder / str(place)).mkdir()
    shares = [BlockShare(folder, place, num_ranks) if num_ranks > 1 else None for place in range(num_ranks)]
    ranks = [
        context.Process(target=read, args=(stream, share, cores[place % len(cores)], ready, results))
        for place, share in enumerate(shares)
    ]
    for rank in ranks:
        rank.start()
    figures = [results.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    shutil.rmtree(folder)
    num_tokens = figures[0][0]
    return num_tokens / max(figure[1] for figure in figures), num_tokens / max(figure[2] for figure in figures)


def measure_resuming(stream: Stream, share_of_pass: float) -> None:
    """Read to a step as a run does, then go on after it from its state."""
    num_steps = next(number for number, (_, lines) in enumerate(StreamSteps(stream, 8)) if lines)
    last = max(1, round(share_of_pass * num_steps))
    steps, started = StreamSteps(stream, 8), time.process_time()
    for _ in steps:
        if steps.step == last:
            break
    up_to_it, state = time.process_time() - started, steps.state()
    again, started = StreamSteps(stream, 8), time.process_time()
    again.go_on(state)
    next(iter(again))
    seconds = time.process_time() - started
    print(f"first step after step {last:,} of {num_steps:,}: {seconds:.1f} s of CPU time from a state", end=" ")
    print(f"of {len(state) / 1024:,.0f} KiB; {up_to_it:.1f} s by reading again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--megabytes", type=int, default=30, help="of dialogues")
    parser.add_argument("--resume_at", type=float, default=None, help="share of a pass; unset: measure the speed")
    parser.add_argument("--tokenizer", default=None, help="unset: a tiny one")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a run's reading process, which is a fork
    with tempfile.TemporaryDirectory() as folder:
        data, model = Path(folder) / "data.jsonl", Path(folder) / "model"
        write_dialogues(data, given.megabytes * 2**20, 0)
        if given.tokenizer is None:
            make_tiny_model(model, tie_word_embeddings=True, vocab_size=8000, **TINY)
        flags = ["--model_name", str(given.tokenizer or model), "--samsum_dataset.data_path", str(data), "--streaming"]
        config = parse_flags([*flags, "--max_train_step", str(10**9), "--run_validation", "False"])
        tokenizer = load_tokenizer(config.train_config)
        options: dict[str, Any] = {"vocab_size": len(tokenizer), "context_length": 2048}
        stream = load_data(
            config.train_config, config.dataset_configs, tokenizer, build_sequences=build_sequences, **options
        ).stream
        assert stream is not None
        if given.resume_at is not None:
            return measure_resuming(stream, given.resume_at)
        alone: tuple[float, float] | None = None
        for num_ranks in map(int, given.ranks.split(",")):
            speed, of_cpu = measure(stream, num_ranks)
            alone = alone or (speed, of_cpu)
            times = f"{speed / alone[0]:.2f} times as many; {of_cpu / alone[1]:.2f} times by the CPU time of a rank"
            print(f"{num_ranks} ranks: {speed:,.0f} tokens/s, {times}")
    return None


if __name__ == "__main__":
    main()
