"""Chat templates with the mechanisms of well-known models' own, for control tokens of `apply.py`."""

from __future__ import annotations

FOLDED = (  # Gemma: no system role; the system prompt stands in the first user turn
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}"
    "{% set first_user_prefix = messages[0]['content'] + '\n\n' %}{% else %}"
    "{% set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first_user_prefix = '' %}"
    "{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% elif message['content'] is iterable %}"
    "{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
TOOLS_AS_JSON = (  # Qwen 2.5, Hermes
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0]['role'] == 'system' %}"
    "{{- messages[0]['content'] }}{%- else %}{{- 'You are helpful.' }}{%- endif %}"
    "{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'\\n</tools>\\nFor each call return <tool_call>\\n{"name": <name>, "arguments": <json>}\\n</tool_call>'
    "<|im_end|>\\n' }}{%- elif messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}"
    "{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}'
    "{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' }}{{- message.content }}"
    "{{- '\\n</tool_response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
THOUGHT_DROPPED = (  # Qwen 3: a thought is kept after the last question, and dropped before it
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and "
    "not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}"
    "{%- else %}{%- set content = '' %}{%- endif %}{%- if message.role == 'assistant' %}"
    "{%- set reasoning_content = '' %}{%- if message.reasoning_content is string %}"
    "{%- set reasoning_content = message.reasoning_content %}{%- else %}{%- if '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}"
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + "
    "content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n' }}"
    "{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{- '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
THOUGHT_KEPT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments|tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endgeneration %}{% else %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content|map(attribute='text')|join('\n') }}{% endif %}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATED = (  # Llama 3.1: the date, tools in the first user turn with an indent, documents
    "{{- bos_token }}{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set system_message = system_message if system_message is string else "
    "system_message|selectattr('type', 'equalto', 'text')|map(attribute='text')|list|join(' ') %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|system|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}"
    "{%- for d in documents or [] %}{{- 'Document ' ~ loop.index ~ ': %s\\n' % d.title }}{{- d['text']|indent(2) }}"
    "{%- endfor %}{{- system_message|trim }}{{- '<|end|>' }}"
    '{%- if tools %}{{- \'<|user|>\\n\\nRespond with {"name": ..., "parameters": ...}.\\n\\n\' }}'
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- '<|end|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if not (message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|' + message['role'] + '|>\\n\\n' }}{%- if message.content is string %}{{- message['content'] | trim }}"
    "{%- else %}{%- for c in message.content %}{{- c.text }}{%- endfor %}{%- endif %}{{- '<|end|>' }}"
    "{%- elif 'tool_calls' in message %}{%- set call = message.tool_calls[0].function %}"
    "{{- '<|assistant|>\\n\\n' -}}{{- '{\"name\": \"' + call.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- call.arguments | tojson }}{{- '}' }}{{- '<|end|>' }}{%- else %}{{- '<|tool|>\\n\\n' }}"
    "{%- if message.content is mapping or (message.content is iterable and message.content is not string) %}"
    "{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n\\n' }}{%- endif %}"
)
INST = (  # Llama 2, Mistral: what is written around a turn has spaces, and an answer ends with the end token
    "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST] ' ~ ('<<SYS>>\n' ~ s ~ '\n<</SYS>>\n\n' if loop.first and s else '') ~ (m.content if m.content is "
    "string else m.content|map(attribute='text')|join) ~ ' [/INST]' }}{% elif m.role == 'tool' %}[INST] {{ {'content': "
    "m.content}|tojson(sort_keys=true) }} [/INST]{% else %}{{ ' ' ~ m.content|string|trim ~ ' ' ~ eos_token }}"
    "{% endif %}{% endfor %}"
)
_TAGGED_HEAD = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'assistant' or not m.tool_calls %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>assistant\n' + (m.content or '') }}{% for c in m.tool_calls %}{% set c = c.function %}"
)
_TAGGED_TAIL = (
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_FUNCTION_TAGS = (  # Qwen3-Coder: values as Python writes them
    _TAGGED_HEAD + "{% if loop.first and not m.content %}{% else %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' }}{{ v | tojson | safe if v is mapping or (v is sequence and v is not string) "
    "else v | string }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}" + _TAGGED_TAIL
)
IN_KEY_TAGS = (  # GLM 4.5 and later
    _TAGGED_HEAD + "{{ '\n<tool_call>' + c.name }}{% for k, v in c.arguments.items() %}"
    "{{ '\n<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>' }}"
    "{% endfor %}{{ '\n</tool_call>' }}" + _TAGGED_TAIL
)
BARE = (  # Llama 3.1 to 3.3: a call is JSON behind no token, and an answer has one
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}{{ '<|im_start|>assistant\n\n' }}"
    '{{ \'{"name": "\' + c.name + \'", "parameters": \' }}{{ c.arguments | tojson }}{{ "}" }}<|im_end|>'
    "{% else %}{{ '<|im_start|>' + m.role + '\n\n' + m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('Only user, assistant and tool roles are supported, with the exception of an initial optional "
    "system message!') }}{% elif m.role in ['user', 'system'] %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}{{ short(m.tool_call_id) }}"
    "[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}CALLS{{ eos_token }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
).replace(
    "{{ short(m.tool_call_id) }}",
    (
        "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    ),
)
_CHECKED = (
    "{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
)
SHORT_IDS = _MISTRAL.replace(
    "CALLS",
    (  # Mistral up to its seventh tokenizer
        "[TOOL_CALLS] [" + _CHECKED + "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
        "{{ ', ' if not loop.last }}{% endfor %}]"
    ),
)
NAMED = _MISTRAL.replace(
    "CALLS",
    (  # Mistral from its eleventh on
        _CHECKED + "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}"
    ),
)
WITH_IDS = NAMED.replace("+ '[ARGS]'", "+ '[CALL_ID]' + c.id + '[ARGS]'")  # Mistral Small 3.2
LONG_IDS = (
    SHORT_IDS.replace("| length != 9", "| length < 9")
    .replace("+ c.id", "+ c.id[-9:]")
    .replace(  # Small 3.1
        "'call_id': m.tool_call_id", "'call_id': m.tool_call_id[-9:]"
    )
)
IN_OWN_MARKS = IN_FUNCTION_TAGS.replace("tool_call>", "own:call>")  # Seed-OSS, with control tokens of its own
IN_GROUP = (  # MiniMax M2: one pair of control tokens around all calls
    _TAGGED_HEAD + "{{ '\n<minimax:tool_call>\n' if loop.first }}{{ '<invoke name=\"' + c.name + '\">\n' }}"
    "{% for k, v in c.arguments | items %}{{ '<parameter name=\"' ~ k ~ '\">' ~ (v if v is string else v | tojson) ~ "
    "'</parameter>\n' }}{% endfor %}</invoke>\n{{ '</minimax:tool_call>' if loop.last }}" + _TAGGED_TAIL
)
FENCED = (  # DeepSeek up to R1
    _TAGGED_HEAD + "{{ '<|calls|>' if loop.first else '\n' }}"
    "{{ '<|call|>function<|sep|>' + c.name + '\n```json\n' + c.arguments | tojson + '\n```<|/call|>' }}"
    "{{ '<|/calls|>' if loop.last }}" + _TAGGED_TAIL
)
NO_TOOLS = (  # SmolLM2: any role is written, and nothing of tools and calls
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS_ALONE = (  # SmolVLM, LLaVA: a text is read in a part, and nowhere else
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ':' }}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
_PARTS = "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
_TURN = "{% for m in messages %}<{{ m.role }}>"
PARTS_WHERE = {  # a text is read in a part alone, in some talks
    "question_last": "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last message must be a user') }}"
    "{% endif %}" + _TURN + _PARTS + "{% endfor %}",
    "with_tools": _TURN + "{% if m.role != 'tool' %}{{ m.content if m.content is string }}{% elif tools %}"
    + _PARTS + "{% endif %}{% endfor %}",
    "not_last": _TURN + "{% if m.role == 'user' and not loop.last %}" + _PARTS
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "by_argument": _TURN + "{% if as_parts %}" + _PARTS + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "first_part": _TURN + "{% if m.content[0].type == 'text' %}{% endif %}" + _PARTS + "{% endfor %}",  # SmolVLM's way
    "mixed": _TURN + "{% if m.role == 'system' %}{{ m.content[0]['text'] + '' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "generated": _TURN + "{% generation %}" + _PARTS + "{% endgeneration %}{% endfor %}",
}  # fmt: skip
ALL = {
    "folded": FOLDED, "tools_as_json": TOOLS_AS_JSON, "thought_dropped": THOUGHT_DROPPED,
    "thought_kept": THOUGHT_KEPT, "dated": DATED, "inst": INST,
}  # fmt: skip
