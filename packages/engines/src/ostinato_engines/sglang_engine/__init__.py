"""What `SGLangServer` asks of SGLang: one module per matter. Nothing here imports SGLang but its `plugin`, which runs there."""
