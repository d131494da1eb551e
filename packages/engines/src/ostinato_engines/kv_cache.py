"""Key-value state of many conversations, one row each, behind transformers' Cache interface.

Per layer one tensor [rows, kv_heads, capacity, head_dim]. What a forward reads and writes is set beforehand as a
`Window`; positions at or after a row's length hold garbage, which the attention mask or a later write covers. It is finite
garbage: a mask makes a weight zero, and zero times NaN is NaN. Knows no requests and no tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True)
class Window:
    """Which rows take part in a forward, where their new states go, and how much of them attention sees."""

    rows: slice | Tensor
    """A slice reads without copying; int64 [n] otherwise."""
    start: int | None
    """The first new position if it is the same in all rows."""
    write_rows: Tensor | None
    """int64 [n, 1], where `start` is None or `rows` is no slice."""
    write_columns: Tensor | None
    """int64 [n, new positions]."""
    length: int
    """Positions that attention reads."""


class _SlotLayer(CacheLayerMixin):
    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, capacity = self._owner.num_rows, self._owner.capacity
        self.keys = key_states.new_zeros((rows, key_states.shape[1], capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((rows, value_states.shape[1], capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._owner.window
        assert window is not None
        return self._store(self.keys, key_states, window), self._store(self.values, value_states, window)

    def _store(self, states: Tensor | None, new: Tensor, window: Window) -> Tensor:
        assert states is not None
        if window.write_columns is None:
            assert window.start is not None
            states[window.rows, :, window.start : window.start + new.shape[2]] = new
        else:
            states[window.write_rows, :, window.write_columns] = new.transpose(1, 2)
        visible = states[:, :, : window.length]
        return visible[window.rows] if isinstance(window.rows, slice) else visible.index_select(0, window.rows)

    def resize(self, rows: int, capacity: int) -> None:
        if not self.is_initialized:
            return
        self.keys = _grown(self.keys, rows, capacity)
        self.values = _grown(self.values, rows, capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        window = self._owner.window
        return (query_length if window is None else window.length), 0

    def get_seq_length(self) -> int:
        window = self._owner.window
        return 0 if window is None or window.start is None else window.start

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def _grown(states: Tensor | None, rows: int, capacity: int) -> Tensor:
    assert states is not None
    old_rows, heads, old_capacity, width = states.shape
    grown = states.new_zeros((rows, heads, capacity, width))
    grown[:old_rows, :, :old_capacity] = states
    return grown


class SlotCache(Cache):
    """The rows of all layers. Memory is rows * capacity * layers * 2 * kv_heads * head_dim elements."""

    def __init__(self, num_layers: int) -> None:
        self.num_rows = 0
        self.capacity = 0
        self.window: Window | None = None
        self._slot_layers = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, rows: int, capacity: int) -> None:
        """Grows to at least so many rows and positions; what is stored stays."""
        rows, capacity = max(rows, self.num_rows), max(capacity, self.capacity)
        if (rows, capacity) != (self.num_rows, self.capacity):
            self.num_rows, self.capacity = rows, capacity
            for layer in self._slot_layers:
                layer.resize(rows, capacity)

    def exchange(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Swaps two rows, of which only so many positions matter."""
        for layer in self._slot_layers:
            if not layer.is_initialized:
                continue
            for states in (layer.keys, layer.values):
                assert isinstance(states, Tensor)
                kept = states[first, :, :first_length].clone() if first_length else None
                if second_length:
                    states[first, :, :second_length] = states[second, :, :second_length]
                if kept is not None:
                    states[second, :, :first_length] = kept

    @torch.inference_mode()
    def wipe(self, row: int | None = None) -> None:
        """Overwrites a row, or all, with zeros."""
        for layer in self._slot_layers:
            for states in (layer.keys, layer.values) if layer.is_initialized else ():
                assert isinstance(states, Tensor)
                (states if row is None else states[row]).zero_()

    def drop(self) -> None:
        """Frees all memory."""
        self.num_rows = self.capacity = 0
        self.window = None
        for layer in self._slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        return sum(
            states.numel() * states.element_size()
            for layer in self._slot_layers
            for states in (layer.keys, layer.values)
            if isinstance(states, torch.Tensor)
        )
