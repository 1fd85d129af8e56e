"""--add_special_tokens: embeddings that grow, are trained, also under LoRA, and are saved as others load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from configs.training import TrainConfig
from data.processors.tokenizer_loading import added_token_ids, load_tokenizer
from policies.adapters.apply import apply_adapters
from policies.loading import grow_embeddings
from tests.helpers.adapter_kinds import config_of
from tests.helpers.chat_templates import CHATML
from tests.helpers.image_models import MODELS as IMAGE_MODELS
from tests.helpers.made import Made
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.reference import assert_agrees, flags_for, reference_run
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal
from tools.answering.loading import load as load_for_generation
from tools.export import main as export_main
from utils.errors import ConfigError

TOKENS = ("<|im_start|>", "<|im_end|>")
FLAG = ["--add_special_tokens", ",".join(TOKENS)]
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
LAYOUTS = {"SINGLE": (1, []), "NO_SHARD": (2, []), "FULL_SHARD": (2, ["--enable_fsdp"])}
NUM_STEPS = 6
CASES = [("untied", "FULL_SHARD"), ("tied", "SINGLE"), ("untied", "NO_SHARD"), ("tied", "NO_SHARD")]
CASES += [("untied", "SINGLE"), ("tied", "FULL_SHARD")]


@pytest.fixture(scope="module")
def bases(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A base model whose head shares the embedding, or does not."""

    def make(ties: str) -> Path:
        folder = tmp_path_factory.mktemp("bases") / ties
        config = AutoConfig.from_pretrained(tiny_model)
        config.tie_word_embeddings = ties == "tied"
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        return folder

    return Made(make)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    for split, number in (("train", 24), ("validation", 4)):
        turns = [
            [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]
            for n in range(number)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    (folder / "chatml.jinja").write_text(CHATML)
    return folder


def chat_flags(base: Path, chats: Path, output: Path, ranks: int, *flags: str) -> list[str]:
    given = ["--model_name", str(base), "--output_dir", str(output), "--dataset", "chat_dataset", *FLAG]
    given += ["--chat_dataset.data_path", str(chats), "--chat_dataset.chat_template", str(chats / "chatml.jinja")]
    given += ["--batching_strategy", "padding", "--context_length", "128", "--num_workers_dataloader", "0"]
    given += ["--batch_size_training", str(4 // ranks), "--max_train_step", str(NUM_STEPS), "--lr", "1e-2"]
    return [*given, "--save_every_steps", "3", "--keep_last", "9", *flags]


@pytest.fixture(scope="module")
def runs(bases: Made, chats: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Runs of LoRA on ChatML, by ties and layout."""

    def run(ties: str, layout: str) -> Path:
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("tokens") / "run"
        process_group.train([*chat_flags(bases[ties,], chats, folder, ranks, *LORA), *flags], ranks)
        return folder

    return Made(run)


def load_plain(run: Path, base: Path) -> tuple[Any, Any]:
    """As a user would, with transformers and peft alone; the base gets other random rows than in the run."""
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(11)
    model.resize_token_embeddings(len(tokenizer))
    return PeftModel.from_pretrained(model, run / "adapter").eval(), tokenizer


def answer_loss(model: Any, tokenizer: Any, chats: Path) -> float:
    """The mean loss over the answers of the validation chats, each with its <|im_end|>."""
    total, number = 0.0, 0
    for line in (chats / "validation.jsonl").read_text().splitlines():
        turns = json.loads(line)["messages"]
        render = tokenizer.apply_chat_template
        prompt = render(turns[:1], tokenize=False, add_generation_prompt=True)
        whole = render(turns, tokenize=False).rstrip("\n")
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        first = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[first - 1 : -1], torch.tensor(ids[first:]), reduction="none")
        total, number = total + losses.sum().item(), number + len(losses)
    return total / number


def eval_loss(run: Path) -> float:
    return [event["loss"] for event in read_metrics(run) if event["event"] == "eval"][-1]


@pytest.mark.parametrize(("ties", "layout"), slow_but(1, CASES[1:] + CASES[:1], num_slow=2))
def test_plain_peft_loads_the_adapter_of_a_base_that_learned_chatml(
    ties: str, layout: str, runs: Made, bases: Made, chats: Path
) -> None:
    model, tokenizer = load_plain(runs[ties, layout], bases[ties,])
    assert tokenizer.chat_template == CHATML
    assert [tokenizer.encode(token, add_special_tokens=False) for token in TOKENS] == [[600], [601]]
    assert answer_loss(model, tokenizer, chats) == pytest.approx(eval_loss(runs[ties, layout]), rel=1e-5)
    losses = [event["loss"] for event in train_events(runs[ties, layout])]
    assert losses == pytest.approx([event["loss"] for event in train_events(runs[ties, "SINGLE"])], rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    saved = load_file(runs[ties, layout] / "adapter/adapter_model.safetensors")
    rows = {name: tensor for name, tensor in saved.items() if "trainable_tokens" in name}
    assert len(rows) == (1 if ties == "tied" else 2)
    assert all(tensor.shape == (2, 32) and tensor.isfinite().all() for tensor in rows.values())
    assert len(saved) == len(rows) + 2 * 2 * 2, "LoRA's factors and these rows, and no whole embedding"


@pytest.mark.parametrize(("ties", "layout"), slow_but(1, [("untied", "FULL_SHARD"), ("tied", "NO_SHARD")]))
def test_rows_are_trained_as_in_a_plain_loop_with_peft(
    ties: str, layout: str, bases: Made, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Tokens that the base has already, so that its documents have them and nothing grows."""
    base, (ranks, flags) = bases[ties,], LAYOUTS[layout]
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens = [t for t in map(tokenizer.convert_ids_to_tokens, range(300, 500)) if t.isascii() and t.isalpha()][:2]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    indices = {"embed_tokens": ids} | ({} if ties == "tied" else {"lm_head": ids})
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], trainable_token_indices=indices)
    reference = reference_run(base, batching="packing", num_steps=3, adapter=settings)
    given = flags_for(base, tmp_path / "run", batching="packing", num_steps=3)
    given += ["--batch_size_training", str(8 // ranks), *LORA, "--add_special_tokens", ",".join(tokens), *flags]
    process_group.train([*given, "--run_validation", "False"], ranks)
    assert_agrees(tmp_path / "run", reference)


@pytest.mark.parametrize(("ties", "layout"), slow_but(1, [("untied", "FULL_SHARD"), ("tied", "SINGLE")]))
def test_a_resumed_run_is_bit_equal(
    ties: str, layout: str, runs: Made, bases: Made, chats: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    killed = as_if_killed_after(3, runs[ties, layout], tmp_path / "killed")
    given = [*chat_flags(bases[ties,], chats, killed, ranks, *LORA), *flags, "--resume", "auto"]
    process_group.train(given, ranks)
    assert_bit_equal(killed, runs[ties, layout])


@pytest.mark.parametrize("ties", slow_but(1, ["untied", "tied"]))
def test_adapters_are_merged_and_answer_with_the_new_tokens(
    ties: str, runs: Made, bases: Made, chats: Path, tmp_path: Path
) -> None:
    run = runs[ties, "SINGLE"]
    assert export_main([str(run), "--merge", "--verify", "--to", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.get_input_embeddings().num_embeddings == 602
    assert answer_loss(merged, tokenizer, chats) == pytest.approx(eval_loss(run), rel=1e-4)
    model, tokenizer, *_ = load_for_generation(run, None)
    assert answer_loss(model.float(), tokenizer, chats) == pytest.approx(eval_loss(run), rel=1e-4)


def test_a_whole_model_grows_is_trained_and_saved(
    bases: Made, chats: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    base = bases["untied",]
    process_group.train([*chat_flags(base, chats, tmp_path / "run", 2), "--enable_fsdp"], 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    assert model.config.vocab_size == len(model.lm_head.weight) == 602
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert answer_loss(model, tokenizer, chats) == pytest.approx(eval_loss(tmp_path / "run"), rel=1e-5)


def test_the_tokens_are_added_once_and_read_as_one(tiny_model: Path) -> None:
    train = TrainConfig(model_name=str(tiny_model), add_special_tokens=("<|im_start|>", "</s>"))
    tokenizer = load_tokenizer(train)
    assert len(tokenizer) == 601
    assert tokenizer.encode("a<|im_start|>b", add_special_tokens=False).count(600) == 1
    assert added_token_ids(tokenizer, train) == (tokenizer.eos_token_id, 600)
    assert tokenizer.decode([5, 600], skip_special_tokens=True) == tokenizer.decode([5])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--add_special_tokens", "<a>,<a>"), "<a> is named twice"),
        (("--add_special_tokens", "<a>", "--peft_method", "prefix"), "--peft_method prefix has no room"),
        (("--add_special_tokens", "<a>", "--from_peft_checkpoint", "x"), "has no rows for them"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(*flags)


def test_rows_that_lora_adapts_too_are_refused(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))
    for target in ("embed_tokens", "model.embed_tokens"):
        config = config_of("--lora_config.target_modules", f"q_proj,{target}")
        with pytest.raises(ConfigError, match="cannot have an adapter and trained rows"):
            apply_adapters(model, config, "CAUSAL_LM", new_tokens=(5,))


def test_a_tied_head_that_lora_adapts_is_refused_too(tied_model: Path) -> None:
    """Its rows are trained as the embedding's, and peft cannot merge LoRA around them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tied_model))
    with pytest.raises(ConfigError, match="lm_head cannot have an adapter and trained rows"):
        apply_adapters(model, config_of("--lora_config.target_modules", "q_proj,lm_head"), "CAUSAL_LM", new_tokens=(5,))


def test_rows_that_peft_would_not_train_are_refused() -> None:
    """BLIP-2 ties its head without saying so in config.json, where peft looks; Mllama's head has fewer rows."""
    blip = AutoModelForImageTextToText.from_config(IMAGE_MODELS["blip2_opt"]()[0])
    with pytest.raises(ConfigError, match="so peft would not train the head's rows"):
        apply_adapters(blip, config_of("--lora_config.target_modules", "q_proj"), "CAUSAL_LM", new_tokens=(5,))
    mllama = AutoModelForImageTextToText.from_config(IMAGE_MODELS["mllama"]()[0])
    rows = len(mllama.get_output_embeddings().weight)
    assert rows < mllama.get_input_embeddings().num_embeddings
    assert not grow_embeddings(mllama, rows, use_peft=True, new_tokens=[rows - 1])
    for use_peft in (True, False):
        with pytest.raises(ConfigError, match=f"knows {rows} tokens, fewer than"):
            grow_embeddings(mllama, rows + 1, use_peft=use_peft, new_tokens=[rows])
