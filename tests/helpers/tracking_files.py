"""What trackers and the profiler wrote, read back."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BLOCK = 32768  # of a LevelDB log, whose format .wandb files have


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Values by name and step."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def tensorboard_hyperparameters(folder: Path) -> dict[str, Any]:
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = EventAccumulator(str(folder)).Reload().PluginTagToContent("hparams")[SESSION_START_INFO_TAG]
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}


def wandb_records(folder: Path) -> list[Any]:
    """The records of the one offline run below RUN/wandb, as protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [Record.FromString(data) for data in _log_records(file.read_bytes())]


def _log_records(data: bytes) -> list[bytes]:
    """Records of a LevelDB log after W&B's seven bytes: each in parts that end by a block, the last is 1 or 4."""
    records, parts, place = [], b"", 7
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:  # too short for a header: the rest of a block is padding
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            records.append(parts)
            parts = b""
    assert not parts, "a torn record"
    return records


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def trace_events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as lines:
        return json.load(lines)["traceEvents"]
