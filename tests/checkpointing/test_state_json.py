"""Every field of a checkpoint's state.json, and its random states, are checked before any of them is used."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from checkpointing.state_json import MAY_BE_MISSING, SCHEMA, WHOLE, StateError, check_state, read_state
from checkpointing.stored_state import open_state
from checkpointing.train_state import TrainState
from run_folder.checkpoint_folder import checkpoints, checksum, listed_files
from tests.helpers.checkpoints import forget_marks
from tests.helpers.processes import ProcessGroup
from tests.helpers.refusals import contents, error_lines
from tests.helpers.resuming import flags_of, results
from utils.errors import ConfigError
from utils.seeding import checked_rng_state, rng_state

PLAIN = ["--run_validation", "False", "--save_model", "False"]
NAN, INFINITE = float("nan"), float("inf")
BAD: list[Any] = [None, True, -1, 1.5, NAN, INFINITE, 10**30, 10**400, "x", "", [], [1], {}, {"a": {}}]


@pytest.fixture(scope="module")
def run(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An optimizer whose states hold numbers beside tensors."""
    folder = tmp_path_factory.mktemp("state") / "run"
    process_group.train(flags_of(tiny_model, folder, *PLAIN, "--optimizer", "anyprecision"), 2)
    return folder


def newest(run: Path) -> Path:
    return checkpoints(run / "checkpoints")[0]


@pytest.fixture
def values(run: Path) -> dict[str, Any]:
    return read_state(newest(run))


def forge(folder: Path, name: str, data: bytes) -> None:
    """Write a file that COMPLETE agrees with."""
    (folder / name).write_bytes(data)
    files = listed_files(folder) | {name: checksum(folder / name)}
    (folder / "COMPLETE").write_text(json.dumps({"files": files}))


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict) and (*path, name) not in SCHEMA:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def test_what_a_run_writes_passes_and_every_field_of_it_has_a_kind(values: dict[str, Any]) -> None:
    """Of the settings only those that are used as they are; the schedule is at the step, and nothing else of it is."""
    assert values["optimizer_numbers"]
    known = SCHEMA | MAY_BE_MISSING
    assert [path for path in leaves(values) if path not in known and path[0] not in ("settings", "scheduler")] == []
    assert {path[1] for path in known if path[0] == "state"} == set(TrainState().to_dict())


