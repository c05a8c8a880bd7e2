"""The verb `endpoints`: shows, adds and removes the servers of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.endpoints.roster import FILE, STATUS, Roster, read_urls
from firesteel.errors import RecipeError


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["endpoints", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_servers_are_shown_added_and_removed(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"name: mine\nruns_dir: {tmp_path}\ntrain: {{max_steps: 1}}\ntarget: {{endpoints: ['http://a:1']}}\n")
    assert invoke(str(recipe)) == "http://a:1  not used yet\n"
    invoke(str(recipe), "add", "http://b:2/")
    assert read_urls(tmp_path / "mine" / FILE) == ["http://a:1", "http://b:2"]
    (tmp_path / "mine" / STATUS).write_text(json.dumps([{"url": "http://b:2", "state": "resting", "answers": 5, "faults": 1, "bad": 2, "error": "oops"}]))
    assert invoke(str(recipe), "remove", "http://a:1") == "http://b:2  resting  5 answers, 1 faults, 2 bad  last error: oops\n"
    assert "add one" in invoke(str(recipe), "remove", "http://b:2")
    for words, said in ((("add",), "add what"), (("frob", "x"), "frob"), (("add", "ftp://x"), "not the URL"), (("remove", "http://c"), "is not in")):
        with pytest.raises(RecipeError, match=said):
            invoke(str(recipe), *words)


def test_a_file_that_goes_or_is_edited_by_hand(tmp_path: Path) -> None:
    roster = Roster(["http://a"], tmp_path / FILE)
    assert roster.read() == ["http://a"]
    (tmp_path / FILE).write_text("# mine\nhttp://b/ # the fast one\n\nhttp://a\nhttp://b\n")
    assert roster.read() == ["http://b", "http://a"]
    (tmp_path / FILE).unlink()
    assert roster.read() == ["http://b", "http://a"], "a list that has just gone is not an empty one"
