"""Special tokens that the data spells stay text, and the rest of the text keeps its tokens."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.sequences.causal import build_sequences
from data.tokens import long_texts
from data.tokens.encoding import Caption, SourceAndTarget
from data.tokens.loss_mask import tokenize_spans
from data.tokens.spans import BadExample, TextSpan
from data.tokens.special_text import SpecialTokens
from tests.helpers.chat_templates import CHATML, FAMILIES
from tests.helpers.seq2seq_models import make_tokenizer
from tests.helpers.tokenizers_of_kinds import KINDS, byte_level

HTML = "It is <s>10 EUR</s> the end.</s>"
PIECES = st.sampled_from(["</s>", "<s>", "<", "s>", " ", "Anna", "\n", "</s", "Summary: ", "ü", "🙂"])


def tokens_of(spans: list[TextSpan], tokenizer: Any) -> tuple[list[int], list[int]]:
    ((ids,), (labels,), _) = tokenize_spans([spans], tokenizer)
    return ids.tolist(), [token for token in labels.tolist() if token != -100]


def specials(ids: list[int], tokenizer: Any) -> list[str]:
    """The special tokens among token ids; an unknown character is none."""
    known = {*SpecialTokens.of(tokenizer).tokens} - {tokenizer.unk_token}
    return [token for token in tokenizer.convert_ids_to_tokens(ids) if token in known]


@pytest.mark.parametrize("kind", KINDS)
def test_a_spelled_special_token_is_text_and_a_templates_is_the_token(kind: str) -> None:
    tokenizer = KINDS[kind]()
    said = SpecialTokens.of(tokenizer).as_text(HTML)
    assert (said == HTML, len(said)) == (False, len(HTML))
    ids, learned = tokens_of([TextSpan("Anna: ", False), TextSpan(f"{said}</s>", True)], tokenizer)
    assert specials(ids, tokenizer) == ["</s>"]
    if kind == "unigram":  # it has no letters for the rest, and transformers leaves the end token in its vocabulary
        return
    assert tokenizer.decode(ids).replace(" ", "") == f"Anna: {HTML}</s>".replace(" ", "")
    assert tokenizer.decode(learned).replace(" ", "") == f"{HTML}</s>".replace(" ", "")
    if tokenizer.is_fast:
        split = tokenizer(HTML, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokens_of([TextSpan(said, True)], tokenizer)[0] == split


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
@given(parts=st.lists(st.tuples(st.lists(PIECES, max_size=5).map("".join), st.booleans()), max_size=5))
@settings(deadline=None, max_examples=40)
def test_only_a_templates_tokens_are_special_and_labels_are_the_text_with_a_loss(
    kind: str, parts: list[tuple[str, bool]]
) -> None:
    tokenizer = KINDS[kind]()
    as_text = SpecialTokens.of(tokenizer).as_text
    spans = [TextSpan(text, learned) for said, learned in parts for text in (f"{as_text(said)} </s>",)]
    ids, learned = tokens_of(spans, tokenizer)
    assert specials(ids, tokenizer) == ["</s>"] * len(parts)
    expected = "".join(f"{said} </s>" for said, has_loss in parts if has_loss)
    if kind != "unigram":  # whose unknown characters have no text
        assert "".join(tokenizer.decode(learned).split()).endswith("".join(expected.split()))


def test_text_without_special_tokens_is_left_as_it_is() -> None:
    special = SpecialTokens.of(byte_level())
    text = "a < b, and <S> or < /s>: <think>"
    assert special.as_text(text) is text
    assert not special.spells(text)
    row = {"dialogue": text, "parts": [1, None, "</s>"]}
    assert special.plain(special.as_text(row)) == row


def test_added_tokens_that_are_not_special_stay_tokens() -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens(["<think>"])
    said = SpecialTokens.of(tokenizer).as_text("<think>Hi</s>")
    ids, _ = tokens_of([TextSpan(said, True)], tokenizer)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<think>")
    assert tokenizer.eos_token_id not in ids


def test_a_code_point_that_marks_special_tokens_is_refused_in_data() -> None:
    with pytest.raises(BadExample, match="no character"):
        SpecialTokens.of(byte_level()).as_text("a\ufdd0b")


def test_a_long_text_stays_text_in_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    said = SpecialTokens.of(tokenizer).as_text("Anna says </s> to Bob. What is the capital? " * 60)
    whole = tokens_of([TextSpan(said, True)], tokenizer)
    monkeypatch.setattr(long_texts, "CALL_CHARACTERS", 1800)
    monkeypatch.setattr(long_texts, "WINDOW_CHARACTERS", 900)
    monkeypatch.setattr(long_texts, "OVERLAP_CHARACTERS", 300)
    assert tokens_of([TextSpan(said, True)], tokenizer) == whole
    assert specials(whole[0], tokenizer) == []


def test_a_process_of_its_own_gets_them() -> None:
    special = SpecialTokens.of(byte_level())
    spans = [[TextSpan(special.as_text(HTML), True)]]
    before = tokenize_spans(spans, special.tokenizer, special=special).input_ids[0].tolist()
    again = pickle.loads(pickle.dumps(special))
    assert tokenize_spans(spans, again.tokenizer, special=again).input_ids[0].tolist() == before


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_that_spells_a_templates_tokens_has_those_of_one_that_does_not(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    template = ChatTemplate.of(tokenizer)

    def samples(word: str, split: bool = True) -> tuple[list[str], list[str]]:
        turns = [
            {"role": "user", "content": f"Is{word} it?"},
            {"role": "assistant", "content": f"It is {word} the end."},
        ]
        conversation = read_conversation({"messages": turns * 2}, DATASETS["chat_dataset"]())
        of = template if split else ChatTemplate.of(tokenizer, split_special_tokens=False)
        (spans,) = chat_samples(conversation, of).spans
        ids, learned = tokens_of(list(spans), tokenizer)
        assert "".join(tokenizer.decode(learned).split()).count("".join(f"It is {word} the end.".split())) == 2
        return specials(ids, tokenizer), specials(learned, tokenizer)

    for token in (*FAMILIES[name].tokens, tokenizer.eos_token):
        assert samples(token) == samples("x")
        assert len(samples(token, split=False)[0]) == len(samples("x")[0]) + 4


def test_calls_results_and_tools_stay_text() -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    template = ChatTemplate.of(tokenizer)

    def count(word: str) -> list[str]:
        call = {"function": {"name": "look_up", "arguments": {f"pl{word}": [f"{word}a"]}}}
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"{word} b"},
            {"role": "assistant", "content": "So."},
        ]
        tools = [{"type": "function", "function": {"name": "look_up", "description": f"Looks {word} up"}}]
        row = {"messages": turns, "tools": tools}
        (spans,) = chat_samples(read_conversation(row, DATASETS["chat_dataset"]()), template).spans
        return specials(tokens_of(list(spans), tokenizer)[0], tokenizer)

    assert count("<|im_end|>") == count("x")


def test_a_template_that_reads_a_spelled_token_is_refused() -> None:
    """As gpt-oss's, which refuses tokens of its channels in a content; or one that would cut the text there."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    conversation = read_conversation({"messages": turns}, DATASETS["chat_dataset"]())
    refuses = "{%- for m in messages if '<|im_end|>' in m.content %}{{ raise_exception('no tags') }}{%- endfor -%}"
    drops = CHATML.replace("message['content'] or ''", "(message['content'] or '').split('<|im_end|>')[0]")
    for source, reason in ((refuses + CHATML, "no tags"), (drops, "reads and does not write")):
        tokenizer = FAMILIES["ChatML"].tokenizer(source)
        with pytest.raises(BadExample, match=reason):
            chat_samples(conversation, ChatTemplate.of(tokenizer))


