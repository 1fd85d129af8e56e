"""The systems of documented runs, each described once by general settings, and plans of their runs.

They are not ours: they compute whole logits, step with foreach kernels, wrap the whole model as one unit, and so on. A
plan of such a run uses the same parts as a plan of ours, with these settings.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from planning.machines.cards import find_card
from planning.memory.device_kernels import KernelsOfCard
from planning.memory.held_bytes import Scheme
from planning.memory.layer_bytes import PassBytes
from planning.memory.layer_memory import measure_pass
from planning.memory.memory_plan import MemoryPlan
from planning.memory.meta_pass import computed_in
from planning.memory.optimizer_bytes import OptimizerBytes
from planning.memory.row_lengths import evenly_spread
from planning.memory.run_memory import overhead_gib
from planning.memory.sharded_bytes import add_statistics, local_parts
from planning.memory.step_memory import StepMemory
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.adapters.apply import store_adapters
from policies.quantization.choice import quantize_weights
from policies.quantization.packing import Quantization
from policies.wrapping import find_layers, modules_of_classes, outermost
from utils.units import GIB

RUNS = Path(__file__).parents[1] / "planning/documented_runs.csv"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int = 0, vocab: int = 32000) -> Any:
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or heads,
        vocab_size=vocab,
    )


def blip2(text: Any) -> Any:
    """Salesforce/blip2-*: a ViT-g of 39 layers and a Q-Former of 12, which are the configs' defaults."""
    return transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig().to_dict(),
        qformer_config=transformers.Blip2QFormerConfig().to_dict(),
        text_config=text.to_dict(),
        image_token_id=0,
    )


def opt(hidden: int) -> Any:
    return transformers.OPTConfig(
        hidden_size=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=50304,
        word_embed_proj_dim=hidden,
    )


LLAMA_7B, LLAMA_13B = llama(4096, 11008, 32, 32), llama(5120, 13824, 40, 40)
MODELS = {
    "TinyLlama-1.1B": llama(2048, 5632, 22, 32, 4),
    "OpenLLaMA-3B": llama(3200, 8640, 26, 32),
    "OpenLLaMA-7B": LLAMA_7B,
    "OpenLLaMA-13B": LLAMA_13B,
    "Llama-2-7B": LLAMA_7B,
    "Llama-2-13B": LLAMA_13B,
    "CodeLlama-7B-Python": LLAMA_7B,
    "blip2-opt-2.7b": blip2(opt(2560)),
    "blip2-opt-6.7b": blip2(opt(4096)),
    "blip2-flan-t5-xxl": blip2(
        transformers.T5Config(
            d_model=4096,
            d_ff=10240,
            num_layers=24,
            num_heads=64,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            vocab_size=32128,
            decoder_start_token_id=0,
        )
    ),
    "bart-large-cnn": transformers.BartConfig(),
}
"""By their published config.json files; the defaults of transformers' classes are those of the first model of each."""

CARDS = {"A100-80": "A100-80GB", "V100-32": "V100-32GB", "H100-94": "H100-94GB"} | {
    "local 16GB GPU": "V100-16GB",
    "p3.8xlarge 4xV100": "V100-16GB",
    "4x p3.2xlarge (1 V100 each)": "V100-16GB",
    "4x g4.xlarge (1 T4 each)": "T4",
    "g4dn.xlarge x2 / x4": "T4",
}


@dataclass(frozen=True)
class System:
    """General settings of a training system."""

    holds_grads: bool  # zero_grad comes after forward
    bucket_views: bool = False  # of DistributedDataParallel; torch's default
    foreach: bool = True  # AdamW steps with foreach kernels: torch's default
    padding: int = 0  # tokens of the longest row; shorter ones are padded to the longest of their micro-batch
    accumulates_unsharded: bool = False  # micro-batches accumulate whole gradients: FSDP's no_sync
    upcasts_rest: bool = False  # peft's prepare_model_for_kbit_training: what is not packed is in fp32
    pads_with_mask: bool = True  # attention gets a mask of the padding
    is_litgpt: bool = False  # norms end in fp32, and logits have a name while memory is printed (litgpt/model.py)


SYSTEMS = {
    # Gradients were there after forward without accumulation, too: zero_grad came between forward and backward, as in
    # Lightning's closure (pytorch/loops/optimization/closure.py). Fabric accumulates under FSDP's no_sync.
    "LitGPT lab": System(
        holds_grads=True, padding=512, accumulates_unsharded=True, pads_with_mask=False, is_litgpt=True
    ),
    "BLIP-2 lab": System(holds_grads=True, bucket_views=True, padding=50),
    # SAMSum's dialogues with prompt and summary: nearly all are below 1024 tokens of Llama's tokenizer.
    "multi-V100 logs": System(holds_grads=False, padding=1024, upcasts_rest=True),
    "BART on SAMSum": System(holds_grads=False, padding=1024),
}


