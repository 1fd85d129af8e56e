"""benchmarks/where_time_goes.py: kinds of work by name, and the arithmetic of what overlaps, on traces made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs.trace_times import COMMUNICATION, IDLE, NOT_HIDDEN, OPTIMIZER, kind_of, merged, step_times
from benchmarks.where_time_goes import main
from tests.helpers.processes import ProcessGroup

KERNELS = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matrix products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn_align8>": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matrix products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)": "attention",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>": "loss",
    "triton_red_fused__log_softmax_nll_loss_forward_0": "loss",
    "triton_poi_fused_mul_silu_3": "compiled elementwise",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, LpNormFunctor<float, NormType::L2>>": OPTIMIZER,
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>": OPTIMIZER,
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, UnaryOpFunctor, Copy>": "copies and adds",
    "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>": "copies and adds",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": "copies and adds",
    "Memcpy DtoD (Device -> Device)": "copies and adds",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    "gloo:all_reduce": COMMUNICATION,
    "aten::mm": "matrix products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
}


def event(name: str, start: float, end: float, cat: str = "kernel", tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "cat": cat, "pid": 0, "tid": tid}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_a_name_means_a_kind_of_work(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_what_no_pattern_knows_has_no_kind() -> None:
    assert kind_of("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>") is None


def test_spans_are_merged() -> None:
    assert merged([(4, 6), (0, 2), (1, 3), (5, 5.5), (6, 7)]) == [(0, 3), (4, 7)]


def test_transfers_beside_computing_are_hidden_and_the_rest_of_the_step_is_idle() -> None:
    """Two steps of 5 ms: 4 ms of a product, 3 of a transfer, of which 1 overlaps; then the optimizer, then a wait."""
    times = step_times(
        [
            event("ProfilerStep#3", 0, 5000, "user_annotation", tid=1),
            event("ProfilerStep#4", 5000, 10000, "user_annotation", tid=1),
            event("ProfilerStep#4", 0, 9000, "gpu_user_annotation"),
            event("aten::mm", 0, 9999, "cpu_op", tid=1),  # of the host: only the device counts
            event("nvjet_tst", -500, 4000),  # what came before the first step is left out
            event("ncclDevKernel_AllGather", 3000, 6000, tid=9),
            event("Optimizer.step#AdamW.step", 7000, 8000, "gpu_user_annotation"),
            event("triton_poi_fused_0", 7000, 8000),
            event("void kDequantizeBlockwise<float>", 8000, 8400),
        ]
    )
    assert (times.num_steps, times.step_ms) == (2, 5.0)
    found = {row: value for row, value in times.by_kind_ms.items() if value}
    expected = {"matrix products": 2.0, OPTIMIZER: 0.5, "other": 0.2, COMMUNICATION: 1.5, NOT_HIDDEN: 1.0, IDLE: 1.3}
    assert found == pytest.approx(expected)
    assert times.other_names_ms == pytest.approx({"void kDequantizeBlockwise<float>": 0.2})
    assert times.idle_before_ms == pytest.approx({"triton_poi_fused_0": 0.5}), "nothing ran after the last wait"


def test_on_a_cpu_each_moment_counts_for_the_innermost_operator_that_is_known() -> None:
    times = step_times(
        [
            event("ProfilerStep#3", 0, 1000, "user_annotation"),
            event("aten::linear", 0, 400, "cpu_op"),
            event("aten::empty", 0, 100, "cpu_op"),  # unknown: a part of the product
            event("aten::copy_", 100, 200, "cpu_op"),
            event("Optimizer.step#SGD.step", 500, 900, "user_annotation"),
            event("aten::copy_", 600, 700, "cpu_op"),  # the optimizer's
            event("gloo:all_reduce", 300, 450, "user_annotation", tid=8),
        ]
    )
    found = {row: value for row, value in times.by_kind_ms.items() if value}
    expected = {"matrix products": 0.3, "copies and adds": 0.1, OPTIMIZER: 0.4, COMMUNICATION: 0.15}
    assert found == pytest.approx(expected | {NOT_HIDDEN: 0.05, IDLE: 0.15})


@pytest.mark.slow
def test_a_trace_of_a_run_is_read(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples), "--use_profiler"]
    argv += ["--output_dir", str(tmp_path / "run"), "--enable_fsdp", "--gradient_clipping", "--context_length", "128"]
    argv += ["--batch_size_training", "1", "--max_train_step", "7", "--num_epochs", "7", "--run_validation", "False"]
    process_group.train([*argv, "--save_model", "False", "--num_workers_dataloader", "0"], 2)
    traces = sorted(map(str, (tmp_path / "run/profiler").iterdir()))
    assert main(["--traces", *traces]) == 0
    printed = capsys.readouterr().out
    assert "| ms per step | rank0 | rank1 |" in printed
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][1:]
    figures = {name: [float(value) for value in values] for name, *values in rows}
    for rank in (0, 1):
        step, idle, transfers = (figures[name][rank] for name in ("step", IDLE, COMMUNICATION))
        assert min(figures["matrix products"][rank], figures[OPTIMIZER][rank], figures["loss"][rank], transfers) > 0
        computing = sum(values[rank] for name, values in figures.items()) - 2 * figures[NOT_HIDDEN][rank] - step - idle
        assert computing >= 0.5 * (step - idle - figures[NOT_HIDDEN][rank])


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 1, "cpu_op")]}))
    with pytest.raises(ValueError, match="no ProfilerStep marks"):
        main(["--traces", str(tmp_path / "trace.json")])
