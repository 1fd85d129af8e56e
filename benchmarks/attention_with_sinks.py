"""One layer's attention with sinks, forward and backward: transformers' own, torch's flash kernels, flash-attn-4.

    python -m benchmarks.attention_with_sinks                                        # a GPU: gpt-oss-20b's shapes
    python -m benchmarks.attention_with_sinks --lengths 96,32,128 --heads 8,2        # a CPU

Prints how far outputs and gradients are from fp32, and the median milliseconds, with a window and without.
transformers' attention takes a dense mask of the documents here, which gpt-oss's own code does not make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fire
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from benchmarks.step_parts import DEVICE, take_turns
from policies.attention.flash_attention_4 import NO_WINDOW, AttentionKind, find_flash_attention_4, flash_attention_4
from policies.attention.sinks import attention_with_sinks
from policies.mixed_precision import DTYPES, Precision

Attend = Callable[..., torch.Tensor]
NAMES = ("output", "dq", "dk", "dv", "dsinks")


def variants_of(lengths: Sequence[int], window: int, heads: Sequence[int], head_dim: int) -> dict[str, Attend]:
    """Functions of query, key, value [tokens, heads, head_dim] and sinks [heads]."""
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    document = torch.bucketize(torch.arange(sum(lengths), device=DEVICE), offsets, right=True)
    visible = (document[:, None] == document).tril()
    visible = visible if window == NO_WINDOW else visible.triu(-window)
    module: Any = nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]

    def by_transformers(*leaves: torch.Tensor) -> torch.Tensor:
        query, key, value = (leaf.transpose(0, 1)[None] for leaf in leaves[:3])
        module.sinks = leaves[3]
        mask = torch.zeros(visible.shape, device=DEVICE, dtype=query.dtype).masked_fill_(~visible, -torch.inf)
        output: torch.Tensor = eager_attention_forward(module, query, key, value, mask, scaling=head_dim**-0.5)[0]
        return output[0]

    def by_torch(*leaves: torch.Tensor) -> torch.Tensor:
        query, key, value, sinks = leaves
        return attention_with_sinks(query, key, value, sinks, offsets, max(lengths), window=window)

    def by_flash_4(*leaves: torch.Tensor) -> torch.Tensor:
        query, key, value, sinks = leaves
        options: dict[str, Any] = {"cu_seqlens": offsets, "max_length": max(lengths), "window": window}
        return flash_attention_4(query, key, value, sinks=sinks, **options)

    return {"transformers' own": by_transformers, "torch's flash kernels": by_torch, "flash-attn-4": by_flash_4}


def results(attend: Attend, leaves: Sequence[torch.Tensor], probe: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of query, key, value and sinks."""
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, probe.to(output.dtype))]


def compare(
    lengths: Sequence[int], window: int, heads: Sequence[int], head_dim: int, dtype: torch.dtype, rounds: int
) -> None:
    shapes = [(sum(lengths), number, head_dim) for number in (heads[0], heads[1], heads[1], heads[0])]
    *tensors, probe = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes)
    leaves = [tensor.requires_grad_() for tensor in (*tensors, 4 + torch.randn(heads[0], device=DEVICE, dtype=dtype))]
    variants = variants_of(lengths, window, heads, head_dim)
    kind = AttentionKind(heads[0], heads[1], head_dim, window, packed=True, has_sinks=True)
    found, lines = find_flash_attention_4(DEVICE, Precision("", dtype, dtype), [kind])
    print(*lines, sep="\n", end="\n" if lines else "")
    if not found:
        del variants["flash-attn-4"]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    wanted = results(variants["transformers' own"], exact, probe)
    for name, attend in variants.items():
        given = results(attend, leaves, probe)
        apart = [((ours.float() - true).norm() / true.norm()).item() for ours, true in zip(given, wanted, strict=True)]
        print(f"{name}, apart from fp32: " + ", ".join(f"{n} {far:.1e}" for n, far in zip(NAMES, apart, strict=True)))
    del exact, wanted, given

    def step(attend: Attend) -> Callable[[], None]:
        return lambda: results(attend, leaves, probe).clear()

    take_turns({name: step(attend) for name, attend in variants.items()}, rounds)


def main(
    lengths: Sequence[int] = (2048, 1024, 512, 300, 212),
    heads: tuple[int, int] = (64, 8),
    head_dim: int = 64,
    window: int = 128,
    dtype: str = "bf16",
    rounds: int = 7,
) -> None:
    """
    Args:
        lengths: tokens of the documents of a row.
        heads: of queries, and of keys.
        window: tokens that a query sees, its own one included.
    """
    for size in (NO_WINDOW, window - 1):
        print(f"\n{sum(lengths)} tokens in {len(lengths)} documents, {'no window' if size == NO_WINDOW else window}")
        compare(lengths, size, heads, head_dim, DTYPES[dtype], rounds)


if __name__ == "__main__":
    fire.Fire(main)
