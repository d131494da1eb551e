"""The nodes `actor_rollout_ref.model` and `.actor`: the policy, its optimizer and its loss.

Pure data: knows no torch. The docstring below a field is what `ostinato config` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ostinato_trainer.config.megatron import MegatronConfig

__all__ = [
    "ActorConfig",
    "FsdpConfig",
    "LossAggMode",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
]

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLLossType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
Beta = Annotated[float, Meta(ge=0, lt=1)]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policy's files (`actor_rollout_ref.model`)."""

    path: str | None = None
    """Folder in the Hugging Face format: config, weights and tokenizer. Must be given to train."""
    chat_template: str | None = None
    """Chat template to use instead of the model's own: the template's text, or the path of a `.jinja` file."""
    lora_rank: Annotated[int, Meta(ge=0)] = 0
    """Rank of low-rank adapters (LoRA) that are trained while the model's own weights stay as they are; 0 trains all weights."""
    lora_alpha: Annotated[float, Meta(gt=0)] = 16.0
    """An adapter's update is scaled by lora_alpha / lora_rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Layers that get adapters: all-linear (all but the output layer), a list of names or their ends, or a regular expression."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Layers that get none, in the same forms."""
    lora_adapter_path: str | None = None
    """Folder of adapters, as peft writes them, to go on from; they decide rank, alpha and layers. The model at `path` stays the reference."""
    use_remove_padding: bool = True
    """Train on sequences without padding where the model's attention can; false pads, with the same numbers."""
    enable_gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work. Needs strategy fsdp2 or
    megatron."""


class OptimConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW and its schedule (`actor_rollout_ref.actor.optim`)."""

    lr: Annotated[float, Meta(ge=0)] = 1e-6
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    """Decoupled weight decay."""
    lr_warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from zero."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine end at zero with the last step."""


class PolicyLossConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which policy loss (`actor_rollout_ref.actor.policy_loss`)."""

    loss_mode: str = "vanilla"
    """Policy loss by name: vanilla (PPO), gspo, cispo, gpg, sapo, or one's own: file.py:function, or the name that it was registered under."""


class FsdpConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How strategy fsdp2 shards the policy (`actor_rollout_ref.actor.fsdp_config`)."""

    param_offload: bool = False
    """Keep weights, gradients and moments in the host's memory and step there; layers come to the device for their pass. For CPUs, nothing."""
    optimizer_offload: bool = False
    """Keep the moments in the host's memory between steps."""
    reshard_after_forward: bool = True
    """Give a layer's weights back after its forward pass and gather them again for the backward pass; false keeps them, for speed."""
    ulysses_sequence_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Ranks that share the tokens of a pass (Ulysses): sequences may be as many times longer. Must divide the ranks and the attention heads."""


class ActorConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The update of the policy (`actor_rollout_ref.actor`)."""

    strategy: Literal["local", "fsdp2", "megatron"] = "local"
    """Training backend: local is this process and one device; fsdp2 (sharded) and megatron (tensor and pipeline parallel) have a rank on each of
    trainer.nnodes x trainer.n_gpus_per_node devices."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """Read by strategy fsdp2."""
    megatron: MegatronConfig = MegatronConfig()
    """Read by strategy megatron."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; weights and moments are kept in float32."""
    use_torch_compile: bool | None = None
    """Let torch.compile fuse the layers of policy and critic, with strategy local or fsdp2: half a minute at the start, faster steps. By default
    on CUDA where the compiler works."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    grad_clip: Annotated[float, Meta(gt=0)] = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it."""
    ppo_mini_batch_size: Annotated[int, Meta(ge=1)] = 256
    """Prompts in one optimizer step; times `actor_rollout_ref.rollout.n` it is the number of trajectories."""
    ppo_micro_batch_size_per_gpu: Annotated[int, Meta(ge=1)] | None = None
    """Sequences in one forward-backward pass; null takes the whole mini-batch. Unread if use_dynamic_bsz."""
    use_dynamic_bsz: bool = False
    """Fill forward-backward passes by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: Annotated[int, Meta(ge=1)] = 16384
    """Most tokens in one pass that computes log-probabilities, and of the update while use_dynamic_bsz is true; of each rank that shares them."""
    ppo_epochs: Annotated[int, Meta(ge=1)] = 1
    """Passes over the batch of one step."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The policy loss."""
    clip_ratio: Annotated[float, Meta(gt=0)] = 0.2
    """PPO clip range on both sides, where clip_ratio_low or clip_ratio_high is null."""
    clip_ratio_low: Annotated[float, Meta(gt=0)] | None = None
    """Clip range below one; null takes clip_ratio."""
    clip_ratio_high: Annotated[float, Meta(gt=0)] | None = None
    """Clip range above one; null takes clip_ratio."""
    clip_ratio_c: Annotated[float, Meta(gt=1)] = 3.0
    """Bound of the dual clip for negative advantages."""
    tau_pos: Annotated[float, Meta(gt=0)] = 1.0
    """Steepness of sapo's gate where the advantage is positive."""
    tau_neg: Annotated[float, Meta(gt=0)] = 1.05
    """Steepness of sapo's gate elsewhere."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; sequences are trajectories, denominators those of the whole mini-batch."""
    use_kl_loss: bool = False
    """Add the divergence from the reference policy, a frozen copy of the starting weights, to the loss."""
    kl_loss_coef: Annotated[float, Meta(ge=0)] = 0.001
    """Weight of that divergence."""
    kl_loss_type: KLLossType = "low_var_kl"
    """Estimator of the divergence: k1 (kl), abs, k2 (mse) or k3 (low_var_kl); with a + behind it, with the gradient of k2."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Report the entropy of the policy even where entropy_coeff is 0, at the cost of computing it."""

    @property
    def ranks_per_pass(self) -> int:
        """How many ranks share the tokens of a pass, each with a budget of its own."""
        return self.fsdp_config.ulysses_sequence_parallel_size if self.strategy == "fsdp2" else 1
