"""Data files as rows: parquet, json and jsonl, decoded one row at a time and free of keys that nobody wrote.

Parquet stores mappings of different shapes as one struct, in which absent keys come back as null: those are removed, so
that a row has again the keys it was written with. A null that its author meant survives in json and jsonl files and in
columns that hold JSON text. Knows nothing of prompts or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ostinato_trainer.errors import DatasetError
from ostinato_trainer.hub_files import HUB_SCHEME, fetch_hub_file

__all__ = ["DataFile", "open_data_file", "without_filled_keys"]

_SUFFIXES: Final = (".parquet", ".json", ".jsonl")
_CHUNK_ROWS: Final = 1024
_UTF8_BOM: Final = b"\xef\xbb\xbf"


class DataFile(Protocol):
    """One file of rows. Every access decodes anew, so a caller may change what it gets."""

    name: str
    """What the user wrote for the file."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, from 0; DatasetError if it is not a mapping."""
        ...

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        """All rows in order; a row that cannot be decoded comes as the error that `row` would raise."""
        ...

    def place(self, index: int) -> str:
        """File and row for messages, counted as people count: from 1."""
        ...


def open_data_file(name: str) -> DataFile:
    """Open a local path or `hf://datasets/OWNER/NAME/FILE`.

    Raises:
        DatasetError: no such file, a form that is not read, content that is not of that form, or no rows.
    """
    path = fetch_hub_file(name) if name.startswith(HUB_SCHEME) else Path(name).expanduser()
    if path.is_dir():
        raise DatasetError(f"a data file must be a file, got the folder {name}; name the files in it")
    if not path.exists():
        raise DatasetError(f"a data file must exist, got {name}; check data.train_files and data.val_files")
    if path.suffix not in _SUFFIXES:
        raise DatasetError(f"a data file must end with {', '.join(_SUFFIXES)}, got {name}; convert or rename it")
    try:
        file = _ParquetFile(name, path) if path.suffix == ".parquet" else _JsonFile(name, path)
    except OSError as error:
        raise DatasetError(f"{name} must be readable: {error.strerror or error}; check its permissions") from error
    if not len(file):
        raise DatasetError(f"{name} must hold at least one row, got none; check how it was written")
    return file


def without_filled_keys(value: Any) -> Any:
    """`value` without the null keys that a columnar file adds; a message keeps its `content`, where null has a meaning."""
    if isinstance(value, dict):
        return {
            key: without_filled_keys(item)
            for key, item in value.items()
            if item is not None or (key == "content" and "role" in value)
        }
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return {key: without_filled_keys(item) for key, item in value}
        return [without_filled_keys(item) for item in value]
    return value


class _ParquetFile:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        try:
            self._table: pa.Table = pq.read_table(path).combine_chunks()
        except (pa.ArrowException, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DatasetError(
                f"{name} must be a parquet file, got something else ({reason}); write it anew"
            ) from error

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return without_filled_keys(self._decode(self._table.slice(index, 1), index)[0])

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        for start in range(0, len(self), _CHUNK_ROWS):
            for row in self._decode(self._table.slice(start, _CHUNK_ROWS), start):
                yield without_filled_keys(row)

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def _decode(self, part: pa.Table, index: int) -> list[dict[str, Any]]:
        try:
            return part.to_pylist()
        except (pa.ArrowException, ValueError) as error:
            raise DatasetError(f"{self.place(index)} must be readable, got {error}; write the file anew") from error


class _JsonFile:
    """A JSON array of objects, or one object a line; kept as text and decoded on access."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        data = path.read_bytes().removeprefix(_UTF8_BOM)
        self._by_line = not (path.suffix == ".json" and data.lstrip().startswith(b"["))
        if self._by_line:
            numbered = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
            self._numbers = [number for number, _ in numbered]
            self._texts: list[bytes] | list[msgspec.Raw] = [line for _, line in numbered]
        else:
            try:
                self._texts = msgspec.json.decode(data, type=list[msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DatasetError(
                    f"{name} must be a JSON array of objects, got {error}; mend or rewrite it"
                ) from error
            self._numbers = list(range(1, len(self._texts) + 1))

    def __len__(self) -> int:
        return len(self._texts)

    def row(self, index: int) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(self._texts[index])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DatasetError(f"{self.place(index)} must be a JSON object, got {error}; mend that row") from None
        if not isinstance(value, dict):
            raise DatasetError(
                f"{self.place(index)} must be a JSON object, got {type(value).__name__}; write one object a row"
            )
        return value

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        for index in range(len(self)):
            try:
                yield self.row(index)
            except DatasetError as error:
                yield error

    def place(self, index: int) -> str:
        return f"{self.name}, {'line' if self._by_line else 'row'} {self._numbers[index]}"


def parsed_json_text(value: Any, kind: type) -> Any:
    """A column that holds JSON text as its value, where that is of `kind`; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
    return parsed if isinstance(parsed, kind) else value


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """`value`, or the mapping that its JSON text holds; None where it is neither."""
    parsed = parsed_json_text(value, dict)
    return parsed if isinstance(parsed, Mapping) else None
