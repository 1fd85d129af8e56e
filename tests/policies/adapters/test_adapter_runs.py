"""Every kind of adapter trains as in a plain loop under every layout, resumes, and is saved as peft reads it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from policies.adapters.kinds import PREFIX_MODELS
from tests.helpers.adapter_kinds import ADAPTERS, adapt, batching_of, config_of
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.documented import commands
from tests.helpers.families import FAMILIES, make_model, save_family
from tests.helpers.made import Made
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics, train_events
from tests.helpers.reference import FAST_LR, assert_agrees, flags_for, plain_eval_loss, reference_run
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal
from tools.export import main as export_main
from utils.errors import ConfigError

NUM_STEPS = 6
LAYOUTS = {"SINGLE": (1, []), "NO_SHARD": (2, []), "FULL_SHARD": (2, ["--enable_fsdp"])}
OF_OTHER_KINDS = ("gemma3", "gpt_neox", "phi3")  # whose layers have other names than Llama's, or see windows
PREFIX_FAMILIES = [name for name in FAMILIES if FAMILIES[name].config.model_type in PREFIX_MODELS]
OF_LLAMAS_KIND = [name for name in PREFIX_FAMILIES if name not in OF_OTHER_KINDS]
EACH = slow_but(1, ["prefix", "dora", "llama_adapter", "rslora"], num_slow=2)  # rslora is LoRA by another factor
RESUMED = [("dora", "SINGLE"), ("dora", "FULL_SHARD"), ("llama_adapter", "NO_SHARD")]
RESUMED_TOO = [("dora", "NO_SHARD"), ("llama_adapter", "SINGLE"), ("llama_adapter", "FULL_SHARD")]
RESUMED_TOO += [("prefix", "SINGLE"), ("prefix", "NO_SHARD")]
OWN = {"rslora": "lora_", "dora": "lora_", "llama_adapter": "adaption_", "prefix": "prompt_embeddings"}


def flags_of(model: Path, output: Path, adapter: str, *, ranks: int, again: Path | None = None) -> list[str]:
    """Eight rows a step. again: an adapter's folder, to train on from."""
    flags = flags_for(model, output, batching=batching_of(adapter), num_steps=NUM_STEPS, lr=FAST_LR)
    flags += ["--batch_size_training", "2", "--gradient_accumulation_steps", str(4 // ranks), "--use_peft"]
    if again is None:
        return flags + ADAPTERS[adapter][0]
    method = adapter if adapter in ("llama_adapter", "prefix") else "lora"
    return [*flags, "--peft_method", method, "--from_peft_checkpoint", str(again)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Its attention is far from uniform, so that a prompt that is not where it should be changes the loss."""
    return save_family("llama", tmp_path_factory.mktemp("model") / "llama", tiny_model)


@pytest.fixture(scope="module")
def runs(model_folder: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of each run, by adapter and layout. Under FSDP activations are checkpointed if that can be."""

    def run(adapter: str, layout: str) -> Path:
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("adapters") / "run"
        given = [*flags_of(model_folder, folder, adapter, ranks=ranks), *flags, "--save_every_steps", "3"]
        process_group.train([*given, "--keep_last", "9"], ranks)
        return folder

    return Made(run)


def eval_losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_metrics(run) if event["event"] == "eval"]


def saved(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter/adapter_model.safetensors")


def load_plain(folder: Path, base: Path) -> Any:
    """As a user would: nothing of the project's."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder).eval()


@pytest.mark.parametrize("adapter", EACH)
def test_every_layout_trains_as_a_plain_loop_with_peft(adapter: str, runs: Made, model_folder: Path) -> None:
    batching, settings = batching_of(adapter), ADAPTERS[adapter][1]()
    reference = reference_run(model_folder, batching=batching, num_steps=NUM_STEPS, adapter=settings, lr=FAST_LR)
    single = [event["loss"] for event in train_events(runs[adapter, "SINGLE"])]
    for layout in LAYOUTS:
        assert_agrees(runs[adapter, layout], reference)
        assert [event["loss"] for event in train_events(runs[adapter, layout])] == pytest.approx(single, rel=1e-6)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    assert eval_losses(runs[adapter, "SINGLE"])[-1] < plain_eval_loss(base) - 1e-3, "it learned nothing"


@pytest.mark.parametrize("adapter", EACH)
def test_plain_peft_loads_what_every_layout_saves(adapter: str, runs: Made, model_folder: Path) -> None:
    wanted = saved(runs[adapter, "SINGLE"])
    assert all(OWN[adapter] in name and tensor.dtype == torch.float32 for name, tensor in wanted.items())
    for layout in LAYOUTS:
        run = runs[adapter, layout]
        assert plain_eval_loss(load_plain(run / "adapter", model_folder)) == pytest.approx(
            eval_losses(run)[-1], rel=1e-5
        )
        assert saved(run).keys() == wanted.keys()
        assert all((saved(run)[name] - tensor).abs().max() < 2e-4 for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("adapter", "ranks", "flags"),
    slow_but(
        0,
        [
            ("dora", 4, "--hsdp --sharding_group_size 2"),
            ("dora", 2, "--fsdp_cpu_offload --wrap root"),
            ("prefix", 4, "--hsdp --sharding_group_size 2 --optimizer_cpu_offload"),
            ("dora", 2, "--sharding_strategy SHARD_GRAD_OP --activation_checkpointing selective"),
            ("llama_adapter", 4, "--hsdp --sharding_group_size 2 --activation_checkpointing selective"),
        ],
        num_slow=3,
    ),
)
def test_other_layouts_change_nothing(
    adapter: str, ranks: int, flags: str, runs: Made, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = flags_of(model_folder, tmp_path / "run", adapter, ranks=ranks)
    process_group.train([*given, "--enable_fsdp", *flags.split()], ranks)
    for found, wanted in zip(train_events(tmp_path / "run"), train_events(runs[adapter, "SINGLE"]), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-5)
    assert all((saved(tmp_path / "run")[n] - t).abs().max() < 2e-4 for n, t in saved(runs[adapter, "SINGLE"]).items())


@pytest.mark.parametrize(
    ("adapter", "layout"),
    [
        ("prefix", "FULL_SHARD"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in RESUMED),
        *(pytest.param(*case, marks=pytest.mark.full) for case in RESUMED_TOO),
    ],
)
def test_a_resumed_run_is_bit_equal(
    adapter: str, layout: str, runs: Made, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    killed = as_if_killed_after(3, runs[adapter, layout], tmp_path / "killed")
    given = [*flags_of(model_folder, killed, adapter, ranks=ranks), *flags, "--save_every_steps", "3"]
    process_group.train([*given, "--keep_last", "9", "--resume", "auto"], ranks)
    assert_bit_equal(killed, runs[adapter, layout])


@pytest.mark.parametrize("adapter", EACH)
def test_training_goes_on_from_the_saved_adapter(
    adapter: str, runs: Made, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """DoRA's magnitudes among the rest, which were trained and are no norms of the base's rows any more."""
    before = runs[adapter, "SINGLE"]
    flags = flags_of(model_folder, tmp_path / "run", adapter, ranks=2, again=before / "adapter")
    outcomes = process_group.train([*flags, *LAYOUTS["FULL_SHARD"][1], "--eval_before_training"], 2)
    assert [outcome.stderr for outcome in outcomes] == ["", ""]
    losses = eval_losses(tmp_path / "run")
    assert losses[0] == pytest.approx(eval_losses(before)[-1], rel=1e-5)
    assert plain_eval_loss(load_plain(tmp_path / "run/adapter", model_folder)) == pytest.approx(losses[-1], rel=1e-5)
    assert all((saved(tmp_path / "run")[name] != tensor).any() for name, tensor in saved(before).items())


@pytest.mark.parametrize("adapter", EACH)
def test_a_checkpoint_is_exported_merged_or_refused(
    adapter: str, runs: Made, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[adapter, "FULL_SHARD"]
    assert export_main([str(run), "--to", str(tmp_path / "adapter"), "--verify"]) == 0
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert exported.keys() == saved(run).keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved(run).items())
    status = export_main([str(run), "--to", str(tmp_path / "merged"), "--merge", "--verify"])
    if OWN[adapter] == "lora_":
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        assert plain_eval_loss(merged) == pytest.approx(eval_losses(run)[-1], rel=1e-5)
    else:
        assert status == 2
        assert "only LoRA is merged" in capsys.readouterr().err
        assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("adapter", EACH)
def test_on_a_bf16_base_it_trains_and_stays_in_fp32(
    adapter: str, runs: Made, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = flags_of(model_folder, tmp_path / "run", adapter, ranks=2)
    flags[flags.index("--mixed_precision") + 1] = "True"
    process_group.train([*flags, *LAYOUTS["FULL_SHARD"][1]], 2)
    assert all(tensor.dtype == torch.float32 for tensor in saved(tmp_path / "run").values())
    for found, wanted in zip(train_events(tmp_path / "run"), train_events(runs[adapter, "SINGLE"]), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=0.02)


@pytest.mark.slow
def test_random_weights_are_those_of_the_model_alone(
    model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """They are drawn by the names that they have without an adapter; its gates are closed in the first step."""
    for ranks, layout in ((1, "SINGLE"), (2, "FULL_SHARD")):
        flags = flags_of(model_folder, tmp_path / layout, "llama_adapter", ranks=ranks)
        process_group.train([*flags, "--random_weights", *LAYOUTS[layout][1]], ranks)
    flags = flags_for(model_folder, tmp_path / "alone", batching="packing", num_steps=1)
    process_group.train([*flags, "--batch_size_training", "8", "--random_weights"], 1)
    alone, single, sharded = (train_events(tmp_path / name) for name in ("alone", "SINGLE", "FULL_SHARD"))
    assert single[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)
    assert [e["loss"] for e in sharded] == pytest.approx([e["loss"] for e in single], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        *((name, "prefix") for name in OF_OTHER_KINDS),
        *(pytest.param(name, "prefix", marks=pytest.mark.full) for name in OF_LLAMAS_KIND),
        ("gpt2", "llama_adapter"),
        pytest.param("mistral", "llama_adapter", marks=pytest.mark.full),
        ("gpt2", "dora"),
    ],
)
def test_so_do_other_families(
    family: str, adapter: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    folder = save_family(family, tmp_path / "model", tiny_model)
    flags = [*flags_of(folder, tmp_path / "run", adapter, ranks=2), *LAYOUTS["FULL_SHARD"][1]]
    settings = ADAPTERS[adapter][1]()
    if adapter == "dora":
        settings.target_modules = set(FAMILIES[family].lora_targets)
        flags[flags.index("--lora_config.target_modules") + 1] = ",".join(FAMILIES[family].lora_targets)
    process_group.train(flags, 2)
    batching = batching_of(adapter)
    reference = reference_run(folder, batching=batching, num_steps=NUM_STEPS, adapter=settings, lr=FAST_LR)
    assert_agrees(tmp_path / "run", reference)
    loss = plain_eval_loss(load_plain(tmp_path / "run/adapter", folder))
    assert loss == pytest.approx(eval_losses(tmp_path / "run")[-1], rel=1e-5)


@pytest.mark.slow
def test_llama_adapter_is_the_same_compiled(
    runs: Made, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = flags_of(model_folder, tmp_path / "run", "llama_adapter", ranks=1)
    flags += [*LAYOUTS["FULL_SHARD"][1], "--compile", "--run_validation", "False"]
    process_group.train(with_aot_eager(flags), 1)  # each rank would compile the same
    for found, wanted in zip(
        train_events(tmp_path / "run"), train_events(runs["llama_adapter", "SINGLE"]), strict=True
    ):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


# Saved adapters that do not go on


def test_a_saved_adapter_of_dora_is_not_compiled(runs: Made, model_folder: Path) -> None:
    config = config_of("--from_peft_checkpoint", str(runs["dora", "SINGLE"] / "adapter"), "--compile")
    with pytest.raises(ConfigError, match=r"--compile: torch\.compile cannot trace peft"):
        adapt(AutoModelForCausalLM.from_pretrained(model_folder), config)


def test_a_saved_prefix_of_another_model_is_refused(runs: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(runs["prefix", "SINGLE"] / "adapter", tmp_path / "adapter")
    flags = ["--peft_method", "prefix", "--batching_strategy", "padding", "--from_peft_checkpoint", str(folder)]
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"num_layers": 3}))
    with pytest.raises(ConfigError, match="does not fit this model"):
        adapt(make_model("llama"), config_of(*flags))
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"prefix_projection": True}))
    with pytest.raises(ConfigError, match="prefix_projection"):
        adapt(make_model("llama"), config_of(*flags))


@pytest.mark.slow
@pytest.mark.parametrize("command", commands([ROOT / "docs/adapters.md"]))
def test_a_documented_command_trains(
    command: str, runs: Made, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    saved_by = {"outputs/lora/adapter": "dora", "outputs/prompts/adapter": "llama_adapter"}
    words = [
        str(runs[saved_by[word], "SINGLE"] / "adapter") if word in saved_by else word for word in shlex.split(command)
    ]
    flags = words[words.index("finetuning.py") + 1 :]
    flags[flags.index("--model_name") + 1] = str(model_folder)
    flags = [str(ROOT / word) if word.endswith(".yaml") else word for word in flags]
    flags += ["--samsum_dataset.data_path", str(ROOT / "datasets/samples/dialogue_summary"), "--split_slice", "60"]
    flags += ["--max_train_step", "2", "--output_dir", str(tmp_path / "run"), "--num_workers_dataloader", "0"]
    flags += ["--context_length", "96"]
    process_group.train(flags, 2 if words[0] == "torchrun" else 1)
    assert plain_eval_loss(load_plain(tmp_path / "run/adapter", model_folder)) > 0
