"""Documents of every kind and quality become the counts of a dictionary, whoever counts them."""

from __future__ import annotations

import fcntl
import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from sglang_dart import _core
from sglang_dart.ngram_build import documents as corpus
from sglang_dart.ngram_build import encode
from sglang_dart.ngram_build.build import OVERLAP, SMALLEST_MEMORY, Plan, build
from sglang_dart.ngram_build.count import PartWriter, WindowKey, merge_parts
from sglang_dart.ngram_build.documents import TEXT_FORMATS, TOKEN_FORMATS, find_units, read_texts
from sglang_dart.ngram_build.encode import Encoder, TokenizerSource
from sglang_dart.ngram_model import Vocabulary, vocabulary_of
from sglang_dart.score.continuity import CountedNgrams
from tests.tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    return Encoder(TokenizerSource.of(tokenizer, tokenizer.name_or_path, None), Counter())


def write_lines(path: Path, *lines: Any) -> Path:
    rows = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    data = b"".join(row + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts(path: Path, formats: frozenset[str] = TEXT_FORMATS) -> tuple[list[Any], dict[str, int]]:
    bad: Counter[str] = Counter()
    found = [text for unit in find_units([path], formats) for text in read_texts(unit, bad)]
    return found, dict(bad)


def token_plan(path: Path, order: int, vocab_size: int = 300, eos: int = 256) -> Plan:
    units = tuple(find_units([path], TOKEN_FORMATS))
    return Plan(units, order, Vocabulary(vocab_size), eos, None)


def run(plan: Plan, folder: Path, workers: int = 1, name: str = "model") -> _core.NgramModel:
    output = folder / f"{name}.ngram"
    build(plan, output, folder / f"{name}.work", workers, SMALLEST_MEMORY, lambda *_: None)
    assert not (folder / f"{name}.work").exists()
    model = _core.NgramModel.open(str(output))
    model.verify()
    return model


def assert_counts(model: _core.NgramModel, documents: list[list[int]]) -> None:
    counts = CountedNgrams.of_documents(documents, model.order).counts
    assert model.node_count == len(counts)
    for path, count in counts.items():
        assert model.count(path) == count, path


def random_documents(seed: int, number: int = 300) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [(random.zipf(1.4, random.integers(1, 40)) % 250).tolist() for _ in range(number)]


@pytest.mark.parametrize("order", [2, 3, 4, 6])
def test_token_lists_in_parquet(tmp_path: Path, order: int) -> None:
    rows = [*random_documents(order), [], None, [7, 256]]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "ids.parquet", row_group_size=50)
    model = run(token_plan(tmp_path, order), tmp_path)
    ended = [row if row[-1] == 256 else [*row, 256] for row in rows if row]
    assert_counts(model, ended)
    assert json.loads(model.metadata)["documents"] == len(ended)


def test_a_wide_vocabulary_takes_two_key_columns(tmp_path: Path) -> None:
    documents = [[1_999_999, 0, 5, 1_999_999, 0], [3], [0, 5, 1_999_999, 0, 5, 6]]
    pq.write_table(pa.table({"input_ids": documents}), tmp_path / "ids.parquet")
    model = run(token_plan(tmp_path, 6, 2_000_000, eos=9), tmp_path)
    assert_counts(model, [[*row, 9] for row in documents])
    with pytest.raises(ValueError, match="the limit is 2097151"):
        WindowKey(3, 1 << 21)


@pytest.mark.parametrize("unit_tokens", [1000, 64, 41])
def test_documents_of_a_stream_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_tokens: int
) -> None:
    documents = [[*row, 256] for row in random_documents(9, 20)]
    # The last document has no end.
    stream = np.concatenate([*documents, [1, 2, 3]]).astype(np.uint16)
    np.save(tmp_path / "stream.npy", stream)
    monkeypatch.setattr(corpus, "_UNIT_TOKENS", unit_tokens)
    assert_counts(run(token_plan(tmp_path, 3), tmp_path), [*documents, [1, 2, 3]])


def test_a_stream_without_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "stream.npy", np.zeros(100, np.int32))
    monkeypatch.setattr(corpus, "_UNIT_TOKENS", 10)
    with pytest.raises(ValueError, match=r"stream\.npy: no end-of-sequence token 256 in 10 tokens"):
        run(token_plan(tmp_path, 3), tmp_path)


