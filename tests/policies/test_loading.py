"""Weights: complete or refused, never unpickled, in the dtype that was asked for whatever the file's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    MiniMaxM2Config,
    PreTrainedConfig,
)

from checkpointing.exporting.blueprint import build_blueprint, load_pretrained
from checkpointing.exporting.model_source import open_source
from policies.pretrained import generation_settings
from tasks.causal_lm import CausalLM
from tests.helpers import random_documents
from tests.helpers.checkpoints import load_plain
from tests.helpers.exports import export
from tests.helpers.families import FAMILIES, LLAMA_LIKE, make_model
from tests.helpers.loaded import load, load_model
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, run_forked, train_events
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of
from tools.generate import main as generate
from utils.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


@pytest.mark.parametrize("asked", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_weights_are_in_the_dtype_that_was_asked_for(
    stored: torch.dtype, asked: torch.dtype, tiny_model: Path, tmp_path: Path
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=stored)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=asked)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == asked, name
        assert torch.equal(parameter, reference.get_parameter(name).to(asked)), name


@pytest.mark.parametrize("asked", DTYPES)
def test_random_weights_are_in_the_dtype_that_was_asked_for(
    asked: torch.dtype, tiny_model: Path, tmp_path: Path
) -> None:
    """Also where config.json says another one."""
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_model(tmp_path, "--random_weights", dtype=asked).parameters()} == {
        asked
    }


def test_soft_capped_attention_is_computed_whatever_transformers_would_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 5.20 transformers chose SDPA for Gemma 2, and SDPA dropped the cap without a word."""
    config = Gemma2Config(**LLAMA_LIKE, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=0.1)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    reference.save_pretrained(tmp_path)
    tokens = torch.arange(2, 22)[None]
    wanted = reference(tokens).logits
    monkeypatch.setattr(type(reference), "_supports_sdpa", True)
    assert torch.equal(load_model(tmp_path)(tokens).logits, wanted)
    assert torch.equal(load_pretrained(str(tmp_path), AutoModelForCausalLM, torch.float32)(tokens).logits, wanted)
    assert build_blueprint(str(tmp_path), AutoModelForCausalLM).config._attn_implementation == "eager"


def test_random_weights_need_config_json_alone_and_are_a_function_of_the_seed(model_copy: Path) -> None:
    for file in model_copy.glob("*.safetensors"):
        file.unlink()

    def draw(seed: int) -> dict[str, torch.Tensor]:
        return load_model(model_copy, "--random_weights", "--seed", str(seed)).state_dict()

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert all(tensor.isfinite().all() for tensor in first.values())


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(model_copy: Path) -> None:
    file = model_copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"--model_name: .* lack 1 tensor, model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(model_copy)


def test_a_checkpoint_of_another_shape_is_refused(model_copy: Path) -> None:
    file = model_copy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="--model_name"):
        load_model(model_copy)


def test_a_damaged_checkpoint_is_refused(model_copy: Path) -> None:
    file = model_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="--model_name"):
        load_model(model_copy)


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["hf_model_0001_0.pt", "hf_model_0002_0.pt"]])
def test_pickled_weights_are_refused_with_a_command_that_converts_them(model_copy: Path, names: list[str]) -> None:
    wanted = load_model(model_copy).state_dict()
    (model_copy / "model.safetensors").unlink()
    for number, name in enumerate(names):
        torch.save(dict(list(wanted.items())[number :: len(names)]), model_copy / name)
    torch.save({"state": {}}, model_copy / "optimizer.pt")
    with pytest.raises(ConfigError, match="pickled weights") as refusal:
        load_model(model_copy)
    command = re.search(r'python -c "(.*)"', str(refusal.value))
    assert command
    done = run_forked(["-c", command[1]])
    assert done.returncode == 0, done.stderr
    found = load_model(model_copy).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("files", "message"), [([], "no config.json"), (["config.json"], r"no \*\.safetensors weights")]
)
def test_a_folder_that_is_no_model_is_refused(files: list[str], message: str, tiny_model: Path, tmp_path: Path) -> None:
    for name in files:
        shutil.copy(tiny_model / name, tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (["model/config.json"], "it is a run's folder: give {folder}/model$"),
        (["adapter_config.json"], "--use_peft --from_peft_checkpoint {folder}$"),
        (["adapter/adapter_config.json"], "--use_peft --from_peft_checkpoint {folder}/adapter$"),
        (["consolidated.00.pth", "params.json"], "Meta's or Mistral's own files; give a folder with .* Hugging Face"),
        (["model.Q4_K_M.gguf"], "GGUF files are for inference; give a folder with the full-precision model"),
    ],
)
def test_a_folder_of_something_else_in_place_of_a_model_is_told_what_to_give(
    files: list[str], remedy: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=remedy.format(folder=tmp_path)):
        load_model(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"there is no folder {Path.cwd()}/outputs/nowhere/model"):
        load_model(Path("outputs/nowhere/model"))


