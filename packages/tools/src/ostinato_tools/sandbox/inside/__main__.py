"""Entry point of a worker: `python -s -S -P <this folder> <number of a socket>`."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from inside.warden import main  # pyright: ignore[reportMissingImports] - the name that this package has here

    main(int(sys.argv[1]))
