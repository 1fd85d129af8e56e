"""tools.chat talks with a run as its samples were written: in a terminal, and from a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.generation import AnswerSettings
from tests.helpers.checkpoints import changed
from tests.helpers.forked import ROOT, Fork
from tests.helpers.processes import Captured, process_variables, run_command
from tools.answering.chat_form import ChatForm
from tools.answering.loading import load
from tools.answering.session import ChatSession
from tools.answering.terminal import AnswerPrinter
from tools.generate import main as generate

QUESTIONS = ("Who are you?", "Name a fruit.", "Count.")
Message = dict[str, str]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on chats: an adapter, and two checkpoints."""
    folder = tmp_path_factory.mktemp("chats")
    base = shutil.copytree(tiny_model, folder / "base")
    model = changed(AutoModelForCausalLM.from_pretrained(base))  # else each answer is one token, again and again
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(20)  # so that positions matter
    model.save_pretrained(base)
    shutil.copy(ROOT / "datasets/samples/formats/chat.jinja", base / "chat_template.jinja")
    rows = [{"messages": [user(question), assistant("A pebble.")]} for question in QUESTIONS]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--use_peft", "--lr", "0.01", "--max_train_step", "2", "--save_every_steps", "1", "--num_epochs", "2"]
    data = ["--dataset", "chat_dataset", "--chat_dataset.data_path", "chats.jsonl"]
    done = run_command("--model_name", str(base), *data, *flags, "--output_dir", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def expected(run: Path, messages: Sequence[Message], num_tokens: int = 12) -> str:
    """The greedy answer to these turns, token by token, by plain transformers."""
    model, tokenizer, *_ = load(run, None)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    start = len(ids)
    while len(ids) < start + num_tokens and ids[-1] != tokenizer.eos_token_id:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True)).strip()


def piped(run: Path, text: str, *flags: str) -> tuple[int, str, str]:
    """Exit status, answers and other lines of a chat whose questions come from a pipe."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    argv = ["-m", "tools.chat", str(run), "--max_new_tokens", "12", *flags]
    outcome = Captured(argv, ROOT, process_variables({}), stdin=reader).outcome(60)
    os.close(reader)
    return outcome.status, outcome.stdout, outcome.stderr


class Terminal:
    """A chat in a terminal: what is typed into it, and what it shows."""

    def __init__(self, run: Path, *flags: str, cwd: Path) -> None:
        self._master, slave = pty.openpty()
        argv = ["-m", "tools.chat", str(run), *flags]
        given = {"cwd": cwd, "environment": process_variables({})}
        self.fork = Fork(argv, stdin=slave, stdout=slave, stderr=slave, **given)  # type: ignore[arg-type]
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Wait until it shows a text after the last one that was waited for. Returns what came before the text."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if not self._read(0.2):
                break
        before, found, self.shown = self.shown.partition(text)
        assert found, before
        return before

    def wait_for_more(self, seconds: float = 60) -> None:
        """Wait until it shows anything after the last text that was waited for."""
        end = time.monotonic() + seconds
        while not self.shown:
            assert time.monotonic() < end, "nothing was shown"
            assert self._read(0.2), "the chat ended"

    def interrupt_until(self, text: str, seconds: float = 60) -> None:
        """Press Ctrl-C until it shows a text: readline sees one between its prompt and its reading at the next key."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            assert self.fork.poll() is None, self.shown
            os.kill(self.fork.pid, signal.SIGINT)
            self._read(0.5)
        self.wait_for(text)

    def _read(self, seconds: float) -> bool:
        """Take what it shows within this time. False if the chat has ended."""
        if select.select([self._master], [], [], seconds)[0]:
            try:
                self.shown += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
            except OSError:
                return False
        return True


