"""What is wrong with a JSON file: where it stops being JSON, or is nested so deeply that its reader would crash."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

MAX_DEPTH = 60
"""Arrow refuses 65. At 5,000 its reader takes minutes for one row; at 50,000 it ends the process."""

_SCANNED_BYTES = 2**24  # of a stream, which is read row by row
_NO_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\[\]{}"]++', re.DOTALL)
_STEPS = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def nested_too_deeply(file: Path, *, streams: bool) -> str:
    """Where a file is nested too deeply: `FILE, line N: reason`; empty if it is not, or is no JSON file.

    Args:
        streams: only its beginning is looked at.
    """
    if file.suffix not in (".json", ".jsonl"):
        return ""
    with open(file, "rb") as lines:
        is_one_value = file.suffix == ".json" and lines.read(2**16).lstrip()[:1] == b"["
        lines.seek(0)
        num_bytes = 0
        for number, line in enumerate([lines.read()] if is_one_value else lines, 1):
            # Counting is quick, and what is in strings only adds to it.
            if line.count(b"[") + line.count(b"{") > MAX_DEPTH and (depth := _depth(line)) > MAX_DEPTH:
                where = file if is_one_value else f"{file}, line {number}"
                return f"{where}: JSON that is nested {depth:,} deep, and {MAX_DEPTH} is the most that can be read"
            num_bytes += len(line)
            if streams and num_bytes > _SCANNED_BYTES:
                break
    return ""


def _depth(text: bytes) -> int:
    brackets = np.frombuffer(_NO_BRACKETS.sub(b"", text), dtype=np.uint8)
    return int(np.cumsum(_STEPS[brackets]).max(initial=0))


def broken_json(file: Path) -> str:
    """Where a file stops being JSON: `FILE, line N: reason`; empty if it is all JSON."""
    try:
        if file.suffix == ".json":
            text = file.read_text(encoding="utf-8")
            if text.lstrip()[:1] == "[":
                json.loads(text)
                return ""
        if file.suffix in (".json", ".jsonl"):
            with open(file, encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        value = json.loads(line) if line.strip() else {}
                    except json.JSONDecodeError as error:
                        return f"{file}, line {number}: broken JSON ({error.msg}, column {error.colno})"
                    if not isinstance(value, dict):
                        return f"{file}, line {number}: not a JSON object but {type(value).__name__}"
    except json.JSONDecodeError as error:
        return f"{file}, line {error.lineno}: broken JSON ({error.msg}, column {error.colno})"
    except UnicodeDecodeError as error:
        return f"{file}: not UTF-8 ({error.reason} at byte {error.start})"
    return ""
