"""Measures of answers: exact match, JSON, chrF, ROUGE in every script, and functions of users."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.flags import parse_flags
from configs.training import TrainConfig
from evaluation.chrf import ChrF
from evaluation.exact_match import ExactMatch
from evaluation.json_answers import JsonAnswers
from evaluation.measure import Answer, Measure
from evaluation.measures import check_best_metric, check_figures, deciding_figure, measure, measures_of
from evaluation.rouge import Rouge, words_of
from evaluation.user_measure import UserMeasure
from tasks.causal_lm import CausalLM
from utils.errors import ConfigError

GENERATES = TrainConfig(model_name="m", eval_generate=True)


def figures(one: Measure, reference: str, text: str) -> dict[str, float]:
    return dict(one.make_prompt_scorer()("the prompt", reference, text))


def test_an_exact_match_is_the_reference_but_for_white_space() -> None:
    assert figures(ExactMatch(), "Bob says 3.", " Bob  says\n3.") == {"exact_match": 100}
    assert figures(ExactMatch(), "Bob says 3.", "Bob says 30.") == {"exact_match": 0}


@pytest.mark.parametrize(
    ("reference", "text", "wanted"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2],\n"a":1}', (100, 100)),
        ('{"a": 1}', '{"a": true}', (100, 0)),
        ('{"a": 1}', "Sure: {}", (0, 0)),
        ("no json", "[]", (100, 0)),
        ("1", "[" * 100_000, (0, 0)),
        ("1", "[" * 900 + "]" * 900, (100, 0)),
        ('{"a": 1, "b": 0.5}', '{"a": 1.0, "b": 5e-1}', (100, 100)),
        ('{"a": NaN}', '{"a": NaN}', (0, 0)),
    ],
)
def test_json_that_parses_and_says_the_same(reference: str, text: str, wanted: tuple[float, float]) -> None:
    assert tuple(figures(JsonAnswers(), reference, text).values()) == wanted


def test_json_that_fits_a_schema(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}))
    one = JsonAnswers().with_settings(replace(GENERATES, eval_json_schema=str(file)))
    assert [figures(one, "{}", text)["json_valid"] for text in ('{"a": 1}', '{"a": "1"}', "{}")] == [100, 0, 0]
    file.write_text('{"type": 3}')
    with pytest.raises(ConfigError, match=r"--eval_json_schema: .* holds no JSON schema"):
        one.make_scorer()


@pytest.mark.parametrize("outside", ["http://example.org/other.json", "other.json#/$defs/a", "#/$defs/b"])
def test_a_schema_that_refers_to_what_is_not_in_it_is_refused_and_nothing_is_downloaded(
    outside: str, tmp_path: Path
) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    one = JsonAnswers().with_settings(replace(GENERATES, eval_json_schema=str(file)))
    parts = {"$defs": {"a": {"type": "string"}}, "type": "array"}
    file.write_text(json.dumps({**parts, "items": {"$ref": "#/$defs/a"}}))
    assert [figures(one, "[]", text)["json_valid"] for text in ('["x"]', "[1]")] == [100, 0]
    for base in ({}, {"$id": "http://example.org/part"}):
        file.write_text(json.dumps({**parts, "items": {**base, "$ref": outside}}))
        with pytest.raises(ConfigError, match=r"--eval_json_schema: .* refers to .*, which is not in it"):
            one.make_scorer()


def test_references_by_name_are_followed_and_data_that_look_like_one_are_not(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    one = JsonAnswers().with_settings(replace(GENERATES, eval_json_schema=str(file)))
    named = {"$id": "http://example.org/word", "type": "string"}
    data = {"enum": [{"$ref": "other.json"}], "default": {"$ref": "other.json"}}
    properties = {"a": {"$ref": "http://example.org/word"}, "b": data, "$ref": {"type": "integer"}}
    file.write_text(json.dumps({"$defs": {"word": named}, "properties": properties}))
    answers = ('{"a": "x"}', '{"a": 1}', '{"b": {"$ref": "other.json"}}', '{"b": 1}', '{"$ref": 1}', '{"$ref": "x"}')
    assert [figures(one, "{}", text)["json_valid"] for text in answers] == [100, 0, 100, 0, 100, 0]


def test_chrf_is_that_of_sacrebleu_over_all_answers() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    pairs = [("the cat sat", "the cat sits"), ("кошка сидит", "кошка спит")]
    answers = [
        Answer(i, text, reference, figures(ChrF(), reference, text)) for i, (reference, text) in enumerate(pairs)
    ]
    wanted = sacrebleu.corpus_chrf([text for _, text in pairs], [[reference for reference, _ in pairs]]).score
    assert ChrF().total(answers) == {"chrf": pytest.approx(wanted)}
    assert 30 < wanted < 90


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Кошка сидит, тихо!", ["кошка", "сидит", "тихо"]),
        ("猫は GPT4 が好き。", ["猫", "は", "gpt4", "が", "好", "き"]),
        ("القِطّةُ تجلس", ["القطة", "تجلس"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("το σπίτι μου", ["το", "σπίτι", "μου"]),
    ],
)
def test_words_of_every_script(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_rouge_counts_other_scripts_and_is_that_of_rouge_score_for_latin_letters() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    assert figures(Rouge(), "кошка сидит", "кошка спит")["rouge1"] == pytest.approx(50)
    assert figures(Rouge(), "我们在家", "我们在家")["rougeL"] == 100
    assert figures(Rouge(), "我们在家", "abc") == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    theirs = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for reference, text in (
        ("Bob was running 3 miles.", "Bob runs 3 mile"),
        ("Déjà vu à Paris", "déjà à paris"),
        ("", ""),
    ):
        wanted = {name: 100 * value.fmeasure for name, value in theirs.score(reference, text).items()}
        assert figures(Rouge(), reference, text) == wanted
    assert "of 1 of 2 references" in Rouge().notes(["a b", "кошка"])[0]


FUNCTIONS = """
import numpy

