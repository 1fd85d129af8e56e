"""Layers with a state in packed rows: every document has the loss and the gradients that it has alone."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.families.tiny_configs import VOCAB, tiny_config
from configs.flags import parse_flags
from policies.attention.choice import choose_attention, keep_documents_apart, rows_that_need_offsets
from policies.attention.packing_leaks import check_packing_isolates
from policies.linear_attention import kernels
from policies.linear_attention.choice import stateful_class, use_offsets_in_states, why_slow_to_compile
from policies.linear_attention.convolution import convolution_by_shifts, convolution_with_gaps
from policies.linear_attention.delta_rule_kernel import gated_delta_rule
from policies.linear_attention.kernels import Kernels, is_there
from policies.linear_attention.layers import packages_of, state_layers, tell_documents_apart
from policies.linear_attention.rules import delta_rule, fused_scan, state_space_scan
from policies.loss.summed_loss import use_summed_loss
from policies.mixed_precision import Precision
from tasks.causal_batches import Collator
from tasks.causal_lm import CausalLM
from tests.helpers import linear_attention as stand_ins
from tests.helpers.packed_models import loss_and_gradients, make_documents
from utils.device import DeviceFacts
from utils.errors import ConfigError

TASK, CPU = CausalLM(), DeviceFacts("cpu", 1 << 34, has_bf16=False)
GPU = DeviceFacts("cuda", 80 << 30, has_bf16=True)
FP32 = Precision("fp32", torch.float32, torch.float32)
ROW_LENGTH = 32
FAMILIES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"), "fla"),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"), "mamba_ssm causal_conv1d"),
}
"""The packages of their kernels."""


def make_model(family: str, *, key_dim: int | None = None) -> Any:
    """Weights large enough that attention is far from uniform: a leak then shows in the first digit.

    Args:
        key_dim: of delta nets; their kernels take no less than 16.
    """
    torch.manual_seed(0)
    config = tiny_config(family)
    names = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")
    for name in names if key_dim else ():
        setattr(config, name, key_dim)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    return model


def chosen(model: Any, *, packed: bool = True) -> Collator:
    """The collator of a run, after its choices for this model."""
    strategy = "packing" if packed else "padding"
    train = parse_flags(["--model_name", "m", "--batching_strategy", strategy]).train_config
    use_offsets_in_states(model, CPU, packed=packed)
    choose_attention(model, train, FP32, CPU, ROW_LENGTH)
    offsets = rows_that_need_offsets(model, ROW_LENGTH, packed=packed)
    return Collator(packing=packed, padding_id=0, offsets=offsets)


def alone_and_together(family: str, collate: Any, model: Any, *, packed: bool = True) -> tuple[float, float]:
    """How far the loss and the gradients of rows are from the sum of those of each document alone, relatively."""
    documents, plain = make_documents([7, 11, 5, 1, 9, 16, 13, 2]), make_model(family)
    rows = [documents[:3], documents[3:5], documents[5:]] if packed else [[document] for document in documents]
    wanted_loss, wanted = 0.0, torch.zeros(())
    for document in documents:
        loss, gradients = loss_and_gradients(plain, Collator(packing=False, padding_id=0)([[document]]))
        wanted_loss, wanted = wanted_loss + loss, wanted + gradients
    loss, gradients = loss_and_gradients(model, collate(rows))
    apart = (gradients - wanted).abs().max() / wanted.abs().max()
    return abs(loss / wanted_loss - 1), float(apart)


@pytest.mark.parametrize("family", [name for name in ("lfm2", "lfm3") if name in CONFIG_MAPPING])
def test_documents_of_models_with_short_convolutions_are_told_apart(family: str) -> None:
    """transformers wraps LFM2's convolution, and not LFM3's."""
    model = make_model(family)
    assert state_layers(model)
    assert max(alone_and_together(family, chosen(model), model)) <= 1e-5


def test_a_delta_rule_of_a_model_of_images_alone_is_seen() -> None:
    """transformers has no class of GLM-5-Next for text."""
    config = CONFIG_MAPPING["glm5_next"]()
    found = stateful_class(config)
    assert found is not None
    assert packages_of(found) == {"fla"}
    assert "the loop over tokens of glm5_next layers" in str(why_slow_to_compile(config))
    assert state_layers(found._from_config(_tiny_glm5_next()))


def _tiny_glm5_next() -> Any:
    text = {
        "vocab_size": VOCAB,
        "pad_token_id": 0,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
    }
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4}
    text |= {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
    text |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "num_experts_per_tok": 2}
    text |= {"linear_head_dim": 16, "linear_num_heads": 2, "index_n_heads": 2, "index_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    return CONFIG_MAPPING["glm5_next"](text_config=text, vision_config=vision)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_loss_and_the_gradients_that_they_have_alone(family: str) -> None:
    model = make_model(family)
    assert packages_of(type(model)) == set(FAMILIES[family].split())
    collate = chosen(model)
    assert max(alone_and_together(family, collate, model)) <= 1e-5
    check_packing_isolates(
        model, lambda rows: TASK.token_losses(model, collate(rows)), vocab_size=VOCAB, row_length=ROW_LENGTH
    )


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_padded_rows_need_no_mask_and_have_the_loss_and_gradients_of_documents_alone(family: str) -> None:
    model = make_model(family)
    collate = chosen(model, packed=False)
    batch = collate([[document] for document in make_documents([3, 9])])
    assert (batch.attention_mask, batch.cu_seqlens) == (None, None)
    assert max(alone_and_together(family, collate, model, packed=False)) <= 1e-5


@pytest.mark.parametrize("found", [Kernels(fla=True), Kernels(fla=True, causal_conv1d=True)])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "kimi_linear"])
def test_kernels_are_given_what_they_need_to_tell_documents_apart(
    family: str, found: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    stand_ins.put_stand_ins(monkeypatch)
    collate = chosen(model)
    tell_documents_apart(state_layers(model), found)
    # Token by token they round otherwise than chunk by chunk, as alone.
    assert max(alone_and_together(family, collate, model)) <= 3e-5


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_compiled_layers_have_one_graph_or_go_on_behind_a_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile made for one layer serves the next, and layers of another model."""
    stand_ins.put_stand_ins(monkeypatch, is_disabled=True)
    batch = None
    for num_layers in (2, 3):
        model = make_model(family)
        collate = chosen(model)
        tell_documents_apart(state_layers(model), Kernels(fla=True))
        batch = batch or collate([make_documents([9, 5, 7])])
        expected = loss_and_gradients(model, batch, "cpu")
        for layer in model.model.layers[:num_layers]:
            layer.compile(backend="aot_eager", fullgraph=family == "qwen3_5_text")
        torch.testing.assert_close(loss_and_gradients(model, batch, "cpu"), expected, atol=1e-4, rtol=1e-4)


