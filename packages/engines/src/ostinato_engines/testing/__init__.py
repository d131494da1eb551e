"""For the tests of whoever builds on engines: a scripted server, and a suite that any server must pass."""

from ostinato_engines.testing.asking import Forward, WeightUpdate
from ostinato_engines.testing.conformance import CHECKS, CheckResult, ConformanceReport, Scope, check_server
from ostinato_engines.testing.reference import logprob_bounds, reference_distribution, reference_logprobs
from ostinato_engines.testing.scripted import RecordedRequest, Reply, ScriptedServer

__all__ = [
    "CHECKS",
    "CheckResult",
    "ConformanceReport",
    "Forward",
    "RecordedRequest",
    "Reply",
    "Scope",
    "ScriptedServer",
    "WeightUpdate",
    "check_server",
    "logprob_bounds",
    "reference_distribution",
    "reference_logprobs",
]
