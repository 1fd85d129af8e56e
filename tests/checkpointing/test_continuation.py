"""What a run saves goes on as its samples were built, for libraries and servers that know nothing of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import finetuning
from checkpointing.continuation import Continuation, continuing, name_end_tokens
from data.sequences.ends import end_ids
from data.sequences.tokenized import Sequences
from tests.helpers.chat_templates import CHATML
from tests.helpers.checkpoints import forget_marks
from tests.helpers.exports import export
from tests.helpers.processes import train_events
from tests.helpers.refusals import write_lines
from tests.helpers.tokenizers_of_kinds import byte_level, metaspace

END, LIMIT = "<|im_end|>", 24
LORA = ["--lora_config.r", "16", "--lora_config.lora_dropout", "0", "--lora_config.target_modules", "all-linear"]
CHAT = {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}]}
RUN = ["--num_workers_dataloader", "0", "--run_validation", "False", "--context_length", "64", "--num_epochs", "99"]
RUN += ["--batching_strategy", "padding", "--batch_size_training", "4", "--scheduler", "constant", "--lr", "1e-2"]


def train_chat(model: Path, folder: Path, *flags: str, steps: int = 30) -> Path:
    """docs/datasets.md's recipe for a base model that learns ChatML."""
    write_lines(folder / "rows.jsonl", [CHAT] * 4)
    (folder / "chatml.jinja").write_text(CHATML)
    words = ["--model_name", str(model), "--output_dir", str(folder / "run"), "--dataset", "chat_dataset", *RUN]
    words += ["--chat_dataset.data_path", str(folder / "rows.jsonl"), "--add_special_tokens", f"<|im_start|>,{END}"]
    words += ["--chat_dataset.chat_template", str(folder / "chatml.jinja"), "--max_train_step", str(steps)]
    assert finetuning.main([*words, *flags]) == 0
    return folder / "run"


