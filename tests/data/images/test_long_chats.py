"""Conversations of many turns with images, and templates that mark what is learned, by the ways of text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.image_chats import chat_processor, colours_of, flat_picture, learned_of, read_chats

RED, GREEN = (255, 0, 0), (0, 255, 0)
NUM_TURNS = 14  # more than are rendered one by one


def write_long(folder: Path) -> Path:
    """Conversations in which every third question shows one of two pictures."""
    flat_picture(folder / "red.png", RED)
    flat_picture(folder / "green.png", GREEN, (60, 24))
    rows = []
    for row in range(6):
        messages, images = [], []
        for turn in range(NUM_TURNS):
            is_shown = (turn + row) % 3 == 0
            messages.append({"role": "user", "content": f"{'<image>' * is_shown}one red {turn} ?"})
            messages.append({"role": "assistant", "content": f"two blue {turn * row}"})
            images += [["red.png", "green.png"][turn % 2]] * is_shown
        rows.append({"messages": messages, "images": images})
    table = folder / "train.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


@pytest.mark.parametrize("is_marked", [False, True], ids=["found by kinds", "marked by the template"])
@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_every_answer_is_learned_and_every_image_is_in_its_turn(name: str, is_marked: bool, tmp_path: Path) -> None:
    processor = chat_processor(name)
    if is_marked:
        head, _, rest = processor.chat_template.partition("{{ '</s>\n' }}")
        start = head.rindex("}}", 0, head.index("+ '\n'") + 8) + 2
        content = f"{head[start:]}{{{{ '</s>' }}}}"
        marked = f"{{% generation %}}{content}{{% endgeneration %}}"
        choice = f"{{% if m['role'] == 'assistant' %}}{marked}{{% else %}}{content}{{% endif %}}"
        processor.chat_template = f"{head[:start]}{choice}{{{{ '\n' }}}}{rest}"
    samples = read_chats(processor, write_long(tmp_path), context_length=4000)
    assert len(samples) == 6
    assert (samples.num_by_marks, samples.num_by_prompts) == ((6, 0) if is_marked else (0, 6))
    for row, sample in enumerate(samples):
        assert learned_of(processor, sample) == [f"two blue {turn * row}</s>" for turn in range(NUM_TURNS)]
        shown = [turn for turn in range(NUM_TURNS) if (turn + row) % 3 == 0]
        assert colours_of(sample) == [(RED, GREEN)[turn % 2] for turn in shown]
        for turn, (first, _) in zip(shown, sample.places.tolist(), strict=True):
            before = processor.tokenizer.decode(sample.input_ids[:first].tolist())
            assert before.count(" ?") == turn
