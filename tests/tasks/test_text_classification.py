"""Classification of texts: losses, gradients and scores are transformers' own, packed and padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from data.batches.padding import EXACT
from data.sequences.tokenized import TokenSequence
from policies.attention.functions import attention_by_offsets
from policies.text_scores import use_text_scores
from tasks.label_figures import figures_of_classes, figures_of_numbers, sums_of_classes, sums_of_numbers
from tasks.task import BatchForm
from tasks.text_batches import TextMicroBatch, last_token
from tasks.text_classification import TextClassification
from tests.helpers.text_models import CAUSAL, FAMILIES, IDS, make_config

VOCAB, TASK = 97, TextClassification()
KINDS = {"single_label_classification": 3, "multi_label_classification": 3, "regression": 1}


class FakeTokenizer:
    pad_token_id, eos_token_id, model_input_names = IDS["pad_token_id"], IDS["eos_token_id"], ("input_ids",)


def make_model(family: str, problem_type: str) -> Any:
    torch.manual_seed(0)
    config = make_config(family, VOCAB, num_labels=KINDS[problem_type], problem_type=problem_type)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.train()


def make_texts(problem_type: str) -> list[TokenSequence]:
    """One of them ends with the padding id, and one is of one token."""
    rng, texts = np.random.default_rng(0), []
    for number, length in enumerate((9, 4, 1, 13, 6)):
        ids = rng.integers(3, VOCAB, length).astype(np.int32)
        labels = {
            "single_label_classification": np.array([number % 3], dtype=np.int32),
            "multi_label_classification": np.flatnonzero(rng.random(3) < 0.5).astype(np.int32),
            "regression": np.array([rng.normal()], dtype=np.float32).view(np.int32),
        }[problem_type]
        texts.append(TokenSequence(ids, np.concatenate([[length], labels]).astype(np.int32), number))
    texts[0].input_ids[-1] = IDS["pad_token_id"]
    return texts


def collate(model: Any, rows: list[list[TokenSequence]], *, packing: bool = False, offsets: Any = "none") -> Any:
    form = BatchForm(VOCAB, (EXACT,), packing, offsets)
    return TASK.make_collator(FakeTokenizer(), model.config, form)(rows)


def by_transformers(model: Any, batch: TextMicroBatch) -> Any:
    mask = torch.arange(batch.input_ids.shape[1]) < batch.row_lengths[:, None]
    return model(batch.input_ids, attention_mask=mask.long(), labels=batch.wanted)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("problem_type", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_on_padded_rows(family: str, problem_type: str) -> None:
    texts = make_texts(problem_type)
    own = make_model(family, problem_type)
    batch = collate(own, [[text] for text in texts])
    loss = by_transformers(own, batch).loss
    loss.backward()
    model = make_model(family, problem_type)
    use_text_scores(model)
    found = TASK.summed_loss(model, batch) / batch.num_loss_terms
    found.backward()
    assert batch.num_loss_terms == len(texts)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    wanted = gradients(own)
    assert gradients(model).keys() == wanted.keys()
    for name, tensor in gradients(model).items():
        assert torch.allclose(tensor, wanted[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("family", CAUSAL)
def test_packed_texts_have_the_scores_that_they_have_alone(family: str) -> None:
    model = make_model(family, "single_label_classification").eval()
    texts = make_texts("single_label_classification")
    with torch.no_grad():
        alone = torch.cat([model(torch.from_numpy(t.input_ids).long()[None]).logits for t in texts])
        use_text_scores(model)
        packed = collate(model, [texts[:3], texts[3:]], packing=True)
        assert packed.read_positions.tolist() == [7, 12, 13, 19 + 12, 19 + 18]
        assert torch.allclose(TASK.scores(model, packed), alone, atol=1e-5)


def test_packed_texts_by_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    model = make_model("llama", "regression").eval()
    texts = make_texts("regression")
    with torch.no_grad():
        alone = torch.cat([model(torch.from_numpy(t.input_ids).long()[None]).logits for t in texts])
        AttentionInterface.register("causal_by_offsets", attention_by_offsets)
        model.set_attn_implementation("causal_by_offsets")
        use_text_scores(model)
        packed = collate(model, [texts[:3], texts[3:]], packing=True, offsets="shared")
        assert torch.allclose(TASK.scores(model, packed), alone, atol=1e-5)


@pytest.mark.parametrize("problem_type", KINDS)
@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_a_batch_without_texts_has_no_loss_and_gradients_of_zero(family: str, problem_type: str) -> None:
    model = make_model(family, problem_type)
    use_text_scores(model)
    batch = collate(model, [])
    loss = TASK.summed_loss(model, batch)
    loss.backward()
    assert (loss.item(), batch.num_loss_terms, batch.num_tokens) == (0.0, 0, 0)
    found = gradients(model)
    assert "score.weight" in found or "classifier.out_proj.weight" in found
    assert all(not tensor.any() for tensor in found.values())


def test_a_second_text_has_token_types_of_its_own() -> None:
    model = make_model("bert", "single_label_classification")
    texts = make_texts("single_label_classification")[:2]
    texts[0].labels[0] = 5
    FakeTokenizer.model_input_names = ("input_ids", "token_type_ids")
    try:
        batch = collate(model, [[text] for text in texts])
    finally:
        FakeTokenizer.model_input_names = ("input_ids",)
    assert batch.token_type_ids.tolist() == [[0] * 5 + [1] * 4, [0] * 9]


def test_weights_of_classes_multiply_the_losses_of_their_texts() -> None:
    model = make_model("llama", "single_label_classification")
    use_text_scores(model)
    batch = collate(model, [[text] for text in make_texts("single_label_classification")])
    weighted = TextClassification(class_weights=(2.0, 0.0, 0.5))
    losses = torch.nn.functional.cross_entropy(TASK.scores(model, batch), batch.wanted, reduction="none")
    wanted = (losses * torch.tensor([2.0, 0.0, 0.5])[batch.wanted]).sum()
    assert weighted.summed_loss(model, batch).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_last_token_is_the_one_that_transformers_reads() -> None:
    ids = np.array([5, 2, 7, 2, 2])
    assert last_token(ids, 2) == 2
    assert last_token(np.array([2, 2]), 2) == 0


def test_figures_of_classes() -> None:
    scores = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 2, 1], [0, 0, 9]]).double()
    wanted = torch.tensor([0, 1, 2, 2])
    sums = sum(sums_of_classes(scores[part], wanted[part]) for part in (slice(0, 1), slice(1, 4)))
    found = figures_of_classes(sums.tolist(), 4)
    assert found == {"accuracy": 0.75, "macro_f1": pytest.approx((1 + 2 / 3 + 2 / 3) / 3)}


def test_figures_of_several_classes() -> None:
    scores = torch.tensor([[3.0, -1], [2, 2], [-1, -1]]).double()
    wanted = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    found = figures_of_classes(sums_of_classes(scores, wanted).tolist(), 3)
    assert found == {"accuracy": pytest.approx(1 / 3), "macro_f1": pytest.approx((1 + 0) / 2)}


@pytest.mark.parametrize("wanted", [[0, 1], [[0.0, 0], [1, 0]]], ids=["one", "several"])
def test_scores_that_are_nan_are_of_no_class(wanted: Any) -> None:
    scores = torch.full((2, 2), torch.nan).double()
    found = figures_of_classes(sums_of_classes(scores, torch.tensor(wanted)).tolist(), 2)
    assert found == {"accuracy": 0, "macro_f1": 0}


def test_figures_of_numbers() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=20), rng.normal(size=20)
    sums = sums_of_numbers(torch.from_numpy(x), torch.from_numpy(y)).tolist()
    found = figures_of_numbers(sums, 20)
    assert found["mse"] == pytest.approx(np.mean((x - y) ** 2))
    assert found["correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert "correlation" not in figures_of_numbers([1.0, 20.0, 20.0, 20.0, 20.0, 20.0], 20), "one side is constant"
    for scale, shift in ((1e-6, 0.0), (1.0, 2020.123)):
        near, constant = torch.from_numpy(scale * y + shift), torch.full([20], scale + shift, dtype=torch.float64)
        sums = sums_of_numbers(torch.from_numpy(scale * x + shift), near).tolist()
        assert figures_of_numbers(sums, 20)["correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1])
        assert "correlation" not in figures_of_numbers(sums_of_numbers(constant, near).tolist(), 20), "roundings alone"
