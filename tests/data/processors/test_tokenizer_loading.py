"""Tokenizers that lack a pad token, gain one, or outgrow the model."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    IdeficsConfig,
    IdeficsForVisionText2Text,
)

import finetuning
from checkpointing.exporting.blueprint import load_tokenizer as load_tokenizer_of_tools
from configs.flags import parse_flags
from configs.training import TrainConfig
from data.batches.padding import padding_id
from data.processors.tokenizer_loading import load_tokenizer, num_rows_needed
from data.sequences.tokenized import TokenSequence
from policies.loading import build_model, grow_embeddings, load_model_config
from policies.loss.summed_loss import use_summed_loss
from tasks.causal_batches import Collator
from tasks.causal_lm import CausalLM
from tests.helpers import random_documents
from tests.helpers.loaded import load
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import train_events
from utils.errors import ConfigError

TASK = CausalLM()
CPU = torch.device("cpu")


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def save_tokenizer(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny tokenizer with another pad token."""

    def save(pad_token: str | None) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        if pad_token is not None:
            tokenizer.add_special_tokens({"pad_token": pad_token})
        folder = tmp_path / f"tokenizer-{pad_token}".replace("<", "").replace(">", "")
        tokenizer.save_pretrained(folder)
        return folder

    return save


def build(folder: Path) -> Any:
    config = parse_flags(["--model_name", str(folder)])
    return build_model(config.train_config, load_model_config(config.train_config), TASK.AUTO_MODEL, torch.float32)


def train(model: Path, tokenizer: Path, output: Path, *flags: str) -> list[float]:
    """Losses of three steps on random documents."""
    argv = ["--model_name", str(model), "--tokenizer_name", str(tokenizer), "--output_dir", str(output)]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    argv += ["--num_workers_dataloader", "0", "--context_length", "64", "--max_train_step", "3", "--lr", "1e-2", *flags]
    assert finetuning.main(argv) == 0
    return [event["loss"] for event in train_events(output)]


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--tokenizer_name.*eos_token"):
        load_tokenizer(TrainConfig(model_name="anything", tokenizer_name=str(tmp_path)))


