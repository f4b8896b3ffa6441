"""Chat templates that would run or grow without end, or reach out, are refused after bounded work."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from tests.calls import refusal_of
from tests.prompt import apply, chats, model_templates
from workbench.errors import WorkbenchError
from workbench.prompt import template_bounds, templates
from workbench.prompt.own_template import NAMES, TEMPLATE
from workbench.prompt.template_bounds import Steps, steps_for
from workbench.prompt.templates import ChatTemplate

STEPS = 150_000  # fewer than in use, for less work
MAX_CALLS, MAX_MEMORY = 12 * STEPS, 32 << 20
LONG = "{% set x = 'x' * 9999 %}{% for a in range(999) %}"
MANY_ORIGINS = "{% set x = (['a', messages[0].content] * 999)|join %}"
LOOP = "{% for a in range(99999) %}"
BILLION = "10000000000"
ENDLESS = {
    "a huge range": f"{{% for a in range({BILLION}) %}}{{% endfor %}}",
    "loops within loops": LOOP * 4 + "{% endfor %}" * 4, "loops that write": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "a loop that calls itself": "{% for a in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that doubles": "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "loops over one list": "{% set x = range(1999)|list %}" + "{% for a in x %}" * 2 + "{% endfor %}" * 2,
    "slices": LONG + "{% set y = x[1:] %}{% endfor %}",
    "searches": LONG + "{% if 'y' in x %}{% endif %}{% endfor %}",
    "maps": "{{ range(99999)|map('center', 99999)|list|length }}",
    "sums": LOOP + "{% set y = range(99999)|sum %}{% endfor %}",
    "first characters": LONG + "{% set y = x|first %}{% endfor %}",
    "halves": LONG + "{% set y = x.split('y') %}{% endfor %}",
    "searches of items": LOOP + "{% set y = range(99999)|selectattr('nope')|first %}{% endfor %}",
    "comparisons": "{% set x, y = [1] * 999, [1] * 999 %}{% for a in range(999) %}"
    "{% if x == y %}{% endif %}{% endfor %}",
    "changes": "{% set x = [1] * 9999 %}" + LOOP + "{% if loop.changed(x + [a]) %}{% endif %}{% endfor %}",
    "outputs": LOOP + "{{ messages }}{% endfor %}",
    "cuts of many origins": MANY_ORIGINS + LOOP + "{% set y = [x[-1], x[-2:], x.split('a'), x|tojson] %}{% endfor %}",
    "conversions of many origins": "{% set x = (['%(a)s', messages[0].content] * 999)|join %}{{ x % {'a': 1} }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    "keys that double": "{% set x = 1 %}" + "{% set x = (x, x) %}" * 60 + "{% set y = {x: 1} %}",
    "arguments that double": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{% set x = "
    "{varargs: 1} %}{% endif %}{% endmacro %}{{ m(40) }}",
    "named arguments that double": "{% macro m(n) %}{% if n %}{{ m(n - 1, a=kwargs, b=kwargs) }}{% else %}"
    "{% if kwargs.items()|list == 1 %}{% endif %}{% endif %}{% endmacro %}{{ m(40) }}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
}  # fmt: skip
GROWING = {
    "a text that doubles": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "a joined text that doubles": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a block that doubles": "{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "a list that doubles": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "a dict that doubles": "{% set x = 1 %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x|tojson }}",
    "a namespace that doubles": "{% set x = 1 %}" + "{% set x = namespace(a=[x, x]) %}" * 60 + "{{ x }}",
    "batches that double": "{% set x = [1] %}" + "{% set x = x|batch(2, x)|list %}" * 60 + "{{ x }}",
    "a product": f"{{{{ 'x' * {BILLION} }}}}", "a product from the left": f"{{{{ {BILLION} * 'x' }}}}",
    "a list's product": f"{{{{ ([1] * {BILLION})|length }}}}", "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{{ (9 ** 9999) ** 9999 }}", "a huge number": "{{ 9 ** 99999 }}",
    "a width": "{{ '%10000000000d' % 1 }}", "a width beside": "{{ '%*d' % (10000000000, 1) }}",
    "a width within, as a text": f"{{{{ '{{:>{{w}}}}'.format(1, w='{BILLION}') }}}}",
    "a width of the filter": "{{ '%10000000000d'|format(1) }}",
    "a width of format": "{{ '{:>10000000000}'.format(1) }}",
    "a width within": "{{ '{:>{w}}'.format(1, w=10000000000) }}", "ljust": f"{{{{ 'x'.ljust({BILLION}) }}}}",
    "rjust": f"{{{{ 'x'.rjust({BILLION}) }}}}", "zfill": f"{{{{ 'x'.zfill({BILLION}) }}}}",
    "tabs": f"{{{{ '\\t'.expandtabs({BILLION}) }}}}", "center": f"{{{{ 'x'|center({BILLION}) }}}}",
    "indent": f"{{{{ 'x\ny'|indent({BILLION}) }}}}", "batch": f"{{{{ [1]|batch({BILLION}, 1)|list }}}}",
    "slice": f"{{{{ [1]|slice({BILLION})|list }}}}", "round": f"{{{{ 5|round({BILLION}) }}}}",
    "json": f"{{{{ [[1]]|tojson(indent={BILLION}) }}}}", "replace": "{% set x = 'x' * 9999 %}{{ x|replace('x', x) }}",
    "its method": "{% set x = 'x' * 9999 %}{{ x.replace('x', x)|length }}",
    "join": "{% set x = 'x' * 9999 %}{{ range(9999)|join(x) }}",
    "its method of joining": "{% set x = 'x' * 9999 %}{{ x.join(x)|length }}",
    "translate": "{% set x = 'x' * 9999 %}{{ x.translate({120: x})|length }}",
    "sums of lists": "{{ ([[1]] * 50000)|sum(start=[])|length }}",
    "fields": "{{ ('{0}' * 9999).format('x' * 99999)|length }}",
    "percents": "{{ ('%(a)s' * 9999 % {'a': 'x' * 99999})|length }}",
    "escapes": "{{ ('&' * 9999)" + "|e|string" * 30 + "|length }}",
    "json of a deep list": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 18 + "{{ x|tojson(indent=9)|length }}",
    "the indent of json as a text": "{{ range(9999)|list|tojson(indent='x' * 9999)|length }}",
    "a time": f"{{{{ strftime_now('%{BILLION}d') }}}}",
    "views that double": "{% set x = {'a': 1} %}" + "{% set x = {'a': x.items(), 'b': x.items()} %}" * 60 + "{{ x }}",
    "namespaces that double": "{% set x = 1 %}" + "{% set x = namespace(a=x, b=x) %}" * 60 + "{{ x }}",
    "squares": "{% set n = namespace(x=9) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}",
    "a number of bytes": "{{ (1).from_bytes([1] * 9999, 'big') }}",
}  # fmt: skip
WRONG = {
    "bytes": f"{{{{ (1).to_bytes({BILLION}, 'big') }}}}", "tags": "{{ ('<>' * 99999)|striptags }}",
    "a codec": "{{ 'x'.encode('punycode') }}", "a number as it is written": "{{ " + "9" * 5000 + " }}",
    "loops that Python cannot nest": "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "lorem ipsum": "{{ lipsum(n=99999) }}", "brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "blocks": "{% if true %}" * 5000 + "{% endif %}" * 5000, "a division by nothing": "{{ 1 // 0 }}",
    "a key that is not there": "{{ {}['a'].b }}", "what is no filter": "{{ 1|nothing }}",
    "another file": "{% include 'a' %}", "no loop": "{% for a in 5 %}{% endfor %}",
    "an odd call": "{{ messages[0].content(1, 2) }}", "a wrong argument": "{{ 'x'.split(5) }}",
    "json of what is none": "{{ nothing|tojson }}",
}  # fmt: skip
WILD = ENDLESS | GROWING | WRONG
ESCAPES = (
    "{{ ''.__class__.__mro__ }}", "{{ ''['__class__'] }}", "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ messages|map(attribute='__class__')|list|first }}", "{{ '{0.__class__}'.format(1) }}",
    "{{ raise_exception.__globals__ }}", "{{ range.__globals__.sys }}", "{{ cycler.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}", "{{ self._TemplateReference__context.environment }}",
    "{{ (messages|map('string')).gi_frame.f_globals }}", "{{ messages[0].content._runs[0] }}",
    "{{ messages.append(1) }}", "{{ messages[0].update(role='system') }}", "{{ messages[0].pop('content') }}",
    "{{ '{0}'.format_map([1]) }}", "{{ strftime_now.__closure__[0] }}", "{{ namespace.__init__.__globals__ }}",
)  # fmt: skip
REAL = {
    **model_templates.ALL,
    "no_tools": model_templates.NO_TOOLS,
    "parts_alone": model_templates.PARTS_ALONE,
    "in_function_tags": model_templates.IN_FUNCTION_TAGS,
    "in_key_tags": model_templates.IN_KEY_TAGS,
    "bare": model_templates.BARE,
    "own": TEMPLATE,
    **{f"chats: {name}": each.text for name, each in chats.TEMPLATES.items()},
    "looks ahead": "{% for m in messages %}{% set later = messages[loop.index:] %}{{ messages|length }}{{ m.content }}"
    "{% if later|first is defined and tools is not none %}{% endif %}{% endfor %}",
}


def user(content: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("name", WILD)
def test_a_template_that_runs_wild_is_one_clear_error_after_bounded_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "BASE_STEPS", STEPS)
    words, calls = refusal_of(lambda: ChatTemplate(WILD[name], {}).render([user()]))
    assert "\n" not in words and len(words) < 500 and calls < MAX_CALLS
    assert words.startswith(("messages: the chat template refuses them (", "chat template: not a Jinja template ("))


@pytest.mark.parametrize("name", GROWING)
def test_a_value_that_grows_is_refused_before_it_takes_memory(name: str) -> None:
    template = ChatTemplate(GROWING[name], {})
    tracemalloc.start()
    try:
        with pytest.raises(WorkbenchError, match="it does more than messages|it computes a number of more than"):
            template.render([user()])
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_that_reaches_out_gets_nothing(text: str) -> None:
    with suppress(WorkbenchError):  # an attribute that is not shown is undefined, as others that are not there
        assert ChatTemplate(text, {}).render([user()]) == ""


@pytest.mark.parametrize("name", REAL)
def test_real_templates_take_less_than_half_of_their_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render one long message, which parts_alone reads character by character, and many short ones."""
    monkeypatch.setattr(templates, "steps_for", lambda characters: Steps(steps_for(characters).left // 2))
    template, answer = ChatTemplate(REAL[name], apply.NAMES | NAMES), {"role": "assistant", "content": "x" * 200}
    for messages in ([user("x" * 100_000)], [user("x" * 30), answer] * 300):
        template.render(messages)


def test_long_chats_are_not_wild() -> None:
    """A template's allowed work grows with the messages."""
    for messages in ([user("x" * 300_000)], [user("x" * 30)] * 2_000):
        for name in ("chat_ml", "thinking", "macros"):
            assert len(ChatTemplate(chats.TEMPLATES[name].text, apply.NAMES).render(messages)) > 60_000
