"""Drafter checkpoints: config.json and safetensors, strict on names, shapes and dtypes.

A source is a local folder or a hub id; the hub is asked only for the files that are needed, and
the local hub cache serves when there is no network. Reading a config never touches the weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Published files differ in whether the names carry it.
PREFIX = "model."

NO_ALIASES: Mapping[str, str] = {}

Size = Annotated[int, Field(ge=1)]
Shapes = Mapping[str, tuple[int, ...]]


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore", strict=True))
class DartConfig:
    """Sizes of a DART head, from the published config.json."""

    vocab_size: Size
    draft_vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    target_hidden_size: Size
    draft_length: Size
    """Mask rows M; the head drafts M + 1 levels."""
    rms_norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    hidden_act: Literal["silu"] = "silu"
    rope_scaling: Literal[None] = None

    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The whole config.json, for settings that are not sizes (`dart_config`)."""


def read_config(source: str, revision: str | None = None) -> DartConfig:
    """Read a DART head's config.json from a folder or hub id.

    Raises ValueError, one line that names the file and the field.
    """
    raw = read_json(source, CONFIG, revision)
    where = f"{source}/{CONFIG}"
    given = layer_fields(raw)
    given.setdefault("target_hidden_size", given.get("hidden_size"))
    if given.get("tie_word_embeddings"):
        logger.info("%s: tie_word_embeddings is ignored; a DART head has its own lm_head", where)
    config = validate(DartConfig, given | {"raw": raw}, where)
    check_heads(where, config.num_attention_heads, config.num_key_value_heads)
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(
            f"{where}: draft_vocab_size {config.draft_vocab_size} exceeds "
            f"vocab_size {config.vocab_size}"
        )
    return config


def layer_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, its rope settings and head size where the config classes expect them."""
    given = dict(raw)
    # transformers 5 moved rope_theta and rope_scaling into one object.
    rope = given.pop("rope_parameters", None)
    if isinstance(rope, Mapping):
        if "rope_theta" in rope:
            given.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            given.setdefault("rope_scaling", rope)
    if given.get("head_dim") is None:
        heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            given["head_dim"] = hidden // heads
    return given


def check_heads(where: str, heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the query heads share the KV heads evenly."""
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )


def validate(kind: type, given: Mapping[str, Any], where: str) -> Any:
    """Build the checked dataclass `kind`. Raises ValueError naming `where` and the first field."""
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ValueError(f"{where}: {name} is missing; is this the right drafter?") from error
        raise ValueError(f"{where}: {name}: {first['msg']}, got {first['input']!r}") from error


def read_json(source: str, name: str, revision: str | None = None) -> dict[str, Any]:
    """Read one JSON object of a checkpoint. Raises ValueError when absent or malformed."""
    path = fetch(source, name, revision)
    if path is None:
        raise ValueError(f"{source}: no {name} here; expected a drafter's checkpoint")
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}/{name}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}/{name}: expected a JSON object, got {type(value).__name__}")
    return value


def fetch(source: str, name: str, revision: str | None = None) -> Path | None:
    """Give the local path of one file of a checkpoint, or None if the checkpoint lacks it.

    Without network the hub cache is all there is: a file that it lacks is None, too.
    Raises ValueError if the folder, the hub repository or the revision does not exist, and
    RuntimeError if the hub cannot be asked and its cache has no config.json either.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    if folder.exists():
        raise ValueError(f"{source}: expected a checkpoint folder, got a file")
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except HFValidationError as error:
        raise ValueError(f"{source}: no such folder, and not a hub id (owner/name)") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{source}: no revision {revision} on the hub") from error
    except GatedRepoError as error:
        raise ValueError(f"{source}: gated on the hub; accept its terms and log in") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{source}: no such folder, and no such repository on the hub") from error
    except LocalEntryNotFoundError as error:
        if name != CONFIG:
            return None
        raise RuntimeError(
            f"{source}: no such folder, the hub cannot be reached, and its local cache has no "
            f"{name} of revision {revision or 'main'}"
        ) from error
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        raise RuntimeError(f"{source}: the hub did not give {name} ({error})") from error


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: its file, and its name there (with or without the prefix)."""

    path: Path
    stored: str


def load_tensors(
    source: str,
    shapes: Shapes,
    *,
    revision: str | None = None,
    optional: Collection[str] = (),
    ignored: Collection[str] = (),
    aliases: Mapping[str, str] = NO_ALIASES,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Load exactly the tensors `shapes` names, floating ones cast to `dtype`.

    A prefix `model.` is dropped, then one that `aliases` knows is replaced. `optional` names may be
    absent, `ignored` ones are never read. Raises ValueError listing every missing, unexpected or
    misshapen tensor, before any is loaded.
    """
    places = _locate(source, revision, aliases)
    expected = {name: shape for name, shape in shapes.items() if name not in ignored}
    problems = [
        f"missing {name} {list(expected[name])}"
        for name in sorted(expected.keys() - places.keys() - set(optional))
    ]
    problems += [
        f"unexpected {name}" for name in sorted(places.keys() - expected.keys() - set(ignored))
    ]
    wanted = {name: place for name, place in places.items() if name in expected}
    by_file: dict[Path, list[str]] = {}
    for name, place in wanted.items():
        by_file.setdefault(place.path, []).append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                found = tuple(file.get_slice(wanted[name].stored).get_shape())
                if found != expected[name]:
                    problems.append(f"{name} is {list(found)}, not {list(expected[name])}")
    if problems:
        raise ValueError(f"{source}: tensors do not match {CONFIG}: {'; '.join(problems)}")
    tensors: dict[str, torch.Tensor] = {}
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                tensors[name] = _cast(file.get_tensor(wanted[name].stored), name, dtype).to(device)
    return tensors


def _cast(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    # An 8-bit float is a quantised weight whose scales we would lose.
    if tensor.element_size() < 2:
        raise ValueError(f"{name} is stored as {tensor.dtype}: quantised drafters are unsupported")
    # A copy, since the file is only mapped and may be replaced while we run.
    return tensor.to(dtype, copy=True)


def _locate(source: str, revision: str | None, aliases: Mapping[str, str]) -> dict[str, _Place]:
    """Map each tensor's name, prefix dropped and aliases replaced, to its place."""
    single = fetch(source, SINGLE, revision)
    files = [single] if single else _shards(source, revision)
    places: dict[str, _Place] = {}
    for path in files:
        with _open(path) as file:
            for stored in file.keys():  # noqa: SIM118 (a safetensors handle, not a mapping)
                name = _usual_name(stored, aliases)
                if name in places:
                    raise ValueError(f"{source}: two tensors are named {name}")
                places[name] = _Place(path, stored)
    return places


def _usual_name(stored: str, aliases: Mapping[str, str]) -> str:
    name = stored.removeprefix(PREFIX)
    for alias, usual in aliases.items():
        if name.startswith(alias):
            return usual + name.removeprefix(alias)
    return name


def _shards(source: str, revision: str | None) -> list[Path]:
    if fetch(source, INDEX, revision) is None:
        raise ValueError(
            f"{source}: found neither {SINGLE} nor {INDEX} (for a hub id: there, or in the cache)"
        )
    weight_map = read_json(source, INDEX, revision).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{source}/{INDEX}: weight_map is missing or empty")
    paths = []
    for name in sorted({str(shard) for shard in weight_map.values()}):
        # A shard lies beside its index; anything else is not ours to open.
        path = fetch(source, name, revision) if name == Path(name).name else None
        if path is None:
            raise ValueError(f"{source}: shard {name}, named in {INDEX}, is missing")
        paths.append(path)
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
