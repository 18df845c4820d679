"""What a person reads of `asyppo-train best-of`."""

from rich.table import Table

from asyppo_async.trainer.best_of import BestOf


def best_of_table(found: BestOf) -> Table:
    """One row for each way of choosing, best first."""
    table = Table(title=f"best of {found.n} on {found.prompts} held-out prompts", title_justify="left")
    table.add_column("chosen by")
    for column in ("accuracy", "standard error", "tokens a prompt"):
        table.add_column(column, justify="right")
    for way, share in sorted(found.accuracy.items(), key=lambda item: -item[1]):
        table.add_row(way, f"{share:.1%}", f"{found.standard_error[way]:.1%}", f"{found.tokens[way]:.0f}")
    return table
