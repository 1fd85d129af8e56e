"""Attention by the offsets of packed documents: here each by itself, on GPUs with the variable-length kernel."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.attention.choice import (
    BY_OFFSETS,
    choose_attention,
    keep_documents_apart,
    rows_that_need_offsets,
    what_hinders_offsets,
)
from policies.attention.packing_leaks import check_packing_isolates
from policies.loss.summed_loss import use_summed_loss
from policies.mixed_precision import Precision
from tasks.causal_batches import Collator
from tasks.causal_lm import CausalLM
from tests.helpers.packed_models import CONFIGS, WITH_SINKS, loss_and_gradients, make_documents, make_model
from tests.helpers.small_configs import COMMON, GPT2, OPT, SMALL, VOCAB
from utils.compat import LEAKS_WHEN_PACKED
from utils.device import DeviceFacts, facts_of
from utils.errors import ConfigError

TASK = CausalLM()

BF16 = Precision("bf16-true", torch.bfloat16, torch.bfloat16)
FP32 = Precision("fp32", torch.float32, torch.float32)
HOST = DeviceFacts("cpu", 2**34, has_bf16=False)

LEAKING: dict[str, Any] = {
    "biogpt": transformers.BioGptConfig(**SMALL),
    "bloom": transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "falcon": transformers.FalconConfig(**COMMON, vocab_size=VOCAB),
    "mamba": transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8),
    "mamba2": transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1
    ),
    "minimax": transformers.MiniMaxConfig(
        **SMALL, head_dim=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"], block_size=16
    ),
    "mpt": transformers.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
    "opt": transformers.OPTConfig(**OPT, vocab_size=VOCAB, word_embed_proj_dim=32),
}
STATEFUL = transformers.Qwen3NextConfig(
    **SMALL,
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    offsets=st.sampled_from(["shared", "all"]),
)
@settings(max_examples=100, deadline=None)
def test_offsets_are_where_documents_begin_and_what_fills_a_row_is_one_more(
    rows: list[list[int]], offsets: Any
) -> None:
    packed = [make_documents(lengths) for lengths in rows]
    batch = Collator(packing=True, padding_id=0, offsets=offsets)(packed)
    width = batch.input_ids.shape[1]
    expected = [0]
    for lengths in rows:
        filled = [*lengths, width - sum(lengths)] if sum(lengths) < width else lengths
        for length in filled:
            expected.append(expected[-1] + length)
    if offsets == "shared" and all(len(row) == 1 for row in rows):  # plain causal attention, padding or not
        assert (batch.cu_seqlens, batch.max_seqlen) == (None, 0)
        return
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == expected
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == int(np.diff(expected).max())


@pytest.mark.parametrize("one_each", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_by_offsets_loss_and_gradients_are_the_sum_of_each_documents_alone(name: str, one_each: bool) -> None:
    """The documents are longer than the windows of Mistral and Gemma 3. Rows may be one document each, too."""
    documents = make_documents([15, 15, 15] if one_each else [7, 11, 5, 1, 9, 16, 13, 2])
    rows = [[document] for document in documents] if one_each else [documents[:3], documents[3:5], documents[5:]]
    wanted_loss, wanted = 0.0, torch.zeros(())
    plain = make_model(name, "sdpa")
    use_summed_loss(plain, TASK.backbone(plain), 0, TASK.compute_logits)
    for document in documents:
        loss, gradients = loss_and_gradients(plain, Collator(packing=False, padding_id=0)([[document]]))
        wanted_loss, wanted = wanted_loss + loss, wanted + gradients
    model = make_model(name, BY_OFFSETS)
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    collate = Collator(packing=True, padding_id=0, offsets=rows_that_need_offsets(model, 16))
    loss, gradients = loss_and_gradients(model, collate(rows))
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert (gradients - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(("window", "rows"), [(6, "all"), (15, "all"), (16, "shared"), (0, "shared"), (None, "shared")])
def test_only_windows_shorter_than_a_row_need_the_offsets_of_every_row(window: int | None, rows: str) -> None:
    config = transformers.MistralConfig(**SMALL, sliding_window=window)
    config._attn_implementation = BY_OFFSETS
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL))
    model.config = config
    assert rows_that_need_offsets(model, 16) == rows
    config._attn_implementation = "sdpa"
    assert rows_that_need_offsets(model, 16) == "none"


@pytest.mark.parametrize("padding_id", [0, 7])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
def test_padded_rows_without_a_mask_give_the_losses_and_gradients_of_masked_ones(name: str, padding_id: int) -> None:
    rows = [[document] for document in make_documents([7, 3, 12])]
    results = []
    for attention, offsets in (("sdpa", "none"), (BY_OFFSETS, "shared")):
        model = make_model(name, attention)
        use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
        batch = Collator(packing=False, padding_id=padding_id, offsets=offsets, num_rows=4)(rows)
        assert (batch.attention_mask is None) == (offsets == "shared")
        assert batch.input_ids.shape == (4, 12)
        results.append(loss_and_gradients(model, batch))
    (wanted_loss, wanted), (loss, gradients) = results
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert (gradients - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("config", "flags", "row_length", "spared"),
    [
        (CONFIGS["llama"], [], 16, True),
        (CONFIGS["mistral"], [], 6, True),
        (CONFIGS["mistral"], [], 16, True),  # its window cuts these: each row is a sequence for the kernel
        (CONFIGS["mistral"], ["--compile"], 16, False),
        (CONFIGS["llama"], ["--use_peft", "--peft_method", "prefix"], 16, False),
        (CONFIGS["llama"], ["--use_fast_kernels", "False"], 16, False),
        (transformers.Gemma2Config(**SMALL, head_dim=8), [], 16, False),
        (transformers.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4), [], 16, False),
    ],
    ids=["llama", "short rows", "long rows", "compiled long rows", "prefix", "asked for", "soft caps", "falcon"],
)
def test_padded_rows_have_no_mask_if_causal_attention_is_all_that_a_model_has(
    config: Any, flags: list[str], row_length: int, spared: bool
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    train = parse_flags(["--model_name", "m", "--batching_strategy", "padding", *flags]).train_config
    assert choose_attention(model, train, FP32, facts_of(torch.device("cpu")), row_length) == []
    assert rows_that_need_offsets(model, row_length, packed=False) == ("shared" if spared else "none")


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads of tensors. On a GPU it waits for each of them."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("attention", "reads_some"), [("sdpa", True), (BY_OFFSETS, False)])
@pytest.mark.parametrize("packing", [False, True])
def test_only_a_model_that_takes_masks_reads_values_to_see_whether_it_needs_one(
    packing: bool, attention: str, reads_some: bool
) -> None:
    model = make_model("llama", attention)
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    offsets: Any = "none" if attention == "sdpa" else "shared"
    batch = Collator(packing=packing, padding_id=0, offsets=offsets)(
        [[document] for document in make_documents([7, 12])]
    )
    with HostReads() as reads:
        TASK.summed_loss(model, batch).backward()
    assert (reads.num_reads > 0) == reads_some


def test_a_model_without_masks_refuses_a_cache_whose_padding_it_would_see() -> None:
    prompt = torch.arange(3, 9)[None]
    with pytest.raises(ValueError, match="no cache"):
        make_model("llama", BY_OFFSETS).generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        (transformers.LlamaConfig(**SMALL), None),
        (transformers.MixtralConfig(**SMALL, num_local_experts=2), None),
        (transformers.LlamaConfig(**SMALL, attention_dropout=0.1), "drops out"),
        (transformers.GPT2Config(**GPT2), None),
        (transformers.GPT2Config(**(GPT2 | {"attn_pdrop": 0.1})), "drops out"),
        (transformers.Gemma2Config(**SMALL, head_dim=8), "soft-caps"),
        (transformers.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4), "no flash attention"),
        (transformers.LlamaConfig(**SMALL, head_dim=12), "heads"),
        (transformers.Gemma4TextConfig(**SMALL, num_kv_shared_layers=0), "heads"),  # of 256 and, in some layers, 512
    ],
    ids=["llama", "mixtral", "llama-dropout", "gpt2", "gpt2-dropout", "gemma2", "falcon", "llama-head-dim", "gemma4"],
)
def test_models_whose_attention_is_more_than_the_kernels_are_left_as_they_are(
    config: Any, obstacle: str | None
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = what_hinders_offsets(model)
    assert (found is None) if obstacle is None else (found is not None and obstacle in found)


@pytest.mark.parametrize(
    ("flags", "attention"),
    [([], BY_OFFSETS), (["--compile"], "sdpa"), (["--use_fast_kernels", "False"], "sdpa")],
    ids=["by default", "compiled", "without fast kernels"],
)
def test_a_cpu_computes_each_document_by_itself_unless_its_layers_are_compiled(
    flags: list[str], attention: str
) -> None:
    model = make_model("llama", "sdpa")
    train = parse_flags(["--model_name", "m", *flags]).train_config
    assert choose_attention(model, train, FP32, facts_of(torch.device("cpu")), 16) == []
    assert model.config._attn_implementation == attention


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are a GPU's")
@pytest.mark.parametrize(
    ("name", "attention"), [*product(CONFIGS, ["eager", "sdpa", BY_OFFSETS]), ("granite_swa", BY_OFFSETS)]
)
def test_on_a_gpu_in_bf16_packed_documents_are_as_near_to_fp32_as_documents_alone(name: str, attention: str) -> None:
    """bf16 rounds differently in every shape, so nothing is equal; what is measured is each way's distance to fp32."""
    documents = make_documents([33, 120, 64, 1, 9, 77, 13, 200])
    rows = [documents[:3], documents[3:6], documents[6:]]
    plain = "eager" if attention == "eager" or name in WITH_SINKS else "sdpa"

    def alone(dtype: torch.dtype) -> torch.Tensor:
        model = make_model(name, plain, dtype).cuda()
        use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
        total = torch.zeros((), device="cuda")
        for document in documents:
            total = total + loss_and_gradients(model, Collator(packing=False, padding_id=0)([[document]]), "cuda")[1]
        return total

    truth, noise = alone(torch.float32), alone(torch.bfloat16)
    model = make_model(name, plain, torch.bfloat16).cuda()
    if attention == BY_OFFSETS:
        device = facts_of(torch.device("cuda"))
        train = parse_flags(["--model_name", "m", "--pure_bf16"]).train_config
        notes = choose_attention(model, train, BF16, device, 400)
        assert model.config._attn_implementation == BY_OFFSETS, notes
    else:
        model.set_attn_implementation(attention)
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    collate = Collator(packing=True, padding_id=0, offsets=rows_that_need_offsets(model, 400))
    found = loss_and_gradients(model, collate(rows), "cuda")[1]
    far, unavoidable = (((other - truth).norm() / truth.norm()).item() for other in (found, noise))
    print(f"{name}, {attention}: {far:.2e} from fp32 packed, {unavoidable:.2e} alone")
    assert far <= 1.2 * unavoidable

    logits = []
    for changed in (False, True):
        row = [*make_documents([33])[:1], documents[1]]
        if changed:
            row[0] = row[0]._replace(input_ids=row[0].input_ids[::-1].copy())
        packed = collate([row]).to(torch.device("cuda"))
        offsets = {}
        if packed.cu_seqlens is not None:
            offsets = {"cu_seq_lens_q": packed.cu_seqlens, "max_length_q": packed.max_seqlen}
        with torch.no_grad():
            output = model.get_decoder()(
                input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **offsets
            )
        logits.append(output[0][0])
    assert torch.equal(logits[0][33:], logits[1][33:]), "a document saw the one before it"
    assert not torch.equal(logits[0][:33], logits[1][:33])


