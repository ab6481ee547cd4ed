"""The description on PyPI: the README, whose links lead into the repository that ``pyproject.toml`` names."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
(ADDRESS,) = re.findall(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)")


def absolute(link: re.Match[str]) -> str:
    """A picture is shown from its raw file; other links lead to a page of the repository."""
    kind = "raw" if link[1] else "blob"
    return f"{link[1]}{link[2]}({ADDRESS}/{kind}/main/"


setup(
    long_description=LINK.sub(absolute, (ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
