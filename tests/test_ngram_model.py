"""Lookups against the reference's numbers and a dictionary; files that are damaged or foreign."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest

from sglang_dart import _core, ngram_model
from sglang_dart.ngram_model import Vocabulary
from sglang_dart.score.continuity import CountedNgrams

GOLDEN = Path(__file__).parent / "golden" / "dart"
CORRUPT = json.loads((GOLDEN / "ngram_corrupt" / "expected.json").read_text())


def documents() -> list[list[int]]:
    return json.loads((GOLDEN / "ngram_corpus.json").read_text())["documents"]


def windows(corpus: list[list[int]], order: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct windows, ascending, -1 after a document's end; and how often each occurs."""
    counts: Counter[tuple[int, ...]] = Counter()
    for document in corpus:
        for i in range(len(document)):
            window = document[i : i + order]
            counts[(*window, *[-1] * (order - len(window)))] += 1
    keys = sorted(counts)
    return np.array(keys, np.int32).reshape(-1, order), np.array([counts[key] for key in keys])


def build(path: Path, corpus: list[list[int]], order: int, vocab_size: int = 257) -> Path:
    builder = _core.NgramBuilder(order, vocab_size)
    builder.append(*windows(corpus, order))
    builder.write(str(path))
    return path


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "golden.ngram", documents(), 3)


def test_golden_queries_are_bit_equal() -> None:
    models = {}
    for case in json.loads((GOLDEN / "ngram_queries.json").read_text()):
        name = case["trie"]
        if name not in models:
            models[name] = _core.NgramModel.open(str(GOLDEN / name))
        probability, length = models[name].query(case["context"], case["candidates"])
        expected = np.array(case["prob"], np.float32)
        assert probability.tobytes() == expected.tobytes(), case
        assert length.tolist() == case["matched_len"], case


def test_golden_counts() -> None:
    model = _core.NgramModel.open(str(GOLDEN / "ngram_order3.trie"))
    golden = np.load(GOLDEN / "ngram_order3_counts.npz")
    assert model.node_count == len(golden["freq"])
    for path, count in zip(golden["paths"].tolist(), golden["freq"].tolist(), strict=True):
        assert model.count([token for token in path if token >= 0]) == count


@pytest.mark.parametrize("case", CORRUPT, ids=lambda case: case["file"])
def test_a_damaged_trie_is_one_clear_error(case: dict) -> None:
    path = GOLDEN / "ngram_corrupt" / case["file"]
    if case["recommended_reader_action"] == "accept":
        _core.NgramModel.open(str(path))
        return
    with pytest.raises(ValueError, match=case["file"]) as error:
        _core.NgramModel.open(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too few"),
        (b"0123456789", "too few"),
        (b"This is a text file, given by mistake.\n" * 10, "not an n-gram file"),
        ((3).to_bytes(8, "big") + bytes(100), "big-endian"),
        *[(order.to_bytes(8, "little") + bytes(100), f"order {order}") for order in (0, 1, 9)],
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.trie"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.trie: .*{reason}"):
        _core.NgramModel.open(str(path))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        _core.NgramModel.open(str(tmp_path / "none.ngram"))
    with pytest.raises(ValueError, match="not a regular file"):
        _core.NgramModel.open(str(tmp_path))


@pytest.mark.parametrize("order", [2, 3, 4, 5, 6])
def test_lookups_equal_counting_in_a_dictionary(tmp_path: Path, order: int) -> None:
    random = np.random.default_rng(order)
    # Few tokens and many: lists of children within one cache line, and over several strides.
    for vocab_size, n in ((7, 400), (3000, 30_000)):
        zipf = np.minimum(random.zipf(1.3, n), vocab_size) - 1
        corpus = [zipf[i : i + 50].tolist() for i in range(0, n, 50)]
        model = _core.NgramModel.open(
            str(build(tmp_path / "model.ngram", corpus, order, vocab_size))
        )
        model.verify()
        oracle = CountedNgrams.of_documents(corpus, order)
        for length in (1, order - 1, order + 2):
            for _ in range(40):
                document = corpus[random.integers(len(corpus))]
                start = int(random.integers(len(document) - length))
                context = document[start : start + length]
                asked = [*random.integers(-2, vocab_size + 3, 90).tolist(), *range(10)]
                probability, matched = model.query(context, asked)
                expected = oracle.lookup(tuple(context), asked)
                assert list(zip(probability.tolist(), matched.tolist(), strict=True)) == expected


