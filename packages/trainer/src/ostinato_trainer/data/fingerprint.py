"""What a dataset's rows are, in a few hashes, so that a run is taken up again with the rows that it had."""

from __future__ import annotations

import hashlib
from array import array
from typing import Protocol, runtime_checkable

from msgspec import Struct

__all__ = ["DataFingerprint", "TellsFingerprint", "rows_digest"]


class DataFingerprint(Struct, frozen=True):
    """Contents of files and the choice of rows from them; plain data for a checkpoint."""

    files: list[tuple[str, str]]
    """What the user wrote for each file, and the hash of its content; names alone make no difference."""
    rows: str
    """Hash of the numbers of the rows that are used."""

    def difference(self, saved: DataFingerprint) -> str | None:
        """The first thing that is not as it was saved, as a sentence with its cure; None where the rows are the same."""
        if len(self.files) != len(saved.files):
            return (
                f"data.train_files must name the files of the state, {len(saved.files)} of them, got {len(self.files)}; "
                f"write those that it had: {', '.join(name for name, _ in saved.files)}"
            )
        for (name, digest), (saved_name, saved_digest) in zip(self.files, saved.files, strict=True):
            if digest != saved_digest:
                return (
                    f"data.train_files must hold what they held when the state was saved, got another content of {name} "
                    f"(then {saved_name}); put the file back"
                )
        if self.rows != saved.rows:
            return (
                "the rows that are used must be those of the state, got others of the same files; set data.max_prompt_length, "
                "data.filter_overlong_prompts, data.skip_bad_rows, data.train_max_samples and data.seed as they were"
            )
        return None


@runtime_checkable
class TellsFingerprint(Protocol):
    """A dataset that says what its rows are."""

    @property
    def fingerprint(self) -> DataFingerprint: ...


def rows_digest(numbers: array[int]) -> str:
    """Hash of row numbers, in order."""
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()
