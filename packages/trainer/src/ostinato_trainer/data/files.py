"""Data files as rows: parquet, json and jsonl, decoded one row at a time and free of keys that nobody wrote.

Parquet stores mappings of different shapes as one struct, in which absent keys come back as null: those are removed, so
that a row has again the keys it was written with. A null that its author meant survives in json and jsonl files, in
columns that hold JSON text, and in maps. Rows stay encoded until they are asked for: a parquet file as columns in memory, a json array
as text, JSON lines in their file, which therefore must not change while a run reads it. Knows nothing of prompts or tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ostinato_trainer.data.hub_files import HUB_SCHEME, fetch_hub_file
from ostinato_trainer.data.json_rows import decoded_json_row, json_array_rows
from ostinato_trainer.data.paths import expanded_path
from ostinato_trainer.errors import DatasetError

__all__ = ["DataFile", "as_mapping", "open_data_file", "parsed_json_text"]

_SUFFIXES: Final = (".parquet", ".json", ".jsonl")
_COMPRESSED: Final = (".gz", ".zst", ".bz2", ".xz", ".zip")
_OTHER_UNICODE: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CHUNK_ROWS: Final = 1024
_LISTS: Final = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


class DataFile(Protocol):
    """One file of rows. Every access decodes anew, so a caller may change what it gets."""

    name: str
    """What the user wrote for the file."""
    digest: str
    """Hash of the file's content, in hex."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, from 0; DatasetError if it is no mapping, or cannot be read."""
        ...

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        """All rows in order; a bad one comes as the error that names it."""
        ...

    def place(self, index: int) -> str:
        """File and row for messages, counted as people count: from 1."""
        ...


def open_data_file(name: str) -> DataFile:
    """Open a local path or `hf://datasets/OWNER/NAME[@REVISION]/FILE`.

    Raises:
        DatasetError: no such file, a form that is not read, content that is not of that form, or no rows.
    """
    path = fetch_hub_file(name) if name.startswith(HUB_SCHEME) else expanded_path(name)
    try:
        _check_kind(name, path)
        file = _opened(name, path)
    except OSError as error:
        raise DatasetError(f"{name} must be readable: {error.strerror or error}; check its permissions") from error
    if not len(file):
        raise DatasetError(f"{name} must hold at least one row, got none; check how it was written")
    return file


def _check_kind(name: str, path: Path) -> None:
    """Refuse what is there by its name: nothing, a folder, or another form of file."""
    if "://" in name and not name.startswith(HUB_SCHEME):
        raise DatasetError(f"a data file must be local or begin with {HUB_SCHEME}, got {name}; download it")
    if path.is_dir():
        raise DatasetError(f"a data file must be a file, got the folder {name}; write {name.rstrip('/')}/*.parquet")
    if not path.exists():
        raise DatasetError(f"a data file must exist, got {name}; check data.train_files and data.val_files")
    if not path.is_file():  # opening a pipe would wait for who writes to it
        raise DatasetError(f"a data file must be a file on a disk, got {name}; write its content to one")
    if path.suffix not in _SUFFIXES:
        cure = "unpack it" if path.suffix in _COMPRESSED else "convert or rename it"
        raise DatasetError(f"a data file must end with {', '.join(_SUFFIXES)}, got {name}; {cure}")


def _opened(name: str, path: Path) -> DataFile:
    if path.suffix == ".parquet":
        return _ParquetFile(name, path)
    with path.open("rb") as stream:
        start = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(_OTHER_UNICODE):
        raise DatasetError(f"{name} must be UTF-8, got UTF-16; convert it, for example: iconv -f UTF-16 -t UTF-8")
    if path.suffix == ".json" and start.startswith(b"["):
        return _JsonArray(name, path)
    if start.partition(b"\n")[0].strip() == b"{":
        raise DatasetError(
            f"{name} must be an array of objects, or one object a line, got an object over several lines; write its rows "
            "one a line"
        )
    return _JsonLines(name, path)


class _ParquetFile:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.digest = _content_digest(path)
        try:
            # Not read_table, which invents columns for folders named KEY=VALUE.
            self._table = _in_few_chunks(pq.ParquetFile(path).read())
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's, not Arrow's, which says that of damaged pages too
            reason = " ".join(str(error).split())
            raise DatasetError(
                f"{name} must be a parquet file, got something else ({reason}); write it anew"
            ) from error
        repeated = _repeated_name(self._table.schema)
        if repeated is not None:
            raise DatasetError(f"{name} must have each column once, got {repeated} more than once; write it anew")
        self._as_written = _as_written(pa.struct(list(self._table.schema)))

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self._decoded(index, 1)[0]

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        for start in range(0, len(self), _CHUNK_ROWS):
            try:
                yield from self._decoded(start, _CHUNK_ROWS)
            except DatasetError:  # find out which of them it is
                for index in range(start, min(start + _CHUNK_ROWS, len(self))):
                    yield _row_or_error(self.row, index)

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def _decoded(self, start: int, number: int) -> list[dict[str, Any]]:
        try:
            return list(map(self._as_written, self._table.slice(start, number).to_pylist()))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DatasetError(f"{self.place(start)} must be readable, got {error}; write the file anew") from error


