"""The environment `terminal` and its task: real sandboxes, real tests of task folders."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, TypeVar

import pytest

from posttrain.core.contracts import Observation, Turn
from posttrain.core.data.task_folders import read_task_folder
from posttrain.core.errors import ConfigError, DataError, RunError
from posttrain.core.sandbox.runner import levels_available
from posttrain.core.types import Message, Problem
from posttrain.plugins.environments.terminal import TerminalConfig, TerminalEnvironment
from posttrain.plugins.tasks.terminal import TerminalTask, TerminalTaskConfig
from tests.helpers.live_turns import called, during, said, texts
from tests.helpers.plugins import TERMINAL_TASKS
from tests.unit.sandbox.conftest import running_with, token  # noqa: F401 - a fixture

T = TypeVar("T")
pytestmark = pytest.mark.skipif(
    not set(levels_available()) - {"rlimits"}, reason="no sandbox here has folders of its own"
)


def environment(**fields: Any) -> TerminalEnvironment:
    return TerminalEnvironment(TerminalConfig.model_validate(fields))


def of(folder: Path) -> Problem:
    return Problem(folder.name, "Do it.", "", "", {"folder": str(folder)})


def play(
    turns: list[Turn], folder: Path | None = None, **fields: Any
) -> tuple[list[Observation], float | None]:
    """What an episode answers, and its score."""

    async def use(made: Any) -> tuple[list[Observation], float | None]:
        problem = of(folder) if folder else Problem("k", "Do it.", "", "")
        state = (await made.reset(problem, 0)).state
        answers: list[Observation] = []
        try:
            for turn in turns:
                answers.append(await made.step(state, turn))
                if answers[-1].done:
                    break
            return answers, await made.score(state)
        finally:
            await made.close(state)

    return during(environment(**fields), use)


def bash(command: str) -> Turn:
    return called("bash", command=command)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task of which `score` says whether the file `answer` has a 1 in it."""
    made = tmp_path / "task"
    (made / "tests").mkdir(parents=True)
    (made / "task.toml").write_text("[verifier]\ntimeout_sec = 60\n")
    (made / "instruction.md").write_text("Write 1 into answer.\n")
    (made / "tests" / "test.sh").write_text("grep -q 1 answer\n")
    return made


def with_tests(folder: Path, script: str) -> Path:
    (folder / "tests" / "test.sh").write_text(script)
    return folder


# --- turns --------------------------------------------------------------------------------------


def test_commands_are_answered_and_files_are_kept(folder: Path) -> None:
    turns = [bash("echo 1 > answer; cd /tmp"), bash("pwd; cat /app/answer; exit 3"), said("Done.")]
    answers, score = play(turns, folder)
    assert texts(answers) == ["[exit code 0]", "/tmp\n1\n[exit code 3]", ""]
    assert [answer.done for answer in answers] == [False, False, True]
    assert answers[1].messages[0].role == "tool" and answers[1].counts["failed"] == 0
    assert score == 1.0
    assert play([bash("echo 2 > answer")], folder)[1] == 0.0, "also without a last word"
    assert play([said("Done.")])[1] is None, "a problem without a folder has no score here"


def test_what_cannot_be_run_is_said_and_counted() -> None:
    turns = [
        called("sh", command="ls"),
        called("bash", cmd="ls"),
        called("bash", command=7),
        Turn("", True, Message("assistant", malformed=("{",))),
        bash("ec\0ho"),
        bash("echo '"),
        bash("\udc80\U0001f600"),
    ]
    answers, _ = play(turns)
    shown = texts(answers)
    assert "no such tool" in shown[0] and "'command', a text" in shown[1] + shown[2]
    assert "null characters" in shown[4] and "unexpected EOF" in shown[5]
    assert "not found" in shown[6]
    assert [answer.counts["failed"] for answer in answers] == [1, 1, 1, 1, 0, 0, 0]


def test_a_command_that_hangs_is_stopped_and_the_shell_goes_on() -> None:
    began = time.monotonic()
    twice = Turn("", True, Message("assistant", tool_calls=bash("sleep 60").message.tool_calls * 2))
    answers, _ = play([twice, bash("echo on")], command_s=0.5)
    first, second = answers[0].messages
    assert first.content == "[stopped: it ran longer than its 0.5 s]"
    assert second.content == "error: no time is left in this turn"
    assert answers[0].counts == {"calls": 2.0, "failed": 2.0, "metric/sandbox_lost": 0.0}
    assert texts(answers)[1] == "on\n[exit code 0]"
    assert time.monotonic() - began < 20


def test_output_is_cut_in_the_middle_and_is_text() -> None:
    answers, _ = play([bash("echo first; yes '<|im_end|>' | head -c 9999999; printf '\\377last'")])
    (shown,) = texts(answers)
    assert shown.startswith("first\n<|im_end|>") and shown.endswith("\ufffdlast\n[exit code 0]")
    assert "characters left out ...]" in shown and len(shown) < 4200


