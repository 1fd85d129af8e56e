"""Rows in Axolotl's documented formats, and what is learned of them; keys as in `formats_of_others`."""

from __future__ import annotations

import json

from tests.helpers.row_forms import (
    ALPACA,
    ANSWERED,
    ASKED,
    CALL_AS_TEXT,
    CALLED,
    CHAT,
    END,
    EOS,
    FUNCTION,
    RANKED,
    RESULT,
    SAID,
    SCHEMA,
    SHAREGPT,
    TASK,
    WRONG,
    Format,
    labelled,
    model,
    part,
    refused,
    taken,
    user,
)

DETAILS = [
    {"begin_offset": 0, "end_offset": 8, "train": False},
    {"begin_offset": 9, "end_offset": 18, "train": True},
    {"begin_offset": 19, "end_offset": 30, "train": False},
]
WELL = "I'm doing very well, thank you!"
AXOLOTL_CHATS = {
    "`messages` (chat_template)": taken("Blue.", "Blue, too.", messages=CHAT),
    "`messages`, the last answer alone (`roles_to_train:`)": taken("Blue, too.", messages=CHAT),
    "`conversations` with `from` and `value` (sharegpt)": taken("Blue.", "Blue, too.", conversations=SHAREGPT),
    "`conversations` with `role` and `value` (pygmalion)": taken(
        "Blue.", conversations=[{"role": "human", "value": "Sky?"}, {"role": "bot", "value": "Blue."}]
    ),
    "`messages`, `tools` with `arguments` and `parameters` as JSON": taken(
        CALLED,
        "No.",
        messages=[
            user("Rain?"),
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": CALL_AS_TEXT}]},
            RESULT | {"tool_call_id": "c1"},
            model("No."),
        ],
        tools=[{"type": "function", "function": FUNCTION | {"parameters": json.dumps(SCHEMA)}}],
    ),
    "`conversations` with `train`": taken(
        "Blue, too.",
        conversations=[turn | {"train": number == 3} for number, turn in enumerate(SHAREGPT)],
    ),
    "`conversations` with `train` of a person's turn": refused(
        conversations=[turn | {"train": True} for turn in SHAREGPT]
    ),
    "`conversations` with `train_detail`": Format(
        [{"conversations": [SHAREGPT[0], {"from": "gpt", "value": WELL, "train_detail": DETAILS}]}],
        [[" very well", END]],
    ),
    "`messages` with parts that have `train` or `weight`": Format(
        [
            {"messages": [user("2+2?"), model([part("Let me think...", train=False), part(" It is 4.", train=True)])]},
            {"messages": [user("2+2?"), model([part("Let me think...", weight=0), part(" It is 4.")])]},
        ],
        [[f" It is 4.{END}"]] * 2,
    ),
    "`messages` with `reasoning_content` in parts that have `train`": Format(
        [
            {
                "messages": [
                    user("2+2?"),
                    model(
                        [part("4.", train=True)],
                        reasoning_content=[part("Perhaps 5.", train=False), part(" No, 4.", train=True)],
                    ),
                ]
            }
        ],
        [["<think>", f" No, 4.</think>4.{END}"]],
    ),
    "`messages` with `<think>` in the text (split_thinking)": taken(
        "<think>It scatters.</think>Blue.", messages=[*ASKED, model("<think>It scatters.</think>Blue.")]
    ),
    "`messages` with parts `image`": refused(
        messages=[user([{"type": "image", "url": "a.png"}, part("What is it?")]), model("A bee.")]
    ),
}

