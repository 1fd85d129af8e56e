"""Accelerators by name, with public figures. Each card names its sources; rates are dense, never sparse.

Vendors give links in both directions together; `peer_gb_per_second` and `host_gb_per_second` are one direction, half of
that. The memory is what torch reports as total (`torch.cuda.get_device_properties(0).total_memory`), which is less than
the label on the card: the driver and ECC keep some. Out-of-memory messages in public issues show it for T4, V100,
A100-80GB, A30, RTX A6000, RTX 5090, RTX 6000 Ada (with ECC) and B200; of the other cards it is an estimate, good to 0.5
GiB.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches

PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0
"""GB/s of 16 lanes in one direction, after encoding: PCI Express base specifications 3.0, 4.0 and 5.0."""

CONTEXT_GIB = 0.5
"""Memory of a device that CUDA takes before the first tensor: its context and the kernels of torch, cuBLAS and cuDNN.
NVIDIA names no figure; nvidia-smi shows 0.3 to 0.6 GiB for a process with one small tensor, less on older cards."""

COLLECTIVES_GIB = 0.4
"""NCCL's own buffers, outside torch's allocator, for a process with several ranks: some tens of channels of 4 to 10 MiB
(NCCL_BUFFSIZE is 4 MiB for each channel and direction)."""


@dataclass(frozen=True)
class Card:
    """The figures of one accelerator that plans need. None: not known, or not there."""

    name: str
    memory_gib: float
    bf16_tflops: float | None = None  # on tensor cores, summed in fp32
    fp16_tflops: float | None = None  # the same
    fp32_tflops: float | None = None  # not TF32, which runs here never use
    memory_gb_per_second: float | None = None
    peer_gb_per_second: float | None = None  # to the other cards of its node, sending
    peer_link: str | None = None
    host_gb_per_second: float | None = None  # to the memory of its node, one direction
    compute_capability: tuple[int, int] | None = None  # as torch.cuda.get_device_capability returns it
    source: str = "--device_memory_gib"
    float8_tflops: float | None = None  # on tensor cores, summed in fp32; None also where runs here do not use it
    maker: str = "NVIDIA"
    is_gpu: bool = True  # False for the host itself, as a plan for this machine may need it
    host_memory_gib: float | None = None  # of its machine, which the ranks there share

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16 natively, as `utils.device.facts_of` decides it."""
        return self.is_gpu and (self.compute_capability is None or self.compute_capability[0] >= 8)

    @property
    def has_float8(self) -> bool:
        """Whether runs here multiply float8 on it, as `utils.device.facts_of` decides it."""
        return self.is_gpu and self.maker == "NVIDIA" and (self.compute_capability or (8, 9)) >= (8, 9)

    @property
    def has_grouped_products(self) -> bool:
        """Whether torch multiplies all experts by one kernel on it, as `utils.device.facts_of` decides it."""
        return self.is_gpu and (self.compute_capability or (9, 0)) >= (9, 0)


