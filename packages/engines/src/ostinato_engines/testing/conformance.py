"""A suite that every engine must pass, ours and third parties'.

It knows the contract only: what `capabilities()` does not claim is skipped and said to be, everything else must hold.
Every wait has a deadline, so that a server that loses a request fails a check instead of hanging.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import msgspec

from ostinato_engines.errors import ConformanceError, EngineInputError
from ostinato_engines.server import AsyncServerBase
from ostinato_engines.testing.asking import Forward, Skip, Subject, WeightUpdate
from ostinato_engines.testing.life_checks import LifeChecks


class Scope(StrEnum):
    """How much is asked of a server."""

    QUICK = "quick"
    """64 requests at once and a prompt of 512 tokens: seconds for a small model."""
    FULL = "full"
    """1,000 requests at once, a prompt of 10,000 tokens, and prompts as long as the server takes."""


_SIZES = {Scope.QUICK: (64, 512), Scope.FULL: (1000, 10_000)}
CHECKS = (
    "shape",
    "limits",
    "bad_requests",
    "greedy",
    "ordering",
    "stop_tokens",
    "logprobs",
    "only_choice",
    "seeds",
    "concurrency",
    "turns",
    "long_prompt",
    "cancellation",
    "abort",
    "pause",
    "weights",
    "versions",
    "broken_weights",
    "sleep",
    "no_leaks",
    "shutdown",
)
"""All checks, in the order in which they run."""


class CheckResult(msgspec.Struct, frozen=True):
    """One check: failed where `failure` is set, skipped where `skipped` is."""

    name: str
    failure: str = ""
    skipped: str = ""


class ConformanceReport(msgspec.Struct, frozen=True):
    """All checks in order."""

    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.failure)

    def raise_for_failures(self) -> None:
        """Raises `ConformanceError` with a line per failed check."""
        if self.failures:
            lines = "\n".join(f"  {result.name}: {result.failure}" for result in self.failures)
            raise ConformanceError(f"server must keep the contract, got {len(self.failures)} failed check(s):\n{lines}")


async def check_server(
    server: AsyncServerBase,
    *,
    vocab_size: int,
    forward: Forward | None = None,
    weight_update: WeightUpdate | None = None,
    scope: Scope | str = Scope.QUICK,
    num_concurrent: int | None = None,
    long_prompt_tokens: int | None = None,
    logprob_tolerance: float = 1e-4,
    deadline_s: float = 60.0,
    checks: Sequence[str] = CHECKS,
    end_with_shutdown: bool = True,
) -> ConformanceReport:
    """Runs the suite against a started server that is otherwise unused.

    Args:
        server: With room for at least 64 tokens.
        vocab_size: Ids below are valid, this one and above are not.
        forward: A plain forward of the server's weights: turns on the check that logprobs are true, and lets outputs
            part where two tokens are equally probable but for rounding.
        weight_update: Turns on the checks of weight updates; the server keeps the new weights.
        scope: `Scope.FULL` also asks what takes a slow engine minutes.
        num_concurrent: Requests at once in the concurrency check, instead of the scope's number.
        long_prompt_tokens: Length of one long prompt, instead of the scope's; at most `max_model_len` allows. 0 leaves
            that check out.
        logprob_tolerance: Absolute, per token, at temperature 1: 1e-4 fits float32, some 0.1 bfloat16, whose logits
            depend that much on what else is in the batch.
        deadline_s: Per check.
        checks: Names of those to run; what is left out is reported as skipped.
        end_with_shutdown: Ends with the check that shutdown with requests in flight fails them.

    Raises:
        ConformanceError: With a line per failed check.
    """
    if unknown := set(checks) - set(CHECKS):
        raise EngineInputError(f"checks must name checks, got {unknown.pop()!r}; they are {', '.join(CHECKS)}")
    scope = Scope(scope)
    many, long = _SIZES[scope]
    suite = LifeChecks(
        Subject(
            server=server,
            vocab_size=vocab_size,
            forward=forward,
            weight_update=weight_update,
            num_concurrent=many if num_concurrent is None else num_concurrent,
            long_prompt_tokens=long if long_prompt_tokens is None else long_prompt_tokens,
            tolerance=logprob_tolerance,
            thorough=scope is Scope.FULL,
        )
    )
    results = []
    for name in CHECKS if end_with_shutdown else CHECKS[:-1]:
        if name not in checks:
            results.append(CheckResult(name, skipped="left out as asked"))
        else:
            results.append(await _outcome(name, getattr(suite, name), deadline_s))
    report = ConformanceReport(tuple(results))
    report.raise_for_failures()
    return report


async def _outcome(name: str, check: Callable[[], Awaitable[None]], deadline_s: float) -> CheckResult:
    try:
        async with asyncio.timeout(deadline_s):
            await check()
    except Skip as skip:
        return CheckResult(name, skipped=str(skip))
    except TimeoutError:
        return CheckResult(name, failure=f"did not end within {deadline_s} s")
    except ConformanceError as error:
        return CheckResult(name, failure=str(error))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return CheckResult(name, failure="raised CancelledError, though nobody cancelled the request")
    # The server is a stranger: whatever it raises is a finding about it, not about the suite.
    except Exception as error:
        return CheckResult(name, failure=f"raised {type(error).__name__}: {error}")
    return CheckResult(name)
