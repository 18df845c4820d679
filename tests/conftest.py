"""Time budgets per area: a test session that takes longer than its budget fails, and says where."""

from collections import defaultdict
from pathlib import Path

import pytest

# Seconds of one area, on two cores, start-up of its engine or groups included.
AREA_BUDGETS_S = {
    "static": 180,
    "unit": 360,
    "simulation": 120,
    "integration/fleet": 600,
    "integration/second_engine": 240,
    "integration/worker": 360,
    "integration/run": 300,
}
FILE_BUDGET_S = 300

_TESTS = Path(__file__).parent


class Budgets:
    """Adds up what each area and file took."""

    def __init__(self) -> None:
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

    def overruns(self) -> list[str]:
        areas = [
            f"area {area}: {spent_s:.0f} s of {AREA_BUDGETS_S.get(area, 0)} s"
            for area, spent_s in self.areas.items()
            if spent_s > AREA_BUDGETS_S.get(area, 0)
        ]
        files = [
            f"file {file}: {spent_s:.0f} s of {FILE_BUDGET_S} s"
            for file, spent_s in self.files.items()
            if spent_s > FILE_BUDGET_S
        ]
        return areas + files

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        only_quick = "not long" in session.config.option.markexpr
        if only_quick and self.overruns() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for area, spent_s in sorted(self.areas.items()):
            terminalreporter.write_line(f"budget {area}: {spent_s:.0f} s of {AREA_BUDGETS_S.get(area, 0)} s")
        for line in self.overruns():
            terminalreporter.write_line(f"OVER BUDGET {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budgets(), "asyppo-budgets")
