"""Rows longer than the model was made for: losses, saved folders and tools have the stretched positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from policies.config_overrides import ROPE_FILE
from tests.helpers.fixtures import TINY
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.reference import CONTEXT_LENGTH, assert_agrees, flags_for, lora_flags, reference_run
from tools.export import main as export
from tools.generate import main as generate
from tools.make_tiny_model import make_tiny_model

NUM_STEPS = 3
POSITIONS = 48  # documents are up to twice as long
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short") / "model"
    return make_tiny_model(folder, tie_word_embeddings=False, max_position_embeddings=POSITIONS, **TINY)


def with_values(model: Path, to: Path, **values: Any) -> Path:
    """A copy of the model whose config.json was edited by hand."""
    shutil.copytree(model, to)
    config = json.loads((to / "config.json").read_text())
    config["rope_parameters"] |= values.pop("rope_parameters")
    (to / "config.json").write_text(json.dumps(config | values))
    return to


def yarn(model: Path, to: Path) -> Path:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": POSITIONS}
    return with_values(model, to, rope_parameters=rope, max_position_embeddings=CONTEXT_LENGTH)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(CONTEXT_LENGTH)[None] * 7 % TINY["vocab_size"]
    with torch.no_grad():
        return model.eval()(ids).logits


def test_losses_are_those_of_a_model_with_such_a_config_and_it_is_saved(
    short_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    flags = flags_for(short_model, tmp_path / "run", batching="packing", num_steps=NUM_STEPS)
    flags += ["--batch_size_training", "8", "--run_validation", "False", "--rope_scaling", "yarn"]
    (outcome,) = process_group.train(flags, 1)
    assert f"rope: yarn x2, {CONTEXT_LENGTH} positions instead of {POSITIONS}" in outcome.stdout
    by_hand = yarn(short_model, tmp_path / "by hand")
    assert_agrees(tmp_path / "run", reference_run(by_hand, batching="packing", num_steps=NUM_STEPS))
    saved, wanted = (AutoConfig.from_pretrained(folder) for folder in (tmp_path / "run/model", by_hand))
    assert saved.rope_parameters == wanted.rope_parameters
    assert saved.max_position_embeddings == CONTEXT_LENGTH
    assert not (tmp_path / "run/model" / ROPE_FILE).exists()


@pytest.fixture(scope="module")
def adapter_run(short_model: Path, tmp_path_factory: pytest.TempPathFactory, process_group: ProcessGroup) -> Path:
    run = tmp_path_factory.mktemp("adapter") / "run"
    flags = flags_for(short_model, run, batching="packing", num_steps=NUM_STEPS)
    flags += ["--batch_size_training", "8", "--run_validation", "False", "--save_every_steps", str(NUM_STEPS)]
    process_group.train([*flags, *lora_flags(["q_proj", "v_proj"]), "--rope_scaling", "yarn"], 1)
    return run


def test_an_adapter_says_which_positions_its_base_has(
    adapter_run: Path, short_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    by_hand = yarn(short_model, tmp_path / "by hand")
    losses = reference_run(by_hand, batching="packing", num_steps=NUM_STEPS, lora_targets=["q_proj", "v_proj"])
    assert_agrees(adapter_run, losses)
    values = json.loads((adapter_run / "adapter" / ROPE_FILE).read_text())
    wanted = AutoConfig.from_pretrained(by_hand)
    assert values == {"rope_parameters": wanted.rope_parameters, "max_position_embeddings": CONTEXT_LENGTH}

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(by_hand), str(adapter_run / "adapter"))
    merged = tmp_path / "merged"
    for path in (adapter_run, adapter_run / "adapter"):  # its checkpoint, and its adapter
        assert export([str(path), "--to", str(merged), "--merge", "--verify"]) == 0
        assert AutoConfig.from_pretrained(merged).rope_parameters == wanted.rope_parameters
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(merged)), logits(adapted), atol=1e-5)
        shutil.rmtree(merged)
    assert export([str(adapter_run), "--to", str(tmp_path / "again"), "--verify"]) == 0
    assert json.loads((tmp_path / "again" / ROPE_FILE).read_text()) == values

    tokenizer = AutoTokenizer.from_pretrained(adapter_run / "adapter")
    prompt = tokenizer.decode(tokenizer.encode("Anna: Is it three? " * 40, add_special_tokens=False)[:60])
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]])
    assert POSITIONS < ids.shape[1] < CONTEXT_LENGTH - 8, "longer than the base's own positions"
    answer = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    capsys.readouterr()
    assert generate([str(adapter_run / "adapter"), "--prompt", prompt, "--max_new_tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == tokenizer.decode(answer, skip_special_tokens=True).strip()


def test_the_commands_of_its_card_and_of_vllm_have_them(adapter_run: Path, capsys: Capture) -> None:
    card = (adapter_run / "adapter/README.md").read_text()
    code = (
        card.split("```python\n")[1]
        .split("```")[0]
        .replace('folder = "."', f"folder = {str(adapter_run / 'adapter')!r}")
    )
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].config.max_position_embeddings == CONTEXT_LENGTH
    assert names["model"].base_model.model.model.rotary_emb.rope_type == "yarn"
    assert export([str(adapter_run), "--check", "vllm"]) == 0
    (serve,) = [line for line in capsys.readouterr().out.splitlines() if "vllm serve" in line]
    assert '--hf-overrides \'{"rope_parameters": ' in serve


def test_a_run_on_a_saved_adapter_and_a_resumed_one_have_them_too(
    adapter_run: Path, short_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    flags = flags_for(short_model, tmp_path / "run", batching="packing", num_steps=1)
    flags += ["--batch_size_training", "8", "--run_validation", "False", "--use_peft"]
    adapter = ["--from_peft_checkpoint", str(adapter_run / "adapter")]
    (outcome,) = process_group.train([*flags, *adapter], 1)
    assert "positions instead of 48, as the adapter was trained" in outcome.stdout
    assert (tmp_path / "run/adapter" / ROPE_FILE).is_file()
    (refused,) = process_group.run([*flags, *adapter, "--overwrite", "--rope_scaling", "linear"], 1)
    assert refused.status == 2
    assert "was trained with other positions" in refused.stderr

    def going_on(num_steps: int) -> list[str]:
        more = flags_for(short_model, adapter_run, batching="packing", num_steps=num_steps)
        more += ["--batch_size_training", "8", "--run_validation", "False", "--save_every_steps", str(NUM_STEPS)]
        return [*more, *lora_flags(["q_proj", "v_proj"]), "--resume", "auto", "--rope_scaling"]

    (refused,) = process_group.run([*going_on(NUM_STEPS + 1), "linear"], 1)
    assert refused.status == 2
    assert "rope_scaling" in refused.stderr
    process_group.train([*going_on(NUM_STEPS + 1), "yarn"], 1)
    assert [event["step"] for event in read_metrics(adapter_run) if event["event"] == "train"][-1] == NUM_STEPS + 1

    longer = [word.replace(str(CONTEXT_LENGTH), str(2 * CONTEXT_LENGTH)) for word in going_on(NUM_STEPS + 2)]
    (outcome,) = process_group.train([*longer, "yarn", "--resume_anyway"], 1)
    assert "resume_anyway: rotary positions: yarn x4 (there yarn x2), a factor that follows from" in outcome.stdout
