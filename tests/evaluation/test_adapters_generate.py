"""A model with an adapter answers at evaluation as peft's own does with the saved adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoTokenizer, BitsAndBytesConfig

from tests.helpers.adapter_kinds import ADAPTERS, LORA, batching_of
from tests.helpers.processes import ProcessGroup
from tests.helpers.reference import quantized_by_transformers
from tests.helpers.refusals import dialogues, write_lines

MAX_NEW_TOKENS = 10
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
KINDS = {name: flags for name, (flags, _) in ADAPTERS.items()} | {
    "lora": LORA,
    "qlora": [*LORA, "--quantization", "4bit"],
}


@pytest.mark.parametrize(
    ("kind", "ranks"), [("lora", 2), ("qlora", 2), ("dora", 1), ("llama_adapter", 2), ("prefix", 2)]
)
def test_answers_are_those_of_peft_with_the_saved_adapter(
    kind: str, ranks: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Two samples in a batch, prompts of other lengths, and an adapter that changes what the model says."""
    rows = [row | {"dialogue": row["dialogue"] * (1 + i % 2)} for i, row in enumerate(dialogues(6))]
    write_lines(tmp_path / "data/train.jsonl", rows * 12)  # one long epoch: only its end is evaluated
    write_lines(tmp_path / "data/validation.jsonl", rows)
    argv = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(tmp_path / "data")]
    argv += ["--output_dir", str(tmp_path / "run"), "--num_workers_dataloader", "0", "--context_length", "160"]
    argv += ["--batching_strategy", batching_of(kind), "--max_train_step", "12", "--lr", "5e-2"]
    argv += ["--eval_generate", "--max_new_tokens", str(MAX_NEW_TOKENS), "--val_batch_size", "2", "--use_peft"]
    process_group.train([*argv, *KINDS[kind], *(["--enable_fsdp"] if ranks > 1 else [])], ranks)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    base, below = (quantized_by_transformers(tiny_model, NF4 if kind == "qlora" else None).eval() for _ in range(2))
    model = PeftModel.from_pretrained(below, tmp_path / "run/adapter")
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    saved = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["saved"]["step"]
    last = [sample for sample in samples if sample["step"] == saved]
    plain, texts = [], []
    for sample in last:
        ids = torch.tensor([tokenizer.encode(sample["prompt"], add_special_tokens=False)])
        for found, one in ((plain, base), (texts, model)):
            output = one.generate(input_ids=ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            found.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
    assert [sample["generated"] for sample in last] == texts
    assert plain != texts, "the adapter changes no answer: the test shows nothing"
