"""Which metrics the Grafana dashboard asks for, and which a scrape has."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/asyppo_fleet.json"


def asked_for() -> set[str]:
    """Names of the series in all expressions of the dashboard."""
    document = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    expressions += [
        variable["query"] for variable in document["templating"]["list"] if variable["type"] == "query"
    ]
    return set(re.findall(r"\b(?:asyppo_fleet_|vllm:)\w+", "\n".join(expressions)))


def series_of(scrape: str) -> set[str]:
    return {
        re.split(r"[{ ]", line, maxsplit=1)[0] for line in scrape.splitlines() if not line.startswith("#")
    }
