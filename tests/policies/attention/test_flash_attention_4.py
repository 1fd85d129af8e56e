"""FlashAttention 4: a stand-in computes what its kernels do, in plain torch; on a GPU that has them, the kernels do."""

from __future__ import annotations

import copy
import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoModelForCausalLM

from configs.flags import parse_flags
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.attention import flash_attention_4 as flash
from policies.attention.choice import BY_FLASH_4, choose_attention, rows_that_need_offsets
from policies.attention.functions import attention_by_flash_4, attention_by_offsets
from policies.compilation.layers import compile_layers
from policies.loss.summed_loss import use_summed_loss
from policies.mixed_precision import Precision
from policies.wrapping import find_layers
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.causal_lm import CausalLM
from tests.helpers.flash_attention_4 import StandIn, agreeing_where_it_works, has_kernels, install
from tests.helpers.packed_models import CONFIGS, WITH_SINKS, loss_and_gradients, make_documents, make_model
from tests.helpers.processes import ProcessGroup
from tests.helpers.small_configs import SMALL
from utils.device import DeviceFacts

TASK = CausalLM()

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = Precision("bf16-true", torch.bfloat16, torch.bfloat16)
FP32 = Precision("fp32", torch.float32, torch.float32)
HOST, H200 = DeviceFacts("cpu", 2**34, has_bf16=False), DeviceFacts("cuda", 2**37, has_bf16=True)
NAMES = ("llama", "mistral", "gemma3", "gpt_oss")  # windows are 6 tokens; one layer of the last two has none
BY_SDPA = "attention: packed documents are told apart by their offsets (variable-length flash attention)"
SAID = "attention: by flash-attn-4"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    install(monkeypatch, stand_in)
    return stand_in


def make_rows(kind: str, width: int = 16) -> list[list[list[int]]]:
    """Batches, as the lengths of each row's documents."""
    if kind == "padded":
        return [[[5], [3], [6]]]
    if kind == "one each":
        return [[[width], [width - 1]]]
    return [[[7, 9], [5, 1, 9]], [[4, 4, 4, 4], [16]], [[1, 15], [2, 3]]]


def collate(model: Any, kind: str, rows: list[list[int]]) -> CausalMicroBatch:
    documents = iter(make_documents([length for row in rows for length in row]))
    given = [[next(documents) for _ in row] for row in rows]
    offsets = rows_that_need_offsets(model, 6 if kind == "padded" else 16)
    return Collator(packing=kind != "padded", padding_id=0, offsets=offsets)(given)


def make_learner(name: str, attention: Any, checkpointing: str = "off") -> Any:
    """A model whose attention without masks is this function."""
    AttentionInterface.register(BY_FLASH_4, attention)
    model = make_model(name, BY_FLASH_4)
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    checkpoint_layers(find_layers(model), Checkpointing(checkpointing))
    return model


def assert_same(found: tuple[float, torch.Tensor], wanted: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert (found[1] - wanted[1]).abs().max() <= 1e-5 * wanted[1].abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_attention_by_offsets(name: str, kernels: StandIn) -> None:
    for kind in ("packed", "one each", "padded"):
        for rows in make_rows(kind):
            wanted = make_learner(name, attention_by_offsets)
            expected = loss_and_gradients(wanted, collate(wanted, kind, rows))
            model = make_learner(name, attention_by_flash_4)
            assert_same(loss_and_gradients(model, collate(model, kind, rows)), expected)
        model.zero_grad()
        kernels.off_by = 3.0  # its gradients show that nothing else computed these
        gradients = loss_and_gradients(model, collate(model, kind, rows))[1]
        assert (gradients - expected[1]).abs().max() > 1e-3 * expected[1].abs().max()
        kernels.off_by = 1.0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "num_graphs"), [("llama", 1), pytest.param("gemma3", 2, marks=pytest.mark.slow)])
