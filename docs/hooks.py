"""Hooks of ``mkdocs``: the front page is the README, links out of ``docs/`` lead to the repository, cells name columns.

A link to a file that does not exist is an error, as ``--strict`` makes it for the pages.
"""

from __future__ import annotations

import re
from html import escape, unescape
from itertools import count
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:benchmarks|ds_configs|ds_tba|examples|tests)/[^)#]*|[A-Z][A-Za-z.]*)\)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its links out of ``docs/`` as addresses; the front page begins with the README."""
    if page.file.src_uri == "index.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        return readme.replace(f"{config.repo_url}/blob/main/docs/", "") + "\n" + markdown

    def address(found: re.Match[str]) -> str:
        path = found[1]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} has a link to {path}, which does not exist")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path})"

    return OUTSIDE.sub(address, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Return the page without the script that counts the repository's stars: pages load nothing from other hosts."""
    return output.replace(' data-md-component="source"', "")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with the titles of columns in the cells of tables."""
    return TABLE.sub(lambda found: titled(found[0]), html)


def titled(table: str) -> str:
    """Return a table whose cells have the title of their column as ``data-title``: site.css shows it on a phone."""
    headings = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", table, re.DOTALL)
    titles = [escape(unescape(re.sub(r"<[^>]*>", "", one))) for one in headings]

    def with_titles(row: re.Match[str]) -> str:
        columns = count()

        def with_title(_: re.Match[str]) -> str:
            column = next(columns)
            return f'<td data-title="{titles[column]}"' if column < len(titles) and titles[column] else "<td"

        return re.sub(r"<td\b", with_title, row[0])

    return ROW.sub(with_titles, table)
