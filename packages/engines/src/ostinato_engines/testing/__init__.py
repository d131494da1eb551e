"""For the tests of whoever builds on engines: a scripted server, and a suite that any server must pass."""

from ostinato_engines.testing.asking import Forward, WeightUpdate
from ostinato_engines.testing.conformance import CheckResult, ConformanceReport, check_server
from ostinato_engines.testing.reference import reference_distribution, reference_logprobs
from ostinato_engines.testing.scripted import RecordedRequest, Reply, ScriptedServer

__all__ = [
    "CheckResult",
    "ConformanceReport",
    "Forward",
    "RecordedRequest",
    "Reply",
    "ScriptedServer",
    "WeightUpdate",
    "check_server",
    "reference_distribution",
    "reference_logprobs",
]