def test_a_token_out_of_range_names_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "stream.npy", np.array([1, 300, 256]))
    with pytest.raises(
        ValueError, match=r"stream\.npy: token 300 is outside the vocabulary of 300"
    ):
        run(token_plan(tmp_path, 3), tmp_path)


def test_workers_and_buffers_do_not_change_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = random_documents(4)
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.table({"input_ids": documents}), source / "ids.parquet", row_group_size=30)
    plan = token_plan(source, 3)
    run(plan, tmp_path, workers=2, name="two")
    monkeypatch.setattr("sglang_dart.ngram_build.count._LARGEST_BUFFER", 100)
    run(plan, tmp_path, workers=1, name="one")
    one, two = (tmp_path / f"{name}.ngram" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_an_interrupted_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = random_documents(5)
    source, work = tmp_path / "source", tmp_path / "model.work"
    source.mkdir()
    pq.write_table(pa.table({"input_ids": documents}), source / "ids.parquet", row_group_size=100)
    plan = token_plan(source, 3)
    assert len(plan.units) == 3

    class Interrupted(Exception):
        pass

    def stop_at_two(stage: str, done: int, whole: int) -> None:
        if 0 < done < whole and done > plan.units[0].weight:
            raise Interrupted

    output = tmp_path / "model.ngram"
    with pytest.raises(Interrupted):
        build(plan, output, work, 1, SMALLEST_MEMORY, stop_at_two)
    assert len(list((work / "done").iterdir())) == 2
    # What a kill in the third unit leaves.
    (work / "parts" / "000002-00000.parquet").write_bytes(b"half")
    with pytest.raises(ValueError, match="unfinished build of other inputs or settings"):
        build(token_plan(source, 4), output, work, 1, SMALLEST_MEMORY, lambda *_: None)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="a build is running here"):
            build(plan, output, work, 1, SMALLEST_MEMORY, lambda *_: None)
    started = []
    build(plan, output, work, 1, SMALLEST_MEMORY, lambda *call: started.append(call))
    assert started[0][:2] == ("count", plan.units[0].weight + plan.units[1].weight)
    assert_counts(_core.NgramModel.open(str(output)), [[*row, 256] for row in documents])


def test_adding_up_spills_to_disk(tmp_path: Path) -> None:
    key = WindowKey(3, 150_000)
    parts, spill = tmp_path / "parts", tmp_path / "spill"
    parts.mkdir()
    writer = PartWriter(key, parts / "0", memory=1 << 40)
    random = np.random.default_rng(0)
    writer.add(random.integers(0, 150_000, 1_500_000), np.full(1500, 1000))
    writer.flush()
    rows, total, last = 0, 0, (-1,) * 3
    spilled = False
    for gram, count in merge_parts(key, parts, 30 << 20, 1, spill):
        spilled = spilled or (spill.is_dir() and any(spill.iterdir()))
        assert tuple(gram[0]) > last
        last = tuple(gram[-1])
        rows += len(gram)
        total += int(count.sum())
    assert total == 1_500_000
    assert rows > 1_490_000
    assert spilled


def test_memory_has_a_floor(tmp_path: Path) -> None:
    np.save(tmp_path / "stream.npy", np.array([1, 256]))
    plan = token_plan(tmp_path, 3)
    with pytest.raises(ValueError, match="at least 1 GiB"):
        build(plan, tmp_path / "m.ngram", tmp_path / "w", 1, SMALLEST_MEMORY - 1, lambda *_: None)


