"""Encoder-decoders: the loss is that of transformers' own code, in chunks or not, and inputs are what it expects."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from data.batches.counts import BatchCounts
from data.batches.padding import PaddedWidth
from data.sequences.tokenized import TokenSequence
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.loss.summed_loss import summed_cross_entropy, use_summed_loss
from policies.quantization.choice import quantize_weights
from policies.quantization.packing import Quantization
from policies.quantization.quantized_linear import QuantizedLinear
from policies.wrapping import find_layers
from tasks.flops import Seq2SeqFlops
from tasks.seq2seq_batches import Seq2SeqCollator, Seq2SeqMicroBatch
from tasks.seq2seq_lm import FAMILIES, Seq2SeqLM
from tasks.task import BatchForm
from tests.helpers.seq2seq_models import VOCAB, make_config, make_model, make_tokenizer

TASK = Seq2SeqLM()
MODELS = ["bart", "pegasus", "t5", "flan-t5", "mt5"]
WIDTH = PaddedWidth(8, 64)


def make_rows(seed: int = 0) -> list[list[TokenSequence]]:
    """Rows of unequal sources and targets; one target has tokens without a label."""
    generator = np.random.default_rng(seed)
    rows = []
    for row, (source, target) in enumerate([(9, 5), (3, 12), (17, 2)]):
        ids, labels = (generator.integers(3, VOCAB, n, dtype=np.int32) for n in (source, target))
        labels[1:2] = -100 if row == 1 else labels[1:2]
        rows.append([TokenSequence(ids, labels, row)])
    return rows


def collator(model: Any) -> Seq2SeqCollator:
    form = BatchForm(vocab_size=VOCAB, widths=(WIDTH, WIDTH), packing=False, offsets="none")
    made = TASK.make_collator(make_tokenizer("bart"), model.config, form)
    assert isinstance(made, Seq2SeqCollator)
    return made


def own_loss(model: Any, batch: Seq2SeqMicroBatch) -> torch.Tensor:
    """The sum of the loss as transformers computes its mean, with the labels alone."""
    mask = batch.attention_mask
    loss = model(input_ids=batch.input_ids, attention_mask=mask, labels=batch.labels).loss
    return loss * batch.num_label_tokens


def assert_same_gradients(model: Any, reference: Any) -> None:
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("chunk_size", [0, 7])
def test_loss_and_gradients_are_those_of_the_model_itself(family: str, chunk_size: int) -> None:
    reference = make_model(family).train()
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), chunk_size, TASK.compute_logits)
    batch = collator(model)(make_rows())
    wanted, loss = own_loss(reference, batch), TASK.summed_loss(model, batch)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("family", MODELS)
def test_batches_filled_up_for_compiled_layers_have_the_same_loss_and_gradients(family: str) -> None:
    reference = make_model(family).train()
    model = copy.deepcopy(reference)
    plain = collator(model)
    batches = plain(make_rows()), replace(plain, num_rows=5)(make_rows())
    assert batches[1].input_ids.shape[0] == 5
    losses = []
    for own, batch in zip((reference, model), batches, strict=True):
        use_summed_loss(own, TASK.backbone(own), 0, TASK.compute_logits)
        loss = TASK.summed_loss(own, batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_same_gradients(model, reference)
    assert batches[0].num_tokens == batches[1].num_tokens


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("chunk_size", [0, 7])
def test_of_a_frozen_head_the_loss_is_the_same_with_adapters(family: str, chunk_size: int) -> None:
    """The encoder's adapters do not make the head train."""
    settings = peft.LoraConfig(r=4, target_modules=["q", "v", "q_proj", "v_proj"], task_type="SEQ_2_SEQ_LM")
    torch.manual_seed(0)
    reference = peft.get_peft_model(make_model(family), settings)
    for name, parameter in reference.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(reference)
    base = model.get_base_model()
    use_summed_loss(base, TASK.backbone(base), chunk_size, TASK.compute_logits)
    batch = collator(base)(make_rows())
    wanted, loss = own_loss(reference, batch), TASK.summed_loss(model, batch)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("family", ["bart", "flan-t5"])
def test_recomputed_layers_and_a_batch_without_padding_change_nothing(family: str) -> None:
    reference = make_model(family).train()
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    checkpoint_layers(find_layers(model), Checkpointing("full"))
    row = [[TokenSequence(np.arange(3, 19, dtype=np.int32), np.arange(3, 11, dtype=np.int32), 0)]]
    batch = collator(model)(row)
    assert batch.attention_mask is None
    wanted, loss = own_loss(reference, batch), TASK.summed_loss(model, batch)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(model, reference)


