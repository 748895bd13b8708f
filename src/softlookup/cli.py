"""The command line: `softlookup demo`, `softlookup bench` and `softlookup info`.

Policy. With --json nothing but JSON reaches standard output; progress goes to standard error. Bad input, a missing
package, a missing network or a full disk ends with exit code 2 and one line that says what to pass or install.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    print(f"softlookup: the command line needs {missing.name}: pip install 'softlookup[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

import softlookup as sl
from softlookup.bench.command import bench
from softlookup.demo.basics import basics
from softlookup.demo.problem import DemoProblem
from softlookup.demo.show import show_basics, show_info, show_model

app = typer.Typer(
    name="softlookup",
    help="Exact softmax attention on CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(bench)

# Typer exports no name for the base of all errors of usage, and its newer versions carry their own copy of Click.
UsageProblem: type[Any] = typer.BadParameter.__mro__[2]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="auto (SmolLM2-135M), a folder, a .gguf file, or a hub repository owner/name."),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "512,2048,7900",
    tokens: Annotated[int, typer.Option(help="Tokens to decode after each prompt.")] = 48,
    out: Annotated[Path, typer.Option(help="Folder for report.json and entropy.png (with --model).")] = Path(
        "softlookup-demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Show a lookup, masks, entropy and speed; with --model a language model on stock attention and on softlookup."""
    lengths = _lengths(contexts)
    if tokens < 1:
        _fail(f"--tokens {tokens}: expected at least 1")
    facts = _facts()
    if model is not None:
        _model_demo(model, lengths, tokens, out, facts if as_json else None)
    elif as_json:
        _print_json({"info": facts, "basics": basics()})
    else:
        show_basics(basics(), Console())


def _model_demo(model: str, contexts: list[int], tokens: int, out: Path, json_facts: dict[str, object] | None) -> None:
    """Run the demo on a model and print tables, or JSON that starts with `json_facts`."""
    try:
        from softlookup.demo.model_demo import prepare, run_model_demo
    except ModuleNotFoundError as missing:
        _fail(f"--model needs {missing.name}: pip install 'softlookup[demo]' (README: how to get PyTorch's CPU build)")
    console, errors = Console(), Console(stderr=True)
    try:
        prepared = prepare(model, contexts, tokens, errors)
        numbers = basics()
        if json_facts is None:
            show_basics(numbers, console)
        report = run_model_demo(prepared, contexts, tokens, out, errors)
    except (DemoProblem, OSError) as problem:
        _fail(str(problem))
    if json_facts is None:
        show_model(report, console)
    else:
        _print_json({"info": json_facts, "basics": numbers, "model": report})


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show the version, the instruction sets and the threads of this installation."""
    facts = _facts()
    if as_json:
        _print_json(facts)
    else:
        show_info(facts, Console())


def _facts() -> dict[str, object]:
    try:
        return sl.info()
    except ValueError as problem:  # an environment variable set to something impossible
        _fail(str(problem))


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        _fail(f"--contexts {text}: expected positive whole numbers separated by commas, such as 512,2048")
    return lengths


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def _fail(message: str) -> NoReturn:
    _say(message)
    raise typer.Exit(2)


def _say(message: str) -> None:
    print(f"softlookup: {' '.join(message.split()).removeprefix('softlookup: ')}", file=sys.stderr)


def main() -> None:
    """Entry point of the `softlookup` command."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except UsageProblem as problem:
        code = 2
        if len(sys.argv) == 1:
            problem.show()  # the help, as nothing was asked for
        else:
            _say(f"{problem.format_message().rstrip('.')}; see softlookup --help")
    except typer.Abort:
        code = 1
    except OSError as problem:
        code = 1 if problem.errno == errno.EPIPE else 2
        if code == 2:
            _say(f"cannot write the output: {problem.strerror}")
        # What is still in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(code)