@pytest.mark.parametrize("path", [*SCHEMA, *MAY_BE_MISSING, ("settings",), ("state",)], ids=".".join)
def test_every_field_is_what_it_must_be_or_named(path: tuple[str, ...], values: dict[str, Any]) -> None:
    kind = (SCHEMA | MAY_BE_MISSING).get(path)
    values["loss_scaler"] = {"scale": 1024.0, "growth_tracker": 3}
    values["packed_weights"] = {"linear": 300, "experts": 700}
    check_state(values)
    *above, name = path
    for bad in [*BAD, "missing"]:
        spoilt = copy.deepcopy(values)
        inner = spoilt
        for part in above:
            inner = inner[part]
        if bad == "missing":
            del inner[name]
            if path in MAY_BE_MISSING and path[:-1] not in WHOLE:
                check_state(spoilt)
                continue
        else:
            inner[name] = bad
            if kind is not None and kind.holds(bad):
                continue
        with pytest.raises(StateError, match=r"^state\.json: ") as caught:
            check_state(spoilt)
        assert (".".join(path) in str(caught.value)) or (name in str(caught.value)), (bad, str(caught.value))
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"state"', "[" * 100_000, '{"a":' * 100_000, "1" * 5000])
def test_what_is_no_table_of_fields_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(StateError, match=r"^state\.json"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_of_epoch": 10**9}, "state.step_of_epoch is 1000000000, and state.step 8, which cannot both be"),
        ({"epoch": 9}, "state.epoch is 9"),
        ({"num_tokens": 3}, "state.num_tokens is 3"),
        ({"best_step": 9}, "state.best_step is 9"),
        ({"best_eval_loss": 0.5}, "state.best_eval_loss is 0.5, and state.best_step 0"),
        ({"step": 9}, "scheduler.last_epoch is 8, and state.step 9"),
        ({"epoch": 2, "step_of_epoch": 0, "epoch_end_due": True}, "state.epoch_end_due is true"),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    changes: dict[str, Any], said: str, values: dict[str, Any]
) -> None:
    values["state"] |= changes
    with pytest.raises(StateError, match=re.escape(said)):
        check_state(values)


def test_numbers_of_the_optimizer_are_checked(values: dict[str, Any]) -> None:
    parameter = next(iter(values["optimizer_numbers"]))
    for bad in ({"step": 9}, {"step": -1}, {"step": "1"}, {"beta": NAN}, [], 3, {"step": {}}):
        values["optimizer_numbers"][parameter] = bad
        with pytest.raises(StateError, match=rf"^state\.json: optimizer_numbers\.{re.escape(parameter)}"):
            check_state(values)


def test_a_run_does_not_go_on_from_a_state_that_is_none(
    run: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """It takes the checkpoint before; where there is none, it is refused, in a line, and nothing is written."""
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    values = json.loads((newest(copied) / "state.json").read_bytes())
    values["state"]["step"] = 10**30
    forge(newest(copied), "state.json", json.dumps(values).encode())
    given = flags_of(tiny_model, copied, *PLAIN, "--optimizer", "anyprecision", "--resume", "auto")
    outcome = process_group.train(given, 2)[0]
    said = "is damaged: state.json: state.step is about 10^30, and must be a whole number from 0 to 1000000000"
    assert said in outcome.stdout
    assert "after step 6" in outcome.stdout
    assert results(copied) == results(run)


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_files_beside_it_are_checked_too(
    run: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Each is refused on both ranks in one line, with nothing written; also where no file has a mark."""
    whole = Path(shutil.copytree(newest(run), tmp_path / "unmarked/step-00000008"))
    forget_marks(whole)
    values = json.loads((whole / "state.json").read_bytes())
    numbers = json.dumps(values | {"optimizer_numbers": {"x": {"step": 1}}}).encode()
    fewer_data = ["--split_slice", "20%", "--resume_anyway"]
    for name, data, flags, said in (
        ("rng-00001.json", b"PK", [], "rng-00001.json holds no random states"),
        ("rng-00001.json", b'{"torch": [1e99], "numpy": 3}', [], "rng-00001.json holds no random states"),
        ("state.json", numbers, [], "optimizer_numbers.x"),
        ("state.json", (whole / "state.json").read_bytes(), fewer_data, "and an epoch of these data has"),
        ("state.safetensors", b"PK", [], "state.safetensors cannot be read"),
        ("rank-00000.safetensors", save({"model.a": torch.zeros(2)}), [], "missing: "),
        ("link", b"", [], "COMPLETE lists 'state.json', which leads outside the folder"),
    ):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        alone = Path(shutil.copytree(whole, folder / "step-00000008"))
        if name == "link":
            (alone / "state.json").rename(folder / "state.json")
            (alone / "state.json").symlink_to(folder / "state.json")
        else:
            forge(alone, name, data)
        before = contents(tmp_path)
        given = [*PLAIN, "--optimizer", "anyprecision", "--max_train_step", "9", "--resume", str(alone), *flags]
        outcomes = process_group.run(flags_of(tiny_model, tmp_path / "out", *given), 2)
        assert [outcome.status for outcome in outcomes] == [2, 2], outcomes[0].stderr
        (line,) = error_lines(outcomes[0].stderr)
        assert said in line
        assert "; " in line
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK", "state.pt cannot be read"),
        (pickled([torch.zeros(2)]), "state.pt holds no tensors by their names"),
        (pickled({"model.a": 3}), "state.pt: model.a is no tensor with its values"),
    ],
)
def test_files_of_earlier_versions_are_checked_too(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        open_state(tmp_path, sent=False)


def test_random_states_that_are_none_are_refused() -> None:
    """numpy would read beyond its numbers at a place that is none."""
    whole = rng_state()
    assert checked_rng_state(whole) is whole
    name, keys, position, *rest = whole["numpy"]
    bad: dict[str, list[Any]] = {
        "python": [None, [3, [1, 2], None], [3, ["x"] * 625, None], [1], [3, [10**30] * 625, None]],
        "numpy": [
            None,
            [name, keys, 10**6, *rest],
            [name, keys, -1, *rest],
            [name, keys[:5], position, *rest],
            [name, keys - 2**33, position, *rest],
            [name, "keys", position, *rest],
            ["other", keys, position, *rest],
        ],
        "torch": [None, [], torch.zeros(3), torch.zeros(5056, dtype=torch.uint8)],
        "cuda": [3],
    }
    for generator, states in bad.items():
        for state in states:
            with pytest.raises(ValueError, match=r"\w"):
                checked_rng_state(whole | {generator: state})
        if generator != "cuda":
            with pytest.raises(ValueError, match=f"'{generator}' is missing"):
                checked_rng_state({other: state for other, state in whole.items() if other != generator})
