"""Rows of an interrupted run are used again; those of another run are not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvloom import KVLoomError
from kvloom_eval.scores.rows import Rows, check

ABOUT = {"model": "small", "seed": 0}


def row(number: int, by: str = "exact", **other: object) -> dict[str, object]:
    answers = {"right": [1], "exact": [0], "probability": [0.5], "nll": [0.5], "kl": [0.0], "chance": 0.5}
    return {"item": f"needle/512/{number}", "by": by, **answers, **other}


def test_rows_come_back(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(10), row(2), row(2, "int4")])
    again = Rows(file, ABOUT)
    assert [item for item, _ in again.of("exact", "needle/512")] == ["needle/512/2", "needle/512/10"]
    assert ("needle/512/2", "int4") in again and ("needle/512/10", "int4") not in again


def test_a_row_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(1), row(2)])
    file.write_text(file.read_text()[:-10])
    check(file, ABOUT)
    again = Rows(file, ABOUT)
    assert len(again) == 1
    again.add([row(2)])
    assert len(Rows(file, ABOUT)) == 2


def test_of_rows_with_other_ends_of_lines_only_the_one_that_was_cut_off_goes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(number) for number in range(20)])
    whole = file.read_bytes().replace(b"\n", b"\r\n")
    file.write_bytes(whole + b'{"item": "nee')
    assert len(Rows(file, ABOUT)) == 20
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "value", ["x", None, [], ["x"], [[]], [None], [1, 1], [-1e13], [float("inf")], -1, float("inf"), 2e12]
)
@pytest.mark.parametrize("name", ["right", "exact", "nll", "kl", "chance", "bits", "tokens"])
def test_what_is_no_number_in_a_row_is_refused(name: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(1, **{name: value})])
    with pytest.raises(KVLoomError, match="no file of rows"):
        check(file, ABOUT)


def test_rows_have_all_that_results_need(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    text = {"item": "text/512/1", "by": "exact", "nll": 1.5, "kl": 0.0, "same": 1.0}
    for whole, names in ((row(1), ("right", "kl", "chance")), (text, text)):
        file.unlink(missing_ok=True)
        Rows(file, ABOUT).add([whole])
        check(file, ABOUT)
        for name in names:
            file.unlink()
            Rows(file, ABOUT)
            file.write_text(
                file.read_text() + json.dumps({key: each for key, each in whole.items() if key != name}) + "\n"
            )
            with pytest.raises(KVLoomError, match="no file of rows"):
                check(file, ABOUT)


def test_rows_of_a_model_that_gives_no_number_come_back(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(1, nll=[float("nan")], kl=[float("nan")])])
    assert len(Rows(file, ABOUT)) == 1


def test_a_file_with_a_hole_is_no_file_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom_eval.scores.rows._MOST_BYTES", 1 << 20)
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT)
    os.truncate(file, 1 << 40)
    with pytest.raises(KVLoomError, match="no file of rows"):
        Rows(file, ABOUT)


def test_a_disk_that_is_full_again_costs_no_row(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """Nothing can be written; the row that was cut off goes all the same."""
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(1), row(2)])
    file.write_text(file.read_text()[:-10])
    with full_disk():
        assert len(Rows(file, ABOUT)) == 1
    assert len(Rows(file, ABOUT)) == 1


def test_a_header_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT)
    header = file.read_text()
    for size in (0, 5, len(header) - 1):
        file.write_text(header[:size])
        check(file, ABOUT)
        Rows(file, ABOUT).add([row(1)])
        assert len(Rows(file, ABOUT)) == 1


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path) -> None:
    rows = [b"[]", b'{"item": 5, "by": "x"}', b'{"item": "a/1"}', b'{"item": "a/one", "by": "x"}', 9**5 * b"["]
    headers = [b"\xff\xfe\n", b"something", b"{}\n", b'{"about": [1]}\n', b'{"about": {} or so\n', 9**5 * b"[" + b"\n"]
    for data in (*headers, *(b'{"about": {"model": "small", "seed": 0}}\n%s\n' % row for row in rows)):
        (tmp_path / "rows.jsonl").write_bytes(data)
        for read in (check, Rows):
            with pytest.raises(KVLoomError, match="no file of rows"):
                read(tmp_path / "rows.jsonl", ABOUT)
        assert (tmp_path / "rows.jsonl").read_bytes() == data
    for place in (tmp_path, tmp_path / "rows.jsonl" / "rows.jsonl"):
        with pytest.raises(KVLoomError, match="--out"):
            Rows(place, ABOUT)


def test_rows_of_another_run_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Rows(file, ABOUT).add([row(1)])
    before = file.read_bytes()
    with pytest.raises(KVLoomError, match=r"seed was 0 and is 1.*--out"):
        Rows(file, {**ABOUT, "seed": 1})
    assert file.read_bytes() == before
    file.write_text("something else\n")
    with pytest.raises(KVLoomError, match="no file of rows"):
        Rows(file, ABOUT)
