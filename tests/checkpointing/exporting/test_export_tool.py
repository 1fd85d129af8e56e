"""Folders that tools.export writes load in plain transformers and peft and give the checkpoint's logits."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from checkpointing.exporting import safetensors_file
from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.plan import plan_export
from checkpointing.exporting.write import write_export
from tests.helpers import random_documents
from tests.helpers.checkpoints import changed, load_plain, logits, save_checkpoint, with_lora
from tests.helpers.exports import KINDS, Capture, export
from tests.helpers.families import make_model, save_family
from tests.helpers.pairwise import select_product, slow_but
from tests.helpers.processes import ROOT, ProcessGroup
from tools.export import main
from tools.generate import main as generate

TIES = ("tied", "untied")
FP32_ROUNDING = 2e-6


@pytest.fixture(scope="module")
def models(tiny_model: Path, tied_model: Path) -> dict[str, Path]:
    return {"tied": tied_model, "untied": tiny_model}


@pytest.mark.parametrize(("kind", "tie", "dtype"), select_product(KINDS, TIES, (torch.float32, torch.bfloat16)))
def test_a_full_checkpoint_comes_out_as_it_is(
    kind: str, tie: str, dtype: torch.dtype, models: dict[str, Path], tmp_path: Path
) -> None:
    model = changed(AutoModelForCausalLM.from_pretrained(models[tie], dtype=dtype))
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, models[tie], kind=kind)
    folder = export(checkpoint, tmp_path / "out", "--verify")
    model.save_pretrained(tmp_path / "wanted")
    found, wanted = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "wanted"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(logits(load_plain(folder, "auto")), logits(model))
    settings = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "wanted")]
    assert settings[0] == settings[1]
    assert len(AutoTokenizer.from_pretrained(folder)) == 600
    assert load_plain(folder, "auto").dtype == dtype


@pytest.mark.parametrize(
    ("flag", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_the_dtype_asked_for_is_that_of_every_tensor(
    flag: str, dtype: torch.dtype, tied_model: Path, tmp_path: Path
) -> None:
    model = changed(AutoModelForCausalLM.from_pretrained(tied_model))
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, tied_model)
    folder = export(checkpoint, tmp_path / "out", "--dtype", flag, "--verify")
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name].to(dtype)) for name, tensor in stored.items())
    assert AutoConfig.from_pretrained(folder).dtype == dtype


@pytest.mark.parametrize(("kind", "tie"), select_product(KINDS, TIES))
def test_an_adapter_comes_out_as_peft_writes_it(kind: str, tie: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = with_lora(models[tie])
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, models[tie], kind=kind)
    folder = export(checkpoint, tmp_path / "out", "--verify")
    model.save_pretrained(str(tmp_path / "wanted"), save_embedding_layers=False)
    found, wanted = (load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "wanted"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    settings = [json.loads((f / "adapter_config.json").read_text()) for f in (folder, tmp_path / "wanted")]
    assert settings[0] == settings[1]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[tie]), folder)
    assert torch.equal(logits(loaded), logits(model))


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 8},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embeddings": {"target_modules": ["embed_tokens", "down_proj"]},
    "norms too": {"modules_to_save": ["norm"]},
    "new tokens": {"trainable_token_indices": [5, 17]},
    "embeddings, and norms too": {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.parametrize(("adapter", "tie"), select_product(ADAPTERS, TIES))
def test_merged_it_says_what_the_adapter_says_on_its_base(
    adapter: str, tie: str, models: dict[str, Path], tmp_path: Path
) -> None:
    settings = ADAPTERS[adapter]
    model = with_lora(models[tie], **settings)
    wanted, before = logits(model), logits(AutoModelForCausalLM.from_pretrained(models[tie]))
    assert (wanted - before).abs().max() > 1000 * FP32_ROUNDING, "the adapter does nothing: the test shows nothing"
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, models[tie])
    folder = export(checkpoint, tmp_path / "out", "--merge", "--verify")
    assert (logits(load_plain(folder)) - wanted).abs().max() < FP32_ROUNDING
    assert not list(folder.glob("adapter*"))
    apart = {"embed_tokens", "lm_head"} & set(settings.get("target_modules", ()))
    stays_tied = tie == "tied" and not apart
    assert load_plain(folder).config.tie_word_embeddings == stays_tied
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != stays_tied


def test_a_layer_is_merged_anew_each_time_it_is_read(tmp_path: Path, tiny_model: Path) -> None:
    """GPT-2's layers have biases, so weight and bias are two reads of one layer."""
    base = save_family("gpt2", tmp_path / "base", tiny_model)
    checkpoint = save_checkpoint(tmp_path / "lora", with_lora(base, target_modules=["c_attn"]), base)
    plan = plan_export(open_source(checkpoint), AutoModelForCausalLM, merge=True, dtype=None)
    weight, bias = "transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn.bias"
    first = plan.read(weight)
    assert not torch.equal(first, load_plain(base).state_dict()[weight])
    assert torch.equal(plan.read(bias), load_plain(base).state_dict()[bias])
    assert torch.equal(plan.read(weight), first)


