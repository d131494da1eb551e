"""Which format of calls a chat template writes, told by the tags in its text.

A template is not run for this: what it says about calls, it says with tags that few formats share.
"""

from typing import NamedTuple


class Marks(NamedTuple):
    """What the text of a template that writes a format holds."""

    any_of: tuple[tuple[str, ...], ...]
    """Alternatives; of one of them, every text is there."""
    none_of: tuple[str, ...] = ()
    """Texts that are not there: marks of formats that share tags with this one."""

    def fit(self, template: str) -> bool:
        """Tell whether `template` is one that writes the format."""
        found = any(all(mark in template for mark in marks) for marks in self.any_of)
        return found and not any(mark in template for mark in self.none_of)


TEMPLATE_MARKS: dict[str, Marks] = {
    "deepseek_v3": Marks((("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),)),
    "gemma4": Marks((("<|tool_call>", "<tool_call|>"),)),
    "glm": Marks((("<tool_call>", "<arg_key>", "<arg_value>"),)),
    "gpt_oss": Marks((("<|channel|>", "<|message|>", "<|call|>"),)),
    "hermes": Marks(
        (("<tool_call>", '"arguments'), ("<tool_call>", '"name"')),
        ("<arg_key>", "<function=", "<tool_calls>"),
    ),
    "kimi_k2": Marks((("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),)),
    "llama3_json": Marks((('{"name": function name, "parameters":',), ("<|python_tag|>", '"parameters": '))),
    "minimax": Marks((("<minimax:tool_call>", "<invoke name="), ("<tool_calls>", "<beginning_of_sentence>"))),
    "mistral": Marks((("[TOOL_CALLS]",),)),
    "pythonic": Marks(
        (
            ("<|tool_call_start|>",),
            ("<|tool_list_start|>",),
            ("<|python_start|>",),
            ("func_name1(params_name1=",),
            ("List of tools: [",),
        ),
        ('{"name": function name, "parameters":',),
    ),
    "qwen3_coder": Marks((("<tool_call>", "<function=", "<parameter="),)),
    "seed_oss": Marks((("<seed:tool_call>",),)),
}
"""By the name of the format. A format of your own is found by `parser_for` if it stands here."""
