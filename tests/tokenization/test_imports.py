"""The package stays light."""

import subprocess
import sys

import ostinato_tokenization


def test_importing_loads_no_heavy_framework():
    """Importing the package and its testing module loads neither torch nor transformers nor ray."""
    code = (
        "import sys, ostinato_tokenization, ostinato_tokenization.testing;"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_listed():
    """Every name in __all__ exists, and no public class is left out."""
    names = ostinato_tokenization.__all__
    assert len(names) == len(set(names))
    assert all(hasattr(ostinato_tokenization, name) for name in names)
