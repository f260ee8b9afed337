"""A server's n-gram model: find the file, convert a published one once, check the vocabulary."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dart import _core

CACHE = Path.home() / ".cache" / "sglang-dart" / "ngram"
_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+))?")
_SUFFIXES = (".ngram", ".trie")
_UNKNOWN = bytes(32)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """Whose token ids a model holds. size 0 or sha256 empty: unknown."""

    size: int = 0
    sha256: bytes = b""
    name: str = ""

    def __str__(self) -> str:
        size = f"{self.size} tokens" if self.size else "unknown size"
        digest = f"sha256 {self.sha256.hex()[:16]}" if self.sha256 else "no fingerprint"
        return f"{self.name or 'unnamed tokenizer'} ({size}, {digest})"


def vocabulary_of(tokenizer: Any, name: str = "") -> Vocabulary:
    """Fingerprint a Hugging Face tokenizer.

    The hash covers the trained vocabulary, one line `id TAB token LF` each, ascending by id. Added
    tokens are left out: a base model and its chat model share n-grams. The size counts them.
    """
    known = tokenizer.get_vocab()
    added = tokenizer.get_added_vocab()
    digest = hashlib.sha256()
    for token, token_id in sorted(known.items(), key=lambda item: (item[1], item[0])):
        if token not in added:
            digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
    size = max(known.values(), default=-1) + 1
    return Vocabulary(size, digest.digest(), name or str(getattr(tokenizer, "name_or_path", "")))


def model_vocabulary(model: _core.NgramModel) -> Vocabulary:
    """The vocabulary that an n-gram model was built for."""
    sha256 = model.tokenizer_sha256
    name = str(json.loads(model.metadata or b"{}").get("tokenizer", ""))
    return Vocabulary(model.vocab_size, b"" if sha256 == _UNKNOWN else sha256, name)


def check_vocabulary(model: _core.NgramModel, target: Vocabulary, source: str) -> None:
    """Raise ValueError, naming both sides, unless `model` may serve a target with this vocabulary.

    target.size: rows of the target's output head, which may exceed its tokenizer's.
    Where a hash is unknown on either side only token ids are compared, and a warning says so.
    """
    own = model_vocabulary(model)
    remedy = "build or convert an n-gram model for the target's tokenizer"
    if own.sha256 and target.sha256 and own.sha256 != target.sha256:
        raise ValueError(f"{source}: built for {own}, but the target uses {target}; {remedy}")
    if target.size and model.highest_token >= target.size:
        raise ValueError(
            f"{source}: built for {own} and holds token {model.highest_token}, but the target uses "
            f"{target}; {remedy}"
        )
    if not (own.sha256 and target.sha256):
        logger.warning(
            "%s: built for %s, the target uses %s: only token ids could be compared",
            source,
            own,
            target,
        )


def find_file(name: str) -> Path:
    """A local file, or `repo/id:file` from the hub; `repo/id` if that holds one model.

    Raises ValueError if it is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"n-gram model {name}: no such file, and not a hub name `repo/id:file`")
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(match["repo"], match["file"] or _only_model(match["repo"])))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, httpx.HTTPError) as error:
        raise ValueError(
            f"n-gram model {name}: not in the local cache and not downloaded ({error}); "
            f"check the name, or download the file and give its path"
        ) from error


def _only_model(repo: str) -> str:
    from huggingface_hub import HfApi

    files = [file for file in HfApi().list_repo_files(repo) if file.endswith(_SUFFIXES)]
    if len(files) != 1:
        names = ", ".join(f"{repo}:{file}" for file in sorted(files)) or "no .ngram or .trie file"
        raise ValueError(f"n-gram model {repo}: name one file; it holds {names}")
    return files[0]


def open_ngram(name: str, target: Vocabulary | None = None) -> _core.NgramModel:
    """Open the n-gram model `name`, a path or `repo/id:file`, for lookups.

    A compact file is mapped: all processes of a host share one copy. A .trie is first converted
    into CACHE, once. Raises ValueError, one line: not found, damaged, not of target's vocabulary.
    """
    path = find_file(name)
    compact = path if is_compact(path) else _converted(path)
    model = _core.NgramModel.open(str(compact))
    if target is not None:
        check_vocabulary(model, target, name)
    return model


def is_compact(path: Path) -> bool:
    """Whether the file begins like the compact format."""
    with path.open("rb") as file:
        return file.read(len(_core.NGRAM_MAGIC)) == _core.NGRAM_MAGIC


def _converted(trie: Path) -> Path:
    """The compact form of a .trie, from the cache or made now."""
    stat = trie.stat()
    key = f"{trie.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{_core.NGRAM_VERSION}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    target = CACHE / f"{trie.stem}-{digest}.ngram"
    CACHE.mkdir(parents=True, exist_ok=True)
    # Ranks start together: one converts, the others wait.
    with (CACHE / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            logger.info("%s: %.1f GB, converting it once to %s", trie, stat.st_size / 1e9, target)
            convert(trie, target)
    return target


def convert(
    trie: Path,
    target: Path,
    vocabulary: Vocabulary | None = None,
    repair_counts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Convert a .trie into the compact format; return the size in bytes.

    Raises ValueError if the file is damaged or the disk is too small.
    """
    vocabulary = vocabulary or Vocabulary()
    metadata = {"tokenizer": vocabulary.name, "source": "trie", "counts_repaired": repair_counts}
    room = shutil.disk_usage(target.parent).free
    # 5 bytes a node of 36 for scratch, twice the compact form of at most 12.
    need = trie.stat().st_size * 29 // 36
    if room < need:
        raise ValueError(
            f"{target.parent}: {room / 1e9:.1f} GB free, converting {trie} may take "
            f"{need / 1e9:.1f} GB; free some, or convert into another folder"
        )
    return _core.convert_trie(
        str(trie),
        str(target),
        vocab_size=vocabulary.size,
        sha256=vocabulary.sha256,
        repair_counts=repair_counts,
        folder=str(target.parent),
        metadata=json.dumps(metadata, sort_keys=True),
        progress=progress,
    )