@pytest.fixture
def terminal(run: Path, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(run, "--max_new_tokens", "12", "--system", "Be a stone.", cwd=tmp_path)
    yield opened
    opened.fork.kill()


def test_a_pipe_gets_the_answers_alone_and_later_turns_see_earlier_ones(run: Path) -> None:
    first = expected(run, [user("Who are you?")])
    turns = [user("Who are you?"), assistant(first), user("And\nwhere?")]
    second = expected(run, turns)
    assert second != expected(run, [turns[-1]]), "history changes no answer: the test shows nothing"
    status, answers, others = piped(run, 'Who are you?\n\n"""And\nwhere?"""\n')
    assert (status, answers) == (0, f"{first}\n\n{second}\n"), others
    status, answers, others = piped(run, "Who are you?\n/fly\nHi!\n")
    assert (status, answers) == (2, f"{first}\n")
    assert others.splitlines()[-1].startswith("error: /fly is not known; /help lists what is")


def test_a_terminal_has_undo_save_and_help(run: Path, terminal: Terminal, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be a stone."}
    terminal.wait_for("step-00000002 answers; /help shows what you can type")
    terminal.wait_for("> ")
    terminal.type("/save empty.jsonl\n")
    terminal.wait_for("error: there is nothing to save")
    assert not (tmp_path / "empty.jsonl").exists()
    terminal.wait_for("> ")
    terminal.type("Who are you?\n")
    terminal.wait_for("> ")
    terminal.type("/undo\n")
    terminal.wait_for("taken back: Who are you?")
    terminal.type("Name a fruit.\n")
    terminal.wait_for("> ")
    terminal.type("/save talk.jsonl\n")
    terminal.wait_for("saved: talk.jsonl, a row of chat_dataset")
    answer = expected(run, [system, user("Name a fruit.")])
    saved = json.loads((tmp_path / "talk.jsonl").read_text())
    assert saved == {"messages": [system, user("Name a fruit."), assistant(answer)]}
    (tmp_path / "other.jsonl").write_text("mine")
    terminal.type("/save other.jsonl\n")
    terminal.wait_for("error: other.jsonl is there already; give another name")
    assert (tmp_path / "other.jsonl").read_text() == "mine"
    terminal.type("/help\n")
    terminal.wait_for("takes your last message and its answer back")
    terminal.wait_for("> ")  # readline loses a Ctrl-D that comes before it reads
    terminal.type("\x04")
    assert terminal.fork.wait(20) == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(run: Path, tmp_path: Path) -> None:
    terminal = Terminal(run, "--max_new_tokens", "100000", "--temperature", "5", cwd=tmp_path)
    try:
        terminal.wait_for("> ")
        terminal.type("Count.\n")
        terminal.wait_for("Count.\n")
        terminal.wait_for_more()
        os.kill(terminal.fork.pid, signal.SIGINT)
        terminal.wait_for("[stopped")
        terminal.wait_for("> ")
        terminal.interrupt_until("(Ctrl-D or /exit ends)")
        assert terminal.fork.poll() is None
        terminal.type("/exit\n")
        assert terminal.fork.wait(20) == 0
    finally:
        terminal.fork.kill()


def test_special_tokens_that_a_message_spells_stay_text_as_in_training(run: Path) -> None:
    loaded = load(run, None)
    form = ChatForm.of(loaded.processor)
    message = f"What does {loaded.processor.eos_token} mean?"
    session = ChatSession(loaded, form, AnswerSettings(4))
    seen: list[list[int]] = []
    loaded.model.get_base_model().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    session.ask(message, AnswerPrinter())
    assert seen[0].count(loaded.processor.eos_token_id) == 1, "the template's own, and not the user's"


def test_a_chat_as_long_as_the_model_gets_shorter_answers_then_a_refusal(run: Path) -> None:
    loaded = load(run, None)
    loaded.model.config.max_position_embeddings = 40
    session = ChatSession(loaded, ChatForm.of(loaded.processor), AnswerSettings(500, may_be_shorter=True))
    assert session.ask("Hi!", AnswerPrinter()).is_cut
    before = list(session.messages)
    with pytest.raises(Exception, match=r"more than the 40 positions of this model; give a shorter prompt"):
        session.ask("And?", AnswerPrinter())
    assert session.messages == before


def test_what_cannot_be_a_chat_is_refused_in_a_line(run: Path, tiny_model: Path) -> None:
    for folder, flags, reason in (
        (tiny_model, [], "its tokenizer has no chat template, so turns cannot be written; ask by python -m tools.gen"),
        (run, ["--chat_template_kwargs", "[1]"], "--chat_template_kwargs: it is no JSON object"),
        (run, ["--system", " "], "--system: a prompt is empty"),
        (run, ["--temperature", "nan"], "--temperature: nan is neither 0"),
    ):
        status, answers, others = piped(folder, "Hi!\n", *flags)
        assert (status, answers) == (2, "")
        assert reason in others.splitlines()[-1]


def test_generate_says_that_a_run_was_trained_on_chats(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--prompt", "Name a fruit.", "--max_new_tokens", "12"]
    answers = {}
    for flags in ([], ["--chat"]):
        assert generate([str(run), *ask, *flags]) == 0
        answers[bool(flags)] = capsys.readouterr()
    assert f"{run} was trained on chats (chat_dataset), and these prompts are not written" in answers[False].err
    assert "give --chat" in answers[False].err
    assert answers[True].err == ""
    assert answers[True].out.strip() == expected(run, [user("Name a fruit.")])


def test_generate_takes_the_training_file_as_prompts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([str(run), "--prompts", str(run.parent / "chats.jsonl"), "--max_new_tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(f"> {question}\n{expected(run, [user(question)])}\n\n" for question in QUESTIONS)
    assert shown.err == ""


@pytest.mark.parametrize("name", ["checkpoints/latest", "checkpoints", "checkpoints/step-00000002"])
def test_what_names_the_newest_checkpoint_is_read(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([str(run / name), "--prompt", "Count.", "--chat", "--max_new_tokens", "12"]) == 0
    assert capsys.readouterr().out.strip() == expected(run, [user("Count.")])


def test_every_kind_of_folder_answers(run: Path, tmp_path: Path) -> None:
    """An adapter on its base, and the merged folder, which plain transformers loads."""
    from tools.export import main as export

    assert export([str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged, tokenizer = (kind.from_pretrained(tmp_path / "merged") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert tokenizer.chat_template
    assert merged.generation_config.eos_token_id == tokenizer.eos_token_id
    wanted = expected(run, [user("Count.")]) + "\n"
    for folder in (run / "adapter", tmp_path / "merged"):
        status, answers, others = piped(folder, "Count.\n")
        assert (status, answers) == (0, wanted), others


def test_the_documented_commands_run_as_written(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "outputs/chats")
    shutil.copy(run.parent / "chats.jsonl", tmp_path)
    (tmp_path / "questions.txt").write_text("Who are you?\nCount.\n")
    page = (ROOT / "docs/chatting.md").read_text()
    lines = re.findall(r"^python -m (tools\.(?:chat|generate) outputs/chats.*)$", page, flags=re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        argv = shlex.split(line.partition(" < ")[0], comments=True)
        with (tmp_path / "questions.txt").open() as questions:
            started = Captured(
                ["-m", *argv, "--max_new_tokens", "4"], tmp_path, process_variables({}), stdin=questions.fileno()
            )
            outcome = started.outcome(60)
        assert outcome.status == 0, outcome.stderr
        assert outcome.stdout.strip()
