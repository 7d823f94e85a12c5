"""Chat templates in the manner of the known families, for a tokenizer of characters."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from posttrain.core.kit.tiny import CHARACTERS, END, START, make_tiny_tokenizer

EOS = "<|endoftext|>"
INST, INST_END, TOOLS, TOOLS_END = "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"
CALLS, RESULTS, RESULTS_END = "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"
HEADER, HEADER_END, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIAL = (
    *(EOS, INST, INST_END, TOOLS, TOOLS_END, CALLS, RESULTS, RESULTS_END),
    *(HEADER, HEADER_END, EOT, START, END),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
ADDED += ("</tool_response>",)
"""Tokens with a place of their own that are not special, as Qwen has them."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning of turns before the last user's message is left out; results are a user's message.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n<tools>' }}{% for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
{{- '\n</tools>\nin <tool_call></tool_call> tags<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{% set reasoning = m.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
{{- content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}
{%- set f = call.function %}
{{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}{{- f.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
# No generation prompt; ids of nine characters; tools before the last user's message.
MISTRAL = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- raise_exception('no system role') }}
{%- elif m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls %}
{%- if m.content %}{{- ' ' + m.content }}{% endif %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id|length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content.strip() + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' }}{{- m.content | tojson }}
{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""
# Contents are stripped; results have a role of their own; one call a turn.
LLAMA3 = """\
{%- for m in messages %}
{%- if m.role == 'system' or (loop.first and tools) %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{% for tool in tools %}{{- (tool | tojson) + '\n\n' }}{% endfor %}{% endif %}
{%- if m.role == 'system' %}{{- m.content | trim }}{% endif %}{{- '<|eot_id|>' }}{% endif %}
{%- if m.tool_calls is defined and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}\
{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name }}
{{- '", "parameters": ' }}{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
{%- elif m.role != 'system' %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
SIMPLE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Calls as XML; numbers and booleans are written as Python does.
QWEN_CODER = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{% for tool in tools %}
{{- '\\n' }}{{- tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{%- set is_list = value is mapping or (value is sequence and value is not string) %}
{{- '<parameter=' + name + '>\\n' + (value | tojson if is_list else value | string) }}
{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES: dict[str, str | None] = {
    "chatml": CHATML,
    "generation": GENERATION,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "llama3": LLAMA3,
    "qwen_coder": QWEN_CODER,
    "simple": SIMPLE,
    "none": None,
}
WITH_TOOLS = ("qwen3", "mistral", "llama3")


def family_tokenizer(name: str, characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A tokenizer of characters with the family's control tokens and its template."""
    made = make_tiny_tokenizer(characters + "".join(sorted(set("é🙂ß"))))
    made.add_special_tokens({"eos_token": EOS, "additional_special_tokens": list(SPECIAL[1:])})
    made.add_tokens(list(ADDED))
    made.chat_template = TEMPLATES[name]
    return made
