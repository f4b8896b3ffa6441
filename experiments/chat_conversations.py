"""Draw the conversations that demo-chat is trained and judged on from a seed: a system prompt, tools, several
exchanges.

`draw(side, seed)` is one conversation of the training or the held-out side (see `chat_draw`);
`python -m experiments.chat_conversations` prints a few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from experiments import chat_phrases as phrases
from experiments.chat_draw import SPELLINGS, Draw, Side
from experiments.chat_exchanges import (
    TOOLS,
    Exchange,
    as_follow_up,
    calculate_exchange,
    calculated,
    chain_exchange,
    convert_exchange,
    converted,
    direct,
    failed,
    hard_calculation,
    looked_up,
    lookup_exchange,
    parallel_exchange,
    story_exchange,
    sum_exchange,
    worked_out,
)
from experiments.chat_format import segments
from workbench.measure.agent import AgentQuestion
from workbench.prompt.tools import declare

DECLARATIONS = {name: declare(function).declaration() for name, function in TOOLS.items()}
ABILITIES = {"calculate": "calculate", "convert": "convert units", "lookup": "look up Python names"}
NO_TOOL = "I have no tool for that."
REFUSAL = "I cannot help with that."
MAX_EXCHANGES = 5


@dataclass(frozen=True)
class ChatSample:
    """A whole conversation.

    With `thinking`, assistant messages have thoughts, cut to their first `kept` fraction of words as by a budget.
    """

    system: str
    tools: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    thinking: bool = False
    kept: float = 1.0

    @property
    def declarations(self) -> list[dict[str, Any]]:
        return [DECLARATIONS[name] for name in self.tools]

    def messages(self, exchanges: int | None = None) -> list[dict[str, Any]]:
        """Return the messages of the first `exchanges` exchanges (default: all), in the form that chat templates
        take."""
        made: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges[:exchanges]:
            made.append({"role": "user", "content": exchange.question})
            for calls, thought in zip((*exchange.rounds, ()), exchange.thoughts, strict=True):
                message: dict[str, Any] = {"role": "assistant", "content": "" if calls else exchange.answer}
                if self.thinking and thought:
                    parts = thought.split(" ")
                    message["reasoning_content"] = " ".join(parts[: max(1, int(self.kept * len(parts)))])
                if calls:
                    message["tool_calls"] = [
                        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                        for call in calls
                    ]
                made.append(message)
                made += [{"role": "tool", "name": call.name, "content": call.result} for call in calls]
        return made


WITH_TOOLS: dict[str, Callable[[Draw, bool], Exchange]] = {
    "calculate": calculate_exchange, "story": story_exchange, "convert": convert_exchange, "lookup": lookup_exchange,
    "parallel": parallel_exchange, "sum": sum_exchange, "chain": chain_exchange,
}  # fmt: skip
NO_CALLS = ("talk", "refused", "no_tool", "worked_out")
KINDS = (*WITH_TOOLS, "follow_up", *NO_CALLS)
SHARES = {  # of a conversation's exchanges; small sums without a calculator are worked out, others have no tool
    "calculate": 20, "story": 8, "convert": 16, "lookup": 14, "parallel": 9, "sum": 9, "chain": 9, "talk": 7,
    "refused": 8,
}  # fmt: skip


def draw(side: Side, seed: int, kind: str | None = None, thinking: bool | None = None) -> ChatSample:
    """Return conversation number `seed` of a side. With `kind`, it has one exchange of that kind, and tools that
    fit."""
    made = Draw(side, f"{seed} {kind or ''}")
    thinking = made.chance(0.4) if thinking is None else thinking
    if kind is not None:
        tools = _fitting_tools(made, kind)
        setting = _setting(made, tools)
        return ChatSample(setting.system, tools, tuple(_exchanges(made, kind, setting)), thinking)
    setting = _setting(made, _some_tools(made))
    exchanges: list[Exchange] = []
    while not exchanges or (len(exchanges) < MAX_EXCHANGES and made.chance(0.5)):
        chosen = made.rng.choices(list(SHARES), list(SHARES.values()))[0]
        exchanges += _exchanges(made, "follow_up" if made.chance(0.15) else chosen, setting)
    kept = made.rng.random() if thinking and made.chance(0.15) else 1.0
    return ChatSample(setting.system, setting.tools, tuple(exchanges), thinking, kept)


@dataclass(frozen=True)
class _Setting:
    """The frame of a conversation: the system prompt, the assistant's name, whether answers are brief, the tools."""

    system: str
    name: str
    brief: bool
    tools: tuple[str, ...]

    @property
    def abilities(self) -> str:
        able = [ABILITIES[name] for name in ABILITIES if name in self.tools]
        if not able:
            return "I can talk and add small numbers."
        return f"I can {', '.join(able[:-1])}{' and ' if able[1:] else ''}{able[-1]}."


def _setting(made: Draw, tools: tuple[str, ...]) -> _Setting:
    name, parts = "demo-chat", []
    if made.chance(0.4):
        name = made.choice(phrases.ASSISTANTS)
        parts.append(made.choice(phrases.NAMED).format(name=name))
    elif made.chance(0.6):
        parts.append(made.choice(phrases.PERSONAS))
    brief = made.chance(0.2)
    if brief:
        parts.append(made.choice(phrases.BRIEF))
    return _Setting(" ".join(parts), name, brief, tools)


