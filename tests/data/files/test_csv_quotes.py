"""Quotes in CSV and TSV files: a cell in quotes is read, and what may be a quote as text is refused by its line."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from configs.flags import parse_flags
from configs.formats import DATASETS
from data.files.csv_files import csv_rows
from data.files.csv_grammar import Quoting
from data.splits.reading import load_split
from utils.errors import ConfigError

EITHER = pytest.mark.parametrize("streaming", [False, True])


def pairs(file: Path, quoting: Quoting = "auto") -> list[Any]:
    """The cells of each row, or what is wrong with it, without the file."""
    rows = csv_rows(file, quoting)
    return [
        list(row.value.values()) if row.value else (row.problem or "").removeprefix(f"{file}, ").partition(";")[0]
        for row in rows
    ]


def write(folder: Path, *lines: str, ending: str = ".csv") -> Path:
    file = folder / f"table{ending}"
    file.write_text("\n".join(["a,b" if ending == ".csv" else "a\tb", *lines]) + "\n")
    return file


def read(file: Path, **options: Any) -> list[dict[str, Any]]:
    config = DATASETS["samsum_dataset"](str(file), **options)
    return list(load_split("samsum_dataset", config, "train", text_columns=("a", "b")))


AFTER = "text after the closing quote of a cell"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['"Hi" she said,x'], f"line 3: {AFTER}"),
        (['x,"Hi" she said'], f"line 3: {AFTER}"),
        (['"He said \\"hi\\" to me",x'], f"line 3: {AFTER}"),
        (['"Hi" ,x'], f"line 3: {AFTER}"),
        (['q,"Yes', "r,s", '"t",u'], f"line 3: {AFTER} over 3 lines"),
        (['q,"Yes', 'r,No"'], "line 3: a quoted cell over 2 lines, each of which reads as a row of its own"),
        (
            ['"Yes,q', "r,s", 'No",t'],
            "line 3: a quoted cell over 3 lines, each of which reads as a row of its own",
        ),
        (['q,"Yes ""', 'r,"" No"'], "line 3: a quoted cell over 2 lines, each of which reads as a row of its own"),
        (["x,y,z"], "line 3: 3 cells and not 2"),
        (["x"], "line 3: 1 cells and not 2"),
    ],
)
@EITHER
def test_quotes_that_may_be_text_are_refused_by_their_line(
    lines: list[str], problem: str, streaming: bool, tmp_path: Path
) -> None:
    file = write(tmp_path, "first,1", *lines, "last,2")
    assert pairs(file) == [["first", "1"], problem, ["last", "2"]]
    with pytest.raises(ConfigError, match=rf"^--samsum_dataset.data_path: {file}, {problem}"):
        read(file, streaming=streaming)
    assert [row["a"] for row in read(file, streaming=streaming, skip_bad_rows=True)] == ["first", "last"]


def test_the_line_is_counted_as_editors_count_it(tmp_path: Path) -> None:
    file = write(tmp_path, '"one\ntwo",1', "", "x,y", "z", '"a" b,c')
    assert pairs(file)[-2:] == ["line 6: 1 cells and not 2", f"line 7: {AFTER}"]


@pytest.mark.parametrize(
    ("lines", "cells"),
    [
        (['"Anna: Lunch?\nTom: At noon!",x'], [["Anna: Lunch?\nTom: At noon!", "x"]]),
        (['"a, b\n\nc",x'], [["a, b\n\nc", "x"]]),
        (['"say ""hi""\nto, me, and",x'], [['say "hi"\nto, me, and', "x"]]),
        (['"""",""""""'], [['"', '""']]),
        (['5" disk,p"q"'], [['5" disk', 'p"q"']]),
        (['"",x'], [[None, "x"]]),
        (['"a, b","c, d"'], [["a, b", "c, d"]]),
    ],
)
def test_cells_that_are_quoted_well_are_read(lines: list[str], cells: list[Any], tmp_path: Path) -> None:
    assert pairs(write(tmp_path, *lines)) == cells


def test_a_cell_may_look_like_rows_by_chance_in_a_file_of_many_cells_with_lines(tmp_path: Path) -> None:
    dialogue, chance = '"Ann: Hi\nBob: Oh, hi, Ann",x', 'q,"Yes\nNo, thanks"'
    assert pairs(write(tmp_path, dialogue, chance))[1].startswith("line 4: a quoted cell over 2 lines")
    assert pairs(write(tmp_path, *[dialogue] * 20, chance))[20] == ["q", "Yes\nNo, thanks"]
    rows = "\n".join(f"line {number}, of a poem" for number in range(20))
    found = pairs(write(tmp_path, *[dialogue] * 20, f'q,"Yes\n{rows}"'))
    assert found[20] == "line 42: a quoted cell over 21 lines, each of which reads as a row of its own"


def test_quotes_as_text_and_as_cells_if_it_is_said_so(tmp_path: Path) -> None:
    lines = ('"Hi" she said\tx', 'q\t"Yes', 'r\tNo"', '"\ty')
    file = write(tmp_path, *lines, ending=".tsv")
    assert pairs(file, "none") == [line.split("\t") for line in lines]
    file = write(tmp_path, 'q,"Yes', 'r,No"')
    assert pairs(file, "double") == [["q", "Yes\nr,No"]]
    file.write_text('"a";b,c\n"x";1,2\n')
    assert pairs(file, "none") == [['"x";1', "2"]]


@EITHER
def test_the_flag_reaches_the_reader_and_is_refused_for_other_files(streaming: bool, tmp_path: Path) -> None:
    file = write(tmp_path, '"Hi" she said\t"x', ending=".tsv")
    argv = ["--model_name", "m", "--dataset", "samsum_dataset", "--samsum_dataset.quoting", "none"]
    config = parse_flags(argv).datasets["samsum_dataset"]
    assert config.quoting == "none"
    assert read(file, streaming=streaming, quoting="none") == [{"a": '"Hi" she said', "b": '"x'}]
    other = tmp_path / "rows.jsonl"
    other.write_text('{"a": "x", "b": "y"}\n')
    with pytest.raises(ConfigError, match=r"--samsum_dataset.quoting: is of .csv and .tsv files"):
        read(other, streaming=streaming, quoting="none")


@pytest.mark.parametrize("name", ["a,b", '"a, as\ngiven, too",b'])
def test_a_mark_before_the_header_is_no_part_of_a_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(b"\xef\xbb\xbf" + name.encode() + b"\nx,y\n")
    (row,) = csv_rows(file)
    assert list((row.value or {}).values()) == ["x", "y"]
    assert "\ufeff" not in str(row.text)
    assert len(row.value or {}) == 2


def test_a_header_with_stray_quotes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text('"a" b,c\nx,y\n')
    assert pairs(file) == [f"line 1: {AFTER}"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_header_of_a_second_file_is_no_row(mark: str, tmp_path: Path) -> None:
    """As `cat` puts files together: it was learned."""
    file = write(tmp_path, "w,x", f"{mark}a,b", "y,z")
    assert pairs(file) == [["w", "x"], "line 3: the header again", ["y", "z"]]
    file.write_text("a\nx\na\n")
    assert pairs(file) == [["x"], ["a"]], "one word may be a text"


TEXTS = st.text(st.sampled_from("ab ,\t\"\n'\\é"), max_size=8)


@drawn(rows=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=12), quotes=st.sampled_from([0, 1, 2]))
@settings(max_examples=80, deadline=None)
def test_what_pythons_writer_writes_is_read_as_it_was(rows: list[tuple[str, str, str]], quotes: int) -> None:
    written = io.StringIO()
    writer = csv.writer(written, quoting=quotes, lineterminator="\n")  # minimal, all, nonnumeric
    writer.writerows([("a", "b", "c"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.csv"
        file.write_text(written.getvalue(), newline="")
        expected = [[cell or None for cell in row] for row in rows]
        assert pairs(file, "double") == expected
        found = pairs(file)
        assert found == expected or any("reads as a row of its own" in str(row) for row in found)
