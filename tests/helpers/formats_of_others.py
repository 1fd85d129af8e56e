"""Rows in the documented formats of other tools, written for these tests, and what is learned of them.

The keys are the first two cells of the table in docs/datasets.md.
"""

from __future__ import annotations

import json

from tests.helpers.formats_of_axolotl import AXOLOTL
from tests.helpers.row_forms import (
    ALPACA,
    ANSWERED,
    ASKED,
    CALL,
    CALL_AS_TEXT,
    CALLED,
    CHAT,
    EARLIER,
    EOS,
    FUNCTION,
    RANKED,
    RESULT,
    SAID,
    SHAREGPT,
    TASK,
    TOOL,
    WRONG,
    Format,
    labelled,
    model,
    part,
    refused,
    sharegpt,
    taken,
    user,
)

TRL = {
    "`text`": taken("The sky is blue.", end=EOS, text="The sky is blue."),
    "`messages`": taken("Blue.", "Blue, too.", messages=CHAT),
    "`prompt` alone": refused(prompt="The sky is"),
    "`prompt` alone, turns": refused(prompt=ASKED),
    "`prompt`, `completion`": taken(" blue.", end=EOS, prompt="The sky is", completion=" blue."),
    "`prompt`, `completion`, turns": taken("Blue, too.", prompt=CHAT[:3], completion=CHAT[3:]),
    "`prompt`, `chosen`, `rejected`": taken("Blue.", prompt="Sky?", **RANKED),
    "`prompt`, `chosen`, `rejected`, turns": taken("Blue.", prompt=ASKED, chosen=SAID, rejected=WRONG[1:]),
    "`chosen`, `rejected`, texts with the prompt": taken(
        "The sky is blue.", end=EOS, chosen="The sky is blue.", rejected="The sky is green."
    ),
    "`chosen`, `rejected`, turns with the prompt": taken("Blue.", chosen=ANSWERED, rejected=WRONG),
    "`prompt`, `completion`, `label`": labelled(
        {"prompt": "Sky?", "completion": "Blue."}, {"prompt": "Sky?", "completion": "Green."}
    ),
    "`prompt`, `completion`, `label`, turns": labelled(
        {"prompt": ASKED, "completion": SAID}, {"prompt": ASKED, "completion": WRONG[1:]}
    ),
    "`prompt`, `completions`, `labels`": refused(
        prompt="9.8 or 9.11?", completions=["0.8", "9.8"], labels=[True, True]
    ),
    "`messages` with `tool_calls`, `tools`": taken(
        CALLED,
        "No.",
        messages=[
            user("Rain?"),
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            RESULT,
            model("No."),
        ],
        tools=[TOOL],
    ),
    "`messages` with a `developer` and `thinking`, `chat_template_kwargs`": taken(
        "<think>It scatters.</think>Blue.",
        messages=[{"role": "developer", "content": "Be brief."}, *ASKED, model("Blue.", thinking="It scatters.")],
        chat_template_kwargs={"reasoning_effort": "low", "model_identity": "You are a painter."},
    ),
    "`messages`, `images`": refused(messages=ANSWERED, images=["sky.png"]),
}

