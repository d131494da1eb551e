"""Which state an engine is in, what it refuses in that state, and the cure it names. Knows no requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato_engines.errors import (
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    EngineNotReadyError,
    ManifestError,
)
from ostinato_engines.types import EngineState, PauseMode, WeightManifest

WEIGHTS = "weights"
SLEEP_TAGS = ("kv_cache", WEIGHTS)
"""The parts of an engine that can sleep: level 1 the first, level 2 both."""


def check_level(level: int) -> None:
    """Raises `EngineInputError` for what is no sleep level."""
    if level not in (1, 2):
        raise EngineInputError(f"level must be 1 or 2, got {level!r}; 1 frees the cache, 2 the weights as well")


def checked_tags(tags: Sequence[str] | None) -> set[str]:
    """The parts to wake, all where None is given, or `EngineInputError`."""
    wanted = set(SLEEP_TAGS if tags is None else tags)
    if unknown := wanted - set(SLEEP_TAGS):
        raise EngineInputError(f"tags must be among {', '.join(SLEEP_TAGS)}, got {unknown.pop()!r}; None wakes all")
    return wanted


@dataclass(slots=True)
class EngineStatus:
    """What has happened to an engine; `now` says what that makes it."""

    loaded: bool = False
    paused: PauseMode | None = None
    asleep: set[str] = field(default_factory=set)
    """The parts that sleep."""
    stale: bool = False
    """The weights are not those of any complete update."""
    base: str = ""
    """What an update in part may rest on: `WeightManifest.base` of the last whole one."""
    closed: bool = False
    failure: BaseException | None = None

    def now(self) -> tuple[EngineState, str]:
        """The state, and why it is not ready together with the cure."""
        if self.closed:
            return EngineState.CLOSED, "shut down; create a new server"
        if self.failure is not None:
            return EngineState.FAILED, f"crashed with {self.failure!r}; create a new server"
        if not self.loaded:
            return EngineState.NEW, "not started; call start() first"
        if self.asleep:
            return EngineState.ASLEEP, f"asleep ({', '.join(sorted(self.asleep))}); call wake_up() first"
        if self.stale:
            return EngineState.STALE, "without complete weights; call update_weights() with all of them first"
        if self.paused is not None:
            return EngineState.PAUSED, f"paused ({self.paused}); call resume()"
        return EngineState.READY, ""

    @property
    def may_step(self) -> bool:
        """Whether requests that hold a row may be computed."""
        idle = self.closed or self.failure is not None or self.asleep or self.stale or self.paused is PauseMode.KEEP
        return not idle

    @property
    def may_admit(self) -> bool:
        """Whether waiting requests may get a row."""
        return self.may_step and self.paused is None

    def require_loaded(self) -> None:
        """Raises unless the engine is started, sound and not shut down: it may sleep, be paused or lack weights."""
        state, detail = self.now()
        if state is EngineState.CLOSED:
            raise EngineClosedError(f"server must be running, is {detail}")
        if state is EngineState.FAILED:
            raise EngineCrashedError(f"server must be running, has {detail}") from self.failure
        if state is EngineState.NEW:
            raise EngineNotReadyError(f"server must be ready, is {detail}")

    def require_serving(self) -> None:
        """Raises unless the engine takes requests: now, or after a pause."""
        self.require_loaded()
        state, detail = self.now()
        if state not in (EngineState.READY, EngineState.PAUSED):
            raise EngineNotReadyError(f"server must be ready, is {detail}")

    def require_base(self, manifest: WeightManifest) -> None:
        """Raises `ManifestError` for an update in part where the rest is not there."""
        if manifest.is_partial and (self.stale or manifest.base != self.base):
            raise ManifestError(
                f"manifest must hold every tensor for an engine without the weights that it rests on, got {len(manifest.tensors)} in part; "
                "send the whole model"
            )

    def begin_update(self) -> None:
        """From now on the weights are of no update."""
        self.stale, self.base = True, ""

    def end_update(self, manifest: WeightManifest) -> None:
        """They are those of this one."""
        self.stale, self.base = False, manifest.base

    def require_awake_weights(self) -> None:
        """Raises where there is no memory that weights could go to."""
        if WEIGHTS in self.asleep:
            raise EngineNotReadyError("weights must be awake, are asleep; call wake_up(['weights']) first")
