"""What generation is planned to hold is what it holds on this CPU, and a plan has it as a phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from configs.flags import parse_flags
from planning.alternatives.what_fits import what_fits
from planning.machines.hardware import Hardware, parse_hardware
from planning.machines.planned_environment import planned_environment
from planning.memory.generation_memory import bytes_of_generation
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths
from planning.model.planned_model import build_planned_model
from planning.planned_run import plan_of
from resolving.resolved import resolve
from tests.helpers.small_device import SmallDevice

H200 = parse_hardware("H200")
ROWS, PROMPT, NEW = 2, 30, 20


IDS = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}


def make_config(name: str, vocab_size: int = 8000) -> Any:
    sizes = {"vocab_size": vocab_size, "dropout_rate": 0.0, "dropout": 0.0, **IDS}
    if name == "t5":
        return transformers.T5Config(**sizes, d_model=64, d_kv=16, d_ff=160, num_layers=3, num_heads=4)
    if name == "bart":
        layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
        return transformers.BartConfig(**sizes, **layers, **heads, d_model=64, max_position_embeddings=64)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**sizes, **heads, hidden_size=64, intermediate_size=160, num_hidden_layers=3)


def measured_peak(config: Any, beams: int) -> int:
    """Bytes at most besides the weights, while a model in bf16 writes answers on this CPU."""
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id = settings.decoder_start_token_id = 0
    ids = torch.randint(3, config.vocab_size, (ROWS, PROMPT))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with SmallDevice() as device:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.view_as(tensor)
        weights, device.peak = device.allocated(), 0
        output = model.generate(
            input_ids=ids, attention_mask=mask, num_beams=beams, max_new_tokens=NEW, do_sample=False
        )
    assert output.shape[1] == NEW + (1 if config.is_encoder_decoder else PROMPT)
    return device.peak - weights


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
@pytest.mark.parametrize("beams", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_as_much_is_planned_as_generation_takes(name: str, beams: int, tmp_path: Path) -> None:
    config = make_config(name)
    config.save_pretrained(tmp_path)
    flags = f"--model_name {tmp_path} --pure_bf16 --eval_generate --num_beams {beams} --max_new_tokens {NEW}"
    settings = parse_flags(flags.split())
    env = planned_environment(H200, settings.train_config)
    rows = RowLengths(ROWS, (PROMPT, NEW), (PROMPT, NEW), eval_rows=ROWS)
    use = bytes_of_generation(build_planned_model(resolve(settings, env), env), H200.card, rows)
    assert use is not None
    assert use.peak == pytest.approx(measured_peak(config, beams), rel=0.04)
    if name == "llama":  # two key heads of 16, keys and values, in bf16
        keys = config.num_hidden_layers * ROWS * beams * (PROMPT + NEW) * 2 * 16 * 2
        assert use.cache == pytest.approx(2 * keys, rel=0.01)


def plan(folder: Path, hardware: Hardware, *flags: str) -> MemoryPlan:
    argv = ["--model_name", str(folder), "--pure_bf16", "--context_length", "48", *flags]
    return plan_of(parse_flags(argv), hardware).memory


def test_a_plan_has_generation_as_a_phase_and_beams_in_its_suggestions(tmp_path: Path) -> None:
    make_config("llama", 32000).save_pretrained(tmp_path)
    asked = ["--eval_generate", "--num_beams", "64", "--val_batch_size", "8", "--max_new_tokens", "64"]
    assert "generation" not in plan(tmp_path, H200).phases
    whole = plan(tmp_path, H200, *asked)
    assert whole.peak_phase == "generation"
    sharded = plan(tmp_path, parse_hardware("4xH200"), "--enable_fsdp", *asked)
    there, here = (memory.phases["generation"] for memory in (sharded, whole))
    assert there.params < here.params
    assert there.unsharded == pytest.approx(here.params, rel=0.01), "gathered once"
    assert there.activations == here.activations

    argv = ["--model_name", str(tmp_path), "--pure_bf16", "--context_length", "48", *asked]
    small = parse_hardware("H200", device_memory_gib=0.7)
    too_large = plan_of(parse_flags(argv), small)
    assert too_large.memory.verdict == "does_not_fit"
    flags = [change.flags for change in what_fits(argv, too_large, lambda config: plan_of(config, small))]
    assert ("--num_beams", "1") in flags
    assert ("--val_batch_size", "1") in flags