def test_label_smoothing_is_that_of_transformers_and_of_training_alone() -> None:
    reference = make_model("bart").train()
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits, label_smoothing=0.1)
    batch = collator(model)(make_rows())
    outputs = reference(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
    smoothed = LabelSmoother(epsilon=0.1)(Seq2SeqLMOutput(logits=outputs.logits), batch.labels)
    assert TASK.summed_loss(model, batch).item() == pytest.approx(smoothed.item() * batch.num_label_tokens, rel=1e-5)
    model.eval()
    assert TASK.summed_loss(model, batch).item() == pytest.approx(own_loss(reference, batch).item(), rel=1e-5)
    logits, targets = torch.randn(5, 9), torch.tensor([1, -100, 3, 8, -100])
    wanted = LabelSmoother(epsilon=0.3)(Seq2SeqLMOutput(logits=logits), targets) * 3
    assert summed_cross_entropy(logits, targets, 0.3).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_what_the_decoder_reads_is_what_the_models_own_code_makes_of_the_labels() -> None:
    for family in MODELS:
        model = make_model(family)
        batch = collator(model)(make_rows())
        own = model.prepare_decoder_input_ids_from_labels(batch.labels)
        assert torch.equal(batch.decoder_input_ids, own), family
        assert TASK.check_model(model, family) == []
    assert {make_config(family).model_type for family in MODELS} == set(FAMILIES)


def test_an_empty_micro_batch_has_no_loss_and_zero_gradients() -> None:
    model = make_model("t5").train()
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    batch = collator(model)([])
    assert (batch.num_tokens, batch.num_label_tokens, batch.num_cross_pairs) == (0, 0, 0)
    loss = TASK.summed_loss(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_layers_are_not_dropped_at_random() -> None:
    model = make_model("bart", encoder_layerdrop=0.5)
    assert TASK.check_model(model, "bart") == ["layerdrop: off, since ranks would drop different layers"]
    assert model.model.encoder.layerdrop == 0


def test_a_cut_keeps_the_special_tokens_of_source_and_target() -> None:
    class Train:
        source_prefix = ""

    ids = list(range(10, 30))
    rows = [{"input_ids": [0, *ids, 2], "labels": [0, *ids, 2]}, {"input_ids": [0, 9, 2], "labels": [0, 8, 2]}]
    build = TASK.make_reading(make_tokenizer("bart"), None, Train(), (8, 5)).build_sequences  # type: ignore[arg-type]
    cut = build(rows, name="test", context_length=8)
    assert cut[0].input_ids.tolist() == [0, *ids[:6], 2]
    assert cut[0].labels.tolist() == [0, *ids[:3], 2]
    assert cut[1].input_ids.tolist() == [0, 9, 2]
    lines = cut.describe("train")
    assert lines[0] == "train: 1 source cut: longer than max_source_length (--truncation), by 14 tokens in all"
    assert lines[1] == "train: 1 target cut: longer than max_target_length (--truncation), by 17 tokens in all"
    left = build(rows, name="test", context_length=8, truncation="left")
    assert left[0].input_ids.tolist() == [0, *ids[-6:], 2]
    assert len(build(rows, name="test", context_length=8, truncation="drop")) == 1


def test_flops_by_hand() -> None:
    """Two encoder layers and one decoder layer of width 32 with 64 in the middle; k and v of cross attention read the
    source."""
    square, mlp, head = 32 * 32, 2 * 32 * 64, 32 * VOCAB
    source, target = 2 * (4 * square + mlp) + 2 * square, 4 * square + 2 * square + mlp
    pairs = 3 * 4 * 32 * (2 + 1 + 1)
    for family in ("bart", "t5"):
        model = make_model(family, **({"decoder_layers": 1} if family == "bart" else {"num_decoder_layers": 1}))
        assert Seq2SeqFlops(model).count(BatchCounts(1, 2, 1, 1, 1, 1)) == 6 * (source + target + head) + pairs, family


def test_t5_casts_no_input_to_the_bytes_of_a_packed_weight() -> None:
    """Its `wo` asks for inputs of the weight's dtype, so it stays a plain layer, as in transformers."""
    model = make_model("flan-t5", d_ff=64).to("meta")
    note = quantize_weights(model, Quantization(4, "nf4", False, torch.float32, torch.uint8))
    assert note.endswith("all linear layers but the output head and wo")
    block = model.decoder.block[0]
    assert type(block.layer[2].DenseReluDense.wo) is torch.nn.Linear
    assert type(block.layer[2].DenseReluDense.wi_0) is type(block.layer[0].SelfAttention.q) is QuantizedLinear
