"""``atom serve`` with Config fields that have no flag: ``python -m tests.helpers.serve_with_fields MODEL [flags]``.

The fields come as JSON in ``CONFIG_FIELDS``.
"""

import json
import os
import sys

from atom import cli
from atom.model_engine.arg_utils import EngineArgs

if __name__ == "__main__":
    create_config = EngineArgs.create_config
    fields = json.loads(os.environ["CONFIG_FIELDS"])
    EngineArgs.create_config = lambda self: create_config(self).replace(**fields)  # type: ignore[method-assign]
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
