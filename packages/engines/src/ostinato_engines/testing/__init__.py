"""For the tests of whoever builds on engines: a scripted server, and a suite that any server must pass."""

from ostinato_engines.testing.scripted import RecordedRequest, Reply, ScriptedServer

__all__ = ["RecordedRequest", "Reply", "ScriptedServer"]
