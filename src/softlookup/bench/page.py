"""The report as a page of Markdown: what was measured, with what, how to do it again, and every figure.

A table of the page has a line for each workload and a column for each contender; what every contender took, how it was
configured and how far its answer was off stands in a part that opens on a click.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from softlookup._machine_parts import spread
from softlookup.bench.peers import OURS, PEERS
from softlookup.bench.rows import LIMIT, is_limit
from softlookup.bench.table import (
    DISAGREES,
    HEADERS,
    Rows,
    cells_of,
    growth_cells,
    name_of,
    remarks,
    section_of,
    sections,
)
from softlookup.bench.workloads import SWEEPS, names

READING = """\
Every figure is a median over rounds. In a round every contender has one turn, one after the other in one process, so
that what else happens on the machine meets all of them. GFLOP/s count the visible pairs of a query and a key alone;
GB/s are the bytes of the contender's own keys and values, once, over its time. In brackets: how many times faster
softlookup was than that contender, in the same rounds. The limit is the least time of the workload on this machine,
measured in the same rounds, over as long a time, by loops that do nothing else; *of limit* is that time over ours.
Every answer was checked: ours with float64, the others with ours, a quantised cache with the lookup in its own codes.
"""
MODEL_READING = """\
SmolLM2-135M-Instruct reads 7900 tokens of text (prefill), then single tokens (decode), in the same rounds. softlookup
and transformers run the same model in the same library on another attention; *no-attention* is that model on an
attention that computes nothing. The limit is that time plus the least time of all lookups on this machine. Logits and
chosen tokens are compared with those of transformers in float32: softlookup in float32 has to give the same, the
others round weights, activations or the cache, each in its own way.
"""
MACHINE_READING = """\
What `softlookup.machine` measures: the best of many short runs, between two interruptions. The limits in the tables
above are measured over as long as a call lasts, with all interruptions, and may be lower.
"""
MEMORY_READING = """\
Peak memory beyond inputs and outputs, one head, d 64, float32, with statistics. A part of it, the scratch of every
thread, does not grow with N, and pulls the fitted exponent below 1:"""
GROUPS = {
    "prefill": "Prefill (GFLOP/s)",
    "decode": "Decoding (GB/s)",
    "train": "Training, forward and backward (GFLOP/s)",
    "call": "Small calls (microseconds a call)",
}


def markdown(report: dict[str, Any], pictures: Iterable[str] = ()) -> str:
    """The page; `pictures` are the names of image files that stand beside it."""
    parts = [["# Performance"], _what(report), ["## How to read the tables", "", READING.rstrip()]]
    plain = [row for row in report["rows"] if row["workload"] not in SWEEPS]
    for kind, title in GROUPS.items():
        if rows := [row for row in plain if row["kind"] == kind]:
            parts.append([f"## {title}", "", *_group(rows)])
    if rows := [row for row in plain if row["kind"] == "model"]:
        parts.append(["## A language model", "", MODEL_READING.rstrip(), "", *_model(rows)])
    if growing := [*_growth(report["growths"]), *_memory(report["rows"]), *_pictures(pictures)]:
        parts.append(["## Growth", "", *growing])
    if report["machine"]:
        parts.append(["## The machine at its best", "", MACHINE_READING.rstrip(), "", *_machine(report["machine"])])
    parts.append(_details(report["rows"]))
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def _what(report: dict[str, Any]) -> list[str]:
    """The machine, the versions, the command, and what is doubtful."""
    info, options = report["softlookup"], report["options"]
    facts = {
        "date": report["measured"][:10],
        "CPU": info["cpu"],
        "matrix units": ", ".join(report["matrix_units"]),
        "instruction set, threads": f"{options['isa']}, {options['threads']}",
        "system": report["system"],
        "softlookup": f"{info['version']}, {info['compiler']}, Python {report['python']}",
        **{name: found or "not installed" for name, found in report["peers"].items()},
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items() if fact)]
    lines += ["", "All of this again, from a checkout:", ""]
    lines += [f"    {line}" for line in _commands(report)]
    return [*lines, *(f"\n> {doubt}" for doubt in report["doubts"])]


def _commands(report: dict[str, Any]) -> Iterator[str]:
    options = report["options"]
    yield "python -m pip install '.[bench]'"
    yield "python -m pip install '.[bench-llama]'  # compiles llama.cpp"
    command = f"softlookup bench --out DIR --repeats {options['rounds']} --seconds {options['seconds']:g}"
    command += f" --threads {options['threads']} --isa {options['isa']}"
    run = list(dict.fromkeys(row["workload"] for row in report["rows"]))
    if set(run) != set(names()):
        command += f" --workload {','.join(run)}"
    if set(options["peers"]) != set(PEERS):
        command += f" --peer {','.join(options['peers']) or 'none'}"
    yield command


def _group(rows: Rows) -> list[str]:
    """A line for each workload, a column for each contender that has a figure."""
    present = dict.fromkeys(row["contender"] for row in rows if not row["missing"])
    peers = [name for name in present if name != OURS and not is_limit(name)]
    limited = [LIMIT, "of limit"] if LIMIT in present else []
    lines = _header(["workload", OURS, *limited, *peers])
    for label, found in sections(rows):
        by_name = {row["contender"]: row for row in found}
        ours = by_name.get(OURS)
        cells = [label, _rate(ours)]
        if limited:
            share = ours["share_of_limit"] if ours else None
            cells += [_rate(by_name.get(LIMIT)), "" if share is None else f"{share:.2f}"]
        lines.append(_line(*cells, *(_beside(by_name.get(peer)) for peer in peers)))
    return [*lines, *_absent(rows)]


def _rate(row: dict[str, Any] | None) -> str:
    if row is None or row["missing"]:
        return ""
    return f"{row['rate']:.3g}" + (f" {DISAGREES}" if row["agrees"] is False else "")


def _beside(row: dict[str, Any] | None) -> str:
    if row is None or row["missing"]:
        return ""
    return _rate(row) + ("" if row["ours_is_faster"] is None else f" ({row['ours_is_faster']:.2f}x)")


def _model(rows: Rows) -> Iterator[str]:
    headers = ("contender", "", "ours faster", "of limit", "logits differ by", "same tokens")
    for _, found in sections(rows):
        timed = [row for row in found if not row["missing"]]
        if timed:
            yield from (f"### {timed[0]['detail'].capitalize()}", "")
            yield from _header(headers)
        for row in timed:
            name, _, rate, faster, share, difference = cells_of(row)
            same = "" if row["same_tokens"] is None else "{} of {}".format(*row["same_tokens"])
            wrong = f" {DISAGREES}" if row["agrees"] is False else ""
            yield _line(name, rate, faster, share, difference + wrong, same)
        limits = remarks([row for row in timed if is_limit(row["contender"])])
        yield from ("", *(f"- {line}" for line in limits), *_absent(found))
        yield ""


def _absent(rows: Rows) -> list[str]:
    """Who is missing where, and why; one line for each reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["missing"]:
            where.setdefault((row["contender"], row["missing"]), []).append(section_of(row))
    lines = [f"- {name}: {reason} ({', '.join(labels)})" for (name, reason), labels in where.items()]
    return ["", "Not measured:", "", *lines] if lines else []


