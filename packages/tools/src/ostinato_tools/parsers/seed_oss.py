r"""The format of Seed-OSS: the tags of `qwen3_coder` within `<seed:tool_call>`, with reasoning in `<seed:think>`.

`<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n</seed:tool_call>`. A value is exactly
what stands between its tags. Values carry no types: the tool's schema gives them. What is no text is JSON or, as the
template writes it, a Python literal, which is read and never evaluated. See `tagged` for tags inside of values.

It cannot express: names with a line end, `<` or `>`.
"""

from typing import Any

from ostinato_tools.parsers.literals import read_literal
from ostinato_tools.parsers.schema_types import ParameterTypes
from ostinato_tools.parsers.tagged import TaggedFormat


class SeedOssParser(TaggedFormat):
    """Parser of the format of Seed-OSS."""

    name = "seed_oss"
    end_tokens = ("<seed:eos>",)
    reasoning_tags = (("<seed:think>", "</seed:think>"),)
    begin, end = "<seed:tool_call>", "</seed:tool_call>"
    call_tags = ("<function=", ">", "</function>")
    parameter_tags = ("<parameter=", ">", "</parameter>")
    shape = "<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>"

    def value(self, types: ParameterTypes, key: str, text: str) -> Any:
        """Return the value that a text means."""
        return types.read(key, text, read_literal=read_literal)
