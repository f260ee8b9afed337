"""Every knob once: name, source, bounds. Nothing else reads the environment (cpu_host.py sets it).

SGLang has no flags for a plug-in's own settings, so they come from, strongest first:
the variable SGLANG_DART_CONFIG (inline JSON or the path of a JSON file), then the object
`dart_config` or `dartree_config`, by the algorithm's name, in the drafter's config.json, then the
defaults below. Unknown keys are errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

ENVIRONMENT = "SGLANG_DART_CONFIG"


_CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_CONFIG)
class TreeOptions:
    """What both algorithms have."""

    budget: Annotated[int, Field(ge=1, le=1023)] | None = None
    """Nodes kept beside the root, 60 for DART and 64 for DARTREE by default; a verify step has
    budget + 1 rows."""
    ngram: str | None = None
    """N-gram model: a local file, or `repo/id:file` on the hub; None drafts without one."""
    ngram_weight: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Weight of the log of the n-gram probability, from the second level on."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of the tree search; 0 takes the cores that this process may use."""
    adaptive: bool = True
    """Whether each round takes the width that promises the most tokens a second, plain decoding
    included, up to budget + 1; false: every tree is as wide as it may be."""
    cpu_rows: Annotated[int, Field(ge=0, le=4096)] = 0
    """Without a GPU: rows of one verify step, all requests together, which also fixes the width of
    each round; 0 leaves it to `adaptive`."""


@dataclass(frozen=True, config=_CONFIG)
class DartOptions(TreeOptions):
    """Settings of the DART algorithm. Defaults: arXiv 2601.19278 and its released code."""

    candidates: Annotated[int, Field(ge=1, le=1024)] = 25
    """Tokens considered at each level."""
    beam: Annotated[int, Field(ge=1, le=1024)] = 20
    """Paths that are extended at each level."""
    logit_decay: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Level l's log-probability counts logit_decay ** l."""
    level_exponent: Annotated[float, Field(ge=0, le=4)] = 0.7
    """Level l's step score counts (l + 1) ** -level_exponent."""
    final_norm_passes: Literal[1, 2] = 2
    """How often the head's final norm is applied; the release applies it twice."""


Options = TypeVar("Options", bound=TreeOptions)
Variant = Literal["pruned", "fixed", "chain", "marginal"]


@dataclass(frozen=True, config=_CONFIG)
class DartreeOptions(TreeOptions):
    """Settings of the DARTREE algorithm. Defaults: arXiv 2608.13524 and its released code."""

    variant: Variant | None = None
    """pruned: the best of `width` nodes a level; fixed: equally many nodes a level; chain: the best
    token after the best; marginal: best first on uncorrected logits. None: pruned, or marginal for
    a drafter without a causal head."""
    candidates: Annotated[int, Field(ge=1, le=4096)] = 64
    """Tokens considered at each level, by base logit; the causal head corrects these alone."""
    width: Annotated[int, Field(ge=1, le=1024)] = 12
    """Of variant pruned: nodes a level before the best are kept."""
    depth_bonus: Annotated[float, Field(ge=-100, le=0)] = -0.2
    """Of variant pruned: added to a node's score for each level when nodes are kept."""


def load_dart_options(drafter_config: Mapping[str, Any], folder: str = "") -> DartOptions:
    """Merge the sources above. Raises ValueError, one line, naming the source and the key.

    folder: the drafter's, where a relative path of an n-gram model in its config.json begins.
    """
    return _load(DartOptions, "dart_config", drafter_config, folder)


def load_dartree_options(drafter_config: Mapping[str, Any], folder: str = "") -> DartreeOptions:
    """Merge the sources above. Raises ValueError, one line, naming the source and the key.

    folder: the drafter's, where a relative path of an n-gram model in its config.json begins.
    """
    return _load(DartreeOptions, "dartree_config", drafter_config, folder)


def _load(kind: type[Options], key: str, drafter_config: Mapping[str, Any], folder: str) -> Options:
    settings: dict[str, Any] = {}
    for source, given in (
        (f"{key} in the drafter's config.json", _located(drafter_config.get(key, {}), folder)),
        (ENVIRONMENT, _from_environment()),
    ):
        if not isinstance(given, Mapping):
            raise ValueError(f"{source}: expected a JSON object, got {type(given).__name__}")
        settings |= given
        # Validated source by source, so that an error names the one that holds it.
        options = _validate(kind, source, settings)
    return options


def _located(given: Any, folder: str) -> Any:
    """The drafter's own settings, with the n-gram model that lies beside the drafter found."""
    if not isinstance(given, Mapping) or not isinstance(given.get("ngram"), str):
        return given
    beside = Path(folder, given["ngram"])
    return {**given, "ngram": str(beside)} if beside.is_file() else given


def _from_environment() -> Any:
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text:
        return {}
    if not text.startswith("{"):
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise ValueError(
                f"{ENVIRONMENT}={text}: no JSON object and no readable file ({error.strerror})"
            ) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{ENVIRONMENT}: not valid JSON ({error})") from error


def _validate(kind: type[Options], source: str, settings: Mapping[str, Any]) -> Options:
    try:
        return kind(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(sorted(kind.__dataclass_fields__))
        hint = f"; known keys: {known}" if first["type"] == "unexpected_keyword_argument" else ""
        raise ValueError(
            f"{source}: {key}: {first['msg']}, got {first['input']!r}{hint}"
        ) from error
