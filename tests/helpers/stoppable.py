"""A loop that stops on request, as finetuning.py's does, without a model: for tests/supervision/test_stopping.py.

    python tests/helpers/stoppable.py --folder F [--num_steps 1000] [--step_seconds 0.05] [--eval_at 3] [--stream]

Each rank writes F/rank-N.json when it has ended, and F/step after each step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data.batches.layout import BatchLayout
from data.batches.rows import make_rows
from data.batches.step_loader import StepLoader
from data.sequences.causal import build_sequences
from data.streaming.loader import StreamLoader
from data.streaming.sources import Stream, StreamSource
from ranks.environment import read_environment
from ranks.process_group import start_process_group, stop_process_group
from supervision.stopping import StopRequests

LENGTH = 20_000


def long_rows(dataset_config: Any, tokenizer: Any, split: str) -> Iterator[dict[str, Any]]:
    """Rows of one document each, larger than a pipe's buffer."""
    for _ in range(1000):
        yield {"input_ids": range(LENGTH), "labels": range(LENGTH)}


def long_stream() -> Stream:
    source = StreamSource(
        dataset="test",
        function=long_rows,
        dataset_config=None,
        tokenizer=None,
        split="train",
        build=partial(build_sequences, context_length=LENGTH),
        vocab_size=LENGTH,
    )
    return Stream(
        sources=(source,),
        weights=(),
        seed=0,
        shuffle_buffer_size=1,
        packing=False,
        context_length=LENGTH,
        num_steps=1000,
    )


def as_it_is(rows: list[Any]) -> list[Any]:
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--num_steps", type=int, default=1000)
    parser.add_argument("--step_seconds", type=float, default=0.05)
    parser.add_argument("--save_seconds", type=float, default=0.3)
    parser.add_argument("--eval_at", type=int, default=0)
    parser.add_argument("--stuck_at", type=int, default=0, help="rank 1 does not come to the agreement of this step")
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    env = read_environment()
    start_process_group(env)
    layout = BatchLayout(1, 1, env.world_size)
    documents = [{"input_ids": [index, 5], "labels": [index, 5]} for index in range(given.num_steps * env.world_size)]
    rows = make_rows(
        build_sequences(documents, name="test", context_length=8), batching_strategy="padding", context_length=8
    )
    common: dict[str, Any] = {"rank": env.rank, "collate": as_it_is}
    loader: Any = StepLoader(rows, layout, seed=0, num_workers=2, **common)
    eval_loader = StepLoader(rows, layout, seed=None, num_workers=1, **common)
    if given.stream:
        loader = StreamLoader(long_stream(), layout, num_workers=1, **common)
    step, cut_short, flags = 0, False, (False,)
    with StopRequests(env, given.folder, ends_process=True) as stopping:
        for _ in loader.epoch(0):
            step += 1
            time.sleep(given.step_seconds)
            if step == given.stuck_at and env.rank == 1:
                time.sleep(1000)
            stop, flags = stopping.agree(step % 2 == 0 and env.rank == 1)
            assert flags == (step % 2 == 0 and env.world_size > 1,)
            if not stop and step == given.eval_at:
                (given.folder / "evaluating").touch()
                batches = stopping.until_asked(eval_loader.epoch(0))
                num_batches = 0
                for batch in batches:
                    num_batches += len(batch)
                    time.sleep(given.step_seconds)  # it would be over before somebody asks
                cut_short, stop = batches.cut_short, batches.cut_short
                assert cut_short == (num_batches < given.num_steps)
            if stop or step == given.num_steps:
                break
            if env.is_rank_zero:
                (given.folder / "step").write_text(str(step))
        if stop:
            time.sleep(given.save_seconds)
    facts = {"step": step, "asked": stopping.asked, "cut_short": cut_short, "ended": time.time()}
    (given.folder / f"rank-{env.rank}.json").write_text(json.dumps(facts))
    stop_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
