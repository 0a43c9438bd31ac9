"""Time lines: events of a driver and two ranks, read back as a trace and as what the page draws."""

from __future__ import annotations

import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.observe.timers import EventLog, PhaseTimers
from fivefold.report.timeline import EventFiles, Timeline, chrome_trace, timeline_block
from tests.unit.report.made_runs import make_run
from tests.unit.report.test_pages import table_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps: the driver trains, on two ranks, and generates in a thread; the first is an earlier start."""
    run = make_run(tmp_path, n_steps=2)
    logs = run / "logs"
    (logs / "start-1").mkdir()
    for folder, steps in ((logs / "start-1", (1,)), (logs, (2,))):
        driver = EventLog(folder / "driver.events", names_threads=True)
        ranks = [EventLog(folder / f"actor-{rank}.events") for rank in (0, 10)]
        timers = PhaseTimers(events=driver)

        def generate(timers: PhaseTimers = timers) -> None:
            with timers.phase("rollout"):
                time.sleep(0.01)

        for step in steps:
            beside = threading.Thread(target=generate, name="rollout")
            beside.start()
            with timers.phase("train"):
                for rank in ranks:
                    with rank.event("compute_logprobs"):
                        time.sleep(0.01)
            beside.join()
            driver.step_ended(step)
        for log in (driver, *ranks):
            log.close()
    with (logs / "actor-10.events").open("a") as half:
        half.write('{"name": "upd')
    return run


def test_a_time_line_has_the_phases_of_every_process_and_thread(run: Path) -> None:
    timeline = Timeline.read(run / "logs")
    assert len(timeline.events) == 8
    tracks = timeline.tracks()
    assert tracks == [("driver", "main"), ("driver", "rollout"), ("actor-0", "main"), ("actor-10", "main")]
    own = [event for event in timeline.events if event.process == "actor-0"]
    [train, _] = [event for event in timeline.events if event.name == "train"]
    assert train.start <= own[0].start
    assert own[0].start + own[0].seconds <= train.start + train.seconds + 0.005
    assert 0.01 <= own[0].seconds < 60
    assert [event.name for event in timeline.between(2, 2).events].count("compute logprobs") == 2
    with pytest.raises(ValueError, match="--steps 2-3: the run has events of steps 1-2"):
        timeline.between(2, 3)


def test_events_that_come_while_a_page_is_open_are_added(run: Path) -> None:
    files = EventFiles(run / "logs")
    before = files.read()
    assert before == Timeline.read(run / "logs")
    with (run / "logs" / "driver.events").open("a") as log:
        log.write('{"name": "train", "start": 2e9, "seconds": 1.5, "thread": "main"}\n{"step": 3, "at": 2000000002}\n')
    after = files.read()
    assert after == Timeline.read(run / "logs")
    assert (len(after.events), after.steps[-1]) == (len(before.events) + 1, (3, 2000000002))
    # Another start of the run sets its files aside.
    (run / "logs" / "start-2").mkdir()
    for file in (run / "logs").glob("*.events"):
        file.rename(run / "logs" / "start-2" / file.name)
    EventLog(run / "logs" / "driver.events").add("setup", 1.0)
    again = files.read()
    assert again == Timeline.read(run / "logs")
    assert len(again.events) == len(after.events) + 1


def test_the_thread_of_a_pool_has_the_name_of_the_pool(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "driver.events", names_threads=True)
    with ThreadPoolExecutor(1, "checkpoint") as pool:
        pool.submit(log.add, "checkpoint write", 0.5)
    log.close()
    assert Timeline.read(tmp_path).tracks() == [("driver", "checkpoint")]


def test_the_trace_is_one_that_perfetto_opens(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["timeline", str(run), "-o", str(out)])
    assert result.output == f"{out}: 8 events of 3 processes\n"
    trace = json.loads(out.read_text())
    events = trace["traceEvents"]
    # https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events need these keys.
    assert all({"ph", "name", "pid", "tid", "ts", "dur"} <= event.keys() for event in events if event["ph"] == "X")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["actor-0", "actor-10", "driver"]
    # Perfetto takes thread 0 for the thread with the number of its process: two threads must not become one.
    named = [event for event in events if event["name"] == "thread_name"]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert sorted(threads.values()) == ["actor-0", "actor-10", "driver", "driver, rollout"]
    assert all(tid for _, tid in threads)
    assert {(event["pid"], event["tid"]) for event in events} == threads.keys()
    assert len({tid for _, tid in threads}) == len(threads)
    assert {names[event["pid"]] for event in events if event["name"] == "compute logprobs"} == {"actor-0", "actor-10"}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    assert [event["name"] for event in events if event["ph"] == "i"] == ["end of step 1", "end of step 2"]


def test_the_page_gets_the_times_of_the_trace(run: Path) -> None:
    timeline = Timeline.read(run / "logs")
    block = gzip.decompress(timeline_block(timeline))
    table = table_of(block)
    spans = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]
    assert np.cumsum(table["since"], dtype=np.float64) * 1e6 == pytest.approx([span["ts"] for span in spans], abs=100)
    assert table["seconds"] * 1e6 == pytest.approx([span["dur"] for span in spans], rel=1e-4, abs=1)


def test_a_run_without_events_has_no_time_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["timeline", str(make_run(tmp_path, n_steps=1))])
    assert result.exit_code == 2
    assert "has no events" in result.output
