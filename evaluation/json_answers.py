"""JSON: whether an answer parses, fits a schema, and says what its reference says."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    is_valid = value is not _NONE and (validator is None or _fits(validator, value))
    # As text: to ==, 1 is True.
    says_the_same = value is not _NONE and wanted is not _NONE and _sorted(value) == _sorted(wanted)
    return {"json_valid": 100.0 * is_valid, "json_match": 100.0 * says_the_same}


def _fits(validator: Any, value: Any) -> bool:
    from referencing.exceptions import Unresolvable  # optional

    try:
        return bool(validator.is_valid(value))
    except RecursionError:
        return False
    except Unresolvable as error:
        raise ConfigError(
            f"{FLAG}: the schema refers to what is not in it ({in_one_line(error)}); put it there"
        ) from error


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text, parse_float=_number, parse_constant=_no_number)
        _sorted(value)  # which is as deep
        return value
    except (ValueError, RecursionError):
        return _NONE


def _number(text: str) -> float:
    """The number, 1.0 as 1: JSON has one kind of numbers."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")  # but Python takes it


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _validator(file: str) -> Any:
    check_installed(FLAG, "jsonschema")
    from jsonschema.exceptions import SchemaError  # optional
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    try:
        schema = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, SchemaError) as error:
        raise ConfigError(f"{FLAG}: {file} holds no JSON schema ({in_one_line(error)}); give another file") from error
    _check_references(schema, file)
    # Without this registry jsonschema would download what a schema refers to.
    return kind(schema, registry=REGISTRY)


def _check_references(schema: Any, file: str) -> None:
    """
    Raises:
        ConfigError: if the schema refers to what is not in its file.
    """
    from jsonschema_specifications import REGISTRY  # optional, as these are
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root: Any = Resource.from_contents(schema, default_specification=DRAFT202012)
    try:
        _follow_references(root, REGISTRY.resolver_with_root(root))
    except Unresolvable as error:
        raise ConfigError(
            f"{FLAG}: {file} refers to {error.ref}, which is not in it, and nothing is downloaded; put it there, "
            "under $defs"
        ) from error


def _follow_references(resource: Any, resolver: Any) -> None:
    """Look up each `$ref` of a schema and of its parts, from the `$id` that it is under."""
    contents = resource.contents
    if isinstance(contents, Mapping) and isinstance(contents.get("$ref"), str):
        resolver.lookup(contents["$ref"])
    for part in resource.subresources():
        _follow_references(part, resolver.in_subresource(part))
