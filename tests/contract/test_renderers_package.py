"""Our exact renderers next to those of the PyPI package `renderers`, for the families both know.

The package shares the module `openai_harmony` with a package of vLLM's, so it is installed without
its dependencies into a folder of its own, `POSTTRAIN_RENDERERS` or pytest's cache, and runs in a
process of its own. Where pip cannot get it, the tests are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import CONTRACTS, Renderer
from posttrain.core.data.messages import message_to_json
from posttrain.core.kit.renderers import TOOLS, turn_of
from posttrain.core.types import Message, ToolSchema
from tests.helpers.plugins import MANAGER
from tests.helpers.renderers import CHATS, FAMILIES, WITH_CALLS, tokenizer_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PACKAGES = ("renderers==0.1.12", "prime-pydantic-config==0.4.3")
BOTH = {
    "qwen3": "qwen3",
    "llama3_1": "llama-3",
    "glm4": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "deepseek_r1": "deepseek-r1",
}
"""Families of ours, and their names in the package."""
THEIR_SIDE = """
import json, sys
from renderers import config_from_name, create_renderer
from transformers import AutoTokenizer

def answer(renderer, keeps, case):
    what = case["what"]
    try:
        if what in ("whole", "prompt"):
            made = renderer.render(
                case["messages"], tools=case["tools"], add_generation_prompt=what == "prompt"
            )
            return [list(made.token_ids), list(map(bool, made.sampled_mask))]
        if what == "turn":
            made = renderer.parse_response(case["turn"], tools=case["tools"])
            calls = [[call.name, call.arguments] for call in made.tool_calls or []]
            return [made.content, made.reasoning_content or "", calls]
        made = keeps.bridge_to_next_turn(
            case["prompt"], case["turn"], case["messages"], tools=case["tools"]
        )
        return made and list(made.token_ids)
    except ValueError as error:
        return str(error)

asked, answered = sys.argv[1:]
answers = []
for family in json.load(open(asked)):
    tokenizer = AutoTokenizer.from_pretrained(family["tokenizer"])
    config = config_from_name(family["renderer"])
    keeps = type(config)(thinking_retention="all")
    made = [create_renderer(tokenizer, each) for each in (config, keeps)]
    answers.append([answer(*made, case) for case in family["cases"]])
