"""Recipes: defaults, overrides, and errors that name the nearest known key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from firesteel.errors import RecipeError
from firesteel.recipe import known_keys, load_recipe, named_recipes, recipe_from_dict, recipe_to_yaml


@pytest.mark.parametrize("name", named_recipes())
def test_named_recipes_are_valid_and_print_in_full(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    again = recipe_from_dict(yaml.safe_load(recipe_to_yaml(recipe, explain=True)))
    assert again == recipe


def test_overrides_replace_values() -> None:
    recipe = load_recipe("quickstart", ["train.max_minutes=1.5", "drafter.markov_head=gated", "target.layer_ids=[1,2]", "seed=7"])
    assert recipe.train.max_minutes == 1.5
    assert recipe.drafter.markov_head == "gated"
    assert recipe.target.layer_ids == [1, 2]
    assert recipe.seed == 7


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.max_minute=3", "train.max_minutes"),
        ("trian.lr=1", "train"),
        ("drafter.markovrank=3", "drafter.markov_rank"),
        ("train.lr=-1", "train.lr"),
        ("drafter.markov_head=fancy", "vanilla"),
        ("train.lr", "section.key=value"),
        ("responses.samples=2", "responses.temperature"),
        ("target.endpoints=[host:8100]", "target.endpoints has 'host:8100', which is not http://HOST:PORT"),
        ("responses.servers.urls=[host:8000]", "responses.servers.urls has 'host:8000', which is not http://HOST:PORT"),
        ("package.tolerance=1", "package.tolerance"),
    ],
)
def test_bad_overrides_say_what_to_type(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as e:
        load_recipe("quickstart", [override])
    assert hint in str(e.value)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="quickstart"):
        load_recipe("quikstart")


def test_training_needs_an_end(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("target: {model: x}\n")
    with pytest.raises(RecipeError, match=r"train\.max_minutes"):
        load_recipe(str(path))


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n"])
def test_broken_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"mine\.yaml"):
        load_recipe(str(path))


def test_every_setting_is_explained() -> None:
    assert all(help_text for _, help_text in known_keys())


def test_compared_drafters_are_the_same_but_for_what_is_said() -> None:
    recipe = load_recipe("compare-smollm2")
    assert recipe.drafter_of("dspark") == recipe.drafter
    assert recipe.drafter_of("eagle3") == recipe.drafter.model_copy(update={"algorithm": "eagle3", "num_layers": 1, "block_size": 5})
    assert recipe.drafter_of("dflash2").draft_vocab_size is None
    warm = load_recipe("compare-smollm2", ["drafter.init=some/checkpoint"])
    assert (warm.drafter_of("dspark").init, warm.drafter_of("dflash").init) == ("some/checkpoint", "random")
    shorter = load_recipe("compare-smollm2", ["evaluate.compare=[dflash]"])
    assert shorter.drafter_of("dflash") == recipe.drafter_of("dflash")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("evaluate.drafters={dspark: {num_layers: 1}}", "evaluate.drafters has dspark, which is the recipe's own drafter"),
        (
            "evaluate.drafters={eagle3: {num_layer: 1}}",
            "unknown setting evaluate.drafters.eagle3.num_layer; did you mean evaluate.drafters.eagle3.num_layers?",
        ),
        (
            "evaluate.drafters.eagle3={eagle: {fcnorm: true}}",
            ".eagle3.eagle.fcnorm; did you mean evaluate.drafters.eagle3.eagle.fc_norm?",
        ),
        ("evaluate.drafters={eagle3: {zzzzqq: 1}}", "unknown setting evaluate.drafters.eagle3.zzzzqq"),
        ("evaluate.drafters={eagle3: {num_layers: none}}", "evaluate.drafters.eagle3.num_layers"),
    ],
)
def test_differences_of_compared_drafters_are_checked(override: str, words: str) -> None:
    with pytest.raises(RecipeError) as e:
        load_recipe("compare-smollm2", [override])
    assert words in str(e.value)
    assert "Extra inputs" not in str(e.value)
