r"""The format of Qwen3-Coder and others: XML-like tags around plain text.

`<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>`, with reasoning, if any, in
`<think>...</think>`. Of a value exactly one newline at its begin and one at its end belong to the tags; everything else is
the value, nothing is stripped or unescaped. Values carry no types: the tool's schema gives them. What is no text is JSON
(or, for true, false and null, Python's spelling, which the templates use). See `tagged` for tags inside of values.

It cannot express: names with a line end, `<` or `>`.
"""

from ostinato_tools.parsers.tagged import TaggedFormat


class Qwen3CoderParser(TaggedFormat):
    """Parser of the format of Qwen3-Coder."""

    name = "qwen3_coder"
    end_tokens = ("<|im_end|>", "<|endoftext|>")
    begin, end = "<tool_call>", "</tool_call>"
    call_tags = ("<function=", ">", "</function>")
    parameter_tags = ("<parameter=", ">", "</parameter>")
    shape = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"

    def value_text(self, text: str) -> str:
        """Return a value's text: one newline at either end belongs to the tags."""
        return text.removeprefix("\n").removesuffix("\n")
