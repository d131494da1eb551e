"""A suite that every engine must pass, ours and third parties'.

It knows the contract only: what `capabilities()` does not claim is skipped and said to be, everything else must hold.
Every wait has a deadline, so that a server that loses a request fails a check instead of hanging.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from ostinato_engines.errors import ConformanceError
from ostinato_engines.server import AsyncServerBase
from ostinato_engines.testing.asking import Forward, Skip, WeightUpdate
from ostinato_engines.testing.life_checks import LifeChecks


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
    num_concurrent: int = 64,
    long_prompt_tokens: int = 0,
    logprob_tolerance: float = 1e-4,
    deadline_s: float = 60.0,
    end_with_shutdown: bool = True,
) -> ConformanceReport:
    """Runs the suite against a started server that is otherwise unused.

    Args:
        server: With room for at least 64 tokens.
        vocab_size: Ids below are valid, this one and above are not.
        forward: A plain forward of the server's weights: turns on the check that logprobs are true.
        weight_update: Turns on the checks of weight updates; the server keeps the new weights.
        num_concurrent: Requests at once in the concurrency check.
        long_prompt_tokens: Length of one long prompt; 0 leaves that check out.
        logprob_tolerance: Absolute, per token.
        deadline_s: Per check.
        end_with_shutdown: Ends with the check that shutdown with requests in flight fails them.

    Raises:
        ConformanceError: With a line per failed check.
    """
    suite = LifeChecks(
        server, vocab_size, forward, weight_update, num_concurrent, long_prompt_tokens, logprob_tolerance
    )
    results = [await _outcome(name, check, deadline_s) for name, check in _checks(suite, end_with_shutdown)]
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
    # The server is a stranger: whatever it raises is a finding about it, not about the suite.
    except Exception as error:
        return CheckResult(name, failure=f"raised {type(error).__name__}: {error}")
    return CheckResult(name)


def _checks(suite: LifeChecks, end_with_shutdown: bool) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    names = [
        "shape",
        "limits",
        "bad_requests",
        "greedy",
        "stop_tokens",
        "logprobs",
        "seeds",
        "concurrency",
        "turns",
        "long_prompt",
        "cancellation",
        "abort",
        "pause",
        "weights",
        "broken_weights",
        "no_leaks",
    ]
    return [(name, getattr(suite, name)) for name in names + (["shutdown"] if end_with_shutdown else [])]
