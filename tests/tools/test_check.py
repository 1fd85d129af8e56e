"""tools.export --check says whether llama.cpp's converter and vLLM take a folder, and how it is used."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoints import with_lora
from tests.helpers.mixtures import mixture
from tests.helpers.seq2seq_models import save_seq2seq
from tools.export import main
from tools.serving.llama_cpp_source import ARCHITECTURES as OF_LLAMA_CPP
from tools.serving.vllm_source import ARCHITECTURES as OF_VLLM

Capture = pytest.CaptureFixture[str]


def checked(path: Path, program: str, capsys: Capture, *flags: str) -> tuple[int, list[str]]:
    """The exit status, and the commands; or the refusal."""
    capsys.readouterr()
    status = main([str(path), "--check", program, *flags])
    shown = capsys.readouterr()
    return status, [line.strip() for line in (shown.out if status == 0 else shown.err).splitlines()]


def test_a_models_folder_is_taken_if_class_and_vocabulary_are_known(
    tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    status, lines = checked(tiny_model, "gguf", capsys)
    assert (status, len(lines)) == (2, 1)
    assert "does not know this tokenizer.json's pre-tokenizer; copy tokenizer.model" in lines[0]
    status, lines = checked(tiny_model, "gguf", capsys, "--check", "vllm")
    assert (status, len(lines)) == (2, 1), "the other program's commands stand on standard output"
    folder = shutil.copytree(tiny_model, tmp_path / "a folder")
    (folder / "tokenizer.model").write_bytes(b"")
    status, (takes, convert, run) = checked(folder, "gguf", capsys)
    assert status == 0
    assert takes.startswith("gguf: llama.cpp ")
    assert shlex.split(convert) == ["python", "convert_hf_to_gguf.py", str(folder), "--outfile", "a-folder.gguf"]
    assert run == "llama-cli -m a-folder.gguf"
    status, (takes, serve, ask) = checked(folder, "vllm", capsys)
    assert shlex.split(serve) == ["vllm", "serve", str(folder), "--served-model-name", "a-folder"]
    assert json.loads(shlex.split(ask)[-1])["model"] == "a-folder"


def test_a_class_that_they_do_not_know_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "bart"
    save_seq2seq("bart", folder)
    reasons = {"gguf": "knows no BartForConditionalGeneration; load it with", "vllm": "has no model for BartFor"}
    for program, reason in reasons.items():
        status, (line,) = checked(folder, program, capsys)
        assert status == 2
        assert reason in line
    assert all(hasattr(transformers, name) for name in OF_LLAMA_CPP | OF_VLLM)


def test_an_adapter_is_served_on_its_base(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    with_lora(tiny_model, r=12).save_pretrained(str(tmp_path / "run/adapter"))
    adapter = tmp_path / "run/adapter"
    status, (_, convert, _) = checked(adapter, "gguf", capsys)
    assert status == 0
    expected = ["python", "convert_lora_to_gguf.py", str(adapter), "--base", str(tiny_model), "--outfile", "run.gguf"]
    assert shlex.split(convert) == expected
    status, (_, serve, _) = checked(adapter, "vllm", capsys)
    rank = ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"run={adapter}"]
    assert shlex.split(serve) == ["vllm", "serve", str(tiny_model), *rank]


@pytest.mark.parametrize(
    ("settings", "program", "reason"),
    [
        ({"use_dora": True}, "gguf", "it takes no DoRA; merge it"),
        ({"use_dora": True}, "vllm", "it takes no DoRA; merge it"),
        ({"use_rslora": True}, "gguf", "it scales by alpha / r"),
        ({"modules_to_save": ["lm_head"]}, "vllm", "it takes no modules_to_save"),
        ({"bias": "all"}, "vllm", "it takes no trained biases"),
        ({"r": 600}, "vllm", "it takes ranks up to 512, not 600"),
        ({"trainable_token_indices": [1]}, "vllm", "it takes factors of layers alone, not base_model"),
        ({"target_modules": ["lm_head"]}, "gguf", "no adapter of lm_head"),
    ],
    ids=str,
)
def test_an_adapter_that_they_would_not_load_is_refused(
    settings: dict[str, Any], program: str, reason: str, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    with_lora(tiny_model, **settings).save_pretrained(str(tmp_path / "adapter"))
    status, (line,) = checked(tmp_path / "adapter", program, capsys)
    assert status == 2
    assert reason in line


@pytest.mark.parametrize(
    ("family", "parameters", "reason"),
    [
        ("qwen3_moe", ("gate_up_proj", "down_proj"), "not read the factors of Qwen3MoeForCausalLM's experts as peft"),
        ("gpt_oss", ("gate_up_proj", "down_proj"), ""),
        ("gpt_oss", ("down_proj",), "it takes adapters on both weights of experts, and this has one; merge it"),
    ],
)
def test_adapters_of_experts_are_refused_where_their_factors_would_be_misread(
    family: str, parameters: tuple[str, ...], reason: str, tmp_path: Path, capsys: Capture
) -> None:
    mixture(family).save_pretrained(tmp_path / "base")
    names = [f"experts.{name}" for name in parameters]
    with_lora(tmp_path / "base", target_modules=["q_proj"], target_parameters=names).save_pretrained(
        str(tmp_path / "adapter")
    )
    status, lines = checked(tmp_path / "adapter", "vllm", capsys)
    assert (status, reason in lines[0]) == (2 if reason else 0, True)
    status, (line,) = checked(tmp_path / "adapter", "gguf", capsys)
    assert (status, "it knows no factors of all experts in one matrix; merge it" in line) == (2, True)


def test_rslora_is_taken_by_vllm_and_a_prefix_by_none(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    with_lora(tiny_model, use_rslora=True).save_pretrained(str(tmp_path / "rslora"))
    assert checked(tmp_path / "rslora", "vllm", capsys)[0] == 0
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prefix = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
    prefix.save_pretrained(str(tmp_path / "prefix"))
    for program in ("gguf", "vllm"):
        status, (line,) = checked(tmp_path / "prefix", program, capsys)
        assert (status, "it takes LoRA alone, not PREFIX_TUNING" in line) == (2, True)


def test_what_was_just_exported_is_checked(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    with_lora(tiny_model).save_pretrained(str(tmp_path / "adapter"))
    flags = ["--to", str(tmp_path / "merged"), "--merge"]
    status, lines = checked(tmp_path / "adapter", "vllm", capsys, *flags)
    assert status == 0
    assert any(line.startswith(f"vllm serve {tmp_path}/merged ") for line in lines)
