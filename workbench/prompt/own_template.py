"""The workbench's own chat template, for tokenizers with the demo's control tokens; demo-chat was trained on it.

    <|begin|><|system|>prompt, tools, documents<|turn|>
    <|user|>question<|turn|>
    <|assistant|><|think|>thought<|/think|>text<|tool|>{"name": ..., "arguments": {...}}<|tool|>{...}<|turn|>
    <|tool|>result<|turn|><|tool|>result<|turn|>
    <|assistant|>text<|turn|>

(without the line ends). A tool is one line, `name(arguments): first line of its description`. A thought is optional;
with `enable_thinking` the prompt opens it. The rendering of a turn never depends on a later turn, so a prompt begins
with the previous prompt and its answer.
"""

from __future__ import annotations

from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer

NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
TOOL, TURN = "<|tool|>", "<|turn|>"
THINK, THOUGHT_END = "<|think|>", "<|/think|>"
TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- bos_token }}
{%- set system = text(messages[0].content) if messages and messages[0].role == 'system' else '' %}
{%- if system or tools or documents %}
{{- '<|system|>' }}{{ system }}
{%- if tools %}{{ '\\n' if system }}{{ 'Tools:' }}{% endif %}
{%- for tool in tools or [] %}
{{- '\\n' }}{{ tool.function.name }}{{ '(' }}{{ (tool.function.parameters.properties or {}) | join(', ') }}{{ '): ' }}
{{- (tool.function.description or '').split('\\n')[0] }}
{%- endfor %}
{%- for document in documents or [] %}{{ '\\n# ' ~ document.title ~ '\\n' ~ document.text }}{% endfor %}
{{- '<|turn|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>' ~ text(message.content) ~ '<|turn|>' }}
{%- elif message.role == 'tool' %}{{ '<|tool|>' ~ text(message.content) ~ '<|turn|>' }}
{%- elif message.role == 'assistant' %}{{ '<|assistant|>' }}{% generation %}
{%- if message.reasoning_content is defined %}{{ '<|think|>' ~ message.reasoning_content ~ '<|/think|>' }}{% endif %}
{{- text(message.content) }}
{%- for call in message.tool_calls or [] %}{{ '<|tool|>' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{% endfor %}
{{- '<|turn|>' }}{% endgeneration %}
{%- elif message.role != 'system' or not loop.first %}
{{- raise_exception('a ' ~ message.role ~ ' message does not belong here') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking %}{{ '<|think|>' }}{% endif %}{% endif %}
"""


def own_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the workbench's own chat template if the tokenizer has all of its control tokens, else None."""
    names = {*NAMES.values(), SYSTEM, USER, ASSISTANT, TOOL, TURN, THINK, THOUGHT_END}
    return (
        ChatTemplate(TEMPLATE, NAMES, "the workbench's chat template")
        if names <= tokenizer.special_token_ids.keys()
        else None
    )
