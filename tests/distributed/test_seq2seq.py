"""Encoder-decoders: losses and gradient norms of a plain loop in every layout, and what a run leaves is theirs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import yaml
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from tests.helpers import random_pairs
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.cuts import draws, random_cut
from tests.helpers.exports import Capture, export
from tests.helpers.made import Made
from tests.helpers.pairwise import keep_fast, slow_but
from tests.helpers.processes import ProcessGroup, train_events
from tests.helpers.reference import SEED, assert_agrees, reference_order
from tests.helpers.seq2seq_models import VOCAB, make_tokenizer, save_seq2seq
from tools.generate import main as generate

NUM_STEPS, LR, MOMENTUM = 3, 0.1, 0.9
NUM_DRAWS = 5  # of cuts for each case; the first is a fast test
RANKS = {"SINGLE": (1,), "HYBRID_SHARD": (4,)}
TARGETS = {"bart": ("q_proj", "v_proj"), "t5": ("q", "v"), "flan-t5": ("q", "v")}
FULL, LORA = (), ("--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0")
SMOOTH = ("--label_smoothing", "0.1")


@dataclass(frozen=True)
class Case:
    family: str
    strategy: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        named = [flag.strip("-") for flag in self.flags if flag.startswith("--") and "." not in flag]
        return "-".join([self.family, self.strategy, *named])


CASES = [
    Case("bart", "SINGLE", SMOOTH),
    Case("bart", "FULL_SHARD", FULL),
    Case("bart", "NO_SHARD", LORA),
    Case("t5", "NO_SHARD", SMOOTH),
    Case("t5", "FULL_SHARD", LORA),
    Case("t5", "SHARD_GRAD_OP", ("--activation_checkpointing", "selective", "--loss_chunk_size", "9")),
    Case("flan-t5", "FULL_SHARD", FULL),
    Case("flan-t5", "SINGLE", LORA),
    Case("t5", "FULL_SHARD", (*LORA, "--freeze_layers")),
]
FAST_CASES = ("bart-SINGLE-label_smoothing", "bart-NO_SHARD-use_peft", "t5-FULL_SHARD-use_peft-freeze_layers")
FULL_CASES = (
    "t5-FULL_SHARD-use_peft",
    "flan-t5-SINGLE-use_peft",
    "bart-FULL_SHARD",
    "t5-NO_SHARD-label_smoothing",
)  # others have their settings
T5_COMPILED = Case("t5", "SINGLE", (*LORA, "--compile", "--activation_checkpointing", "full"))
BART_COMPILED = Case("bart", "FULL_SHARD", ("--compile",))
# Whether they are compiled with aot_eager. What encoders and decoders add is for dynamo and AOT autograd to capture.
# Inductor takes a minute for BART's kernels; tests/distributed/test_exactness.py compiles those of a Llama.
SLOW_CASES = [
    (BART_COMPILED, True),
    pytest.param(Case("bart", "HYBRID_SHARD", LORA), False, marks=pytest.mark.full),
    pytest.param(BART_COMPILED, False, marks=pytest.mark.full),
    pytest.param(T5_COMPILED, True, marks=pytest.mark.full),
    pytest.param(T5_COMPILED, False, marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(lambda family: save_seq2seq(family, tmp_path_factory.mktemp("models") / family))


@pytest.fixture(scope="module")
def references(models: Made) -> Made:
    """By family, rows of a global batch, whether it has adapters, label smoothing, and the number of frozen layers."""
    return Made(lambda family, *how: reference_run(models[family], TARGETS[family], *how))


def reference_run(
    folder: Path, targets: tuple[str, ...], global_batch: int, has_adapters: bool, smoothing: float, num_frozen: int
) -> list[tuple[float, float]]:
    """A plain loop with transformers' own loss, one row at a time: the loss and the gradient norm of each step.

    In fp64, so that only the run rounds; and with SGD, so that weights differ as gradients do (`image_flags`).
    """
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    if has_adapters:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=[*targets])
        )
        torch.manual_seed(SEED)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.reset_lora_parameters("default", init_lora_weights=True)
    for name, parameter in model.named_parameters():
        if any(f".{layers}.{index}." in name for index in range(num_frozen) for layers in ("layers", "block")):
            parameter.requires_grad = False
    model.double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    rows = random_pairs.get_custom_dataset(None, None, "train")
    smoother = LabelSmoother(epsilon=smoothing)
    results = []
    for step in range(NUM_STEPS):
        order = reference_order(len(rows), 0, [len(row["input_ids"]) for row in rows], global_batch)
        batch = [rows[index] for index in order[step * global_batch :][:global_batch]]
        num_label_tokens = sum(label != -100 for row in batch for label in row["labels"])
        loss_sum = 0.0
        for row in batch:
            labels = torch.tensor([row["labels"]])
            outputs = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels)
            loss = smoother(Seq2SeqLMOutput(logits=outputs.logits), labels) if smoothing else outputs.loss
            loss = loss * (labels != -100).sum()
            (loss / num_label_tokens).backward()
            loss_sum += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss_sum / num_label_tokens, grad_norm.item()))
    return results


def flags_for(model: Path, output: Path, *given: str, num_steps: int = NUM_STEPS) -> list[str]:
    flags = ["--model_name", str(model), "--output_dir", str(output), "--seed", str(SEED), "--lr", str(LR)]
    flags += ["--dataset", f"{random_pairs.__file__}:get_custom_dataset", "--num_workers_dataloader", "0"]
    flags += ["--max_train_step", str(num_steps), "--gradient_clipping", "--gradient_clipping_threshold", "0.5"]
    return [*flags, "--optimizer", "SGD", "--momentum", str(MOMENTUM), *given]


def check(
    case: Case,
    models: Made,
    references: Made,
    process_group: ProcessGroup,
    output: Path,
    draw: int = 0,
    *,
    aot_eager: bool = False,
) -> None:
    ranks = (1,) if "--compile" in case.flags else RANKS.get(case.strategy, (2, 3))  # each would compile the same
    cut = random_cut(case, draw, ranks=ranks)
    flags = flags_for(models[case.family], output, *case.flags, "--run_validation", "False", "--save_model", "False")
    flags += cut.flags
    if case.strategy != "SINGLE":
        flags += ["--enable_fsdp", "--fsdp_config.sharding_strategy", case.strategy]
    if case.strategy == "HYBRID_SHARD":
        flags += ["--fsdp_config.sharding_group_size", "2"]
    process_group.train(with_aot_eager(flags) if aot_eager else flags, world_size=cut.ranks)
    smoothing = 0.1 if "--label_smoothing" in case.flags else 0.0
    frozen = int("--freeze_layers" in case.flags)
    how = (case.family, cut.global_batch, "--use_peft" in case.flags, smoothing, frozen)
    assert_agrees(output, references[how], tolerance=1e-5)


@pytest.mark.parametrize("draw", draws(NUM_DRAWS))
@pytest.mark.parametrize(
    "case",
    keep_fast(
        CASES,
        [case for case in CASES if str(case) in FAST_CASES],
        full=[case for case in CASES if str(case) in FULL_CASES],
    ),
    ids=str,
)
def test_losses_and_grad_norms_are_those_of_a_plain_loop(
    case: Case, draw: int, models: Made, references: Made, process_group: ProcessGroup, tmp_path: Path
) -> None:
    check(case, models, references, process_group, tmp_path / "run", draw)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("case", "aot_eager"), SLOW_CASES, ids=str)
def test_so_they_are_compiled_and_in_groups(
    case: Case, aot_eager: bool, models: Made, references: Made, process_group: ProcessGroup, tmp_path: Path
) -> None:
    check(case, models, references, process_group, tmp_path / "run", aot_eager=aot_eager)


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=ids.flip(1)).logits


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", pytest.param("flan-t5", marks=pytest.mark.full)])
def test_a_run_resumes_and_its_weights_load_export_and_generate(
    family: str, models: Made, process_group: ProcessGroup, tmp_path: Path, capsys: Capture
) -> None:
    """Sharded over two ranks, stopped after two of three steps; model/ and the exported checkpoint agree."""
    base = models[family]
    settings = {"decoder_start_token_id": 2, "eos_token_id": 2, "forced_bos_token_id": 0, "num_beams": 3}
    if family == "bart":
        GenerationConfig(**settings).save_pretrained(base)
    run, whole = tmp_path / "run", tmp_path / "whole"
    given = ("--batch_size_training", "4", "--enable_fsdp", "--run_validation", "False")
    process_group.train(flags_for(base, run, *given, num_steps=2), world_size=2)
    process_group.train(flags_for(base, run, *given, "--resume", "auto"), world_size=2)
    process_group.train(flags_for(base, whole, *given), world_size=2)
    assert [event["step"] for event in train_events(run)] == [1, 2, 3]
    assert [event["loss"] for event in train_events(run)] == [event["loss"] for event in train_events(whole)]
    resolved = yaml.safe_load((run / "run.yaml").read_text())["resolved"]
    assert (resolved["task"], resolved["max_target_length"]) == ("seq2seq_lm", 128)

    trained = AutoModelForSeq2SeqLM.from_pretrained(run / "model", dtype=torch.float32)
    exported = export(run, tmp_path / "exported", "--verify")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(exported, dtype=torch.float32)
    assert torch.equal(logits_of(loaded), logits_of(trained))
    assert not torch.allclose(logits_of(loaded), logits_of(AutoModelForSeq2SeqLM.from_pretrained(base)), atol=1e-2)
    if family == "bart":
        for folder in (run / "model", exported):
            kept = GenerationConfig.from_pretrained(folder).to_diff_dict()
            assert {name: kept[name] for name in settings} == settings

    capsys.readouterr()
    assert generate([str(run), "--prompt", "Ann: Is it 3?", "--max_new_tokens", "12"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(base)
    inputs = tokenizer("Ann: Is it 3?", return_tensors="pt")
    wanted = trained.generate(input_ids=inputs["input_ids"], max_new_tokens=12, do_sample=False)
    assert capsys.readouterr().out.strip() == tokenizer.decode(wanted[0], skip_special_tokens=True).strip()


def test_an_adapter_loads_and_merges(models: Made, process_group: ProcessGroup, tmp_path: Path) -> None:
    base, run = models["t5"], tmp_path / "run"
    process_group.train(flags_for(base, run, "--use_peft", "--batch_size_training", "4"), world_size=1)
    adapted = peft.AutoPeftModelForSeq2SeqLM.from_pretrained(run / "adapter", dtype=torch.float32)
    assert adapted.peft_config["default"].task_type == "SEQ_2_SEQ_LM"
    assert adapted.peft_config["default"].target_modules == {"q", "v"}
    exported = export(run, tmp_path / "merged", "--merge", "--verify")
    merged = AutoModelForSeq2SeqLM.from_pretrained(exported, dtype=torch.float32)
    assert np.allclose(logits_of(merged), logits_of(adapted), atol=1e-4)


@pytest.mark.parametrize("family", slow_but(1, ["bart", "flan-t5"]))
def test_embeddings_and_head_grow_with_the_tokenizer(
    family: str, models: Made, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """A step that moves nothing leaves the model's own rows, in a head that is tied (BART) and one that is not."""
    base, run, tokenizer = models[family], tmp_path / "run", tmp_path / "tokenizer"
    grown = deepcopy(make_tokenizer(family))
    grown.add_tokens(["<ann>", "<tom>", "<olga>"])
    grown.save_pretrained(tokenizer)
    flags = flags_for(base, run, "--tokenizer_name", str(tokenizer), "--enable_fsdp", num_steps=1)
    flags[flags.index("--lr") + 1] = "1e-12"
    process_group.train([*flags, "--run_validation", "False"], world_size=2)
    before = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)
    for folder in (run / "model", export(run, tmp_path / "exported", "--verify")):
        after = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        assert after.config.vocab_size == VOCAB + 3 == len(AutoTokenizer.from_pretrained(folder))
        for find in ("get_input_embeddings", "get_output_embeddings"):
            old, new = getattr(before, find)().weight, getattr(after, find)().weight
            assert torch.allclose(new[:VOCAB], old, atol=1e-9)
            assert new.shape[0] == VOCAB + 3
            assert new.isfinite().all()
        is_tied = after.get_output_embeddings().weight is after.get_input_embeddings().weight
        assert is_tied == (family == "bart")
        assert torch.allclose(logits_of(after)[..., :VOCAB], logits_of(before), atol=1e-5)