def test_merged_it_has_the_dtype_of_the_bases_files_and_is_rounded_once(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    model = with_lora(base)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, base)
    exact = load_file(export(checkpoint, tmp_path / "exact", "--merge", "--dtype", "fp32") / "model.safetensors")
    merged = load_file(export(checkpoint, tmp_path / "merged", "--merge", "--verify") / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in merged.items())
    name = "model.layers.0.self_attn.q_proj.weight"
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    wanted = layer.base_layer.weight + 2 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    assert torch.allclose(exact[name], wanted, atol=1e-6)


@pytest.mark.parametrize(
    "family", slow_but(4, ["gpt2", "falcon", "gpt_neox", "mixtral", "opt", "gemma2", "phi3", "qwen3"])
)
def test_every_family_comes_out_loadable_full_and_merged(family: str, tiny_model: Path, tmp_path: Path) -> None:
    base = save_family(family, tmp_path / "base", tiny_model)
    full = changed(make_model(family))
    export(save_checkpoint(tmp_path / "full", full, base), tmp_path / "out", "--verify")
    assert torch.equal(logits(load_plain(tmp_path / "out")), logits(full))
    targets = {"gpt2": ["c_attn", "c_fc"], "phi3": ["qkv_proj"]}.get(family, ["q_proj", "v_proj"])
    targets = ["query_key_value"] if family in ("falcon", "gpt_neox") else targets
    model = with_lora(base, target_modules=targets, use_dora=family == "gpt2")
    wanted = logits(model)
    assert (wanted - logits(make_model(family))).abs().max() > 0.01
    export(save_checkpoint(tmp_path / "lora", model, base), tmp_path / "merged", "--merge", "--verify")
    assert (logits(load_plain(tmp_path / "merged")) - wanted).abs().max() < 1e-4