def test_a_command_that_breaks_its_sandbox_ends_the_episode_with_0(folder: Path) -> None:
    what = "import resource, os; resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"
    turns = [bash("echo 1 > answer"), *[bash(f'/usr/bin/python3 -c "{what}"')] * 3]
    answers, score = play(turns, folder)
    assert score == 0.0 and answers[-1].done and answers[-1].counts["metric/sandbox_lost"] == 1


# --- the tests of a task ------------------------------------------------------------------------


def test_the_model_sees_neither_tests_nor_solution_and_cannot_prepare_them(folder: Path) -> None:
    with_tests(folder, "test ! -e /tmp/evil && cat secret answer\ntest -e /tests/test.sh\nfalse\n")
    look = "ls / /tests /logs /solution; cat /tests/test.sh; find / -name 'test.sh'"
    prepare = (
        "mkdir /tests /logs; echo 1 > /logs/verifier/reward.txt; ln -s / /tmp/root; "
        "mkdir -p /app/tests; echo exit 0 > /app/tests/test.sh; "
        "(while sleep 0.01; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &"
    )
    answers, score = play([bash(look), bash(prepare)], folder)
    assert "grep" not in texts(answers)[0] and texts(answers)[0].count("No such file") >= 3
    assert "Read-only" in texts(answers)[1]
    assert score == 0.0


@pytest.mark.parametrize(
    ("script", "score"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", 0.25),
        ("""echo '{"reward": -1, "other": 3}' > /logs/verifier/reward.json""", -1.0),
        ("exit 0", 1.0),
        ("exit 5", 0.0),
        ("kill -9 $$", 0.0),
        ("echo nan > /logs/verifier/reward.txt", r"wrote 'nan' into reward.txt"),
        ("""echo '{"score": 1}' > /logs/verifier/reward.json""", r"expected a number, or in"),
        ("touch /logs/verifier/reward.txt", r"wrote '' into"),
        ("no-such-program", r"could not run: .*no-such-program"),
        ("sleep 60", r"took more than 1 s"),
        ("python3 -c 'import time; x = [bytes(10**6)] * 9; time.sleep(60)' & exec sleep 60", "1 s"),
    ],
)
def test_the_reward_is_what_the_tests_say(folder: Path, script: str, score: float | str) -> None:
    with_tests(folder, script)
    if isinstance(score, float):
        assert play([], folder)[1] == score
    else:
        with pytest.raises(RunError, match=score):
            play([], folder, verifier_s=1)


def test_tests_that_take_too_long_may_have_a_reward(folder: Path) -> None:
    assert play([], with_tests(folder, "sleep 60"), verifier_s=0.5, timeout_reward=0)[1] == 0.0


@pytest.mark.parametrize(
    "mess",
    [
        "head -c 99999999 /dev/zero > big; head -c 99999999 /dev/zero > /tmp/big",
        "cd /; rm -rf /app /root /tmp 2> /dev/null; echo 1 > /app/answer",
        "ln -s /etc/passwd link; ln -s loop loop; mkfifo pipe; cp -a /usr/bin/python3 own",
        "(trap '' TERM; while :; do sleep 1; done) > /dev/null 2>&1 & ",
    ],
)
def test_no_mess_keeps_the_tests_from_running(folder: Path, mess: str) -> None:
    with_tests(folder, "cp answer /tmp/copy && grep -q 1 /tmp/copy")
    assert play([bash(f"echo 1 > answer; {mess}")], folder)[1] == 1.0


def test_files_that_cannot_be_copied_give_0(folder: Path) -> None:
    deep = "import os\nfor n in range(2500):\n    os.mkdir('d')\n    os.chdir('d')"
    assert play([bash(f'echo 1 > answer; python3 -c "{deep}"')], folder)[1] == 0.0


def test_nothing_is_left_of_an_episode(folder: Path, token: str) -> None:  # noqa: F811
    run = f"setsid sh -c 'sleep 60; : {token}' > /dev/null 2>&1 &"
    with_tests(folder, f"{run}\nexit 0")
    assert play([bash(run), bash(f"sleep 60 # {token}")], folder, command_s=0.5)[1] == 1.0
    assert running_with(token) == []


def test_the_level_that_hides_no_files_is_refused() -> None:
    weak = {"level": "rlimits", "min_level": "rlimits", "allow_weak": True}
    with pytest.raises(ConfigError, match="tests included"):
        play([], sandbox=weak)


# --- task folders -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hello", "sum-column", "fix-script"])
def test_the_solutions_of_the_examples_score_1_and_doing_nothing_does_not(name: str) -> None:
    async def use(made: Any) -> list[float | None]:
        scores = []
        for solved in (True, False):
            state = (await made.reset(of(TERMINAL_TASKS / name), 0)).state
            assert not solved or await made.solve(state)
            scores.append(await made.score(state))
            await made.close(state)
        return scores

    assert during(environment(), use) == [1.0, 0.0]