STORY = {"article": "The sky is blue.", "question": "Which colour?", "answer": "Blue."}
AXOLOTL_TASKS = {
    "`instruction`, `input`, `output` (alpaca)": taken("Blue.", end=EOS, **ALPACA),
    "`question`, `category`, `answer` (jeopardy, alpaca_chat.load_qa)": taken(
        "Blue.", end=EOS, question="Sky?", category="Colours", answer="Blue."
    ),
    "`INSTRUCTION`, `RESPONSE` (oasst)": taken("Blue.", INSTRUCTION="Sky?", RESPONSE="Blue."),
    "`instruction`, `input`, `response` (gpteacher, alpaca_chat, load_concise)": taken(
        "Blue.", end=EOS, **TASK, response="Blue."
    ),
    "`instruction`, `input`, `output`, `reflection`, `corrected` (reflection)": taken(
        "Blue.", end=EOS, **TASK, output="Green.", reflection="Not green.", corrected="Blue."
    ),
    "`question`, `choices`, `solution`, `explanation` (explainchoice, concisechoice)": refused(
        question="Sky?", choices=["Green", "Blue"], solution="Blue", explanation="It scatters."
    ),
    "`article`, `summary` (summarizetldr)": taken("It is blue.", end=EOS, article="The sky.", summary="It is blue."),
    "`message_1`, `message_2` (load_camel_ai)": taken("Blue.", message_1="Sky?", message_2="Blue."),
    "`system_prompt`, `question`, `response` (load_open_orca)": taken(
        "Blue.", system_prompt="Be brief.", question="Sky?", response="Blue."
    ),
    "`article`, `question`, `answer` (context_qa)": taken("Blue.", end=EOS, **STORY),
    "`context`, `question`, `answer` (context_qa.load_v2)": taken(
        "Blue.", end=EOS, context="The sky is blue.", question="Which colour?", answer="Blue."
    ),
    "`article`, `unanswerable_question` (context_qa.load_404)": refused(
        article="The sky.", unanswerable_question="Why?"
    ),
    "`instruction`, `revision` (creative_acr.load_answer)": taken(
        "Blue.", end=EOS, instruction="Sky?", revision="Blue."
    ),
    "`scores`, `critiques`, `instruction`, `answer` (creative_acr.load_critique)": refused(
        scores="3", critiques="Too long.", instruction="Sky?", answer="Blue."
    ),
    "`scores`, `critiques`, `instruction`, `answer`, `revision` (creative_acr.load_revise)": taken(
        "Blue.", end=EOS, scores="3", critiques="Wrong.", instruction="Sky?", answer="Green.", revision="Blue."
    ),
    "`prompt`, `generation` (metharme)": taken(" Blue.", end=EOS, prompt="Sky?", generation=" Blue."),
    "`system`, `input`, `output` with a format (custom)": taken(
        "Blue.", end=EOS, system="Be brief.", input="Sky?", output="Blue."
    ),
    "`text` (completion)": taken("first row", end=EOS, text="first row"),
    "`segments` (input_output)": Format(
        [
            {
                "segments": [
                    {"label": True, "text": "<s>Hello\n"},
                    {"label": True, "text": "hi there!. "},
                    {"label": False, "text": "goodbye "},
                    {"label": True, "text": "farewell</s>"},
                ]
            }
        ],
        [["<s>Hello\nhi there!. ", "farewell</s>"]],
    ),
    "`input_ids`, `attention_mask`, `labels`": Format(
        [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, -100, 7]}], [["#", "%"]]
    ),
    "`prompt`, `completions`, `labels` (stepwise_supervised)": refused(
        prompt="9.8 or 9.11?", completions=["0.8", "9.8"], labels=[True, False]
    ),
}

BRIEF = {"system": "Be brief."}
AXOLOTL_PREFERENCES = {
    "`system`, `instruction`, `chosen_response`, `rejected_response` (argilla)": taken(
        "Blue.", **BRIEF, instruction="Sky?", chosen_response="Blue.", rejected_response="Green."
    ),
    "`chosen`, `rejected`, turns (argilla_chat)": taken("Blue.", chosen=ANSWERED, rejected=WRONG),
    "`system`, `input`, `chosen`, `rejected` (icr, bradley_terry)": taken("Blue.", **BRIEF, input="Sky?", **RANKED),
    "`system`, `question`, `chosen`, `rejected` (intel)": taken("Blue.", **BRIEF, question="Sky?", **RANKED),
    "`system`, `prompt`, `chosen`, `rejected` (prompt_pairs, user_defined)": taken(
        "Blue.", **BRIEF, prompt="Sky?", **RANKED
    ),
    "`system`, `prompt`, `chosen`, `rejected`, turns (ultra, ORPO)": taken(
        "Blue.", **BRIEF, prompt="Sky?", chosen=ANSWERED, rejected=WRONG
    ),
    "`messages`, `chosen`, `rejected` (chat_template.default)": taken(
        "Blue.", messages=ASKED, chosen=SAID[0], rejected=WRONG[1]
    ),
    "`prompt`, `answers` with `rank` (nectar)": refused(prompt="Sky?", answers=[{"answer": "Blue.", "rank": 1}]),
    "`instruction`, `completion`, `label` (KTO, argilla)": labelled(
        {"instruction": "Sky?", "completion": "Blue."}, {"instruction": "Sky?", "completion": "Green."}
    ),
    "`question`, `completion`, `label` (KTO, intel)": labelled(
        {"question": "Sky?", "completion": "Blue."}, {"question": "Sky?", "completion": "Green."}
    ),
    "`completion`, `label`, all turns (KTO, argilla_chat)": labelled({"completion": ANSWERED}, {"completion": WRONG}),
    "`prompt`, `answer` (GRPO)": refused(prompt=ASKED, answer="Blue."),
}

AXOLOTL = AXOLOTL_CHATS | AXOLOTL_TASKS | AXOLOTL_PREFERENCES
