"""Packing and padding: sequences that share a row, or a batch, are computed as if each were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import finetuning
from data.batches.packing import offsets_of_one_graph, pack_best_fit
from data.batches.padding import PaddedWidth
from data.sequences.tokenized import TokenSequence
from policies.loss.summed_loss import use_summed_loss
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.causal_lm import CausalLM
from tests.helpers import random_documents
from tests.helpers.processes import train_events
from tests.helpers.small_configs import SMALL, VOCAB

TASK = CausalLM()
TOLERANCE = 1e-5
SMALL_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),
    # A window smaller than the sequences: sliding and full attention take turns.
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=6),
    "gpt2": transformers.GPT2Config(**SMALL_GPT2, **NO_DROPOUT, bos_token_id=1, eos_token_id=2),
}
# transformers offers no sdpa for Gemma 2, whose attention scores are soft-capped.
VARIANTS = [
    (name, attention, mode)
    for name in CONFIGS
    for attention in ("sdpa", "eager")
    for mode in ("train", "eval")
    if (name, attention) != ("gemma2", "sdpa")
]


def make_model(name: str, attention: str = "sdpa", mode: str = "eval") -> Any:
    """Random weights, large enough that attention is far from uniform: so a leak shows in the first digit."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model.train(mode == "train")


def make_sequences(lengths: list[int], seed: int = 0) -> list[TokenSequence]:
    generator = np.random.default_rng(seed)
    sequences = []
    for source, length in enumerate(lengths):
        ids = generator.integers(3, VOCAB, length).astype(np.int32)
        labels = np.where(generator.random(length) < 0.3, -100, ids).astype(np.int32)
        sequences.append(TokenSequence(ids, labels, source))
    return sequences


def batch_logits(model: nn.Module, batch: CausalMicroBatch) -> torch.Tensor:
    """The logits of the loss: the model called as `summed_loss` calls it, without labels."""
    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).logits