def _growth(growths: Sequence[dict[str, Any]]) -> list[str]:
    if not growths:
        return []
    lines = _header(["grows with N", "contender", "from N", "to N", "fitted exponent", "expected", ""])
    return [*lines, *(_line(*growth_cells(growth)) for growth in growths), ""]


def _memory(rows: Rows) -> list[str]:
    found = [row for row in rows if row["extra_bytes"] is not None]
    if not found:
        return []
    lines = [_line(row["detail"], f"{row['extra_bytes'] / 2**20:.1f} MiB", row["note"]) for row in found]
    return [MEMORY_READING, "", *_header(["pass and N", "extra", ""]), *lines, ""]


def _pictures(pictures: Iterable[str]) -> list[str]:
    return [line for picture in pictures for line in (f"![{picture.partition('.')[0]}]({picture})", "")]


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    yield from _header(["what", "threads", "best", "two unrolls differ by"])
    for peak in machine["peaks"]:
        yield _machine_line(peak["kind"], peak["threads"], max, peak["rates_gflops"], "GFLOP/s")
    for cost in machine["exponentials"]:
        yield _machine_line(f"exp_{cost['type']}", cost["threads"], min, cost["costs_ns"], "ns a score")
    for read in machine["reads"]:
        what = f"read {read['buffer_bytes'] / 1e6:.0f} MB on {read['page_bytes'] // 1024} KiB pages"
        yield _machine_line(what, read["threads"], max, read["rates_gbs"], "GB/s")
    yield from ("", *(f"- {doubt}" for doubt in machine["doubts"]))


def _machine_line(
    what: str, threads: int, best: Callable[[Sequence[float]], float], pair: Sequence[float], unit: str
) -> str:
    return _line(what, str(threads), f"{best(pair):.3g} {unit}", f"{spread(*pair):.1%}")


def _details(rows: Rows) -> list[str]:
    lines = ["## Every measurement", "", "<details><summary>Times, differences and configurations</summary>", ""]
    lines += _header(["workload", *HEADERS, ""])
    for label, found in sections(rows):
        for row in found:
            told = "".join(remarks([row])).removeprefix(f"{name_of(row)}: ")
            cells = (name_of(row), *([""] * 5)) if row["missing"] else cells_of(row)
            note = "" if row["note"] in told else row["note"]
            lines.append(_line(label, *cells, "; ".join(filter(None, (told, note)))))
    return [*lines, "", "</details>"]


def _header(headers: Sequence[str]) -> list[str]:
    return [_line(*headers), "|---|" + "---:|" * (len(headers) - 1)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