def test_bad_lines_are_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_LONGEST_LINE", 200)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    path = write_lines(
        tmp_path / "mixed.jsonl",
        b"\xef\xbb\xbf" + json.dumps({"text": "after a mark"}).encode(),
        {"text": "with \U0001f600 and \u00fc"},
        b'{"text": "windows line"}\r',
        b"",
        b"\r",
        {"text": ""},
        {"title": "no text"},
        {"text": 7},
        ["text"],
        b'{"text": "cut off',
        b'{"text": "\xff\xfe"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        {"text": "x" * 300},
        chat,
        {"messages": [{"role": "user"}]},
        {"messages": []},
        {"text": "last"},
    )
    expected = [
        "after a mark",
        "with \U0001f600 and \u00fc",
        "windows line",
        chat["messages"],
        "last",
    ]
    reasons = {
        "empty text": 1,
        "no field `text` or `messages`": 5,
        "invalid JSON": 1,
        "invalid UTF-8": 2,
        "line above 0 MiB": 2,
    }
    assert texts(path) == (expected, reasons)
    # The same with the file cut into units at every possible place.
    for unit_bytes in (37, 64, 1000):
        monkeypatch.setattr(corpus, "_UNIT_BYTES", unit_bytes)
        assert texts(path) == (expected, reasons)
    path.rename(tmp_path / "plain.jsonl")
    compressed = tmp_path / "same.jsonl.gz"
    compressed.write_bytes(gzip.compress((tmp_path / "plain.jsonl").read_bytes()))
    assert texts(compressed) == (expected, reasons)


def test_nested_json_does_not_stop_the_reader(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "deep.jsonl", b"[" * 100_000, {"text": "fine"})
    assert texts(path) == (["fine"], {"invalid JSON": 1})


def test_a_cut_off_gz_keeps_what_it_has(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "cut.jsonl.gz", *[{"text": str(i)} for i in range(10_000)])
    path.write_bytes(path.read_bytes()[:-2000])
    found, bad = texts(path)
    assert 0 < len(found) < 10_000
    assert bad == {"damaged .gz stream (rest of the file)": 1}


def test_text_lines_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\r\n\xff\nthree")
    assert texts(tmp_path / "a.txt") == (["one", "two", "three"], {"invalid UTF-8": 1})
    chat = [{"role": "user", "content": "hi"}]
    table = pa.table({"text": ["one", None, ""], "messages": [None, chat, None], "id": [1, 2, 3]})
    pq.write_table(table, tmp_path / "b.parquet")
    assert texts(tmp_path / "b.parquet") == (["one", chat], {"empty text": 1})


def test_texts_of_parquet_have_the_bound_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["x" * 300, "one", "y" * 200]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    monkeypatch.setattr(corpus, "_LONGEST_LINE", 200)
    assert texts(tmp_path / "a.parquet") == (rows[1:], {"text above 0 Mi characters": 1})


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        find_units([tmp_path / "none.txt"], TEXT_FORMATS)
    with pytest.raises(ValueError, match="holds no file of a known format"):
        find_units([tmp_path], TEXT_FORMATS)
    (tmp_path / "a.pdf").write_bytes(b"x")
    with pytest.raises(ValueError, match="not a format that can be read here"):
        find_units([tmp_path / "a.pdf"], TEXT_FORMATS)
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="all files are empty"):
        find_units([tmp_path / "a.txt"], TEXT_FORMATS)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="no column `text` or `messages`; it has id"):
        texts(tmp_path / "b.parquet")


def encoded(encoder: Encoder, *documents: Any) -> list[list[int]]:
    return [row.tolist() for batch in encoder.encode(documents) for row in batch]


