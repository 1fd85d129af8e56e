"""Every family that people fine-tune: sharded over two ranks it trains as a plain loop does, and is what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from policies.wrapping import has_tied_embeddings
from tests.helpers.families import FAMILIES, save_family
from tests.helpers.pairwise import keep_fast, slow_but
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.reference import assert_agrees, flags_for, lora_flags, plain_eval_loss, reference_run

NUM_STEPS, NUM_RANKS = 3, 2
# Families with other names in files, other layers than Llama's, attention windows, or padded rows alone.
FAST = ["gpt_neox", "mixtral", "falcon", "gemma3", "gpt_oss"]
OF_LLAMAS_KIND = ["llama", "mistral", "qwen2"]  # tests/distributed/test_exactness.py trains a Llama in every layout
EVAL_TOLERANCE = 1e-5
ADAPTED = ("gpt2", "phi3", "gpt_neox")  # layers of other kinds or names than Llama's


@pytest.fixture(scope="module", params=keep_fast(FAMILIES, FAST, full=OF_LLAMAS_KIND))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model_folder(name: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(name, tmp_path_factory.mktemp("family") / name, tokenizer_folder=tiny_model)


def batching_of(name: str) -> str:
    return "packing" if FAMILIES[name].packs else "padding"


def train_flags(model_folder: Path, output: Path, *, batching: str) -> list[str]:
    """Three steps of 2 ranks x 2 rows x 2 micro-batches, then an evaluation, whose weights are saved."""
    flags = flags_for(model_folder, output, batching=batching, num_steps=NUM_STEPS)
    flags += ["--batch_size_training", "2", "--gradient_accumulation_steps", "2", "--loss_chunk_size", "50"]
    return [*flags, "--enable_fsdp", "--fsdp_config.sharding_strategy", "FULL_SHARD"]


@pytest.fixture(scope="module")
def run(name: str, model_folder: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    flags = train_flags(model_folder, folder / "run", batching=batching_of(name))
    flags += ["--dist_checkpoint_root_folder", str(folder), "--dist_checkpoint_folder", "copy"]
    process_group.train(flags, NUM_RANKS)
    return folder / "run"


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sharded_weights(run: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained weights as the ranks held them: read from the shards they wrote, by the names of the modules."""
    state: dict[str, Any] = {"model": {key: torch.full_like(tensor, torch.nan) for key, tensor in like.items()}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(next(run.parent.glob("copy-*")))))
    return state["model"]


def shapes_on_disk(folder: Path) -> dict[str, list[int]]:
    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    return shapes


def eval_loss(run: Path) -> float:
    return [event for event in read_metrics(run) if event["event"] == "eval"][-1]["loss"]


def test_it_trains_as_a_plain_loop_does(name: str, model_folder: Path, run: Path) -> None:
    assert_agrees(run, reference_run(model_folder, batching=batching_of(name), num_steps=NUM_STEPS))


def test_the_saved_folder_is_the_trained_model_bit_by_bit(model_folder: Path, run: Path) -> None:
    saved, report = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    trained, base = load(model_folder), load(model_folder)
    weights = sharded_weights(run, like=trained.state_dict())
    trained.load_state_dict(weights)
    assert saved.state_dict().keys() == weights.keys()
    for key, tensor in saved.state_dict().items():
        assert torch.equal(tensor, weights[key]), key
    assert has_tied_embeddings(saved) == has_tied_embeddings(base)
    ids = torch.randint(3, 500, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted, before = (model.eval()(input_ids=ids).logits for model in (saved, trained, base))
    assert torch.equal(found, wanted)
    assert (found - before).abs().max() > 1e-2, "nothing was trained: the test shows nothing"


def test_the_saved_folder_has_the_loss_that_the_run_evaluated(run: Path) -> None:
    assert plain_eval_loss(load(run / "model")) == pytest.approx(eval_loss(run), rel=EVAL_TOLERANCE)


def test_the_saved_folder_has_the_format_of_the_original(model_folder: Path, run: Path) -> None:
    assert shapes_on_disk(run / "model") == shapes_on_disk(model_folder)
    saved, base = (json.loads((folder / "config.json").read_text()) for folder in (run / "model", model_folder))
    assert saved == base


@pytest.mark.parametrize("name", slow_but(1, ["mixtral", "gpt_neox"]), indirect=True)
def test_a_model_that_was_never_read_from_files_is_saved_in_the_format_of_its_family(
    model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """These families' tensors are called differently in files and in the model."""
    flags = train_flags(model_folder, tmp_path / "run", batching="packing")
    process_group.train([*flags, "--random_weights"], NUM_RANKS)
    assert shapes_on_disk(tmp_path / "run/model") == shapes_on_disk(model_folder)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].packs], indirect=True)
def test_packing_is_refused_where_documents_would_see_each_other(
    model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    outcome = process_group.run(train_flags(model_folder, tmp_path / "run", batching="packing"), 1)[0]
    assert outcome.status == 2
    assert "--batching_strategy" in outcome.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"], indirect=True)
def test_the_windows_cut_at_these_lengths(model_folder: Path) -> None:
    """Else agreement with the plain loop would say nothing about sliding windows."""
    narrow = AutoModelForCausalLM.from_pretrained(model_folder)
    wide = AutoModelForCausalLM.from_pretrained(model_folder, sliding_window=128)
    assert abs(plain_eval_loss(narrow) - plain_eval_loss(wide)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in ADAPTED else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES],
    indirect=True,
)
def test_adapters_train_as_in_a_plain_loop_and_load_in_plain_peft(
    name: str, model_folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    targets = FAMILIES[name].lora_targets
    run = tmp_path / "run"
    flags = train_flags(model_folder, run, batching=batching_of(name))
    process_group.train([*flags, *lora_flags(targets)], NUM_RANKS)
    reference = reference_run(model_folder, batching=batching_of(name), num_steps=NUM_STEPS, lora_targets=targets)
    assert_agrees(run, reference)
    adapted = PeftModel.from_pretrained(load(model_folder), run / "adapter").eval()
    assert plain_eval_loss(adapted) == pytest.approx(eval_loss(run), rel=EVAL_TOLERANCE)
