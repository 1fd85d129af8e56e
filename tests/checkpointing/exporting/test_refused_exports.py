"""tools.export refuses or fails with one line and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.verify import load_model
from tests.helpers.checkpoints import FILES, changed, complete, save_checkpoint, with_lora
from tests.helpers.exports import KINDS, Capture, export
from tests.helpers.limited_files import files_limited_to
from tools.export import main
from tools.make_tiny_model import make_tiny_model
from utils.errors import ConfigError


def refusal(capsys: pytest.CaptureFixture[str], source: Path, to: Path, *flags: str, status: int = 2) -> str:
    """The one error line, after checking that nothing is left behind."""
    before = sorted(path for path in to.parent.rglob("*"))
    capsys.readouterr()
    assert main([str(source), "--to", str(to), *flags]) == status
    captured = capsys.readouterr()
    assert sorted(path for path in to.parent.rglob("*")) == before
    assert "exported" not in captured.out
    (line,) = [line for line in captured.err.splitlines() if "error" in line]
    assert line.startswith("error: ")
    return line


@pytest.fixture
def checkpoint(tiny_model: Path, tmp_path: Path) -> Path:
    model = changed(AutoModelForCausalLM.from_pretrained(tiny_model))
    return save_checkpoint(tmp_path / "run/checkpoints/step-00000020", model, tiny_model)


@pytest.fixture
def lora_checkpoint(tiny_model: Path, tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "lora/checkpoints/step-00000020", with_lora(tiny_model), tiny_model)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a checkpoint" in refusal(capsys, tmp_path / "empty", tmp_path / "out")
    assert "does not exist" in refusal(capsys, tmp_path / "nothing", tmp_path / "out")


def test_an_incomplete_checkpoint_is_refused(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    (checkpoint / "COMPLETE").unlink()
    assert "incomplete" in refusal(capsys, checkpoint, tmp_path / "out")
    assert "incomplete" in refusal(capsys, tmp_path / "run", tmp_path / "out")
    (checkpoint / "rank-00000.safetensors").unlink()
    assert "incomplete" in refusal(capsys, checkpoint, tmp_path / "out")


def test_a_folder_that_exists_is_never_written_to(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    assert "exists already" in refusal(capsys, checkpoint, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_merging_without_an_adapter_is_refused(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "--merge: " in refusal(capsys, checkpoint, tmp_path / "out", "--merge")


def test_a_base_that_is_not_there_is_refused(
    lora_checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refusal(capsys, lora_checkpoint, tmp_path / "out", "--merge", "--base", str(tmp_path / "gone"))
    assert "--base" in line
    assert str(tmp_path / "gone") in line


def test_a_base_that_lacks_tensors_is_refused(
    lora_checkpoint: Path, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    line = refusal(capsys, lora_checkpoint, tmp_path / "out", "--merge", "--base", str(base))
    assert "lacks model.layers.1.mlp.up_proj.weight" in line


def test_a_base_of_another_size_is_refused(lora_checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    other = make_tiny_model(tmp_path / "other", vocab_size=600, hidden_size=64, num_layers=2)
    line = refusal(capsys, lora_checkpoint, tmp_path / "out", "--merge", "--base", str(other))
    assert "does not fit the base model" in line


@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_shard_that_is_missing_or_cut_off_is_refused(
    damage: str, has_sizes: bool, checkpoint: Path, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    if not has_sizes:  # as in llama-recipes' folders
        model = changed(AutoModelForCausalLM.from_pretrained(tiny_model))
        checkpoint = save_checkpoint(tmp_path / "fine-tuned", model, tiny_model, kind="distcp")
        (checkpoint / "COMPLETE").unlink()
        (checkpoint / "state.json").unlink()
    shard = checkpoint / ("rank-00000.safetensors" if has_sizes else "__0_0.distcp")
    if damage == "missing":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 100)
    assert shard.name in refusal(capsys, checkpoint, tmp_path / "out", "--base", str(tiny_model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_is_refused(kind: str, tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, tiny_model, kind=kind)
    file = checkpoint / FILES[kind]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "is damaged" in refusal(capsys, checkpoint, tmp_path / "out")


def test_a_full_disk_is_refused_before_it_is_full(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 10**5, 10**5))
    assert "iB free" in refusal(capsys, checkpoint, tmp_path / "out")


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_said(
    lora_checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    size = (lora_checkpoint / "huggingface/tokenizer.json").stat().st_size
    with files_limited_to(size - 1):  # the adapter is smaller
        line = refusal(capsys, lora_checkpoint, tmp_path / "out", status=1)
    assert line == f"error: --to: {tmp_path}/out cannot be written (File too large)"


def test_a_place_that_cannot_be_written_is_refused(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert "--to: " in refusal(capsys, checkpoint, tmp_path / "file/out")
    export(checkpoint, tmp_path / "new/folders/out")


def test_a_checkpoint_without_a_tokenizer_is_refused_before_it_is_written(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    for path in (checkpoint / "huggingface").glob("tokenizer*"):
        path.unlink()
    complete(checkpoint)
    assert "no tokenizer" in refusal(capsys, checkpoint, tmp_path / "out")


def test_what_was_left_by_an_interrupted_export_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete/model-00002-of-00002.safetensors").write_bytes(b"half")
    folder = export(checkpoint, tmp_path / "out")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


def test_a_checkpoint_of_another_model_is_refused(
    checkpoint: Path, tied_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = AutoConfig.from_pretrained(checkpoint / "huggingface")
    config.num_hidden_layers = 3
    config.save_pretrained(checkpoint / "huggingface")
    complete(checkpoint)
    assert "lacks model.layers.2" in refusal(capsys, checkpoint, tmp_path / "out")
    config.num_hidden_layers = 1
    config.save_pretrained(checkpoint / "huggingface")
    complete(checkpoint)
    assert "holds model.layers.1" in refusal(capsys, checkpoint, tmp_path / "out")


def test_code_that_lies_beside_a_config_is_not_run(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    settings = checkpoint / "huggingface"
    config = json.loads((settings / "config.json").read_text()) | {"model_type": "mine"}
    (settings / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "mine.Config"}}))
    witness = tmp_path / "witness"
    (settings / "mine.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    complete(checkpoint)
    assert "describes no model" in refusal(capsys, checkpoint, tmp_path / "out")
    assert not witness.exists()


def test_numbers_that_fp16_cannot_hold_fail(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 70000
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, tiny_model)
    assert "up_proj" in refusal(capsys, checkpoint, tmp_path / "out", "--dtype", "fp16", status=1)


def test_a_failed_verification_leaves_no_folder(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    """One matrix is so small that fp16 rounds it to zero, and another so large that this matters."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e-7)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, tiny_model)
    line = refusal(capsys, checkpoint, tmp_path / "out", "--dtype", "fp16", "--verify", status=1)
    assert "logits of the exported model differ by" in line
    export(checkpoint, tmp_path / "out", "--dtype", "bf16", "--verify")


def test_an_adapter_that_changed_its_base_is_not_merged(lora_checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    path = lora_checkpoint / "huggingface/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "pissa"}))
    complete(lora_checkpoint)
    assert "began as pissa" in refusal(capsys, lora_checkpoint, tmp_path / "out", "--merge")


def test_lora_around_the_trained_rows_of_a_tied_head_is_not_merged(
    tied_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    """peft leaves such rows apart from the weight, under names of its own."""
    model = AutoModelForCausalLM.from_pretrained(tied_model)
    settings = LoraConfig(target_modules=["q_proj", "lm_head"], trainable_token_indices={"embed_tokens": [5]})
    get_peft_model(model, settings).save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    line = refusal(capsys, tmp_path / "adapter", tmp_path / "out", "--merge", "--base", str(tied_model))
    assert "LoRA and trained rows of tokens on lm_head" in line


def test_a_base_that_has_moved_is_said_when_its_weights_are_read(lora_checkpoint: Path, tmp_path: Path) -> None:
    """Transformers would say that its path is no name on the hub."""
    source = open_source(lora_checkpoint, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone is not there; give the folder where it is now with --base"):
        load_model(source, AutoModelForCausalLM)