def test_rows_longer_than_a_chunk_of_attention_are_not_packed() -> None:
    """Llama 4 counts chunks from the start of the row: packed, a document would be cut elsewhere than alone."""
    config = transformers.Llama4TextConfig(attention_chunk_size=8192, floor_scale=8192)

    def batching(*flags: str) -> str:
        settings = parse_flags(["--model_name", "m", *flags])
        return keep_documents_apart(settings, config, FP32, HOST).train_config.batching_strategy

    assert batching() == batching("--context_length", "8192") == "packing"
    assert batching("--context_length", "8193") == "padding"
    with pytest.raises(ConfigError, match="chunks of 8,192 tokens"):
        batching("--context_length", "8193", "--batching_strategy", "packing")


@pytest.mark.parametrize("name", [*LEAKS_WHEN_PACKED, "qwen3_next"])
def test_models_that_are_known_to_leak_do_leak_and_are_not_packed(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LEAKING.get(name, STATEFUL))
    by_default = keep_documents_apart(parse_flags(["--model_name", "m"]), model.config, FP32, HOST)
    assert by_default.train_config.batching_strategy == "padding"
    assert by_default.notes[-1].startswith("--batching_strategy is padding: ")
    asked = parse_flags(["--model_name", "m", "--batching_strategy", "packing"])
    if name in LEAKS_WHEN_PACKED:
        with pytest.raises(ConfigError, match="give --batching_strategy padding"):
            keep_documents_apart(asked, model.config, FP32, HOST)
    else:
        assert keep_documents_apart(asked, model.config, FP32, HOST).train_config.batching_strategy == "packing"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)  # attention far from uniform
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    collate = Collator(packing=True, padding_id=0)
    with pytest.raises(ConfigError, match="would see each other"):
        check_packing_isolates(
            model, lambda rows: TASK.token_losses(model, collate(rows)), vocab_size=VOCAB, row_length=64
        )


def test_a_model_without_attention_heads_has_no_flash_attention() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.MambaConfig(vocab_size=VOCAB, num_hidden_layers=1))
    assert what_hinders_offsets(model) == "MambaForCausalLM has no flash attention in transformers"
