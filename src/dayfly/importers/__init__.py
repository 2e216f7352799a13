"""Tasks of other formats as folders in Harbor's layout. What a task cannot carry over is refused by name."""

from dayfly.importers.swebench import DEFAULT_IMAGE, Settings, import_swebench, settings, write_predictions
from dayfly.importers.terminal_bench import find_terminal_bench, import_terminal_bench
from dayfly.importers.write import Imported

__all__ = [
    "DEFAULT_IMAGE",
    "Imported",
    "Settings",
    "find_terminal_bench",
    "import_swebench",
    "import_terminal_bench",
    "settings",
    "write_predictions",
]
