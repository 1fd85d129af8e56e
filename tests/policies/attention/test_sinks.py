"""Attention with sinks beside a plain softmax with one more column, and models with sinks beside transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.attention import sinks
from policies.attention.choice import BY_OFFSETS, choose_attention, keep_documents_apart, rows_that_need_offsets
from policies.attention.flash_attention_4 import NO_WINDOW, flash_attention_4
from policies.attention.functions import attention_by_offsets
from policies.attention.packing_leaks import check_packing_isolates
from policies.loss.summed_loss import use_summed_loss
from policies.mixed_precision import Precision
from policies.wrapping import find_layers
from tasks.causal_batches import Collator
from tasks.causal_lm import CausalLM
from tests.helpers.flash_attention_4 import has_kernels
from tests.helpers.packed_models import WITH_SINKS, make_documents, make_model
from tests.helpers.small_configs import VOCAB
from utils.device import DeviceFacts
from utils.errors import ConfigError

TASK = CausalLM()
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = Precision("bf16-true", torch.bfloat16, torch.bfloat16)
FP32 = Precision("fp32", torch.float32, torch.float32)
HOST, AMPERE = DeviceFacts("cpu", 2**34, has_bf16=False), DeviceFacts("cuda", 2**37, has_bf16=True)
TURING = DeviceFacts("cuda", 2**34, has_bf16=False)
LENGTHS = [7, 1, 13, 3]  # tokens of the documents of a row


def make_inputs(
    lengths: list[int],
    *,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Query, key, value, sinks and a gradient of the output. Sinks are as large as the scores' sums."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), number, head_dim) for number in (heads, key_heads, key_heads, heads)]
    query, key, value, probe = (torch.randn(shape, generator=generator) for shape in shapes)
    columns = 2 + torch.randn(heads, generator=generator)
    return [tensor.to(device, dtype) for tensor in (2 * query, key, value, columns, probe)]


def offsets_of(lengths: list[int], device: torch.device = CPU) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


def visible_keys(lengths: list[int], window: int, device: torch.device = CPU) -> torch.Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    visible = (document[:, None] == document).tril()
    return visible if window == NO_WINDOW else visible.triu(-window)


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, columns: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """A softmax over the keys' scores and one more column, as transformers' eager attention has it."""
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1).transpose(0, 1) for tensor in (key, value))
    scores = query.transpose(0, 1) @ keys.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    scores = torch.cat([scores, columns[:, None, None].expand(-1, len(query), 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ values).transpose(0, 1)


def run(attend: Any, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The output, and the gradients of query, key, value and sinks."""
    *leaves, probe = (tensor.to(dtype) for tensor in tensors)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, probe)]


@pytest.mark.parametrize("window", [NO_WINDOW, 3, 0])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("seen_by_loss", ["all tokens", "first tokens"])
def test_outputs_and_gradients_are_those_of_a_softmax_with_one_more_column(
    window: int, key_heads: int, seen_by_loss: str
) -> None:
    """In fp64, where nothing hides behind rounding.

    If the sums had no gradient, outputs would be right, and the gradients of queries and keys off by half, of first
    tokens by all.
    """
    tensors, offsets = make_inputs(LENGTHS, key_heads=key_heads), offsets_of(LENGTHS)
    if seen_by_loss == "first tokens":
        is_first = torch.zeros(sum(LENGTHS), dtype=torch.bool).index_fill(0, offsets[:-1].long(), True)
        tensors[-1][~is_first] = 0
    visible = visible_keys(LENGTHS, window)
    wanted = run(lambda *leaves: plain_attention(*leaves, visible), tensors, torch.float64)

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        return sinks.attention_with_sinks(*leaves, offsets, max(LENGTHS), window=window)

    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        for ours, theirs in zip(run(attend, tensors, dtype), wanted, strict=True):
            assert ours.dtype == dtype
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-2)