def alone_logits(model: nn.Module, ids: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert (found - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


LENGTHS = st.lists(st.integers(1, 60), max_size=80)


@given(lengths=LENGTHS, row_length=st.integers(60, 90))
@settings(max_examples=200, deadline=None)
def test_every_sequence_is_in_exactly_one_row_and_no_row_is_too_long(lengths: list[int], row_length: int) -> None:
    rows = pack_best_fit(lengths, row_length)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= row_length for row in rows)


@given(lengths=LENGTHS)
@settings(max_examples=50, deadline=None)
def test_packing_the_same_lengths_gives_the_same_rows(lengths: list[int]) -> None:
    assert pack_best_fit(lengths, 60) == pack_best_fit(list(lengths), 60)


@given(lengths=LENGTHS)
@settings(max_examples=100, deadline=None)
def test_no_two_rows_could_have_been_one(lengths: list[int]) -> None:
    tokens = sorted(sum(lengths[index] for index in row) for row in pack_best_fit(lengths, 60))
    assert len(tokens) < 2 or tokens[0] + tokens[1] > 60


@given(lengths=LENGTHS, row_length=st.integers(60, 90))
@settings(max_examples=200, deadline=None)
def test_rows_are_as_full_as_those_of_plain_best_fit_decreasing(lengths: list[int], row_length: int) -> None:
    """Rows with the same space are alike, so the choice among them changes no row's length."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        space = min((space for space in free if space >= length), default=None)
        if space is None:
            space = row_length
        else:
            free.remove(space)
        free.append(space - length)
    rows = pack_best_fit(lengths, row_length)
    assert sorted(row_length - sum(lengths[index] for index in row) for row in rows) == sorted(free)


@pytest.mark.parametrize("row_length", [2048, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_lengths_as_dialogues_have_them_are_at_least_98_percent_full(seed: int, row_length: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(150), 0.8, 3000), 4, 2048).astype(int)
    rows = pack_best_fit(lengths, row_length)
    assert lengths.sum() / (len(rows) * row_length) >= 0.98


@pytest.mark.parametrize("length", [0, 61])
def test_a_sequence_that_fits_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="sequence 1"):
        pack_best_fit([5, length], 60)


@pytest.mark.parametrize(("name", "attention", "mode"), VARIANTS)
def test_packed_logits_are_those_of_each_sequence_alone(name: str, attention: str, mode: str) -> None:
    model = make_model(name, attention, mode)
    sequences = make_sequences([7, 11, 5, 1, 9, 16, 13, 2])
    rows = [sequences[:3], sequences[3:5], [sequences[5]], sequences[6:]]  # boundaries differ from row to row
    logits = batch_logits(model, Collator(packing=True, padding_id=2)(rows))
    for row, row_logits in zip(rows, logits, strict=True):
        start = 0
        for ids, _, _ in row:
            assert_close(row_logits[start : start + len(ids)], alone_logits(model, ids))
            start += len(ids)


@pytest.mark.parametrize(("name", "attention", "mode"), VARIANTS)
def test_padded_logits_are_those_of_each_sequence_alone(name: str, attention: str, mode: str) -> None:
    model = make_model(name, attention, mode)
    sequences = make_sequences([7, 1, 16, 9])
    batch = Collator(packing=False, padding_id=2)([[sequence] for sequence in sequences])
    for (ids, _, _), logits in zip(sequences, batch_logits(model, batch), strict=True):
        assert_close(logits[: len(ids)], alone_logits(model, ids))


@pytest.mark.parametrize(("name", "attention", "mode"), VARIANTS)
def test_changing_one_packed_sequence_changes_no_other_sequences_logits(name: str, attention: str, mode: str) -> None:
    model = make_model(name, attention, mode)
    before, others = make_sequences([6, 9, 8, 4]), make_sequences([6, 9, 8, 4], seed=1)
    starts = [0, 6, 15, 23, 27]
    collate = Collator(packing=True, padding_id=2)
    logits = batch_logits(model, collate([before]))[0]
    for changed in range(4):
        row = [others[i] if i == changed else before[i] for i in range(4)]
        moved = (batch_logits(model, collate([row]))[0] - logits).abs()
        for i in range(4):
            largest = moved[starts[i] : starts[i + 1]].max()
            assert (largest > 1e-2) if i == changed else (largest <= 1e-6), f"sequence {changed} moved sequence {i}"


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_a_batch_are_the_sum_of_each_sequences_alone(name: str, packing: bool) -> None:
    model = make_model(name, "eager", "train")
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    sequences = make_sequences([7, 11, 5, 9])
    for sequence in sequences:
        alone = Collator(packing=False, padding_id=2)([[sequence]])
        TASK.summed_loss(model, alone).backward()
    wanted = gradients(model)
    rows = [sequences[:3], sequences[3:]] if packing else [[sequence] for sequence in sequences]
    TASK.summed_loss(model, Collator(packing=packing, padding_id=2)(rows)).backward()
    for key, gradient in gradients(model).items():
        assert_close(gradient, wanted[key], 2e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_fills_unused_places_changes_neither_loss_nor_gradients(name: str, packing: bool) -> None:
    model = make_model(name, "eager", "train")
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    sequences = make_sequences([7, 12, 5])
    rows = [sequences[:1], sequences[1:]] if packing else [[sequence] for sequence in sequences]
    results = []
    for padding_id in (2, 50):
        loss = TASK.summed_loss(model, Collator(packing=packing, padding_id=padding_id)(rows))
        loss.backward()
        results.append((loss.item(), gradients(model)))
    (loss, wanted), (other_loss, found) = results
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for key, gradient in found.items():
        assert_close(gradient, wanted[key], 1e-6)


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_batches_filled_up_for_compiled_layers_have_the_same_loss_gradients_and_counts(
    name: str, packing: bool
) -> None:
    model = make_model(name, "eager", "train")
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    sequences = make_sequences([7, 12, 5])
    rows = [sequences[:1], sequences[1:]] if packing else [[sequence] for sequence in sequences]
    plain = Collator(packing=packing, padding_id=2)
    filled = Collator(packing=packing, padding_id=2, width=PaddedWidth(32, 32), num_rows=5)
    assert filled(rows).input_ids.shape == filled([]).input_ids.shape == (5, 32)
    results = []
    for batch in (plain(rows), filled(rows)):
        loss = TASK.summed_loss(model, batch)
        loss.backward()
        counts = batch.num_tokens, batch.num_label_tokens, batch.num_attended_pairs, batch.source_rows
        results.append((loss.item(), gradients(model), counts))
    (loss, wanted, counts), (other_loss, found, other_counts) = results
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert other_counts == counts
    for key, gradient in found.items():
        assert_close(gradient, wanted[key], 2e-5)


@pytest.mark.parametrize(
    ("documents", "num_rows", "offsets", "wanted"),
    [
        ([1, 2, 3, 1], 1, "shared", "shared"),  # half of the batches hold one document
        ([1, 2, 3, 1], 4, "shared", "all"),  # one batch in sixteen
        ([1, 1, 1, 1], 4, "shared", "shared"),
        ([1, 2, 3, 1], 4, "none", "none"),
    ],
)
def test_rare_batches_of_one_document_per_row_are_no_kind_of_their_own(
    documents: list[int], num_rows: int, offsets: Any, wanted: str
) -> None:
    assert offsets_of_one_graph(offsets, np.array(documents), num_rows) == wanted


def test_the_first_token_of_a_sequence_is_no_label_token() -> None:
    sequences = [sequence._replace(labels=sequence.input_ids.copy()) for sequence in make_sequences([4, 6, 3])]
    packed = Collator(packing=True, padding_id=2)([sequences])
    padded = Collator(packing=False, padding_id=2)([[sequence] for sequence in sequences])
    assert packed.labels[0, [0, 4, 10]].tolist() == [-100] * 3
    assert padded.labels[:, 0].tolist() == [-100] * 3
    assert packed.num_label_tokens == padded.num_label_tokens == 3 + 5 + 2
    assert packed.num_tokens == padded.num_tokens == 13
    assert packed.num_attended_pairs == padded.num_attended_pairs == 10 + 21 + 6
    assert packed.source_rows == padded.source_rows == (0, 1, 2)


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_rows_has_a_loss_and_gradients_of_exactly_zero(name: str, packing: bool) -> None:
    model = make_model(name, "eager", "train")
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    batch = Collator(packing=packing, padding_id=2)([])
    assert (batch.num_tokens, batch.num_label_tokens, batch.num_attended_pairs) == (0, 0, 0)
    loss = TASK.summed_loss(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients(model).values())


SEPARATES_NOTHING = {
    "opt": transformers.OPTConfig(
        vocab_size=600,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=128,
        dropout=0.0,
    ),
    "bloom": transformers.BloomConfig(
        vocab_size=600, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "falcon": transformers.FalconConfig(
        vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.0
    ),
}


@pytest.mark.parametrize("name", SEPARATES_NOTHING)
def test_a_model_that_cannot_tell_packed_sequences_apart_is_refused_or_computed_right(
    name: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """These models take no position ids into their masks: packed sequences would attend to each other."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SEPARATES_NOTHING[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model.save_pretrained(tmp_path / "model")
    flags = ["--model_name", str(tmp_path / "model"), "--tokenizer_name", str(tiny_model), "--max_train_step", "1"]
    flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--split_slice", "8"]
    flags += ["--run_validation", "False", "--save_model", "False", "--batch_size_training", "16"]
    flags += ["--num_workers_dataloader", "0", "--context_length", "128", "--output_dir", str(tmp_path / "run")]
    status = finetuning.main([*flags, "--batching_strategy", "packing"])
    if status == 2:
        assert "--batching_strategy" in capsys.readouterr().err
        return
    assert status == 0
    loss_sum = num_label_tokens = 0.0
    for sequence in random_documents.get_custom_dataset(None, None, "train")[:8]:
        logits = model(input_ids=torch.tensor([sequence["input_ids"]]), use_cache=False).logits[0, :-1]
        targets = torch.tensor(sequence["labels"][1:])
        loss_sum += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        num_label_tokens += (targets != -100).sum().item()
    assert train_events(tmp_path / "run")[0]["loss"] == pytest.approx(loss_sum / num_label_tokens, rel=1e-4)
