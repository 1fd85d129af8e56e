"""The summed loss, in chunks or not, is cross-entropy on the full logits, for every kind of head."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode

from data.tokens.labels import shift_left
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.loss.summed_loss import summed_cross_entropy, use_summed_loss
from policies.wrapping import find_layers
from tasks.causal_lm import CausalLM
from tests.helpers.causal_models import CONFIGS, make_batch, make_model, reference_loss
from tests.helpers.small_configs import SMALL, VOCAB
from utils.errors import ConfigError
from utils.positions import positions_of

TASK = CausalLM()
CHUNK_SIZES = [0, 1, 7, 64, 10_000]


def freeze_head(model: Any) -> None:
    """All but the decoder, and the embedding where the head is tied to it."""
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(False)


@pytest.mark.parametrize("frozen", ["nothing", "head"])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_cross_entropy_on_full_logits(name: str, chunk_size: int, frozen: str) -> None:
    reference = make_model(name)
    if frozen == "head":
        freeze_head(reference)
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), chunk_size, TASK.compute_logits)
    batch = make_batch()
    wanted = reference_loss(reference, batch)
    wanted.backward()
    loss = TASK.summed_loss(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    gradients = dict(model.named_parameters())
    for key, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert gradients[key].grad is None or not gradients[key].grad.any()
            continue
        error = (gradients[key].grad - parameter.grad).abs().max()
        assert error <= 1e-5 * max(1.0, parameter.grad.abs().max().item()), key


@pytest.mark.parametrize("chunk_size", [0, 7, 10_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_with_nothing_to_learn_has_a_loss_and_gradients_of_exactly_zero(name: str, chunk_size: int) -> None:
    model = make_model(name)
    use_summed_loss(model, TASK.backbone(model), chunk_size, TASK.compute_logits)
    loss = TASK.summed_loss(model, make_batch(learned=False))
    loss.backward()
    assert loss.item() == 0
    wanted = make_model(name)
    reference_loss(wanted, make_batch()).backward()
    for (key, parameter), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        if other.grad is not None:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), key


def flops_and_kept_logits(model: Any, chunk_size: int) -> tuple[int, int]:
    """Of a forward and a backward pass; and how many tensors as wide as the vocabulary stay in between."""
    use_summed_loss(model, TASK.backbone(model), chunk_size, TASK.compute_logits)
    saved: list[weakref.ref[torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor))
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = TASK.summed_loss(model, make_batch())
        alive = [tensor for reference in saved if (tensor := reference()) is not None]
        num_wide = sum(tensor.shape[-1:] == (VOCAB,) for tensor in alive)
        loss.backward()
    return counter.get_total_flops(), num_wide


@pytest.mark.parametrize("chunk_size", [0, 7])
def test_no_logits_are_kept_and_none_are_computed_again(chunk_size: int) -> None:
    """Of a trained head the FLOPs are those of cross-entropy on full logits; a frozen one has one product less."""
    reference, frozen, batch = make_model("llama"), make_model("llama"), make_batch()
    freeze_head(frozen)
    with FlopCounterMode(display=False) as counter:
        reference_loss(reference, batch).backward()
    product = 2 * reference.get_output_embeddings().weight.numel()
    unlearned = 3 * product * (batch.labels.numel() - batch.target_positions.numel())
    flops, num_kept = flops_and_kept_logits(make_model("llama"), chunk_size)
    assert (flops, num_kept) == (counter.get_total_flops() - unlearned, 0)
    weight_gradient = product * batch.target_positions.numel()
    assert flops_and_kept_logits(frozen, chunk_size) == (flops - weight_gradient, 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_labels_the_model_answers_as_before(name: str) -> None:
    reference = make_model(name).eval()
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    batch = make_batch()
    TASK.summed_loss(model, batch).backward()  # nothing of a chunk may stay behind
    with torch.no_grad():
        found, wanted = model(input_ids=batch.input_ids), reference(input_ids=batch.input_ids)
    assert type(found) is type(wanted)
    assert torch.equal(found.logits, wanted.logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_gives_what_it_gave_before(name: str) -> None:
    reference = make_model(name).eval()
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    TASK.summed_loss(model, make_batch()).backward()
    prompt = torch.arange(5, 12)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **options), reference.generate(prompt, **options))


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "gpt2"])
def test_recomputed_layers_change_neither_loss_nor_gradients(name: str) -> None:
    reference = make_model(name)
    model = copy.deepcopy(reference)
    for each in (reference, model):
        use_summed_loss(each, TASK.backbone(each), 7, TASK.compute_logits)
    checkpoint_layers(find_layers(model), Checkpointing("full"))
    batch = make_batch()
    wanted, loss = TASK.summed_loss(reference, batch), TASK.summed_loss(model, batch)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [0, 7])
def test_naming_the_target_positions_changes_neither_loss_nor_gradients(chunk_size: int) -> None:
    """They only spare the head the positions at which nothing is learned."""
    reference = make_model("gemma2")
    model = copy.deepcopy(reference)
    for each in (reference, model):
        use_summed_loss(each, TASK.backbone(each), chunk_size, TASK.compute_logits)
    batch = make_batch()
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "targets": shift_left(batch.labels).reshape(-1),
    }
    wanted, loss = reference(**inputs), TASK.summed_loss(model, batch)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(500, VOCAB, generator=generator)).bfloat16()
    targets = torch.randint(0, VOCAB, (500,), generator=generator)
    wanted = F.cross_entropy(logits.double(), targets, reduction="sum").item()
    assert summed_cross_entropy(logits, targets).item() == pytest.approx(wanted, rel=1e-6)


def test_labels_shift_by_one_and_nothing_follows_the_last() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [5, -100, 7, 8]])
    assert shift_left(labels).tolist() == [[2, -100, 4, -100], [-100, 7, 8, -100]]


@pytest.mark.parametrize("config", [transformers.Llama4TextConfig, transformers.ModernBertDecoderConfig])
def test_the_decoder_is_found_where_transformers_names_the_model_or_its_head(config: Any) -> None:
    """transformers takes Llama 4 for its own decoder, and the head of ModernBERT's decoder for the decoder."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(**SMALL | {"pad_token_id": 0}))
    TASK.check_model(model, "m")
    assert TASK.backbone(model) == [model.model]
    del model.model
    with pytest.raises(ConfigError, match="does not say where the decoder"):
        TASK.check_model(model, "m")


