"""From YAML files and overrides to a `Config`, or to one message: which key is wrong, where, and what is right.

Nothing is ignored and nothing is repaired: a key that the tree does not have is an error, be it misspelled, renamed or
unread. OmegaConf reads YAML and resolves interpolations; `msgspec.convert` validates.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml
from msgspec import Struct
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ostinato_trainer.config import Config
from ostinato_trainer.config.checks import consistency_problems, problems_text
from ostinato_trainer.config.homes import with_homes
from ostinato_trainer.config.schema import Key, is_free_form, schema_keys, schema_sections, type_text
from ostinato_trainer.config.unknown import unknown_key_message
from ostinato_trainer.config.unread import REFUSED_VALUES
from ostinato_trainer.config.without_effect import unread_keys
from ostinato_trainer.errors import ConfigError

__all__ = ["flat_values", "load_config", "load_tree", "to_yaml"]

logger = logging.getLogger(__name__)

Tree = TypeVar("Tree", bound=Struct)

_CONFIG_DIR: Final = re.compile(r"(?<!\\)\$\{config_dir\}")
"""In a file's values this stands for the folder of that file."""
_INTERPOLATION: Final = re.compile(r"(\\*)\$\{")
_OVERRIDE_KEY: Final = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_ERROR_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")


class _Source(msgspec.Struct, frozen=True):
    """One file or override: what it is called in messages, and its values by dotted path."""

    name: str
    values: dict[str, Any]


