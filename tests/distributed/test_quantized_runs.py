"""QLoRA runs: losses and gradient norms are those of transformers' and peft's own quantized model, in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.helpers.adapter_kinds import ADAPTERS, batching_of
from tests.helpers.checkpoints import load_plain, logits
from tests.helpers.families import FAMILIES, save_family
from tests.helpers.made import Made
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.reference import (
    FAST_LR,
    assert_agrees,
    flags_for,
    lora_flags,
    plain_eval_loss,
    quantized_by_transformers,
    reference_run,
)
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of
from tools.export import main as export
from tools.make_tiny_model import make_tiny_model

NUM_STEPS = 3
TARGETS = ("q_proj", "v_proj", "down_proj")
SHARDED = ("--enable_fsdp",)
FLAGS = {
    "nf4": ["--quantization", "4bit"],
    "fp4 double": ["--quantization", "4bit", "--quant_type", "fp4", "--use_double_quant"],
    "int8": ["--quantization", "8bit"],
}


def by_transformers(kind: str) -> BitsAndBytesConfig:
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    double = kind.endswith("double")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind[:3],
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )


@dataclass(frozen=True)
class Case:
    kind: str
    ranks: int
    extra: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}{''.join(self.extra)}"


CASES = [Case("nf4", 1)]
SLOW_CASES = [
    Case("int8", 2, SHARDED),
    Case("fp4 double", 4, (*SHARDED, "--sharding_strategy", "HYBRID_SHARD", "--sharding_group_size", "2")),
    Case("nf4", 2, (*SHARDED, "--quant_storage", "bf16")),
    Case("nf4", 2, (*SHARDED, "--fsdp_cpu_offload")),
    Case("nf4", 2, (*SHARDED, "--sharding_strategy", "SHARD_GRAD_OP", "--wrap", "root")),
    Case("nf4", 1, ("--activation_checkpointing", "selective")),
]
FULL_CASES = [
    Case("fp4 double", 2, SHARDED),
    Case("int8", 2),
    Case("int8", 2, (*SHARDED, "--quant_storage", "fp32")),
    *(Case(kind, 1) for kind in FLAGS if kind != "nf4"),
    Case("nf4", 2, SHARDED),
    *(Case(kind, 2) for kind in FLAGS if kind != "int8"),
    *(Case("nf4", 2, (*SHARDED, "--quant_storage", storage)) for storage in ("fp32", "fp16")),
]


# Runs that are compared by their numbers alone: nothing is evaluated or saved.
NUMBERS = ["--batch_size_training", "1", "--global_batch_size", "8", "--run_validation", "False"]
NUMBERS += ["--save_model", "False"]


@pytest.fixture(scope="module")
def wider_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64, as bitsandbytes' blocks: so that 8-bit kernels take them too."""
    folder = tmp_path_factory.mktemp("models") / "wider"
    sizes = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    return make_tiny_model(folder, tie_word_embeddings=False, **sizes)


@pytest.fixture(scope="module")
def references(wider_model: Path) -> Made:
    """By kind of quantization."""
    common = {"batching": "packing", "num_steps": NUM_STEPS, "lora_targets": TARGETS}
    return Made(lambda kind: reference_run(wider_model, **common, quantization=by_transformers(kind)))


# GPT-NeoX and Mixtral are stored under other names than the model's: rank 0 reads and sends whole weights. Mixtral and
# gpt-oss have experts.
FAMILY_CASES = ["gpt_oss", "mixtral", "gpt_neox", "phi3", "gemma2", "opt"]
OTHER_FAMILIES = [name for name in FAMILIES if name not in (*FAMILY_CASES, "gpt2", "falcon")]


@pytest.fixture(scope="module")
def adapted_references(wider_model: Path) -> Made:
    """By adapter and kind of quantization."""

    def reference(adapter: str, kind: str) -> list[tuple[float, float]]:
        return reference_run(
            wider_model,
            batching=batching_of(adapter),
            num_steps=NUM_STEPS,
            adapter=ADAPTERS[adapter][1](),
            quantization=by_transformers(kind),
        )

    return Made(reference)