@dataclass(frozen=True)
class Run:
    """One documented run; its ranks are one."""

    name: str
    rows: tuple[dict[str, str], ...]  # of the table, one for each rank that was measured

    def __getitem__(self, column: str) -> str:
        return self.rows[0][column]

    @property
    def measured_gib(self) -> float | None:
        """Allocated after forward, the mean of its ranks: each had another batch."""
        values = [float(row["mem_value"]) for row in self.rows if row["mem_metric"] == "allocated_after_fwd"]
        return sum(values) / len(values) if values else None


def documented_runs() -> list[Run]:
    with RUNS.open() as file:
        rows = list(csv.DictReader(file))
    names = dict.fromkeys(row["id"].partition(".")[0] for row in rows)
    return [Run(name, tuple(row for row in rows if row["id"].partition(".")[0] == name)) for name in names]


def plan_of_run(run: Run) -> MemoryPlan:
    """The plan of a documented run, on the system that it ran on."""
    system = SYSTEMS[run["source"]]
    card = find_card(CARDS[run["gpu"]])
    assert card is not None
    capability = card.compute_capability or (8, 0)
    world_size = _number(run["n_gpus"])
    sharded = run["strategy"].startswith("fsdp")
    columns = ("source", "model", "method", "precision", "micro_bs", "act_ckpt")
    uses = _uses(*(run[column] for column in columns), autocasts=not sharded, has_flash=capability >= (8, 0))
    stored = next(p.dtype for p in uses.model.parameters() if p.requires_grad)
    num_shards = world_size if sharded else 1
    scheme = Scheme(
        kind="fully_shard" if sharded else ("ddp" if world_size > 1 else "plain"),
        optimizer=_optimizer(run, list(local_parts(uses.model, num_shards)), foreach=system.foreach),
        num_shards=num_shards,
        reshards_after_forward=sharded,
        compute_dtype=uses.casts_to if sharded else None,
        reduce_dtype=uses.casts_to or stored,
        num_micro_batches=_number(run["grad_acc"]),
        accumulates_unsharded=system.accumulates_unsharded,
        bucket_views=system.bucket_views or "bucket_view" in run["strategy"],
        holds_grads=system.holds_grads,
        params_on_host="cpu_offload" in run["strategy"],
        grads_on_host="offload" in run["strategy"],
    )
    memory = StepMemory(uses.model, _units(uses.base, run["strategy"]), scheme)
    phases = {phase: peak.in_gib() for phase, peak in memory.step(uses.of_width(system.padding)).items()}
    after_forward_gib = math.nan
    if run.measured_gib is not None:
        typical = uses.of_width(evenly_spread(system.padding, _number(run["micro_bs"])))
        after_forward_gib = memory.after_forward(typical, first=scheme.num_micro_batches == 1).total / GIB
    return MemoryPlan(
        phases=phases,
        after_forward_gib=after_forward_gib,
        overhead_gib=overhead_gib(max(parts.total for parts in phases.values()), world_size),
        capacity_gib=card.memory_gib,
        host_load_gib=0.0,
        host_training_gib=0.0,
        checkpoint_gib=0.0,
    )


@dataclass(frozen=True)
class _Uses:
    """A model and what its layers keep: many runs share it."""

    model: Any
    base: Any  # without adapters
    casts_to: torch.dtype | None  # what weights are cast to before they are used
    of_width: Callable[[int], PassBytes]  # by tokens of a row


@functools.cache
def _uses(
    source: str,
    model_name: str,
    method: str,
    precision: str,
    micro_bs: str,
    act_ckpt: str,
    *,
    autocasts: bool,
    has_flash: bool,
) -> _Uses:
    system, rows = SYSTEMS[source], _number(micro_bs)
    model, compute_dtype = _build(model_name, method, precision, system)
    stored = next(p.dtype for p in model.parameters() if p.requires_grad)
    casts_to = compute_dtype if compute_dtype not in (None, stored) else None
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    every_layer = find_layers(base)
    layers = outermost(every_layer)
    checkpoint_layers(every_layer, Checkpointing("full" if act_ckpt == "yes" else "off"))

    @functools.cache
    def of_width(width: int) -> PassBytes:
        compute, inputs = _forward(base, rows, width, system)
        capability = (8, 0) if has_flash else (7, 0)
        with computed_in(model, casts_to), KernelsOfCard(capability, answer=not system.pads_with_mask):
            found = measure_pass(model, layers, compute, inputs)
            # What autocast makes of weights is kept for backward, which multiplies by it.
            copies = sum(p.nbytes for p in model.parameters()) if casts_to and autocasts else 0
        return replace(found, between=found.between + copies)

    return _Uses(model, base, casts_to, of_width)


