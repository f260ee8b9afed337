"""The contract with SGLang, symbol by symbol."""

import pytest

from sglang_dart.engine import upstream


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
