"""Training with Megatron-core: tensor, pipeline and data parallel, behind `RankBackend`. Needs the extra `megatron`.

`core` alone imports `megatron.core`; which models can be trained how (`shape`) and under which names their tensors stand (`mapping`) is known
without it.
"""
