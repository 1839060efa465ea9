"""python -m graph_trainer is graph-trainer."""

import sys

from graph_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