@pytest.mark.parametrize(
    "case", slow_but(len(CASES), [*CASES, *SLOW_CASES, *FULL_CASES], num_slow=len(SLOW_CASES)), ids=str
)
def test_losses_and_gradients_are_those_of_the_unsharded_model(
    case: Case, references: Made, wider_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = flags_for(wider_model, tmp_path / "run", batching="packing", num_steps=NUM_STEPS)
    flags += NUMBERS
    process_group.train([*flags, *lora_flags(TARGETS), *FLAGS[case.kind], *case.extra], case.ranks)
    assert_agrees(tmp_path / "run", references[case.kind])
    if case.ranks > 1 and case.extra:
        return
    facts = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["model"]
    (start,) = (event for event in read_metrics(tmp_path / "run") if event["event"] == "start")
    plain = quantized_by_transformers(wider_model, None)
    num_adapter = start["num_trainable_parameters"]
    assert start["num_parameters"] == sum(p.numel() for p in plain.parameters()) + num_adapter
    name = case.kind.replace("double", "with double quantization")
    quantized = sum(p.numel() for n, p in plain.named_parameters() if "_proj" in n)
    assert facts["num_parameters_by_dtype"][name] == quantized


ADAPTED = [("prefix", Case("nf4", 2, SHARDED))]
SLOW_ADAPTED = [
    ("dora", Case("int8", 2, SHARDED)),
    ("dora", Case("nf4", 2, (*SHARDED, "--quant_storage", "bf16"))),
    ("llama_adapter", Case("fp4 double", 2)),
    ("prefix", Case("int8", 2)),
]
FULL_ADAPTED = [
    ("rslora", Case("nf4", 1)),
    ("dora", Case("nf4", 2)),
    *((adapter, Case("nf4", 2, SHARDED)) for adapter in ADAPTERS if adapter != "prefix"),
    ("rslora", Case("int8", 1)),
    ("dora", Case("nf4", 1)),
    ("dora", Case("fp4 double", 1)),
]


@pytest.mark.parametrize(
    ("adapter", "case"),
    slow_but(len(ADAPTED), [*ADAPTED, *SLOW_ADAPTED, *FULL_ADAPTED], num_slow=len(SLOW_ADAPTED)),
    ids=str,
)
def test_every_kind_of_adapter_trains_on_quantized_weights_as_with_peft(
    adapter: str,
    case: Case,
    adapted_references: Made,
    wider_model: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    flags = flags_for(wider_model, tmp_path / "run", batching=batching_of(adapter), num_steps=NUM_STEPS)
    flags += [*NUMBERS, "--use_peft"]
    process_group.train([*flags, *ADAPTERS[adapter][0], *FLAGS[case.kind], *case.extra], case.ranks)
    assert_agrees(tmp_path / "run", adapted_references[adapter, case.kind])


@pytest.mark.parametrize("family", slow_but(1, [*FAMILY_CASES, *OTHER_FAMILIES], num_slow=2))
def test_a_family_is_quantized_as_transformers_quantizes_it(
    family: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    model = save_family(family, tmp_path / "model", tiny_model)
    targets = FAMILIES[family].lora_targets
    batching = "packing" if FAMILIES[family].packs else "padding"
    flags = flags_for(model, tmp_path / "run", batching=batching, num_steps=NUM_STEPS)
    flags += NUMBERS
    process_group.train([*flags, *lora_flags(targets), *FLAGS["nf4"], *SHARDED], 2)
    reference = reference_run(
        model, batching=batching, num_steps=NUM_STEPS, lora_targets=targets, quantization=by_transformers("nf4")
    )
    assert_agrees(tmp_path / "run", reference)


@pytest.mark.parametrize("precision", slow_but(0, ["--compute_dtype bf16", "--use_fp16", "--pure_bf16"], num_slow=2))
@pytest.mark.parametrize(("ranks", "extra"), [pytest.param(1, (), marks=pytest.mark.full), (2, SHARDED)])
def test_half_precision_stays_close(
    precision: str,
    ranks: int,
    extra: tuple[str, ...],
    references: Made,
    wider_model: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    flags = flags_for(wider_model, tmp_path / "run", batching="packing", num_steps=NUM_STEPS)
    if precision == "--use_fp16":
        flags[flags.index("--mixed_precision") + 1] = "True"
    flags += [*NUMBERS, *precision.split()]
    printed = process_group.train([*flags, *lora_flags(TARGETS), *FLAGS["nf4"], *extra], ranks)[0].stdout
    losses = [event["loss"] for event in train_events(tmp_path / "run")]
    assert losses == pytest.approx([loss for loss, _ in references["nf4"]], rel=5e-3)
    assert ("fp32 (quantized layers bf16)" in printed) == (precision == "--compute_dtype bf16")


@pytest.fixture(scope="module")
def longer_run(wider_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for the loss to fall."""
    output = tmp_path_factory.mktemp("longer") / "run"
    flags = flags_for(wider_model, output, batching="packing", num_steps=90, lr=FAST_LR)
    flags += ["--batch_size_training", "8", *lora_flags(TARGETS), *FLAGS["fp4 double"], *SHARDED]
    process_group.train(flags, 1)  # which shards and gathers, too
    return output


def test_the_adapter_gives_the_same_loss_on_the_base_that_transformers_quantizes(
    longer_run: Path, wider_model: Path
) -> None:
    losses = [event["loss"] for event in train_events(longer_run)]
    assert sum(losses[-10:]) < 0.98 * sum(losses[:10])
    adapted = peft.PeftModel.from_pretrained(
        quantized_by_transformers(wider_model, by_transformers("fp4 double")), str(longer_run / "adapter")
    ).eval()
    evals = [event["loss"] for event in read_metrics(longer_run) if event["event"] == "eval"]
    assert min(evals) == pytest.approx(plain_eval_loss(adapted), rel=2e-5)
    assert AutoTokenizer.from_pretrained(longer_run / "adapter")


@pytest.mark.parametrize("source", ["checkpoints", "adapter"])
def test_the_adapter_is_merged_into_the_full_precision_base(
    source: str, longer_run: Path, wider_model: Path, tmp_path: Path
) -> None:
    """Of a checkpoint, which holds the adapter alone, and of the folder that the run leaves."""
    adapter, merged = longer_run / "adapter", tmp_path / "merged"
    given = adapter
    if source == "checkpoints":
        given, adapter = max((longer_run / "checkpoints").glob("step-*")), tmp_path / "adapter"
        assert export([str(given), "--to", str(adapter)]) == 0
    assert export([str(given), "--to", str(merged), "--merge", "--verify"]) == 0
    base = AutoModelForCausalLM.from_pretrained(wider_model, dtype=torch.float32)
    before = logits(base)
    wanted = logits(peft.PeftModel.from_pretrained(base, adapter))
    assert (wanted - before).abs().max() > 0.01
    assert (logits(load_plain(merged)) - wanted).abs().max() < 2e-6


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.full)])
@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(kind: str, wider_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    given = [*FLAGS[kind], "--use_peft", "--lora_config.r", "4", "--enable_fsdp", "--run_validation", "False"]
    process_group.train(flags_of(wider_model, tmp_path / "whole", *given), 2)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    process_group.train(flags_of(wider_model, killed, *given, "--resume", "auto"), 2)
    assert_bit_equal(killed, tmp_path / "whole")
    other = as_if_killed_after(3, tmp_path / "whole", tmp_path / "other")
    changed = process_group.run(
        flags_of(wider_model, other, *given[2:], "--quantization", "4bit", "--quant_type", "fp4", "--resume", "auto"), 2
    )
    assert [outcome.status for outcome in changed] == [2, 2]
    assert "--quant_type fp4 (there nf4)" in changed[0].stderr


@pytest.mark.slow
def test_random_weights_are_quantized_alike_in_every_layout(
    wider_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    losses = []
    for ranks, extra in ((1, ()), (2, SHARDED), (2, ())):
        output = tmp_path / f"{ranks}{len(extra)}"
        flags = flags_for(wider_model, output, batching="packing", num_steps=3)
        flags += ["--global_batch_size", "8", "--run_validation", "False", "--save_model", "False"]
        flags += ["--random_weights", *lora_flags(TARGETS)]
        process_group.train([*flags, "--batch_size_training", "4", *FLAGS["nf4"], *extra], ranks)
        losses.append([event["loss"] for event in train_events(output)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert losses[2] == pytest.approx(losses[0], rel=2e-6)
