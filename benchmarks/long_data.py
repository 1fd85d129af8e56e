"""Seconds and host memory of each stage in which one long row becomes a batch.

    python -m benchmarks.long_data [--megabytes 5,20] [--chat_tokens 300000] [--turns 40,2000] [--only WORD]

A text of so many MB (source files of the packages that are installed), and conversations of so many tokens and turns,
each one row of a JSONL file, go through the pipeline of a run: read, tokenized, packed or padded, previewed (`cold`),
the same with tokens from the cache (`warm`), collated; as one row, split into rows of 4,096 tokens, cut to 4,096, or
streamed. Each case is a process of its own. `first` is the time to the first batch, `peak` the most resident memory
of the process, less what it had before it read the data.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fire

from benchmarks.tokenizing import CHATML
from utils.host_memory import peak_resident
from utils.units import GIB

ONE_ROW, MANY_ROWS = 2**24, 4096  # tokens
_RESULT = "RESULT "


def read_sources(num_bytes: int) -> str:
    """Text of so many bytes: source files of the packages that are installed."""
    parts, size = [], 0
    for file in sorted(Path(os.__file__).parent.rglob("*.py")):
        text = file.read_text(encoding="ascii", errors="ignore")
        parts.append(text)
        size += len(text)
        if size >= num_bytes:
            return "".join(parts)[:num_bytes]
    return ("".join(parts) * (num_bytes // size + 1))[:num_bytes]


def cases(megabytes: Sequence[float], chat_tokens: int, turns: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each case, and what it asks for."""
    for size in megabytes:
        text = {"megabytes": size, "flags": ["--dataset", "text_dataset"]}
        yield f"text of {size} MB, one row", text | {"length": ONE_ROW}
        yield f"text of {size} MB, split", text | {"length": MANY_ROWS}
        yield f"text of {size} MB, cut", text | {"length": MANY_ROWS, "more": ["--truncation", "right"]}
        yield f"text of {size} MB, padded", text | {"length": MANY_ROWS, "more": ["--batching_strategy", "padding"]}
        yield (
            f"text of {size} MB, streamed",
            text | {"length": MANY_ROWS, "more": ["--text_dataset.streaming", "--max_train_step", "100"]},
        )
    for number in turns:
        chat = {"chat_tokens": chat_tokens, "turns": number, "flags": ["--dataset", "chat_dataset"]}
        yield f"chat of {chat_tokens} tokens, {number} turns", chat | {"length": ONE_ROW}
        yield f"chat of {chat_tokens} tokens, {number} turns, cut", chat | {"length": MANY_ROWS}


def write_row(file: Path, case: dict[str, Any]) -> None:
    """The file with one row."""
    if "megabytes" in case:
        row: dict[str, Any] = {"text": read_sources(int(case["megabytes"] * 1e6))}
    else:
        text = read_sources(int(case["chat_tokens"] * 2.6))
        size = len(text) // case["turns"]
        roles = "user", "assistant"
        turns = [text[number * size : (number + 1) * size] for number in range(case["turns"])]
        row = {"messages": [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]}
    file.write_text(json.dumps(row) + "\n")


def make_model(folder: Path) -> Path:
    """A model of many positions, and a tokenizer with ChatML's template."""
    from tools.make_tiny_model import make_tiny_model

    make_tiny_model(folder, max_position_embeddings=ONE_ROW, hidden_size=16, num_heads=2, vocab_size=8192)
    file = folder / "chat_template.jinja"
    file.write_text(CHATML)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    return folder


def measure(case: dict[str, Any], model: Path, file: Path) -> None:
    """One case, in this process; prints its line."""
    from configs.flags import parse_flags
    from data.loaders import make_loaders
    from ranks.environment import Environment
    from resolving.inputs import read_inputs
    from tasks.task import BatchForm

    name = case["flags"][1]
    flags = ["--model_name", str(model), *case["flags"], f"--{name}.data_path", str(file)]
    flags += ["--context_length", str(case["length"]), "--batch_size_training", "1", "--num_workers_dataloader", "0"]
    flags += ["--run_validation", "False", *case.get("more", [])]
    config = parse_flags(flags)
    env = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=False)
    seconds: dict[str, float] = {}
    # transformers, its tokenizer and the libraries' caches of code are there before.
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)("a")
    before = peak_resident()
    for stage in ("cold", "warm"):
        started = time.perf_counter()
        inputs = read_inputs(config, env, None)
        seconds[stage] = time.perf_counter() - started
    resolved = inputs.resolved
    packs = resolved.config.train_config.batching_strategy == "packing"
    form = BatchForm(inputs.vocab_size, resolved.widths, packs, "none", 0)
    collate = resolved.task.make_collator(inputs.processor, resolved.model_config, form)
    started = time.perf_counter()
    loaders = make_loaders(inputs.data, resolved.config.train_config, resolved.batches, env, lambda _: collate, print)
    num_steps, num_tokens = 0, 0
    for micro_batches in itertools.islice(loaders.train.epoch(0), inputs.num_steps):
        seconds.setdefault("first", time.perf_counter() - started)
        num_steps += 1
        num_tokens += sum(batch.num_tokens for batch in micro_batches)
    seconds["epoch"] = time.perf_counter() - started
    peak = (peak_resident() - before) / GIB
    print(_RESULT + json.dumps({"seconds": seconds, "peak": peak, "steps": num_steps, "tokens": num_tokens}))


def result_of(case: dict[str, Any], model: Path, row: Path, cache: Path) -> dict[str, Any] | str:
    """What `measure` finds in a process of its own; the end of its errors if it fails."""
    arguments = f"{case!r}, Path({str(model)!r}), Path({str(row)!r})"
    code = f"from pathlib import Path; from benchmarks.long_data import measure; measure({arguments})"
    variables = os.environ | {"HF_HOME": str(cache)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(_RESULT))
            return found
    return done.stderr[-300:]


def numbers(values: Any) -> list[Any]:
    """A flag's values: fire gives one, or several."""
    return list(values) if isinstance(values, list | tuple) else [values]


def main(megabytes: Any = (5, 20), chat_tokens: int = 300_000, turns: Any = (40, 2000), only: str = "") -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, row = make_model(folder / "model"), folder / "row.jsonl"
        print("| row | cold s | warm s | first batch s | epoch s | peak GiB | steps | tokens |")
        print("|---|---|---|---|---|---|---|---|")
        for number, (name, case) in enumerate(cases(numbers(megabytes), chat_tokens, numbers(turns))):
            if only not in name:
                continue
            write_row(row, case)
            found = result_of(case, model, row, folder / f"cache-{number}")
            if isinstance(found, str):
                print(f"| {name} | {found}")
                continue
            seconds = " | ".join(f"{found['seconds'][stage]:.1f}" for stage in ("cold", "warm", "first", "epoch"))
            print(f"| {name} | {seconds} | {found['peak']:.2f} | {found['steps']} | {found['tokens']:,} |", flush=True)


if __name__ == "__main__":
    fire.Fire(main)