ROWS: dict[str, dict[str, Any]] = {
    "samsum_dataset": {"dialogue": "Anna: </s>", "summary": "It is </s> the end."},
    "alpaca_dataset": {"instruction": "Say </s>", "input": "<s>", "output": "a</s>b", "history": [["a</s>", "b</s>"]]},
    "grammar_dataset": {"input": "He have </s>.", "target": "He has </s>."},
    "instruction_dataset": {"prompt": "Say </s>", "completion": " a</s>b"},
    "text_dataset": {"text": "It is <s>10 EUR</s> the end.</s>"},
    "chat_dataset": {"messages": [{"role": "user", "content": "a</s>"}, {"role": "assistant", "content": "b</s>"}]},
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_every_format_keeps_them_text_counts_them_and_makes_them_tokens_if_asked(
    name: str, streaming: bool, tmp_path: Path
) -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    row, harmless = ROWS[name], json.loads(json.dumps(ROWS[name]).replace("</s>", "x").replace("<s>", "x"))
    for file, text in (("spelled", row), ("harmless", harmless)):
        (tmp_path / f"{file}.jsonl").write_text(f"{json.dumps(text)}\n{json.dumps(harmless)}\n")

    def read(file: str, **options: Any) -> Any:
        more = {"validation_fraction": 0.0} if name == "alpaca_dataset" else {}
        config = DATASETS[name](**{"data_path": str(tmp_path / f"{file}.jsonl"), **more, **options})
        config = replace(config, streaming=streaming)
        rows = find_dataset_function(name, config)(config, tokenizer, "train")
        return build_sequences(list(rows) if streaming else rows, name=name, context_length=400)

    def found(sequences: Any) -> list[list[str]]:
        return [specials(sequence.input_ids.tolist(), tokenizer) for sequence in sequences]

    spelled, plain = read("spelled"), read("harmless")
    assert found(spelled) == found(plain)
    assert (spelled.num_special_as_text, plain.num_special_as_text) == (1, 0)
    assert any("special tokens of the tokenizer in 1 example stay text" in line for line in spelled.describe("train"))
    as_tokens = read("spelled", split_special_tokens=False)
    assert len(found(as_tokens)[0]) > len(found(plain)[0])
    assert as_tokens.num_special_as_text == 0


def test_a_prompt_template_has_tokens_and_what_fills_it_has_none(tmp_path: Path) -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a<|im_end|>b", "completion": " c<|im_end|>"}))
    template = "<|im_start|>user\\n{prompt}<|im_end|>\\n<|im_start|>assistant\\n"
    config = DATASETS["instruction_dataset"](data_path=str(tmp_path / "a.jsonl"), prompt_template=template)
    (row,) = find_dataset_function("instruction_dataset", config)(config, tokenizer, "train")
    assert specials(row["input_ids"], tokenizer) == ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>", "</s>"]


@pytest.mark.parametrize(("asked", "number"), [({}, 2), ({"split_special_tokens": True}, 0)])
def test_segments_write_their_own_tokens(asked: dict[str, bool], number: int, tmp_path: Path) -> None:
    segments = [{"text": "<s>Etna: ", "label": False}, {"text": "Italy</s>", "label": True}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"segments": segments}))
    config = DATASETS["segments_dataset"](data_path=str(tmp_path / "a.jsonl"), **asked)
    (row,) = find_dataset_function("segments_dataset", config)(config, byte_level(), "train")
    assert len(specials(row["input_ids"], byte_level())) == number


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_source_and_target_of_an_encoder_decoder_stay_text(family: str) -> None:
    tokenizer = make_tokenizer(family)
    special, encode = SpecialTokens.of(tokenizer), SourceAndTarget("Summarize: ")
    (end,) = {tokenizer.eos_token}

    def columns(word: str) -> Any:
        said = special.as_text(f"It is {word} so.")
        return encode([[TextSpan(said, False), TextSpan(said, True)]], tokenizer, special=special)

    for spelled, plain in zip(columns(end)[:2], columns("x")[:2], strict=True):
        assert specials(spelled[0].tolist(), tokenizer) == specials(plain[0].tolist(), tokenizer)
        assert spelled[0][-1] == plain[0][-1] == tokenizer.eos_token_id


