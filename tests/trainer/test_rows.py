"""What a row must be, and what an agent gets of it."""

import json
from typing import Any

import pytest

from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.data.rows import check_row, row_item

PROMPT = [{"role": "user", "content": "q"}]
CONFIG = DataConfig()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({}, "prompt must be there"),
        ({"prompt": PROMPT, "sampling_params": 1}, "sampling_params must not be a column"),
        ({"prompt": PROMPT, "raw_prompt": PROMPT}, "raw_prompt must not be a column beside prompt"),
        ({"prompt": PROMPT, "index": [1]}, "index must be a whole number or text, got [1]"),
        (
            {"prompt": PROMPT, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"t": None}}},
            "extra_info.tools_kwargs must name a tool",
        ),
        ({"prompt": "q"}, "prompt must be a list of messages, got str"),
        ({"prompt": []}, "prompt must hold at least one message"),
        ({"prompt": ["q"]}, r"prompt[0] must be a message"),
        ({"prompt": [*PROMPT, {"content": "q"}]}, "prompt[1].role must be text such as user, got the keys content"),
        (
            {"prompt": [{"from": "human", "value": "q"}]},
            "prompt[0].role must be text such as user, got the keys from, value",
        ),
        ({"prompt": [{"role": 3, "content": "q"}]}, "prompt[0].role must be text such as user, got 3"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content must be text"),
        ({"prompt": [{"role": "user", "content": 3}]}, "prompt[0].content must be text or a list"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
            "prompt[0].content must have text parts only, got a part of type 'image'",
        ),
        ({"prompt": PROMPT, "images": ["x"]}, "images must be empty"),
        ({"prompt": PROMPT, "extra_info": 3}, "extra_info must be a mapping"),
        ({"prompt": PROMPT, "reward_model": "x"}, "reward_model must be a mapping"),
        ({"prompt": PROMPT, "extra_info": {"tools_kwargs": [1]}}, "extra_info.tools_kwargs must be a mapping"),
        ({"prompt": PROMPT, "extra_info": {"tools_kwargs": {"t": 1}}}, "extra_info.tools_kwargs.t must be a mapping"),
        ({"prompt": PROMPT, "extra_info": {"need_tools_kwargs": True}}, "extra_info.tools_kwargs must name a tool"),
        ({"prompt": PROMPT, "extra_info": {"index": 1.5}}, "extra_info.index must be a whole number or text, got 1.5"),
        ({"prompt": PROMPT, "extra_info": {"index": True}}, "extra_info.index must be a whole number or text"),
        ({"prompt": PROMPT, "extra_info": {"tool_selection": "calc"}}, "extra_info.tool_selection must be a list"),
        ({"prompt": PROMPT, "extra_info": {"tool_selection": [1]}}, "extra_info.tool_selection must be a list"),
        (
            {"prompt": PROMPT, "reward_model": {"ground_truth": float("nan")}},
            "reward_model.ground_truth must be an answer, got nan",
        ),
        ({"prompt": PROMPT, "agent_name": 3}, "agent_name must be text"),
        ({"prompt": PROMPT, "data_source": ""}, "data_source must be text"),
    ],
)
def test_a_wrong_row_is_named_by_its_field(row: dict[str, Any], field: str) -> None:
    """The first thing wrong with a row is said in a sentence that begins with the field and ends with a cure."""
    problem = check_row(row, CONFIG)
    assert problem is not None
    assert problem.startswith(field)
    assert "; " in problem


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT},
        {"prompt": json.dumps(PROMPT), "extra_info": json.dumps({"index": 3}), "reward_model": '{"ground_truth": "1"}'},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
        {
            "prompt": [
                *PROMPT,
                {"role": "assistant", "content": None, "tool_calls": [{}]},
                {"role": "tool", "content": ""},
            ]
        },
        {"prompt": PROMPT, "images": [], "agent_name": None},
    ],
)
def test_right_rows_have_no_problem(row: dict[str, Any]) -> None:
    """Lists or JSON text, text parts, calls without content and empty media columns are all right."""
    assert check_row(row, CONFIG) is None


