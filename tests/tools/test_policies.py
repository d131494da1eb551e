"""What a policy may say, and where it may be said."""

import textwrap
from pathlib import Path

import pytest

from ostinato_tools import (
    BaseTool,
    ToolConfigError,
    ToolPolicy,
    ToolRegistry,
    ToolSchemaError,
    function_tool,
    load_tools,
)
from ostinato_tools.policies import policy_from_mapping
from ostinato_tools.testing import CounterTool, make_schema

WRONG = [
    ({"timeout_s": 0}, "timeout_s must be a positive finite number, got 0"),
    ({"timeout_s": "5"}, "timeout_s"),
    ({"timeout_s": True}, "timeout_s"),
    ({"timeout_s": float("nan")}, "timeout_s"),
    ({"max_retries": -1, "idempotent": True}, "max_retries"),
    ({"max_retries": 1.0, "idempotent": True}, "max_retries"),
    ({"max_retries": 1}, "set idempotent if running a call twice does no harm"),
    ({"idempotent": 1}, "idempotent must be true or false"),
    ({"backoff_s": -1}, "backoff_s"),
    ({"max_backoff_s": None}, "max_backoff_s"),
    ({"max_calls_per_s": 0}, "max_calls_per_s"),
    ({"burst": 2}, "set max_calls_per_s"),
    ({"max_calls_per_s": 1, "burst": 0}, "burst"),
    ({"max_concurrency": 0}, "max_concurrency"),
    ({"max_wait_s": 1}, "nothing to wait for"),
    ({"max_calls_per_trajectory": 0}, "max_calls_per_trajectory"),
    ({"cache_size": 5}, "set pure if equal arguments"),
    ({"cache_size": -1, "pure": True}, "cache_size"),
    ({"breaker_failures": 0}, "breaker_failures"),
    ({"breaker_reset_s": 0}, "breaker_reset_s"),
    ({"fallback": "x"}, "set result_schema or validate_result"),
    ({"fallback": {"x": float("inf")}, "result_schema": {}}, "fallback must be JSON"),
    ({"fallback": 5, "result_schema": {}}, "fallback"),
    ({"result_schema": "object"}, "result_schema"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_a_wrong_value_is_refused(values: dict, said: str) -> None:
    """A value out of range, or one that asks for another, is one error with the cure, in Python and from a file."""
    with pytest.raises(ToolConfigError, match=rf"{said}.*; |; {said}"):
        ToolPolicy(**values)
    with pytest.raises(ToolConfigError, match=f"(?s)policy of here.*{said}"):
        policy_from_mapping(values, "here")


def test_a_policy_sets_nothing_by_itself() -> None:
    """An empty policy, and one with only a deadline, leave nothing to be kept around a call."""
    assert not ToolPolicy().is_guarded
    assert not ToolPolicy(timeout_s=3, idempotent=True, pure=True).is_guarded
    assert ToolPolicy(max_concurrency=1).is_guarded


def test_a_check_must_be_callable() -> None:
    """`validate_result` is a function, and not to be had in a file."""
    with pytest.raises(ToolConfigError, match="validate_result must be callable"):
        ToolPolicy(validate_result="json")  # type: ignore[arg-type]
    with pytest.raises(ToolConfigError, match=r"known keys, got .*validate_result"):
        policy_from_mapping({"validate_result": "json"}, "here")


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_file_changes_fields_of_the_tools_own_policy(tmp_path: Path) -> None:
    """What the tool says of itself stays; what the file sets is set; a tool without a policy gets one."""
    module = write(
        tmp_path / "policy_tools_a.py",
        """
        from ostinato_tools import ToolPolicy, function_tool
        from ostinato_tools.testing import CounterTool, make_schema

        @function_tool(schema=make_schema("look"), policy=ToolPolicy(idempotent=True, timeout_s=3))
        async def look() -> str:
            return ""

        class Patient(CounterTool):
            policy = ToolPolicy(timeout_s=9, max_concurrency=2)
        """,
    )
    config = write(
        tmp_path / "tools.yaml",
        """
        tools:
          - {class_name: policy_tools_a.look, policy: {max_retries: 2}}
          - {class_name: policy_tools_a.Patient, policy: {max_concurrency: 5}}
          - class_name: ostinato_tools.gsm8k.CalcGsm8kReward
            policy: {max_calls_per_trajectory: 3}
        """,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        registry = load_tools(config)
    assert registry.get("look").policy == ToolPolicy(idempotent=True, timeout_s=3, max_retries=2)
    assert registry.get("counter").policy == ToolPolicy(timeout_s=9, max_concurrency=5)
    assert registry.get("calc_gsm8k_reward").policy == ToolPolicy(max_calls_per_trajectory=3)
    assert load_tools(None, module).get("look").policy == ToolPolicy(idempotent=True, timeout_s=3)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("{max_retry: 1}", r"must have known keys, got \['max_retry'\]; known are timeout_s, idempotent, max_retries"),
        ("{max_retries: 1}", "set idempotent"),
        ("5", "must be a mapping"),
        ("{pure: true}", "pure of .* must be false for a tool with state"),
        ("{result_schema: {type: objekt}}", "result_schema of"),
    ],
)
def test_a_wrong_policy_in_a_file_names_file_and_cure(tmp_path: Path, policy: str, said: str) -> None:
    """Unknown keys, unsafe wishes and other mistakes name the file, the entry and the cure."""
    config = write(
        tmp_path / "tools.yaml", f"tools: [{{class_name: ostinato_tools.testing.CounterTool, policy: {policy}}}]"
    )
    with pytest.raises((ToolConfigError, ToolSchemaError), match=rf"(?s){said}") as caught:
        load_tools(config)
    assert "tools.yaml, tools[0]" in str(caught.value)


def test_a_policy_must_be_one() -> None:
    """A dict as class attribute or at the decorator is refused when the tool is registered."""

    class Sloppy(CounterTool):
        policy = {"timeout_s": 5}  # type: ignore[assignment]  # noqa: RUF012 - the mistake that is tested

    with pytest.raises(ToolConfigError, match=r"must be a ToolPolicy.*write ToolPolicy\(\.\.\.\)"):
        ToolRegistry().add_class(Sloppy)
    sloppy = function_tool(schema=make_schema("f"), policy={"timeout_s": 5})(lambda: "")  # type: ignore[arg-type]
    with pytest.raises(ToolConfigError, match="must be a ToolPolicy"):
        ToolRegistry([sloppy])


def test_policies_are_given_where_tools_are_registered() -> None:
    """Whoever registers a tool may replace its policy; the same tool under another policy is a collision."""
    tool = function_tool(schema=make_schema("f"), policy=ToolPolicy(timeout_s=5))(lambda: "")
    registry = ToolRegistry()
    registry.add_function(tool, policy=ToolPolicy(timeout_s=6))
    registry.add_class(CounterTool, policy=ToolPolicy(max_concurrency=1))
    assert registry.get("f").policy == ToolPolicy(timeout_s=6)
    assert registry.get("counter").policy == ToolPolicy(max_concurrency=1)
    with pytest.raises(ToolConfigError, match="pure"):
        ToolRegistry().add_class(CounterTool, policy=ToolPolicy(pure=True))
    with pytest.raises(ValueError, match="unique"):
        registry.add_function(tool)
    assert BaseTool.policy is None