def test_large_counts_stand_beside_the_words(tmp_path: Path) -> None:
    # 2^20 tokens leave 11 bits for a count in a word of the deepest level.
    gram = np.array([[1, 1, 1], [1, 1, 2], [1, 2, -1], [(1 << 20) - 1] * 3], np.int32)
    count = np.array([2046, 2047, 3_000_000_000, 5])
    builder = _core.NgramBuilder(3, 1 << 20)
    builder.append(gram, count)
    builder.write(str(tmp_path / "model.ngram"))
    model = _core.NgramModel.open(str(tmp_path / "model.ngram"))
    model.verify()
    assert model.large_counts == 1
    assert [model.count(row[row >= 0].tolist()) for row in gram] == count.tolist()
    assert model.count([1]) == count[:3].sum()
    assert model.count([]) == model.total == count.sum()
    with pytest.raises(ValueError, match="exceeds 2147483647"):
        _core.write_trie(model, str(tmp_path / "model.trie"))


def test_continuations(compact: Path) -> None:
    model = _core.NgramModel.open(str(compact))
    gram, count = windows(documents(), 3)
    start = gram[gram[:, 1] >= 0][0]
    follows = (gram[:, :2] == start[:2]).all(1) & (gram[:, 2] >= 0)
    token, found, length = model.continuations(start[:2].tolist())
    assert token.tolist() == gram[follows, 2].tolist()
    assert found.tolist() == count[follows].tolist()
    assert length == 2
    token, found, length = model.continuations([-1])
    assert (len(token), len(found), length) == (0, 0, 0)


def test_query_batch_equals_query(compact: Path) -> None:
    model = _core.NgramModel.open(str(compact))
    random = np.random.default_rng(0)
    contexts = random.integers(-1, 60, (50, 2), dtype=np.int32)
    candidates = random.integers(-1, 257, (50, 70), dtype=np.int32)
    probability, length = model.query_batch(contexts, candidates)
    for row in range(50):
        one = model.query(contexts[row].tolist(), candidates[row].tolist())
        assert probability[row].tobytes() == one[0].tobytes()
        assert length[row].tolist() == one[1].tolist()
    with pytest.raises(ValueError, match="50 rows, candidates 49"):
        model.query_batch(contexts, candidates[:49].copy())


