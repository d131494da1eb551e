"""The only module that imports `megatron.core`: groups of ranks, the model, its gradients and optimizer, and its schedules.

Megatron's settings are those under which it computes what a Hugging Face model computes: its own ("local") layers, no dropout, no fused kernels
that need Transformer Engine or Apex; gradients are summed over data ranks as they are (`calculate_per_token_loss` turns the mean off) and weight
decay acts on all parameters. Its GPTModel takes critical fixes only upstream, so nothing of it is seen outside this folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ostinato_engines.device import CUDA, HOST, current_device
from ostinato_trainer.backends.adamw import AdamWOptions
from ostinato_trainer.backends.megatron.attention import PackedCausalAttention
from ostinato_trainer.backends.megatron.norm import SharedRMSNorm
from ostinato_trainer.backends.megatron.shape import DecoderShape, MegatronLayout
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, MissingExtraError
from ostinato_trainer.heartbeat import beat

try:
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.distributed import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )
    from megatron.core.optimizer import (  # pyright: ignore[reportMissingImports]
        OptimizerConfig,
        get_megatron_optimizer,
    )
    from megatron.core.packed_seq_params import PackedSeqParams  # pyright: ignore[reportMissingImports]
    from megatron.core.pipeline_parallel import get_forward_backward_func  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel import (  # pyright: ignore[reportMissingImports]
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.transformer.transformer_block import (  # pyright: ignore[reportMissingImports]
        TransformerBlockSubmodules,
    )
    from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
        TransformerConfig,
    )
except ImportError as error:
    raise MissingExtraError(
        f"megatron.core must be importable for actor_rollout_ref.actor.strategy=megatron, got {error}; "
        "run `pip install 'ostinato-trainer[megatron]'` under Python 3.12"
    ) from error


for _talkative in (
    GPTModel,
    DistributedDataParallel,
):  # both warn at every start of what only their caller could change
    logging.getLogger(_talkative.__module__).setLevel(logging.ERROR)


@dataclass(frozen=True)
class RankGroups:
    """Where this rank stands in the layout, and with whom it shares what."""

    tensor_group: dist.ProcessGroup
    """Ranks that split the matrices of the same layers."""
    tensor_rank: int
    stage: int
    """Of the pipeline."""
    num_stages: int
    data_group: dist.ProcessGroup
    """Ranks that hold the same tensors for other data."""
    data_rank: int
    data_size: int

    @property
    def tensor_size(self) -> int:
        return self.tensor_group.size()

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


def check_device(device: torch.device) -> None:
    """Raises BackendError where Megatron, which takes CUDA's current device whatever it is told, would not compute on `device`."""
    try:
        current: object = current_device(CUDA)
    except (AssertionError, RuntimeError):  # torch is without CUDA, or there is no device
        current = None
    fits = device.index in (None, current) if device.type == CUDA else current == device.type
    if current is None or not fits:
        raise BackendError(
            f"trainer.device must be {CUDA} with actor_rollout_ref.actor.strategy=megatron, got {device}; "
            f"write trainer.device={CUDA}, or use the strategy fsdp2, which also trains on CPUs"
        )


def join_groups(layout: MegatronLayout, *, timeout_s: float) -> RankGroups:
    """Makes the groups of ranks of a layout; all ranks of the default group call it, once in a process."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(0)  # nothing random is drawn, but layers that split tokens want the generators
    return RankGroups(
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=layout.pipeline_model_parallel_size,
        data_group=parallel_state.get_data_parallel_group(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
    )


def build_model(
    shape: DecoderShape,
    layout: MegatronLayout,
    groups: RankGroups,
    *,
    dtype: torch.dtype,
    device: torch.device,
    frequencies: Tensor,
    recompute: bool,
) -> GPTModel:
    """This rank's part of the model, its weights not yet set.

    Args:
        shape: Of the whole model.
        layout: Of the ranks.
        groups: Of this rank.
        dtype: Of the parameters and of what is computed.
        device: Where they lie.
        frequencies: float [head_dim / 2], of the rotary positions.
        recompute: Keep each layer's input for the backward pass and compute the rest again.
    """
    config = _transformer_config(shape, layout, dtype=dtype, device=device, recompute=recompute)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(shape, layout),
        vocab_size=shape.vocab_size,
        max_sequence_length=0,
        pre_process=groups.stage == 0,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
    ).to(device, dtype)  # norms are made in float32
    if shape.value_head and groups.is_last_stage:
        model.output_layer = None
        model.score = nn.Linear(shape.hidden_size, 1, bias=len(shape.value_head) > 1, device=device, dtype=dtype)
    model.rotary_pos_emb.inv_freq = frequencies.to(device, torch.float32)
    if model.pre_process and shape.padding_id is not None:
        model.embedding.word_embeddings.register_forward_hook(_WithoutPadding(shape.padding_id, layout, groups))
    return model


@dataclass(frozen=True)
class _WithoutPadding:
    """Keeps gradients from the row of the padding token where it is read, which may stand in the text as any other: often its row is zero, where
    the norm behind it has a gradient of a thousandfold."""

    padding_id: int
    layout: MegatronLayout
    groups: RankGroups

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The embedding's output, float [1, T, hidden], or [T / tensor ranks, 1, hidden] where they split the tokens."""
        is_padding = inputs[0].flatten() == self.padding_id
        if self.layout.splits_tokens:
            is_padding = is_padding.chunk(self.groups.tensor_size)[self.groups.tensor_rank]
        return torch.where(is_padding.view(*output.shape[:2], 1), output.detach(), output)