def test_families_that_files_name_differently_say_that_they_take_a_copy_in_memory(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_family("mixtral", tmp_path / "base", tiny_model)
    checkpoint = save_checkpoint(tmp_path / "full", make_model("mixtral"), base)
    export(checkpoint, tmp_path / "out")
    assert "one whole copy of the model is in memory" in capsys.readouterr().out
    stored = {name for file in base.glob("*.safetensors") for name in load_file(file)}
    assert set(load_file(tmp_path / "out/model.safetensors")) == stored


def test_a_resized_vocabulary_is_the_checkpoints_own(tied_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_model)
    model.resize_token_embeddings(617)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", changed(model), tied_model)
    folder = export(checkpoint, tmp_path / "out", "--verify")
    loaded = load_plain(folder)
    assert loaded.config.vocab_size == 617
    assert torch.equal(logits(loaded), logits(model))


def test_large_models_are_cut_into_files_with_an_index(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_BLOCK_BYTES", 1000)  # tensors are read back in parts
    model = changed(AutoModelForCausalLM.from_pretrained(tiny_model))
    source = open_source(save_checkpoint(tmp_path / "checkpoint", model, tiny_model))
    plan = replace(plan_export(source, AutoModelForCausalLM, merge=False, dtype=None), max_file_size="80KB")
    folder = tmp_path / "out"
    write_export(plan, folder, lambda what, num_bytes: tqdm(disable=True))
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    model.save_pretrained(tmp_path / "wanted", max_shard_size="80KB")
    assert [file.name for file in files] == sorted(f.name for f in (tmp_path / "wanted").glob("*.safetensors"))
    index = [json.loads((f / "model.safetensors.index.json").read_text()) for f in (folder, tmp_path / "wanted")]
    assert index[0]["metadata"]["total_size"] == index[1]["metadata"]["total_size"]
    assert index[0]["weight_map"].keys() == index[1]["weight_map"].keys()
    assert torch.equal(logits(load_plain(folder)), logits(model))


HYBRID = ["--enable_fsdp", "--sharding_strategy", "HYBRID_SHARD", "--sharding_group_size", "2"]
PRECISIONS = ("--mixed_precision False", "--pure_bf16")
RUNS = {
    "one": (1, []),
    "two": (2, ["--enable_fsdp"]),
    "four": (4, ["--enable_fsdp"]),
    "replicated": (2, []),
    "hybrid": (4, HYBRID),
}


@pytest.mark.parametrize(
    ("layout", "tie", "precision"),
    [
        *select_product(
            ["one", "two", "replicated", "hybrid"], TIES, PRECISIONS, fast=lambda case: case[0] != "hybrid"
        ),
        *(pytest.param(*case, marks=pytest.mark.full) for case in itertools.product(["four"], TIES, PRECISIONS)),
    ],
)
def test_the_copy_that_a_run_leaves_is_the_model_that_it_saved(
    layout: str, tie: str, precision: str, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, layout_flags = RUNS[layout]
    flags = ["--model_name", str(models[tie]), "--output_dir", str(tmp_path / "run"), *layout_flags, *precision.split()]
    flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    flags += ["--num_workers_dataloader", "0", "--context_length", "96", "--max_train_step", "2", "--lr", "5e-3"]
    flags += ["--batch_size_training", "1", "--global_batch_size", "4"]
    flags += ["--dist_checkpoint_root_folder", str(tmp_path / "copies")]
    process_group.train(flags, ranks)
    folder = export(
        tmp_path / f"copies/fine-tuned-{models[tie].name}", tmp_path / "out", "--base", str(models[tie]), "--verify"
    )
    found, wanted = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "run/model"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(logits(load_plain(folder)), logits(load_plain(tmp_path / "run/model")))
    assert not torch.equal(logits(load_plain(folder)), logits(load_plain(models[tie])))


def test_a_base_that_names_no_end_token_is_merged(tied_model: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tied_model, tmp_path / "base")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    model = with_lora(base)
    model.save_pretrained(str(tmp_path / "adapter"))
    folder = export(tmp_path / "adapter", tmp_path / "out", "--merge", "--base", str(base))
    assert (logits(load_plain(folder)) - logits(model)).abs().max() < FP32_ROUNDING


def test_an_adapter_with_rows_that_its_base_lacks_is_verified(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.resize_token_embeddings(602, mean_resizing=False)
    rows = {"embed_tokens": [600, 601], "lm_head": [600, 601]}
    adapted = changed(get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=rows)))
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    folder = export(tmp_path / "adapter", tmp_path / "out", "--base", str(tiny_model), "--verify")
    saved = [load_file(path / "adapter_model.safetensors") for path in (tmp_path / "adapter", folder)]
    assert saved[0].keys() == saved[1].keys()


def test_growing_for_new_tokens_does_not_tie_what_the_files_hold_apart(tied_model: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tied_model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.5}
    save_file(tensors | head, base / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.tie_word_embeddings = False
    model.resize_token_embeddings(602, mean_resizing=False)
    rows = {"embed_tokens": [600, 601], "lm_head": [600, 601]}
    adapted = changed(get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=rows)))
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    folder = export(tmp_path / "adapter", tmp_path / "out", "--merge", "--base", str(base), "--verify")
    assert (logits(load_plain(folder)) - logits(adapted)).abs().max() < 10 * FP32_ROUNDING


def test_all_of_a_tokenizers_chat_templates_come_out(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    (base / "additional_chat_templates").mkdir()
    templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for name in templates:
        (base / name).write_text(f"{name}{{{{ messages }}}}")
    flags = ["--model_name", str(base), "--output_dir", str(tmp_path / "run"), "--run_validation", "False"]
    flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--num_workers_dataloader", "0"]
    process_group.train([*flags, "--context_length", "96", "--max_train_step", "1"], 1)
    folder = export(tmp_path / "run", tmp_path / "out")
    assert [(folder / name).read_text() for name in templates] == [(base / name).read_text() for name in templates]


def test_a_runs_adapter_is_merged_from_its_folder(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--use_peft", "--lr", "5e-2"]
    flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    flags += ["--num_workers_dataloader", "0", "--context_length", "96", "--max_train_step", "2"]
    process_group.train([*flags, "--mixed_precision", "False", "--enable_fsdp"], 2)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = logits(base)
    wanted = logits(PeftModel.from_pretrained(base, tmp_path / "run/adapter"))
    assert (wanted - before).abs().max() > 0.01
    folder = export(tmp_path / "run", tmp_path / "out", "--merge", "--verify")
    assert (logits(load_plain(folder)) - wanted).abs().max() < FP32_ROUNDING
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    settings = tmp_path / "run/adapter/adapter_config.json"
    settings.write_text(settings.read_text().replace(str(tiny_model), str(tmp_path / "gone")))
    again = export(tmp_path / "run/adapter", tmp_path / "again", "--merge", "--base", str(moved))
    assert torch.equal(logits(load_plain(again)), logits(load_plain(folder)))


def test_of_a_run_the_newest_complete_checkpoint_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 10, 30):
        model = changed(AutoModelForCausalLM.from_pretrained(tiny_model), seed=step)
        save_checkpoint(run / f"checkpoints/step-{step:08}", model, tiny_model)
    (run / "checkpoints/step-00000030/COMPLETE").unlink()
    (run / "model").mkdir()
    folder = export(run, tmp_path / "out")
    wanted = changed(AutoModelForCausalLM.from_pretrained(tiny_model), seed=10)
    assert torch.equal(logits(load_plain(folder)), logits(wanted))


def test_without_checkpoints_a_runs_model_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "run/model")
    (tmp_path / "run/run.yaml").write_text("settings: {}\n")
    folder = export(tmp_path / "run", tmp_path / "out", "--dtype", "bf16", "--verify")
    assert torch.equal(logits(load_plain(folder)), logits(load_plain(tiny_model, torch.bfloat16).float()))


def test_a_folder_of_another_kind_of_model_comes_out_too(tiny_model: Path, tmp_path: Path) -> None:
    """It is built with the class that its config.json names."""
    sizes = {"vocab_size": 600, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "--dtype", "bf16")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "model"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["T5ForConditionalGeneration"]


# The page


def documented(tool: str, page_name: str) -> list[list[str]]:
    page = (ROOT / "docs" / page_name).read_text()
    lines = [shlex.split(line, comments=True) for line in page.splitlines() if line.startswith(f"python -m {tool} ")]
    return [line[3:] for line in lines]


def test_the_documented_commands_run_as_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    model = changed(AutoModelForCausalLM.from_pretrained(tiny_model))
    lora = with_lora(tiny_model)
    for run, trained in (("run", model), ("lora", lora)):
        save_checkpoint(tmp_path / f"outputs/{run}/checkpoints/step-00000020", trained, tiny_model)
    lora.save_pretrained(tmp_path / "outputs/lora/adapter")
    old = save_checkpoint(tmp_path / "old/fine-tuned-model", model, tiny_model, kind="distcp")
    shutil.rmtree(old / "huggingface")
    for name in ("COMPLETE", "state.json", "rng-00000.json"):
        (old / name).unlink()
    (old / "train_params.yaml").write_text(f"model_name: {tiny_model}\n")
    torch.save(model.state_dict(), tmp_path / "old/model-0.pt")
    shutil.copytree(tiny_model, tmp_path / "base-model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi!"}\n')
    exports = documented("tools.export", "export.md")
    answers = [argv for argv in documented("tools.generate", "chatting.md") if argv[0] != "outputs/chats"]
    assert len(exports) == 12
    assert len(answers) == 3
    for argv in exports:
        if "--push_to_hub" in argv:
            continue
        if "gguf" in argv:  # no converter knows the tokenizer of a tiny model
            assert main(argv) == 2
            assert "pre-tokenizer" in capsys.readouterr().err
            continue
        assert main(argv) == 0, argv
        if "--to" not in argv:
            continue
        folder = Path(argv[argv.index("--to") + 1])
        assert (folder / "adapter_model.safetensors").exists() or logits(load_plain(folder)).isfinite().all()
    for argv in answers:
        capsys.readouterr()
        assert generate([*argv, "--max_new_tokens", "2"]) == 0, argv
        assert capsys.readouterr().out
