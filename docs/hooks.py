"""For ``mkdocs``: the front page is the README; links out of ``docs/`` lead to the repository.

A link to a file that is not there is an error, as ``--strict`` has it for the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:benchmarks|ds_configs|ds_tba|examples|tests)/[^)#]*|[A-Z][A-Za-z.]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page, with its links out of ``docs/`` as addresses; before the front page's own text the README."""
    if page.file.src_uri == "index.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        return readme.replace(f"{config.repo_url}/blob/main/docs/", "") + "\n" + markdown

    def address(found: re.Match[str]) -> str:
        path = found[1]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} has a link to {path}, which is not there")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path})"

    return OUTSIDE.sub(address, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """The page, without the script's wish to count the repository's stars: nothing is loaded from other hosts."""
    return output.replace(' data-md-component="source"', "")


def on_page_content(html: str, **_: Any) -> str:
    """The page without Sphinx's roles, which docstrings have."""
    return re.sub(r":(?:class|func|meth|data):(?=<code>)|<p>::</p>", "", html)
