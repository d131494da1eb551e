"""The work of `benchmarks.step`: a model with random weights that calls a tool, its tokenizer, prompts, the tool and the reward.

Not a benchmark: `python -m benchmarks.step_task FOLDER SHAPE` writes a shape's files. Both systems train on the same files.

Random weights call no tool and end no turn. So the embeddings, which are the output layer as well, have one direction in common with every
hidden state, and along it the token that ends a turn and the token that is a whole tool call stand out: each position ends the turn, or calls the
tool, with a fixed probability. Turns are then of geometric length, two in three have a call, and all matrices have the shape's own size.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import QWEN3_1_7B, SMOLLM2_135M, sizes

END, CALL = "<|im_end|>", '<tool_call>\n{"name": "lookup", "arguments": {"key": "k"}}\n</tool_call>'
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
LATENCY = "STEP_LATENCY_S"
"""The variable of the environment that says how long a call of the tool takes."""
SHAPES = {"tiny": sizes(512, 64, 2, 2, 2, 32, 192), "135M": SMOLLM2_135M, "1.7B": QWEN3_1_7B}
LLAMAS = ("135M",)
"""The others are Qwen3."""
_COMMON, _DAMPED = 0.1, 1e-4
"""Of all embeddings along the common direction; what is left of what layers add."""
_TOOL = f'''"""The tool of the benchmark: it waits."""

import asyncio
import os

from ostinato_tools import function_tool


@function_tool
async def lookup(key: str) -> str:
    """Look a value up.

    Args:
        key: Of the value.
    """
    await asyncio.sleep(float(os.environ["{LATENCY}"]))
    return f"{{key}} is 17"
'''
_REWARD = '''"""The reward of the benchmark: it differs within a group, and costs nothing."""


async def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A number between 0 and 1 that follows from the answer's length."""
    return (len(solution_str) % 97) / 96
'''
_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- ' ' + tool.function.name }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Work(NamedTuple):
    """What one step does, whichever system does it."""

    prompts: int
    group_size: int
    micro_batch: int
    """Sequences of a forward-backward pass."""
    turn_tokens: int
    """Of a turn, in the mean."""
    max_prompt_tokens: int
    max_response_tokens: int
    latency_s: float
    """Of a call of the tool, in the steps that have one."""
    warm_up: int = 2
    with_latency: int = 3
    without_latency: int = 2

    @property
    def num_trajectories(self) -> int:
        """Of a step."""
        return self.prompts * self.group_size

    @property
    def num_steps(self) -> int:
        """Of a run: the first warm it, the next wait for tools, the last do not."""
        return self.warm_up + self.with_latency + self.without_latency

    def latency_of(self, step: int) -> float:
        """Seconds of a call in a step, which are counted from 1."""
        return self.latency_s if self.warm_up < step <= self.warm_up + self.with_latency else 0.0


WORK = {
    "tiny": Work(2, 4, 4, 12, 128, 160, 0.01, warm_up=1, with_latency=1, without_latency=1),
    "135M": Work(16, 8, 16, 128, 256, 512, 0.03),
    "1.7B": Work(16, 8, 16, 128, 256, 512, 0.03),
}


def question(number: int) -> str:
    """The prompt of a row."""
    return f"Question {number}: what is kept under the key, and what follows from it?"


def make_files(folder: Path, shape: str) -> None:
    """Write a shape's `model`, `rows.parquet`, `tools.py` and `reward.py`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    work = WORK[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(_TOOL)
    (folder / "reward.py").write_text(_REWARD)
    rows = [
        {
            "data_source": "step",
            "prompt": [{"role": "user", "content": question(number)}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(work.prompts * work.num_steps)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    ids = save_tokenizer(folder / "model", SHAPES[shape]["vocab_size"])
    save_model(folder / "model", shape, work.turn_tokens, ids)


def save_tokenizer(folder: Path, vocab_size: int) -> dict[str, int]:
    """A word for every id, so that all that is sampled can be read, and reads as it was sampled; other text is spelled."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in (10, *range(32, 127))]
    entries = [*SPECIAL, CALL, "?", *[letter for letter in letters if letter != "?"]]
    entries += [f" w{number}." for number in range(vocab_size - len(entries))]
    ids = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    call = CALL.replace("{", r"\{").replace("}", r"\}")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{call}| w[0-9]+\.|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIAL[0],
        "unk_token": "?",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return ids


def save_model(folder: Path, shape: str, turn_tokens: int, ids: dict[str, int]) -> None:
    """The shape's random weights, whose turns have `turn_tokens` tokens and two calls in the mean."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = transformers.LlamaConfig if shape in LLAMAS else transformers.Qwen3Config
    config = kind(
        **SHAPES[shape],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[SPECIAL[0]],
    )
    torch.manual_seed(0)
    dtype = torch.float32 if shape == "tiny" else torch.bfloat16
    with torch.device(device), torch.no_grad():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(_DAMPED)
            layer.mlp.down_proj.weight.mul_(_DAMPED)
        embeddings = model.get_input_embeddings().weight
        embeddings.normal_(std=math.sqrt(_COMMON / config.hidden_size**1.5))  # a token is hardly likelier after itself
        embeddings[:, 0] = _COMMON
        words = torch.randint(len(ids) // 2, len(ids), (1, 64))
        hidden = model.model(words).last_hidden_state[0].float()
        others = torch.logsumexp(hidden @ embeddings.float().T, dim=-1).mean()
        for entry, share in ((END, 1 / turn_tokens), (CALL, 2 / turn_tokens)):
            wanted = others + math.log(share / (1 - 3 / turn_tokens))
            embeddings[ids[entry]] = 0.0
            embeddings[ids[entry], 0] = wanted / hidden[:, 0].mean()
    model.save_pretrained(folder)


if __name__ == "__main__":
    make_files(Path(sys.argv[1]), sys.argv[2])