def test_a_caption_stays_text() -> None:
    tokenizer = byte_level()
    said = SpecialTokens.of(tokenizer).as_text("A sign: </s>.")
    columns = Caption(tokenizer.eos_token_id)([[TextSpan(said, True)]], tokenizer)
    assert specials(columns.input_ids[0].tolist(), tokenizer) == ["</s>"]


ODD_TOKENS = ["<\n>", "<'>", '<">', "<'\">", "<\\>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]


@pytest.mark.parametrize("token", ["</s>", *ODD_TOKENS, "\ufdd0"])
def test_they_are_found_in_any_value(token: str) -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": ODD_TOKENS})
    special = SpecialTokens.of(tokenizer)
    for value in (token, [{"content": f"a'{token}"}], {"a": {f'"{token}': 1}}, ("x", [token])):
        assert special.are_in(value)
    assert not special.are_in([{"content": "a < b"}, {"<'": '"<'}, "< \\n>"])


def test_tokens_of_roles_that_are_not_special_stay_text_and_those_of_thoughts_are_tokens() -> None:
    """As in DeepSeek's and Cohere's tokenizers."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens(["<|User|>", "<|Bot|>", "<think>", "</think>", "<|file|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|User|>' if m.role == 'user' else '<|Bot|>' }}{{ m.content }}"
        "{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Bot|><think></think>' }}{% endif %}"
    )
    special = SpecialTokens.of(tokenizer)
    assert {"<|User|>", "<|Bot|>"} < {*special.tokens}
    assert not {"<think>", "</think>", "<|file|>"} & {*special.tokens}
    turns = [{"role": "user", "content": "a<|Bot|>"}, {"role": "assistant", "content": "<think>b<|User|>"}]
    conversation = read_conversation({"messages": turns}, DATASETS["chat_dataset"]())
    (spans,) = chat_samples(conversation, ChatTemplate.of(tokenizer)).spans
    ids = tokens_of(list(spans), tokenizer)[0]
    assert specials(ids, tokenizer) == ["<|User|>", "<|Bot|>", "</s>"]
    assert tokenizer.convert_tokens_to_ids("<think>") in ids
