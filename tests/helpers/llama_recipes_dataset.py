"""A custom dataset in the shape of llama-recipes' published example: load, thread, tokenize with map, return a Dataset.

There, `OpenAssistant/oasst1` comes from the hub; here, messages of the same columns are made in place.
"""

import copy
import itertools

import datasets

B_INST, E_INST = "[INST]", "[/INST]"


def tokenize_dialog(dialog, tokenizer):
    prompt_tokens = [
        tokenizer.encode(
            f"{tokenizer.bos_token}{B_INST} {prompt['content'].strip()} {E_INST}", add_special_tokens=False
        )
        for prompt in dialog[::2]
    ]
    answer_tokens = [
        tokenizer.encode(f"{answer['content'].strip()} {tokenizer.eos_token}", add_special_tokens=False)
        for answer in dialog[1::2]
    ]
    dialog_tokens = list(itertools.chain.from_iterable(zip(prompt_tokens, answer_tokens, strict=True)))
    labels_tokens = [len(c) * [-100] if i % 2 == 0 else c for i, c in enumerate(dialog_tokens)]
    combined_tokens = {
        "input_ids": list(itertools.chain(*dialog_tokens)),
        "labels": list(itertools.chain(*labels_tokens)),
    }
    return dict(combined_tokens, attention_mask=[1] * len(combined_tokens["input_ids"]))


def get_custom_dataset(dataset_config, tokenizer, split):
    messages = []
    for number in range(12 if split == "train" else 4):
        root, reply = f"{split}-{number}", f"{split}-{number}-reply"
        messages.append({"message_id": root, "parent_id": None, "role": "prompter", "text": f"Is {number} a number?"})
        messages.append({"message_id": reply, "parent_id": root, "role": "assistant", "text": f"Yes, {number} is."})
    dataset = datasets.Dataset.from_list(messages)
    nodes = {}

    def add_reply(message):
        nodes.setdefault(message["parent_id"], []).append(message)
        return message

    dataset = dataset.map(add_reply, load_from_cache_file=False)

    def follow(thread, message_id):
        replies = nodes.get(message_id, [])
        if not replies:
            return [thread]
        return [
            whole
            for reply in replies
            for whole in follow(
                [*copy.copy(thread), {"role": reply["role"], "content": reply["text"]}], reply["message_id"]
            )
        ]

    def get_threads(batch):
        roots = [m for m, p in zip(batch["message_id"], batch["parent_id"], strict=True) if p is None]
        texts = dict(zip(batch["message_id"], batch["text"], strict=True))
        return {"thread": [t for r in roots for t in follow([{"role": "prompter", "content": texts[r]}], r)]}

    dataset = dataset.map(get_threads, batched=True, remove_columns=list(dataset.features), load_from_cache_file=False)
    return dataset.map(lambda row: tokenize_dialog(row["thread"], tokenizer), remove_columns=list(dataset.features))