def _number(text: str) -> int:
    """The number that a cell begins with."""
    return int(text.split()[0].split("/")[0])


def _build(model_name: str, method: str, precision: str, system: System) -> tuple[Any, torch.dtype | None]:
    """The model with its adapters, on the meta device, and the dtype that is computed in, if it is another."""
    config, quantized = MODELS[model_name], "QLoRA" in method
    half = torch.float16 if "fp16" in precision else torch.bfloat16
    stored = DTYPES["fp32"]
    if precision == "bf16-true" or (quantized and not system.upcasts_rest):
        stored = torch.bfloat16
    compute = half if ("mixed" in precision or "fp16" in precision) and not quantized else None
    auto = AutoModelForCausalLM
    if isinstance(config, transformers.Blip2Config):
        auto = AutoModelForImageTextToText
    elif config.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model: Any = auto.from_config(config, dtype=stored, attn_implementation="sdpa").to(stored)
    if quantized:
        quantize_weights(model, Quantization(4, "nf4", False, half, torch.uint8))
        add_statistics(model)
    if "LoRA" in method:
        settings = peft.LoraConfig(
            r=int(method.partition(" r")[2].split()[0]),
            lora_alpha=16,
            lora_dropout=0.05,
            target_modules=_targets(method, config),
            init_lora_weights=False,
        )
        with torch.device("meta"):
            model = peft.get_peft_model(model, settings, low_cpu_mem_usage=True)
        store_adapters(model, stored if precision == "bf16-true" else torch.float32)
    for norm in model.modules() if system.is_litgpt else ():
        if type(norm).__name__ == "LlamaRMSNorm":
            norm.forward = MethodType(_norm_in_fp32, norm)
    model.train()
    return model, compute


def _targets(method: str, config: Any) -> list[str]:
    if "all-linear" in method:
        return ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    return ["q", "v"] if isinstance(config, transformers.Blip2Config) else ["q_proj", "v_proj"]


def _units(base: Any, strategy: str) -> list[nn.Module]:
    if "root-only" in strategy or not strategy.startswith("fsdp"):
        return []
    if "wrap" in strategy:
        return modules_of_classes(base, strategy.partition("wrap ")[2].split(","))
    return outermost(find_layers(base))


def _optimizer(run: Run, parts: Sequence[torch.Tensor], *, foreach: bool) -> OptimizerBytes:
    stored, numel = sum(part.nbytes for part in parts), sum(part.numel() for part in parts)
    name = run["optimizer"].lower()
    if "cpuadam" in name or "cpu_offload" in run["strategy"]:
        return OptimizerBytes(0, 0, on_host=3 * 4 * numel)
    if "8bit" in name:
        return OptimizerBytes(2 * numel, 0)
    if "sgd" in name:
        return OptimizerBytes(stored if "momentum .9" in name else 0, 0)
    return OptimizerBytes(2 * stored, stored if foreach else 0)


def _forward(base: Any, rows: int, width: int, system: System) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Computes the loss as transformers and LitGPT do, from whole logits in fp32; and its inputs."""
    config = base.config

    def ids(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    inputs: dict[str, Any] = {"input_ids": ids(rows, width), "use_cache": False}
    if isinstance(config, transformers.Blip2Config):
        inputs["input_ids"] = ids(rows, config.num_query_tokens + width)
        inputs["attention_mask"] = ids(rows, config.num_query_tokens + width)
        inputs["pixel_values"] = torch.empty(rows, 3, 224, 224, device="meta")
        if not config.use_decoder_only_language_model:
            inputs["decoder_input_ids"] = ids(rows, width)
    elif config.is_encoder_decoder:
        inputs |= {"attention_mask": ids(rows, width), "decoder_input_ids": ids(rows, 128)}

    def compute() -> torch.Tensor:
        logits = base(**inputs).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids(logits.shape[0] * logits.shape[1]))
        if system.is_litgpt:
            loss.register_hook(functools.partial(_forget, [logits]))
        return loss

    return compute, [value for value in inputs.values() if torch.is_tensor(value)]


def _forget(held: list[torch.Tensor], grad: torch.Tensor) -> None:
    """When backward begins, the step function is over."""
    held.clear()


def _norm_in_fp32(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """LitGPT's RMSNorm: multiplied by its weight before it is rounded."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + norm.variance_epsilon)
    return (normed * norm.weight.float()).to(hidden.dtype)
