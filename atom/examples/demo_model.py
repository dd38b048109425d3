"""Put the demo model together and print its path: ``python -m atom.examples.demo_model``."""

import sys

from atom.errors import AtomError
from atom.model_loader.demo import assemble_demo_model


def main() -> int:
    try:
        print(assemble_demo_model())
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
