"""The servers of a run: shown, added and removed while it goes on. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from firesteel.endpoints.roster import FILE, edit, read_status, read_urls, write_urls
from firesteel.errors import RecipeError
from firesteel.recipe import Recipe


def run(recipe: Recipe, action: str, url: str | None, say: Callable[[str], None]) -> None:
    """List the endpoints of a run with what it last said of them, or add or remove one.

    A run that has not begun has those of `target.endpoints`; once it has its file, the file counts.

    Raises:
        RecipeError: an unknown action, no URL, not one, there already, or not there.
    """
    file = recipe.run_dir / FILE
    if action not in ("list", "add", "remove"):
        raise RecipeError(f"{action!r} is nothing to do with endpoints", mend="list, add or remove")
    if action != "list":
        if url is None:
            raise RecipeError(f"{action} what?", mend=f"firesteel endpoints RECIPE {action} http://HOST:PORT")
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_urls(file, recipe.target.endpoints)
        edit(file, "add" if action == "add" else "remove", url)
    urls, known = read_urls(file) if file.is_file() else recipe.target.endpoints, read_status(recipe.run_dir)
    for name in urls:
        row = known.get(name)
        if row is None:
            say(f"{name}  not used yet")
        else:
            error = f"  last error: {row['error']}" if row["error"] else ""
            say(f"{name}  {row['state']}  {row['answers']} answers, {row['faults']} faults, {row['bad']} bad{error}")
    if not urls:
        say(f"no endpoints: add one with `firesteel endpoints {recipe.name} add http://HOST:PORT`")