@pytest.mark.parametrize("order", [2, 3, 4])
def test_trie_and_back_is_the_same_file(tmp_path: Path, order: int) -> None:
    compact = build(tmp_path / "a.ngram", documents(), order)
    _core.write_trie(_core.NgramModel.open(str(compact)), str(tmp_path / "a.trie"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for folder in ("", str(scratch)):
        _core.convert_trie(str(tmp_path / "a.trie"), str(tmp_path / "b.ngram"), 257, folder=folder)
        assert (tmp_path / "b.ngram").read_bytes() == compact.read_bytes()
    assert list(scratch.iterdir()) == []


def test_the_reference_writers_file_converts_to_what_we_build(
    tmp_path: Path, compact: Path
) -> None:
    target = tmp_path / "b.ngram"
    _core.convert_trie(str(GOLDEN / "ngram_order3.trie"), str(target), 257)
    assert target.read_bytes() == compact.read_bytes()


def write_shuffled(model: Path, target: Path, seed: int) -> None:
    """The same trie with its nodes, all but the root, in any order: children before parents too."""
    data = model.read_bytes()
    nodes, offset = int.from_bytes(data[8:16], "little"), 16
    records = []
    for _ in range(nodes):
        head = np.frombuffer(data, "<i4,<u8,<i4,<u8", 1, offset)[0]
        children = np.frombuffer(data, "<i4,<u8", int(head[3]), offset + 24)
        records.append((head.copy(), children.copy()))
        offset += 24 + 12 * len(children)
    place = np.append(0, np.random.default_rng(seed).permutation(nodes - 1) + 1).astype("<u8")
    written = [b""] * nodes
    for i, (head, children) in enumerate(records):
        head["f1"] = place[head["f1"]]
        children["f1"] = place[children["f1"]]
        written[place[i]] = head.tobytes() + children.tobytes()
    target.write_bytes(data[:16] + b"".join(written))


def test_nodes_may_stand_in_any_order(tmp_path: Path, compact: Path) -> None:
    write_shuffled(GOLDEN / "ngram_order3.trie", tmp_path / "shuffled.trie", seed=1)
    _core.convert_trie(str(tmp_path / "shuffled.trie"), str(tmp_path / "b.ngram"), 257)
    assert (tmp_path / "b.ngram").read_bytes() == compact.read_bytes()


def test_counts_are_repaired_on_demand(tmp_path: Path) -> None:
    for name in ("zero_freq_with_children", "negative_freq"):
        source = str(GOLDEN / "ngram_corrupt" / f"{name}.trie")
        with pytest.raises(ValueError, match="--repair-counts"):
            _core.NgramModel.open(source)
        _core.convert_trie(source, str(tmp_path / "b.ngram"), repair_counts=True)
        model = _core.NgramModel.open(str(tmp_path / "b.ngram"))
        model.verify()
        # Node 1 is the token 5: its children count 2 and 1.
        assert model.count([5]) == 3


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the vocabulary has 8 tokens"):
        _core.convert_trie(
            str(GOLDEN / "ngram_corrupt" / "good.trie"), str(tmp_path / "b.ngram"), vocab_size=8
        )
    with pytest.raises(ValueError, match="token 9 is outside the vocabulary of 9"):
        _core.NgramBuilder(3, 9).append(np.array([[9, -1, -1]], np.int32), np.array([1]))


@pytest.mark.parametrize(
    "rows", [[[2, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, -1]], [[-1, 1, 1]]]
)
def test_rows_must_ascend(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        _core.NgramBuilder(3, 9).append(np.array(rows, np.int32), np.ones(len(rows), np.int64))


def test_limits_of_a_pruned_model(tmp_path: Path, compact: Path) -> None:
    model = _core.NgramModel.open(str(compact))
    gram, _ = windows(documents(), 3)
    for limits in ({"min_count": 3}, {"max_nodes": 900}, {"max_bytes": 9000}):
        target = tmp_path / "pruned.ngram"
        _core.prune_ngram(model, str(target), **limits)
        pruned = _core.NgramModel.open(str(target))
        pruned.verify()
        assert 0 < pruned.node_count < model.node_count
        assert pruned.node_count <= limits.get("max_nodes", pruned.node_count)
        assert target.stat().st_size == pruned.file_bytes
        assert pruned.file_bytes <= limits.get("max_bytes", pruned.file_bytes)
        for row in gram[::7]:
            path = row[row >= 0].tolist()
            kept = pruned.count(path)
            assert kept in (0, model.count(path))
            assert kept == 0 or kept >= limits.get("min_count", 1)
            # No context loses the node above it.
            assert kept == 0 or all(pruned.count(path[:i]) >= kept for i in range(1, len(path)))
            token, count, length = pruned.continuations(path)
            if len(token):
                probability, _ = pruned.query(path, token)
                assert 0 < probability.sum() <= 1 + 1e-6
                assert np.isfinite(probability).all()
                assert count.sum() <= pruned.count(path[len(path) - length :])
    with pytest.raises(ValueError, match="no model fits"):
        _core.prune_ngram(model, str(tmp_path / "none.ngram"), max_bytes=100)
    assert not (tmp_path / "none.ngram").exists()


def test_pruning_drops_what_the_back_off_knows(tmp_path: Path) -> None:
    # After (1, 2) as after 2 alone, 3 and 4 are equally likely; after (5, 2) comes only 3.
    corpus = [[1, 2, 3], [1, 2, 4]] * 10 + [[5, 2, 3], [6, 2, 4]] * 10
    model = _core.NgramModel.open(str(build(tmp_path / "a.ngram", corpus, 3)))
    _core.prune_ngram(model, str(tmp_path / "b.ngram"), max_nodes=model.node_count - 2)
    pruned = _core.NgramModel.open(str(tmp_path / "b.ngram"))
    assert pruned.count([1, 2, 3]) == pruned.count([1, 2, 4]) == 0
    assert pruned.count([5, 2, 3]) == pruned.count([6, 2, 4]) == 10


def damaged_copies(path: Path, seed: int) -> list[bytes]:
    good = path.read_bytes()
    random = np.random.default_rng(seed)
    copies = [good[:size] for size in random.integers(0, len(good), 20)]
    for _ in range(300):
        copy = bytearray(good)
        # Behind the header, whose checksum would catch it.
        copy[random.integers(256, len(good))] ^= 1 << random.integers(8)
        copies.append(bytes(copy))
    header = bytearray(good)
    header[24] ^= 1
    return [*copies, bytes(header), good + b"\0"]


def use_and_verify(path: Path) -> None:
    model = _core.NgramModel.open(str(path))
    contexts = np.array([document[:2] for document in documents() if len(document) > 2], np.int32)
    candidates = np.tile(np.arange(257, dtype=np.int32), (len(contexts), 1))
    with contextlib.suppress(RuntimeError):
        model.query_batch(contexts, candidates)
    model.verify()


def test_a_damaged_compact_file_never_crashes(tmp_path: Path, compact: Path) -> None:
    path = tmp_path / "damaged.ngram"
    for copy in damaged_copies(compact, seed=3):
        path.write_bytes(copy)
        with pytest.raises((ValueError, RuntimeError), match=r"damaged\.ngram") as error:
            use_and_verify(path)
        assert "\n" not in str(error.value)


def test_nothing_is_made_from_a_damaged_model(tmp_path: Path, compact: Path) -> None:
    """Ranges of children that do not join up would be followed out of the output's bounds."""
    data = bytearray(compact.read_bytes())
    words, nodes = 256 + 64, int.from_bytes(data[40:44], "little")
    assert words > 256 + int.from_bytes(data[100:104], "little")
    # The first word of the level is its lowest token; its range stands behind the padded words.
    info = (words + 4 * nodes + 63) // 64 * 64 + 64
    data[info + 4 + 8 * 5 : info + 8 + 8 * 5] = (2000).to_bytes(4, "little")
    path, target = tmp_path / "damaged.ngram", tmp_path / "out"
    path.write_bytes(data)
    model = _core.NgramModel.open(str(path))
    for make in (_core.write_trie, _core.prune_ngram):
        with pytest.raises(RuntimeError, match=r"damaged\.ngram: the checksum of level 1"):
            make(model, str(target))
    assert [file.name for file in tmp_path.iterdir()] == ["damaged.ngram"]


def test_levels_beyond_the_order_are_refused(tmp_path: Path, compact: Path) -> None:
    data = bytearray(compact.read_bytes())
    data[52:56] = (7).to_bytes(4, "little")
    data[252:256] = zlib.crc32(data[:252]).to_bytes(4, "little")
    (tmp_path / "bad.ngram").write_bytes(data)
    with pytest.raises(ValueError, match=r"bad\.ngram: 7 n-grams are longer than the order 3"):
        _core.NgramModel.open(str(tmp_path / "bad.ngram"))


def test_checksums_are_those_of_zlib(compact: Path) -> None:
    data = compact.read_bytes()
    assert zlib.crc32(data[:252]) == int.from_bytes(data[252:256], "little")


def test_an_unknown_version_is_refused(tmp_path: Path, compact: Path) -> None:
    data = bytearray(compact.read_bytes())
    data[8] = 2
    (tmp_path / "new.ngram").write_bytes(data)
    with pytest.raises(ValueError, match="format version 2, this reader knows version 1"):
        _core.NgramModel.open(str(tmp_path / "new.ngram"))


class Tokenizer:
    """The part of a Hugging Face tokenizer that makes a fingerprint."""

    name_or_path = "folder/of/a-tokenizer"

    def __init__(self, words: list[str], added: list[str]) -> None:
        self._vocab = {word: i for i, word in enumerate(words + added)}
        self._added = {word: self._vocab[word] for word in added}

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def get_added_vocab(self) -> dict[str, int]:
        return self._added


def test_the_fingerprint_leaves_added_tokens_out() -> None:
    base = ngram_model.vocabulary_of(Tokenizer(["a", "b"], []))
    chat = ngram_model.vocabulary_of(Tokenizer(["a", "b"], ["<end>"]), "chat")
    other = ngram_model.vocabulary_of(Tokenizer(["b", "a"], []))
    assert base.sha256 == chat.sha256 != other.sha256
    assert (base.size, chat.size) == (2, 3)
    assert (base.name, chat.name) == ("folder/of/a-tokenizer", "chat")


def stamped(path: Path, vocabulary: Vocabulary) -> str:
    builder = _core.NgramBuilder(2, vocabulary.size, vocabulary.sha256)
    builder.append(np.array([[1, 8]], np.int32), np.array([1]))
    builder.write(str(path), json.dumps({"tokenizer": vocabulary.name}))
    return str(path)


def test_a_mismatch_names_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Vocabulary(9, b"x" * 32, "qwen")
    name = stamped(tmp_path / "model.ngram", own)
    with pytest.raises(ValueError, match=r"model\.ngram: built for qwen .* the target uses llama"):
        ngram_model.open_ngram(name, Vocabulary(9, b"y" * 32, "llama"))
    with pytest.raises(ValueError, match="holds token 1, but the target uses tiny"):
        ngram_model.open_ngram(name, Vocabulary(1, b"", "tiny"))
    with caplog.at_level(logging.WARNING):
        ngram_model.open_ngram(name, own)
        assert caplog.text == ""
        ngram_model.open_ngram(name, Vocabulary(9))
    assert "only token ids could be compared" in caplog.text


def test_a_trie_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_model, "CACHE", tmp_path / "cache")
    trie = tmp_path / "small.trie"
    shutil.copy(GOLDEN / "ngram_order3.trie", trie)
    model = ngram_model.open_ngram(str(trie))
    (cached,) = (tmp_path / "cache").glob("*.ngram")
    inode = cached.stat().st_ino
    assert ngram_model.open_ngram(str(trie)).node_count == model.node_count
    assert cached.stat().st_ino == inode


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repo: str, file: str) -> str:
        assert (repo, file) == ("fvliang/dart-qwen3-ngram", "small.trie")
        return str(GOLDEN / "ngram_order3.trie")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = ngram_model.find_file("fvliang/dart-qwen3-ngram:small.trie")
    assert found == GOLDEN / "ngram_order3.trie"
    with pytest.raises(ValueError, match="no such file, and not a hub name"):
        ngram_model.find_file("missing.ngram")
    files = ["README.md", "small.trie"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: files)
    assert ngram_model.find_file("fvliang/dart-qwen3-ngram") == found
    files.append("full.trie")
    with pytest.raises(ValueError, match=r"it holds fvliang/dart-qwen3-ngram:full\.trie, fvl"):
        ngram_model.find_file("fvliang/dart-qwen3-ngram")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repo: str, file: str) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ValueError, match=r"not downloaded \(offline\)"):
        ngram_model.find_file("a/b:c.trie")

    def list_files(self: huggingface_hub.HfApi, repo: str) -> list[str]:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_files)
    with pytest.raises(ValueError, match=r"not downloaded \(no route\)"):
        ngram_model.find_file("a/b")


def test_ctrl_c_stops_a_conversion(tmp_path: Path) -> None:
    """Progress calls let signals through, and nothing half-written stays."""
    script = (
        "import os, signal, sys; from sglang_dart import _core\n"
        # A shell's background job, and what it starts, ignores Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "model = _core.NgramModel.open(sys.argv[1])\n"
        "def interrupt(done, whole): os.kill(os.getpid(), signal.SIGINT)\n"
        "try: _core.prune_ngram(model, sys.argv[2], min_count=2, progress=interrupt)\n"
        "except KeyboardInterrupt: print('stopped')\n"
    )
    source = build(tmp_path / "a.ngram", documents(), 3)
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "b.ngram")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "stopped\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.ngram"]
