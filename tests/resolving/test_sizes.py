"""Sizes that no machine has are refused with the flag, before anything is started for them; usual ones are not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from transformers import LlamaConfig

from configs.flags import parse_flags
from configs.run import RunConfig
from data.batches.rows import make_rows
from data.pipeline import RunData
from data.sequences.tokenized import Sequences
from ranks.environment import Environment
from resolving.sizes import check_batch_sizes, check_model_sizes
from tests.helpers.processes import read_metrics
from tests.helpers.refusals import Bench
from utils.errors import ConfigError

# Llama-3 70B's.
LARGE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)


def config(line: str) -> RunConfig:
    return parse_flags(["--model_name", "M", *line.split()])


def environment(world_size: int = 1) -> Environment:
    return Environment(0, 0, world_size, world_size, launched=True)


@pytest.fixture(autouse=True)
def two_tib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the host."""
    for module in ("resolving.sizes", "utils.device"):
        monkeypatch.setattr(f"{module}.host_bytes", lambda: 2**41)


LLAMA_ADAPTER = "--use_peft --peft_method llama_adapter --adapter_len"
PREFIX = "--use_peft --peft_method prefix --batching_strategy padding --num_virtual_tokens"
FOUR = "--use_peft --lora_config.target_modules q_proj,k_proj,v_proj,o_proj --lora_config.r"


def test_usual_sizes_are_not_refused() -> None:
    for line in (f"{FOUR} 256", f"{LLAMA_ADAPTER} 100", f"{PREFIX} 100", "--use_peft", ""):
        check_model_sizes(config(line), LARGE, 2**20, environment(8))


@pytest.mark.parametrize(
    ("line", "context_length", "named"),
    [
        ("--use_peft --lora_config.r 1000000", 4096, "--lora_config.r: 1000000 is more than the rank"),
        (f"{FOUR} 28000", 4096, "--lora_config.r: an adapter of 73,400,320,000 weights needs at least"),
        (f"{LLAMA_ADAPTER} 1000000000", 4096, "--adapter_len: an adapter of 245,760,000,000,000 weights"),
        (f"{PREFIX} 1000000000", 4096, "--num_virtual_tokens: an adapter of 163,840,000,000,000 weights"),
        ("", 10**12, "--context_length: a row of 1,000,000,000,000 tokens needs at least"),
    ],
)
def test_what_no_memory_could_hold_is_refused(line: str, context_length: int, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_model_sizes(config(line), LARGE, context_length, environment(8))
    assert str(refusal.value).startswith(named)


def data_of(num_rows: int, row_length: int) -> RunData:
    tokens = np.ones(num_rows * row_length, dtype=np.int32)
    offsets = np.arange(num_rows + 1) * row_length
    sequences = Sequences(tokens, tokens, offsets, offsets, np.arange(num_rows))
    rows = make_rows(sequences, batching_strategy="padding", context_length=row_length)
    return RunData(sequences, sequences, rows, rows, None, (), None, ())


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--batch_size_training 1000000", "--batch_size_training: a micro-batch of 1,000 rows (1,000,000 tokens)"),
        ("--val_batch_size 1000000", "--val_batch_size: a micro-batch of 1,000 rows (1,000,000 tokens)"),
        ("--batch_size_training 100 --loss_chunk_size 0", "--loss_chunk_size: the logits of 100,000 tokens at a time"),
        ("--batch_size_training 100", None),
    ],
)
def test_a_micro_batch_that_no_memory_could_hold_is_refused(
    line: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.device.host_bytes", lambda: 2**34)
    check = partial(
        check_batch_sizes,
        config(line).train_config,
        data_of(1000, 1000),
        LARGE,
        128_000,
        memory_bytes=environment().device_facts.memory_bytes,
    )
    if named is None:
        check()
        return
    with pytest.raises(ConfigError) as refusal:
        check()
    assert str(refusal.value).startswith(named)


def test_more_rows_than_the_data_has_are_no_more_than_it_has(bench: Bench) -> None:
    """A batch of everything is what some ask for with a large number."""
    many = ["--batch_size_training", "1000000", "--val_batch_size", "1000000", "--loss_chunk_size", "1000000"]
    many += ["--max_eval_step", "1000000", "--pad_to_multiple_of", "1000000"]
    bench.group.train(bench.flags(*many, "--max_train_step", "1", "--save_model", "False"), world_size=1)
    assert read_metrics(bench.output)[-1]["status"] == "finished"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--num_workers_dataloader 1000000", "--num_workers_dataloader: 1000000 processes"),
        ("--use_peft --lora_config.r 1000000", "--lora_config.r: 1000000"),
        (f"--batch_size_training {10**18} --gradient_accumulation_steps {10**18}", "--batch_size_training: times"),
        (f"--streaming --max_train_step 1 --shuffle_buffer_size {10**15}", "--shuffle_buffer_size: 1,000,000,"),
        (f"--context_length {10**18}", "--context_length: "),
        (f"{LLAMA_ADAPTER} {10**18}", "--adapter_len: "),
        (f"{PREFIX} {10**18}", "--num_virtual_tokens: "),
        (f"--use_peft --peft_method llama_adapter --adapter_layers {10**18}", "--adapter_layers: "),
        (f"--sharding_group_size {10**18} --hsdp --enable_fsdp", "sharding_group_size"),
    ],
)
def test_an_absurd_size_is_refused_before_anything_is_started(bench: Bench, given: str, named: str) -> None:
    assert named in bench.refused(*given.split())