def test_a_file_of_a_model_is_told_to_be_its_folder(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json is a file; give its folder, {tiny_model}$"):
        load_model(tiny_model / "config.json")


def test_a_checkpoint_of_several_files_is_read_from_all_of_them(tiny_model: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, weights, _ = load(tmp_path)
    assert f"of {len(list(tmp_path.glob('*.safetensors')))} safetensors" in weights.notes[0]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in reference.state_dict().items())


def test_a_quantized_checkpoint_is_refused(model_copy: Path) -> None:
    settings = json.loads((model_copy / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8"}
    (model_copy / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"--model_name: .* stored quantized"):
        load_model(model_copy)


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], object], **settings: object) -> Path:
    """Change the tensors and the config.json of a model's folder."""
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | settings
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_config_ties_and_files_hold_apart_are_apart_as_in_transformers(
    dtype: torch.dtype, model_copy: Path
) -> None:
    """Those that are equal in the dtype that is asked for are tied, there as here."""
    for name, change in {"apart": 1.0, "equal": 0.0, "equal in bf16": 1e-6}.items():
        rewrite(
            model_copy,
            lambda tensors, change=change: tensors.update(
                {"lm_head.weight": (tensors["model.embed_tokens.weight"].bfloat16().float() * (1 + change))}
                | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].bfloat16().float()}
            ),
            tie_word_embeddings=True,
        )
        reference = AutoModelForCausalLM.from_pretrained(model_copy, dtype=dtype)
        model, weights, _ = load(model_copy, dtype=dtype)
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert is_tied == (reference.lm_head.weight is reference.model.embed_tokens.weight), name
        assert is_tied == (name == "equal" or (name == "equal in bf16" and dtype == torch.bfloat16))
        assert model.config.tie_word_embeddings == is_tied
        assert is_tied != any("tie_word_embeddings: False: config.json ties lm_head" in note for note in weights.notes)
        tokens = torch.arange(2, 22)[None]
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


@pytest.mark.slow
def test_a_run_trains_saves_exports_and_goes_on_with_weights_that_it_untied(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """As one whose config.json says so: full weights over two ranks, and LoRA, merged."""
    said = rewrite(Path(shutil.copytree(tiny_model, tmp_path / "said")), lambda tensors: None)
    tied = rewrite(Path(shutil.copytree(said, tmp_path / "tied")), lambda tensors: None, tie_word_embeddings=True)
    lora = ["--use_peft", "--lora_dropout", "0"]
    for name, flags, ranks in (("full", ["--enable_fsdp"], 2), ("lora", lora, 1)):
        common = [*flags, "--run_validation", "False", "--max_train_step", "4", "--save_every_steps", "2"]
        whole = tmp_path / f"{name}-said"
        process_group.train(flags_of(said, whole, *common), ranks)
        run = tmp_path / f"{name}-tied"
        outcome = process_group.train(flags_of(tied, run, *common), ranks)[0]
        assert "tie_word_embeddings: False: config.json ties lm_head.weight" in outcome.stdout
        assert_bit_equal(run, whole)
        killed = as_if_killed_after(2, run, tmp_path / f"{name}-killed")
        process_group.train(flags_of(tied, killed, *common, "--resume", "auto"), ranks)
        assert_bit_equal(killed, whole)
    assert not load_plain(tmp_path / "full-tied/model").config.tie_word_embeddings
    for name, more in (("full", []), ("lora", ["--merge", "--verify"])):
        export(tmp_path / f"{name}-tied", tmp_path / f"{name}-exported", *more)
        wanted = export(tmp_path / f"{name}-said", tmp_path / f"{name}-wanted", *more)
        found = load_plain(tmp_path / f"{name}-exported").state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in load_plain(wanted).state_dict().items())
        assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_tensors_that_the_model_has_no_place_for_are_named(model_copy: Path) -> None:
    """Not those that transformers leaves out without a word."""
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "score.weight": torch.ones(2, 32)}
    rewrite(model_copy, lambda tensors: tensors.update(more), num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"no place for 10 tensors .* or give --allow_unused_weights to train"):
        load(model_copy)
    _, weights, _ = load(model_copy, "--allow_unused_weights")
    (note,) = [note for note in weights.notes if "no place" in note]
    assert note.startswith("weights: this model has no place for 10 tensors in the files, left out: model.layers.1.")
    assert "config.json has 1 layers, num_hidden_layers; the files have 2" in note
    assert "inv_freq" not in note