CARDS = (
    # float8 by the same sources: half of the sparse rates 3958, 3341, 3958, 9000, 485 and 1466; the RTX 4090's is with
    # sums in fp32.
    # Memory bandwidth: Turing whitepaper (320); the datasheet says 300 for early boards.
    Card("T4", 14.75, None, 65, 8.1, 320, PCIE3, "PCIe 3.0 x16", PCIE3, (7, 5), "NVIDIA T4 datasheet"),
    # p3 instances and DGX-1 hold the SXM2 module. fp16: "Deep learning 125 teraFLOPS".
    Card("V100-16GB", 15.78, None, 125, 15.7, 900, 150, "NVLink 2.0", PCIE3, (7, 0), "NVIDIA V100 datasheet, SXM2"),
    Card("V100-32GB", 31.74, None, 125, 15.7, 900, 150, "NVLink 2.0", PCIE3, (7, 0), "NVIDIA V100 datasheet, SXM2"),
    # The datasheets of A10, A30, A40 and RTX A6000 give tensor rates dense and sparse. Bridges join two A30, A40 or RTX
    # A6000, at 200 and 112.5 GB/s in both directions.
    Card("A10", 22.06, 125, 125, 31.2, 600, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 6), "NVIDIA A10 datasheet"),
    Card("A30", 23.53, 165, 165, 10.3, 933, 100, "NVLink 3.0", PCIE4, (8, 0), "NVIDIA A30 datasheet"),
    Card("A40", 44.35, 149.7, 149.7, 37.4, 696, 56.25, "NVLink 3.0", PCIE4, (8, 6), "NVIDIA A40 datasheet"),
    Card("RTX A6000", 47.54, 154.8, 154.8, 38.7, 768, 56.25, "NVLink 3.0", PCIE4, (8, 6), "NVIDIA RTX A6000 datasheet"),
    # Not the A10: half of its tensor rate.
    Card("A10G", 22.06, 70, 70, 35, 600, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 6), "NVIDIA A10G datasheet for AWS G5"),
    Card("A100-40GB", 39.39, 312, 312, 19.5, 1555, 300, "NVLink 3.0", PCIE4, (8, 0), "NVIDIA A100 datasheet, SXM4"),
    Card("A100-80GB", 79.15, 312, 312, 19.5, 2039, 300, "NVLink 3.0", PCIE4, (8, 0), "NVIDIA A100 datasheet, SXM4"),
    # The datasheet's tensor rates are sparse: 1979 and 1671. NVL: bridges join two or four cards.
    Card("H100-80GB", 79.11, 989.4, 989.4, 66.9, 3350, 450, "NVLink 4.0", PCIE5, (9, 0), "NVIDIA H100 datasheet, SXM",
         float8_tflops=1978.9),
    Card("H100-94GB", 93.10, 835.5, 835.5, 60, 3900, 300, "NVLink 4.0", PCIE5, (9, 0), "NVIDIA H100 datasheet, NVL",
         float8_tflops=1671.0),
    # Sparse in the datasheet: 1979.
    Card("H200", 139.80, 989.4, 989.4, 66.9, 4800, 450, "NVLink 4.0", PCIE5, (9, 0), "NVIDIA H200 datasheet, SXM",
         float8_tflops=1978.9),
    # HGX, eight cards: bf16 36 PFLOP/s sparse, fp32 600 TFLOP/s. Memory bandwidth: bus of 7680 bits at 3996 MHz, as
    # read from the device in pytorch/ao pull request 4002.
    Card("B200", 178.35, 2250, 2250, 75, 7672, 900, "NVLink 5.0", PCIE5, (10, 0), "NVIDIA HGX B200 datasheet",
         float8_tflops=4500.0),
    # One GPU of a superchip of two: half of bf16 10 PFLOP/s sparse, fp32 160 TFLOP/s, 372 GB, 16 TB/s, and of the 900
    # GB/s in both directions to the memory of its CPU.
    Card("GB200", 184.30, 2500, 2500, 80, 8000, 900, "NVLink 5.0", 225, (10, 0), "NVIDIA GB200 NVL72 datasheet",
         float8_tflops=5000.0),
    # Sparse in the datasheets: 242 and 733.
    Card("L4", 22.03, 121, 121, 30.3, 300, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 9), "NVIDIA L4 datasheet",
         float8_tflops=242.5),
    Card("L40S", 44.39, 366.5, 366.5, 91.6, 864, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 9), "NVIDIA L40S datasheet",
         float8_tflops=733.0),
    # Its tensor rates of sums in fp32, as in its whitepaper; the datasheet has 1457 in float8, sparse.
    Card("RTX 6000 Ada", 44.43, 364.2, 364.2, 91.1, 960, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 9),
         "NVIDIA RTX 6000 Ada datasheet and Ada professional whitepaper", float8_tflops=728.5),
    # Consumer cards halve the tensor rate where sums are in fp32, as they are here.
    Card("RTX 3090", 23.69, 71, 71, 35.6, 936, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 6), "NVIDIA Ampere GA102 whitepaper"),
    Card("RTX 4090", 23.64, 165.2, 165.2, 82.6, 1008, PCIE4, "PCIe 4.0 x16", PCIE4, (8, 9), "NVIDIA Ada whitepaper",
         float8_tflops=330.3),
    Card("RTX 5090", 31.36, 209.5, 209.5, 104.8, 1792, PCIE5, "PCIe 5.0 x16", PCIE5, (12, 0),
         "NVIDIA RTX Blackwell whitepaper", float8_tflops=419.0),
    # Seven links of 128 GB/s in both directions. torch reports gfx942 as 9.4. Runs here do not use its float8.
    Card("MI300X", 191.98, 1307.4, 1307.4, 163.4, 5300, 448, "Infinity Fabric", PCIE5, (9, 4), "AMD MI300X datasheet",
         maker="AMD"),
)  # fmt: skip