@pytest.mark.parametrize(
    ("key", "empty"),
    [("unk_token", ""), ("eos_token", {"content": "", "__type": "AddedToken"}), ("extra_special_tokens", [""])],
)
def test_an_empty_special_token_is_refused(key: str, empty: Any, tiny_model: Path, tmp_path: Path) -> None:
    """transformers looks up an empty unk_token without end, and takes unk_token's id for any other."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {key: empty}))
    reason = rf"{key} in tokenizer_config\.json holds an empty token; name one there, or write null"
    with pytest.raises(ConfigError, match=rf"--model_name: no tokenizer could be loaded from .*{reason}"):
        load_tokenizer(TrainConfig(model_name=str(folder)))
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer_of_tools(str(folder))


def test_a_missing_pad_token_stays_missing_and_the_end_token_fills(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(TrainConfig(model_name=str(tiny_model)))
    assert tokenizer.pad_token_id is None
    assert padding_id(tokenizer, 600) == tokenizer.eos_token_id
    assert tokenizer.pad_token_id is None
    tokenizer.pad_token = "<unk>"
    assert padding_id(tokenizer, 600) == tokenizer.unk_token_id
    assert padding_id(tokenizer, tokenizer.unk_token_id) == tokenizer.eos_token_id, "a pad token without a row"


def test_the_end_tokens_embedding_is_trained(tiny_model: Path, tokenizer: Any) -> None:
    """With `padding_idx` its gradient would be zero, without a word."""
    model = load(tiny_model)[0]
    assert model.config.pad_token_id is None
    assert model.get_input_embeddings().padding_idx is None
    # Untied, so that the head gives this row no gradient of its own.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    end = tokenizer.eos_token_id
    ids = torch.tensor([5, 6, end, 7, 8, 9]).int().numpy()
    TASK.summed_loss(
        model, Collator(packing=False, padding_id=padding_id(tokenizer, 600))([[TokenSequence(ids, ids, 0)]])
    ).backward()
    assert model.get_input_embeddings().weight.grad[end].abs().max() > 0


@pytest.mark.parametrize(
    ("batching", "pad_token"),
    keep_fast(
        itertools.product(("padding", "packing"), ("<unk>", "</s>", "<pad>")),  # one it had, the end token, a new one
        [("padding", "</s>"), ("padding", "<pad>"), ("packing", "<unk>")],
    ),
)
def test_a_pad_token_changes_nothing_that_the_model_computes(
    pad_token: str, batching: str, tiny_model: Path, save_tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    flags = ("--batching_strategy", batching)
    without = train(tiny_model, save_tokenizer(None), tmp_path / "without", *flags)
    with_one = train(tiny_model, save_tokenizer(pad_token), tmp_path / "with", *flags)
    assert with_one == pytest.approx(without, rel=1e-6)
    for run in ("without", "with"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / run / "model")
        assert saved.config.pad_token_id is None
        assert saved.get_input_embeddings().padding_idx is None
        assert saved.config.vocab_size == AutoConfig.from_pretrained(tiny_model).vocab_size
    assert AutoTokenizer.from_pretrained(tmp_path / "without/model").pad_token is None
    assert AutoTokenizer.from_pretrained(tmp_path / "with/model").pad_token == pad_token


def test_an_adapter_trains_with_a_tokenizer_that_only_gained_a_pad_token(
    tiny_model: Path, save_tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    flags = ("--use_peft", "--lora_config.lora_dropout", "0", "--batching_strategy", "padding")
    without = train(tiny_model, save_tokenizer(None), tmp_path / "without", *flags)
    assert train(tiny_model, save_tokenizer("<pad>"), tmp_path / "with", *flags) == pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_grow_where_the_tokenizer_outgrew_the_model(
    tied: bool, tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    rows = len(before["model.embed_tokens.weight"])
    tokenizer.add_tokens(["<user>", "<assistant>", "<tool>"])
    model, weights, lines = load(tmp_path, tokenizer=tokenizer)
    assert "rank 0 reads" in weights.notes[0]
    assert len(lines) == 1
    assert str(rows) in lines[0]
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == rows + 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor[: len(before[name])], before[name]), name
        assert tensor.isfinite().all()
    assert len(model.get_output_embeddings().weight) == rows + 3
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_embeddings_of_a_model_with_rows_to_spare_do_not_shrink(tiny_model: Path, tokenizer: Any) -> None:
    model = build(tiny_model)
    model.resize_token_embeddings(len(tokenizer) + 8, mean_resizing=False)
    tokenizer.add_tokens(["<user>"])
    assert grow_embeddings(model, num_rows_needed(tokenizer), use_peft=False) == []
    assert grow_embeddings(model, num_rows_needed(tokenizer), use_peft=True) == []
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) + 7


def test_embeddings_of_two_tables_are_counted_together_and_not_grown() -> None:
    """Idefics keeps the embeddings of its last tokens apart."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"embed_dim": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = IdeficsConfig(**sizes, vocab_size=50, additional_vocab_size=2, vision_config=vision)
    model = IdeficsForVisionText2Text(config)
    assert grow_embeddings(model, 52, use_peft=False) == []
    assert model.get_input_embeddings().num_embeddings == 50
    with pytest.raises(ConfigError, match="--tokenizer_name: the tokenizer has 53 tokens, the model 52"):
        grow_embeddings(model, 53, use_peft=False)


def test_an_adapter_refuses_tokens_that_the_model_does_not_have(tiny_model: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<user>"])
    with pytest.raises(ConfigError, match="--tokenizer_name"):
        grow_embeddings(build(tiny_model), num_rows_needed(tokenizer), use_peft=True)