def test_compiled_there_is_one_graph_for_each_kind_of_layer_whatever_documents_a_batch_holds(
    name: str, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_learner(name, attention_by_offsets)
    batches = [collate(plain, "packed", rows) for rows in make_rows("packed")]
    assert len({len(batch.cu_seqlens) for batch in batches}) > 1
    assert len({batch.max_seqlen for batch in batches}) > 1
    expected = [loss_and_gradients(plain, batch) for batch in batches]
    model, counter = make_learner(name, attention_by_flash_4), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter, fullgraph=True))
    compile_layers(list(model.model.layers), widths_vary=False)
    for batch, wanted in zip(batches, expected, strict=True):
        assert_same(loss_and_gradients(model, batch), wanted)
    assert counter.frame_count == num_graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("mode", "num_forward", "compiled"),
    [("selective", 2, False), ("full", 4, False), ("selective", 2, True)],
)
def test_selective_checkpointing_keeps_the_output_and_full_computes_it_again(
    mode: str, num_forward: int, compiled: bool, kernels: StandIn
) -> None:
    plain = make_learner("llama", attention_by_offsets)
    batch = collate(plain, "packed", make_rows("packed")[0])
    expected = loss_and_gradients(plain, batch)
    model = make_learner("llama", attention_by_flash_4, mode)
    if compiled:
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    assert_same(loss_and_gradients(model, batch), expected)
    assert kernels.num_forward == num_forward


def make_heads(device: str = "cpu", *, length: int = 12) -> list[torch.Tensor]:
    """Query, key and value as a model gives them: [batch, heads, seq, head_dim], seen from [batch, seq, heads, ...]."""
    torch.manual_seed(0)
    shapes = [(2, length, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, device=device, requires_grad=True).transpose(1, 2) for shape in shapes]


def layer() -> Any:
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("offsets", "window"), [(None, flash.NO_WINDOW), ([0, 5, 12, 24], 3)], ids=["dense", "packed, in windows"]
)
@pytest.mark.usefixtures("kernels")
def test_its_operators_are_what_torch_asks_of_operators(
    offsets: list[int] | None, window: int, has_sinks: bool
) -> None:
    """Shapes, strides and dtypes for the compiler, autograd and traces with symbols are those of the real results."""
    tensors = [tensor.transpose(1, 2).detach() for tensor in make_heads()]
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    options: tuple[Any, ...] = (None, None, None, None, 0.3, window, sinks)
    if offsets is not None:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        options = (cu_seqlens, cu_seqlens.clone(), 12, 12, 0.3, window, sinks)
    inputs = [tensor.requires_grad_() for tensor in tensors]
    torch.library.opcheck(flash.attend, (*inputs, *options))
    with torch.no_grad():
        output, log_sums = flash.attend(*inputs, *options)
        torch.library.opcheck(flash.attend_backward, (torch.randn_like(output), *inputs, output, log_sums, *options))


@pytest.mark.usefixtures("kernels")
def test_a_batch_with_a_mask_goes_to_sdpa() -> None:
    heads = make_heads()
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[:, 3] = False
    mask[3, 3] = True
    found, _ = attention_by_flash_4(layer(), *heads, mask[None, None].expand(2, 1, 12, 12), scaling=0.3)
    wanted = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(found, wanted.transpose(1, 2), atol=1e-6)


