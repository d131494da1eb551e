"""A tokenizer for random models: a word for each id, and a chat template. With it a server has its chat endpoint."""

from pathlib import Path

_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} w3 {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes it into a checkpoint's folder: "w5" is the text of id 5; the end of text is id 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}" if index else "<unk>": index for index in range(vocab_size)}
    model = Tokenizer(models.WordLevel(words, "<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="w2")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
