"""Parts of a step alone, as they are and as they were or might be: the head with its loss, the loss, the gradient norm,
clipping with AdamW, dropout of LoRA, unpacking of QLoRA, and attention by each kernel that is here.

    python -m benchmarks.step_parts                                                    # a GPU: Llama-3.1-8B's shapes
    python -m benchmarks.step_parts --tokens 1024 --width 512 --vocab 32000 --weights 40e6 --dtype fp32   # a CPU

Variants take turns, so that whatever else a machine does hits all of them. Prints the median milliseconds of each: CPU
time of this process on a CPU (give OMP_NUM_THREADS=1), time between events on a GPU that was busy before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import fire
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from policies.adapters.dropout_masks import draw_dropout, mask_like
from policies.attention.each_sequence import attention_of_each_sequence
from policies.attention.flash_attention_4 import NO_WINDOW, AttentionKind, find_flash_attention_4, flash_attention_4
from policies.clipping import clip_grad_norm, sum_of_squares
from policies.loss.compiled_cross_entropy import compile_cross_entropy
from policies.loss.head_gradients import loss_with_gradients
from policies.loss.summed_loss import summed_cross_entropy
from policies.mixed_precision import DTYPES, Precision
from policies.optimizers.compiled_adamw import ROW, CompiledAdamW
from policies.quantization.nf4_unpacking import unpack_nf4
from policies.quantization.packing import BLOCK, NESTED_BLOCK
from utils.compat import GROUPED_HEADS
from utils.optional_packages import import_bitsandbytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM_UP = 2  # rounds, which compile
BUSY_CYCLES = 100_000_000  # of a GPU: 50 ms at 2 GHz


def milliseconds(run: Callable[[], None]) -> float:
    """What one call takes."""
    if DEVICE.type == "cpu":
        started = time.process_time()
        run()
        return 1e3 * (time.process_time() - started)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)  # so that the host is ahead of the device, as in a run
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def take_turns(variants: dict[str, Callable[[], None]], rounds: int) -> None:
    """Print the median of each variant, and its share of the first one's."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(WARM_UP + rounds):
        for name, run in variants.items():
            taken[name].append(milliseconds(run))
    medians = {name: statistics.median(times[WARM_UP:]) for name, times in taken.items()}
    for name, median in medians.items():
        print(f"{name:<64} {median:9.2f} ms  {median / next(iter(medians.values())):.2f}")