def test_files_that_transformers_converts_are_told_of_and_untied_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    more = {"model.layers.1.extra.weight": torch.ones(2)}
    rewrite(tmp_path, lambda tensors: tensors.update(more), tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"no place for 1 tensor .* or give --allow_unused_weights to train"):
        load(tmp_path)
    model, weights, _ = load(tmp_path, "--allow_unused_weights")
    assert "rank 0 reads" in weights.notes[0]
    assert "tie_word_embeddings: False" in weights.notes[1]
    assert "this model has no place for 1 tensor in the files, left out: model.layers.1.extra.weight" in (
        capsys.readouterr().out
    )
    tokens = torch.arange(2, 22)[None]
    assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_what_a_family_names_itself_is_left_out_without_a_word(tmp_path: Path) -> None:
    make_model("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(1, dtype=torch.uint8)}))
    assert len(load(tmp_path)[1].notes) == 1


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_numbers_that_no_full_precision_model_has_are_refused(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64, torch.int64):
        model = Path(shutil.copytree(tmp_path / "model", tmp_path / str(dtype)))
        name = next(name for name in load_file(model / "model.safetensors") if "layers.1.self_attn.v_proj" in name)
        rewrite(model, lambda tensors, name=name, dtype=dtype: tensors.update({name: tensors[name].to(dtype)}))
        with pytest.raises(
            ConfigError, match=rf"--model_name: .*{name} is stored as .*; give the full-prec"
        ) as refusal:
            load(model)
        assert "Error" not in str(refusal.value)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"lm_head.weight": "../other/model.safetensors"},
        {"lm_head.weight": "/tmp/model.safetensors"},
        {"lm_head.weight": "a/../../other.safetensors"},
        {"lm_head.weight": ""},
        {"lm_head.weight": 3},
        ["model.safetensors"],
        None,
    ],
)
def test_an_index_that_leads_elsewhere_or_nowhere_is_refused(
    weight_map: object, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    model = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    (model / "model.safetensors").rename(tmp_path / "other/model.safetensors")
    (model / "a.safetensors").touch()
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"--model_name: .*model\.safetensors\.index\.json .*; "):
        load_model(model)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json .*; "):
        open_source(model)


def test_generation_settings_come_with_the_weights(model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "do_sample": True}))
    assert load_model(model_copy).generation_config.temperature == 0.3


