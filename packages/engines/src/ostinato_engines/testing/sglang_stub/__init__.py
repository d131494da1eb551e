"""A server that speaks SGLang's native protocol on a machine where SGLang does not run: the embedded engine behind it.

    python -m ostinato_engines.testing.sglang_stub --model-path FOLDER --port N ...

It takes SGLang's arguments, has its endpoints, its forms of answers and errors, its defaults (128 tokens, the model's own
end of text) and its rules: what makes SGLang's scheduler fail an assertion ends this server as well. Its sampling is that
of SGLang with our plugin. `SGLangServer(launcher=[sys.executable, "-m", "ostinato_engines.testing.sglang_stub"])` starts it.
"""
