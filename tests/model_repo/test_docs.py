"""docs/migration.md is what the declarations say."""

from pathlib import Path

from trtforge.model_repo.docs import markdown


def test_the_migration_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "migration.md"
    assert page.read_text() == markdown(), "run `python -m trtforge.model_repo.docs > docs/migration.md`"
