"""What runs inside the worker process. Only the standard library is imported here.

The parent starts `python -s -S -P inside` without its environment, so nothing of the environment it stands in is imported: no site-packages, no
`.pth` files, no other module of this distribution. One process, the *warden*, stays outside of the sandbox and watches;
its child isolates itself and becomes the *runner*, the interpreter in which the untrusted code lives.
"""
