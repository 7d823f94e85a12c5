"""Lists and plays the tasks of a verifiers taskset: `python verifiers_worker.py FD`.

A program of its own, as verifiers needs other versions of packages than a run. It runs in a virtual
environment that has verifiers, knows nothing of posttrain, and speaks lines of JSON over the socket
FD. The first line opens a taskset, to list its tasks or to play them: then come any number of
episodes at once, each answered by a line with its `id`, and `cancel`. The model is reached by the
address that comes with an episode, so that whoever answers there records what is sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import socket
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]  # Any: JSON values
HARNESS = "posttrain_chat"
FIRST = (0, 4)
"""The first release whose API this is."""
MOST_LINE = 1 << 28
MOST_RESULT = 100_000
"""Characters of a tool's result, at most."""
POLL_S = 0.05
OVER = ("context_length_exceeded", "budget_used_up")
"""Errors of an endpoint after which an episode is over, and scored as it is."""
OFFLINE = ("connect", "offline", "gaierror", "maxretry", "localentrynotfound", "proxyerror")
"""Parts of the names of errors that programs without a network raise."""


class Refusal(Exception):
    """Why the taskset cannot be played, in a sentence."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def described(error: BaseException) -> str:
    line = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def installed() -> str:
    """The version of verifiers. Raises `Refusal` where it is not there, or cannot be used."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise Refusal(
            f"{sys.executable} does not have verifiers: {sys.executable} -m pip install "
            "'verifiers>=0.4,<0.5'"
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < FIRST:
        raise Refusal(
            f"{sys.executable} has verifiers {version}, whose API (load_environment, Rubric) is "
            "not the one of 0.4, which alone is supported: install 'verifiers>=0.4,<0.5' there, "
            "and write the environment as a Taskset"
        )
    return version