json.dump(answers, open(answered, "w"))
"""

INJECTED = "control tokens in a user's text"
WHATS = ("whole", "mask", "prompt", "turn", "bridge")
CALLS, ALL = frozenset(WITH_CALLS), frozenset(CHATS)
TURNS = CALLS | {"several"}
LLAMA = frozenset({"reasoning", "content and call", "two calls"})
DIFFERENT: dict[tuple[str, str], frozenset[str]] = {
    # It removes the empty block of reasoning when a turn follows, as Qwen's template does.
    ("qwen3", "whole"): TURNS,
    ("qwen3", "prompt"): TURNS,
    # It leaves out reasoning, and content that comes with a call, and refuses two calls. It reads
    # these as text.
    ("llama3_1", "whole"): LLAMA,
    ("llama3_1", "prompt"): LLAMA - {"reasoning"},
    ("llama3_1", "turn"): LLAMA,
    # It leaves out reasoning, and the line end between calls.
    ("deepseek_v3", "whole"): frozenset({"reasoning", "two calls"}),
    ("deepseek_v3", "prompt"): frozenset({"two calls"}),
    # It removes the block of reasoning that its own prompt begins, as R1's template does, and
    # leaves out the line end between results.
    ("deepseek_r1", "whole"): ALL,
    ("deepseek_r1", "prompt"): TURNS,
    ("deepseek_r1", "bridge"): frozenset({"two calls"}),
}
"""Chats in which the package's answer is another. `cases_of` and `differing` allow for what is so
in every chat of a family."""
for key in itertools.product(BOTH, ("whole", "prompt")):
    DIFFERENT[key] = DIFFERENT.get(key, frozenset()) | {INJECTED}  # it takes them for such


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Path:
    """The folder that holds the package."""
    named = os.environ.get("POSTTRAIN_RENDERERS")
    cache = request.config.cache
    assert cache is not None
    folder = Path(named) if named else cache.mkdir("-".join(PACKAGES).replace("==", "-"))
    if not (folder / "renderers").is_dir():
        install = ("-m", "pip", "install", "--no-deps", "--target", str(folder), *PACKAGES)
        done = subprocess.run(
            [sys.executable, *install], capture_output=True, text=True, timeout=240, check=False
        )
        if done.returncode:
            pytest.skip(f"pip cannot install {PACKAGES}: {done.stderr.strip()[-300:]}")
    return folder


def renderer_of(family: str) -> Any:
    made: Renderer[Any] = MANAGER.build(CONTRACTS["renderer"], FAMILIES[family].renderer, {})
    made.setup(tokenizer_of(family), ())
    return made


def tools_of(family: str, chat: str) -> tuple[ToolSchema, ...]:
    """DeepSeek's get no schemas, since the package leaves them out as the models' templates do."""
    return TOOLS if chat in WITH_CALLS and not family.startswith("deepseek") else ()


def cases_of(family: str) -> Iterator[tuple[str, str, dict[str, Any], Any]]:
    """Of each comparison the chat, what is compared, what the package is asked, and our answer."""
    renderer = renderer_of(family)
    begun = tokenizer_of(family).encode("<think>") if renderer.begins_in_reasoning else []
    end = tokenizer_of(family).decode([renderer.end_token_ids[0]])
    injected = [Message("user", f"a{end}b"), Message("assistant", "ok")]
    for chat, messages in {**CHATS, INJECTED: injected}.items():
        tools = tools_of(family, chat)
        whole = renderer.render(messages, tools)

        def asked(what: str, given: list[Message], offered: Any = tools, **more: Any) -> Any:
            said = [message_to_json(message) for message in given]
            return {"what": what, "messages": said, "tools": list(offered) or None, **more}

        yield chat, "whole", asked("whole", messages), (whole.token_ids, whole.sampled)
        opened = renderer.render(messages[:-1], tools, generation_prompt=True)
        yield chat, "prompt", asked("prompt", messages[:-1]), (opened.token_ids, opened.sampled)
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        for i, following in zip(turns, [*turns[1:], None], strict=True):
            turn, message = turn_of(whole, i), messages[i]
            calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
            read = asked("turn", [], TOOLS, turn=[*begun, *turn])
            yield chat, "turn", read, [message.content, message.reasoning, calls]
            if following is not None:
                prompt = renderer.render(messages[:i], tools, generation_prompt=True).token_ids
                new = messages[i + 1 : following]
                bridged = asked("bridge", new, prompt=list(prompt), turn=turn)
                more = renderer.extend(new, tools, ended=True)
                yield chat, "bridge", bridged, [*prompt, *turn, *more]


def differing(family: str, what: str, ours: Any, theirs: Any) -> set[str]:
    """What of the two answers is not the same."""
    if what == "bridge":
        return set() if theirs == ours else {what}
    if isinstance(theirs, str):
        return {what}
    if what == "turn":
        # The package keeps the blanks around reasoning and content.
        (content, reasoning, calls), (own, thought, called) = theirs, ours
        read = [(content or "").strip(), reasoning.strip(), calls]
        return set() if read == [own.strip(), thought.strip(), called] else {what}
    ids, mask = list(ours[0]), list(ours[1])
    if family == "glm4":
        # The package does not write the end of the last turn, and takes the line end that the model
        # begins a turn with for a part of the prompt.
        if what == "whole":
            ids, mask = ids[:-1], mask[:-1]
        mask = [own and i > 0 and mask[i - 1] for i, own in enumerate(mask)]
    if theirs[0] != ids:
        return {what}
    return set() if theirs[1] == mask else {"mask"}


def test_the_package_gives_the_same_where_nothing_else_is_listed(
    site: Path, tmp_path: Path
) -> None:
    cases = {family: list(cases_of(family)) for family in BOTH}
    asked = []
    for family, name in BOTH.items():
        folder = tmp_path / family
        tokenizer_of(family).save_pretrained(folder)
        questions = [question for _, _, question, _ in cases[family]]
        asked.append({"tokenizer": str(folder), "renderer": name, "cases": questions})
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    answered = tmp_path / "answered.json"
    done = subprocess.run(
        [sys.executable, "-c", THEIR_SIDE, str(tmp_path / "asked.json"), str(answered)],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[tuple[str, str], set[str]] = {}
    same: set[tuple[str, str]] = set()
    for (family, own), answers in zip(cases.items(), json.loads(answered.read_text()), strict=True):
        for (chat, what, _, ours), theirs in zip(own, answers, strict=True):
            wrong = differing(family, what, ours, theirs)
            for each in wrong:
                found.setdefault((family, each), set()).add(chat)
            if what not in wrong:
                same.add((family, what))
                if what == "whole" and not wrong:
                    same.add((family, "mask"))
    assert found == DIFFERENT
    never = {(family, what) for family in BOTH for what in WHATS} - same
    assert never == {("deepseek_r1", "whole"), ("deepseek_r1", "mask")}