def _transformer_config(
    shape: DecoderShape, layout: MegatronLayout, *, dtype: torch.dtype, device: torch.device, recompute: bool
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        sequence_parallel=layout.splits_tokens,
        variable_seq_lengths=layout.pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",  # no experts here, but the default is refused beside variable lengths
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == HOST,
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _block_spec(shape: DecoderShape, layout: MegatronLayout) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, with our attention and norms."""
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SharedRMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedCausalAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = SharedRMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * (shape.num_layers // layout.pipeline_model_parallel_size), layer_norm=SharedRMSNorm
    )


def states_of(model: nn.Module, batch: Batch) -> Tensor:
    """What a pipeline stage makes of a batch: float [T, 1, hidden] (where tensor ranks split the tokens, this rank's part of them); after the last
    one what the output layer gets, for all tokens.

    Args:
        model: From `build_model`, or `ShardedOptimizer.model` around it.
        batch: On its device; positions count from 0 in every sequence.
    """
    starts, token_ids = batch.cu_seqlens.to(torch.int32), batch.token_ids
    config: Any = model.config
    missing = -len(token_ids) % config.tensor_model_parallel_size if config.sequence_parallel else 0
    if missing:  # each rank has equally many tokens: a sequence that nobody asks for fills up
        token_ids = nn.functional.pad(token_ids, (0, missing))
        starts = torch.cat([starts, starts[-1:] + missing])
    starts_on_host = starts.to(HOST)
    longest = int(starts_on_host.diff().max())
    token_ids = token_ids.unsqueeze(0)
    states = model(
        input_ids=token_ids,
        position_ids=torch.zeros_like(token_ids),  # rotary positions come from the starts of the sequences
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=starts_on_host,  # what rotary positions read, layer by layer, without waiting for the device
            cu_seqlens_kv_padded=starts_on_host,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        output_processor=_before_output_layer,
        output_processor_context=batch.num_tokens,
    )
    beat()
    return states


def output_weight(model: GPTModel) -> Tensor:
    """The rows of the output layer that the last stage's rank holds: float [vocabulary / tensor ranks, hidden]."""
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )


def values_of(model: Any, states: Tensor) -> Tensor:
    """float32 [n]: what a critic's head makes of states [n, hidden]."""
    weight, bias = model.score.weight.float(), model.score.bias
    return nn.functional.linear(states.float(), weight, None if bias is None else bias.float()).squeeze(-1)


def run_schedule(
    model: nn.Module,
    batches: Sequence[Batch],
    step: Callable[[nn.Module, Batch], tuple[Tensor, Callable[..., Any]]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Takes micro-batches through the pipeline, forward and, unless `forward_only`, backward; gradients stay this rank's own.

    Args:
        model: This rank's stage.
        batches: At least one, equally many on all ranks of a pipeline.
        step: From the stage and a micro-batch to the stage's output and the function that the last stage applies to it: to (loss, count, result), or
            with `forward_only` and an argument `non_loss_data` to the result.
        forward_only: Whether there is no backward pass.

    Returns:
        The results, on the last stage; elsewhere nothing.
    """
    return get_forward_backward_func()(
        forward_step_func=lambda iterator, stage: step(stage, next(iterator)),
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def wrap_model(model: GPTModel) -> DistributedDataParallel:
    """The model with a buffer of float32 gradients, which add up until `reduce_gradients`."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    wrapped.zero_grad_buffer()
    return wrapped


def make_optimizer(model: DistributedDataParallel, options: AdamWOptions) -> Any:
    """Megatron's distributed optimizer over the model: AdamW with float32 weights and moments, each data rank holding its share of them.

    Raises:
        BackendError: Megatron chose another AdamW than torch's.
    """
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=0.0,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        clip_grad=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    (optimizer,) = get_megatron_optimizer(
        config, [model], config_overrides={}, use_gloo_process_groups=False
    ).chained_optimizers
    inner = optimizer.optimizer
    if inner is not None and not isinstance(inner, torch.optim.AdamW):
        raise BackendError(
            f"the optimizer must be torch's AdamW, whose state is saved here, got {type(inner).__name__}; "
            "train in an environment without Transformer Engine and Apex"
        )
    return optimizer


def reduce_gradients(model: DistributedDataParallel) -> None:
    """Sums the gradients over data ranks, and those of a tied embedding over the stages that hold it."""
    finalize_model_grads([model])


def _before_output_layer(*, hidden_states: Tensor, config: TransformerConfig, context: int, **_: Any) -> Tensor:
    """The states of all tokens, of which there are `context`; their gradient is the same on all tensor ranks, and each takes its part of it."""
    if not config.sequence_parallel:
        return hidden_states
    return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)[:context]