class Opened:
    """A taskset that was loaded, and how it is played."""

    def __init__(self, given: Json) -> None:
        self.given = given
        self.version = installed()
        if given["path"]:
            sys.path.insert(0, given["path"])
            before = os.environ.get("PYTHONPATH")  # for tool servers, which are started by module
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (given["path"], before)))
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils import loaders
        except Exception as error:
            raise Refusal(
                f"verifiers {self.version} cannot be imported: {described(error)}"
            ) from error
        self.vf, self.loaders, self.name = vf, loaders, given["taskset"]
        self.clients: dict[str, Any] = {}
        self.http: Any = None
        self._adapt()
        self.env = self._environment()
        self._tasks: list[Any] = []
        self._rest: Iterator[Any] | None = None

    def _adapt(self) -> None:
        """Our chat loop among the harnesses, a client for each episode, watched tool servers."""
        module: Any = types.ModuleType(HARNESS)
        harness = chat_harness(self.vf, self.given["timeout_s"])
        module.ChatHarness, module.__all__ = harness, ["ChatHarness"]
        sys.modules[HARNESS] = module
        from verifiers.v1.interception import server
        from verifiers.v1.mcp import launch
        from verifiers.v1.runtimes import subprocess as local

        # Clients of their own would be kept for every episode, with a pool of connections each.
        server.InterceptionServer._client = lambda _, config: self.clients[config.base_url]
        launch.serve_in_runtime = watched(launch.serve_in_runtime, self.given["start_s"])
        local.CACHE_DIR = Path.cwd() / "verifiers"

    def _environment(self) -> Any:
        module = self._module()
        try:
            raw = {"taskset": {**self.given["args"], "id": self.name}}
            config = self.loaders.resolve_env_config(raw)
            agents = [n for n, v in config if type(v).__name__ == "AgentConfig"]
            if len(agents) != 1:
                raise Refusal(
                    f"taskset '{self.name}' is played by {', '.join(agents)}, and one agent alone "
                    "is supported: choose another"
                )
            own = self.loaders.default_harness_id(self.name)
            agent = {
                "runtime": {"type": "subprocess"},
                "harness": {"id": HARNESS if own == "bash" else own},
                **self.given["agent"],
            }
            made = self.loaders.load_environment(
                self.loaders.resolve_env_config({**raw, agents[0]: agent})
            )
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(self._why(error)) from error
        if type(made.taskset).task_type().NEEDS_CONTAINER:
            raise Refusal(f"tasks of '{self.name}' need a container, which is not supported")
        found = inspect.getfile(module)
        self.origin = os.path.dirname(found) if found.endswith("__init__.py") else found
        return made

    def _module(self) -> Any:
        try:
            return self.loaders.import_taskset(self.name)
        except ModuleNotFoundError as error:
            base = self.name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
            if f"'{base}'" not in str(error):
                raise Refusal(self._why(error)) from error
            raise Refusal(
                f"there is no taskset '{self.name}' (there are: {', '.join(self._known())}): "
                "correct `taskset` or `path`, or install its package"
            ) from error
        except Exception as error:
            raise Refusal(self._why(error)) from error

    def _known(self) -> list[str]:
        """Tasksets of the folder `path`, of packages that need verifiers, and its own."""
        found = {m.name for m in pkgutil.iter_modules([self.given["path"]])} - {""}
        for each in importlib.metadata.distributions():
            needs = each.requires or ()
            if any(re.match(r"verifiers\b", need) and "extra ==" not in need for need in needs):
                found.add(each.metadata["Name"])
        tasksets = importlib.import_module("verifiers.v1.tasksets")
        return sorted(found) + sorted(m.name for m in pkgutil.iter_modules(tasksets.__path__))

    def _why(self, error: BaseException) -> str:
        """What stands in the way of the taskset, with what to do."""
        names = [type(each).__name__.lower() for each in causes(error)]
        if any(part in name for name in names for part in OFFLINE):
            return (
                f"taskset '{self.name}' asks for the network, which it cannot reach "
                f"({described(error)}): load its data once where there is one, and name the "
                "variable of their folder, such as HF_HOME, in pass_env"
            )
        if type(error).__name__ == "ValidationError":
            first = error.errors()[0]  # type: ignore[attr-defined]
            place = ".".join(map(str, first["loc"]))
            return f"taskset '{self.name}' refuses its settings: {place}: {first['msg']}"
        return f"taskset '{self.name}' cannot be loaded: {described(error)}"

    # -- tasks ------------------------------------------------------------------------------

    def task(self, index: int) -> Any:
        """Task `index` of the taskset's order, None past its end."""
        try:
            self._rest = self._rest or iter(self.env.taskset)
            while len(self._tasks) <= index:
                found = next(self._rest, None)
                if found is None:
                    return None
                self._tasks.append(found)
            return self._tasks[index]
        except Exception as error:
            raise Refusal(self._why(error)) from error

    def listed(self, limit: int | None) -> list[Json]:
        """Key, messages and answer of each task, of the first `limit` if that is a number."""
        if limit is None and not self.env.taskset.bounded:
            raise Refusal(f"taskset '{self.name}' has no end: set task.limit")
        found: list[Json] = []
        while (limit is None or len(found) < limit) and (task := self.task(len(found))) is not None:
            data = task.data
            if data.image is not None:
                raise Refusal(f"tasks of '{self.name}' need a container, which is not supported")
            if data.prompt is None:
                raise Refusal(
                    f"task {len(found)} of '{self.name}' has no prompt: conversations that a user "
                    "opens are not supported"
                )
            answer = getattr(data, "answer", "")
            found.append(
                {
                    "key": self.key(task),
                    "messages": first_messages(data),
                    "answer": answer
                    if isinstance(answer, str)
                    else json.dumps(answer, default=str),
                }
            )
        return found

    def key(self, task: Any) -> str:
        """The task's own key; where it has none, its content without its place in the order."""
        if type(task).key is not self.vf.Task.key:
            return str(task.key)
        return str(task.with_data(idx=None).hash)

    # -- episodes ---------------------------------------------------------------------------

    async def play(self, asked: Json) -> Json:
        """One episode, as its score or the reason why it has none."""
        task = self.task(asked["index"])
        if task is None or self.key(task) != asked["key"]:
            return {"failed": "the taskset has other tasks than when the run listed them"}
        from verifiers.v1.clients import EvalClient
        from verifiers.v1.clients.base import build_async_httpx

        config = self.vf.EvalClientConfig(base_url=asked["base_url"])
        client = EvalClient.__new__(EvalClient)
        client.base_url, client.api_key, client.headers = config.base_url, asked["key_of_api"], {}
        self.http = self.http or build_async_httpx(config)
        client.client = self.http
        self.clients[config.base_url] = client
        context = self.vf.ModelContext(
            client=config, model=asked["model"], sampling=self.vf.SamplingConfig()
        )
        try:
            return outcome(await self.env.run_episode(task, context))
        except Exception as error:
            return {"failed": described(error)}
        finally:
            del self.clients[config.base_url]


def first_messages(data: Any) -> list[Json]:
    """What the model reads first."""
    made = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*made, {"role": "user", "content": data.prompt}]
    return [*made, *map(as_chat, data.prompt)]


def as_chat(message: Any) -> Json:
    """A message of verifiers' as OpenAI's chat API has it."""
    made: Json = message.model_dump(mode="json", exclude_none=True)
    made.pop("provider_state", None)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return made


def outcome(episode: Any) -> Json:
    """Reward, its parts and metrics of an episode; only a sound one has them."""
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        if errors:
            last = errors[-1]
            return {"failed": f"{last.type}: {' '.join(last.message.split())[:500]}"}
        return {"failed": f"the episode is not sound, with {len(episode.traces)} traces"}
    trace = episode.traces[0]
    given = {name: each for name, each in trace.rewards.items() if each is not None}
    return {
        "reward": trace.reward if given else None,
        "rewards": {name: each.value for name, each in given.items()},
        "metrics": {n: v for n, v in trace.metrics.items() if v is not None},
    }