def head_variants(tokens: int, width: int, vocab: int, chunk: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    head = nn.Linear(width, vocab, bias=False, device=DEVICE, dtype=dtype)
    hidden = torch.randn(1, tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    chunks = list(zip(hidden.split(chunk, dim=1), targets.split(chunk), strict=True))
    compiled = compile_cross_entropy()

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = head(part).squeeze(0)
        return logits

    def backward(loss: torch.Tensor) -> None:
        (loss / tokens).backward()
        head.weight.grad = hidden.grad = None

    def recomputed() -> None:
        def of_chunk(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return summed_cross_entropy(logits_of(part), wanted)

        backward(torch.stack([checkpoint(of_chunk, *each, use_reentrant=False) for each in chunks]).sum())

    return {
        "head and loss, logits computed again in backward": recomputed,
        "head and loss, gradients with the loss": lambda: backward(
            loss_with_gradients(hidden, chunks, logits_of, summed_cross_entropy, 1 / tokens)
        ),
        "the same, cross-entropy compiled": lambda: backward(
            loss_with_gradients(hidden, chunks, logits_of, compiled, 1 / tokens)
        ),
    }


def loss_variants(tokens: int, vocab: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Of the logits of one chunk, forward and backward."""
    logits = torch.randn(tokens, vocab, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    derived, written_out = torch.compile(summed_cross_entropy), compile_cross_entropy()
    return {
        "cross-entropy of a chunk, compiled, its gradient derived": lambda: take(
            torch.autograd.grad(derived(logits, targets), logits)[0]
        ),
        "the same, its gradient written out (--compile)": lambda: take(
            torch.autograd.grad(written_out(logits, targets), logits)[0]
        ),
    }


def many_tensors(weights: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of 4096 x 4096 random numbers or less."""
    rows = min(4096, weights // ROW)
    shape = (rows, min(4096, weights // rows // ROW * ROW))
    count = max(1, weights // (shape[0] * shape[1]))
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(count)]


def norm_variants(weights: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Of the norm of all gradients, in fp32."""
    gradients = many_tensors(weights, dtype)

    def squares(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.float().square().sum()

    compiled = torch.compile(squares)
    on_gpu: dict[str, Callable[[], None]] = {
        "the norm of gradients, by our own kernel (--compile_optimizer)": lambda: take(
            sum_of_squares(gradients, in_kernel=True)
        ),
    }
    return {
        "the norm of gradients, by torch's kernel": lambda: take(sum_of_squares(gradients, in_kernel=False)),
        **(on_gpu if DEVICE.type == "cuda" else {}),
        "the norm of gradients, tensor by tensor": lambda: take(
            torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]).square().sum()
        ),
        "the norm of gradients, by compiled code": lambda: take(torch.stack(list(map(compiled, gradients))).sum()),
    }


def optimizer_variants(weights: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """All step on the same weights."""
    parameters = [nn.Parameter(tensor) for tensor in many_tensors(weights, dtype)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    fused = AdamW(parameters, lr=1e-4, fused=True)
    compiled = CompiledAdamW(parameters, lr=1e-4, large=2 * ROW)
    compiled.state = fused.state

    def apart() -> None:
        clip_grad_norm(parameters, 1.0)
        fused.grad_scale = None  # type: ignore[attr-defined]
        fused.step()

    def together(optimizer: AdamW) -> None:
        clip_grad_norm(parameters, 1.0, optimizer=optimizer)
        optimizer.step()

    return {
        "clipping, then fused AdamW": apart,
        "fused AdamW that clips": lambda: together(fused),
        "compiled AdamW that clips (--compile_optimizer)": lambda: together(compiled),
    }


def mask_variants(tokens: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """All are used once, on the tensor that they belong to."""
    inputs = torch.randn(tokens, width, device=DEVICE, dtype=dtype)

    def by_torch() -> torch.Tensor:
        return torch.where(torch.empty_like(inputs, dtype=torch.bool).bernoulli_(0.95), inputs, 0.0)

    def from_keys() -> torch.Tensor:
        p, keys = draw_dropout(inputs, 0.05)
        return torch.where(mask_like(inputs, keys, p), inputs, 0.0)

    drawn_in_kernel, made_in_kernel = torch.compile(by_torch), torch.compile(from_keys)
    return {
        "dropout, its mask by torch's kernel": lambda: take(by_torch()),
        "dropout, its mask by torch's generator in compiled code": lambda: take(drawn_in_kernel()),
        "dropout, its mask from keys in compiled code": lambda: take(made_in_kernel()),
    }


def unpack_variants(rows: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Of a weight packed in nf4."""
    functional = import_bitsandbytes("--quantization").functional
    whole = torch.randn(rows, width, device=DEVICE, dtype=dtype)
    packed, state = functional.quantize_4bit(whole, blocksize=BLOCK, quant_type="nf4")
    absmax, code = state.absmax, state.code

    def looked_up() -> torch.Tensor:
        halves = torch.stack((packed >> 4, packed & 15), dim=-1).int()
        scaled: torch.Tensor = code[halves].view(-1, BLOCK) * absmax.unsqueeze(1)
        return scaled.to(dtype).view(rows, width)

    def by_own_kernel() -> torch.Tensor:
        return unpack_nf4(packed, absmax.view(1, -1), code, [], BLOCK, NESTED_BLOCK, dtype).view(rows, width)

    compiled = torch.compile(looked_up)
    assert torch.equal(compiled(), functional.dequantize_4bit(packed, state))
    assert torch.equal(by_own_kernel(), functional.dequantize_4bit(packed, state))
    return {
        "a weight out of nf4, by bitsandbytes": lambda: take(functional.dequantize_4bit(packed, state)),
        "a weight out of nf4, by compiled code": lambda: take(compiled()),
        "a weight out of nf4, by our own kernel": lambda: take(by_own_kernel()),
    }


def attention_variants(
    tokens: int, lengths: Sequence[int], heads: Sequence[int], head_dim: int, dtype: torch.dtype
) -> dict[str, Callable[[], None]]:
    """Of one layer, forward and backward: rows of one document each, if `lengths` are alike, else a packed row."""
    shapes = [(tokens, number, head_dim) for number in (heads[0], heads[1], heads[1], heads[0])]
    *leaves, probe = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes)
    is_packed, longest = len(set(lengths)) > 1, max(lengths)
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    torchs: Callable[..., Any] = attention_of_each_sequence if DEVICE.type == "cpu" else varlen_attn

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_packed else tensor.unflatten(0, (-1, longest))

    def by_offsets() -> torch.Tensor:
        output: torch.Tensor = torchs(
            *leaves, offsets, offsets, longest, longest, scale=None, window_size=(NO_WINDOW, 0), **GROUPED_HEADS
        )
        return output

    def by_sdpa() -> torch.Tensor:
        query, key, value = (rows(leaf).transpose(1, 2) for leaf in leaves)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)

    def by_flash_4() -> torch.Tensor:
        offsets_of_row = offsets if is_packed else None
        output = flash_attention_4(*map(rows, leaves), cu_seqlens=offsets_of_row, max_length=longest)
        return output if is_packed else output.flatten(0, 1)

    def backward(attend: Callable[[], torch.Tensor]) -> None:
        torch.autograd.grad(attend(), leaves, probe)

    kind = AttentionKind(heads[0], heads[1], head_dim, NO_WINDOW, is_packed)
    found, lines = find_flash_attention_4(DEVICE, Precision("", dtype, dtype), [kind])
    print(*lines, sep="\n", end="\n" if lines else "")
    name = f"attention, {len(lengths)} documents in {'a packed row' if is_packed else 'rows of their own'}"
    variants = {f"{name}, by offsets": lambda: backward(by_offsets)}
    if not is_packed:
        variants = {f"{name}, by SDPA": lambda: backward(by_sdpa)} | variants
    return variants | ({"the same, by flash-attn-4": lambda: backward(by_flash_4)} if found else {})


def take(tensor: torch.Tensor) -> None:
    """What a variant makes, and nobody needs."""


def main(
    tokens: int = 8192,
    width: int = 4096,
    vocab: int = 128_256,
    chunk: int = 1024,
    weights: float = 4e9,
    dtype: str = "bf16",
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    rounds: int = 7,
) -> None:
    """Args: heads: of queries, and of keys."""
    kind = DTYPES[dtype]
    take_turns(head_variants(tokens, width, vocab, chunk, kind), rounds)
    take_turns(loss_variants(chunk, vocab, kind), rounds)
    take_turns(norm_variants(int(weights), kind), rounds)
    take_turns(optimizer_variants(int(weights), kind), rounds)
    take_turns(mask_variants(tokens, width, kind), rounds)
    take_turns(unpack_variants(4 * width, width, kind), rounds)
    half, quarter = tokens // 2, tokens // 4
    take_turns(attention_variants(tokens, (half, half), heads, head_dim, kind), rounds)
    take_turns(attention_variants(tokens, (half, quarter, quarter), heads, head_dim, kind), rounds)


if __name__ == "__main__":
    fire.Fire(main)
