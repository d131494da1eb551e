"""Files as rows: what comes back is what was written."""

import datetime
import decimal
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_trainer.data.files import open_data_file
from ostinato_trainer.errors import DatasetError

CALL_A = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALL_B = {"type": "function", "function": {"name": "g", "arguments": {"b": "z"}}}


def written(rows: list[dict[str, Any]], path: Path) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_rows_keep_exactly_their_own_keys(suffix: str, tmp_path: Path) -> None:
    """Mappings of different shapes come back without the null keys that a common struct adds."""
    rows = [
        {"tools_kwargs": {"calc": {"x": 1}}, "prompt": [{"role": "user", "content": "q"}]},
        {
            "tools_kwargs": {"search": {"url": "u"}},
            "prompt": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [CALL_A, CALL_B]},
                {"role": "tool", "content": "r"},
            ],
        },
    ]
    expected = json.loads(json.dumps(rows))
    if suffix == ".parquet":  # there a message without content cannot be told from one with null
        assert expected[1]["prompt"][1]["content"] is None
    file = open_data_file(written(rows, tmp_path / f"rows{suffix}"))
    assert [file.row(index) for index in range(len(file))] == expected
    assert list(file.rows()) == expected


def test_a_null_that_the_author_wrote_survives_in_json(tmp_path: Path) -> None:
    """json and jsonl keep nulls inside values."""
    file = open_data_file(written([{"extra_info": {"a": None}}], tmp_path / "rows.jsonl"))
    assert file.row(0) == {"extra_info": {"a": None}}


def test_many_rows_and_row_groups_are_addressed_rightly(tmp_path: Path) -> None:
    """Every index of a file with several row groups gives its row."""
    table = pa.table({"x": list(range(3000))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    file = open_data_file(str(tmp_path / "rows.parquet"))
    assert [row["x"] for row in file.rows() if not isinstance(row, DatasetError)] == list(range(3000))
    assert [file.row(index)["x"] for index in (0, 699, 700, 2999)] == [0, 699, 700, 2999]


def test_every_access_is_a_fresh_row(tmp_path: Path) -> None:
    """Changing a row that was handed out does not change the file's."""
    for suffix in (".parquet", ".jsonl", ".json"):
        file = open_data_file(written([{"a": {"b": [1]}}], tmp_path / f"rows{suffix}"))
        file.row(0)["a"]["b"].append(2)
        assert file.row(0) == {"a": {"b": [1]}}


def test_json_lines_in_a_json_file_are_read(tmp_path: Path) -> None:
    """A `.json` file may hold one object a line; blank lines and a byte-order mark do not matter."""
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\r\n')
    assert list(open_data_file(str(path)).rows()) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.parquet", b"no parquet", "must be a parquet file"),
        ("x.parquet", b"", "must be a parquet file"),
        ("x.json", b"[1, 2", "row 2 must be followed by a comma"),
        ("x.jsonl", b"\n\n", "at least one row"),
        ("x.json", b"[]", "at least one row"),
        ("x.json", b'{\n "train": [{"a": 1}]\n}', "got an object over several lines"),
        ("x.jsonl", b'{\n "a": 1\n}', "got an object over several lines"),
        ("x.csv", b"a,b\n", "must end with .parquet, .json, .jsonl"),
    ],
)
def test_files_that_are_none_are_errors_with_their_name(
    name: str, content: bytes, expected: str, tmp_path: Path
) -> None:
    """A file of another form, or without rows, is one error with the path."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=expected) as caught:
        open_data_file(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_missing_files_and_folders_are_errors(tmp_path: Path) -> None:
    """A path that is not there, and one that is a folder, are errors with the path."""
    with pytest.raises(DatasetError, match="must exist"):
        open_data_file(str(tmp_path / "no.parquet"))
    with pytest.raises(DatasetError, match=r"got the folder .*/\*\.parquet"):
        open_data_file(str(tmp_path))
    with pytest.raises(DatasetError, match=r"local or begin with hf://, got s3://bucket/x\.jsonl; download it"):
        open_data_file("s3://bucket/x.jsonl")
    with pytest.raises(DatasetError, match="must be readable: File name too long"):
        open_data_file("x" * 1000 + ".jsonl")


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    """A line that is no JSON object is named by its line number; the others are still given."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a":\n[1]\n{"a": 2}\n')
    rows = list(open_data_file(str(path)).rows())
    assert rows[0] == {"a": 1}
    assert rows[3] == {"a": 2}
    assert f"{path}, line 3" in str(rows[1])
    assert f"{path}, line 4" in str(rows[2])