def test_compiled_layers_hand_the_kernels_the_very_offsets_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward: the package makes its table of chunks again for any other tensor."""
    stand_ins.put_stand_ins(monkeypatch)
    seen: list[torch.Tensor] = []
    index = sys.modules["fla.ops.utils.index"]
    monkeypatch.setattr(index, "prepare_chunk_indices", lambda offsets, size: seen.append(offsets) or offsets)
    model = make_model("qwen3_5_text")
    collate = chosen(model)
    tell_documents_apart(state_layers(model), Kernels(fla=True))
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    loss_and_gradients(model, collate([make_documents([9, 5, 7])]), "cpu")
    assert len(seen) == 2 * len(state_layers(model)) > 2
    assert all(offsets is seen[0] for offsets in seen)


@pytest.mark.parametrize("values_per_key", [1, 2])
def test_repeated_heads_of_keys_are_handed_over_once(values_per_key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers repeats them for each head of values, until 5.22."""
    stand_ins.put_stand_ins(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(1, 6, 2, 4, generator=generator, requires_grad=True) for _ in range(2)]
    value, decay, beta = (torch.rand(1, 6, 2 * values_per_key, *size, generator=generator) for size in ((3,), (), ()))
    rule = delta_rule(lambda *_: None, gated_delta_rule, Kernels(fla=True), values_per_key)
    repeated = [tensor.repeat_interleave(values_per_key, dim=2) for tensor in keys]
    found = []
    for query, key in (keys, repeated):
        output, _ = rule(query, key, value, -decay, beta, use_qk_l2norm_in_kernel=True)
        found.append([output, *torch.autograd.grad(output.square().sum(), keys)])
    torch.testing.assert_close(*found)


