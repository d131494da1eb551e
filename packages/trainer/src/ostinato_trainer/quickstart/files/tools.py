"""The tools of the quickstart's agent: every `function_tool` in this file is offered to the model."""

from ostinato_tools.calculator import calculator

__all__ = ["calculator"]
