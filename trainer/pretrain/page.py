"""What a person reads of a value pretraining."""

from rich.table import Table

from asyppo_async.trainer.pretrain.progress import Progress


def result_table(progress: Progress) -> Table:
    """Loss at both ends, its two phases, clipped steps, held-out explained variance by length."""
    table = Table(title="value pretraining", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in progress.row().items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    return table