@pytest.mark.parametrize("text", ["{", "[]", '{"max_new_tokens": -5}', "[" * 100_000])
def test_generation_settings_that_cannot_be_read_are_left_out_of_what_is_saved_with_a_line(
    text: str, model_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With them beside it, transformers would not load the model."""
    (model_copy / "generation_config.json").write_text(text)
    settings, line = generation_settings(str(model_copy))
    assert settings is None
    assert line.startswith(f"generation_config.json of {model_copy} is left out, since it cannot be read (")
    folder = export(model_copy, tmp_path / "out")
    assert line in capsys.readouterr().out
    assert not (folder / "generation_config.json").exists()
    load_plain(folder)
    load_model(model_copy).generation_config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("eos_token_id", 2**70, "a token id or a list of them"),
        ("suppress_tokens", [1, 1.5], "a token id or a list of them"),
        ("bad_words_ids", [2], "a list of lists of token ids"),
        ("min_length", 2**70, "an integer of 64 bits"),
        ("no_repeat_ngram_size", "2", "an integer of 64 bits"),
        ("repetition_penalty", -1.0, "a number above 0"),
        ("length_penalty", "a", "a number"),
    ],
)
def test_generation_settings_that_nothing_can_be_generated_with_are_left_out_with_a_line(
    key: str, value: Any, wanted: str, model_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({key: value}))
    settings, line = generation_settings(str(model_copy))
    assert settings is None
    assert line.endswith(f"since it cannot be read ({key} is {value!r}, not {wanted}; correct it there)")
    assert generate([str(model_copy), "--prompt", "Hi!", "--max_new_tokens", "2"]) == 0
    assert line in capsys.readouterr().err


def test_a_run_on_such_a_model_says_so_and_saves_what_loads(
    model_copy: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    (model_copy / "generation_config.json").write_text('{"max_new_tokens": -5}')
    given = flags_of(model_copy, tmp_path / "run", "--max_train_step", "1", "--run_validation", "False")
    outcome = process_group.train(given, 1)[0]
    assert f"generation_config.json of {model_copy} is left out, since it cannot be read" in outcome.stdout
    load_plain(tmp_path / "run/model")
    load_plain(export(tmp_path / "run", tmp_path / "out"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_transformers_loads_it(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Parameters, buffers that no file holds, and what shares a weight; whatever the names in the file."""
    make_model(family).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model, weights, _ = load(tmp_path, dtype=dtype)
    assert ("rank 0 reads" in weights.notes[0]) == (family in ("gpt_neox", "mixtral"))
    for kind in ("named_parameters", "named_buffers"):
        wanted = dict(getattr(reference, kind)(remove_duplicate=False))
        found = dict(getattr(model, kind)(remove_duplicate=False))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
    assert len(list(model.parameters())) == len(list(reference.parameters())), "what is tied"


def biased_routers(family: str) -> PreTrainedConfig:
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if family == "minimax_m2":  # which does not tell transformers to keep the bias in fp32
        return MiniMaxM2Config(**LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, head_dim=8, rotary_dim=4)
    heads = {"qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8}
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3Config(**LLAMA_LIKE, **heads, **experts, **groups)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_what_a_family_must_not_have_rounded_stays_in_fp32(family: str, tmp_path: Path) -> None:
    """Routers choose experts by biases that differ by less than bf16 resolves."""
    config = biased_routers(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (name,) = (name for name, _ in model.named_buffers() if "layers.1.mlp" in name and "e_score" in name)
    values = torch.tensor([3.301, 3.302, 3.303, 3.304])
    model.get_buffer(name).copy_(values)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.get_buffer(name), values)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert load_model(tmp_path, "--random_weights", dtype=torch.bfloat16).get_buffer(name).dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_every_family_are_spread_as_its_own_initialisation_spreads_them(
    family: str, tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    model = load_model(tmp_path, "--random_weights")
    for name, wanted in reference.named_parameters():
        found = model.get_parameter(name)
        assert found.isfinite().all(), name
        if wanted.numel() < 8:  # sinks: too few to compare their mean and spread
            assert 0 < found.std().item() < 5 * reference.config.initializer_range, name
            continue
        assert found.mean().item() == pytest.approx(wanted.mean().item(), abs=5e-3), name
        assert found.std().item() == pytest.approx(wanted.std().item(), rel=0.15, abs=1e-6), name


@pytest.mark.parametrize("others", slow_but(1, ["shards", "copies groups"]))
def test_random_weights_are_the_same_under_every_layout(
    others: str, tied_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    layouts = {
        "alone": ([], 1),
        "copies": ([], 2),
        "shards": (["--enable_fsdp"], 2),
        "groups": (["--enable_fsdp", "--hsdp", "--sharding_group_size", "2"], 4),
    }
    losses = {}
    for name in ("alone", *others.split()):
        flags, world_size = layouts[name]
        common = ["--model_name", str(tied_model), "--random_weights", "--output_dir", str(tmp_path / name)]
        common += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
        common += [
            "--context_length",
            "64",
            "--max_train_step",
            "2",
            "--save_model",
            "False",
            "--use_peft",
            "--lora_dropout",
            "0",
        ]
        common += ["--global_batch_size", "8", "--batch_size_training", "2", "--num_workers_dataloader", "0"]
        process_group.train([*common, *flags], world_size)
        losses[name] = [event["loss"] for event in train_events(tmp_path / name)]
    assert all(found == pytest.approx(losses["alone"], abs=1e-6) for found in losses.values()), losses


@pytest.mark.parametrize("family", ["bert", "roformer"])
def test_an_encoder_is_refused_since_its_tokens_see_what_they_are_to_predict(family: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ConfigError, match=f"^--model_name: m is an encoder .{family}, "):
            CausalLM().check_model(model, "m")
        config.is_decoder = True
        assert CausalLM().check_model(AutoModelForCausalLM.from_config(config), "m") == []


def test_a_model_whose_encoder_reads_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="m is a whisper model, whose encoder reads no text; give a language model"):
        CausalLM().check_config(AutoConfig.for_model("whisper"), "m")
    CausalLM().check_config(AutoConfig.for_model("bart"), "m")  # its decoder alone, with --task causal_lm
