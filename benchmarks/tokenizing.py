"""Time and memory for tokenizing: examples like SAMSum's through samsum_dataset's own function, or as conversations.

    python -m benchmarks.tokenizing [--rows 200000] [--vocab_size 8192] [--chat] [--calls 100] [--tokenizer T]

The examples are the sample dialogues, each with an added word that makes it unique; the tokenizer is trained on the
samples. With `--chat` each is a conversation of four turns under ChatML, for chat_dataset; with `--calls 100` one of
100 calls of a tool and their results; `--tokenizer` takes another tokenizer with its template. Prints the seconds to
read and tokenize, also of CPU time over all threads and processes (compare these on a machine that does other work,
too), the seconds of a second time with the cache, and the peak memory of the main process.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import fire

from tools.make_tiny_model import DEFAULT_DATA, make_tokenizer, read_texts
from utils.host_memory import peak_resident
from utils.units import GIB

CHATML = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message['content'] }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


TOOL = {
    "name": "look_up",
    "description": "Looks up who said it.",
    "parameters": {"type": "object", "properties": {"line": {"type": "string"}}},
}


def called(dialogue: str, summary: str, num_calls: int) -> dict[str, Any]:
    """A row whose assistant looks up lines of a dialogue, one call after another."""
    lines = dialogue.splitlines()
    messages: list[dict[str, Any]] = [{"role": "user", "content": dialogue}]
    for number in range(num_calls):
        line = lines[number % len(lines)]
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"line": line}}}
        thoughts = f"Line {number} may tell."  # without some, templates like Qwen 3's give each turn its own sample
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts, "tool_calls": [call]})
        messages.append({"role": "tool", "content": f"{number}: {line.partition(':')[0]}"})
    messages.append({"role": "assistant", "content": summary, "reasoning_content": "That is all."})
    return {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}


def write_rows(file: Path, num_rows: int, *, chat: bool, num_calls: int = 0) -> None:
    """Write the sample dialogues repeatedly, no two the same."""
    samples = [json.loads(line) for line in (DEFAULT_DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    with open(file, "w", encoding="utf-8") as lines:
        for number in range(num_rows):
            sample = samples[number % len(samples)]
            dialogue, summary = f"{sample['dialogue']}\nAnna: {number}", sample["summary"]
            turns = [("user", dialogue), ("assistant", summary), ("user", "And who said so?"), ("assistant", "Anna.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            row = {"messages": messages} if chat else {"dialogue": dialogue, "summary": summary}
            row = called(dialogue, summary, num_calls) if num_calls else row
            lines.write(json.dumps(row) + "\n")


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def main(
    rows: int = 200_000, vocab_size: int = 8192, chat: bool = False, calls: int = 0, tokenizer: str | None = None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # set before the import, so that the cache is empty and temporary
        from transformers import AutoTokenizer

        from configs.formats import DATASETS
        from data.dataset_functions.importing import find_dataset_function

        file = Path(folder) / "train.jsonl"
        write_rows(file, rows, chat=chat, num_calls=calls)
        if tokenizer is None:
            of_data: Any = make_tokenizer(read_texts(DEFAULT_DATA), vocab_size)
            if chat or calls:
                of_data.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
            of_data.chat_template = CHATML
        else:
            of_data = AutoTokenizer.from_pretrained(tokenizer)
        name = "chat_dataset" if chat or calls else "samsum_dataset"
        config = DATASETS[name](str(file))
        get_dataset = find_dataset_function(name, config)
        for what in ("read and tokenized", "found in the cache"):
            started, started_cpu = time.perf_counter(), cpu_seconds()
            data = get_dataset(config, of_data, "train")
            seconds, of_cpu = time.perf_counter() - started, cpu_seconds() - started_cpu
            print(f"{rows:,} rows {what} in {seconds:.1f} s, {of_cpu:.1f} s of CPU time", flush=True)
        peak_gib = peak_resident() / GIB
        num_tokens = sum(len(ids) for batch in data.with_format("arrow").iter(10_000) for ids in batch["input_ids"])
        print(f"{num_tokens:,} tokens, {num_tokens / rows:.0f} a row; peak of resident memory {peak_gib:.2f} GiB")


if __name__ == "__main__":
    fire.Fire(main)
