"""The description on PyPI: the README, whose links lead into the repository that ``pyproject.toml`` names."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
(ADDRESS,) = re.findall(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)")

setup(
    long_description=LINK.sub(f"]({ADDRESS}/blob/main/", (ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
