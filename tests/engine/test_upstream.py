"""The contract with SGLang, symbol by symbol."""

import ast
from pathlib import Path

import pytest

import sglang_dart
from sglang_dart.engine import patches, upstream


@pytest.mark.parametrize("symbol", upstream.SYMBOLS, ids=lambda symbol: symbol.path)
def test_symbol_is_where_we_use_it(symbol):
    found = upstream.resolve(symbol.path)
    assert [name for name in symbol.needs if not upstream.has(found, name)] == []


def test_a_moved_symbol_is_named(monkeypatch):
    gone = upstream.Symbol("sglang.srt.speculative.spec_info.Moved")
    changed = upstream.Symbol("sglang.srt.managers.overlap_utils.FutureMap", ("no_such_thing",))
    monkeypatch.setattr(upstream, "SYMBOLS", (gone, changed))
    first, second = upstream.check()
    assert "spec_info.Moved is gone" in first
    assert "FutureMap lacks no_such_thing" in second


def test_sglang_asks_nothing_that_the_algorithm_lacks():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dart.engine.algorithm import TreeAlgorithm

    asked = {name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_"))}
    assert asked <= set(dir(TreeAlgorithm))


def imported() -> set[str]:
    """Dotted paths of everything of sglang.srt that the package imports or hooks."""
    paths = set()
    for file in Path(sglang_dart.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt"):
                paths |= {f"{node.module}.{name.name}" for name in node.names}
    return paths | {target for target, _, _ in patches.HOOKS + patches.CPU_HOOKS}


def test_every_symbol_that_is_imported_or_hooked_is_checked():
    checked = {symbol.path for symbol in upstream.SYMBOLS}
    needed = {f"{symbol.path}.{name}" for symbol in upstream.SYMBOLS for name in symbol.needs}
    # A module is covered by any symbol inside it.
    modules = {path.rpartition(".")[0] for path in checked}
    assert imported() - checked - needed - modules == set()