def _as_written(kind: pa.DataType) -> Callable[[Any], Any]:
    """What makes a value of this type, as Arrow gives it, what its author wrote.

    A struct loses the null keys that it has because others have them, but a message keeps its `content`, where null has a
    meaning. A map, which has its own keys only, becomes a mapping with them.
    """
    if pa.types.is_struct(kind):
        fields = [(field.name, _as_written(field.type)) for field in kind]
        kept = "content" if any(name == "role" for name, _ in fields) else None
        return lambda value: (
            value and {name: inner(value[name]) for name, inner in fields if value[name] is not None or name == kept}
        )
    if pa.types.is_map(kind):
        item = _as_written(kind.item_type)
        return lambda pairs: None if pairs is None else _mapping_of((key, item(value)) for key, value in pairs)
    if isinstance(kind, _LISTS):
        item = _as_written(kind.value_type)
        return lambda values: values and list(map(item, values))
    return lambda value: value


def _mapping_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} more than once in a map")
        mapping[key] = value
    return mapping


class _JsonArray:
    """A JSON array of objects; kept as text."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.digest = _content_digest(path)
        self._texts = json_array_rows(path.read_bytes().removeprefix(codecs.BOM_UTF8), name)

    def __len__(self) -> int:
        return len(self._texts)

    def row(self, index: int) -> dict[str, Any]:
        return decoded_json_row(self._texts[index], self.place(index))

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        return (_row_or_error(self.row, index) for index in range(len(self)))

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


class _JsonLines:
    """One JSON object a line; only where the lines begin is kept. Empty lines are no rows."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._offsets, self._sizes, self._numbers = array("q"), array("q"), array("q")
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as stream:
            self._version = _version(stream.fileno())
            offset = 0
            for number, line in enumerate(stream, 1):
                digest.update(line)
                mark = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
                if line[mark:].strip():
                    self._offsets.append(offset + mark)
                    self._sizes.append(len(line) - mark)
                    self._numbers.append(number)
                offset += len(line)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> dict[str, Any]:
        with self._opened() as stream:
            return self._decoded(stream, index)

    def rows(self) -> Iterator[dict[str, Any] | DatasetError]:
        with self._opened() as stream:
            for index in range(len(self)):
                yield _row_or_error(partial(self._decoded, stream), index)

    def place(self, index: int) -> str:
        return f"{self.name}, line {self._numbers[index]}"

    @contextmanager
    def _opened(self) -> Iterator[FileIO]:
        """The file, which must be as it was."""
        try:
            with self._path.open("rb", buffering=0) as stream:
                if _version(stream.fileno()) != self._version:
                    raise DatasetError(
                        f"{self.name} must not change while a run reads it, got another content; start the run anew"
                    )
                yield stream
        except OSError as error:
            raise DatasetError(
                f"{self.name} must stay readable while a run reads it, got {error}; put it back"
            ) from error

    def _decoded(self, stream: FileIO, index: int) -> dict[str, Any]:
        text = os.pread(stream.fileno(), self._sizes[index], self._offsets[index])
        return decoded_json_row(text, self.place(index))


def _row_or_error(read: Callable[[int], dict[str, Any]], index: int) -> dict[str, Any] | DatasetError:
    try:
        return read(index)
    except DatasetError as error:
        return error


def _version(descriptor: int) -> tuple[int, int]:
    """What changes when a file is written to: size and time."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _content_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _in_few_chunks(table: pa.Table) -> pa.Table:
    """The table so that single rows are found quickly; as it is where that would make a column too large for its offsets."""
    try:
        return table.combine_chunks()
    except pa.ArrowInvalid:
        return table


def _repeated_name(fields: pa.Schema | pa.StructType) -> str | None:
    """The first name that stands twice among the columns, or among the fields of a struct below them."""
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            return field.name
        seen.add(field.name)
        kind = field.type
        while isinstance(kind, _LISTS):
            kind = kind.value_type
        below = _repeated_name(kind) if pa.types.is_struct(kind) else None
        if below is not None:
            return f"{field.name}.{below}"
    return None


def parsed_json_text(value: Any, kind: type) -> Any:
    """A column that holds JSON text as its value, where that is of `kind`; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    return parsed if isinstance(parsed, kind) else value


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """`value`, or the mapping that its JSON text holds; None where it is neither."""
    parsed = parsed_json_text(value, dict)
    return parsed if isinstance(parsed, Mapping) else None
