"""Runs of one long row per step: on one GPU, shared by several, and cut to 8 layers where a step takes minutes."""

from __future__ import annotations

from itertools import product

from benchmarks.runs.launch import UNCOMPILED
from benchmarks.runs.workload import LORA, ON_ALL, R16, Workload

FULL = ["--activation_checkpointing", "full"]
LONG_QLORA = [*ON_ALL, *R16, "--quantization", "4bit", "--compile", *FULL]
TILES, OFFLOADED = ["--tile_tokens", "8192"], ["--activation_offloading"]
WHOLE = ["--tile_tokens", "0"]
LONG_ROWS = {
    f"llama8b-long-{length}{tiled}{kept}": Workload("llama8b-long", 1, length, [*LONG_QLORA, *flags, *more])
    # what layers hold at a time, whole and in tiles; kept on the device, and in host memory
    for length, (tiled, flags), (kept, more) in product(
        (32768, 65536, 131072),
        {"": WHOLE, "-tiles": TILES}.items(),
        {"": [], "-offloaded": OFFLOADED, "-auto": [*OFFLOADED, "auto"]}.items(),
    )
}
QLORA_IN_TILES, ALL_WEIGHTS = [*LONG_QLORA, *TILES], ["--pure_bf16", "--compile", *FULL, *TILES]
EIGHT = "llama8b-8layers"  # of its 32
# Qwen3 was made with 32,768 positions (its model card); its config.json has 40,960.
SCALED = ["--rope_scaling", "yarn", "--rope_original_positions", "32768"]
ON_HOST = ["--enable_fsdp", "--fsdp_cpu_offload"]
_OFFLOADED = [*QLORA_IN_TILES, *OFFLOADED]
LONG_ROWS |= {
    "llama8b-long-262144-tiles-offloaded": Workload("llama8b-long", 1, 262144, _OFFLOADED),
    "llama8b-8layers-500000-tiles-offloaded": Workload(EIGHT, 1, 500000, _OFFLOADED),
    # At full depth, for its peak alone: by plan a step takes 612 s, and 122 GiB of the host.
    "llama8b-long-500000-tiles-offloaded": Workload("llama8b-long", 1, 500000, _OFFLOADED),
    "qwen3-8b-262144-tiles-offloaded": Workload("qwen3-8b", 1, 262144, [*_OFFLOADED, *SCALED]),
    # All weights, in host memory with their states. A machine of 128 GiB has room for the inputs of 16 layers.
    "llama8b-long-262144-full-on-host": Workload(
        "llama8b-long", 1, 262144, [*ALL_WEIGHTS, *ON_HOST, *OFFLOADED, "--num_offloaded_layers", "16"]
    ),
    "llama8b-8layers-500000-full-on-host": Workload(EIGHT, 1, 500000, [*ALL_WEIGHTS, *ON_HOST, *OFFLOADED]),
}
for shape, length, flags in (
    ("llama8b-long", 524288, _OFFLOADED),
    (EIGHT, 1000000, _OFFLOADED),
    ("llama8b-long", 131072, [*ALL_WEIGHTS, "--enable_fsdp"]),
    (EIGHT, 131072, [*ALL_WEIGHTS, "--enable_fsdp"]),
):
    trained = "" if LORA[0] in flags else "-full"
    LONG_ROWS[f"{shape}-{length}{trained}-shared-2"] = Workload(shape, 1, length, flags, nproc=2, num_sharing=2)
# The same row on one GPU, and shared by two or four.
for shape, length, n in product(("llama8b-long", EIGHT), (65536, 131072), (1, 2, 4)):
    name = f"{shape.removesuffix('-long')}-shared-{length}-{n}"
    LONG_ROWS[name] = Workload(shape, 1, length, QLORA_IN_TILES, nproc=n, num_sharing=n)
# Cheap ones, for the plan's test: each way to train, at lengths and with flags that differ.
QV, ALL_LORA = [*LORA, *R16], [*ON_ALL, *R16]
NF4 = ["--quantization", "4bit"]
_CHEAP = {
    "lora-16384": (16384, ALL_LORA, "--compile", WHOLE),
    "lora-32768-uncompiled-tiles": (32768, ALL_LORA, "", TILES),
    "lora-65536": (65536, ALL_LORA, "--compile", WHOLE),
    "lora-65536-tiles-offloaded": (65536, ALL_LORA, "--compile", [*TILES, *OFFLOADED]),
    "lora-qv-16384-uncompiled": (16384, QV, "", WHOLE),
    "lora-qv-32768": (32768, QV, "--compile", WHOLE),
    "lora-qv-65536-tiles": (65536, QV, "--compile", TILES),
    "lora-qv-65536-uncompiled-tiles-offloaded": (65536, QV, "", [*TILES, *OFFLOADED]),
    "qlora-16384-uncompiled": (16384, [*ALL_LORA, *NF4], "", WHOLE),
    "qlora-32768": (32768, [*ALL_LORA, *NF4], "--compile", WHOLE),
    "qlora-65536": (65536, [*ALL_LORA, *NF4], "--compile", WHOLE),
    "qlora-65536-tiles": (65536, [*ALL_LORA, *NF4], "--compile", TILES),
    "qlora-65536-tiles-offloaded": (65536, [*ALL_LORA, *NF4], "--compile", [*TILES, *OFFLOADED]),
    "full-16384": (16384, ["--pure_bf16"], "--compile", WHOLE),
    "full-32768-uncompiled": (32768, ["--pure_bf16"], "", WHOLE),
    "full-65536-tiles-offloaded": (65536, ["--pure_bf16"], "--compile", [*TILES, *OFFLOADED]),
}
CHEAP_LONG_ROWS = {
    f"{EIGHT}-{name}": Workload(EIGHT, 1, length, [*way, *([compiled] if compiled else UNCOMPILED), *FULL, *flags])
    for name, (length, way, compiled, flags) in _CHEAP.items()
}
LONG_ROWS |= CHEAP_LONG_ROWS
