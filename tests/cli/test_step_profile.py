import io

import pytest
from rich.console import Console

from raykv.cli import step_profile
from raykv.cli.console import Steps
from raykv.cli.settings import DemoOptions


@pytest.fixture
def profile(monkeypatch, tiny_folder):
    monkeypatch.setattr(step_profile, "SEQUENCES", (1, 3))
    with Steps(Console(file=io.StringIO())) as steps:
        return step_profile.run_profile(DemoOptions(model=str(tiny_folder), quick=True), steps)


def test_the_parts_make_the_whole(monkeypatch, request):
    samples, measure = [], step_profile._raykv_step
    monkeypatch.setattr(
        step_profile, "_raykv_step", lambda engine: samples.append(measure(engine)) or samples[-1]
    )
    profile = request.getfixturevalue("profile")
    assert [row.num_sequences for row in profile.rows] == [1, 3]
    for row in profile.rows:
        parts = row.engine_ms, row.gather_ms, row.write_ms, row.attention_ms, row.model_ms
        assert all(part > 0 for part in parts)
        assert 0 < row.dynamic_concat_ms < row.dynamic_step_ms
    assert len(samples) == 20
    for sample in samples:
        rest = {name: value for name, value in sample.items() if "dynamic" not in name}
        whole = rest.pop("step_ms")
        assert sum(rest.values()) == pytest.approx(whole)


def test_table_and_json(profile):
    console = Console(file=io.StringIO(), width=80)
    step_profile.print_profile(profile, console)
    text = console.file.getvalue()
    for words in ("gather of K/V", "DynamicCache", "rest of the model", "engine", "128 tokens"):
        assert words in text
    values = profile.as_json()
    assert values["context_tokens"] == 128
    assert [row["num_sequences"] for row in values["profile"]] == [1, 3]
    assert {"step_ms", "gather_ms", "engine_ms", "dynamic_step_ms", "dynamic_concat_ms"} <= values[
        "profile"
    ][0].keys()


def test_a_hybrid_gets_slots_and_decodes_from_the_first_measured_step(monkeypatch):
    monkeypatch.setattr(step_profile, "SEQUENCES", (2,))
    measure, running = step_profile._raykv_step, []

    def step(engine):
        running.append([task.num_remaining for task in engine.scheduler.running])
        return measure(engine)

    monkeypatch.setattr(step_profile, "_raykv_step", step)
    with Steps(Console(file=io.StringIO())) as steps:
        options = DemoOptions(model_class="qwen3_5-tiny", quick=True)
        profile = step_profile.run_profile(options, steps)
    assert [row.num_sequences for row in profile.rows] == [2]
    assert running == [[1, 1]] * len(running) != []
