"""Which state the embedded engine is in, what it refuses in that state, and the cure it names. Knows no requests."""

from dataclasses import dataclass, field

from ostinato_engines.errors import EngineClosedError, EngineCrashedError, EngineNotReadyError
from ostinato_engines.types import EngineState, PauseMode


@dataclass(slots=True)
class EngineStatus:
    """What has happened to an engine; `now` says what that makes it."""

    loaded: bool = False
    paused: PauseMode | None = None
    asleep: set[str] = field(default_factory=set)
    """The parts that sleep."""
    stale: bool = False
    """The weights are not those of any complete update."""
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
