"""What stands behind `ostinato_engines.vllm_server`: vLLM found, started, told what to sample, and given new weights.

`probe` is the only module that asks vLLM what it has; the others take what it found. `worker` and `exact_filters` run in
vLLM's own processes.
"""