class Operators(TorchDispatchMode):
    """Lists the operators that are called, and the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((str(func), getattr(result, "shape", None)))
        return result


def test_a_plan_on_the_meta_device_counts_what_attention_by_offsets_does() -> None:
    seen = []
    for attention in (attention_by_flash_4, attention_by_offsets):
        with Operators() as operators:
            attention(layer(), *make_heads("meta"), None)[0].sum().backward()
        seen.append(operators.seen)
    assert seen[0] == seen[1]
    assert not any("flash_attention_4" in name for name, _ in seen[0])


def test_a_traced_plan_needs_no_kernels() -> None:
    with FakeTensorMode():
        heads = make_heads()
        output, _ = attention_by_flash_4(layer(), *heads, None)
        gradients = torch.autograd.grad(output.sum(), heads)
    assert output.shape == (2, 12, 4, 8)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in heads]


@pytest.mark.usefixtures("kernels")
def test_what_its_kernels_do_not_take_is_an_error() -> None:
    query, key, value = make_heads()
    with pytest.raises(ValueError, match="takes no cache"):
        attention_by_flash_4(layer(), query[:, :, -1:], key, value, None)
    with pytest.raises(ValueError, match="no dropout"):
        attention_by_flash_4(layer(), query, key, value, None, dropout=0.1)
    with pytest.raises(ValueError, match="no softcap"):
        attention_by_flash_4(layer(), query, key, value, None, softcap=30.0)


KIND = flash.AttentionKind(num_heads=4, num_key_heads=2, head_dim=8, window=flash.NO_WINDOW, packed=False)


def llama(**options: Any) -> Any:
    return transformers.LlamaConfig(**SMALL | options)


@pytest.mark.parametrize(
    ("config", "rows", "device", "precision", "lines"),
    [
        (CONFIGS["llama"], "packing", H200, BF16, [BY_SDPA, SAID]),
        (CONFIGS["gemma3"], "packing", H200, BF16, [BY_SDPA, SAID]),
        (WITH_SINKS["gpt_oss"], "packing", H200, BF16, [BY_SDPA, SAID]),
        (WITH_SINKS["gpt_oss"], "padding", H200, BF16, [SAID]),
        (WITH_SINKS["gpt_oss"], "padding", H200, FP32, []),
        (llama(head_dim=128), "packing", H200, BF16, [BY_SDPA, SAID]),
        (llama(), "padding", H200, BF16, [SAID]),
        (llama(attention_dropout=0.1), "padding", H200, BF16, []),
        (transformers.Gemma2Config(**SMALL, head_dim=8), "padding", H200, BF16, []),
        (transformers.Gemma2Config(**SMALL, head_dim=8), "packing", H200, BF16, ["soft-caps"]),
        (llama(), "packing", H200, FP32, ["have no fp32"]),
        (llama(), "packing", HOST, FP32, []),
    ],
    ids=[
        "packed",
        "windows",
        "sinks",
        "sinks, padded",
        "sinks, padded, fp32",
        "heads of 128",
        "padded",
        "padded, dropout",
        "padded, soft caps",
        "soft caps",
        "fp32",
        "a CPU",
    ],
)
@pytest.mark.usefixtures("kernels")
def test_it_is_taken_without_dropout_and_soft_caps_on_a_gpu_and_the_run_says_so(
    config: Any, rows: str, device: DeviceFacts, precision: Precision, lines: list[str]
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    train = parse_flags(["--model_name", "m", "--batching_strategy", rows]).train_config
    found = choose_attention(model, train, precision, device, 16, flash_4=True)
    assert len(found) == len(lines)
    assert all(line in said for line, said in zip(lines, found, strict=True))
    assert (model.config._attn_implementation == BY_FLASH_4) == (SAID in lines)


@pytest.mark.parametrize(("ranks", "taken"), [((0, 1), True), ((1,), False)])
def test_all_ranks_take_it_or_none_and_the_one_that_cannot_is_named(
    ranks: tuple[int, ...], taken: bool, tiny_model: Path, process_group: ProcessGroup
) -> None:
    outcomes = process_group.train(agreeing_where_it_works(["--model_name", str(tiny_model)], ranks), 2)
    assert [outcome.stdout.splitlines()[-1] for outcome in outcomes] == [str(taken)] * 2
    printed = [outcome.stdout.count("flash-attn-4 does not work on rank 0 on ") for outcome in outcomes]
    assert printed == [int(not taken), 0]


def flops_of(attend: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        attend().sum().backward()
    return counter.get_total_flops()


@pytest.mark.usefixtures("kernels")
def test_flops_are_those_that_torch_counts_for_sdpa_and_packed_documents_count_each_by_itself() -> None:
    def by_torch(length: int, batch: int) -> int:
        """A GPU's kernel, on tensors without values."""
        heads = [torch.randn(batch, 4, length, 8, device="meta", requires_grad=True) for _ in range(3)]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return flops_of(lambda: kernel(*heads, is_causal=True)[0]) // 2  # it counts what causality leaves out, too

    heads = make_heads()
    assert flops_of(lambda: attention_by_flash_4(layer(), *heads, None)[0]) == by_torch(12, 2)
    offsets = {"cu_seq_lens_q": torch.tensor([0, 5, 12, 24], dtype=torch.int32), "max_length_q": 12}
    counted = flops_of(lambda: attention_by_flash_4(layer(), *heads, None, **offsets)[0])
    assert counted == by_torch(5, 1) + by_torch(7, 1) + by_torch(12, 1)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA devices are Hopper cards, which compute on this CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    distance = flash._distance_to_torch
    monkeypatch.setattr(flash, "_distance_to_torch", lambda kind, device, dtype: distance(kind, CPU, dtype))
    monkeypatch.delenv(flash.CACHE, raising=False)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("hopper", "kernels")