def _some_tools(made: Draw) -> tuple[str, ...]:
    names, which = sorted(TOOLS), made.rng.random()
    if which < 0.3:
        names.remove("calculate")
    count = len(names) if which >= 0.4 else made.rng.randint(0, len(names))
    return tuple(made.rng.sample(names, count))


def _fitting_tools(made: Draw, kind: str) -> tuple[str, ...]:
    names = sorted(TOOLS)
    if kind in ("worked_out", "no_tool"):
        names.remove("calculate")
        names = made.rng.sample(names, made.rng.randint(0, 2 if kind == "worked_out" else 1))
    return tuple(made.rng.sample(names, len(names)))


def _exchanges(made: Draw, kind: str, setting: _Setting) -> list[Exchange]:
    """Return an exchange of about this kind that the setting's tools allow, or two with a question that goes on."""
    if kind == "talk":
        return _talk(made, setting)
    if kind == "refused":
        names = {"place": phrases.PLACES, "thing": phrases.GOODS, "who": phrases.WHO}
        values = {name: made.choice(options) for name, options in names.items()}
        question = made.phrase(phrases.REFUSED).format(**values)
        return [direct("refused", question, REFUSAL, "I can neither know nor do this.")]
    if kind == "follow_up":
        able = [each for each in ABILITIES if each in setting.tools]
        if able:
            first = WITH_TOOLS[made.choice(able)](made, setting.brief)
            return [first, *_follow_up(made, first, setting.brief)]
        kind = "calculate"
    if kind not in ("no_tool", "worked_out"):
        exchange = WITH_TOOLS[kind](made, setting.brief)
        if exchange.tools <= set(setting.tools):
            return [exchange]
        kind = "worked_out" if "calculate" not in setting.tools and made.chance(0.7) else "no_tool"
    if kind == "worked_out":
        return [worked_out(made, setting.brief)]
    return [_without_tool(made, setting)]


def _without_tool(made: Draw, setting: _Setting) -> Exchange:
    """Return a question for a tool that is not there, which is not small enough to be worked out in the head."""
    missing = made.choice([name for name in ABILITIES if name not in setting.tools])
    exchange = hard_calculation(made) if missing == "calculate" else WITH_TOOLS[missing](made, setting.brief)
    return direct("no_tool", exchange.question, NO_TOOL, "There is no tool for this.")


def _talk(made: Draw, setting: _Setting) -> list[Exchange]:
    """Return small talk; a name that is given may be asked for in the next question."""
    answer = made.choice(sorted(phrases.TALK))
    values = {
        "name": setting.name, "can": setting.abilities, "who": made.choice(phrases.WHO),
        "word": made.choice(phrases.WORDS),
    }  # fmt: skip
    question = made.phrase(phrases.TALK[answer]).format(**values)
    made_exchange = direct("talk", question, answer.format(**values), "No tool is needed.")
    if answer != "Hello {who}!" or made.chance(0.4):
        return [made_exchange]
    recall = direct("talk", made.phrase(phrases.RECALL), f"Your name is {values['who']}.", "The name was given.")
    return [made_exchange, recall]


def _follow_up(made: Draw, first: Exchange, brief: bool) -> list[Exchange]:
    """Return a question that goes on from `first`, if it had a result."""
    call = first.rounds[0][0]
    if failed(call.result):
        return []
    if call.name == "lookup":
        name = made.function()
        return [as_follow_up(looked_up(made.phrase(phrases.AND_LOOKUP).format(f=name), name, brief))]
    if call.name == "calculate":
        expression = made.choice(sorted(phrases.AND_OPERATION))
        more = made.number(2)
        question = made.phrase(phrases.AND_OPERATION[expression]).format(a=more)
        return [as_follow_up(calculated("calculate", question, expression.format(r=call.result, a=more), brief))]
    unit, to, value = call.arguments["unit"], call.arguments["to"], str(call.arguments["value"])
    if made.chance(0.5):
        names = next(names for names in SPELLINGS.values() if unit in names)
        to = made.choice([name for name in names if name not in (unit, to)])
        question = made.phrase(phrases.AND_IN).format(t=to)
    else:
        value = made.number()
        question = made.phrase(phrases.AND_VALUE).format(v=value, u=unit)
    return [as_follow_up(converted(question, value, unit, to, brief))]


def questions(count: int, kinds: str = "", first: int = 0) -> list[AgentQuestion]:
    """Return `count` held-out questions of each kind for an experiment's agent; default: all kinds except
    follow-ups."""
    found = []
    for kind in kinds.split(",") if kinds else [kind for kind in KINDS if kind != "follow_up"]:
        for seed in range(first, first + count):
            sample = draw("held_out", seed, kind, False)
            asked, tools = sample.exchanges[0], tuple(f"workbench.agents.demo_tools:{name}" for name in sample.tools)
            found.append(
                AgentQuestion(
                    question=asked.question, wanted=asked.wanted, kind=kind, system=sample.system or None, tools=tools
                )
            )
    return found


def main(
    count: Annotated[int, typer.Option(help="how many")] = 4,
    side: Annotated[str, typer.Option(help="training or held_out")] = "training",
    kind: Annotated[str, typer.Option(help="of one kind")] = "",
) -> None:
    """Print drawn conversations as the model reads them."""
    for seed in range(count):
        sample = draw("held_out" if side == "held_out" else "training", seed, kind or None)
        typer.echo("".join(text for text, *_ in segments(sample.messages(), sample.declarations)) + "\n")


if __name__ == "__main__":
    typer.run(main)
