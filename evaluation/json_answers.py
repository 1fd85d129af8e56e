"""JSON: whether an answer parses, fits a schema, and says what its reference says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from configs.training import TrainConfig
from evaluation.measure import Measure, Scorer
from utils.errors import ConfigError, in_one_line
from utils.optional_packages import check_installed

FLAG = "--eval_json_schema"


class JsonAnswers(Measure):
    """100 or 0: `json_valid`, the text is JSON and fits the schema, if there is one; `json_match`, it holds the values
    of the reference, in any order of keys and with any white space."""

    NAME = "json"
    NAMES = ("json_valid", "json_match")
    IS_DEFAULT = False

    def __init__(self, schema: str | None = None) -> None:
        self._schema = schema

    def with_settings(self, train: TrainConfig) -> JsonAnswers:
        return JsonAnswers(train.eval_json_schema)

    def make_scorer(self) -> Scorer:
        """
        Raises:
            ConfigError: if the schema cannot be read or is none, or jsonschema is not installed.
        """
        return partial(_score, None if self._schema is None else _validator(self._schema))


_NONE = object()


def _score(validator: Any, reference: str, text: str) -> dict[str, float]:
    value, wanted = _parsed(text), _parsed(reference)
    is_valid = value is not _NONE and (validator is None or validator.is_valid(value))
    # As text: to ==, 1 is True.
    says_the_same = value is not _NONE and wanted is not _NONE and _sorted(value) == _sorted(wanted)
    return {"json_valid": 100.0 * is_valid, "json_match": 100.0 * says_the_same}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NONE


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _validator(file: str) -> Any:
    check_installed(FLAG, "jsonschema")
    from jsonschema.exceptions import SchemaError  # optional
    from jsonschema.validators import validator_for

    try:
        schema = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, SchemaError) as error:
        raise ConfigError(f"{FLAG}: {file} holds no JSON schema ({in_one_line(error)}); give another file") from error
    return kind(schema)