def test_parquet_loses_the_nulls_that_it_added_and_no_others(tmp_path: Path) -> None:
    """Null columns and fields disappear; the content of a message, and what is null in a map or a list, is there."""
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    numbers = pa.map_(pa.string(), pa.int64())
    table = pa.table(
        {
            "a": pa.array([None, 1]),
            "prompt": pa.array([[{"role": "assistant"}], []], pa.list_(message)),
            "map": pa.array([[("k", 1), ("l", None)], []], numbers),
            "maps": pa.array([[[("k", 2)]], [None]], pa.list_(numbers)),
            "none": pa.array([None, None], numbers),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert list(open_data_file(str(tmp_path / "rows.parquet")).rows()) == [
        {"prompt": [{"role": "assistant", "content": None}], "map": {"k": 1, "l": None}, "maps": [{"k": 2}]},
        {"a": 1, "prompt": [], "map": {}, "maps": [None]},
    ]


def test_a_key_that_is_twice_in_a_map_makes_a_bad_row(tmp_path: Path) -> None:
    """Only one of its values could be read; the rows around it are given."""
    maps = pa.array([[("k", 1)], [("k", 1), ("k", 2)], []], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"m": maps}), tmp_path / "rows.parquet")
    first, second, third = open_data_file(str(tmp_path / "rows.parquet")).rows()
    assert (first, third) == ({"m": {"k": 1}}, {"m": {}})
    assert "row 2 must be readable, got the key 'k' more than once in a map" in str(second)


def test_a_damaged_parquet_file_is_said_to_be_one(tmp_path: Path) -> None:
    """Damage behind an intact end of the file is no question of permissions."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [str(number) * 9 for number in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    content[4:100] = bytes(byte ^ 0xFF for byte in content[4:100])
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"rows\.parquet must be a parquet file, got something else .*write it anew"):
        open_data_file(str(path))


def test_a_bad_row_of_a_json_array_is_the_only_one(tmp_path: Path) -> None:
    """NaN, another encoding and endless nesting in an array are errors of their row, as in JSON lines."""
    path = tmp_path / "rows.json"
    path.write_bytes(b' [ {"a": 0},{"a": NaN} , {"a": "\xe4, ]"}\n,{"b": "]"}, 3 ] \n')
    file = open_data_file(str(path))
    assert [type(row) for row in file.rows()] == [dict, DatasetError, DatasetError, dict, DatasetError]
    for index, expected in ((1, "JSON has no NaN"), (2, "UTF-8"), (4, "must be a JSON object, got int")):
        with pytest.raises(DatasetError, match=rf"rows\.json, row {index + 1} .*{expected}"):
            file.row(index)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"a": 1}, {"a":}, {"a": 2}]', "row 2 must be a JSON object"),
        ('[{"a": 1}, {"a": 2}, {"a"', "row 3 must be a JSON object"),
        ('[{"a": 1} {"a": 2}]', "row 1 must be followed by a comma"),
        ('[{"a": 1}, {"a": 2}', "row 2 must be followed by a comma or by the end of the array, got ''"),
        ('[{"a": 1}] [', "row 1 must be followed by a comma"),
        ("[" * 100_000, "row 1 must be a JSON object"),
    ],
)
def test_an_array_that_cannot_be_separated_says_where(content: str, expected: str, tmp_path: Path) -> None:
    """Where a row does not end, or no comma follows it, the number of that row is in the error."""
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=rf"rows\.json, {expected}"):
        open_data_file(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Opening one would wait for a writer, maybe for ever."""
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DatasetError, match="must be a file on a disk"):
        open_data_file(str(tmp_path / "rows.jsonl"))


