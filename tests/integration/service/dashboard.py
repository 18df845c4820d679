"""Which metrics the Grafana dashboard asks for, and which a scrape has.

vLLM has a colon in its names. A Prometheus before version 3 does not say that it can read it, and gets an underscore.
"""

import asyncio
import json
import re
import urllib.request
from pathlib import Path

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/asyppo_fleet.json"


def queries() -> list[tuple[str, str]]:
    """The title and an expression of every panel, as a data source gets it for all servers and the last minute."""
    document = json.loads(DASHBOARD.read_text())
    values = {"$instance": ".*", "$__rate_interval": "1m"}
    return [
        (panel["title"], re.sub(r"\$\w+", lambda variable: values[variable[0]], target["expr"]))
        for panel in document["panels"]
        for target in panel["targets"]
    ]


def asked_for() -> set[str]:
    """Names of the series in all expressions of the dashboard, vLLM's with their colon."""
    document = json.loads(DASHBOARD.read_text())
    expressions = [expression for _, expression in queries()]
    expressions += [
        variable["query"] for variable in document["templating"]["list"] if variable["type"] == "query"
    ]
    asked = "\n".join(expressions).replace("vllm[:_]", "vllm:")
    return set(re.findall(r"\b(?:asyppo_fleet_|vllm:)\w+", asked))


def series_of(scrape: str) -> set[str]:
    return {
        re.split(r"[{ ]", line, maxsplit=1)[0] for line in scrape.splitlines() if not line.startswith("#")
    }


OLD_PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
"""What it accepts before version 3."""


async def scrape(port: int, accept: str = "*/*") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})

    def read() -> str:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)
