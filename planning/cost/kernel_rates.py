"""The fraction of a card's figures that kernels reach: one for each kind of card and precision, the same for every run.

The ceiling of a card is the rate of the best matrix product. Those of training reach less; how much less was measured
on one H200 (torch 2.11, 21 and 22 November 2026) and is taken for all cards:

- matrix products of Llama-3.1-8B's shapes, 2 x 4096 tokens: 704 TFLOP/s, 0.89 of that GPU's ceiling of 792.
- a copy in device memory: 4.3 of 4.8 TB/s.
- fused attention: about half the rate of matrix products, as FlashAttention-3's paper reports of FlashAttention-2 on an
  H100 (Shah et al., 2024: 35 % of the peak); of long sequences two thirds: steps of one row of 65,536, 131,072 and
  262,144 tokens on an H100 (docs/long-rows.md) took what a sequence's length squared at 0.66 explains.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.machines.cards import Card

_CEILING = {
    # S. Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS (bf16)
    "A100-40GB": 0.869,
    "A100-80GB": 0.869,
    "H100-80GB": 0.803,
    "H100-94GB": 0.803,
    "B200": 0.776,
    "MI300X": 0.514,
    "H200": 0.80,  # measured: 792 of 989
    # Markidis et al., "NVIDIA Tensor Core Programmability, Performance & Precision", 2018: 83 of 125 TFLOP/s
    "V100-16GB": 0.664,
    "V100-32GB": 0.664,
    # 70 W hold it at its base clock, 585 of 1590 MHz: 24 of 65 TFLOP/s (NVIDIA developer forum, topic 264462)
    "T4": 0.37,
}
_FP32_CEILING = {
    # The same paper: a seventh of 83 TFLOP/s, of 15.7
    "V100-16GB": 0.755,
    "V100-32GB": 0.755,
    "T4": 0.37,  # the clock is the same
}
_UNMEASURED = 0.80
OF_CEILING = 0.89
ATTENTION_SHARE, LONG_ATTENTION_SHARE = 0.5, 0.66
SHORT_SEQUENCE = 4096  # tokens; the share of the first kind holds up to here
MEMORY_SHARE = 4.3 / 4.8


@dataclass(frozen=True)
class KernelRates:
    """Per second."""

    matrix_flops: float
    memory_bytes: float
    float8_flops: float  # of matrix products in float8
    notes: tuple[str, ...] = ()

    def attention_flops(self, length: float) -> float:
        """Those of fused attention over causal sequences of so many tokens."""
        gained = (LONG_ATTENTION_SHARE - ATTENTION_SHARE) * (1 - SHORT_SEQUENCE / max(length, SHORT_SEQUENCE))
        return (ATTENTION_SHARE + gained) * self.matrix_flops


def kernel_rates(card: Card, compute: str, *, in_float8: bool = False) -> KernelRates | None:
    """The rates of a card; None if its figures are not known.

    Args:
        compute: "fp32", "bf16" or "fp16". What a card cannot compute natively goes at its fp32 rate.
        in_float8: the run multiplies float8, too: at the share of the card's peak that bf16 reaches of its own.
    """
    peak = {"fp32": card.fp32_tflops, "bf16": card.bf16_tflops, "fp16": card.fp16_tflops}[compute]
    is_native = compute == "fp32" or peak is not None
    peak = peak or card.fp32_tflops
    if peak is None or card.memory_gb_per_second is None:
        return None
    ceilings = _CEILING if compute != "fp32" and is_native else _FP32_CEILING
    notes = []
    if card.name not in ceilings:
        notes.append(
            f"time: no measured {compute} rate of {card.name} is known; {_UNMEASURED:.0%} of its peak is taken"
        )
    if not is_native:
        notes.append(f"time: {card.name} has no {compute}; the rate of its fp32 is taken, emulation may be slower")
    if in_float8:
        taken = f"the share of its peak in {compute}" if card.float8_tflops else f"that of {compute}"
        notes.append(f"time: no float8 rate of {card.name} was measured; {taken} is taken")
    matrix_flops = 1e12 * peak * ceilings.get(card.name, _UNMEASURED) * OF_CEILING
    return KernelRates(
        matrix_flops=matrix_flops,
        memory_bytes=1e9 * card.memory_gb_per_second * MEMORY_SHARE,
        float8_flops=matrix_flops * (card.float8_tflops or peak) / peak,
        notes=tuple(notes),
    )