def test_on_hopper_some_versions_of_triton_need_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_there", "fla".__eq__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, triton, needs in (((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((8, 0), "3.6.0", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        monkeypatch.setattr(kernels, "version", lambda name, found=triton: found)
        missing = "without tilelang (pip install -r requirements-linear-attention.txt)" if needs else None
        assert kernels.missing_packages(["fla"]) == missing
        assert kernels.find_kernels(GPU).fla is not needs


def test_rows_without_offsets_take_the_kernel_of_the_convolution_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_5_text")
    stand_ins.put_stand_ins(monkeypatch)
    collate = chosen(model, packed=False)
    tell_documents_apart(state_layers(model), Kernels(fla=True))
    assert max(alone_and_together("qwen3_5_text", collate, model, packed=False)) <= 1e-5


@pytest.mark.skipif(not (torch.cuda.is_available() and is_there("fla")), reason="the kernels are a GPU's")
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_on_a_gpu_in_bf16_packed_documents_are_as_near_to_fp32_as_documents_alone(family: str) -> None:
    """bf16 rounds differently in every shape, so each way's distance to fp32 on the CPU is compared."""
    documents = make_documents([33, 120, 64, 1, 9, 77, 13, 200])

    def gradients(dtype: torch.dtype, device: DeviceFacts, rows: list[list[Any]]) -> torch.Tensor:
        model, packed = make_model(family, key_dim=32).to(device.type, dtype), len(rows) < len(documents)
        train = parse_flags(["--model_name", "m", "--batching_strategy", "packing" if packed else "padding"])
        use_offsets_in_states(model, device, packed=packed)
        choose_attention(model, train.train_config, Precision("bf16-true", dtype, dtype), device, 400)
        offsets = rows_that_need_offsets(model, 400, packed=packed)
        collate = Collator(packing=packed, padding_id=0, offsets=offsets)
        return sum(loss_and_gradients(model, collate([row]), device.type)[1].cpu() for row in rows)  # type: ignore[return-value]

    alone = [[document] for document in documents]
    truth, noise = (gradients(dtype, device, alone) for dtype, device in ((torch.float32, CPU), (torch.bfloat16, GPU)))
    found = gradients(torch.bfloat16, GPU, [documents[:3], documents[3:6], documents[6:]])
    far, unavoidable = (((other - truth).norm() / truth.norm()).item() for other in (found, noise))
    print(f"{family}: {far:.2e} from fp32 packed, {unavoidable:.2e} alone")
    assert far <= 1.2 * unavoidable


