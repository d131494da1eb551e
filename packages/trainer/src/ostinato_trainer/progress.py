"""The bar that long commands show: what runs, how far it is, for how long, and a note such as the loss."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def step_progress(console: Console) -> Progress:
    """A bar over steps; every task has a field `note`, shown at its end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console)
