"""Recipes: the ones that come with trtforge, a user's own file, and what is refused."""

from pathlib import Path

import pytest

from trtforge.builder import recipes
from trtforge.builder.spec import QuantSpec
from trtforge.plugins.errors import InvalidArgument


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return str(file)


def test_shipped_recipes_load() -> None:
    assert recipes.names() == ("as_is", "full_prec", "int4_wo", "int8_wo")
    assert recipes.load("full_prec") == QuantSpec("full_prec")
    assert recipes.load("int8_wo") == QuantSpec("int8_wo", weights="int8", symmetric=True)
    assert recipes.load("int4_wo").weights == "int4"
    assert recipes.load("int4_wo").group_size == 128


def test_own_file_is_named_after_the_file(tmp_path: Path) -> None:
    mine = write(tmp_path, 'weights = "int4"\ngroup_size = 32\nsymmetric = true\nexclude = ["lm_head"]\n')
    assert recipes.load(mine) == QuantSpec("mine", "int4", 32, True, ("lm_head",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('weight = "int8"', "unknown key 'weight'; did you mean 'weights'?"),
        ("banana = 1", "unknown key 'banana'; known: weights, group_size, symmetric, exclude"),
        ('weights = "int3"', "'int3' is unknown; choose from: none, as_is, int8, int4"),
        ('weights = "int4"\ngroup_size = 48', "group_size = 48 is not possible; choose from: 0, 32, 64, 128"),
        ('weights = "int4"\ngroup_size = "128"', "group_size = '128' must be a int"),
        ("symmetric = 1", "symmetric = 1 must be a bool"),
        ("exclude = [1]", "exclude = [1] must be a list of strings"),
        ("weights = ", "not a recipe"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    mine = write(tmp_path, text)
    with pytest.raises(InvalidArgument) as refused:
        recipes.load(mine)
    assert message in str(refused.value)
    assert mine in str(refused.value)


def test_own_file_may_not_pass_for_one_of_ours(tmp_path: Path) -> None:
    """Engines bear the recipe's name, and `verify` takes its limits from it."""
    copy = tmp_path / "int8_wo.toml"
    copy.write_text('weights = "int8"\nsymmetric = true\n')
    assert recipes.load(str(copy)) == recipes.load("int8_wo")
    copy.write_text('weights = "int4"\n')
    with pytest.raises(
        InvalidArgument, match=r"int8_wo\.toml: trtforge has another recipe of this name; rename"
    ):
        recipes.load(str(copy))


@pytest.mark.parametrize("name", ["int8", "nowhere.toml", "../full_prec"])
def test_unknown_recipe_names_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgument, match="choose from: as_is, full_prec, int4_wo, int8_wo"):
        recipes.load(name)