def loss_and_gradients(model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = TASK.summed_loss(model, batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.item(), gradients


def learning(document: TokenSequence, most: int | None) -> TokenSequence:
    """The document with labels for its first tokens alone, or for all."""
    labels = document.labels.copy()
    if most is not None:
        labels[most:] = IGNORE_INDEX
    return document._replace(labels=labels)


@pytest.mark.parametrize("most", [None, 3], ids=["all labels", "labels of first tokens"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", WITH_SINKS)
def test_losses_and_gradients_are_those_of_each_document_alone_by_transformers_own_attention(
    name: str, packed: bool, most: int | None
) -> None:
    documents = [learning(document, most) for document in make_documents([7, 11, 5, 1, 9, 16, 13, 2])]
    plain = make_model(name, "eager")
    use_summed_loss(plain, TASK.backbone(plain), 0, TASK.compute_logits)
    wanted_loss, wanted = 0.0, dict[str, torch.Tensor]()
    for document in documents:
        loss, gradients = loss_and_gradients(plain, Collator(packing=False, padding_id=0)([[document]]))
        wanted_loss += loss
        wanted = {key: gradient + wanted.get(key, 0) for key, gradient in gradients.items()}
    model = make_model(name, "eager")
    train = parse_flags(["--model_name", "m", "--batching_strategy", "packing" if packed else "padding"]).train_config
    assert choose_attention(model, train, FP32, HOST, 16) == []
    assert model.config._attn_implementation == BY_OFFSETS
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    rows = [documents[:3], documents[3:5], documents[5:]] if packed else [[document] for document in documents]
    batch = Collator(packing=packed, padding_id=0, offsets=rows_that_need_offsets(model, 16))(rows)
    assert batch.attention_mask is None
    loss, gradients = loss_and_gradients(model, batch)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert sum(".sinks" in key for key in gradients) == 2
    for key, gradient in gradients.items():  # each by itself: those of sinks are smaller than most
        assert (gradient - wanted[key]).abs().max() <= 1e-5 * wanted[key].abs().max(), key


def test_packed_rows_of_gpt_oss_leak_with_the_masks_of_transformers_and_not_by_offsets() -> None:
    for attention, leaks in (("eager", True), (BY_OFFSETS, False)):
        model = make_model("gpt_oss", attention)
        use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
        collate = Collator(packing=True, padding_id=0, offsets=rows_that_need_offsets(model, 64))

        def token_losses(rows: Any, model: Any = model, collate: Collator = collate) -> torch.Tensor:
            return TASK.token_losses(model, collate(rows))

        if leaks:
            with pytest.raises(ConfigError, match="would see each other"):
                check_packing_isolates(model, token_losses, vocab_size=VOCAB, row_length=64)
        else:
            check_packing_isolates(model, token_losses, vocab_size=VOCAB, row_length=64)


@pytest.mark.parametrize(
    ("flags", "options", "precision", "device", "packs"),
    [
        ([], {}, FP32, HOST, True),
        (["--compile"], {}, FP32, HOST, True),
        ([], {}, BF16, AMPERE, True),
        ([], {}, FP32, AMPERE, False),
        ([], {}, Precision("fp16", torch.float32, torch.float16), TURING, False),
        (["--use_fast_kernels", "False"], {}, FP32, HOST, False),
        ([], {"attention_dropout": 0.1}, FP32, HOST, False),
        ([], {"head_dim": 12}, BF16, AMPERE, False),
    ],
    ids=["a CPU", "compiled", "Ampere", "fp32 on a GPU", "Turing", "without fast kernels", "dropout", "odd heads"],
)
def test_gpt_oss_is_packed_by_default_wherever_there_are_kernels_and_padded_elsewhere(
    flags: list[str], options: dict[str, Any], precision: Precision, device: DeviceFacts, packs: bool
) -> None:
    config = copy.deepcopy(WITH_SINKS["gpt_oss"])
    config.update(options)
    by_default = keep_documents_apart(parse_flags(["--model_name", "m", *flags]), config, precision, device)
    assert by_default.train_config.batching_strategy == ("packing" if packs else "padding")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    choose_attention(model, by_default.train_config, precision, device, 16)
    assert model.config._attn_implementation == (BY_OFFSETS if packs else "eager")
    asked = parse_flags(["--model_name", "m", "--batching_strategy", "packing", *flags])
    if packs:
        assert keep_documents_apart(asked, config, precision, device) == asked
    else:
        assert "documents would see each other" in by_default.notes[-1]
        with pytest.raises(ConfigError, match="give --batching_strategy padding"):
            keep_documents_apart(asked, config, precision, device)


@pytest.mark.parametrize("window", [NO_WINDOW, 3])
def test_its_operators_are_what_torch_asks_of_operators(window: int) -> None:
    *inputs, probe = make_inputs(LENGTHS)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    options = (offsets_of(LENGTHS), offsets_of(LENGTHS), max(LENGTHS), max(LENGTHS), 0.3, window)
    torch.library.opcheck(sinks.attend, (*inputs, *options))
    with torch.no_grad():
        output, log_sums = sinks.attend(*inputs, *options)
        torch.library.opcheck(sinks.attend_backward, (probe, *inputs[:3], output, log_sums, *options))


class Calls(TorchDispatchMode):
    """Counts the calls of the forward operator."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.varlen_attn_with_sinks.attend.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "num_calls"), [("selective", 2), ("full", 4)])
def test_selective_checkpointing_keeps_the_output_and_full_computes_it_again(mode: str, num_calls: int) -> None:
    model = make_model("gpt_oss", BY_OFFSETS)
    checkpoint_layers(find_layers(model), Checkpointing(mode))
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    with Calls() as calls:
        loss_and_gradients(model, Collator(packing=True, padding_id=0, offsets="shared")([make_documents([7, 5])]))
    assert calls.number == num_calls


@pytest.mark.parametrize("window", [None, 3])
def test_compiled_there_is_no_break_whatever_documents_a_batch_holds(window: int | None) -> None:
    """On CPUs, too, where attention without sinks reads the offsets outside of an operator."""
    *inputs, _ = make_inputs([24])
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs[:3])

    def attend(offsets: torch.Tensor, longest: int) -> torch.Tensor:
        given = {"sliding_window": window, "cu_seq_lens_q": offsets, "max_length_q": longest, "s_aux": inputs[3]}
        return attention_by_offsets(nn.Module(), query, key, value, None, **given)[0]

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([7, 1, 13, 3], [20, 4], [24]):
        given = (offsets_of(lengths), max(lengths))
        assert torch.equal(compiled(*given), attend(*given))


def test_a_plan_counts_the_kernels_of_sdpa_which_keep_the_same() -> None:
    *inputs, _ = make_inputs([24])
    query, key, value = (tensor.transpose(0, 1)[None].to("meta").requires_grad_() for tensor in inputs[:3])
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    seen = []
    for given in ({"s_aux": inputs[3].to("meta"), "sliding_window": 3}, {}):
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):  # type: ignore[misc]
            output, _ = attention_by_offsets(module, query, key, value, None, **given)  # type: ignore[arg-type]
        seen.append((output.shape, kept))
    assert seen[0] == seen[1]


def test_what_the_kernels_do_not_take_is_an_error() -> None:
    *inputs, _ = make_inputs([12])
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs[:3])
    with pytest.raises(ValueError, match="takes no mask"):
        attention_by_offsets(nn.Module(), query, key, value, torch.ones(1, 1, 12, 12), s_aux=inputs[3])
    with pytest.raises(ValueError, match="no dropout"):
        attention_by_offsets(nn.Module(), query, key, value, None, dropout=0.1, s_aux=inputs[3])
    with pytest.raises(ValueError, match="takes no cache"):
        attention_by_offsets(nn.Module(), query[:, :, -1:], key, value, None, s_aux=inputs[3])


def test_flops_are_those_of_each_document_and_what_causality_leaves_out_is_not_counted() -> None:
    *inputs, probe = make_inputs(LENGTHS)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with FlopCounterMode(display=False) as counter:
        sinks.attention_with_sinks(*leaves, offsets_of(LENGTHS), max(LENGTHS)).backward(probe)
    products = 2 + 5  # of forward, and of backward, which computes the scores again
    assert counter.get_total_flops() == sum(products * 2 * 4 * length**2 * 8 // 2 for length in LENGTHS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are a GPU's")
@pytest.mark.parametrize("kernel", ["torch", "flash-attn-4"])
@pytest.mark.parametrize("window", [NO_WINDOW, 127], ids=["", "in windows"])
@pytest.mark.parametrize("lengths", [[700, 1, 37, 128, 158], [512, 512]], ids=["packed", "dense"])
@pytest.mark.parametrize("key_heads", [16, 2])
def test_on_a_gpu_in_bf16_kernels_are_as_near_to_fp32_as_a_plain_softmax(
    key_heads: int, lengths: list[int], window: int, kernel: str
) -> None:
    """Gradients of documents' first tokens by themselves, too, where a sink has its largest share."""
    if kernel == "flash-attn-4" and not has_kernels():
        pytest.skip("needs flash-attn-4, and a Hopper or Blackwell GPU")
    tensors = make_inputs(lengths, heads=16, key_heads=key_heads, head_dim=64, dtype=torch.bfloat16, device=CUDA)
    offsets, visible = offsets_of(lengths, CUDA), visible_keys(lengths, window, CUDA)

    def by_kernel(*leaves: torch.Tensor) -> torch.Tensor:
        if kernel == "torch":
            return sinks.attention_with_sinks(*leaves, offsets, max(lengths), window=window)  # type: ignore[arg-type]
        if len(set(lengths)) == 1:
            heads = (leaf.unflatten(0, (len(lengths), -1)) for leaf in leaves[:3])
            return flash_attention_4(*heads, window=window, sinks=leaves[3]).flatten(0, 1)  # type: ignore[arg-type]
        options: dict[str, Any] = {"cu_seqlens": offsets, "max_length": max(lengths), "window": window}
        return flash_attention_4(*leaves[:3], sinks=leaves[3], **options)

    def plain(*leaves: torch.Tensor) -> torch.Tensor:
        return plain_attention(*leaves, visible)  # type: ignore[arg-type]

    starts = offsets[:-1].long()
    first_alone = torch.zeros_like(tensors[-1]).index_copy_(0, starts, tensors[-1][starts])
    for case, probe in (("all tokens", tensors[-1]), ("first tokens", first_alone)):
        given = [*tensors[:-1], probe]
        truth = run(plain, given, torch.float32)
        found, wanted = run(by_kernel, given, torch.bfloat16), run(plain, given, torch.bfloat16)
        for name, true, ours, theirs in zip(("output", "dq", "dk", "dv", "dsinks"), truth, found, wanted, strict=True):
            far, unavoidable = (((each.float() - true).norm() / true.norm()).item() for each in (ours, theirs))
            print(
                f"{kernel}, {case}, window {window}, {key_heads} key heads: {name} {far:.2e}, plain {unavoidable:.2e}"
            )
            assert far <= max(1.2 * unavoidable, 1e-2), name
