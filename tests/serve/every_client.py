"""Run ten clients' ordinary work against a server, in an environment that has them (docs/guide/serving.md).

`python tests/serve/every_client.py URL MODEL [CLIENTS]`, without the workbench: it prints a row for each piece of work
of these clients, or of all. What is checked is what a client needs of a server, a call that
keeps its schema, say, and not whether a small model's answer is right.
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

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = "What is the weather in Paris?"
PERSON = "Anna is 31 years old."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Get the weather in a city."}
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
CAPITALS = [("France", 0), ("Spain", 1)]
Work = Iterator[tuple[str, Callable[[], Any]]]


def weather(city: str) -> str:
    """Get the weather in a city."""
    return f"Sunny in {city}, 21 degrees."


def person(**settings: Any) -> Any:
    """Return a pydantic model of a person."""
    pydantic = import_module("pydantic")
    name = pydantic.Field(max_length=20)
    return pydantic.create_model("Person", name=(str, name), age=(int, pydantic.Field(ge=0, le=150)), **settings)


def work_of_openai(url: str, model: str) -> Work:
    client = import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    chat, asked = client.chat.completions, {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    yield "answer", lambda: chat.create(**asked).choices[0].message.content
    yield "stream", lambda: "".join(c.choices[0].delta.content or "" for c in chat.create(**asked, stream=True))

    def rounds() -> str:
        asked = [{"role": "user", "content": WEATHER}]
        given: Any = {
            "model": model,
            "temperature": 0,
            "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
        }
        said = (
            chat.create(messages=asked, tool_choice="required", parallel_tool_calls=False, **given).choices[0].message
        )
        call = said.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        answer = chat.create(messages=[*asked, said, result], max_tokens=24, **given).choices[0].message
        return f"{call.function.arguments} {answer.content or answer.tool_calls}"

    yield "a required tool, its result", rounds
    parse = client.chat.completions.parse
    said = [{"role": "user", "content": PERSON}]
    yield (
        "parse",
        lambda: (
            parse(model=model, messages=said, response_format=person(), max_tokens=60, temperature=0)
            .choices[0]
            .message.parsed
        ),
    )
    tools = [{"type": "function", **TOOL, "parameters": SCHEMA}]
    respond: Any = {
        "model": model,
        "input": WEATHER,
        "tools": tools,
        "tool_choice": "required",
        "temperature": 0,
        "max_output_tokens": 60,
    }
    yield "Responses, a tool", lambda: json.loads(client.responses.create(**respond).output[0].arguments)["city"]


def work_of_anthropic(url: str, model: str) -> Work:
    messages = import_module("anthropic").Anthropic(base_url=url, api_key="k", max_retries=0).messages
    cold: Any = {"extra_body": {"temperature": 0}}  # this client has no such argument any longer
    asked: Any = {"model": model, "max_tokens": 24, "messages": QUESTION, **cold}
    yield "answer", lambda: messages.create(**asked).content[0].text

    def streamed() -> str:
        with messages.stream(**asked) as stream:
            return "".join(stream.text_stream)

    def rounds() -> str:
        asked: Any = [{"role": "user", "content": WEATHER}]
        given: Any = {"model": model, "max_tokens": 60, **cold, "tools": [{**TOOL, "input_schema": SCHEMA}]}
        said = messages.create(messages=asked, tool_choice={"type": "tool", "name": "weather"}, **given).content
        result = {"type": "tool_result", "tool_use_id": said[0].id, "content": weather(**said[0].input)}
        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        return f"{said[0].input} {messages.create(messages=asked, **given).content[0]}"

    yield "stream", streamed
    yield "a named tool, its result", rounds


def work_of_litellm(url: str, model: str) -> Work:
    complete = import_module("litellm").completion
    given: Any = {"api_key": "k", "max_tokens": 40, "temperature": 0}
    ours = {**given, "model": f"openai/{model}", "api_base": f"{url}/v1"}
    yield "answer", lambda: complete(messages=QUESTION, **ours).choices[0].message.content
    yield (
        "stream",
        lambda: "".join(c.choices[0].delta.content or "" for c in complete(messages=QUESTION, stream=True, **ours)),
    )
    named = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"messages": [{"role": "user", "content": WEATHER}], "tool_choice": named}
    asked["tools"] = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
    for name, way in {"": ours, ", as Anthropic's": {**given, "model": f"anthropic/{model}", "api_base": url}}.items():
        yield (
            f"a named tool{name}",
            lambda way=way: json.loads(complete(**asked, **way).choices[0].message.tool_calls[0].function.arguments)[
                "city"
            ],
        )


def work_of_langchain(url: str, model: str) -> Work:
    chat = import_module("langchain_openai").ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="k", max_retries=0, max_tokens=80, temperature=0
    )
    ask = QUESTION[0]["content"]
    yield "invoke", lambda: chat.invoke(ask).content
    yield "stream", lambda: "".join(each.content for each in chat.stream(ask))
    for method in ("function_calling", "json_schema"):
        made = chat.with_structured_output(person(), method=method)
        yield f"with_structured_output({method})", lambda made=made: made.invoke(PERSON)
    yield (
        "bind_tools, required",
        lambda: (
            chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke(WEATHER).tool_calls[0]
        ),
    )
    yield (
        "bind_tools, auto",
        lambda: (answer := chat.bind_tools([weather]).invoke(WEATHER)).tool_calls or answer.content,
    )


def work_of_instructor(url: str, model: str) -> Work:
    vendor = import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    instructor = import_module("instructor")
    said: Any = {
        "model": model,
        "messages": [{"role": "user", "content": PERSON}],
        "max_tokens": 120,
        "max_retries": 0,
        "temperature": 0,
    }
    for name, mode in {
        "default mode (tools)": instructor.Mode.TOOLS,
        "JSON schema": instructor.Mode.JSON_SCHEMA,
    }.items():
        client = instructor.from_openai(vendor, mode=mode)
        yield name, lambda client=client: client.chat.completions.create(response_model=person(), **said)


def work_of_pydantic_ai(url: str, model: str) -> Work:
    ai, chat = import_module("pydantic_ai"), import_module("pydantic_ai.models.openai")
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{url}/v1", api_key="k")
    runs: Any = {
        "model": chat.OpenAIChatModel(model, provider=provider),
        "model_settings": {"max_tokens": 120, "temperature": 0},
    }
    yield "an output type", lambda: ai.Agent(output_type=person(), **runs).run_sync(PERSON).output
    yield "a tool", lambda: ai.Agent(tools=[weather], **runs).run_sync(WEATHER).output
    yield (
        "a tool, an output type",
        lambda: ai.Agent(tools=[weather], output_type=person(), retries=2, **runs).run_sync(PERSON).output,
    )


def work_of_llm(url: str, model: str) -> Work:
    listed = [{"model_id": model, "model_name": model, "api_base": f"{url}/v1", "supports_tools": True,
               "supports_schema": True}]  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        Path(place, "extra-openai-models.yaml").write_text(json.dumps(listed))
        environment = {**os.environ, "LLM_USER_PATH": place, "OPENAI_API_KEY": "k"}
        folder = Path(sys.executable).parent

        def run(*words: str) -> str:
            line = [str(folder / "llm"), "-m", model, "-o", "max_tokens", "60", "-o", "temperature", "0", *words]
            done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-300:]
            return done.stdout

        yield "llm PROMPT", lambda: run(QUESTION[0]["content"])
        yield "--schema", lambda: json.loads(run("--no-stream", "--schema", json.dumps(SCHEMA), WEATHER))["city"]
        functions = 'def weather(city: str) -> str:\n    "Get the weather in a city."\n    return city + ": sunny"\n'
        yield "--functions", lambda: run("--functions", functions, WEATHER)


def work_of_openai_agents(url: str, model: str) -> Work:
    agents, vendor = import_module("agents"), import_module("openai")
    agents.set_tracing_disabled(True)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "Responses": agents.OpenAIResponsesModel}

    async def run(kind: Any, choice: str) -> Any:
        async with vendor.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            agent = agents.Agent(
                name="a", instructions="Be brief.", tools=[agents.function_tool(weather)],
                model_settings=agents.ModelSettings(tool_choice=choice, max_tokens=60, temperature=0),
                model=kind(model=model, openai_client=client),
            )  # fmt: skip
            return (await agents.Runner.run(agent, WEATHER, max_turns=4)).final_output

    for name, kind in kinds.items():
        for choice in ("auto", "required"):
            yield f"function_tool, {choice}, {name}", lambda kind=kind, choice=choice: asyncio.run(run(kind, choice))


def work_of_inspect_ai(url: str, model: str) -> Work:
    os.environ |= {"WORKBENCH_BASE_URL": f"{url}/v1", "WORKBENCH_API_KEY": "k", "INSPECT_DISPLAY": "none"}
    inspect, solvers = import_module("inspect_ai"), import_module("inspect_ai.solver")
    dataset = import_module("inspect_ai.dataset").MemoryDataset
    sample, tools = import_module("inspect_ai.dataset").Sample, import_module("inspect_ai.tool")

    @tools.tool
    def forecast() -> Any:
        async def execute(city: str) -> str:
            """Get the weather in a city.

            Args:
                city: name of the city
            """
            return weather(city)

        return execute

    def run(*solver: Any) -> str:
        task = inspect.Task(
            dataset=dataset([sample(input=WEATHER, target="unny")]), solver=[*solver, solvers.generate()],
            scorer=import_module("inspect_ai.scorer").includes(),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            name = f"openai-api/workbench/{model}"
            log = inspect.eval(
                task, model=name, max_tokens=60, temperature=0, message_limit=6, log_dir=place, display="none"
            )[0]
        assert log.status == "success", log.error
        return f"{log.status}, accuracy {next(iter(log.results.scores[0].metrics.values())).value}"

    yield "an eval", run
    yield "an eval with a tool", lambda: run(solvers.use_tools(forecast()))


def work_of_lm_eval(url: str, model: str) -> Work:
    def run() -> str:
        with tempfile.TemporaryDirectory() as place:
            rows = [
                {"question": f"The capital of {country} is", "choices": ["Paris", "Madrid"], "label": label}
                for country, label in CAPITALS
            ]
            data = Path(place, "rows.jsonl")
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            Path(place, "capitals.yaml").write_text(TASK.format(data=data))
            given = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,max_length=1024"
            line = [
                "-m",
                "lm_eval",
                "run",
                "--model",
                "local-completions",
                "--tasks",
                "capitals",
                "--include_path",
                place,
            ]
            line += ["--model_args", given, "--output_path", place, "--batch_size", "2"]
            environment = {**os.environ, "OPENAI_API_KEY": "k", "HF_HOME": place}
            done = subprocess.run([sys.executable, *line], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-300:]
            found = json.loads(next(Path(place).rglob("results_*.json")).read_text())["results"]["capitals"]
            return f"acc {found['acc,none']}"

    yield "log-likelihoods of a task", run


CLIENTS: dict[str, Callable[[str, str], Work]] = {
    "openai": work_of_openai, "anthropic": work_of_anthropic, "litellm": work_of_litellm,
    "langchain-openai": work_of_langchain, "instructor": work_of_instructor, "pydantic-ai": work_of_pydantic_ai,
    "llm": work_of_llm, "openai-agents": work_of_openai_agents, "inspect-ai": work_of_inspect_ai,
    "lm-eval": work_of_lm_eval,
}  # fmt: skip


def main(url: str, model: str, *names: str) -> int:
    """Print a row of a table for each piece of work, and return the number of faults."""
    faults = 0
    for client, work in CLIENTS.items():
        if names and client not in names:
            continue
        for name, run in work(url, model):
            try:
                said, outcome = run(), "works"
                outcome = outcome if said else "no answer"
            except Exception as error:  # whatever a client raises is what is shown
                said, outcome = f"{type(error).__name__}: {error}", "fails"
            faults += outcome != "works"
            print("|", client, version(client), "|", name, "|", outcome, "|", *str(said).split()[:60], "|", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
