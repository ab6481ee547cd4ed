"""For ``mkdocs``: links to files outside of ``docs/`` lead to the repository, where they are; one that is not there is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:benchmarks|ds_configs|ds_tba|examples|tests)/[^)#]*|[A-Z][A-Za-z.]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page, with its links out of ``docs/`` as addresses."""

    def address(found: re.Match[str]) -> str:
        path = found[1]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} has a link to {path}, which is not there")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path})"

    return OUTSIDE.sub(address, markdown)