@pytest.mark.parametrize("leak", ["convolution", "rule"])
def test_a_leak_of_the_convolution_alone_or_of_the_rule_alone_is_refused(
    leak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3_5_text")
    stand_ins.put_stand_ins(monkeypatch, leak=leak)
    collate = chosen(model)
    tell_documents_apart(state_layers(model), Kernels(fla=True))
    with pytest.raises(ConfigError, match="would see each other"):
        check_packing_isolates(
            model, lambda rows: TASK.token_losses(model, collate(rows)), vocab_size=VOCAB, row_length=ROW_LENGTH
        )


def test_the_scan_of_mamba_2_is_given_the_number_of_each_tokens_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation; in training one kernel computes all of the layer."""
    model = make_model("bamba").eval()
    module = inspect.getmodule(type(model))
    written = vars(module)["mamba2_chunk_scan"]
    monkeypatch.setattr(module, "mamba2_chunk_scan", functools.wraps(written)(stand_ins.state_space_scan))
    collate = chosen(model)
    tell_documents_apart(state_layers(model), Kernels(mamba_ssm=True))
    assert max(alone_and_together("bamba", collate, model)) <= 1e-5


def test_mamba_2_s_kernel_of_a_whole_layer_is_called_with_document_numbers_or_not_at_all() -> None:
    def kernel(projected: torch.Tensor, seq_idx: Any = None, dt_limit: Any = None) -> Any:
        return seq_idx

    offsets, projected = torch.tensor([0, 3, 5, 10], dtype=torch.int32), torch.zeros(2, 5, 4)
    found = fused_scan(kernel, Kernels(mamba_ssm=True))(projected, cu_seq_lens_q=offsets, dt_limit=1)
    assert found.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]
    assert fused_scan(kernel, Kernels())(projected, cu_seq_lens_q=offsets) is None


def test_a_rule_that_is_given_documents_takes_no_cache() -> None:
    scan = state_space_scan(lambda *args, **kwargs: None, Kernels())
    tensors = [torch.zeros(1, 4, 2)] * 5
    with pytest.raises(ValueError, match="takes no cache"):
        scan(*tensors, cu_seq_lens_q=torch.tensor([0, 4]), return_final_states=True)


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    width=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_a_convolution_of_packed_rows_is_that_of_each_document(lengths: list[list[int]], width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    length = max(map(sum, lengths))
    lengths = [[*row, length - sum(row)] if sum(row) < length else row for row in lengths]
    hidden = torch.randn(len(lengths), 3, length, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in ((width,), ()))

    def convolve(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, activation: Any) -> torch.Tensor:
        return F.conv1d(F.pad(hidden, (width - 1, 0)), weight[:, None], bias, groups=3)

    flat = [part for row in lengths for part in row]
    offsets = torch.tensor([0, *flat]).cumsum(0, dtype=torch.int32)
    with_gaps = convolution_with_gaps(convolve, hidden, weight, bias, None, offsets)
    by_shifts = convolution_by_shifts(hidden, weight, bias, None, offsets)  # in fp32
    for row, of_row in enumerate(lengths):
        parts = [convolve(part[None], weight, bias, None)[0] for part in hidden[row].split(of_row, dim=1)]
        torch.testing.assert_close(with_gaps[row], torch.cat(parts, dim=1))
        torch.testing.assert_close(by_shifts[row], torch.cat(parts, dim=1), atol=1e-5, rtol=1e-5)
    whole = convolve(hidden, weight, bias, None)
    torch.testing.assert_close(convolution_by_shifts(hidden, weight, bias, None, None), whole, atol=1e-5, rtol=1e-5)


def test_other_models_of_the_process_keep_their_forward() -> None:
    model, other = make_model("qwen3_5_text"), make_model("qwen3_5_text")
    function = inspect.unwrap(type(state_layers(model)[0]).forward).__globals__["causal_conv1d_fn"]
    tell_documents_apart(state_layers(model), Kernels())
    layer, untouched = state_layers(model)[0], state_layers(other)[0]
    assert "forward" in vars(layer)
    assert "forward" not in vars(untouched)
    assert inspect.unwrap(type(layer).forward).__globals__["causal_conv1d_fn"] is function


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_such_a_model_generates_with_its_cache_as_before(family: str) -> None:
    plain, model = (make_model(family).eval() for _ in range(2))
    tell_documents_apart(state_layers(model), Kernels())
    ids = torch.tensor([make_documents([9])[0].input_ids.tolist()])
    answers = [each.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None) for each in (plain, model)]
    assert torch.equal(*answers)


def test_compiled_layers_compute_the_same_for_any_documents() -> None:
    model = make_model("qwen3_5_text")
    tell_documents_apart(state_layers(model), Kernels())
    layer = state_layers(model)[0]
    hidden = torch.randn(2, 20, model.config.hidden_size)
    compiled = torch.compile(layer.forward, backend="eager")
    for offsets in ([0, 7, 20, 31, 40], [0, 20, 33, 40], [0, 5, 9, 20, 40]):
        given = {"cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32), "max_length_q": 20}
        torch.testing.assert_close(compiled(hidden, **given), layer(hidden, **given))


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_such_models_are_packed_by_default_if_their_kernels_are_there(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(family)
    by_default = keep_documents_apart(parse_flags(["--model_name", "m"]), config, FP32, CPU)
    assert by_default.train_config.batching_strategy == "padding"
    (note,) = by_default.notes
    assert note.startswith("--batching_strategy is padding: without ")
    assert "requirements-linear-attention.txt" in note
    asked = parse_flags(["--model_name", "m", "--batching_strategy", "packing"])
    assert keep_documents_apart(asked, config, FP32, CPU) is asked
    for package in FAMILIES[family].split():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    by_default = keep_documents_apart(parse_flags(["--model_name", "m"]), config, FP32, CPU)
    assert (by_default.train_config.batching_strategy, by_default.notes) == ("packing", ())


def test_a_gpu_without_the_kernels_is_told_that_packed_documents_come_one_after_another() -> None:
    model = make_model("qwen3_5_text")
    assert use_offsets_in_states(model, CPU, packed=True) == []
    assert use_offsets_in_states(model, GPU, packed=False) == []
    (line,) = use_offsets_in_states(model, GPU, packed=True)
    assert line.startswith("linear attention: without flash-linear-attention (pip install -r requirements-")
    assert line.endswith("packed documents are computed one after another, which is slow")