def test_kernels_that_compute_what_torch_does_are_found(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        kinds = flash.attention_kinds((CONFIGS | WITH_SINKS)[name], packed=True)
        kinds |= {kind._replace(shares_keys=True) for kind in kinds if kind.packed}
        assert flash.find_flash_attention_4(CUDA, Precision("half", dtype, dtype), kinds) == (True, [])
    assert os.environ[flash.CACHE] == "1"
    monkeypatch.delenv(flash.CACHE)


@pytest.mark.parametrize(
    ("name", "packed", "kinds"),
    [
        ("llama", False, {(4, 2, 8, -1, False, False, False)}),
        ("llama", True, {(4, 2, 8, -1, False, False, False), (4, 2, 8, -1, True, False, False)}),
        ("mistral", False, {(4, 2, 8, -1, False, False, False), (4, 2, 8, 15, False, False, False)}),
        ("gpt_oss", False, {(4, 2, 8, -1, False, True, False), (4, 2, 8, 15, False, True, False)}),
    ],
)
def test_each_kind_of_attention_that_a_model_may_call_is_tried(name: str, packed: bool, kinds: Any) -> None:
    assert flash.attention_kinds((CONFIGS | WITH_SINKS)[name], packed=packed) == kinds


@pytest.mark.usefixtures("hopper", "kernels")
def test_heads_that_it_does_not_serve_are_not_tried() -> None:
    for config in (llama(head_dim=136), llama(head_dim=4)):
        kinds = flash.attention_kinds(config, packed=False)
        assert flash.find_flash_attention_4(CUDA, BF16, kinds) == (False, [])
    assert flash.find_flash_attention_4(CUDA, BF16, set()) == (False, [])


@pytest.mark.parametrize(
    ("device", "precision", "capability"),
    [(CPU, BF16, (9, 0)), (None, BF16, (9, 0)), (CUDA, FP32, (9, 0)), (CUDA, BF16, (8, 0)), (CUDA, BF16, (12, 0))],
    ids=["a CPU", "a plan", "fp32", "Ampere", "a GeForce card"],
)
@pytest.mark.usefixtures("hopper", "kernels")
def test_without_its_device_or_precision_it_is_not_taken_and_nothing_is_said(
    device: Any, precision: Precision, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert flash.find_flash_attention_4(device, precision, [KIND]) == (False, [])


@pytest.mark.parametrize("installed", ["nothing", "FlashAttention 2"])
@pytest.mark.usefixtures("hopper", "kernels")
def test_if_it_is_not_installed_nothing_is_said(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn.cute")  # of the package that is left, no part is found
    if installed == "nothing":
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert flash.find_flash_attention_4(CUDA, BF16, [KIND]) == (False, [])


class Broken(StandIn):
    def _flash_attn_bwd(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no kernel\nfor this card")


@pytest.mark.parametrize(
    ("functions", "line"),
    [
        (Broken(), "attention: flash-attn-4 does not work here, so torch's kernels serve (no kernel for this card)"),
        (StandIn(off_by=1.05), "attention: flash-attn-4 is 5 % off here, so torch's kernels serve"),
        (StandIn(off_by=float("nan")), "attention: flash-attn-4 is nan % off here, so torch's kernels serve"),
    ],
    ids=["broken", "off", "not finite"],
)
@pytest.mark.usefixtures("hopper")
def test_kernels_that_fail_or_are_off_are_left_with_a_line(
    functions: StandIn, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, functions)
    assert flash.find_flash_attention_4(CUDA, BF16, [KIND]) == (False, [line])


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("hopper")
def test_kernels_that_are_off_for_one_kind_of_attention_alone_are_left(
    packed: bool, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, StandIn(off_by=1.05, off_if={"cu_seqlens_q": packed, "window_size_left": windowed}))
    taken, _ = flash.find_flash_attention_4(CUDA, BF16, flash.attention_kinds(CONFIGS["gemma3"], packed=True))
    assert not taken


@pytest.mark.usefixtures("hopper")
def test_a_package_that_cannot_be_imported_is_left_with_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As FlashAttention 2 that was built for another torch: `flash_attn.cute` is in the folder of the same package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    line = "attention: flash-attn-4 does not work here, so torch's kernels serve (undefined symbol)"
    assert flash.find_flash_attention_4(CUDA, BF16, [KIND]) == (False, [line])


@pytest.mark.skipif(not has_kernels(), reason="needs flash-attn-4, and a Hopper or Blackwell GPU")
@pytest.mark.parametrize("window", [flash.NO_WINDOW, 100], ids=["", "in windows"])
@pytest.mark.parametrize("rows", ["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_key_heads", [8, 2])
def test_on_a_gpu_in_bf16_it_is_as_near_to_fp32_as_sdpa(
    num_key_heads: int, head_dim: int, rows: str, window: int
) -> None:
    lengths = [700, 1, 37, 128, 158] if rows == "packed" else [512, 512]
    torch.manual_seed(0)
    shapes = [(1024, heads, head_dim) for heads in (8, num_key_heads, num_key_heads, 8)]
    *leaves, probe = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes)
    offsets = torch.tensor([0, *lengths], device=CUDA).cumsum(0, dtype=torch.int32)
    document = torch.bucketize(torch.arange(1024, device=CUDA), offsets, right=True)
    mask = (document[:, None] == document).tril()
    if window != flash.NO_WINDOW:
        mask = mask.triu(-window)

    def by_flash_4(*heads: torch.Tensor) -> torch.Tensor:
        if rows == "packed":
            return flash.flash_attention_4(*heads, cu_seqlens=offsets, max_length=max(lengths), window=window)
        return flash.flash_attention_4(*(each.unflatten(0, (2, 512)) for each in heads), window=window).flatten(0, 1)

    def by_sdpa(*heads: torch.Tensor) -> torch.Tensor:
        query, *others = (each.transpose(0, 1)[None] for each in heads)
        key, value = (each.repeat_interleave(8 // num_key_heads, 1) for each in others)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)

    def run(attend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        output = attend(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, probe.to(dtype))]

    with sdpa_kernel(SDPBackend.MATH):
        truth = run(by_sdpa, torch.float32)
    found, wanted = run(by_flash_4, torch.bfloat16), run(by_sdpa, torch.bfloat16)
    for name, true, ours, torchs in zip(("output", "dq", "dk", "dv"), truth, found, wanted, strict=True):
        far, unavoidable = (((each.float() - true).norm() / true.norm()).item() for each in (ours, torchs))
        print(
            f"{rows}, window {window}, heads of {head_dim}, {num_key_heads}: {name} {far:.2e}, SDPA {unavoidable:.2e}"
        )
        assert far <= 1.2 * unavoidable
