"""The contract of a store that sees tensors, and may do without the bytes of a storage: rematerialization.

Sees tensors and what autograd holds in their place; cannot see the cache, nor how anything is made again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic

import torch

from ds_tba.core.saved import Origin, SavedCounted, SavedStorage, SavedView
from ds_tba.storage.base import Issuer, OwnTicket


class TensorStore(Issuer[OwnTicket], Generic[OwnTicket]):
    """A store that may do without the bytes of a storage, as it knows what the storage is made of.

    It sees each tensor as autograd saves it, and comes before the stores of bytes.
    """

    @abstractmethod
    def begin_forward(self) -> None:
        """Begin a forward: nothing that earlier ones saved is what later storages are made of."""

    @abstractmethod
    def take(self, tensor: torch.Tensor, *, is_wanted: bool) -> tuple[Origin | None, OwnTicket | None]:
        """Find what the storage of a tensor that is being saved is made of. Called without the cache's lock.

        Args:
            is_wanted: take the storage, if that is proven to give its bytes.

        Returns:
            The origin, if there is one, and a ticket for :meth:`admit`, if the storage is taken.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """

    @abstractmethod
    def admit(self, record: SavedStorage, ticket: OwnTicket) -> None:
        """Have a ticket of :meth:`take` placed for the record of its storage, as soon as its bytes may go.

        Called under the cache's lock.
        """

    @abstractmethod
    def note(self, tensor: torch.Tensor, held: SavedCounted | SavedView) -> None:
        """Note that autograd has saved a tensor, and what it holds in place of that."""

    @abstractmethod
    def wait_for_answers(self) -> None:
        """Read every answer of the device that is due: until then its operands are held.

        Raises:
            RematerializationError: as :meth:`take`.
        """
