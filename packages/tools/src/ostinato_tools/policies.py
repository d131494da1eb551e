"""`ToolPolicy`: how one tool may be called. Every field is off until it is set, and what is off costs nothing.

A policy is written where the tool is (`@function_tool(policy=...)`, a class attribute of a `BaseTool`), and whoever runs the
tool may set further fields in the configuration file. Whether repeating or remembering a call is safe (`idempotent`, `pure`)
is the tool's word; nothing is repeated or remembered without it.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ostinato_tools.errors import ToolConfigError
from ostinato_tools.responses import ToolResponse


class ToolPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one tool may be called.

    Raises:
        ToolConfigError: a value is out of range, or fields do not go together.
    """

    timeout_s: float | None = None
    """Seconds for each create, attempt, calc_reward and release; the executor's where None."""
    idempotent: bool = False
    """Running a call twice does no harm, so that it may be repeated."""
    max_retries: int = 0
    """Further attempts after a failure that is not the model's: an exception, a deadline, an invalid result, a rate limit that
    the tool reports, or infrastructure. Needs `idempotent` or `pure`."""
    backoff_s: float = 0.1
    """Seconds before the first further attempt, doubled before each one after it; up to half is taken off, so that calls that
    failed together do not come back together."""
    max_backoff_s: float = 10.0
    """The longest wait between two attempts, in seconds."""
    result_schema: dict[str, Any] | None = None
    """JSON schema that the text of the response must fit once it is read as JSON."""
    validate_result: Callable[[ToolResponse], bool] | None = None
    """From a response to whether it is valid; raising counts as no. Not to be had in a configuration file."""
    fallback: str | dict[str, Any] | None = None
    """What the model reads instead of an invalid result; an error where None. The outcome is a tool error either way."""
    max_calls_per_s: float | None = None
    """Rate of attempts, over all trajectories of the executor."""
    burst: int = 1
    """Attempts that may start at once after a pause; needs `max_calls_per_s`."""
    max_concurrency: int | None = None
    """Attempts that may run at once, over all trajectories of the executor."""
    max_wait_s: float | None = None
    """Seconds that an attempt may wait for its turn under these two limits, then it is rate limited; the deadline's where
    None, and 0 means not to wait."""
    max_calls_per_trajectory: int | None = None
    """Calls with valid arguments that a trajectory may make; those beyond are rate limited."""
    pure: bool = False
    """Equal arguments give equal results, so that a result may be remembered. Function tools only."""
    cache_size: int = 0
    """Good results to remember, over all trajectories of the executor; the least recently used one goes first. Needs `pure`."""
    breaker_failures: int | None = None
    """Failures in a row, of the kinds that `max_retries` repeats, after which calls are answered as infrastructure at once."""
    breaker_reset_s: float = 30.0
    """Seconds after which one call tries whether the tool works again."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_calls_per_s", "breaker_reset_s"):
            _check_number(name, getattr(self, name), above=0)
        for name in ("backoff_s", "max_backoff_s", "max_wait_s"):
            _check_number(name, getattr(self, name), least=0)
        for name, least in (("max_retries", 0), ("cache_size", 0), ("burst", 1)):
            _check_count(name, getattr(self, name), least)
        for name in ("max_concurrency", "max_calls_per_trajectory", "breaker_failures"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        for name in ("idempotent", "pure"):
            if not isinstance(getattr(self, name), bool):
                raise ToolConfigError(f"{name} must be true or false, got {getattr(self, name)!r}; write one of them")
        self._check_together()

    def _check_together(self) -> None:
        if self.max_retries and not (self.idempotent or self.pure):
            raise ToolConfigError(
                f"max_retries must be 0 for a tool that is not idempotent, got {self.max_retries}; "
                "set idempotent if running a call twice does no harm"
            )
        if self.cache_size and not self.pure:
            raise ToolConfigError(
                f"cache_size must be 0 for a tool that is not pure, got {self.cache_size}; "
                "set pure if equal arguments always give equal results"
            )
        if self.burst > 1 and self.max_calls_per_s is None:
            raise ToolConfigError(f"burst must be 1 without max_calls_per_s, got {self.burst}; set max_calls_per_s")
        if self.max_wait_s is not None and self.max_calls_per_s is None and self.max_concurrency is None:
            raise ToolConfigError(
                f"max_wait_s must not be set where there is nothing to wait for, got {self.max_wait_s}; "
                "set max_calls_per_s or max_concurrency"
            )
        if self.validate_result is not None and not callable(self.validate_result):
            raise ToolConfigError(
                f"validate_result must be callable, got {self.validate_result!r}; give a function from ToolResponse to bool"
            )
        if not isinstance(self.fallback, str | dict | None) or not isinstance(self.result_schema, dict | None):
            raise ToolConfigError(
                f"fallback must be a string or a mapping and result_schema a mapping, got {self.fallback!r:.80} "
                f"and {self.result_schema!r:.80}; correct them"
            )
        try:
            json.dumps(self.fallback, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolConfigError(
                f"fallback must be JSON, got one that is not ({error}); convert its values"
            ) from error
        if self.fallback is not None and self.result_schema is None and self.validate_result is None:
            raise ToolConfigError(
                f"fallback must go with a check of results, got {self.fallback!r:.80}; set result_schema or validate_result"
            )

    @property
    def is_guarded(self) -> bool:
        """Whether anything but the deadline is set."""
        return bool(
            self.max_retries
            or self.result_schema is not None
            or self.validate_result is not None
            or self.max_calls_per_s is not None
            or self.max_concurrency is not None
            or self.max_calls_per_trajectory is not None
            or self.cache_size
            or self.breaker_failures is not None
        )


def policy_from_mapping(values: Any, place: str, base: ToolPolicy | None = None) -> ToolPolicy:
    """Read a policy from a configuration file.

    Args:
        values: Field to value.
        place: Where it was written, for messages.
        base: The tool's own policy, whose other fields stay.

    Raises:
        ToolConfigError: it is no mapping, has unknown keys, or a value that cannot be meant.
    """
    known = [name for name in ToolPolicy.__struct_fields__ if name != "validate_result"]
    if not isinstance(values, Mapping):
        raise ToolConfigError(
            f"policy of {place} must be a mapping, got {type(values).__name__}; known keys are {', '.join(known)}"
        )
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ToolConfigError(f"policy of {place} must have known keys, got {unknown}; known are {', '.join(known)}")
    if base is not None and not isinstance(base, ToolPolicy):
        raise ToolConfigError(f"policy of {place} must be a ToolPolicy, got {base!r:.80}; write ToolPolicy(...)")
    try:
        return msgspec.structs.replace(ToolPolicy() if base is None else base, **values)
    except ToolConfigError as error:
        raise ToolConfigError(f"policy of {place}: {error}") from None


def _check_number(name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf) -> None:
    if value is None and name in ("timeout_s", "max_calls_per_s", "max_wait_s"):
        return
    if isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf and value >= least:
        return
    wanted = "a positive" if above == 0 else "a non-negative"
    raise ToolConfigError(f"{name} must be {wanted} finite number, got {value!r}; correct it")


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ToolConfigError(f"{name} must be an integer of at least {least}, got {value!r}; correct it")
