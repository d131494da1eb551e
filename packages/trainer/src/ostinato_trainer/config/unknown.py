"""The sentence about a key that the tree does not have: what it is called here, or why nothing reads it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from msgspec import Struct

from ostinato_trainer.config import Config
from ostinato_trainer.config.renames import RENAMED_NAMES, RENAMED_PATHS, SFT_PLACES
from ostinato_trainer.config.schema import schema_keys, schema_sections
from ostinato_trainer.config.unread import UNREAD_NAMES, UNREAD_SECTIONS

__all__ = ["unknown_key_message"]

_ALIKE = 0.6
"""Least likeness of the last names of two long paths, which are alike for what they have in common before them."""
_MAX_PLACES = 2
"""A name that occurs in more places than this, such as `path`, says nothing about which one was meant."""


def unknown_key_message(path: str, root: type[Struct] = Config) -> str:
    """What to write instead of `path`, which is no key of `root`: a rename, a reason, or the nearest spelling."""
    keys, sections = schema_keys(root), schema_sections(root)
    parts = path.split(".")
    name = parts[-1]
    if (parent := _longest_prefix(path, keys)) is not None:
        return f"{parent} must be a single value, got the key {path} below it; write {parent}=VALUE"
    if (known := _known_elsewhere(path) if root is Config else _known_in_a_run(path, keys)) is not None:
        return known
    known_parent = next(
        (".".join(parts[:cut]) for cut in range(len(parts) - 1, 0, -1) if ".".join(parts[:cut]) in sections), ""
    )
    misspelled = parts[len(known_parent.split(".")) if known_parent else 0]
    unknown = f"{known_parent}.{misspelled}" if known_parent else misspelled
    siblings = {
        candidate.removeprefix(f"{known_parent}." if known_parent else ""): candidate
        for candidate in (*keys, *sections)
        if candidate.rpartition(".")[0] == known_parent
    }
    if near := difflib.get_close_matches(misspelled, siblings, n=1, cutoff=0.75):
        return f"{unknown} is not a key; did you mean {siblings[near[0]]}?"
    elsewhere = [candidate for candidate in keys if candidate.rpartition(".")[2] == name]
    if 1 <= len(elsewhere) <= _MAX_PLACES:
        return f"{path} is not a key; write {' or '.join(elsewhere)}"
    near = difflib.get_close_matches(path, keys, n=1, cutoff=0.75)
    if near and difflib.SequenceMatcher(None, name, near[0].rpartition(".")[2]).ratio() >= _ALIKE:
        return f"{path} is not a key; did you mean {near[0]}?"
    near = difflib.get_close_matches(misspelled, siblings, n=1, cutoff=0.5)
    if near and _words(near[0]) & _words(misspelled):
        return f"{unknown} is not a key; did you mean {siblings[near[0]]}?"
    names = [candidate.rpartition(".")[2] for candidate in keys]
    by_name = {last: candidate for last, candidate in zip(names, keys, strict=True) if names.count(last) == 1}
    if near := difflib.get_close_matches(name, by_name, n=1, cutoff=0.75):
        return f"{path} is not a key; did you mean {by_name[near[0]]}?"
    return f"{path} is not a key; `ostinato config{'' if root is Config else ' --sft'}` lists all keys"


def _known_elsewhere(path: str) -> str | None:
    """What another system's key is called in a run's tree, or why nothing reads it; None where it is not known."""
    name = path.rpartition(".")[2]
    if (renamed := _longest_prefix(path, RENAMED_PATHS)) is not None:
        return f"{path} is not a key; write {_with_rest(path, renamed)}"
    if (section := _longest_prefix(path, UNREAD_SECTIONS)) is not None:
        return f"{path} is not a key: {UNREAD_SECTIONS[section]}; remove it"
    if name in RENAMED_NAMES:
        return f"{path} is not a key; write {_beside(path, RENAMED_NAMES[name])}"
    if name in UNREAD_NAMES:
        return f"{path} is not read by this version: {UNREAD_NAMES[name]}; remove it"
    return None


def _known_in_a_run(path: str, keys: Collection[str]) -> str | None:
    """What a key that `ostinato train` or another system knows is called in the smaller tree of `ostinato sft`."""
    for meant in (path, RENAMED_NAMES.get(path.rpartition(".")[2], "")):
        if (section := _longest_prefix(meant, SFT_PLACES)) is not None:
            meant = SFT_PLACES[section] + meant[len(section) :]
        if meant in keys:
            return f"{path} is not a key; write {meant}"
    return None


def _words(name: str) -> set[str]:
    """The parts of a name: two that are far apart in letters are meant alike only if they share one."""
    return {word for word in name.split("_") if len(word) > 2}


def _longest_prefix(path: str, table: Mapping[str, object]) -> str | None:
    parts = path.split(".")
    candidates = (".".join(parts[:cut]) for cut in range(len(parts), 0, -1))
    return next((candidate for candidate in candidates if candidate in table), None)


def _beside(path: str, renamed: str) -> str:
    """The new name of `path`: the critic's own where it stood in `critic` and the actor's has a counterpart there."""
    of_critic = renamed.replace("actor_rollout_ref.actor.", "critic.")
    return of_critic if path.startswith("critic.") and of_critic in schema_keys(Config) else renamed


def _with_rest(path: str, renamed: str) -> str:
    """The new place of `path`, with what followed the renamed part if that is a key there."""
    target = RENAMED_PATHS[renamed]
    longer = target + path[len(renamed) :]
    return longer if longer in schema_keys(Config) else target