def test_a_model_that_counts_behind_its_padding_id_has_fewer_positions() -> None:
    model = make_model("roberta")
    ids = torch.full((1, positions_of(model.config) or 0), 5)
    assert ids.shape[1] == model.config.max_position_embeddings - 3  # those of the padding id and before
    model(input_ids=ids)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(input_ids=torch.cat([ids, ids[:, :1]], dim=1))


@pytest.mark.parametrize("chunk_size", [0, 7])
def test_dft_weighs_each_token_by_its_own_probability_in_training_alone(chunk_size: int) -> None:
    """Equation 9 of arXiv 2508.05629: the probability is a constant."""
    reference = make_model("llama")
    model = copy.deepcopy(reference)
    use_summed_loss(model, TASK.backbone(model), chunk_size, TASK.compute_logits, by_probability=True)
    batch = make_batch()
    plain = reference_loss(reference, batch)
    logits = reference(**TASK.model_inputs(batch), use_cache=False).logits.flatten(0, 1)[batch.target_positions]
    log_probs = logits.log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    wanted = -(log_probs.exp().detach() * log_probs).sum()
    wanted.backward()
    loss = TASK.summed_loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)
    model.eval()
    assert TASK.summed_loss(model, batch).item() == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("chunk_size", [0, 7])
def test_accuracy_and_entropy_of_label_tokens_are_those_of_full_logits(chunk_size: int) -> None:
    model, batch = make_model("llama").eval(), make_batch()
    logits = model(**TASK.model_inputs(batch), use_cache=False).logits.flatten(0, 1)[batch.target_positions]
    wanted = reference_loss(model, batch).item()
    use_summed_loss(model, TASK.backbone(model), chunk_size, TASK.compute_logits)
    with torch.no_grad():
        loss, num_right, entropies = TASK.eval_sums(model, batch).tolist()
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert num_right == int((logits.argmax(-1) == batch.targets).sum())
    distribution = torch.distributions.Categorical(logits=logits)
    assert entropies == pytest.approx(distribution.entropy().sum().item(), rel=1e-5)
    figures = TASK.eval_figures([num_right, entropies], len(batch.targets))
    assert figures == {
        "token_accuracy": num_right / len(batch.targets),
        "token_entropy": entropies / len(batch.targets),
    }
    with torch.no_grad():
        assert TASK.eval_sums(model, make_batch(learned=False)).tolist() == [0, 0, 0]


def test_tokens_whose_logits_are_nan_are_not_right() -> None:
    model, batch = make_model("llama").eval(), make_batch()
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    batch.targets.zero_()  # the place of the first NaN
    with torch.no_grad():
        assert TASK.eval_sums(model, batch)[1] == 0
