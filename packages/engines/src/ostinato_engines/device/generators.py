"""The generators of random numbers, Python's, numpy's and torch's on every device: seeded together, and put back to where they stood.

Invariant: to ask where they stand takes no memory on a device that this process has not used.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ostinato_engines.device.kinds import KINDS, backend_of, device_count, is_available, torch_module
from ostinato_engines.errors import EngineInputError

if TYPE_CHECKING:
    import torch


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators, on every device."""
    import random

    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch_module().manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Where Python's, numpy's and torch's generators stand, on every device that has been used; plain JSON data."""
    import random

    import numpy

    torch = torch_module()
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = numpy.random.get_state(legacy=False)  # pyright: ignore[reportAssignmentType]
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
        "torch": _hexadecimal(torch.get_rng_state()),
    }
    for kind in _kinds_in_use():
        states = [backend_of(kind).get_rng_state(*place) for place in _places(kind)]
        state[kind] = [_hexadecimal(each) for each in states]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators where `random_state` found them; devices that this process lacks are passed over.

    Raises:
        EngineInputError: It is no such state; some generators may have been restored then.
    """
    import random

    import numpy

    torch = torch_module()
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        legacy = state["numpy"]
        numpy.random.set_state({**legacy, "state": {**legacy["state"], "key": numpy.array(legacy["state"]["key"])}})
        torch.set_rng_state(_from_hexadecimal(state["torch"]))
        for kind in KINDS:
            if kind in state and is_available(kind):
                for place, text in zip(_places(kind), state[kind], strict=False):
                    backend_of(kind).set_rng_state(_from_hexadecimal(text), *place)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EngineInputError(
            f"the state of random generators must be what random_state() gave, got {type(error).__name__}: {error}; "
            "begin anew with a seed"
        ) from error


def _kinds_in_use() -> list[str]:
    """Kinds of devices beside the host that this process has used; asking one that it has not would take memory there."""
    used = []
    for kind in KINDS:
        backend = backend_of(kind) if is_available(kind) else None
        if backend is not None and getattr(backend, "is_initialized", lambda: True)():
            used.append(kind)
    return used


def _places(kind: str) -> list[tuple[str, ...]]:
    """The arguments that name each generator of a kind; mps has one, without a name."""
    return [()] if kind == "mps" else [(f"{kind}:{index}",) for index in range(device_count(kind))]


def _hexadecimal(state: "torch.Tensor") -> str:
    return bytes(state.tolist()).hex()


def _from_hexadecimal(text: str) -> "torch.Tensor":
    return torch_module().tensor(list(bytes.fromhex(text)), dtype=torch_module().uint8)
