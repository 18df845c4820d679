"""What an operator sees: metrics, their dashboard, and log lines. Real servers and HTTP, scripted engines."""

import asyncio
import json
import logging
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError, FleetUnavailable, RequestRejected
from asyppo_async.fleet.bench import BenchLoad, bench
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.fleet.metrics import SCRAPE_S
from asyppo_async.logs import JsonFormatter
from asyppo_async.rpc.security import OPEN
from tests.integration.service.dashboard import asked_for, scrape, series_of

DEADLINE_S = 20.0


def status_of(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)


def value(text: str, series: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{series} ")]
    return float(line.rsplit(" ", 1)[1])


async def test_metrics_when_calls_and_an_update_went_through_then_they_are_counted(
    serving, sender, draw, tmp_path: Path, until
) -> None:
    async with serving(Script(delta_delay_s=0.01), metrics_port=0) as server:
        port = json.loads((tmp_path / "ready.json").read_text())["metrics_port"]
        await server.client.collect(draw(num_samples=2, max_tokens=8), DEADLINE_S, lambda _: None)
        with pytest.raises(RequestRejected):
            await server.client.collect(draw(max_tokens=0), DEADLINE_S, lambda _: None)
        async with server.client.generate(draw(max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            text = await scrape(port)
            assert value(text, "asyppo_fleet_running_samples") == 1
        await until(lambda: not server.engine.running_ids)
        async with sender(server) as weights:
            await weights.publish(3)
        text = await scrape(port)
    assert value(text, 'asyppo_fleet_calls_total{outcome="ok"}') == 1
    assert value(text, 'asyppo_fleet_calls_total{outcome="invalid_argument"}') == 1
    assert value(text, 'asyppo_fleet_calls_total{outcome="client_gone"}') == 1
    assert value(text, 'asyppo_fleet_samples_total{end="length"}') == 2
    assert value(text, "asyppo_fleet_prompt_tokens_total") == 6
    assert value(text, "asyppo_fleet_tokens_total") >= 16 + 4
    assert value(text, "asyppo_fleet_time_to_first_token_seconds_count") == 2
    assert 0.001 < value(text, "asyppo_fleet_time_per_token_seconds_sum") < 5
    assert value(text, "asyppo_fleet_served_version") == 3
    assert value(text, 'asyppo_fleet_state{state="serving"}') == 1
    for phase in ("receive", "pause", "load", "resume", "probe"):
        assert value(text, f'asyppo_fleet_update_seconds_count{{phase="{phase}"}}') == 1
    ours = {name for name in asked_for() if name.startswith("asyppo_")}
    assert len(ours) > 10 and not ours - series_of(text), "the dashboard asks for what there is"
    assert "process_resident_memory_bytes" in text, "the process's own metrics are there too"


async def test_scrape_when_the_servers_loop_is_stuck_then_it_fails_instead_of_telling_old_numbers(
    serving, tmp_path: Path
) -> None:
    async with serving(metrics_port=0) as server:
        port = json.loads((tmp_path / "ready.json").read_text())["metrics_port"]
        scraping = asyncio.get_running_loop().run_in_executor(None, status_of, port)
        await asyncio.sleep(0)
        time.sleep(SCRAPE_S + 0.5)  # noqa: ASYNC251  the loop is stuck
        assert await scraping == 500
        assert (await server.client.info(DEADLINE_S)).state == "serving"


def test_metrics_endpoint_when_open_to_others_then_it_needs_tls_or_insecure(tmp_path: Path) -> None:
    config = ServeConfig(model=tmp_path, metrics_port=0, metrics_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"metrics_host 0\.0\.0\.0 can be reached"):
        config.check_exposure(has_token=True)
    config.model_copy(update={"insecure": True}).check_exposure(has_token=False)


async def test_metrics_endpoint_when_the_port_is_taken_then_one_line_says_so(serving, tmp_path: Path) -> None:
    async with serving(metrics_port=0):
        port = json.loads((tmp_path / "ready.json").read_text())["metrics_port"]
        with pytest.raises(ExceptionGroup) as caught:
            async with serving(metrics_port=port):
                pytest.fail("it is taken")
    assert caught.group_contains(ConfigError, match="cannot listen on 127.0.0.1:")


async def test_log_when_calls_are_logged_then_each_line_has_the_ids_of_both_sides(
    serving, draw, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(log_calls=True) as server:
        await server.client.collect(draw(num_samples=2, max_tokens=8), DEADLINE_S, lambda _: None)
    async with serving() as quiet:
        await quiet.client.collect(draw(), DEADLINE_S, lambda _: None)
    (record,) = [each for each in caplog.records if hasattr(each, "fields")]
    line = json.loads(JsonFormatter().format(record))
    assert (line["request_id"], line["prompt_id"], line["outcome"]) == ("request", "prompt", "ok")
    assert (line["num_samples"], line["num_tokens"], line["ends"]) == (2, 16, {"length": 2})
    assert (
        line["level"] == "INFO" and line["time"].endswith("Z") and 0 < line["first_token_s"] < line["whole_s"]
    )


async def test_bench_when_servers_run_then_it_counts_what_they_make(serving) -> None:
    load = BenchLoad(calls_at_once=4, num_samples=2, prompt_tokens=8, max_tokens=20, seconds=0.5)
    async with serving(Script(delta_delay_s=0.01)) as server:
        report = await bench([server.address], OPEN, load)
        assert report.num_failed_calls == 0 and report.num_tokens == report.num_calls * 2 * 20
        assert server.client.address and len(server.engine.prompts) == 2 * report.num_calls
    figures = report.figures()
    assert figures["tokens_per_s"] == pytest.approx(report.num_tokens / report.seconds, rel=0.01)
    assert 0.01 <= figures["first_token_p50_s"] <= figures["call_p50_s"] <= figures["call_p99_s"]
    with pytest.raises(FleetUnavailable, match="takes work"):
        await bench(["127.0.0.1:1"], OPEN, replace(load, seconds=0.1))
