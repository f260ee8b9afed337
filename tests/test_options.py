"""Where settings come from, and what is said about wrong ones."""

import json
from pathlib import Path

import pytest

from sglang_dart.options import ENVIRONMENT, DartOptions, load_dart_options


def test_defaults_without_any_source(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert load_dart_options({}) == DartOptions()


def test_environment_wins_over_the_drafters_config(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, '{"budget": 7}')
    options = load_dart_options({"dart_config": {"budget": 9, "beam": 3}})
    assert (options.budget, options.beam) == (7, 3)


def test_environment_may_name_a_file(monkeypatch, tmp_path):
    path = tmp_path / "dart.json"
    path.write_text(json.dumps({"beam": 4}))
    monkeypatch.setenv(ENVIRONMENT, str(path))
    assert load_dart_options({}).beam == 4


def test_an_ngram_model_may_lie_beside_the_drafter(monkeypatch, tmp_path):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "3gram.ngram").touch()
    config = {"dart_config": {"ngram": "../3gram.ngram"}}
    found = load_dart_options(config, str(tmp_path / "drafter")).ngram
    assert Path(found).samefile(tmp_path / "3gram.ngram")
    # A hub's file, or one that is missing, keeps the name that the config gave it.
    assert load_dart_options(config, "repo/id").ngram == "../3gram.ngram"
    monkeypatch.setenv(ENVIRONMENT, '{"ngram": null}')
    assert load_dart_options(config, str(tmp_path / "drafter")).ngram is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"bugdet": 7}', "bugdet"),
        ('{"budget": 0}', "budget"),
        ('{"budget": "60"}', "budget"),
        ("[1]", "no JSON object"),
        ("{", "not valid JSON"),
        ("/nowhere/dart.json", "/nowhere/dart.json"),
    ],
)
def test_one_line_names_source_and_key(monkeypatch, text, says):
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ValueError, match=ENVIRONMENT) as caught:
        load_dart_options({})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_drafters_config_is_named_when_it_is_wrong(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(ValueError, match=r"dart_config in the drafter's config.json: beam"):
        load_dart_options({"dart_config": {"beam": 0}})
