"""Chat templates that would compute for ever, fill the memory or fail in their own ways are refused with their row."""

from __future__ import annotations

import copy
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.tokens.spans import BadExample
from tests.helpers.chat_templates import CHATML, FAMILIES
from tests.helpers.refusals import Bench, write_lines
from tests.helpers.tokenizers_of_kinds import byte_level
from utils import template_limits
from utils.chat_rendering import render_chat, rendered_prompt
from utils.errors import ConfigError
from utils.host_memory import peak_resident

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
LOOP = "{% for a in range(100000) %}"
ENDLESS = {
    "loops": f"{LOOP * 3}{'{% endfor %}' * 3}",
    "loops that look ahead": f"{LOOP * 2}{{{{ loop.last }}}}{{{{ loop.length }}}}{'{% endfor %}' * 2}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "loops with a test": f"{LOOP}{{% for b in range(100000) if b < 0 %}}{{% endfor %}}{{% endfor %}}",
}
LARGE = {
    "a text times a number": "{{ 'a' * 10**10 }}",
    "of the data": "{{ messages[0].content * 10**10 }}",
    "a number times a text": "{{ 10**10 * 'a' }}",
    "a list": "{{ ([0] * 10**9) | length }}",
    "doubled by +": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled by ~": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a number": "{{ 9 ** (9**9) }}",
    "a shifted number": "{{ messages[0].content | length ** (10**9) }}",
    "a width": "{{ 'a' | center(10**10) }}",
    "a method's width": "{{ 'a'.ljust(10**10) }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a format's argument": "{{ '%*d' % (10**10, 1) }}",
    "str.format": "{{ '{:10000000000}'.format(1) }}",
    "str.format's argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "the filter format": "{{ '%10000000000d' | format(1) }}",
    "an indent": "{{ messages | tojson(indent=10**10) }}",
    "join": "{{ (['a' * 10**6] * 10**5) | join }}",
    "a method's join": "{{ ('a' * 10**6).join(['a'] * 10**5) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "the filter replace": "{{ ('a' * 10**6) | replace('a', 'a' * 10**6) }}",
    "many texts": f"{LOOP}{{{{ 'a' * 10**8 }}}}{{% endfor %}}",
}
FAILING = {
    "division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    "overflow": ("{{ 10.0 ** 400 }}", "OverflowError"),
    "a range too large": ("{{ range(10**9) }}", "OverflowError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "an attribute": ("{{ ''.join(5) }}", "TypeError"),
    "an index": ("{{ [].pop() }}", "SecurityError"),
    "an iterator": ("{{ [] | max + 1 }}{{ raise_exception('No') }}", "UndefinedError|TemplateError"),
    "twenty loops": (f"{LOOP * 21}{'{% endfor %}' * 21}", "SyntaxError"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
}


def samples(template: str) -> Any:
    tokenizer = copy.deepcopy(byte_level())  # other tests share it
    tokenizer.chat_template = template
    return chat_samples(read_conversation({"messages": TURNS}, DATASETS["chat_dataset"]()), ChatTemplate.of(tokenizer))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_goes_on_is_refused(case: str) -> None:
    before = time.process_time()
    with pytest.raises(BadExample, match=r"not done after 0.3 seconds; does a loop of it end\?; .*FILE\)"):
        samples(ENDLESS[case] + CHATML)
    assert time.process_time() - before < 3


@pytest.mark.parametrize("case", LARGE)
def test_a_template_that_fills_the_memory_is_refused_before(case: str) -> None:
    before = peak_resident()
    with pytest.raises(BadExample, match=r"cannot be rendered: it (makes|formats|computes) .*more than .*FILE\)"):
        samples(LARGE[case] + CHATML)
    assert peak_resident() - before < 1.5 * 2**30


@pytest.mark.parametrize("case", FAILING)
def test_whatever_else_a_template_stumbles_over_is_refused_with_its_turn(case: str) -> None:
    template, reason = FAILING[case]
    with pytest.raises(BadExample, match=rf"does not take turn 1 \(({reason}).*--chat_dataset.chat_template FILE\)"):
        samples(template + CHATML)


@pytest.mark.usefixtures("short")
def test_the_limit_holds_in_threads_and_in_forked_processes() -> None:
    """A signal would come to the main thread alone."""

    def refused(found: Any) -> None:
        try:
            samples(ENDLESS["loops"])
        except BadExample as error:
            found.put(str(error))

    context = multiprocessing.get_context("fork")
    for kind in (threading.Thread, context.Process):
        found: Any = context.Queue()
        workers: list[Any] = [kind(target=refused, args=(found,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        assert all("0.3 seconds" in found.get(timeout=30) for _ in workers)
        for worker in workers:
            worker.join()


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_families_are_written_as_transformers_writes_them(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    options = {"tokenize": False, "add_generation_prompt": True}
    assert rendered_prompt(tokenizer, TURNS[:1]) == tokenizer.apply_chat_template(TURNS[:1], **options)
    texts, _ = render_chat(tokenizer.get_chat_template(), TURNS, tokenizer, **tokenizer.special_tokens_map)
    assert texts == [tokenizer.apply_chat_template(TURNS, tokenize=False)]


def test_what_templates_do_is_done_as_without_limits() -> None:
    tokenizer = copy.deepcopy(byte_level())  # other tests share it
    tokenizer.chat_template = (
        "{% for m in messages if m.content %}{{ loop.index }}{{ loop.length }}{{ loop.last }}"
        "{{ loop.nextitem is defined }}"
        "{{ m.role ~ 5 ~ none }}{{ '-' * 3 }}{{ '%5d|%s' % (2, 'a') }}{{ '{:>4}'.format('b') }}{{ [1, 2] | join('+') }}"
        "{{ m.content.replace('H', 'J').center(20) }}{{ m | tojson(indent=2) }}{{ 2 ** 10 + 1 }}{{ ', '.join(['a']) }}"
        "{% for k, v in m.items() %}{{ k }}={{ v }}{% if loop.first %}{% continue %}{% endif %};{% endfor %}"
        "{{ 'a' | replace('a', 'bb') | indent(2, true) }}{{ [1, 2, 3] | batch(2) | list }}{{ '%s!' | format('c') }}"
        "{% endfor %}{% for i in nothing %}{% else %}none{% endfor %}{{ (1, 2) + (3,) }}{{ [0] * 2 }}{{ 7 % 3 }}"
    )
    (texts, _) = render_chat(tokenizer.chat_template, TURNS, tokenizer, **tokenizer.special_tokens_map)
    assert texts == [tokenizer.apply_chat_template(TURNS, tokenize=False)]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_row_is_named_and_left_out_if_asked(streaming: bool, tmp_path: Path, tiny_model: Path) -> None:
    """The template of a file that divides by what a row says. It was `dataset (get_chat_dataset, split 'train')`."""
    rows = [[{"role": "user", "content": text}, TURNS[1]] for text in ("one", "", "three")]
    rows[1][0]["content"] = "0"
    write_lines(tmp_path / "rows.jsonl", [{"messages": turns} for turns in rows])
    (tmp_path / "t.jinja").write_text("{{ 1 / (messages[0].content != '0') | int }}" + CHATML)
    settings: Any = {"chat_template": str(tmp_path / "t.jinja"), "streaming": streaming}

    def read(**more: Any) -> list[Any]:
        config = DATASETS["chat_dataset"](str(tmp_path / "rows.jsonl"), **settings, **more)  # type: ignore[call-arg]
        function = find_dataset_function("chat_dataset", config)
        return [row["labels"] for row in function(config, FAMILIES["ChatML"].tokenizer(), "train")]

    with pytest.raises(ConfigError, match=r"rows.jsonl, row 2: the chat template does not take turn 1 \(ZeroDivision"):
        read()
    assert [len(labels) > 0 for labels in read(skip_bad_rows=True)] == [True, False, True]


def test_a_run_with_such_a_template_is_refused_in_one_line(bench: Bench, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"messages": TURNS}])
    (tmp_path / "t.jinja").write_text("{{ 'a' * 10**10 }}" + CHATML)
    flags = ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(tmp_path / "rows.jsonl")]
    line = bench.refused(*flags, "--chat_dataset.chat_template", str(tmp_path / "t.jinja"), "--run_validation", "False")
    assert "rows.jsonl, row 1: the chat template cannot be rendered: it makes a text of more than" in line
    assert AutoTokenizer.from_pretrained(bench.model)
