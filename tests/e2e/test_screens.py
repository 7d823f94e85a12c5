"""What a person sees: pages of real MLflow and Prefect servers after real runs, in Chromium.

With POSTTRAIN_SCREENS=FOLDER the pictures are kept there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from PIL import Image

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.run.summary import TRAINING_VIEW
from tests.helpers.browser import open_browser
from tests.helpers.pipeline import (
    COMMAND,
    environment,
    prepared,
    run_loaded,
    tiny_config,
    write_config,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

STAGES = ["evaluate_base", "sft", "reward_model", "rl", "evaluate", "register"]
QUIET = """
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
"""
"""MLflow opens a panel in addition to the first page that one sees."""


@dataclass(frozen=True)
class Ui:
    """Both servers of a home with two runs of one config and two seeds."""

    mlflow: str
    prefect: str
    home: Path
    runs: tuple[str, str]

    def get(self, path: str, **params: str) -> Any:
        """What MLflow's API answers."""
        answer = httpx.get(f"{self.mlflow}/api/2.0/mlflow/{path}", params=params)
        answer.raise_for_status()
        return answer.json()

    def experiment(self) -> str:
        return str(
            self.get("experiments/get-by-name", experiment_name="tiny")["experiment"][
                "experiment_id"
            ]
        )

    def stage_run(self, stage: str) -> str:
        """MLflow's run of a stage of the first run."""
        query = {
            "experiment_ids": [self.experiment()],
            "filter": f"tags.mlflow.parentRunId = '{self.runs[0]}' "
            f"and tags.`posttrain.stage` = '{stage}'",
        }
        answer = httpx.post(f"{self.mlflow}/api/2.0/mlflow/runs/search", json=query)
        (run,) = answer.json()["runs"]
        return str(run["info"]["run_id"])

    def table(self, run_id: str, name: str) -> list[dict[str, object]]:
        """The rows of a table among the artifacts of a run."""
        query = {"run_uuid": run_id, "path": f"tables/{name}"}
        answer = httpx.get(f"{self.mlflow}/get-artifact", params=query).raise_for_status()
        found = answer.json()
        return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]

    def metric(self, run_id: str, name: str) -> float:
        """The last value of a metric of a run."""
        metrics = self.get("runs/get", run_id=run_id)["run"]["data"]["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["key"] == name))

    def run_page(self, run_id: str, rest: str = "") -> str:
        """As `posttrain run` prints it."""
        place = f"experiments/{self.experiment()}/runs/{run_id}{rest}"
        return f"{self.mlflow}/#/{place}?{TRAINING_VIEW}"


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    with open_browser():
        """Skips here, before the runs, where there is no browser."""
    folder = tmp_path_factory.mktemp("screens")
    home = prepared(folder / "home")
    config = write_config(folder / "run.yaml", tiny_config(make_tiny_model(folder / "model")))
    runs = []
    for seed in (0, 1):
        done = run_loaded(
            "run", str(config), "--home", str(home), "--json", "--set", f"seed={seed}"
        )
        assert done.code == 0, done.text
        runs.append(done.result["run_id"])
    ports = [str(port) for port in free_ports(2)]
    command = [*COMMAND, "ui", "--home", str(home), "--json"]
    command += ["--mlflow-port", ports[0], "--prefect-port", ports[1]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as servers:
        assert servers.stdout is not None
        urls = json.loads(servers.stdout.readline())
        try:
            yield Ui(urls["mlflow"], urls["prefect"], home, (runs[0], runs[1]))
        finally:
            servers.terminate()
            servers.wait(60)


@pytest.fixture(scope="module")
def page(ui: Ui) -> Iterator[Page]:
    with open_browser(ours=False) as found:
        found.set_default_timeout(120_000)
        found.add_init_script(QUIET)
        yield found


@pytest.fixture
def picture(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where to put the screen, which must not be blank when the test is over."""
    folder = Path(os.environ.get("POSTTRAIN_SCREENS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{request.node.name.removeprefix('test_')}.png"
    yield path
    page.screenshot(path=path)
    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None and len(colours) > 200, "the page is blank"


def show(page: Page, url: str, *texts: str) -> None:
    """Go to a page of its own, and wait until these texts are seen."""
    page.goto("about:blank")
    page.goto(url)
    for text in texts:
        page.get_by_text(text).first.wait_for()


def words(text: str) -> str:
    """A text as a page shows it, in which all white space is one space."""
    return " ".join(text.split())


def table_cells(page: Page) -> list[str]:
    """The cells of the page's only table, row by row, without its head."""
    page.get_by_role("cell").first.wait_for()
    return [words(text) for text in page.get_by_role("cell").all_inner_texts()]


def cell(value: object) -> str:
    """A value as MLflow shows it in a table."""
    return words(value if isinstance(value, str) else json.dumps(value))


def rounded(value: float) -> str:
    """A number as MLflow shows it next to others."""
    return f"{round(value, 3):g}"


def test_mlflow_run(ui: Ui, page: Page, picture: Path) -> None:
    show(
        page,
        ui.run_page(ui.runs[0]),
        "% tiny-seed0",
        "Finished",
        "Child runs",
        "posttrain.version",
    )
    shown = page.locator("body").inner_text()
    assert all(stage in shown for stage in STAGES)
    assert "arithmetic-" in shown and "held-out accuracy" in shown
    link = page.get_by_role("link", name="The run in Prefect").get_attribute("href")
    assert link is not None and "/runs/flow-run/" in link


def test_mlflow_curves(ui: Ui, page: Page, picture: Path) -> None:
    run = ui.stage_run("rl")
    show(page, ui.run_page(run, "/model-metrics"), "rl (0_main/accuracy)", "rl (0_main/reward)")
    plot = page.locator(".js-plotly-plot").first
    plot.locator(".point").nth(3).wait_for(state="attached")
    assert plot.locator(".point").count() == 4, "a point for each of four steps"


def test_mlflow_microscope(ui: Ui, page: Page, picture: Path) -> None:
    run = ui.stage_run("rl")
    show(page, ui.run_page(run, "/artifacts/microscope/step-000004.html"), "step-000001.html")
    inside = page.frame_locator("iframe").first
    inside.locator("html[data-drawn-ms]").wait_for(state="attached")
    assert inside.locator("h1").inner_text() == "tiny · stage rl · step 4"
    assert inside.locator(".tokens span").count() > 8
    inside.locator("#what").select_option(label="own@token-mean")
    inside.get_by_text("→ own@token-mean: sum |weight|").wait_for()


def test_mlflow_card(ui: Ui, page: Page, picture: Path) -> None:
    show(page, ui.run_page(ui.runs[0], "/artifacts/run_card.html"), "environment.txt")
    inside = page.frame_locator("iframe").first
    inside.get_by_text("Run card: tiny-seed0").wait_for()
    assert "Held-out accuracy, 95 % intervals" in inside.locator("body").inner_text()


def test_mlflow_samples(ui: Ui, page: Page, picture: Path) -> None:
    run = ui.stage_run("rl")
    place = "/artifacts/tables/samples/step-000004.json"
    show(page, ui.run_page(run, place), "View as table", "finish_reason", "What is")
    rows = ui.table(run, "samples/step-000004.json")
    assert len(rows) == 16, "four prompts with four responses each"
    shown = table_cells(page)
    for name in ("prompt", "response", "finish_reason"):
        column = shown[list(rows[0]).index(name) :: len(rows[0])]
        assert column == [cell(row[name]) for row in rows][: len(column)], name
    show(page, ui.run_page(run, "/artifacts/tables/held_out_over_time.json"), "step 0", "What is")
    followed = ui.table(run, "held_out_over_time.json")
    assert len(followed) == 4, "each held-out problem"
    assert table_cells(page) == [cell(value) for row in followed for value in row.values()]


def test_mlflow_traces(ui: Ui, page: Page, picture: Path) -> None:
    run = ui.stage_run("rl")
    show(page, ui.run_page(run, "/traces"), "advantage", "What is", "2 of 2")
    rows = ui.table(run, "samples/step-000001.json")
    ranked = sorted(rows, key=lambda row: -float(str(row["reward"])))
    shown = page.get_by_role("row").filter(has_text="tr-")
    assert shown.count() == 2
    texts = [words(text) for text in shown.all_inner_texts()]
    for row in (ranked[0], ranked[-1]):
        response = words(json.dumps(row["response"]))
        numbers = [rounded(float(str(row[name]))) for name in ("advantage", "reward")]
        (found,) = [text.split(response)[1] for text in texts if response in text]
        assert all(number in found.split() for number in numbers), (numbers, found)


def test_mlflow_lineage(ui: Ui, page: Page, picture: Path) -> None:
    run = ui.get("runs/get", run_id=ui.stage_run("rl"))["run"]
    (made,) = run["outputs"]["model_outputs"]
    assert len(run["inputs"]["model_inputs"]) == 2, "what sft and the reward model made"
    url = f"{ui.mlflow}/#/experiments/{ui.experiment()}/models/{made['model_id']}"
    show(page, url, "Source run", "eval/greedy_accuracy")
    page.get_by_role("link", name="rl", exact=True).first.wait_for()
    page.get_by_role("link", name=re.compile("^tiny")).first.wait_for()


def test_mlflow_registry(ui: Ui, page: Page, picture: Path) -> None:
    show(page, f"{ui.mlflow}/#/models/tiny", "Version 1", "Version 2", "candidate")
    assert "eval.greedy_accuracy" in page.locator("body").inner_text()


def test_mlflow_comparison(ui: Ui, page: Page, picture: Path) -> None:
    runs, experiments = json.dumps(list(ui.runs)), json.dumps([ui.experiment()])
    url = f"{ui.mlflow}/#/compare-runs?runs={runs}&experiments={experiments}"
    show(page, url, "Comparing 2 Runs", "tiny-seed0", "tiny-seed1")
    page.locator(".js-plotly-plot").first.wait_for()
    rewards = [ui.metric(run, "0_main/reward") for run in ui.runs]
    assert rewards[0] != rewards[1], "two seeds"
    first, second = map(rounded, rewards)
    assert f"{first} {second}" in words(page.locator("body").inner_text())


def test_prefect_run(ui: Ui, page: Page, picture: Path) -> None:
    tags = ui.get("runs/get", run_id=ui.runs[0])["run"]["data"]["tags"]
    flow = next(tag["value"] for tag in tags if tag["key"] == "prefect.flow_run_id")
    show(page, f"{ui.prefect}/runs/flow-run/{flow}", "tiny-seed0", "Completed", "6 Task runs")
    page.locator("canvas").first.wait_for()
    page.get_by_text("Task Runs", exact=True).click()
    for stage in ("evaluate_base", "sft", "reward_model", "evaluate", "register"):
        page.get_by_text(stage, exact=True).first.wait_for()
    page.get_by_text("Artifacts", exact=True).click()
    page.get_by_text("run-card").first.wait_for()
    reward = ui.metric(ui.stage_run("rl"), "0_main/reward")
    page.get_by_text(f"ran reward {reward:.3f} ").first.wait_for()
    page.wait_for_timeout(1000)  # the graph moves into its place