WITH_HISTORY = {"instruction": "Sky?", "output": "Blue.", "system": "Be brief.", "history": EARLIER}
LLAMA_FACTORY = {
    "`instruction`, `input`, `output`": taken("Blue.", end=EOS, **ALPACA),
    "`instruction`, `input`, `output`, by the model's template": taken("Blue.", **ALPACA),
    "`instruction`, `output`, `system`, `history`": taken("Hello.", "Yellow.", "Blue.", end=EOS, **WITH_HISTORY),
    "`instruction`, `output`, `system`, `history`, by the model's template": taken(
        "Hello.", "Yellow.", "Blue.", **WITH_HISTORY
    ),
    "`text`": taken("A document.", end=EOS, text="A document."),
    "`instruction`, `input`, `history`, `chosen`, `rejected`": taken("Blue.", **TASK, history=EARLIER, **RANKED),
    "`instruction`, `output`, `kto_tag`": labelled(
        {"instruction": "Sky?", "output": "Blue."}, {"instruction": "Sky?", "output": "Green."}, "kto_tag"
    ),
    "`instruction`, `output`, `images`": refused(instruction="<image>What is it?", output="Blue.", images=["a.png"]),
    "`conversations`, `system`": taken("Blue.", "Blue, too.", conversations=SHAREGPT, system="Be brief."),
    "`conversations` with `function_call` and `observation`, `tools` as JSON": taken(
        CALLED,
        "No.",
        conversations=[
            {"from": "human", "value": "Rain?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "dry"},
            {"from": "gpt", "value": "No."},
        ],
        tools=json.dumps([FUNCTION]),
    ),
    "`conversations`, `chosen`, `rejected`": taken(
        "Blue, too.",
        conversations=SHAREGPT[:3],
        chosen={"from": "gpt", "value": "Blue, too."},
        rejected={"from": "gpt", "value": "Green."},
    ),
    "`conversations`, `kto_tag`": labelled(
        {"conversations": sharegpt("Sky?", "Blue.")}, {"conversations": sharegpt("Sky?", "Green.")}, "kto_tag"
    ),
    "`conversations`, `images`": refused(conversations=sharegpt("<image>Sky?", "Blue."), images=["a.png"]),
    "`conversations`, `videos`": refused(conversations=sharegpt("<video>Sky?", "Blue."), videos=["a.mp4"]),
    "`conversations`, `audios`": refused(conversations=sharegpt("<audio>Sky?", "Blue."), audios=["a.wav"]),
    "`messages`": taken("Blue.", "Blue, too.", messages=[{"role": "system", "content": "Be brief."}, *CHAT]),
    "`conversations` with other roles (tags)": taken(
        "Blue.", conversations=[{"from": "critic", "value": "Sky?"}, {"from": "writer", "value": "Blue."}]
    ),
    "`conversations` with other keys (tags)": refused(conversations=[{"speaker": "human", "says": "Sky?"}]),
    "`messages` with parts that have a `value`, and `loss_weight`": taken(
        "Blue, too.",
        messages=[
            {"role": turn["role"], "content": [{"type": "text", "value": turn["content"]}], "loss_weight": weight}
            for turn, weight in zip(CHAT, (0.0, 0.0, 0.0, 1.0), strict=True)
        ],
    ),
    "`messages` with parts `reasoning` and `tool_call`": taken(
        f"<think>I look.</think>Let me see.{CALLED}",
        messages=[
            user([{"type": "text", "value": "Rain?"}]),
            model(
                [
                    {"type": "reasoning", "value": "I look."},
                    {"type": "text", "value": "Let me see."},
                    {"type": "tool_call", "value": json.dumps(CALL)},
                ]
            ),
        ],
    ),
    "`messages` with parts `image_url`": refused(
        messages=[user([{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "Who?"}]), model("Ann.")]
    ),
    "`chosen_messages`, `rejected_messages`": taken(
        "Blue.",
        chosen_messages=[ASKED[0] | {"loss_weight": 0.0}, SAID[0] | {"loss_weight": 1.0}],
        rejected_messages=[ASKED[0] | {"loss_weight": 0.0}, WRONG[1] | {"loss_weight": 1.0}],
    ),
}

OPENAI = {
    "`messages`": taken("Blue.", "Blue, too.", messages=CHAT),
    "`messages` with `weight`": taken(
        "Blue, too.", messages=[CHAT[0], CHAT[1] | {"weight": 0}, CHAT[2], CHAT[3] | {"weight": 1}]
    ),
    "`messages` with `tool_calls`, `tools`, `parallel_tool_calls`": taken(
        CALLED,
        messages=[
            user("Rain?"),
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": CALL_AS_TEXT}]},
        ],
        tools=[TOOL],
        parallel_tool_calls=False,
    ),
    "`messages` with `function_call`, `functions`": taken(
        CALLED, messages=[user("Rain?"), {"role": "assistant", "function_call": CALL_AS_TEXT}], functions=[FUNCTION]
    ),
    "`messages` with parts `image_url`": refused(
        messages=[user([{"type": "image_url", "image_url": {"url": "a.png"}}, part("Who?")]), model("Ann.")]
    ),
    "`input`, `preferred_output`, `non_preferred_output`": taken(
        "Blue.",
        input={"messages": ASKED, "tools": [], "parallel_tool_calls": True},
        preferred_output=SAID,
        non_preferred_output=WRONG[1:],
    ),
    "`messages` that end with a question, `reference_answer` (reinforcement)": refused(
        messages=ASKED, reference_answer="Blue."
    ),
    "`prompt`, `completion` (older)": taken(" blue.", end=EOS, prompt="The sky is", completion=" blue."),
}

LLAMA_RECIPES = {
    "`dialogue`, `summary` (samsum)": taken(
        "It is noon.", end=EOS, dialogue="Ann: Noon?\nBob: Yes.", summary="It is noon."
    ),
    "`input`, `target` (grammar, CSV)": taken("It falls.", end=EOS, input="It fall.", target="It falls."),
    "`instruction`, `input`, `output` (alpaca)": taken("Blue.", end=EOS, **ALPACA),
    "a file with `get_custom_dataset` (custom, openassistant)": Format(
        [], [[f"Yes, {number} is. {EOS}"] for number in range(12)]
    ),
    "`message_id`, `parent_id`, `text`, `role` (rows of openassistant)": refused(
        message_id="a", parent_id=None, text="Sky?", role="prompter"
    ),
}

FORMATS: dict[tuple[str, str], Format] = {
    (tool, form): rows
    for tool, forms in (
        ("TRL", TRL),
        ("LLaMA-Factory", LLAMA_FACTORY),
        ("Axolotl", AXOLOTL),
        ("OpenAI", OPENAI),
        ("llama-recipes", LLAMA_RECIPES),
    )
    for form, rows in forms.items()
}