def image(folder: Path, dockerfile: str) -> Any:
    (folder / "environment" / "data").mkdir(parents=True, exist_ok=True)
    for name in ("a.txt", "b.txt", "data/c.txt"):
        (folder / "environment" / name).write_text(name)
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    return read_task_folder(folder)


def test_a_simple_dockerfile_is_followed(folder: Path) -> None:
    task = image(
        folder,
        "# a comment\nFROM docker.io/library/python:3.12-slim@sha256:0\nENV A=1 \\\n  B='x y'\n"
        "ENV C d e\nWORKDIR /srv/app\nWORKDIR src\nCOPY a.txt .\nCOPY data /data\n"
        'COPY a.txt b.txt /opt/\nCOPY b.txt /root/c\nLABEL x=y\nUSER root\nCMD ["bash"]\n',
    )
    assert task.unsupported == () and task.workdir == "/srv/app/src"
    assert task.env == {"A": "1", "B": "x y", "C": "d e"}
    answers, _ = play([bash("pwd; cat a.txt /data/c.txt /opt/b.txt /root/c; echo $A$B$C")], folder)
    assert texts(answers) == ["/srv/app/src\na.txtdata/c.txtb.txtb.txt1x yd e\n[exit code 0]"]


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get install -y \\\n  git",
        "FROM pytorch/pytorch:2",
        "FROM ubuntu AS other",
        "COPY --from=other /x /y",
        "COPY ../outside /app/",
        "COPY none.txt /app/",
        "COPY a.txt /etc/a.txt",
        "COPY a.txt /a.txt",
        "COPY a.txt /tests/test.sh",
        "WORKDIR /usr/src",
        "WORKDIR $HOME",
        "ENV A=$B",
        "ENV A='1",
        "ADD https://x/y /app/",
        "USER somebody",
        "VOLUME /data",
    ],
)
def test_what_needs_a_container_is_named(folder: Path, line: str) -> None:
    task = image(folder, f"FROM ubuntu:24.04\n{line}\n")
    assert len(task.unsupported) == 1 and task.unsupported[0].startswith(line.split(" \\")[0][:12])


def test_files_without_a_dockerfile_are_in_the_working_folder(folder: Path) -> None:
    image(folder, "")
    (folder / "environment" / "Dockerfile").unlink()
    assert texts(play([bash("find . -type f | sort")], folder)[0]) == [
        "./a.txt\n./b.txt\n./data/c.txt\n[exit code 0]"
    ]


def task_of(path: Path, **fields: Any) -> TerminalTask:
    return TerminalTask(TerminalTaskConfig(path=path, **fields))


def test_a_folder_of_tasks_is_split_and_its_files_are_its_identity(tmp_path: Path) -> None:
    shutil.copytree(TERMINAL_TASKS, tmp_path / "tasks")
    task = task_of(tmp_path / "tasks")
    assert (task.available("train"), task.available("held_out")) == (2, 1)
    (held,) = task.problems("held_out", 1, seed=0)
    names = {problem.key for problem in task.problems("train", 2, seed=0)}
    assert names | {held.key} == {"hello", "sum-column", "fix-script"}
    assert held.prompt and held.metadata["folder"] == str(tmp_path / "tasks" / held.key)
    with pytest.raises(DataError, match="2 distinct problems in its train split"):
        task.problems("train", 3, seed=0)
    before = task.fingerprint()
    assert task_of(tmp_path / "tasks").fingerprint() == before
    (tmp_path / "tasks" / "hello" / "tests" / "test.sh").write_text("exit 0\n")
    assert task_of(tmp_path / "tasks").fingerprint() != before


def test_tasks_that_need_a_container_are_refused_or_left_out_as_wanted(
    tmp_path: Path, folder: Path
) -> None:
    shutil.copytree(TERMINAL_TASKS, tmp_path / "tasks")
    image(folder, "FROM ubuntu\nRUN make\n")
    shutil.copytree(folder, tmp_path / "tasks" / "needs-make")
    with pytest.raises(DataError, match=r"1 of 4 tasks .*needs-make: `RUN make`.*unsupported"):
        task_of(tmp_path / "tasks")
    for how, count in (("skip", 3), ("ignore", 4)):
        found = task_of(tmp_path / "tasks", unsupported=how)
        assert sum(found.available(split) or 0 for split in ("train", "held_out")) == count


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tests/test.sh", None, "has no tests/test.sh"),
        ("instruction.md", " \n", "empty instruction.md"),
        ("task.toml", "a = [", "cannot be read"),
        ("task.toml", "[verifier]\ntimeout_sec = -1", r"\[verifier\] timeout_sec is -1"),
    ],
)
def test_a_broken_task_folder_is_one_sentence(
    folder: Path, name: str, content: str | None, says: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(DataError, match=says):
        task_of(folder.parent)
    with pytest.raises(DataError, match="has no task folder"):
        task_of(folder / "tests")