def answer(model: Any, tokenizer: Any, **settings: Any) -> str:
    """What transformers generates of a chat, as its documentation does it."""
    prompt = tokenizer.apply_chat_template(
        CHAT["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=LIMIT, do_sample=False, **settings)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))


def stops_of_a_server(folder: Path) -> set[int]:
    """Where vLLM stops: at the tokenizer's end token and at those of generation_config.json."""
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    return {AutoTokenizer.from_pretrained(folder).eos_token_id, *(ends if isinstance(ends, list) else [ends])}


@pytest.fixture(scope="module")
def chat_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_chat(tiny_model, tmp_path_factory.mktemp("chat"), "--save_every_steps", "30")


@pytest.fixture(scope="module")
def adapter_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_chat(tiny_model, tmp_path_factory.mktemp("adapter"), "--use_peft", *LORA, steps=60)


def test_a_base_model_that_learned_chatml_stops_by_itself(chat_run: Path, tmp_path: Path) -> None:
    exported = export(chat_run, tmp_path / "exported")
    for folder in (chat_run / "model", exported):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        end = tokenizer.convert_tokens_to_ids(END)
        assert answer(model, tokenizer) == f"No.{END}"
        assert model.generation_config.eos_token_id == model.config.eos_token_id == [end, tokenizer.eos_token_id]
        assert end in stops_of_a_server(folder)


def test_an_adapter_says_where_its_answers_end_and_so_does_what_it_is_merged_into(
    adapter_run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = adapter_run / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    base.resize_token_embeddings(len(tokenizer))
    model = PeftModel.from_pretrained(base, adapter)
    settings = GenerationConfig.from_pretrained(adapter)
    said = answer(model, tokenizer, generation_config=settings)
    assert said in (f"No.{END}", f"No{END}"), "after so few steps"
    assert tokenizer.convert_tokens_to_ids(END) in stops_of_a_server(adapter)
    for source, flags in ((adapter, ["--merge"]), (adapter_run, ["--merge"]), (adapter, [])):
        folder = export(source, tmp_path / f"{source.name}{len(flags)}", *flags)
        assert stops_of_a_server(folder) == stops_of_a_server(adapter)
        if flags:
            merged = AutoModelForCausalLM.from_pretrained(folder)
            assert answer(merged, tokenizer) == said
            assert merged.config.eos_token_id == settings.eos_token_id


def test_a_run_resumes_though_its_checkpoint_knows_other_end_tokens(
    chat_run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Checkpoints of earlier versions have the base's."""
    for part in ("rows.jsonl", "chatml.jinja"):
        shutil.copy(chat_run.parent / part, tmp_path)
    shutil.copytree(chat_run, tmp_path / "run")
    (folder,) = (tmp_path / "run/checkpoints").glob("step-*")
    values = json.loads((folder / "state.json").read_text())
    assert isinstance(values["model_config"]["eos_token_id"], list)
    values["model_config"]["eos_token_id"] = 2
    (folder / "state.json").write_text(json.dumps(values))
    forget_marks(folder)
    train_chat(tiny_model, tmp_path, "--save_every_steps", "30", "--resume", "auto", steps=31)
    assert [event["step"] for event in train_events(tmp_path / "run")] == list(range(1, 32))


SEGMENTS = {"segments": [{"text": "<s>The sea", "label": False}, {"text": " is blue.</s>", "label": True}]}


@pytest.mark.parametrize(
    ("flags", "row"),
    [((), {"text": "The sea is blue."}), (("--use_peft",), {"text": "The sea is blue."}), ((), SEGMENTS)],
    ids=["model", "adapter", "segments"],
)
def test_a_texts_start_token_is_added_by_the_saved_tokenizer(
    flags: tuple[str, ...], row: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    """A server's prompt begins with what the samples began with, though the base's tokenizer does not add it."""
    base = AutoTokenizer.from_pretrained(tiny_model)
    assert base("The sea")["input_ids"][0] != base.bos_token_id
    write_lines(tmp_path / "rows.jsonl", [row] * 4)
    dataset = f"{next(iter(row))}_dataset"
    words = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--dataset", dataset, *RUN]
    words += ["--max_train_step", "30"]
    assert finetuning.main([*words, f"--{dataset}.data_path", str(tmp_path / "rows.jsonl"), *flags]) == 0
    assert len(train_events(tmp_path / "run")) == 30
    folder = tmp_path / "run" / ("adapter" if flags else "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = base("The sea", add_special_tokens=False)["input_ids"]
    assert tokenizer("The sea")["input_ids"] == [base.bos_token_id, *plain]
    assert tokenizer("The sea", add_special_tokens=False)["input_ids"] == plain
    if not flags:
        model = AutoModelForCausalLM.from_pretrained(folder)
        output = model.generate(**tokenizer("The sea", return_tensors="pt"), max_new_tokens=LIMIT, do_sample=False)
        assert tokenizer.decode(output[0]) == "<s> The sea is blue.</s>"


def test_a_chats_tokenizer_is_saved_as_it_was(chat_run: Path, tiny_model: Path) -> None:
    """A template writes its own start token, so a server adds none to it."""
    saved, base = AutoTokenizer.from_pretrained(chat_run / "model"), AutoTokenizer.from_pretrained(tiny_model)
    assert saved("The sea")["input_ids"] == base("The sea")["input_ids"]


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level(trim_offsets=True), metaspace()])
def test_the_start_token_changes_no_other_token_and_no_offset(tokenizer: Any, tmp_path: Path) -> None:
    continuing(tokenizer, Continuation((), adds_start=True)).save_pretrained(tmp_path)
    saved, text = AutoTokenizer.from_pretrained(tmp_path), " What is\n\n the capital? Ünï"
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    found = saved(text, return_offsets_mapping=True)
    assert found["input_ids"] == [tokenizer.bos_token_id, *plain["input_ids"]]
    assert found["offset_mapping"][1:] == plain["offset_mapping"]
    assert continuing(saved, Continuation((), adds_start=True)) is saved
    assert continuing(tokenizer, Continuation((), adds_start=False)) is tokenizer


def sequences(*samples: tuple[list[int], list[int]]) -> Sequences:
    """Samples of ids, and which of their places are learned."""
    ids = np.concatenate([np.array(sample) for sample, _ in samples])
    learned = np.concatenate([np.isin(np.arange(len(sample)), places) for sample, places in samples])
    offsets = np.cumsum([0, *(len(sample) for sample, _ in samples)])
    return Sequences(ids, np.where(learned, ids, -100), offsets, offsets, np.arange(len(samples)))


def test_end_tokens_are_those_of_samples_and_of_turns_but_not_of_parts_or_cuts() -> None:
    special, start, end, call, thought = {90, 91, 92, 93}, 90, 91, 92, 93
    assert end_ids(sequences(([start, 5, 6, end], [2, 3]), ([start, 5], [])), special, 9) == (end,)
    turns = [start, 5, call, 10, start, 6, end]  # a line break stands between two turns
    assert end_ids(sequences((turns, [1, 2, 5, 6])), special, 9) == (end, call)
    assert end_ids(sequences(([start, 5, thought, 6, 7, end], [2, 5])), special, 9) == (end,), "a part is left out"
    assert end_ids(sequences(([start, 5, call], [1, 2])), special, 3) == (), "cut at the length of a row"
    assert end_ids(sequences(([start, 5, 6], [1, 2])), special, 9) == (), "no special token"


def test_config_json_names_what_generation_config_json_names() -> None:
    config = LlamaConfig(vocab_size=96, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    model.config.eos_token_id, model.generation_config.eos_token_id = 2, [2, 5]
    assert name_end_tokens(model, None, Continuation((5,), adds_start=False)) == []
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [2, 5]
