"""Runs in vLLM's workers: readies them, and takes new weights from `ostinato_engines.weight_transfer`, by calls with paths.

vLLM mixes `WeightExtension` into its worker class. Nothing is unpickled: the call carries the paths of sockets in folders
that only this user can enter, and what comes through it is MessagePack and bytes in shared memory.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import msgspec

from ostinato_engines import device as devices
from ostinato_engines.errors import WeightUpdateError
from ostinato_engines.second_errors import second_to
from ostinato_engines.types import WeightManifest
from ostinato_engines.vllm_engine.sampling import OUR_PROCESSORS
from ostinato_engines.weight_routes import WeightRoute
from ostinato_engines.weight_transfer import (
    LOADING_S,
    IncomingUpdate,
    RouteFollower,
    RouteUpdate,
    WeightReceiver,
    connect,
)
from ostinato_engines.weight_transfer.layout import as_bytes

_RELOAD = "vllm.model_executor.model_loader.reload"


class WeightExtension:
    """Methods that vLLM's `collective_rpc` can name; the rest of `self` is vLLM's worker."""

    rank: int
    device: Any
    model_runner: Any
    vllm_config: Any
    reload_weights: Any
    _ostinato_follower: RouteFollower | None = None

    def ostinato_get_ready(self) -> str:
        """Readies a worker that has started.

        Returns:
            What keeps seeded requests from being drawn together, or nothing.
        """
        self._ostinato_run_ahead()
        return import_module(f"{__package__}.seeded_draw").draw_by_seeds(self.model_runner)

    def _ostinato_run_ahead(self) -> None:
        """Lets a step begin before the tokens of the one before have come to the host.

        vLLM waits for them as soon as there is a logits processor that it does not know. Ours read none.
        """
        config, batch = self.vllm_config, getattr(self.model_runner, "input_batch", None)
        others = [name for name in config.model_config.logits_processors or () if name not in OUR_PROCESSORS]
        if batch is not None and not others and getattr(config, "reasoning_config", None) is None:
            batch.logitsprocs_need_output_token_ids = False

    def ostinato_place(self) -> list[str]:
        """Where this worker has its weights: the fields of a `WeightPlace`."""
        return list(msgspec.structs.astuple(devices.place_of(self.device)))

    def ostinato_receive_weights(self, paths: list[str]) -> str:
        """Replaces the model's weights by the update that is offered at this worker's path.

        Returns:
            What went wrong, or nothing. After a failure the model holds a mixture, and takes another update. It is not
            raised: where several workers raise, vLLM reads one answer, and takes the next for that of its next call.
        """
        try:
            receiver = WeightReceiver(connect(paths[self.rank]), timeout_s=LOADING_S)
            try:
                update = receiver.next_update(forever=False)
                if update is not None:
                    self._ostinato_apply(update)
            finally:
                # Waits for the goodbye: the sender must read first what became of the update.
                with suppress(WeightUpdateError):
                    receiver.next_update(forever=False)
                receiver.close()
        # The border between two processes, whose other end raises it.
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def ostinato_follow_route(self, manifest: str, route: str) -> str:
        """Replaces the model's weights by the update that comes along a route; both arguments are JSON.

        Returns:
            As `ostinato_receive_weights`.
        """
        try:
            if self._ostinato_follower is None:
                self._ostinato_follower = RouteFollower(str(self.device))
            wanted, way = (
                msgspec.json.decode(manifest, type=WeightManifest),
                msgspec.json.decode(route, type=WeightRoute),
            )
            update = self._ostinato_follower.open(way, wanted, worker=self.rank)
            try:
                self._ostinato_apply(update)
            finally:
                update.close()
        # The border between two processes, whose other end raises it.
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def ostinato_weight_digests(self) -> dict[str, str]:
        """SHA-256 of each parameter's bytes as they lie in the worker, by vLLM's names: what comparing weights bit by bit takes."""
        parameters = self.model_runner.get_model().named_parameters()
        return {name: hashlib.sha256(as_bytes(tensor).cpu().numpy().data).hexdigest() for name, tensor in parameters}

    def _ostinato_apply(self, update: RouteUpdate | IncomingUpdate) -> None:
        try:
            # vLLM keeps the tensors of a layer until the layer is complete, and the sender uses their memory again. A copy in new memory
            # of the host would cost more than the way to the device.
            with self._ostinato_config(), self._ostinato_quiet(update.manifest):
                self.reload_weights(weights_iterator=self._ostinato_copies(update))
            self._ostinato_pack_tied()
            devices.empty_cache(self.device)  # of copies that came and went: on a shared device somebody else wants it
            update.finish()
        except BaseException as error:
            with second_to(error, "forgetting the parts that came"):
                self._ostinato_forget_parts()
            with suppress(WeightUpdateError):  # the sender may be gone
                update.fail(error)
            raise

    def _ostinato_copies(self, update: RouteUpdate | IncomingUpdate) -> Iterator[tuple[str, Any]]:
        for name, tensor in update:
            yield name, tensor.to(self.device, copy=True)

    def _ostinato_pack_tied(self) -> None:
        """A tied output head is sent no tensor, so that vLLM keeps the copy that it packed of the old one for the CPU."""
        owners: dict[int, list[Any]] = defaultdict(list)
        for layer in self.model_runner.get_model().modules():
            for parameter in layer.parameters(recurse=False):
                owners[id(parameter)].append(layer)
        with self._ostinato_config():
            for layers in owners.values():
                for layer in layers if len(layers) > 1 else ():
                    if (method := getattr(layer, "quant_method", None)) is not None:
                        method.process_weights_after_loading(layer)

    def _ostinato_forget_parts(self) -> None:
        """Ends a reload that broke off: parts of layers that were kept must not meet those of the next update."""
        reload = import_module(_RELOAD)
        with self._ostinato_config():
            reload.finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    @contextmanager
    def _ostinato_quiet(self, manifest: WeightManifest) -> Iterator[None]:
        """vLLM warns of every layer that gets no weights; in an update in part the others are to get none."""
        names = (_RELOAD, self.model_runner.reload_weights.__module__) if manifest.is_partial else ()
        levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
        for each in levels:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in levels.items():
                each.setLevel(level)

    def _ostinato_config(self) -> Any:
        """The context in which vLLM's layers find their configuration."""
        return import_module("vllm.config").set_current_vllm_config(self.vllm_config)
