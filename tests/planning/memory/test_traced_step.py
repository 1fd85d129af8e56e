"""A plan and a trace of the run's own step (tests/helpers/traced_step.py), which share no code, agree within 5 %."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
from transformers import Gemma4TextConfig, LlamaConfig, PegasusConfig

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import Checkpointing
from resolving.data_facts import DataFacts
from tests.helpers.pairwise import slow_but
from tests.helpers.traced_step import TracedStep, trace_step
from utils.units import GIB

LLAMA = LlamaConfig(
    vocab_size=4000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    architectures=["LlamaForCausalLM"],
)
TIED = copy(LLAMA)
TIED.tie_word_embeddings = True
PEGASUS = PegasusConfig(
    vocab_size=4000,
    d_model=512,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=2048,
    max_position_embeddings=512,
    architectures=["PegasusForConditionalGeneration"],
)
GEMMA4 = Gemma4TextConfig(  # windows, heads of two widths, layers that take their keys from others
    vocab_size=4000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    global_head_dim=128,
    sliding_window=64,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=64,
    vocab_size_per_layer_input=4000,
    architectures=["Gemma4ForCausalLM"],
)
CLASSES = copy(LLAMA)
CLASSES.architectures, CLASSES.pad_token_id = ["LlamaForSequenceClassification"], 0
ROWS = "--context_length 512 --batch_size_training 2"
SHAPE = f"{ROWS} --compile False"
SHORTEST = "--context_length 32 --batch_size_training 1 --compile False"  # weights and gradients are most of it
GATHERED = "--num_replicated_layers 0"  # torch's tracker does not see what `fully_shard` leaves out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that hold a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("models")
    LLAMA.save_pretrained(folder / "llama")
    TIED.save_pretrained(folder / "tied")
    CLASSES.save_pretrained(folder / "classes")
    GEMMA4.save_pretrained(folder / "gemma4")
    PEGASUS.save_pretrained(folder / "pegasus")
    return folder


def agreeing(
    model: Path, line: str, hardware: str, choice: Checkpointing | None = None, data: DataFacts | None = None
) -> tuple[Plan, TracedStep]:
    """The plan of a run, and its traced step."""
    config = parse_flags(["--model_name", str(model), *line.split()])
    plan = plan_of(config, parse_hardware(hardware), data, checkpointing=choice)
    traced, memory = trace_step(plan), plan.memory
    assert memory.phases["optimizer_step"].params == pytest.approx(traced.phases["optimizer_step"].params, rel=0.05)
    assert memory.peak_gib == pytest.approx(traced.peak_gib, rel=0.05)
    if plan.rows.typical == plan.rows.widest:  # the trace has the widest micro-batch, that figure the typical one
        assert memory.after_forward_gib == pytest.approx(traced.after_forward_gib, rel=0.05)
    for part in ("params", "optimizer"):
        assert traced.most(part) == pytest.approx(memory.most(part), rel=0.01), part
    return plan, traced


@pytest.mark.parametrize(
    ("name", "line", "hardware"),
    slow_but(
        2,
        [
            ("llama", f"{SHAPE} --enable_fsdp --sharding_strategy SHARD_GRAD_OP --optimizer SGD", "2xA100-80GB"),
            ("tied", f"{SHAPE} --mixed_precision False --batching_strategy padding", "V100-16GB"),
            ("llama", f"{SHAPE} --enable_fsdp --use_peft {GATHERED} --gradient_accumulation_steps 2", "2xV100-32GB"),
            ("llama", f"{SHAPE} --use_peft --pure_bf16 --lora_config.target_modules all-linear", "A100-40GB"),
            ("tied", f"{SHAPE} --enable_fsdp --pure_bf16 --hsdp --sharding_group_size 2", "4xA100-80GB"),
            ("gemma4", f"{SHAPE} --enable_fsdp --activation_checkpointing off", "2xA100-80GB"),
            ("llama", f"{SHORTEST} --enable_fsdp --pure_bf16 --direct_collectives", "2xA100-80GB"),
            ("tied", f"{SHAPE} --enable_fsdp --direct_collectives --sharding_strategy SHARD_GRAD_OP", "2xA100-80GB"),
        ],
    ),
)
def test_they_agree(name: str, line: str, hardware: str, models: Path) -> None:
    agreeing(models / name, line, hardware)


OF_PAIRS = f"{SHAPE} --pure_bf16 --dataset preference_dataset --preference_dataset.data_path x"
OF_TEXTS = "--task text_classification --dataset classification_dataset --classification_dataset.data_path x"
SHORT = "--compile False --optimizer muon --batch_size_training 1 --context_length 32"


@pytest.mark.parametrize(
    ("name", "line", "hardware", "teacher_size"),
    slow_but(
        4,
        [
            ("llama", f"{OF_PAIRS} --loss_type dpo", "A100-40GB", 0),
            ("llama", f"{SHAPE} --pure_bf16 --neftune_noise_alpha 5", "A100-40GB", 8),
            ("llama", f"{SHORT} --enable_fsdp", "2xA100-80GB", 0),
            ("classes", f"{SHAPE} --pure_bf16 {OF_TEXTS}", "A100-40GB", 0),
            ("llama", f"{SHORT} --pure_bf16", "A100-40GB", 0),
            ("classes", f"{OF_PAIRS} --task reward_model --use_peft", "A100-40GB", 0),
            ("llama", f"{OF_PAIRS} --loss_type orpo --use_peft --batching_strategy padding", "A100-40GB", 0),
        ],
    ),
)
def test_so_they_do_with_other_losses_and_with_updates_of_whole_matrices(
    name: str, line: str, hardware: str, teacher_size: int, models: Path
) -> None:
    data = DataFacts(label_share=1.0, teacher_size=teacher_size)
    plan, traced = agreeing(models / name, line, hardware, data=data)
    update = traced.phases["optimizer_step"].total
    assert plan.memory.phases["optimizer_step"].total == pytest.approx(update, rel=0.05)


@pytest.mark.slow
def test_an_encoder_decoder_that_adds_a_saved_buffer_to_its_logits_is_planned_with_its_generation(models: Path) -> None:
    line = "--enable_fsdp --eval_generate --max_source_length 256 --max_target_length 64"
    plan, _ = agreeing(models / "pegasus", line, "2xA100-80GB")
    assert 0 < plan.memory.phases["generation"].total < plan.memory.peak_gib


@pytest.mark.slow
def test_layers_of_two_modes_keep_what_was_planned(models: Path) -> None:
    line = f"{SHAPE} --enable_fsdp --activation_checkpointing auto"
    kept = []
    for choice in (Checkpointing("off", "full", 1), Checkpointing("off")):
        plan, traced = agreeing(models / "llama", line, "4xA100-80GB", choice)
        kept.append(traced.most("activations"))
        assert plan.memory.most("activations") == pytest.approx(kept[-1], rel=0.1)
    assert kept[0] < 0.9 * kept[1]


def test_copied_keys_and_values_of_shared_prompts_are_in_the_plan(models: Path) -> None:
    plans = []
    for share in ("True", "False"):
        line = f"{OF_PAIRS} --loss_type dpo --activation_checkpointing off --share_prompts {share}"
        config = parse_flags(["--model_name", str(models / "llama"), *line.split()])
        plans.append(plan_of(config, parse_hardware("A100-40GB"), DataFacts(label_share=0.5)))
    num_copies, of_layer = 2 * 512 // 2, 2 * 4 * 64 * 2  # a key and a value of 4 heads, in bf16
    more = plans[0].memory.after_forward_gib - plans[1].memory.after_forward_gib
    assert more * GIB == pytest.approx(4 * num_copies * of_layer, rel=0.01)
    # Copies are seen in the place of a second prompt.
    first, second = plans[0].time, plans[1].time
    assert first is not None
    assert second is not None
    assert first.seconds_per_step == pytest.approx(second.seconds_per_step, rel=0.01)
