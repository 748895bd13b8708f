"""The demo on a terminal (rich). Reads the plain data that the other rooms make."""

from __future__ import annotations

from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table


def show_basics(basics: dict[str, Any], console: Console) -> None:
    """Print the worked lookup, the masks, the entropies and the speed."""
    console.print(_lookup_table(basics["lookup"]))
    console.print()
    console.print(Columns([_picture(mask) for mask in basics["masks"]]))
    console.print()
    console.print(_entropy_table(basics["entropy"]))
    console.print()
    console.print(_speed_table(basics["speed"]))


def show_model(report: dict[str, Any], console: Console) -> None:
    """Print the table of a model run and where the files are."""
    title = (
        f"{report['model']}, {report['dtype']}, {report['threads']} threads: "
        f"stock attention ({report['stock_implementation']}) and softlookup"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("context", justify="right")
    table.add_column("attention")
    for header in ("prefill\ntokens/s", "decode\nms/token", "logits\ndiffer by", "same\ntokens", "KV cache\nMB"):
        table.add_column(header, justify="right")
    for row in report["contexts"]:
        stock, ours = row["stock"], row["softlookup"]
        table.add_row(str(row["context"]), "stock", *_speeds(stock), "", "", f"{row['cache_bytes'] / 1e6:.1f}")
        agree = f"{row['tokens_that_agree']} of {row['tokens']}"
        table.add_row("", "softlookup", *_speeds(ours), f"{row['largest_logit_difference']:.1e}", agree, "")
        gains = (_gain(stock[name], ours[name]) for name in ("prefill_seconds", "decode_ms_per_token"))
        table.add_row("", "gain", *gains, end_section=True)
    console.print(table)
    for row in report["contexts"]:
        if row["stock_logit_margin_at_split"] is not None:
            console.print(
                f"At {row['context']} tokens the choices part at token {row['tokens_that_agree'] + 1}, "
                f"where the two stock logits are {row['stock_logit_margin_at_split']:.1e} apart.",
                soft_wrap=True,
            )
    console.print(_cache_table(report["caches"]))
    console.print(f"wrote {' and '.join(report['files'])}", soft_wrap=True)


def show_info(info: dict[str, object], console: Console) -> None:
    """Print what this installation is."""
    table = Table(show_header=False)
    for name, value in info.items():
        table.add_row(name, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    console.print(table)


def _cache_table(caches: dict[str, Any]) -> Table:
    title = f"softlookup.transformers.Cache at {caches['context']} tokens, beside the stock choices"
    table = Table(title=title, title_justify="left")
    table.add_column("cache")
    for header in ("KV cache\nMB", "decode\nms/token", "logits\ndiffer by", "same\nchoices"):
        table.add_column(header, justify="right")
    for row in caches["rows"]:
        agree = f"{row['choices_that_agree']} of {row['tokens']}"
        megabytes, milliseconds = f"{row['cache_bytes'] / 1e6:.1f}", _one_decimal(row["decode_ms_per_token"])
        table.add_row(row["dtype"], megabytes, milliseconds, f"{row['largest_logit_difference']:.1e}", agree)
    return table


def _speeds(times: dict[str, float | None]) -> tuple[str, str]:
    return f"{times['prefill_tokens_per_second']:.0f}", _one_decimal(times["decode_ms_per_token"])


def _one_decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _gain(stock: float | None, ours: float | None) -> str:
    return "" if stock is None or ours is None else f"{stock / ours:.2f}x"


def _lookup_table(lookup: dict[str, Any]) -> Table:
    table = Table(title=f"A lookup: query {lookup['query']}", title_justify="left")
    for header in ("key", "value", "score", "/ sqrt(2)", "weight", "unscaled"):
        table.add_column(header, justify="right")
    columns = ("keys", "values", "scores", "scaled_scores", "weights", "unscaled_weights")
    for key, value, score, scaled, weight, unscaled in zip(*(lookup[column] for column in columns), strict=True):
        table.add_row(str(key), str(value), f"{score:g}", f"{scaled:.3f}", f"{weight:.5f}", f"{unscaled:.5f}")
    table.caption = "out = [" + ", ".join(f"{number:.5f}" for number in lookup["out"]) + "]"
    return table


def _picture(mask: dict[str, Any]) -> Panel:
    rows = "\n".join(" ".join(row) for row in mask["rows"])
    return Panel(rows, title=mask["name"], subtitle=f"{mask['visible']} of {mask['of']} scores", expand=False)


def _entropy_table(rows: list[dict[str, float]]) -> Table:
    table = Table(title="Entropy (nats) of one row over 256 keys, as the scores are scaled up", title_justify="left")
    for header in ("sharpness", "entropy", "/ ln 256", "exp(entropy)", "max weight", "trace J"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            f"{row['beta']:g}", f"{row['entropy_nats']:.3f}", f"{row['normalized_entropy']:.3f}",
            f"{row['effective_keys']:.1f}", f"{row['max_weight']:.3f}", f"{row['jacobian_trace']:.3f}",
        )  # fmt: skip
    return table


def _speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="softlookup.attention beside NumPy's own formula, float32", title_justify="left")
    table.add_column("shapes")
    for header in ("NumPy ms", "ours ms", "ratio", "difference"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row["name"], f"{1000 * row['numpy_seconds']:.2f}", f"{1000 * row['softlookup_seconds']:.2f}",
            f"{row['ratio']:.1f}x", f"{row['largest_difference']:.1e}",
        )  # fmt: skip
    return table
