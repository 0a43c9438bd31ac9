"""Pages as a person sees them, in a headless browser: what is shown is what the files hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fivefold.observe.json_records import cut_back
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.sample_parts import TokenValues
from fivefold.observe.step_log import SampleLog
from fivefold.planning.plan import plan_model
from fivefold.report.page import page as page_about
from fivefold.report.plan.page import page as plan_page
from fivefold.report.run import Run
from tests.browser.conftest import Page
from tests.unit.report.made_runs import lines_of, make_run

MANY_STEPS, MANY_SAMPLES = 10_000, 100_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root, f"trial-{number}", seed=number) for number in range(2)]


@pytest.fixture(scope="module")
def report(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("pages") / "report.html"
    file.write_text(page_about([Run.read(runs[0])]))
    return file.as_uri()


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)])
def test_a_report_shows_the_run_without_an_error(
    page: Page, report: str, runs: list[Path], width: int, dark: bool
) -> None:
    page.open(report, width=width, dark=dark)
    assert page.run("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert page.text("h1") == "made/trial-0"
    assert "finished 12 steps" in page.text("#head")
    assert "<b>two</b> devices are not used" in page.text("#head .warnings")
    # Nothing is wider than the window.
    assert page.run("return document.documentElement.scrollWidth") <= width
    page.wait("document.querySelector('[data-chart=Reward] .plot').data?.length")
    [faint, smooth] = page.run(
        "return document.querySelector('[data-chart=Reward] .plot').data.map((t) => Array.from(t.y))"
    )
    written = [record["reward/mean"] for record in lines_of(runs[0] / "metrics.jsonl")]
    assert faint == pytest.approx(written, rel=1e-6)
    assert smooth[-1] != pytest.approx(written[-1], rel=1e-6)
    page.fill("#smoothing", "0")
    [exact] = page.run("return document.querySelector('[data-chart=Reward] .plot').data.map((t) => Array.from(t.y))")
    assert exact == pytest.approx(written, rel=1e-6)
    page.run("document.getElementById('log').click()")
    assert page.run("return document.querySelector('[data-chart=Reward] .plot').layout.yaxis.type") == "log"
    page.run("document.getElementById('theme').click()")
    assert page.run("return document.documentElement.dataset.theme") == ("light" if dark else "dark")
    page.run("document.getElementById('others-details').open = true")
    for section in ("speed", "experts", "recipe", "samples", "others"):
        page.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        page.wait(f"!document.querySelector('#{section} .plot') || document.querySelector('#{section} .plot').data")
    assert page.run("return document.querySelectorAll('#expert-charts .plot')[0].data[0].z.length") == 4
    # On paper, every chart fits into its card.
    page.run("dispatchEvent(new Event('beforeprint'))")
    widths = page.run(
        "return [...document.querySelectorAll('section:not([hidden]) .plot')].map((plot) =>"
        " [plot.clientWidth, plot.querySelector('.main-svg').clientWidth])"
    )
    assert len(widths) > 10
    assert all(0 < drawn <= room < 700 for room, drawn in widths)
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.errors() == []


def test_two_runs_lie_over_each_other_with_the_differences_of_their_recipes(
    page: Page, runs: list[Path], tmp_path: Path
) -> None:
    with JsonLines(runs[1] / "metrics.jsonl") as metrics:  # metrics that the first run does not have
        for step in (13, 14):
            metrics.write({"step": step, "advantage/mean": 0.0, "advantage/std": 1.0})
    file = tmp_path / "both.html"
    file.write_text(page_about([Run.read(run) for run in runs]))
    page.open(file.as_uri())
    rows = page.run(
        "const rows = [...document.querySelectorAll('#recipe-table tbody tr')];"
        "return rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert ["seed", "1", "2", "1"] in rows
    assert {row[0] for row in rows} == {"seed", "trial_name"}
    page.wait("document.querySelector('[data-chart=Reward] .plot').data?.length === 4")
    page.run("document.querySelector('[data-chart=Advantage]').scrollIntoView()")
    page.wait("document.querySelector('[data-chart=Advantage] .swatches').textContent")
    assert page.text("[data-chart=Advantage] .swatches") == "— advantage/mean– – advantage/std"
    page.run("scrollTo(0, 0)")
    page.run("document.querySelectorAll('#runs-table input')[1].click()")
    page.wait("document.querySelector('[data-chart=Reward] .plot').data?.length === 2")
    assert page.errors() == []


def test_the_browser_of_samples_filters_and_shows_what_was_logged(page: Page, report: str, runs: list[Path]) -> None:
    page.open(report)
    records = lines_of(runs[0] / "samples.jsonl")
    page.wait("document.querySelector('[data-count]').textContent === '96 of 96 samples'")
    page.fill("[data-filter=step-from]", "3")
    page.fill("[data-filter=step-to]", "4")
    page.fill("[data-filter=reward-from]", "0.5")
    chosen = [record for record in records if 3 <= int(str(record["step"])) <= 4 and record["reward"] == 1.0]
    page.wait(f"document.querySelector('[data-count]').textContent === '{len(chosen)} of 96 samples'")
    assert page.text(".detail [data-part=prompt]") == chosen[0]["prompt"]
    assert page.text(".detail [data-part=truth]") == chosen[0]["ground_truth"]
    page.wait("document.querySelectorAll('.detail .group > div').length === 4")
    word = str(chosen[-1]["response"])[:40]
    page.fill("[data-filter=text]", word)
    found = [record for record in chosen if word in str(record["response"])]
    page.wait(f"document.querySelector('[data-count]').textContent === '{len(found)} of 96 samples'")
    for kind in ("logprob", "gap", "advantage"):
        page.fill("select[aria-label='colour of tokens']", kind)
        page.wait("document.querySelectorAll('.detail > [data-part=response] span').length === 12")
    titles = page.run(
        "return [...document.querySelectorAll('.detail > [data-part=response] span')].map((s) => s.title)"
    )
    assert all("log-prob -" in title and "trainer -" in title and "advantage " in title for title in titles)
    page.run("document.querySelector('[data-filter=text]').value = ''")
    page.fill("select[aria-label=order]", "-age")
    page.wait("document.querySelector('.row').textContent.includes('step 3')")
    page.run("document.querySelector('.row').click()")
    page.wait("document.querySelector('.detail .facts').textContent.includes('weights of version 0 to 2, 2 steps old')")
    page.fill("select[aria-label='colour of tokens']", "age")
    colours = "[...document.querySelectorAll('.detail > [data-part=response] span')].map((s) => s.style.background)"
    page.wait(f"{colours}.length === 12")
    assert len(set(page.run(f"return {colours}.slice(0, 6)"))) == len(set(page.run(f"return {colours}.slice(6)"))) == 1
    assert page.run(f"return {colours}[0] !== {colours}[6]")
    page.run("document.querySelector('.detail button').click()")
    page.wait("new Set([...document.querySelectorAll('.row')].map((row) => row.textContent)).size > 0")
    assert page.errors() == []


def test_a_live_page_follows_its_run(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path, n_steps=1)
    command = [sys.executable, "-m", "fivefold", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        page.open(server.stdout.readline().strip())
        page.wait("document.querySelector('[data-chart=\"Phases of a step\"] .plot').data?.length")
        page.run("window.sameDocument = true")
        # A point makes no curve. Metrics that come later get theirs.
        assert page.run("return document.querySelector('[data-chart=Reward]')") is None
        with JsonLines(run / "metrics.jsonl") as metrics:
            metrics.write({"step": 2, "reward/mean": 0.25, "seconds/step": 1.0})
            metrics.write({"step": 3, "reward/mean": 0.5, "seconds/step": 1.0, "eval/accuracy": 0.5})
        page.wait("document.querySelector('[data-chart=Reward] .plot')?.data?.[0].x.length === 3")
        page.wait("document.querySelector('[data-chart=\"Held-out accuracy\"] .plot')?.data?.[0].x.length === 2")
        with JsonLines(run / "metrics.jsonl") as metrics:
            metrics.write({"step": 4, "reward/mean": 0.75, "seconds/step": 1.0})
        with JsonLines(run / "samples.jsonl") as samples:
            samples.write(
                {"step": 4, "prompt": "p", "prompt_index": 1, "response": "new", "reward": 1.0, "n_tokens": 1}
            )
        page.wait("document.querySelector('[data-chart=Reward] .plot').data[0].x.length === 4")
        page.wait("document.querySelector('[data-count]').textContent === '9 of 9 samples'")
        status = (run / "status.json").read_bytes()
        (run / "status.json").write_bytes(b"{")
        page.wait("document.querySelector('#head .warnings').textContent.includes('its status.json is damaged')")
        (run / "status.json").write_bytes(status)
        page.wait("!document.querySelector('#head').textContent.includes('damaged')")
        # The values of tokens come later than the text, and a run that goes on makes some steps anew.
        page.fill("[data-filter=step-from]", "4")
        page.wait("document.querySelector('.row').textContent.includes('new')")
        cut_back(run / "metrics.jsonl", 3)
        cut_back(run / "samples.jsonl", 3)
        with JsonLines(run / "metrics.jsonl") as metrics, SampleLog(run / "samples.jsonl", run / "samples") as samples:
            metrics.write({"step": 4, "reward/mean": 0.125, "seconds/step": 1.0})
            samples.write(
                [{"step": 4, "prompt": "p", "prompt_index": 1, "response": "anew", "reward": 1.0, "n_tokens": 1}]
            )
            ones = np.ones(1, np.float32)
            reads = [{"at": 1, "text": "<1+2="}]
            samples.complete([TokenValues(["an", "ew"], -ones, -ones, ones, np.zeros(1, np.int32), reads)])
        page.wait("document.querySelector('.row').textContent.includes('anew')")
        page.wait("document.querySelectorAll('.detail > [data-part=response] span').length === 2")
        assert page.run("return document.querySelector('.detail > [data-part=response]').textContent") == "an<1+2=ew"
        assert page.text(".detail > [data-part=response] .read") == "<1+2="
        page.wait("document.querySelector('[data-chart=Reward] .plot').data[0].y.at(-1) === 0.125")
        assert page.run("return window.sameDocument")
        assert page.errors() == []
        server.terminate()
        page.wait("document.getElementById('live').classList.contains('lost')")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(
        tmp_path_factory.mktemp("large"), n_steps=MANY_STEPS, n_samples=MANY_SAMPLES // MANY_STEPS, length=60
    )
    file = run.parent / "large.html"
    file.write_text(page_about([Run.read(run)]))
    return file


def test_a_run_of_many_steps_and_samples_fits_and_stays_smooth(page: Page, large: Path, measured: object) -> None:
    assert large.stat().st_size < 20e6
    seconds = page.open(large.as_uri())
    measured("seconds of work to open", page.work())  # type: ignore[operator]
    measured("seconds until all but the curves is shown", page.seconds_until("readable"))  # type: ignore[operator]
    measured("seconds to open", seconds)  # type: ignore[operator]
    count = page.text("[data-count]")
    page.run("document.getElementById('samples').scrollIntoView(); document.querySelector('.list').scrollTop = 1e6")
    drawn = "[...document.querySelectorAll('.row')]"
    page.wait(f"{drawn}.length > 5 && {drawn}.every((row) => !row.textContent.endsWith('…'))")
    assert page.run("return document.querySelectorAll('.row').length") < 40
    page.fill("[data-filter=reward-from]", "0.5")
    page.wait(f"document.querySelector('[data-count]').textContent !== '{count}'")
    longest = page.run(
        "const began = performance.now(); document.querySelector('.list').scrollTop = 5e5;"
        "document.querySelector('.list').dispatchEvent(new Event('scroll')); return performance.now() - began"
    )
    measured("ms to scroll", float(longest))  # type: ignore[operator]
    assert page.errors() == []


def test_the_page_of_a_plan_answers_the_pointer_and_sorts_its_layouts(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    answer = plan_model("Qwen3-30B-A3B", 16, searching=True)
    assert answer.found is not None
    assert answer.estimate is not None
    file.write_text(plan_page(answer.estimate, answer.found))
    page.open_plainly(file.as_uri())
    page.run(
        "const device = document.querySelector('rect[data-tip^=\"rank 5 \"]'), at = device.getBoundingClientRect();"
        "device.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: at.x, clientY: at.y }))"
    )
    hint = page.text("#tip")
    assert re.match(r"rank 5 of actor: node 0, device 5\nstage \d: layers ", hint)
    assert "GB at the peak (weights " in hint
    groups = dict(re.findall(r"(\w+) group: (.*)", hint))
    assert groups
    assert all("5" in members.split() for members in groups.values())
    column = "[...document.querySelectorAll('#layouts tbody tr')].map((row) => Number(row.cells[3].dataset.value))"
    page.run("document.querySelectorAll('#layouts th')[3].click()")
    values = page.run(f"return {column}")
    assert values == sorted(candidate.spare for candidate in answer.found.ranked)
    page.run("document.querySelectorAll('#layouts th')[3].click()")
    assert page.run(f"return {column}") == values[::-1]
    page.run("document.getElementById('dot-2').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    assert page.run("return document.querySelector('tr.chosen').id") == "layout-2"
    assert page.errors() == []
