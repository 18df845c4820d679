"""What a person sees: a table that fits 80 columns, plain lines without a terminal."""

import io

from rich.console import Console

from asyppo_async.trainer.live import Display, StepLine


def line(step: int) -> StepLine:
    return StepLine(
        step=step,
        reward=-0.123,
        accuracy=0.456,
        entropy=0.789,
        staleness=1.5,
        tokens_per_s=12345.0,
        wait_s=12.34,
        step_s=123.45,
        gap=1.2e-6,
    )


def show(*, terminal: bool, steps: int) -> str:
    file = io.StringIO()
    display = Display(
        200, Console(file=file, width=80, force_terminal=terminal, color_system=None, legacy_windows=False)
    )
    with display.open():
        display.phase("training")
        for step in range(1, steps + 1):
            display.step(line(step))
    display.result("held-out accuracy 45.0 % -> 75.0 %")
    return file.getvalue()


def test_display_without_a_terminal_prints_one_plain_line_a_step() -> None:
    lines = show(terminal=False, steps=3).splitlines()
    assert lines[0] == "training"
    assert sum(text.startswith("step ") for text in lines) == 3
    assert "accuracy 45.6%" in lines[1] and "gap 1.2e-06" in lines[1]
    assert lines[-1] == "held-out accuracy 45.0 % -> 75.0 %"
    assert "\x1b" not in "".join(lines)


def test_display_on_a_terminal_fits_80_columns_and_keeps_the_last_steps() -> None:
    text = show(terminal=True, steps=30)
    frame = text[text.rindex("reward") :]
    rows = frame.splitlines()
    assert all(len(row) <= 80 for row in rows)
    assert any(row.strip().startswith("30 ") for row in rows) and not any(
        row.strip().startswith("10 ") for row in rows
    )
    assert "30/200" in frame
