"""Chat templates of several habits."""

TINY_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'You can call these tools:\\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{{- 'Write a call as <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with tool calls as JSON in tags; it never rewrites earlier turns."""

_HEADER = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_PLAIN = "{% for m in messages %}" + _HEADER + "{% endfor %}" + _PROMPT

SAMPLE_TOKENS = (
    "<|bos|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
    "<think>",
    "</think>",
    "<image>",
)
"""Added tokens of the templates below, besides those of `TINY_CHAT_TEMPLATE`."""

SAMPLE_TEMPLATES = {
    "tools": TINY_CHAT_TEMPLATE,
    "plain": _PLAIN,
    "prints_bos": "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content | trim }}{{ '<|im_end|>\\n' }}{% endfor %}" + _PROMPT,
    "default_system": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nbe kind<|im_end|>\\n' }}{% endif %}"
    + _PLAIN,
    "forgets_reasoning": (
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
        "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}" + _PROMPT
    ),
    "opens_reasoning": (
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    ),
    "opener_stops": (
        "{% for m in messages %}{{ {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>',"
        " 'system': '<|system|>'}[m.role] + '\\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    "alternates": (
        "{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + _HEADER + "{% endfor %}" + _PROMPT
    ),
    "several_closes": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '</tool_response><|im_end|>' }}"
        "{% endfor %}" + _PROMPT
    ),
    "quotes_results": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{{ m.content | tojson if m.role == 'tool' else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}" + _PROMPT
    ),
}
"""Templates by what is special about them."""