def chat_harness(vf: Any, timeout_s: float) -> type:
    """A harness without a program: the conversation with its tools, in this process."""
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    async def result(call: Any, servers: Any, dispatch: Any) -> str:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            return f"error: invalid JSON in tool arguments ({error})"
        if not isinstance(arguments, dict):
            return "error: tool arguments must be a JSON object"
        if call.function.name not in dispatch:
            return f"error: unknown tool {call.function.name!r}"
        try:
            async with asyncio.timeout(timeout_s):
                said = await call_mcp(servers, dispatch, call.function.name, arguments)
        except TimeoutError:
            return f"error: the call took more than {timeout_s:g} s"
        if isinstance(said, list):
            said = "\n".join(part.get("text", "[image omitted]") for part in said)
        return str(said)[:MOST_RESULT]

    async def converse(client: Any, model: str, messages: list[Json], urls: dict[str, str]) -> None:
        from openai import APIStatusError

        async with contextlib.AsyncExitStack() as stack:
            config = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
            tools, dispatch, servers = await connect_mcp(config, stack)
            offered = {"tools": tools} if tools else {}
            while True:
                try:
                    made = await client.chat.completions.create(
                        model=model, messages=messages, **offered
                    )
                except APIStatusError as error:
                    if any(code in str(error) for code in OVER):
                        return
                    raise
                said = made.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return
                for call in said.tool_calls:
                    content = await result(call, servers, dispatch)
                    message = {"role": "tool", "tool_call_id": call.id, "content": content}
                    messages.append({**message, "name": call.function.name})

    class ChatHarness(vf.Harness[HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            from openai import AsyncOpenAI

            async with AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0, timeout=None
            ) as client:
                await converse(client, ctx.model, first_messages(data), mcp_urls)
            return ProgramResult(exit_code=0, stdout="", stderr="")

    return ChatHarness


def watched(serve: Any, start_s: float) -> Any:
    """`serve` of a tool server, which ends when the server does, or after `start_s`.

    verifiers itself asks a port for three minutes, whatever became of the server.
    """
    from verifiers.v1.errors import ToolsetError
    from verifiers.v1.mcp.launch import log_tail

    async def serve_watched(server: Any, runtime: Any, **options: Any) -> Any:
        before, began = len(runtime._background), time.monotonic()
        work = asyncio.ensure_future(serve(server, runtime, **options))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=POLL_S)
                started = runtime._background[before:]
                ended = [p.returncode for p in started if p.returncode is not None]
                late = time.monotonic() - began > start_s
                if not work.done() and (ended or late):
                    log = await log_tail(runtime, f"vf_tool_{server.server_name}.log")
                    last = "".join(f": {line}" for line in log.strip().splitlines()[-1:])
                    what = f"ended with exit code {ended[0]}" if ended else "did not answer"
                    raise ToolsetError(
                        f"tool server '{server.server_name}' {what} within {start_s:g} s of its "
                        f"start{last}"
                    )
            return work.result()
        finally:
            work.cancel()

    return serve_watched


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[Json]:
    while line := await reader.readline():
        yield json.loads(line)


async def main(link: socket.socket) -> None:
    """Answer the other end until it is gone."""
    reader, writer = await asyncio.open_connection(sock=link, limit=MOST_LINE)

    def say(answer: Json) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")

    asked = lines(reader)
    given = await anext(asked, None)
    if given is None:
        return
    playing: dict[int, asyncio.Task[None]] = {}

    async def play(opened: Opened, request: Json) -> None:
        try:
            say({"id": request["id"], **await opened.play(request)})
        except asyncio.CancelledError:
            say({"id": request["id"], "failed": "cancelled"})
        except Refusal as why:
            say({"id": request["id"], "failed": str(why)})
        finally:
            playing.pop(request["id"], None)

    try:
        opened = Opened(given)
        if given["list"]:
            found = opened.listed(given["limit"])
            say({"version": opened.version, "origin": opened.origin, "tasks": found})
            await writer.drain()
            return
        async with opened.env.serving():
            say({"version": opened.version})
            async for request in asked:
                if "cancel" in request:
                    if request["cancel"] in playing:
                        playing[request["cancel"]].cancel()
                    continue
                task = asyncio.create_task(play(opened, request))
                playing[request["id"]] = task
            for task in list(playing.values()):
                task.cancel()
            await asyncio.gather(*playing.values(), return_exceptions=True)
    except Refusal as why:
        say({"refused": str(why)})
    except Exception as error:  # of the taskset's own servers, before anything was played
        say({"refused": f"taskset '{given['taskset']}' does not start: {described(error)}"})
    with contextlib.suppress(ConnectionError):
        await writer.drain()


if __name__ == "__main__":
    # What is imported by name here is verifiers' or the taskset's, not a file next to this one.
    sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    asyncio.run(main(end))
