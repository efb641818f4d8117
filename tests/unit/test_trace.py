"""Recording spans, and the events that viewers show."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fastload import CheckpointManager, SaveOptions
from fastload.base.stopwatch import Stopwatch
from fastload.ext.traces.spans import RankTrace, Recorder, Span, chrome_events, to_json


def test_a_stopwatch_records_what_it_measures_once_it_is_followed() -> None:
    watch, recorder = Stopwatch(), Recorder(1)
    with watch.span(round=1):
        pass
    recorder.follow("place", watch)
    with watch.span(round=2):
        began = watch.start()
        watch.stop(began, round=3)
    with watch:  # nothing is known of it
        pass
    spans = recorder.trace("here", 10.0, None).spans
    assert [(span.stage, span.facts) for span in spans] == [("place", {"round": 3}), ("place", {"round": 2})]
    assert spans[0].begin_s == began + 10.0
    assert spans[1].begin_s <= spans[0].begin_s <= spans[0].end_s <= spans[1].end_s


def test_of_too_many_spans_the_first_and_the_last_are_kept() -> None:
    recorder = Recorder(1_000_000)
    for number in range(1000):
        recorder.add("read", number, number + 1, {})
    trace = recorder.trace("here", 0.0, OSError("gone"))
    assert [span.begin_s for span in trace.spans] == [*range(128), *range(872, 1000)]
    assert (trace.num_dropped, trace.error) == (744, "OSError: gone")
    assert RankTrace.from_bytes(trace.to_bytes()) == trace
    title = next(e["args"]["name"] for e in chrome_events({3: trace}) if e["name"] == "process_name")
    assert title == "rank 3 on here (744 spans left out in the middle) failed: OSError: gone"


def test_overlapping_spans_of_a_stage_get_lanes_of_their_own() -> None:
    spans = (
        Span("read", 5.0, 7.0),
        Span("read", 6.0, 8.0),
        Span("read", 7.0, 9.0, {"nbytes": 3}),
        Span("load", 4.0, 9.0),
    )
    events = list(chrome_events({0: RankTrace("here", spans)}, {"floor_s": 1.5}))
    assert json.loads("".join(to_json(events))) == events
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {0: "load", 1: "read 1", 2: "read 2"}
    drawn = [(e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        (0, 0.0, 5e6, {}), (1, 1e6, 2e6, {}), (1, 3e6, 2e6, {"nbytes": 3}), (2, 2e6, 2e6, {}),
    ]  # fmt: skip
    assert "".join(to_json([])) == "[]\n"


def test_each_save_of_a_manager_has_a_trace_of_its_own(tmp_path: Path) -> None:
    options = SaveOptions(trace=tmp_path / "trace.json")
    with CheckpointManager(tmp_path / "run", every_steps=1, options=options) as manager:
        for step in (1, 2):
            manager.save(step, {"a": torch.ones(3)})
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("trace*")}
    assert sorted(found) == ["trace-step_00000001.json", "trace-step_00000002.json"]
    assert all("step_00000001" in json.dumps(found[name]) for name in found if "1" in name)