def test_media_columns_are_ignored_on_request() -> None:
    """With return_multi_modal_inputs=false rows with images pass, and agents do not get the column."""
    config = DataConfig(return_multi_modal_inputs=False)
    row = {"prompt": PROMPT, "images": ["x"]}
    assert check_row(row, config) is None
    assert "images" not in row_item(row, config, 0)


def test_an_item_has_the_row_and_what_agents_read() -> None:
    """An item holds the row's own fields and raw_prompt, extra_info, tools_kwargs and index."""
    kwargs = {"calc": {"create_kwargs": {"x": None}}}
    row = {
        "prompt": PROMPT,
        "data_source": "s",
        "ability": "math",
        "agent_name": "tool_agent",
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"index": 7, "tools_kwargs": json.dumps(kwargs)},
    }
    item = row_item(row, CONFIG, 2)
    assert item["raw_prompt"] == PROMPT
    assert item["tools_kwargs"] == item["extra_info"]["tools_kwargs"] == kwargs
    assert item["index"] == 7
    assert {key: item[key] for key in ("data_source", "ability", "agent_name", "reward_model")} == {
        key: row[key] for key in ("data_source", "ability", "agent_name", "reward_model")
    }


def test_an_item_of_a_bare_row_has_defaults() -> None:
    """A row with a prompt only has its place as index and empty mappings."""
    item = row_item({"question": PROMPT}, DataConfig(prompt_key="question"), 5)
    assert (item["index"], item["extra_info"], item["tools_kwargs"]) == (5, {}, {})
    assert item["raw_prompt"] == PROMPT


def test_gaps_of_a_table_are_no_values() -> None:
    """What tables write for a missing name or number, null or NaN, is as if the column were not there."""
    gap = float("nan")
    row = {"prompt": PROMPT, "agent_name": gap, "data_source": None, "extra_info": {"index": gap}}
    assert check_row(row, CONFIG) is None
    item = row_item(row, CONFIG, 4)
    assert item["index"] == 4
    assert item.keys().isdisjoint({"agent_name", "data_source"})


@pytest.mark.parametrize(("written", "read"), [(3, 3), (3.0, 3), ("train-3", "train-3"), (None, 9)])
def test_an_index_is_a_number_or_text(written: object, read: object) -> None:
    """A number with a fraction of nothing, as a column with gaps has it, is the number; none is the row's place."""
    row = {"prompt": PROMPT, "extra_info": {"index": written}}
    assert check_row(row, CONFIG) is None
    item = row_item(row, CONFIG, 9)
    assert (item["index"], type(item["index"])) == (read, type(read))


@pytest.mark.parametrize(("inside", "read"), [({"index": "a"}, "a"), ({"index": None}, 3), ({}, 3)])
def test_a_column_index_is_kept(inside: dict[str, Any], read: object) -> None:
    """A row's own index reaches its agent where extra_info has none."""
    row = {"prompt": PROMPT, "index": 3, "extra_info": inside}
    assert check_row(row, CONFIG) is None
    assert row_item(row, CONFIG, 9)["index"] == read


def test_a_tool_of_which_a_row_says_null_is_not_asked_for() -> None:
    """Null for a tool, as a table written as JSON has it, is as if the tool were not named; null for all lets a column speak."""
    row = {"prompt": PROMPT, "extra_info": {"tools_kwargs": {"calc": {"x": 1}, "search": None}}}
    assert check_row(row, CONFIG) is None
    item = row_item(row, CONFIG, 0)
    assert item["tools_kwargs"] == item["extra_info"]["tools_kwargs"] == {"calc": {"x": 1}}
    row = {"prompt": PROMPT, "extra_info": {"tools_kwargs": None}, "tools_kwargs": {"calc": {}}}
    assert check_row(row, CONFIG) is None
    assert row_item(row, CONFIG, 0)["tools_kwargs"] == {"calc": {}}