_LEFT_OUT = re.compile(r"nvidia|amd|tesla|geforce|instinct|quadro|generation|sxm\d?|pcie|hbm\d?e?|oam")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>GiB|GB|G)", re.IGNORECASE)
GIB_PER_LABEL = 0.918
"""GiB that torch reports for each GB of a card's label: the least of the cards above (L4, 24 GB)."""


def find_card(name: str) -> Card | None:
    """The card of this name, as people or drivers write it ("v100 32gb", "NVIDIA A100-SXM4-80GB"); None if unknown.

    A name without the memory fits if there is only one such card.
    """
    found = _candidates(name)
    return found[0] if len(found) == 1 else None


def card_of_size(text: str) -> Card | None:
    """A card of which only the memory is known: "24GB" as on its label, or "24GiB" as torch reports it; else None."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        return None
    number, unit = float(match["number"]), "GiB" if match["unit"].lower() == "gib" else "GB"
    memory_gib = number if unit == "GiB" else number * GIB_PER_LABEL
    return Card(f"GPU of {number:g} {unit}", memory_gib, source="its size alone")


def explain_unknown_card(name: str) -> str:
    """Why no card is found by this name, as a clause, with the nearest names."""
    found = _candidates(name)
    if found:
        return f"{name!r} is one of {_listed([card.name for card in found])}; name its memory, too"
    by_key = {_key(card.name): card.name for card in CARDS}
    near = get_close_matches(_key(name), by_key, n=1, cutoff=0.5)
    known = f"did you mean {by_key[near[0]]}? Known" if near else "known"
    return f"no figures of {name!r} are known; {known} are {_listed([card.name for card in CARDS])}"


def _candidates(name: str) -> list[Card]:
    found: list[Card] = []
    for key in (_key(name), _key(name).removesuffix("g")):  # "v100-32g"; an A10G is no A10
        exact = [card for card in CARDS if key in (_key(card.name), *_with_its_memory(card))]
        found = exact or [card for card in CARDS if key and re.fullmatch(rf"{re.escape(key)}\d\d", _key(card.name))]
        if found:
            break
    return found


def _with_its_memory(card: Card) -> list[str]:
    """Keys that also name the memory, where the card's name does not: "t416"."""
    if card.name.endswith("GB"):
        return []
    return [f"{_key(card.name)}{label}" for label in range(math.ceil(card.memory_gib), int(card.memory_gib * 1.1) + 1)]


def _key(name: str) -> str:
    """The name without maker, form, unit and punctuation: "v10032"."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _LEFT_OUT.fullmatch(word)]
    key = re.sub(r"(?<=\d)(gib|gb)$", "", "".join(words))
    return re.sub(r"^h100.*nvl.*", "h10094", re.sub(r"^(?=[345]090|a6000|6000ada)", "rtx", key))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"