def test_special_text_in_documents_is_plain(
    encoder: Encoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    special = set(tokenizer.all_special_ids)
    (row,) = encoded(encoder, "the <|im_end|> cat")
    assert row[0] == tokenizer.bos_token_id
    assert not special & set(row[1:])
    assert tokenizer.decode(row[1:]) == "the <|im_end|> cat"


def test_messages_go_through_the_template(
    encoder: Encoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = [{"role": "user", "content": "the cat"}, {"role": "robot", "content": "x"}]
    (row,) = encoded(encoder, chat[:1])
    assert tokenizer.decode(row) == "<|im_start|>user\nthe cat<|im_end|>\n"
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (row.count(start), row.count(end)) == (1, 1)
    assert encoded(encoder, chat) == []
    assert encoder.bad == {"refused by the chat template": 1}
    # The same with the spelling of a special token in a message.
    (row,) = encoded(encoder, [{"role": "user", "content": "a<|im_end|>b"}])
    assert tokenizer.decode(row) == "<|im_start|>user\na<|im_end|>b<|im_end|>\n"
    assert (row.count(start), row.count(end)) == (1, 1)


def test_long_documents_are_encoded_in_pieces(
    encoder: Encoder, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the cat sat on the mat " * 50
    whole = encoded(encoder, text, "x")
    monkeypatch.setattr(encode, "_PIECE_CHARACTERS", 100)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 250)
    assert encoded(encoder, text, "x") == whole
    assert encoded(encoder, "x" * 450)[0].count(tokenizer.bos_token_id) == 1


def test_texts_end_to_end(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = tmp_path / "source"
    source.mkdir()
    lines = [{"text": f"the cat {i} sat"} for i in range(200)]
    write_lines(source / "a.jsonl", *lines[:150], b"broken")
    write_lines(source / "b.jsonl.gz", *lines[150:])
    plan = Plan(
        tuple(find_units([source], TEXT_FORMATS)),
        3,
        vocabulary_of(tokenizer, "tiny"),
        tokenizer.eos_token_id,
        TokenizerSource.of(tokenizer, tokenizer.name_or_path, None),
    )
    model = run(plan, tmp_path, workers=2)
    ids = tokenizer([line["text"] for line in lines])["input_ids"]
    assert_counts(model, [[*row, tokenizer.eos_token_id] for row in ids])
    assert model.tokenizer_sha256 == vocabulary_of(tokenizer).sha256
    first = (tmp_path / "model.ngram").read_bytes()
    run(plan, tmp_path, workers=1)
    assert (tmp_path / "model.ngram").read_bytes() == first


def test_evaluation_texts_are_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    long = "the cat sat on the mat and the dog sat on the other cat"
    held_out = write_lines(tmp_path / "eval.jsonl", {"turns": [long, "Who sat on the mat?"]})
    source = tmp_path / "source"
    source.mkdir()
    kept = [f"the cat {i} sat" for i in range(50)]
    chat = [{"role": "user", "content": "who SAT on the mat"}, {"role": "robot", "content": "x"}]
    split = [{"role": r, "content": c} for r, c in (("user", long[:22]), ("user", long[22:]))]
    answer = [{"role": "assistant", "content": "Who sat on the mat?"}]
    write_lines(source / "a.jsonl", *({"text": text} for text in kept), {"text": f"So {long}!"})
    write_lines(source / "b.jsonl", *({"messages": m} for m in (chat, split, answer)))
    (source / "c.txt").write_text(f"{long}\nthe mat\nWho sat on the mat?\n")
    plan = Plan(
        tuple(find_units([source], TEXT_FORMATS)),
        3,
        vocabulary_of(tokenizer, "tiny"),
        tokenizer.eos_token_id,
        TokenizerSource.of(tokenizer, tokenizer.name_or_path, None),
        (str(held_out),),
    )
    result = build(plan, tmp_path / "m.ngram", tmp_path / "w", 2, SMALLEST_MEMORY, lambda *_: None)
    assert result.bad == {OVERLAP: 5}
    model = _core.NgramModel.open(str(tmp_path / "m.ngram"))
    rows = encoded(Encoder(plan.tokenizer, Counter()), *kept, "the mat", answer)
    assert_counts(model, [[*row, tokenizer.eos_token_id] for row in rows])
    metadata = json.loads(model.metadata)
    assert (metadata["exclude"], metadata["excluded_documents"]) == (["eval.jsonl"], 5)
    # Nothing may be taken over from a build that kept other sets out.
    assert replace(plan, exclude=()).identity() != plan.identity()
    write_lines(held_out, {"question": "x"})
    with pytest.raises(ValueError, match=r"eval\.jsonl:1: expected a JSON object with `turns`"):
        build(plan, tmp_path / "n.ngram", tmp_path / "w", 2, SMALLEST_MEMORY, lambda *_: None)


def test_a_corpus_without_a_good_document(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_lines(tmp_path / "a.jsonl", b"broken", {"text": ""})
    source = TokenizerSource.of(tokenizer, "tiny", None)
    units = tuple(find_units([path], TEXT_FORMATS))
    plan = Plan(units, 3, vocabulary_of(tokenizer), source.eos, source)
    with pytest.raises(ValueError, match=r"no document could be read; left out: .*invalid JSON"):
        build(plan, tmp_path / "m", tmp_path / "w", 1, SMALLEST_MEMORY, lambda *_: None)
