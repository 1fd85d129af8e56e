"""tools.generate prints the answers that plain transformers gives, for every kind of folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.causal_lm import CausalLM
from tasks.generation import AnswerSettings
from tests.helpers.chat_templates import FAMILIES
from tests.helpers.checkpoints import changed, save_checkpoint, with_lora
from tests.helpers.families import save_family
from tests.helpers.seq2seq_models import save_seq2seq
from tools.answering.chat_form import ChatForm, as_user_turn
from tools.answering.prompts import read_prompts
from tools.answering.trained_on import NOTHING_KNOWN
from tools.export import main as export
from tools.generate import main
from tools.make_tiny_model import make_tiny_model

TASK = CausalLM()
PROMPT = "Summarize this dialog:\nAnna: Hi!\n---\nSummary:\n"
Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, folder: Path, *flags: str) -> str:
    capsys.readouterr()
    assert main([str(folder), "--max_new_tokens", "12", *flags]) == 0
    return capsys.readouterr().out


def expected(model: torch.nn.Module, folder: Path, prompt: str, *, bos: bool = True) -> str:
    """The greedy answer, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id] * bos + tokenizer.encode(prompt, add_special_tokens=False)
    start = len(ids)
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def test_every_kind_of_folder_gives_the_same_answer(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    model = changed(AutoModelForCausalLM.from_pretrained(tiny_model))
    run = tmp_path / "run"
    save_checkpoint(run / "checkpoints/step-00000004", model, tiny_model)
    assert export([str(run), "--to", str(tmp_path / "out")]) == 0
    wanted = expected(model, tiny_model, PROMPT)
    for folder in (run, run / "checkpoints/step-00000004", tmp_path / "out"):
        assert answer(capsys, folder, "--prompt", PROMPT).strip() == wanted


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_so_does_a_family_whose_files_name_tensors_otherwise(
    family: str, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = save_family(family, tmp_path / "model", tiny_model)
    wanted = expected(AutoModelForCausalLM.from_pretrained(folder), folder, PROMPT)
    assert answer(capsys, folder, "--prompt", PROMPT).strip() == wanted
    assert export([str(folder), "--to", str(tmp_path / "half"), "--dtype", "bf16", "--verify"]) == 0
    saved = load_file(tmp_path / "half/model.safetensors")
    given = load_file(folder / "model.safetensors")
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in given.items())


def test_a_model_whose_tokenizer_has_no_end_token_answers_to_the_last_token(
    tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    assert answer(capsys, folder, "--prompt", PROMPT)


def test_an_adapter_answers_on_its_base(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    model = with_lora(tiny_model, r=8, lora_alpha=64)
    model.save_pretrained(str(tmp_path / "adapter"))
    save_checkpoint(tmp_path / "checkpoint", model, tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = expected(base, tiny_model, PROMPT)
    wanted = expected(PeftModel.from_pretrained(base, tmp_path / "adapter"), tiny_model, PROMPT)
    assert wanted != plain, "the adapter changes no answer: the test shows nothing"
    for folder in (tmp_path / "adapter", tmp_path / "checkpoint"):
        assert answer(capsys, folder, "--prompt", PROMPT).strip() == wanted


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_each_prompt_of_a_file_is_answered(name: str, tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    prompts = ["Anna: Hi!", "Bob: where are you\u2028now?"]
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts] if name.endswith("l") else prompts
    (tmp_path / name).write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")  # with a mark, as Windows writes it
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    wanted = "".join(f"> {prompt}\n{expected(model, tiny_model, prompt)}\n\n" for prompt in prompts)
    assert answer(capsys, tiny_model, "--prompts", str(tmp_path / name)) == wanted


def test_chat_shows_the_prompt_as_a_users_turn(tmp_path: Path, capsys: Capture) -> None:
    folder = make_tiny_model(tmp_path / "model", vocab_size=600, hidden_size=32, intermediate_size=64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert main([str(folder), "--prompt", "Hi!", "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err
    tokenizer.chat_template = FAMILIES["Llama-2"].template
    shown = ChatForm.of(tokenizer).prompt(as_user_turn("Hi!"))
    assert shown == "<s>[INST] Hi! [/INST]"
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(20)  # so that positions matter
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    wanted = expected(model, folder, shown, bos=False)
    assert wanted not in (expected(model, folder, "Hi!"), expected(model, folder, shown))
    assert answer(capsys, folder, "--prompt", "Hi!", "--chat").strip() == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_ends_where_the_assistants_turn_does(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    (end,) = ChatForm.of(tokenizer).end_ids
    assert FAMILIES[name].answer.endswith(tokenizer.decode([end]))
    assert end in tokenizer.all_special_ids


def test_a_token_that_ends_the_turn_ends_the_answer(tiny_model: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(PROMPT)]])
    first = int(model(ids).logits[0, -1].argmax())
    long = TASK.generate(model, tokenizer, PROMPT, AnswerSettings(max_new_tokens=12))
    assert long.is_cut
    assert len(long.text) > 12
    short = TASK.generate(model, tokenizer, PROMPT, AnswerSettings(max_new_tokens=12, more_end_ids=[first]))
    assert short == (tokenizer.decode([first]).strip(), False)
    model.generation_config.eos_token_id = [first]
    assert TASK.generate(model, tokenizer, PROMPT, AnswerSettings(max_new_tokens=12)) == short


def test_a_temperature_draws_and_a_seed_draws_the_same(tiny_model: Path, capsys: Capture) -> None:
    flags = ("--prompt", PROMPT, "--temperature", "1.5")
    drawn = [answer(capsys, tiny_model, *flags, "--seed", seed) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_what_cannot_be_answered_is_refused_in_a_line(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "a\\ud800"}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    for flags, reason in (
        ([str(tiny_model), "--prompts", str(tmp_path / "number.jsonl")], 'row 1: "prompt" is not text'),
        (
            [str(tiny_model), "--prompts", str(tmp_path / "half.jsonl")],
            "line 1: holds half of a character",
        ),
        ([str(tiny_model), "--prompts", str(tmp_path / "deep.jsonl")], "line 1: "),
        ([str(tiny_model), "--prompt", "a\udcff"], "is not text"),
        ([str(tiny_model), "--prompt", " "], "a prompt is empty"),
        *(
            ([str(tiny_model), "--prompt", "a", "--temperature", bad], "--temperature")
            for bad in ("nan", "inf", "1e-30")
        ),
        ([str(tiny_model), "--prompt", "a", "--max_new_tokens", "0"], "--max_new_tokens"),
        ([str(tiny_model), "--prompt", "a", "--seed", "1" + 40 * "0"], "--seed"),
        ([str(tiny_model)], "nothing to answer"),
        ([str(tiny_model), "--prompts", str(tmp_path / "empty.txt")], "holds no prompt"),
        ([str(tiny_model), "--prompts", str(tmp_path / "bad.jsonl")], "row 2 has neither \"prompt\" nor 'messages'"),
        ([str(tiny_model), "--prompts", str(tmp_path / "gone.txt")], "cannot be read"),
        ([str(tiny_model), "--prompt", "a", "--temperature", "-1"], "--temperature"),
        ([str(tmp_path), "--prompt", "a"], "is not a checkpoint"),
    ):
        assert main(flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert reason in line


@pytest.mark.parametrize(
    ("family", "prompt", "max_new_tokens", "refusal"),
    [
        ("bart", "Hi!", 600, "600 after the 1 token before the answer are more than the 512 positions"),
        ("bart", "Hi! " * 600, 12, "tokens are more than the 512 positions of this model's encoder"),
        ("gpt2", "Hi!", 200, "more than the 128 positions of this model; give at most 12"),
        ("gpt2", "Hi! " * 600, 12, "more than the 128 positions of this model; give a shorter prompt"),
    ],
)
def test_what_the_model_has_no_positions_for_is_refused(
    family: str, prompt: str, max_new_tokens: int, refusal: str, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "model"
    if family == "bart":
        save_seq2seq(family, folder)
    else:
        save_family(family, folder, tiny_model)
    assert main([str(folder), "--prompt", prompt, "--max_new_tokens", str(max_new_tokens)]) == 2
    assert refusal in capsys.readouterr().err


def test_lines_of_a_prompt_file_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(" a \n\nb\\n\n")
    prompts = read_prompts(tmp_path / "prompts.txt", NOTHING_KNOWN.row_settings())
    assert prompts == [(" a ", None), ("b\\n", None)]
