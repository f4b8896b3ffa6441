"""Run clients' ordinary work against a server, in an environment that has them (docs/guide/serving.md has a table).

`python tests/serve/every_client.py URL MODEL [CLIENTS]`, without the workbench: it prints a row for each piece of work
of these clients, or of all. What is checked is what a client needs of a server, a call that keeps its schema, say, and
not whether a small model's answer is right. The vendors' own clients are in clients.py beside this, and lm-eval in
experiments/lm_eval_parity.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ASK, WEATHER, PERSON = "What is the capital of France?", "What is the weather in Paris?", "Anna is 31 years old."
CITY = {"type": "string", "maxLength": 20}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "weather", "description": "Get the weather in a city."}
TOOLS: Any = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
LIMITS: Any = {"max_tokens": 60, "temperature": 0}
FUNCTIONS = 'def weather(city: str) -> str:\n    "Get the weather in a city."\n    return city + ": sunny"\n'
Work = Iterator[tuple[str, Callable[[], Any]]]


def asks(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def weather(city: str) -> str:
    """Get the weather in a city."""
    return f"Sunny in {city}, 21 degrees."


def person() -> Any:
    """Return a pydantic model of a person."""
    pydantic = import_module("pydantic")
    name, age = pydantic.Field(max_length=20), pydantic.Field(ge=0, le=150)
    return pydantic.create_model("Person", name=(str, name), age=(int, age))


def work_of_litellm(url: str, model: str) -> Work:
    complete = import_module("litellm").completion
    asked: Any = {"messages": asks(WEATHER), "tools": TOOLS, "tool_choice": "required", "api_key": "k", **LIMITS}
    for kind, base in {"openai": f"{url}/v1", "anthropic": url}.items():
        name = f"{kind}/{model}"
        yield (
            kind,
            lambda name=name, base=base: complete(model=name, api_base=base, **asked).choices[0].message.tool_calls,
        )


def work_of_langchain(url: str, model: str) -> Work:
    made = import_module("langchain_openai").ChatOpenAI
    chat = made(model=model, base_url=f"{url}/v1", api_key="k", max_retries=0, **LIMITS)
    yield "invoke", lambda: chat.invoke(ASK).content
    yield "stream", lambda: "".join(each.content for each in chat.stream(ASK))
    for method in ("function_calling", "json_schema"):
        ready = chat.with_structured_output(person(), method=method)
        yield f"with_structured_output({method})", lambda ready=ready: ready.invoke(PERSON)
    for choice in ("required", "auto"):
        bound = chat.bind_tools([weather], tool_choice=choice)
        yield f"bind_tools, {choice}", lambda bound=bound: (said := bound.invoke(WEATHER)).tool_calls or said.content


def work_of_instructor(url: str, model: str) -> Work:
    vendor = import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    instructor = import_module("instructor")
    asked: Any = {"model": model, "messages": asks(PERSON), "max_retries": 0, **LIMITS, "max_tokens": 120}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):  # the first is the default
        create = instructor.from_openai(vendor, mode=mode).chat.completions.create
        yield mode.name, lambda create=create: create(response_model=person(), **asked)


def work_of_pydantic_ai(url: str, model: str) -> Work:
    ai, chat = import_module("pydantic_ai"), import_module("pydantic_ai.models.openai")
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{url}/v1", api_key="k")
    runs: Any = {"model": chat.OpenAIChatModel(model, provider=provider), "model_settings": LIMITS}
    yield "an output type", lambda: ai.Agent(output_type=person(), **runs).run_sync(PERSON).output
    yield "a tool", lambda: ai.Agent(tools=[weather], **runs).run_sync(WEATHER).output
    both: Any = {"tools": [weather], "output_type": person(), "retries": 2}
    yield "a tool, an output type", lambda: ai.Agent(**both, **runs).run_sync(PERSON).output


def work_of_llm(url: str, model: str) -> Work:
    known: Any = {"model_id": model, "model_name": model, "api_base": f"{url}/v1", "supports_tools": True}
    with tempfile.TemporaryDirectory() as place:
        Path(place, "extra-openai-models.yaml").write_text(json.dumps([{**known, "supports_schema": True}]))
        added = {**os.environ, "OPENAI_API_KEY": "k", "LLM_USER_PATH": place}
        line = [sys.executable, "-m", "llm", "-m", model, "-o", "max_tokens", "60", "-o", "temperature", "0"]
        kinds = {"llm": [ASK], "--functions": ["--functions", FUNCTIONS, WEATHER]}
        for name, words in {**kinds, "--schema": ["--schema", json.dumps(SCHEMA), WEATHER]}.items():
            yield name, lambda words=words: subprocess.check_output([*line, *words], env=added, text=True)


def work_of_openai_agents(url: str, model: str) -> Work:
    agents, vendor = import_module("agents"), import_module("openai")
    agents.set_tracing_disabled(True)

    async def run(kind: Any, choice: str) -> Any:
        async with vendor.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            settings = agents.ModelSettings(tool_choice=choice, **LIMITS)
            given: Any = {"model": kind(model=model, openai_client=client), "model_settings": settings}
            agent = agents.Agent(name="a", instructions="Be brief.", tools=[agents.function_tool(weather)], **given)
            return (await agents.Runner.run(agent, WEATHER, max_turns=4)).final_output

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        for choice in ("auto", "required"):
            name = f"function_tool, {choice}, {kind.__name__}"
            yield name, lambda kind=kind, choice=choice: asyncio.run(run(kind, choice))


def work_of_inspect_ai(url: str, model: str) -> Work:
    os.environ |= {"WORKBENCH_BASE_URL": f"{url}/v1", "WORKBENCH_API_KEY": "k"}
    inspect, solvers, data = (import_module(f"inspect_ai{name}") for name in ("", ".solver", ".dataset"))

    @import_module("inspect_ai.tool").tool
    def forecast() -> Any:
        async def execute(city: str) -> str:
            """Get the weather in a city.

            Args:
                city: name of the city
            """
            return weather(city)

        return execute

    def run(*solver: Any) -> str:
        rows, scorer = [data.Sample(input=WEATHER, target="unny")], import_module("inspect_ai.scorer").includes()
        task = inspect.Task(dataset=data.MemoryDataset(rows), solver=[*solver, solvers.generate()], scorer=scorer)
        with tempfile.TemporaryDirectory() as place:
            given: Any = {"log_dir": place, "display": "none", "message_limit": 6, **LIMITS}
            log = inspect.eval(task, model=f"openai-api/workbench/{model}", **given)[0]
        assert log.status == "success", log.error
        return str(log.results.scores[0].metrics["accuracy"].value)

    yield "an eval", run
    yield "an eval with a tool", lambda: run(solvers.use_tools(forecast()))


CLIENTS: dict[str, Callable[[str, str], Work]] = {
    "litellm": work_of_litellm,
    "langchain-openai": work_of_langchain, "instructor": work_of_instructor, "pydantic-ai": work_of_pydantic_ai,
    "llm": work_of_llm, "openai-agents": work_of_openai_agents, "inspect-ai": work_of_inspect_ai,
}  # fmt: skip


def main(url: str, model: str, *names: str) -> int:
    """Print a row of a table for each piece of work, and return the number of faults."""
    faults = 0
    for client in names or CLIENTS:
        for name, run in CLIENTS[client](url, model):
            try:
                said = run()
                outcome = "works" if said else "no answer"
            except Exception as error:  # whatever a client raises is what is shown
                said, outcome = f"{type(error).__name__}: {error}", "fails"
            faults += outcome != "works"
            print("|", client, version(client), "|", name, "|", outcome, "|", *str(said).split()[:60], "|", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