@given(rows=st.lists(st.fixed_dictionaries({"x": st.integers(0, 9), "t": st.text(max_size=5)}), min_size=1, max_size=5))
def test_flat_rows_round_trip_through_every_form(rows: list[dict], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same rows written in three forms are read as the same rows."""
    folder = tmp_path_factory.mktemp("rows")
    for suffix in (".parquet", ".json", ".jsonl"):
        assert list(open_data_file(written(rows, folder / f"r{suffix}")).rows()) == rows


shapes = st.dictionaries(
    st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(-9, 9), min_size=1), min_size=1
)


@given(mappings=st.lists(shapes, min_size=1, max_size=5))
def test_mappings_of_any_shapes_round_trip_through_parquet(
    mappings: list[dict], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever keys other rows have, each comes back with its own."""
    rows = [{"m": mapping, "l": [mapping]} for mapping in mappings]
    assert list(open_data_file(written(rows, tmp_path_factory.mktemp("rows") / "r.parquet")).rows()) == rows


def test_a_file_has_the_columns_that_it_was_written_with(tmp_path: Path) -> None:
    """Folders named KEY=VALUE above a parquet file add nothing to its rows."""
    (tmp_path / "split=train").mkdir()
    file = open_data_file(written([{"x": 1}], tmp_path / "split=train" / "rows.parquet"))
    assert file.row(0) == {"x": 1}


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Two columns, or two fields of a struct, of one name are an error with the name: only one could be read."""
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    inner = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["b", "b"])
    nested = pa.table({"x": pa.ListArray.from_arrays([0, 1], inner)})
    for table, name in ((twice, "a"), (nested, "x.b")):
        pq.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(DatasetError, match=f"must have each column once, got {name} more than once"):
            open_data_file(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_key_that_is_there_twice_makes_a_bad_row(suffix: str, tmp_path: Path) -> None:
    """A JSON object, also one within the row, that gives a key twice is named: only one value could be read."""
    texts = ['{"a": 1}', '{"a": 1, "a": 2}', '{"a": {"b": 1, "c": 0, "b": 1}}', '{"a": [{"b": 1}, {"b": 1}]}']
    path = tmp_path / f"rows{suffix}"
    path.write_text("[" + ",".join(texts) + "]" if suffix == ".json" else "\n".join(texts))
    file = open_data_file(str(path))
    found = list(file.rows())
    assert [type(row) for row in found] == [dict, DatasetError, DatasetError, dict]
    with pytest.raises(DatasetError, match="2: a must be there once"):
        file.row(1)
    assert "2: a must be there once" in str(found[1])
    assert "3: b must be there once" in str(found[2])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"a": NaN}', "JSON has no NaN"),
        (b'{"a": "\xe4"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "must be a JSON object"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_json_is_a_bad_row(line: bytes, expected: str, tmp_path: Path) -> None:
    """NaN, bytes of another encoding, half characters and endless nesting are errors of their row, with a reason."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n' + line + b"\n")
    good, bad = open_data_file(str(path)).rows()
    assert good == {"a": 0}
    assert f"{path}, line 2" in str(bad)
    assert expected in str(bad)


def test_another_unicode_is_refused_as_a_whole(tmp_path: Path) -> None:
    """A file in UTF-16 is one error with the way to convert it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n', encoding="utf-16")
    with pytest.raises(DatasetError, match="must be UTF-8, got UTF-16; convert it"):
        open_data_file(str(path))


def test_a_packed_file_is_to_be_unpacked(tmp_path: Path) -> None:
    """A compressed file is refused with the cure."""
    (tmp_path / "rows.jsonl.gz").touch()
    with pytest.raises(DatasetError, match=r"got .*rows\.jsonl\.gz; unpack it"):
        open_data_file(str(tmp_path / "rows.jsonl.gz"))


def test_lines_that_change_during_a_run_are_an_error(tmp_path: Path) -> None:
    """JSON lines stay in their file; once it has another content, or is gone, no row of it is given out."""
    path = tmp_path / "rows.jsonl"
    file = open_data_file(written([{"a": 1}, {"a": 2}], path))
    assert file.row(1) == {"a": 2}
    path.write_text('{"b": 12345}\n{"b": 2}\n')
    with pytest.raises(DatasetError, match="must not change while a run reads it"):
        file.row(1)
    path.unlink()
    with pytest.raises(DatasetError, match="must stay readable"):
        file.row(1)


def test_lines_are_not_held_in_memory(tmp_path: Path) -> None:
    """Of a large file of JSON lines only the places of its lines are kept."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": "{"x" * 10_000}"}}\n' * 1000)
    tracemalloc.start()
    try:
        file = open_data_file(str(path))
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 20
    finally:
        tracemalloc.stop()
    assert len(file) == 1000


def test_a_row_that_python_cannot_hold_is_the_only_bad_one(tmp_path: Path) -> None:
    """A date beyond Python's in a parquet file makes its own row bad, not those around it."""
    table = pa.table({"when": pa.array([0, 2**62, 1], pa.timestamp("us")), "x": [1, 2, 3]})
    pq.write_table(table, tmp_path / "rows.parquet")
    found = list(open_data_file(str(tmp_path / "rows.parquet")).rows())
    assert [type(row) for row in found] == [dict, DatasetError, dict]
    assert "rows.parquet, row 2 must be readable" in str(found[1])


def test_dates_and_decimals_are_python_s(tmp_path: Path) -> None:
    """Columns of dates, times and decimals come as Python has them, a missing one is absent, and categories are text."""
    day, price = datetime.date(2024, 2, 29), decimal.Decimal("1.50")
    columns = {"day": [day, None], "price": [price, None], "level": pa.array(["hard", "hard"]).dictionary_encode()}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows = list(open_data_file(str(tmp_path / "rows.parquet")).rows())
    assert rows == [{"day": day, "price": price, "level": "hard"}, {"level": "hard"}]


def test_text_that_is_no_utf_8_is_the_only_bad_row_of_a_parquet_file(tmp_path: Path) -> None:
    """Bytes of another encoding in a text column are an error of their row."""
    texts = pa.array([b"a", b"\xe4", b"b"]).view(pa.string())
    pq.write_table(pa.table({"t": texts}), tmp_path / "rows.parquet")
    first, second, third = open_data_file(str(tmp_path / "rows.parquet")).rows()
    assert (first, third) == ({"t": "a"}, {"t": "b"})
    assert "rows.parquet, row 2 must be readable, got 'utf-8' codec" in str(second)


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    """The same content under another name has the same digest, another content another one, in every form."""
    for suffix in (".parquet", ".json", ".jsonl"):
        first, same, other = (
            open_data_file(written([{"x": number}], tmp_path / f"{name}{suffix}")).digest
            for name, number in (("a", 1), ("b", 1), ("c", 2))
        )
        assert first == same != other