def load_config(files: str | Path | Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Config:
    """Read files, then overrides, later ones winning key by key.

    Keys may be nested or dotted (`data.seed: 1`). Interpolations such as `${data.seed}` and `${oc.env:HOME}` are
    resolved; `${config_dir}` in a file is the folder of that file, so that it can name files beside it.

    Args:
        files: YAML files, in order.
        overrides: `key=value` strings, the value read as YAML.

    Raises:
        ConfigError: naming the file or override, the key, what was expected and what to write.
    """
    config, changed = load_tree(Config, files, overrides)
    if problems := consistency_problems(config):
        raise ConfigError(problems_text(problems))
    for sentence in unread_keys(config, changed):
        logger.warning("%s", sentence)
    return config


def load_tree(
    root: type[Tree],
    files: str | Path | Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> tuple[Tree, list[str]]:
    """As `load_config`, for any tree of structs; the keys are checked one by one, not against each other.

    Args:
        root: The tree.
        files: YAML files, in order.
        overrides: `key=value` strings.
        options: What the command line gave by options of its own, the last word: value by key, each with the option's name.

    Returns:
        The tree, and the dotted paths of what was written and is not the default.

    Raises:
        ConfigError: See `load_config`.
    """
    paths = [files] if isinstance(files, str | Path) else files
    sources = [_read_file(Path(path), root) for path in paths] + [_read_override(text, root) for text in overrides]
    sources += [_Source(option, {path: value}) for path, (option, value) in (options or {}).items()]
    problems = [problem for source in sources for problem in _key_problems(source, root)]
    if problems:
        raise ConfigError(problems_text(list(dict.fromkeys(problems))))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        for path, value in source.values.items():
            merged[path] = _merged_value(merged.get(path), value)
            origins[path] = source.name
    config = _convert(with_homes(_resolve(merged, root), origins), origins, root)
    return config, [path for path in origins if path in merged and merged[path] != _default(path, root)]


def to_yaml(config: Struct) -> str:
    """The whole tree as YAML, defaults included; `load_config` reads it back to an equal tree."""
    plain = msgspec.to_builtins(config)
    return yaml.safe_dump(_written(plain), sort_keys=False, allow_unicode=True)


def _written(value: Any) -> Any:
    """`value` with tuples as lists and with `${` in text escaped, so that it is read back as text."""
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def flat_values(config: Config) -> dict[str, Any]:
    """The value of every key by dotted path, as plain Python."""
    nested = msgspec.to_builtins(config)
    return {path: _lookup(nested, path) for path in schema_keys(Config)}


def _default(path: str, root: type[Struct]) -> Any:
    key = schema_keys(root).get(path)
    return None if key is None else _written(msgspec.to_builtins(key.default))


def _read_file(path: Path, root: type[Struct]) -> _Source:
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        if path.name.startswith("~"):
            raise ConfigError(
                f"an override must set a key, got {path}, which takes one away elsewhere; write KEY=VALUE with the default that "
                "`ostinato config` prints"
            ) from None
        raise ConfigError(
            f"the configuration file must exist, got {path}; check the path, or write KEY=VALUE for an override"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ConfigError(
            f"{path} must be a readable YAML file: {reason}; check the path and its permissions"
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be YAML, got something else: {_one_line(error)}; mend that place") from None
    if raw is None or raw == {}:
        return _Source(str(path), {})
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, got a {type(raw).__name__}; write `key: value` lines")
    directory = str(path.resolve().parent)
    return _Source(str(path), _flatten(_with_config_dir(raw, directory), str(path), root))


def _read_override(text: str, root: type[Struct]) -> _Source:
    name = f"override {text!r}"
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator:
        raise ConfigError(f"{name} must be key=value, got no `=`; write it like data.train_batch_size=8")
    if not _OVERRIDE_KEY.fullmatch(key):
        bare = key.lstrip("+~-")
        cure = f"write {bare}={value}" if _OVERRIDE_KEY.fullmatch(bare) else "write it like data.train_batch_size=8"
        raise ConfigError(f"{name} must begin with a dotted key, got {key!r}; {cure}")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{name} must have a YAML value: {_one_line(error)}; quote the value") from None
    assert isinstance(parsed, dict)
    return _Source(name, _flatten({key: parsed["value"]}, name, root))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _with_config_dir(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_config_dir(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_config_dir(item, directory) for item in value]
    return _CONFIG_DIR.sub(lambda _: directory, value) if isinstance(value, str) else value


def _flatten(raw: Mapping[Any, Any], source: str, root: type[Struct]) -> dict[str, Any]:
    """Nested and dotted keys as dotted paths; the same path with two values is an error."""
    flat: dict[str, Any] = {}
    for path, value in _leaves(raw, "", source, schema_keys(root)):
        if path in flat and flat[path] != value:
            raise ConfigError(
                f"{source}: {path} must be given once, got {flat[path]!r} and {value!r}; remove one of them"
            )
        flat[path] = value
    return flat


def _leaves(raw: Mapping[Any, Any], prefix: str, source: str, keys: Mapping[str, Key]) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(
                f"{source}: a key must be text, got {key!r} in {prefix or 'the file'}; quote or rename it"
            )
        path = f"{prefix}{key}"
        free = path in keys and is_free_form(keys[path].type)
        if isinstance(value, dict) and value and not free:
            yield from _leaves(value, f"{path}.", source, keys)
        else:
            owner = next(
                (known for known in keys if path.startswith(f"{known}.") and is_free_form(keys[known].type)), None
            )
            yield (path, value) if owner is None else (owner, {path[len(owner) + 1 :]: value})


def _key_problems(source: _Source, root: type[Struct]) -> list[str]:
    keys, sections = schema_keys(root), schema_sections(root)
    problems = []
    for path, value in source.values.items():
        refused = REFUSED_VALUES.get((path, value)) if isinstance(value, str | bool) else None
        if refused is not None:
            problems.append(f"{source.name}: {path} {refused}")
        elif path in sections and value != {}:
            problems.append(
                f"{source.name}: {path} must be a mapping of keys, got {_shown(value)}; "
                f"write {path}.KEY=VALUE, or remove it"
            )
        elif path not in keys and path not in sections:
            problems.append(f"{source.name}: {unknown_key_message(path, root)}")
    return problems


def _merged_value(before: Any, value: Any) -> Any:
    """A later value replaces an earlier one; mappings of the user's own keys are merged key by key."""
    return {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value


def _resolve(flat: Mapping[str, Any], root: type[Struct]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        if path in schema_sections(root):
            continue
        *parents, name = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(nested), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"an interpolation or a `???` must have a value: {_one_line(error)}; write the key that it refers to"
        ) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _convert(nested: dict[str, Any], origins: Mapping[str, str], root: type[Tree]) -> Tree:
    for path in schema_keys(root):
        value = _lookup(nested, path)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{origins.get(path, 'the configuration')}: {path} must be finite, got {value}; write a number"
            )
    try:
        return msgspec.convert(nested, root)
    except msgspec.ValidationError as error:
        raise ConfigError(_validation_message(str(error), nested, origins, root)) from None


def _validation_message(text: str, nested: Mapping[str, Any], origins: Mapping[str, str], root: type[Struct]) -> str:
    found = _ERROR_PATH.search(text)
    path = re.sub(r"\[.*", "", found.group(1)) if found else ""
    key = schema_keys(root).get(path)
    if key is None:
        # A node's own check: its sentence begins with the name of the field and needs only the path before it.
        sentence = _ERROR_PATH.sub("", text)
        path = f"{path}.{sentence.partition(' ')[0]}" if path else "the configuration"
        return f"{origins.get(path, 'the configuration')}: {path} {sentence.partition(' ')[2]}"
    value = _lookup(nested, path)
    expected = type_text(key.type)
    cure = _type_cure(path, expected, value) or (
        f"`ostinato config{'' if root is Config else ' --sft'}` says what {path} means"
    )
    return f"{origins.get(path, 'the configuration')}: {path} must be {expected}, got {_shown(value)}; {cure}"


def _type_cure(path: str, expected: str, value: Any) -> str | None:
    if expected.startswith("list of") and isinstance(value, str) and _is_one_of(expected, value):
        return f"write {path}=[{value}]"
    if value is None:
        return "write a value, or remove the key to take the default"
    return None


def _is_one_of(expected: str, value: str) -> bool:
    """Whether `value` may be an item of a list of this kind: any text, unless the kind names all that there are."""
    choices = expected.removeprefix("list of").strip().strip("()").split(" | ")
    return len(choices) == 1 or value in choices


def _lookup(nested: Mapping[str, Any], path: str) -> Any:
    node: Any = nested
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
