"""Checkpoints of llama-recipes are exported as models: its sharded folders and its full .pt files."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers import llama_recipes_checkpoint
from tests.helpers.checkpoints import Command, changed, load_plain, logits
from tests.helpers.processes import ProcessGroup
from tools.export import main


@pytest.fixture(scope="module", params=["tied", "untied"])
def saved(
    request: pytest.FixtureRequest, tiny_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """The base, the sharded folder, and the full file of the same model."""
    base = tied_model if request.param == "tied" else tiny_model
    folder = tmp_path_factory.mktemp("llama_recipes")
    sharded, full = folder / "fine-tuned-tiny", folder / "tiny-0.pt"
    ProcessGroup().train(partial(llama_recipes_checkpoint.save, base, sharded, full), 2)
    return base, sharded, full


@pytest.mark.slow
def test_both_formats_come_out_as_the_same_trained_model(saved: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, sharded, full = saved
    assert main([str(sharded), "--to", str(tmp_path / "sharded"), "--verify"]) == 0
    assert main([str(full), "--to", str(tmp_path / "full"), "--base", str(base), "--verify"]) == 0
    wanted = AutoModelForCausalLM.from_pretrained(base)
    wanted.resize_token_embeddings(601)
    before = logits(wanted)
    wanted.load_state_dict(torch.load(full, weights_only=True))
    for name in ("sharded", "full"):
        model = load_plain(tmp_path / name)
        assert model.config.vocab_size == 601
        assert torch.equal(logits(model), logits(wanted))
        assert (logits(model) - before).abs().max() > 0.01
    stored = [load_file(tmp_path / name / "model.safetensors") for name in ("sharded", "full")]
    assert stored[0].keys() == stored[1].keys()


@pytest.mark.slow
def test_a_base_that_moved_is_asked_for(
    saved: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, sharded, _ = saved
    params = sharded / "train_params.yaml"
    text = params.read_text()
    params.write_text(text.replace(str(base), str(tmp_path / "gone")))
    assert main([str(sharded), "--to", str(tmp_path / "out")]) == 2
    assert "--base" in capsys.readouterr().err
    assert main([str(sharded), "--to", str(tmp_path / "out"), "--base", str(base)]) == 0
    params.write_text(text)


def test_a_plain_state_dict_is_a_model_of_its_base(tied_model: Path, tmp_path: Path) -> None:
    """Also with extra tensors that older versions of transformers saved."""
    model = changed(AutoModelForCausalLM.from_pretrained(tied_model))
    state = model.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(state, tmp_path / "tiny-2.pt")
    assert (
        main([str(tmp_path / "tiny-2.pt"), "--to", str(tmp_path / "out"), "--base", str(tied_model), "--verify"]) == 0
    )
    assert torch.equal(logits(load_plain(tmp_path / "out")), logits(model))
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


def test_a_file_without_a_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"lm_head.weight": torch.ones(2)}, tmp_path / "tiny-2.pt")
    assert main([str(tmp_path / "tiny-2.pt"), "--to", str(tmp_path / "out")]) == 2
    assert "give that model with --base" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_forged_file_runs_nothing(
    how: str, tied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = tmp_path / "forged.pt"
    state = {"lm_head.weight": Command(tmp_path / "witness")}
    if how == "pickle":
        forged.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, forged)
    assert main([str(forged), "--to", str(tmp_path / "out"), "--base", str(tied_model)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert "without running code" in line
    assert not (tmp_path / "witness").exists()