def score(prompt, reference, answer):
    return {"shorter": len(answer) < len(reference), "asked": "prompt" in prompt}

def length(prompt, reference, answer):
    return numpy.float32(len(answer))

def fails(prompt, reference, answer):
    return answer[99]

def leaves(prompt, reference, answer):
    raise SystemExit("no judge")

def no_number(prompt, reference, answer):
    return "good"

def huge(prompt, reference, answer):
    return 10**400

def taken(prompt, reference, answer):
    return {"rougeL": 1}

def loss(prompt, reference, answer):
    return 1
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "my_metrics.py"
    file.write_text(FUNCTIONS)
    return file


def test_a_function_of_the_user_gives_numbers_by_name(functions: Path) -> None:
    train = replace(GENERATES, eval_metric=("exact_match", f"{functions}:score", f"{functions}:length"))
    chosen = measures_of(train)
    answers = []
    for place, text in enumerate(("yes", "well then")):
        found = {k: v for one in chosen for k, v in one.make_prompt_scorer()("the prompt", "yes, it is", text).items()}
        answers.append(Answer(place, text, "yes, it is", found))
    assert measure(answers, chosen) == {"exact_match": 0, "shorter": 1, "asked": 1, "length": 6}
    assert deciding_figure({"length": 6.0}, "length", CausalLM()) == 6
    assert deciding_figure({"length": 6.0}, "shorter", CausalLM()) == -math.inf, "no answer had it"
    assert deciding_figure({"length": 6.0}, "eval_loss", CausalLM()) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fails", "fails failed on an answer .IndexError"),
        ("leaves", "leaves failed on an answer .SystemExit: no judge"),
        ("no_number", "returned 'good' for 'no_number'; return a finite number"),
        ("huge", "returned 1000* for 'huge'; return a finite number"),
        ("taken", "rougeL of .* is a figure of another measure"),
        ("loss", "loss of .* is a figure of another measure, or a column of metrics.jsonl"),
        ("absent", "has no function absent"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(name: str, told: str, functions: Path) -> None:
    with pytest.raises(ConfigError, match=f"--eval_metric: .*{told}"):
        UserMeasure(f"{functions}:{name}", ["rougeL"]).make_prompt_scorer()("p", "r", "short")


def test_what_decides_must_be_measured(functions: Path) -> None:
    assert [one.NAME for one in measures_of(GENERATES)] == ["rouge"]
    assert measures_of(TrainConfig(model_name="m")) == ()
    for change, told in {
        ("best_metric", "exact_match"): "exact_match is not a figure of --eval_metric; add its measure",
        ("best_metric", "rouge9"): "'rouge9' is not one of eval_loss, ",
        (
            "eval_metric",
            ("bleu",),
        ): "'bleu' is neither one of rouge, exact_match, choice, chrf, json nor FILE.py:FUNCTION",
        ("eval_metric", ("nowhere.py:score",)): "there is no file nowhere.py",
    }.items():
        with pytest.raises(ConfigError, match=told):
            check_best_metric(replace(GENERATES, **dict([change])), CausalLM())
    train = replace(GENERATES, eval_metric=(f"{functions}:score",), best_metric="longer")
    check_best_metric(train, CausalLM())  # its names are seen with the first answer
    with pytest.raises(ConfigError, match=r"'longer' is not one of eval_loss, .*shorter, asked"):
        check_figures(train, CausalLM(), ["shorter", "asked"])
    for found in (["longer", "longer"], ["longer", "token_accuracy"]):
        with pytest.raises(ConfigError, match=f"{found[1]} is the name of two figures"):
            check_figures(train, CausalLM(), found)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--eval_generate --top_p 0.9", "--top_p: nothing is drawn without --temperature"),
        ("--eval_generate --temperature 1 --num_beams 2", "--temperature: beams are searched, not drawn"),
        ("--eval_metric json", "--eval_metric: nothing is generated without --eval_generate"),
        ("--temperature 0.5", "--temperature: nothing is generated without --eval_generate"),
        ("--eval_generate --eval_json_schema s.json", "--eval_json_schema: only --eval_metric json reads it"),
    ],
)
def test_settings_without_effect_are_refused(flags: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_flags(["--model_name", "m", *flags.split()])


def test_the_first_answers_decide_nothing_without_generation() -> None:
    empty: list[Any] = []
    assert measure(empty, measures_of(GENERATES)) == {}
