"""Golden numbers, and time budgets per area: a session that takes longer than its budget fails, and says where."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

# Seconds of one area, on two cores, start-up of its engine or groups included; 36 minutes together.
AREA_BUDGETS_S = {
    "static": 120,
    "unit": 420,
    "simulation": 110,
    "integration/fleet": 420,
    "integration/second_engine": 190,
    "integration/worker": 260,
    "integration/run": 280,
    "integration/chaos": 300,
    "integration/service": 60,
}
FILE_BUDGET_S = 300
TOTAL_BUDGET_S = 36 * 60
SLOW_MACHINE = 1.5
"""One machine needs up to 1.6 times the seconds of another, or of itself an hour ago. So what is over its budget is
said, and what is over it by this factor fails, or all of it where the sum is over its own."""

_TESTS = Path(__file__).parent


class Budgets:
    """Adds up what each area and file took."""

    def __init__(self, markers: str) -> None:
        """`markers`: the expression that chose the tests; long ones have no budget."""
        self.only_quick = "not long" in markers
        self.areas: dict[str, float] = defaultdict(float)
        self.files: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.nodeid.split("::")[0])
        relative = file.relative_to("tests").as_posix() if file.parts[0] == "tests" else file.as_posix()
        area = max(
            (area for area in AREA_BUDGETS_S if relative.startswith(f"{area}/")), key=len, default="other"
        )
        self.areas[area] += report.duration
        self.files[relative] += report.duration

    def overruns(self, factor: float = 1.0) -> list[str]:
        """What took longer than `factor` times its budget."""
        if not self.only_quick:
            return []
        spent = [
            (f"area {area}", spent_s, AREA_BUDGETS_S.get(area, 0)) for area, spent_s in self.areas.items()
        ]
        spent += [(f"file {file}", spent_s, FILE_BUDGET_S) for file, spent_s in self.files.items()]
        return [
            f"{name}: {spent_s:.0f} s of {budget_s} s"
            for name, spent_s, budget_s in spent
            if spent_s > factor * budget_s
        ]

    @property
    def is_too_slow(self) -> bool:
        total_s = sum(self.areas.values())
        return bool(self.overruns(SLOW_MACHINE)) or (self.only_quick and total_s > TOTAL_BUDGET_S)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_too_slow and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for area, spent_s in sorted(self.areas.items()):
            of_budget = f" of {AREA_BUDGETS_S.get(area, 0)} s" if self.only_quick else ""
            terminalreporter.write_line(f"budget {area}: {spent_s:.0f} s{of_budget}")
        for line in self.overruns():
            terminalreporter.write_line(f"OVER BUDGET {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budgets(config.option.markexpr), "asyppo-budgets")


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Numbers of methods, computed from their equations by an independent numpy program in float64."""
    return json.loads((_TESTS / "golden" / "algorithms.json").read_text())
