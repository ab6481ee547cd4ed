"""Our stores, and the one in the documentation, pass the contract of a store."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from conftest import Closing, StoreFactory
from contracts.store import MIB, StoreContract
from support import runs
from support.doubles import Accelerator

from ds_tba.config import Compression
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.base import Store
from ds_tba.storage.host import HostStore
from ds_tba.storage.integrity import Codec

PAGE = runs.ROOT / "docs" / "develop" / "stores.md"


class TestHostStore(StoreContract):
    @pytest.fixture
    def store(self, closing: Closing) -> Store[Any]:
        return closing(HostStore)(Accelerator(), 16 * MIB)


class TestNvmeStore(StoreContract):
    @pytest.fixture
    def store(self, make_store: StoreFactory, backend: IoBackend) -> Store[Any]:
        return make_store(backend, staging_bytes=2 * MIB, swap_file_bytes=16 * MIB)  # less than some storages


@pytest.mark.parametrize("codec", get_args(Compression))
class TestNvmeStoreWithCodec(StoreContract):
    @pytest.fixture
    def store(self, make_store: StoreFactory, codec: str) -> Store[Any]:
        return make_store(staging_bytes=8 * MIB, swap_file_bytes=16 * MIB, codec=Codec(codec))


class TestStoreOfThePage(StoreContract):
    """As it stands there: whoever copies it has a store that passes."""

    @pytest.fixture
    def store(self, closing: Closing) -> Store[Any]:
        (code, _) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        room: dict[str, Any] = {"__name__": "dict_store"}
        exec(compile(code, str(PAGE), "exec"), room)
        return closing(room["DictStore"])(16 * MIB)
